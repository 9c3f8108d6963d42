// Convolutions and linear layers with factors in bfloat16 and sums in float32, by the matrix unit of Intel processors
// (AMX). Its registers are tiles, and one instruction multiplies two of them:
//
//     c[m][n] += sum over k of a[m][k] b[k][n]      m, n < 16, k < 32
//
// Its right factor is stored as [k / 2][n][2]. For an output, k counts input channels, m output channels and n samples,
// and the products of all taps are added up in one tile. For the gradient of the weights, k counts samples, and n input
// channels.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <vector>

#include "correlation.h"
#include "descent.h"
#include "vectors.h"
#include "winograd.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define LCFL_MATRIX_UNIT 1
#endif

namespace lcfl {

#ifdef LCFL_MATRIX_UNIT

constexpr int SIDE = 16, DEPTH = 32;  // of a tile: rows or columns, and factors of a sum

struct Tile {  // rows of 64 bytes: [16][32] factors of one side, or [16][16] sums
    Vec rows[SIDE];
    float sum(int m, int n) const { return rows[m][n]; }
};

// Returns the values of a and then those of b in bfloat16.
inline Vec joined(Vec a, Vec b) { return (Vec)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a); }

// Returns a0 b0 a1 b1 ... in bfloat16.
inline Vec paired(Vec a, Vec b) {
    alignas(64) static constexpr uint16_t order[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                     8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return (Vec)_mm512_permutexvar_epi16(_mm512_load_si512(order), (__m512i)joined(a, b));
}

// c += a b for M x N tiles of sums, which are in the registers. `below` and `beside` are the second factors.
template <int M, int N>
inline void multiply(const Tile* a, const Tile* below, const void* b, const void* beside) {
    _tile_loadd(4, a, 64);
    _tile_loadd(6, b, 64);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (N == 2) {
        _tile_loadd(7, beside, 64);
        _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (M == 2) {
        _tile_loadd(5, below, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (N == 2) _tile_dpbf16ps(3, 5, 7);
    }
}

// Calls `act` with the numbers of tiles, 1 or 2, as types.
template <class Act>
inline void with_numbers(bool two_m, bool two_n, Act act) {
    const std::integral_constant<int, 1> one;
    const std::integral_constant<int, 2> two;
    if (two_m)
        two_n ? act(two, two) : act(two, one);
    else
        two_n ? act(one, two) : act(one, one);
}

template <int M, int N>
inline void load_sums(const void* a, const void* b, const void* c, const void* d, int64_t row = 64) {
    asm volatile("" ::: "memory");  // the compiler does not know that a tile is read from memory
    _tile_loadd(0, a, row);
    if constexpr (N == 2) _tile_loadd(1, b, row);
    if constexpr (M == 2) _tile_loadd(2, c, row);
    if constexpr (M == 2 && N == 2) _tile_loadd(3, d, row);
}

template <int M, int N>
inline void store_sums(void* a, void* b, void* c, void* d, int64_t row = 64) {
    _tile_stored(0, a, row);
    if constexpr (N == 2) _tile_stored(1, b, row);
    if constexpr (M == 2) _tile_stored(2, c, row);
    if constexpr (M == 2 && N == 2) _tile_stored(3, d, row);
}

class MatrixUnit {
  public:
    // Returns whether the processor has the unit and the system lets this process use it.
    static bool exists() {
        static const bool allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
        return allowed;
    }

    // With fewer channels, most of a tile would be zeros.
    static bool suits(int channels, int out_channels) { return std::min(channels, out_channels) >= SIDE; }

    class InUse {  // this thread's tiles
      public:
        explicit InUse(bool used) : used_(used) {
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
        InUse(const InUse&) = delete;
        ~InUse() {
            if (used_) _tile_release();
        }

      private:
        const bool used_;
    };

    // Computes whole values, or with `more`, adds to them. `bias` may be null.
    void correlate(const Batch& batch, const Window& at, const Kernels& kernels, const float* bias, bool more,
                   const Vec* in, int64_t in_chunk, Vec* out, int64_t out_chunk) {
        const int tops = tiles_in(at.out_channels), depth = whole(at.channels, DEPTH) / DEPTH;
        const int units = at.out_width * batch.V;
        const int64_t size = int64_t(depth) * at.height * at.width * batch.V;
        Tile* inputs = tiles(inputs_, size * batch.chunks);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            pair_channels(at, batch.V, in + chunk * in_chunk, inputs + chunk * size);
        for (int top = 0; top < tops; top += 2) {
            pack_kernels(kernels, at, top, std::min(2, tops - top));
            for (int chunk = 0; chunk < batch.chunks; ++chunk) {
                fill_biases(batch, chunk, at, top, bias);
                // The last two of an odd number of units overlap those before them, which must not be added twice.
                with_numbers(top + 1 < tops, units > 1 && !(more && units % 2), [&](auto m, auto n) {
                    rows_of<m, n>(at, batch.V, top, more, inputs + chunk * size, out + chunk * out_chunk);
                });
            }
        }
    }

    struct Input {  // of a phase, with its padding
        const Phase& phase;
        const Vec* first;
    };

    // Gives `receiver` the gradient of the weights [O][kernel_size].
    void weigh(const Batch& batch, const std::vector<Input>& phases, int kernel_size, const Vec* slope,
               int64_t slope_chunk, int64_t weight, Receiver& receiver) {
        const Window& any = phases[0].phase.at;
        const int tops = tiles_in(any.out_channels), sides = tiles_in(any.channels), V = batch.V;
        const int band = std::max(1, BAND / slope_units(any, V));
        Tile* slopes = tiles(slopes_, int64_t(tops) * any.out_height * slope_units(any, V));
        const int64_t size = int64_t(tops) * sides * kernel_size / any.channels;
        Tile* sums = tiles(sums_, size);
        std::memset(static_cast<void*>(sums), 0, sizeof(Tile) * size);
        for (int chunk = 0; chunk < batch.chunks; ++chunk, slope += slope_chunk) {
            join_slopes(any, V, slope, slopes);
            Tile* sum = sums;
            for (const Input& each : phases) {
                const Window& at = each.phase.at;
                Vec* inputs = inputs_.of(sides * plane_of_pairs(at, V));
                pair_samples(at, V, each.first + chunk * at.size() * V, inputs);
                for (int y = 0; y < at.out_height; y += band)
                    for (int top = 0; top < tops; top += 2)
                        for (int side = 0; side < sides; side += 2)
                            with_numbers(top + 1 < tops, side + 1 < sides, [&](auto m, auto n) {
                                const Span rows{y, std::min(y + band, at.out_height)};
                                weigh_rows<m, n>(at, V, rows, top, side, slopes, inputs, sum);
                            });
                sum += int64_t(tops) * sides * at.kernel_h * at.kernel_w;
            }
        }
        float* row = row_.floats(kernel_size);
        for (int o = 0; o < any.out_channels; ++o) {
            const Tile* sum = sums;
            for (const Input& each : phases) {
                const int area = each.phase.at.kernel_h * each.phase.at.kernel_w;
                const Tile* of_top = sum + int64_t(o / SIDE) * sides * area;
                for (int c = 0; c < any.channels; ++c)
                    for (int tap = 0; tap < area; ++tap)
                        row[each.phase.taps[c * area + tap].number] =
                            of_top[c / SIDE * area + tap].sum(o % SIDE, c % SIDE);
                sum += int64_t(tops) * sides * area;
            }
            receiver.take(weight + int64_t(o) * kernel_size, kernel_size, row);
        }
    }

    // The window of a linear layer, whose output `correlate` computes.
    static Window linear(int inputs, int outputs) {
        return {inputs, 1, 1, 1, 1, outputs, 1, 1, {0, 1}, {0, 1}, Way::MATRIX_UNIT};
    }

    // back[i] = sum over o of w[o][i] slope[o]. Goes through the weights in the order of memory.
    void connect_back(const Batch& batch, const float* weight, int inputs, int outputs, const Vec* slope, Vec* back) {
        const int sides = tiles_in(inputs), depth = whole(outputs, DEPTH) / DEPTH, V = batch.V;
        Tile* slopes = tiles(slopes_, int64_t(depth) * V * batch.chunks);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            turn_slopes(outputs, V, slope + int64_t(chunk) * outputs * V, slopes + int64_t(chunk) * depth * V);
        const int64_t size = int64_t(sides) * V * batch.chunks;
        Tile* sums = tiles(sums_, size);
        std::memset(static_cast<void*>(sums), 0, sizeof(Tile) * size);
        for (int d = 0; d < depth; ++d)
            for (int side = 0; side < sides; side += 2) {
                Tile weights[2];
                const int count = std::min(2, sides - side);
                for (int n = 0; n < count; ++n) {
                    const int i = (side + n) * SIDE;
                    const __mmask16 mask = (1 << std::min(SIDE, inputs - i)) - 1;
                    for (int pair = 0; pair < SIDE; ++pair) {
                        const int o = d * DEPTH + 2 * pair;
                        const auto read = [&](int o) -> Vec {
                            return o < outputs ? (Vec)_mm512_maskz_loadu_ps(mask, weight + int64_t(o) * inputs + i)
                                               : Vec{};
                        };
                        weights[n].rows[pair] = paired(read(o), read(o + 1));
                    }
                }
                with_numbers(V == 2, count == 2, [&](auto m, auto n) {
                    for (int chunk = 0; chunk < batch.chunks; ++chunk)
                        back_of<m, n>(slopes + (int64_t(chunk) * depth + d) * V, weights,
                                      sums + int64_t(chunk) * V * sides + side, sides);
                });
            }
        for (int chunk = 0; chunk < batch.chunks; ++chunk, back += int64_t(inputs) * V)
            for (int v = 0; v < V; ++v)
                for (int side = 0; side < sides; ++side, ++sums) {
                    transpose(sums->rows);
                    for (int n = 0; n < std::min(SIDE, inputs - side * SIDE); ++n)
                        back[(side * SIDE + n) * V + v] = sums->rows[n];
                }
    }

    // Gives `receiver` the gradient of a linear layer's weights, in runs that stay in the second-level cache.
    void outer(const Batch& batch, const Vec* in, const Vec* slope, int inputs, int outputs, int64_t weight,
               Receiver& receiver) {
        constexpr int RUN = 1024, ROW = RUN + LANES;  // a power of two would crowd a few sets of the cache
        const Window at = linear(inputs, outputs);
        const int tops = tiles_in(outputs), sides = tiles_in(inputs), V = batch.V;
        const int64_t plane = plane_of_pairs(at, V);
        Tile* slopes = tiles(slopes_, int64_t(tops) * batch.chunks);
        Vec* pairs = inputs_.of(sides * plane * batch.chunks);
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            join_slopes(at, V, slope + int64_t(chunk) * outputs * V, slopes + int64_t(chunk) * tops);
            pair_samples(at, V, in + int64_t(chunk) * inputs * V, pairs + chunk * sides * plane);
        }
        float* found = row_.floats(SIDE * ROW);
        for (int begin = 0; begin < inputs; begin += RUN)
            for (int top = 0; top < tops; ++top) {
                for (int side = begin / SIDE; side < std::min((begin + RUN) / SIDE, sides); ++side) {
                    _tile_zero(0);
                    asm volatile("" ::: "memory");
                    for (int chunk = 0; chunk < batch.chunks; ++chunk)
                        multiply<1, 1>(slopes + int64_t(chunk) * tops + top, nullptr,
                                       pairs + (int64_t(chunk) * sides + side) * plane, nullptr);
                    _tile_stored(0, found + side * SIDE - begin, ROW * sizeof(float));
                }
                for (int m = 0; m < std::min(SIDE, outputs - top * SIDE); ++m)
                    receiver.take(weight + int64_t(top * SIDE + m) * inputs + begin, std::min(RUN, inputs - begin),
                                  found + m * ROW);
            }
    }

  private:
    static constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static constexpr int BAND = 16;  // tiles of slopes that stay in the first-level cache

    static int tiles_in(int channels) { return whole(channels, SIDE) / SIDE; }
    static Tile* tiles(Memory& memory, int64_t number) { return reinterpret_cast<Tile*>(memory.of(number * SIDE)); }

    // ---- Outputs. A unit is a vector of a row, and a tile of inputs has 32 channels of it. ----

    // kernels_: [tops from `first` on][input channels / 32][taps] tiles of [16][32] weights
    void pack_kernels(const Kernels& kernels, const Window& at, int first, int tops) {
        const int depth = whole(at.channels, DEPTH) / DEPTH;
        const int area = at.kernel_h * at.kernel_w;
        const int step = kernels.turned ? at.out_channels * area : area;  // from one input channel to the next
        const int64_t row = kernels.turned ? area : at.channels * area;
        const __m512i lanes = _mm512_mullo_epi32(
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(step));
        Tile* to = tiles(kernels_, int64_t(tops) * depth * area);
        for (int top = first; top < first + tops; ++top)
            for (int d = 0; d < depth; ++d, to += area)
                for (int m = 0; m < SIDE; ++m) {
                    const int o = top * SIDE + m;
                    const auto read = [&](int channel, int tap) -> Vec {
                        const int count = o < at.out_channels ? std::clamp(at.channels - channel, 0, LANES) : 0;
                        if (count == 0) return Vec{};
                        const __mmask16 mask = (1 << count) - 1;
                        const float* from = kernels.first + o * row + int64_t(channel) * step;
                        if (step == 1) return (Vec)_mm512_maskz_loadu_ps(mask, from);
                        return (Vec)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, lanes,
                                                             from + (kernels.turned ? area - 1 - tap : tap), 4);
                    };
                    for (int tap = 0; tap < area; ++tap)
                        to[tap].rows[m] = joined(read(d * DEPTH, tap), read(d * DEPTH + LANES, tap));
                }
    }

    // to: [input channels / 32][height][width][V] tiles of [16 pairs][16 samples][2]
    static void pair_channels(const Window& at, int V, const Vec* in, Tile* to) {
        const int64_t plane = int64_t(at.height) * at.width * V;
        const int depth = whole(at.channels, DEPTH) / DEPTH;
        for (int d = 0; d < depth; ++d, to += plane)
            for (int pair = 0; pair < SIDE; ++pair) {
                const int c = d * DEPTH + 2 * pair;
                const Vec *even = in + c * plane, *odd = even + plane;
                for (int64_t i = 0; i < plane; ++i)
                    to[i].rows[pair] = c < at.channels ? paired(even[i], c + 1 < at.channels ? odd[i] : Vec{}) : Vec{};
            }
    }

    // biases_: [two tops][V] tiles of sums, with zeros in the lanes that have no sample
    void fill_biases(const Batch& batch, int chunk, const Window& at, int top, const float* bias) {
        Tile* to = tiles(biases_, 2 * batch.V);
        for (int v = 0; v < batch.V; ++v) {
            const Vec holds = batch.holds(chunk, v);
            for (int m = 0; m < 2 * SIDE; ++m) {
                const int o = top * SIDE + m;
                to[m / SIDE * batch.V + v].rows[m % SIDE] = bias && o < at.out_channels ? bias[o] * holds : Vec{};
            }
        }
    }

    // Computes M x 16 channels of all rows, N units at a time. The last units overlap those before them.
    template <int M, int N>
    void rows_of(const Window& at, int V, int top, bool more, const Tile* inputs, Vec* out) {
        const int units = at.out_width * V, area = at.kernel_h * at.kernel_w, depth = whole(at.channels, DEPTH) / DEPTH;
        const int64_t plane = int64_t(at.out_height) * units, in_plane = int64_t(at.height) * at.width * V;
        const Tile *biases = tiles(biases_, 0), *kernels = tiles(kernels_, 0);
        const bool is_whole = (top + M) * SIDE <= at.out_channels;
        Tile spare[M][N] = {};
        for (int y = 0; y < at.out_height; ++y)
            for (int next = 0; next < units; next += N) {
                const int unit = std::min(next, units - N);
                const Tile *first = biases + unit % V, *second = biases + (unit + 1) % V;
                Vec *to = out + top * SIDE * plane + int64_t(y) * units + unit, *below = to + SIDE * plane;
                if (more && is_whole)
                    load_sums<M, N>(to, to + 1, below, below + 1, plane * sizeof(Vec));
                else if (more) {
                    for (int o = 0; o < at.out_channels - top * SIDE; ++o)
                        for (int n = 0; n < N; ++n) spare[o / SIDE][n].rows[o % SIDE] = to[o * plane + n];
                    load_sums<M, N>(&spare[0][0], &spare[0][N - 1], &spare[M - 1][0], &spare[M - 1][N - 1]);
                } else
                    load_sums<M, N>(first, second, first + V, second + V);
                const Span rows = inside(y, y, at.kernel_h, at.rows);
                const Span columns = inside(unit / V, (unit + N - 1) / V, at.kernel_w, at.columns);
                for (int d = 0; d < depth; ++d)
                    for (int ky = rows.begin; ky < rows.end; ++ky) {
                        const Tile* weights = kernels + d * area + ky * at.kernel_w;
                        const Tile* row = inputs + d * in_plane + int64_t(y + ky) * at.width * V + unit;
                        for (int kx = columns.begin; kx < columns.end; ++kx)
                            multiply<M, N>(weights + kx, weights + kx + depth * area, row + kx * V, row + kx * V + 1);
                    }
                if (is_whole) {
                    store_sums<M, N>(to, to + 1, below, below + 1, plane * sizeof(Vec));
                    continue;
                }
                store_sums<M, N>(&spare[0][0], &spare[0][N - 1], &spare[M - 1][0], &spare[M - 1][N - 1]);
                for (int o = 0; o < at.out_channels - top * SIDE; ++o)
                    for (int n = 0; n < N; ++n) to[o * plane + n] = spare[o / SIDE][n].rows[o % SIDE];
            }
    }

    // ---- The gradient of the weights. A unit is 32 samples of a pixel, or 16 of two pixels side by side. ----

    static int slope_units(const Window& at, int V) { return V == 2 ? at.out_width : (at.out_width + 1) / 2; }

    // to: [output channels / 16][height][units] tiles of [16][32 samples]
    static void join_slopes(const Window& at, int V, const Vec* slope, Tile* to) {
        const int tops = tiles_in(at.out_channels), units = slope_units(at, V);
        for (int o = 0; o < tops * SIDE; ++o) {
            Tile* row = to + int64_t(o / SIDE) * at.out_height * units;
            for (int y = 0; y < at.out_height; ++y, row += units)
                for (int unit = 0; unit < units; ++unit) {
                    const int vectors = at.out_width * V;
                    const Vec* from = slope + (int64_t(o) * at.out_height + y) * vectors + 2 * unit;
                    const bool has_second = 2 * unit + 1 < vectors;
                    row[unit].rows[o % SIDE] =
                        o < at.out_channels ? joined(from[0], has_second ? from[1] : Vec{}) : Vec{};
                }
        }
    }

    // [height][width] parts of V x [8 pairs of samples][16 channels][2], and a whole tile
    static int64_t plane_of_pairs(const Window& at, int V) {
        return (int64_t(at.height) * at.width * V + 1) / 2 * SIDE + SIDE;
    }

    // to: [input channels / 16] such planes
    static void pair_samples(const Window& at, int V, const Vec* in, Vec* to) {
        const int64_t pixels = int64_t(at.height) * at.width * V, plane = plane_of_pairs(at, V);
        const int sides = tiles_in(at.channels);
        for (int side = 0; side < sides; ++side, to += plane) {
            for (int64_t i = 0; i < pixels; i += 2) {
                Vec units[LANES];
                for (int c = 0; c < SIDE; ++c) {
                    const Vec* from = in + int64_t(side * SIDE + c) * pixels + i;
                    const bool exists = side * SIDE + c < at.channels;
                    units[c] = exists ? joined(from[0], i + 1 < pixels ? from[1] : Vec{}) : Vec{};
                }
                transpose(units);
                std::copy_n(units, LANES, to + i / 2 * SIDE);
            }
            std::fill_n(to + plane - SIDE, SIDE, Vec{});
        }
    }

    // Adds the products of these rows for M x 16 output channels and N x 16 input channels.
    template <int M, int N>
    static void weigh_rows(const Window& at, int V, Span band, int top, int side, const Tile* slopes, const Vec* inputs,
                           Tile* sums) {
        const int sides = tiles_in(at.channels), area = at.kernel_h * at.kernel_w, units = slope_units(at, V);
        const int64_t apart = int64_t(at.out_height) * units, plane = plane_of_pairs(at, V);
        slopes += top * apart, inputs += side * plane;
        for (int ky = 0; ky < at.kernel_h; ++ky)
            for (int kx = 0; kx < at.kernel_w; ++kx) {
                Tile* sum = sums + (int64_t(top) * sides + side) * area + ky * at.kernel_w + kx;
                Tile* below = sum + int64_t(sides) * area;
                load_sums<M, N>(sum, sum + area, below, below + area);
                const Span rows{std::max(band.begin, at.rows.begin - ky), std::min(band.end, at.rows.end - ky)};
                for (int y = rows.begin; y < rows.end; ++y) {
                    const Tile* a = slopes + int64_t(y) * units;
                    const Vec* b = inputs + (int64_t(y + ky) * at.width + kx) * V * (SIDE / 2);
                    for (int unit = 0; unit < units; ++unit, ++a, b += SIDE) multiply<M, N>(a, a + apart, b, b + plane);
                }
                store_sums<M, N>(sum, sum + area, below, below + area);
            }
    }

    // ---- Linear layers ----

    // to: [outputs / 32][V] tiles of [16 samples][32 outputs]
    static void turn_slopes(int outputs, int V, const Vec* slope, Tile* to) {
        for (int d = 0; d * DEPTH < outputs; ++d)
            for (int v = 0; v < V; ++v, ++to) {
                Vec half[2][LANES];
                for (int k = 0; k < DEPTH; ++k) {
                    const int o = d * DEPTH + k;
                    half[k / LANES][k % LANES] = o < outputs ? slope[o * V + v] : Vec{};
                }
                transpose(half[0]), transpose(half[1]);
                for (int sample = 0; sample < SIDE; ++sample)
                    to->rows[sample] = joined(half[0][sample], half[1][sample]);
            }
    }

    // sums[v][n] += slopes[v] times the weights of 32 outputs and of the inputs in tile n
    template <int M, int N>
    static void back_of(const Tile* slopes, const Tile* weights, Tile* sums, int64_t apart) {
        load_sums<M, N>(sums, sums + 1, sums + apart, sums + apart + 1);
        multiply<M, N>(slopes, slopes + 1, weights, weights + 1);
        store_sums<M, N>(sums, sums + 1, sums + apart, sums + apart + 1);
    }

    Memory kernels_, inputs_, biases_, slopes_, sums_, row_;
};

#else

class MatrixUnit {  // does not exist
  public:
    static bool exists() { return false; }
    static bool suits(int, int) { return false; }
    static Window linear(int, int) { return {}; }
    struct InUse {
        explicit InUse(bool) {}
    };
    struct Input {
        const Phase& phase;
        const Vec* first;
    };
    void correlate(const Batch&, const Window&, const Kernels&, const float*, bool, const Vec*, int64_t, Vec*,
                   int64_t) {}
    void weigh(const Batch&, const std::vector<Input>&, int, const Vec*, int64_t, int64_t, Receiver&) {}
    void connect_back(const Batch&, const float*, int, int, const Vec*, Vec*) {}
    void outer(const Batch&, const Vec*, const Vec*, int, int, int64_t, Receiver&) {}
};

#endif

}  // namespace lcfl
