// What every layer computes with: vectors of 16 samples, the memory they lie in, and the way into it and out of it.
//
// The batch lies innermost: LANES samples are one vector, V vectors (1 or 2) of them a chunk, and a value of C channels
// and H x W pixels is chunks x [C][H][W][V] vectors. So every loop runs over whole vectors whatever the shape of a
// layer, and the same formula serves a convolution of 5 x 5 and one of 1 x 1. Lanes beyond the batch hold samples of
// zeros, whose gradient is zero.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace lcfl {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));  // anywhere in a flat vector
typedef int32_t Mask __attribute__((vector_size(64)));

// How many sums are held in registers at once: as many as there are registers, less a few for factors.
#ifdef __AVX512F__
constexpr int SUMS = 24;
#else
constexpr int SUMS = 6;
#endif

constexpr int NEAR = 4096;  // vectors, 256 KiB: what stays in the second cache while it is read again and again

inline Vec fill(float value) { return Vec{} + value; }

inline float total(Vec values) {  // by halves
    Vec8 eight[2];
    std::memcpy(eight, &values, sizeof values);
    const Vec8 folded = eight[0] + eight[1];
    Vec4 four[2];
    std::memcpy(four, &folded, sizeof folded);
    const Vec4 last = four[0] + four[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

class Memory {  // of vectors, that only grows
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory(Memory&& other) noexcept : start_(other.start_), size_(other.size_) { other.start_ = nullptr; }
    ~Memory() { std::free(start_); }
    Vec* of(int64_t size) {
        if (size > size_) {
            std::free(start_);
            start_ = static_cast<Vec*>(std::aligned_alloc(64, size * sizeof(Vec)));
            if (!start_) throw std::bad_alloc();
            size_ = size;
            std::memset(static_cast<void*>(start_), 0, size * sizeof(Vec));
        }
        return start_;
    }
    Vec* get() const { return start_; }

  private:
    Vec* start_ = nullptr;
    int64_t size_ = 0;
};

struct Batch {  // how many samples there are, and the chunks that they lie in
    explicit Batch(int64_t number)
        : samples(number), V(number <= LANES ? 1 : 2), chunks(int((number + lanes() - 1) / lanes())) {}
    int lanes() const { return V * LANES; }
    int in_chunk(int chunk) const { return int(std::min<int64_t>(lanes(), samples - int64_t(chunk) * lanes())); }

    Vec holds(int chunk, int v) const {  // 1 in lanes with a sample, 0 beyond
        Vec result;
        for (int lane = 0; lane < LANES; ++lane) result[lane] = v * LANES + lane < in_chunk(chunk);
        return result;
    }

    int64_t samples;
    int V, chunks;
};

// ---- Between the batch innermost and the batch outermost ----

#ifdef __clang__
#define LCFL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LCFL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#endif

// Rows become columns: four times every row is interleaved with the one eight rows below.
inline void transpose(Vec (&rows)[LANES]) {
    for (int stage = 0; stage < 4; ++stage) {
        Vec woven[LANES];
        for (int r = 0; r < LANES / 2; ++r) {
            const Vec a = rows[r], b = rows[r + LANES / 2];
            woven[2 * r] = LCFL_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            woven[2 * r + 1] = LCFL_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::copy_n(woven, LANES, rows);
    }
}
#undef LCFL_SHUFFLE

// [size][V LANES] -> [V LANES][row], where row is a multiple of LANES; what lies beyond size in a row is of no account.
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

// [samples][size] -> [size][V LANES], with zeros for the lanes that have no sample.
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
