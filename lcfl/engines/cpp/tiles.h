// Products of tiles, with factors in bfloat16 and sums in float32:
//
//     c[m][n] += sum over k of a[m][k] b[k][n]      m, n < 16, k < 32
//
// The right factor is stored as [k / 2][n][2]. Intel's matrix unit (AMX) has tiles as registers, and one instruction
// multiplies two of them. With AVX512-bf16 alone, an instruction adds one pair of products to each lane of a vector.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#include <immintrin.h>
#define LCFL_TILES 1
#endif
#if defined(LCFL_TILES) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define LCFL_MATRIX_UNIT 1
#endif

namespace lcfl {

#ifdef LCFL_TILES

constexpr int SIDE = 16, DEPTH = 32;  // of a tile: rows or columns, and factors of a sum

struct Tile {  // rows of 64 bytes: [16][32] factors of one side, or [16][16] sums
    Vec rows[SIDE];
};

struct Sums {  // where up to 2 x 2 tiles of sums are
    Vec *first, *beside, *below, *diagonal;
    int64_t row = 1;  // vectors from one row of a tile to the next
    Vec* at(int m, int n) const { return m == 0 ? n == 0 ? first : beside : n == 0 ? below : diagonal; }
};

// Returns the first `count` numbers, at most a vector, and zeros in the other lanes.
inline Vec some(const float* from, int64_t count) {
    return (Vec)_mm512_maskz_loadu_ps((1 << std::clamp<int64_t>(count, 0, LANES)) - 1, from);
}

// Returns the values of a and then those of b in bfloat16.
inline Vec joined(Vec a, Vec b) { return (Vec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

// Returns a0 b0 a1 b1 ... in bfloat16.
inline Vec paired(Vec a, Vec b) {
    alignas(64) static constexpr uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Vec)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)joined(a, b));
}

// `accumulate` adds products to M x N tiles of sums. It reads the sums from a place, or begins with zeros if that is
// empty, and writes them to another. `factors` calls a function with the factors of each product: left ones for the
// upper and the lower sums, right ones for the left and the right sums, and the pair of factors from which on the left
// ones are zeros (AMX multiplies those, too). The rows of a right factor are `row` vectors apart, and it may begin at
// any number.

#ifdef LCFL_MATRIX_UNIT

// Returns whether the system lets this process use the tiles.
inline bool has_tiles() {
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return allowed;
}

class TilesInUse {  // of this thread, while it uses them
  public:
    explicit TilesInUse(bool used) : used_(used) {
        if (!used) return;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        std::fill_n(config.row_bytes, 8, 64), std::fill_n(config.rows, 8, SIDE);
        asm volatile("" ::"r"(&config) : "memory");  // gcc 12 believes that only its first bytes are read
        _tile_loadconfig(&config);
    }
    TilesInUse(const TilesInUse&) = delete;
    ~TilesInUse() {
        if (used_) _tile_release();
    }

  private:
    const bool used_;
};

template <int M, int N>
inline void load(const Sums& from) {
    asm volatile("" ::: "memory");  // the compiler does not know that a tile is read from memory
    if (!from.first) {
        _tile_zero(0);
        if constexpr (N == 2) _tile_zero(1);
        if constexpr (M == 2) _tile_zero(2);
        if constexpr (M == 2 && N == 2) _tile_zero(3);
        return;
    }
    const int64_t row = from.row * sizeof(Vec);
    _tile_loadd(0, from.first, row);
    if constexpr (N == 2) _tile_loadd(1, from.beside, row);
    if constexpr (M == 2) _tile_loadd(2, from.below, row);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, from.diagonal, row);
}

template <int M, int N>
inline void store(const Sums& to) {
    const int64_t row = to.row * sizeof(Vec);
    _tile_stored(0, to.first, row);
    if constexpr (N == 2) _tile_stored(1, to.beside, row);
    if constexpr (M == 2) _tile_stored(2, to.below, row);
    if constexpr (M == 2 && N == 2) _tile_stored(3, to.diagonal, row);
}

template <int M, int N>
inline void multiply(const Tile* a, const Tile* below, const void* b, const void* beside, int64_t row) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, row);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
        _tile_loadd(7, beside, row);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
        _tile_loadd(5, below, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

template <int M, int N, class Factors>
inline void accumulate(const Sums& from, const Sums& to, int64_t row, Factors factors) {
    load<M, N>(from);
    factors([=](const Tile* a, const Tile* below, const void* b, const void* beside, int) {
        multiply<M, N>(a, below, b, beside, row * sizeof(Vec));
    });
    store<M, N>(to);
}

#else

inline bool has_tiles() { return true; }

// sum[m][n] += sum over pairs of left[m][pair] right[pair][n], of both factors of a pair
template <int ROWS, int N>
inline void multiply(Vec (&sum)[ROWS][N], const Vec* left, const void* const (&right)[2], int64_t row, int pairs) {
    for (int pair = 0; pair < pairs; ++pair) {
        Vec columns[N];
        for (int n = 0; n < N; ++n) columns[n] = held(loaded(static_cast<const float*>(right[n]) + pair * row * LANES));
        for (int m = 0; m < ROWS; ++m) {
            const Vec factor = held((Vec)_mm512_set1_ps(reinterpret_cast<const float*>(left + m)[pair]));
            for (int n = 0; n < N; ++n)
                sum[m][n] = (Vec)_mm512_dpbf16_ps((__m512)sum[m][n], (__m512bh)columns[n], (__m512bh)factor);
        }
    }
}

// Goes through the factors once for each 16 vectors of sums, which stay in registers.
template <int M, int N, class Factors>
inline void accumulate(const Sums& from, const Sums& to, int64_t row, Factors factors) {
    constexpr int ROWS = SIDE / N;
    for (int m = 0; m < N * M; ++m) {
        const int first = m % N * ROWS;
        Vec sum[ROWS][N];
        for (int r = 0; r < ROWS; ++r)
            for (int n = 0; n < N; ++n)
                sum[r][n] = from.first ? held(from.at(m / N, n)[(first + r) * from.row]) : Vec{};
        factors([&](const Tile* a, const Tile* below, const void* b, const void* beside, int pairs) {
            multiply(sum, (m < N ? a : below)->rows + first, {b, beside}, row, pairs);
        });
        for (int r = 0; r < ROWS; ++r)
            for (int n = 0; n < N; ++n) to.at(m / N, n)[(first + r) * to.row] = held(sum[r][n]);
    }
}

#endif

#endif

#ifndef LCFL_MATRIX_UNIT

struct TilesInUse {
    explicit TilesInUse(bool) {}
};

#endif

}  // namespace lcfl
