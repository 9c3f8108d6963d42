// What every layer computes with: vectors of samples, their memory, and how samples get into it and out of it.
//
// The batch is the innermost dimension: LANES samples are one vector, V vectors (1 or 2) are a chunk, and a value of C
// channels and H x W pixels is chunks x [C][H][W][V] vectors. So every loop runs over whole vectors, whatever the shape
// of a layer is, and the same code serves a convolution of 5 x 5 and one of 1 x 1. Lanes beyond the batch hold zeros
// in the input. Every layer must keep them finite, and they have a gradient of zero.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace lcfl {

// Vectors are as wide as the machine's. For wider vectors, compilers make code that goes through memory and is tens of
// times slower.
#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif
constexpr int SUMS = REGISTERS / 4 * 3;  // held in registers at once; the other registers are for factors

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float Loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));  // unaligned
typedef int32_t Mask __attribute__((vector_size(LANES * sizeof(int32_t))));

constexpr int NEAR = 512 * 1024 / sizeof(Vec);  // vectors that stay in the second-level cache while they are reused

inline Vec loaded(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline Vec fill(float value) { return value - Vec{}; }  // `Vec{} + value` stays an addition: 0 + -0 is not -0

// Keeps a value in a register. Without this, gcc reads a factor from memory again for every product, and the reads take
// longer than the products. It also copies several vectors in pieces of 16 bytes, and reading the pieces as one vector
// is slow.
inline Vec held(Vec value) {
#if defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#endif
    return value;
}

// sum[a][b] += left(a) right(b). Reads every factor once and holds all factors of the shorter side.
template <int A, int B, class Left, class Right>
inline void add_products(Vec (&sum)[A][B], Left left, Right right) {
    Vec side[A < B ? A : B];
    if constexpr (A < B) {
        for (int a = 0; a < A; ++a) side[a] = held(left(a));
        for (int b = 0; b < B; ++b) {
            const Vec factor = held(right(b));
            for (int a = 0; a < A; ++a) sum[a][b] += side[a] * factor;
        }
    } else {
        for (int b = 0; b < B; ++b) side[b] = held(right(b));
        for (int a = 0; a < A; ++a) {
            const Vec factor = held(left(a));
            for (int b = 0; b < B; ++b) sum[a][b] += factor * side[b];
        }
        // Else gcc rounds each product before it adds it, on some processors and in a loop with a single sum alone.
        if constexpr (A * B == 1) sum[0][0] = held(sum[0][0]);
    }
}

// Returns the lanes with the numbers `from`. Those of a come first, then those of b.
template <int... from>
Vec shuffled(Vec a, Vec b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, from...);
#else
    return __builtin_shuffle(a, b, (Mask){from...});
#endif
}

// Splits a and b into groups of 2 HALF lanes and adds the second half of each group to the first. Returns the sums of
// a, then those of b.
template <int HALF, int... lane>
inline __attribute__((always_inline)) Vec folded(Vec a, Vec b, std::integer_sequence<int, lane...>) {
    constexpr int ROWS = LANES / 2 / HALF;  // sums of HALF lanes in a
    constexpr auto from = [](int at) { return at / HALF / ROWS * LANES + at / HALF % ROWS * 2 * HALF + at % HALF; };
    return shuffled<from(lane)...>(a, b) + shuffled<from(lane) + HALF...>(a, b);
}

// Returns the totals of N vectors, at most LANES. Adds one half of the lanes to the other, repeatedly.
template <int N, int HALF = LANES / 2>
inline __attribute__((always_inline)) Vec totals(const Vec* values) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
    Vec half[(N + 1) / 2];
    for (int i = 0; i < N; i += 2) half[i / 2] = folded<HALF>(values[i], values[std::min(i + 1, N - 1)], lanes);
    if constexpr (HALF > 1)
        return totals<(N + 1) / 2, HALF / 2>(half);
    else
        return half[0];
}

template <int N>
inline __attribute__((always_inline)) void totals_of(const Vec* values, float* result) {  // of N vectors
    constexpr int NOW = std::min(N, LANES);
    const Vec found = totals<NOW>(values);
    std::memcpy(result, &found, NOW * sizeof(float));
    if constexpr (N > NOW) totals_of<N - NOW>(values + NOW, result + NOW);
}

inline float total(Vec values) { return totals<1>(&values)[0]; }

struct Span {
    int begin, end;
    int size() const { return end - begin; }
};

class Memory {  // for vectors; it only grows
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory(Memory&& other) noexcept
        : start_(std::exchange(other.start_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    ~Memory() { std::free(start_); }
    Vec* of(int64_t size) {
        if (size > size_) {
            std::free(start_);
            size_ = 0;
            start_ = static_cast<Vec*>(std::aligned_alloc(sizeof(Vec), size * sizeof(Vec)));
            if (!start_) throw std::bad_alloc();
            size_ = size;
            std::memset(static_cast<void*>(start_), 0, size * sizeof(Vec));
        }
        return start_;
    }
    float* floats(int64_t size) { return reinterpret_cast<float*>(of((size + LANES - 1) / LANES)); }
    Vec* get() const { return start_; }

  private:
    Vec* start_ = nullptr;
    int64_t size_ = 0;
};

template <int... lane>
Mask numbered(std::integer_sequence<int, lane...>) {
    return Mask{lane...};
}

struct Batch {  // the number of samples, and their chunks
    explicit Batch(int64_t number)
        : samples(number), V(number <= LANES ? 1 : 2), chunks(int((number + lanes() - 1) / lanes())) {}
    int lanes() const { return V * LANES; }
    int64_t whole_lanes() const { return int64_t(chunks) * lanes(); }
    int in_chunk(int chunk) const { return int(std::min<int64_t>(lanes(), samples - int64_t(chunk) * lanes())); }

    Vec holds(int chunk, int v) const {  // 1 in lanes with a sample, 0 in the others
        return numbered(std::make_integer_sequence<int, LANES>()) < in_chunk(chunk) - v * LANES ? fill(1) : Vec{};
    }

    int64_t samples;
    int V, chunks;
};

// ---- Conversion between the batch as the innermost and as the outermost dimension ----

// Returns a0 b0 a1 b1 ..., beginning at lane `from`.
template <int from, int... lane>
Vec weave(Vec a, Vec b, std::integer_sequence<int, lane...>) {
    return shuffled<(from + lane / 2 + lane % 2 * LANES)...>(a, b);
}

// Transposes in log2(LANES) stages. Each stage interleaves every row with the row LANES / 2 rows below it.
inline void transpose(Vec (&rows)[LANES]) {
    constexpr std::make_integer_sequence<int, LANES> lanes;
    for (int stage = 1; stage < LANES; stage *= 2) {
        Vec woven[LANES];
        for (int r = 0; r < LANES / 2; ++r) {
            const Vec a = rows[r], b = rows[r + LANES / 2];
            woven[2 * r] = weave<0>(a, b, lanes);
            woven[2 * r + 1] = weave<LANES / 2>(a, b, lanes);
        }
        std::copy_n(woven, LANES, rows);
    }
}

// [size][V LANES] -> [V LANES][row], where row is a multiple of LANES. Values beyond size in a row are not used.
inline void to_outermost(const Vec* in, int64_t size, int V, int64_t row, float* out) {
    for (int64_t begin = 0; begin < size; begin += LANES)
        for (int v = 0; v < V; ++v) {
            Vec rows[LANES] = {};
            for (int64_t i = 0; i < std::min<int64_t>(LANES, size - begin); ++i) rows[i] = in[(begin + i) * V + v];
            transpose(rows);
            for (int lane = 0; lane < LANES; ++lane)
                *reinterpret_cast<Loose*>(out + (v * LANES + lane) * row + begin) = rows[lane];
        }
}

// [samples][size] -> [size][V LANES], with zeros in the lanes that have no sample.
inline void to_innermost(const float* in, int64_t size, int V, int samples, Vec* out) {
    for (int64_t begin = 0; begin < size; begin += LANES) {
        const int count = int(std::min<int64_t>(LANES, size - begin));
        for (int v = 0; v < V; ++v) {
            Vec rows[LANES] = {};
            for (int lane = 0; lane < LANES && v * LANES + lane < samples; ++lane) {
                const float* from = in + (v * LANES + lane) * size + begin;
                if (count == LANES)
                    rows[lane] = *reinterpret_cast<const Loose*>(from);
                else
                    std::memcpy(&rows[lane], from, count * sizeof(float));
            }
            transpose(rows);
            for (int i = 0; i < count; ++i) out[(begin + i) * V + v] = rows[i];
        }
    }
}

}  // namespace lcfl
