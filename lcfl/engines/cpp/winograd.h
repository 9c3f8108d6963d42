// Convolutions of 3 x 3 with stride 1 by Winograd's minimal filtering F(2 x 2, 3 x 3) (Lavin and Gray, 2016). A tile of
// 2 x 2 pixels of the output takes 16 products for each pair of channels instead of 36:
//
//     y = A' [(G g G') * (B' d B)] A       d: 4 x 4 pixels of the input, g: a kernel, *: by element
//
// The sum over the input channels is a product of matrices for each of the 16 elements. Its columns are the samples of
// all tiles, without the lanes that have no sample.

#pragma once

#include <algorithm>
#include <cstdint>

#include "convolution.h"
#include "descent.h"
#include "vectors.h"

namespace lcfl {

constexpr int ELEMENTS = 16;

// The transforms in one dimension: B' d, G g, A' m, and A y and G' s for the gradients.
template <class T>
void spread(const T (&d)[4], T (&to)[4]) {
    to[0] = d[0] - d[2], to[1] = d[1] + d[2], to[2] = d[2] - d[1], to[3] = d[1] - d[3];
}

template <class T>
void widen(const T (&g)[3], T (&to)[4]) {
    const T sides = (g[0] + g[2]) / 2, middle = g[1] / 2;
    to[0] = g[0], to[1] = sides + middle, to[2] = sides - middle, to[3] = g[2];
}

template <class T>
void gather(const T (&m)[4], T (&to)[2]) {
    to[0] = m[0] + m[1] + m[2], to[1] = m[1] - m[2] - m[3];
}

template <class T>
void scatter(const T (&y)[2], T (&to)[4]) {
    to[0] = y[0], to[1] = y[0] + y[1], to[2] = y[0] - y[1], to[3] = -y[1];
}

template <class T>
void narrow(const T (&s)[4], T (&to)[3]) {
    const T plus = (s[1] + s[2]) / 2, minus = (s[1] - s[2]) / 2;
    to[0] = s[0] + plus, to[1] = minus, to[2] = plus + s[3];
}

// Transforms the columns of a matrix, and then the rows of the result.
template <class Transform, class T, int N, int M>
inline __attribute__((always_inline)) void in_both(Transform transform, const T (&from)[N][N], T (&to)[M][M]) {
    T columns[N][M];
    for (int x = 0; x < N; ++x) {
        T column[N];
        for (int y = 0; y < N; ++y) column[y] = from[y][x];
        transform(column, columns[x]);
    }
    for (int y = 0; y < M; ++y) {
        T row[N];
        for (int x = 0; x < N; ++x) row[x] = columns[x][y];
        transform(row, to[y]);
    }
}

struct Kernels {  // where the kernels g[o][c] and their taps are
    const float* first;
    int64_t out_step, in_step;
    int tap_step;
};

struct Tiles {  // from number `first` on, of the output of a convolution
    const Window& at;
    int first, count, samples, V, vectors;  // `vectors` hold the samples of all tiles

    // Elements are [16][channels][vectors]. The gap between them is for writing whole vectors, and because a power of
    // two would crowd a few sets of the cache.
    int64_t apart(int channels) const { return int64_t(channels) * vectors + 5; }

    template <class Act>
    void each(Act act) const {
        const int columns = (at.out_width + 1) / 2;
        int y = first / columns * 2, x = first % columns * 2;
        for (int tile = 0; tile < count; ++tile) {
            act(y, x, tile * samples);
            if ((x += 2) >= at.out_width) x = 0, y += 2;
        }
    }
};

class Winograd {
  public:
    // Whether it is faster, which does not depend on the batch: a sample has the same scores in every batch. With few
    // channels or tiles, the transforms cost more than they save.
    static bool suits(const Window& at) {
        const bool is_3x3 = at.kernel_h == 3 && at.kernel_w == 3 && at.stride_h == 1 && at.stride_w == 1;
        return is_3x3 && std::min(at.channels, at.out_channels) >= 16 && num_tiles(at) >= 4;
    }
    static bool suits_gradient(const Window& at) { return suits(at) && num_tiles(at) >= 16; }

    // Computes whole values, of inputs with the margins of `with_whole_tiles`.
    void correlate(const Batch& batch, const Window& at, const Kernels& kernels, const float* bias, const Vec* in,
                   int64_t in_chunk, Vec* out, int64_t out_chunk) {
        const int room = ROOM / (at.channels + at.out_channels);
        const Blocks blocks = best_blocks<1>(products(at, tiles_of(batch, 0, at, 0, room).vectors));
        const int64_t kernels_apart = widen_all(kernels, at, blocks.channels);
        float* zeros = zeros_.floats(whole(at.out_channels, blocks.channels));
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int first = 0, next; first < num_tiles(at); first = next) {
                Tiles tiles = tiles_of(batch, chunk, at, first, room);
                next = first + tiles.count;
                tiles.vectors = std::max(tiles.vectors, blocks.pixels);
                Vec* d = spread_inputs(tiles, in + chunk * in_chunk);
                Vec* m = outputs_.of(ELEMENTS * tiles.apart(at.out_channels));
                for (int i = 0; i < ELEMENTS; ++i)
                    correlate_with<1>(blocks, products(at, tiles.vectors), d + i * tiles.apart(at.channels),
                                      kernels_.floats(1) + i * kernels_apart, zeros,
                                      m + i * tiles.apart(at.out_channels), spare_);
                gather_outputs(tiles, batch, chunk, m, bias, out + chunk * out_chunk);
            }
    }

    // Gives `receiver` the gradient of the kernels, G' s G, where s is the sum of (A y A') * (B' d B).
    void weigh(const Batch& batch, const Window& at, const Vec* in, int64_t in_chunk, const Vec* slope,
               int64_t slope_chunk, int64_t weight, Receiver& receiver) {
        constexpr int CB = SUMS < 24 ? 3 : 4;
        float* sums = sums_.floats(ELEMENTS * sums_apart(at));
        std::fill_n(sums, ELEMENTS * sums_apart(at), 0.0f);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int first = 0, next; first < num_tiles(at); first = next) {
                const Tiles tiles = tiles_of(batch, chunk, at, first, WEIGH_VECTORS);
                next = first + tiles.count;
                const Vec* d = spread_inputs(tiles, in + chunk * in_chunk);
                const Vec* y = scatter_slopes(tiles, slope + chunk * slope_chunk);
                for (int i = 0; i < ELEMENTS; ++i)
                    add_sums<CB, SUMS / CB>(at, tiles.vectors, d + i * tiles.apart(at.channels),
                                            y + i * tiles.apart(at.out_channels), sums + i * sums_apart(at));
            }
        const int64_t taps = at.taps();
        float* rows = rows_.floats(taps);
        for (int o = 0; o < at.out_channels; ++o) {
            for (int c = 0; c < at.channels; ++c) {
                float s[4][4], g[3][3];
                for (int i = 0; i < ELEMENTS; ++i) s[i / 4][i % 4] = sums[i * sums_apart(at) + o * at.channels + c];
                in_both(narrow<float>, s, g);
                for (int tap = 0; tap < 9; ++tap) rows[9 * c + tap] = g[tap / 3][tap % 3];
            }
            receiver.take(weight + o * taps, taps, rows);
        }
    }

    // Returns the window with margins that fill up the last tiles.
    static Window with_whole_tiles(Window at) {
        if (suits(at)) at.height = whole(at.height, 2), at.width = whole(at.width, 2);
        return at;
    }

  private:
    static constexpr int ROOM = NEAR / 2;      // vectors for an element of all inputs and outputs
    static constexpr int WEIGH_VECTORS = 128;  // of a channel; for fewer, the sums over lanes take longer

    static int num_tiles(const Window& at) { return (at.out_height + 1) / 2 * ((at.out_width + 1) / 2); }
    static int64_t sums_apart(const Window& at) { return int64_t(at.out_channels) * at.channels + LANES; }

    // A convolution of 1 x 1 over a row of vectors.
    static Window products(const Window& at, int vectors) {
        return {at.channels, 1, vectors, 1, 1, 1, 1, at.out_channels, 1, vectors, 0, 1, 0, vectors};
    }

    static Tiles tiles_of(const Batch& batch, int chunk, const Window& at, int first, int vectors) {
        const int samples = batch.in_chunk(chunk);
        const int count = std::clamp(vectors * LANES / samples, 1, num_tiles(at) - first);
        return {at, first, count, samples, batch.V, whole(count * samples, LANES) / LANES};
    }

    // Returns B' d B for all channels.
    Vec* spread_inputs(const Tiles& tiles, const Vec* in) {
        const Window& at = tiles.at;
        return elements_of(tiles, at.channels, inputs_, [=](int c, int y, int x, int v, Vec(&to)[4][4]) {
            const Vec* from = in + ((int64_t(c) * at.height + y) * at.width + x) * tiles.V + v;
            Vec d[4][4];
            for (int i = 0; i < ELEMENTS; ++i) d[i / 4][i % 4] = from[(i / 4 * at.width + i % 4) * tiles.V];
            in_both(spread<Vec>, d, to);
        });
    }

    // Returns A y A' for all channels of a slope.
    Vec* scatter_slopes(const Tiles& tiles, const Vec* slope) {
        const Window& at = tiles.at;
        return elements_of(tiles, at.out_channels, outputs_, [=](int c, int y, int x, int v, Vec(&to)[4][4]) {
            const Vec* from = slope + ((int64_t(c) * at.out_height + y) * at.out_width + x) * tiles.V + v;
            const bool below = y + 1 < at.out_height, beside = x + 1 < at.out_width;
            const Vec pixels[2][2] = {{from[0], beside ? from[tiles.V] : Vec{}},
                                      {below ? from[at.out_width * tiles.V] : Vec{},
                                       below && beside ? from[(at.out_width + 1) * tiles.V] : Vec{}}};
            in_both(scatter<Vec>, pixels, to);
        });
    }

    // Writes the elements of all tiles without idle lanes: each vector begins where the samples of the last one end.
    template <class Elements>
    static Vec* elements_of(const Tiles& tiles, int channels, Memory& memory, Elements elements) {
        Vec* result = memory.of(ELEMENTS * tiles.apart(channels));
        const int64_t apart = tiles.apart(channels) * LANES;
        for (int c = 0; c < channels; ++c) {
            float* row = reinterpret_cast<float*>(result + int64_t(c) * tiles.vectors);
            tiles.each([=](int y, int x, int begin) {
                for (int v = 0; v * LANES < tiles.samples; ++v) {
                    Vec found[4][4];
                    elements(c, y, x, v, found);
                    for (int i = 0; i < ELEMENTS; ++i)
                        *reinterpret_cast<Loose*>(row + i * apart + begin + v * LANES) = held(found[i / 4][i % 4]);
                }
            });
            for (int i = 0; i < ELEMENTS; ++i)
                *reinterpret_cast<Loose*>(row + i * apart + tiles.count * tiles.samples) = Vec{};
        }
        return result;
    }

    // out = A' m A + bias for all channels, and zeros in idle lanes.
    static void gather_outputs(const Tiles& tiles, const Batch& batch, int chunk, const Vec* in, const float* bias,
                               Vec* out) {
        const Window& at = tiles.at;
        const int64_t apart = tiles.apart(at.out_channels) * LANES;
        for (int v = 0; v < tiles.V; ++v) {
            const auto is_idle = Vec{} == batch.holds(chunk, v);
            for (int c = 0; c < at.out_channels; ++c) {
                const float* row = reinterpret_cast<const float*>(in + int64_t(c) * tiles.vectors) + v * LANES;
                const Vec shift = fill(bias[c]);
                tiles.each([=](int y, int x, int begin) {
                    Vec m[4][4], pixels[2][2];
                    for (int i = 0; i < ELEMENTS; ++i)
                        m[i / 4][i % 4] = *reinterpret_cast<const Loose*>(row + i * apart + begin);
                    in_both(gather<Vec>, m, pixels);
                    Vec* to = out + ((int64_t(c) * at.out_height + y) * at.out_width + x) * tiles.V + v;
                    for (int below = 0; below < 2 && y + below < at.out_height; ++below)
                        for (int beside = 0; beside < 2 && x + beside < at.out_width; ++beside)
                            to[(below * at.out_width + beside) * tiles.V] =
                                is_idle ? Vec{} : held(pixels[below][beside] + shift);
                });
            }
        }
    }

    // Writes G g G' as [16][O / block][C][block], padded with zeros. Returns how far elements are apart.
    int64_t widen_all(const Kernels& kernels, const Window& at, int block) {
        const int64_t apart = int64_t(whole(at.out_channels, block)) * at.channels + 5 * LANES;
        float* to = kernels_.floats(ELEMENTS * apart);
        with_channels<1, 2, 3, 4, 6, 8, 12, 24>(block, [&](auto width) {
            constexpr int CB = decltype(width)::value;
            for (int first = 0; first < at.out_channels; first += CB)
                for (int c = 0; c < at.channels; ++c, to += CB)
                    widen_block<CB>(kernels, first, c, std::min(CB, at.out_channels - first), apart, to);
        });
        return apart;
    }

    template <int CB>
    static void widen_block(const Kernels& kernels, int first, int c, int count, int64_t apart, float* to) {
        float g[9][CB] = {};
        const float* from = kernels.first + first * kernels.out_step + c * kernels.in_step;
        for (int o = 0; o < count; ++o)
            for (int tap = 0; tap < 9; ++tap) g[tap][o] = from[o * kernels.out_step + tap * kernels.tap_step];
        for (int o = 0; o < CB; ++o) {
            float kernel[3][3], u[4][4];
            for (int tap = 0; tap < 9; ++tap) kernel[tap / 3][tap % 3] = g[tap][o];
            in_both(widen<float>, kernel, u);
            for (int i = 0; i < ELEMENTS; ++i) to[i * apart + o] = u[i / 4][i % 4];
        }
    }

    // sums[o][c] += the sum over vectors and lanes of slope[o] in[c].
    template <int CB, int TB>
    static void add_sums(const Window& at, int vectors, const Vec* in, const Vec* slope, float* sums) {
        const Window row = products(at, vectors);
        for (int first = 0; first < at.out_channels; first += CB)
            for (int channel = 0; channel < at.channels; channel += TB) {
                Vec sum[CB][TB] = {}, flat[CB * TB];
                const Vec *from[TB], *rise[CB];
                for (int t = 0; t < TB; ++t) from[t] = in + int64_t(std::min(channel + t, at.channels - 1)) * vectors;
                for (int c = 0; c < CB; ++c)
                    rise[c] = slope + int64_t(std::min(first + c, at.out_channels - 1)) * vectors;
                weigh_block<CB, TB, 1>(row, from, rise, sum);
                float found[CB * TB];
                for (int c = 0; c < CB; ++c)
                    for (int t = 0; t < TB; ++t) flat[c * TB + t] = held(sum[c][t]);
                totals_of<CB * TB>(flat, found);
                for (int c = 0; c < CB && first + c < at.out_channels; ++c)
                    for (int t = 0; t < TB && channel + t < at.channels; ++t)
                        sums[int64_t(first + c) * at.channels + channel + t] += found[c * TB + t];
            }
    }

    Memory kernels_, inputs_, outputs_, sums_, rows_, zeros_;
    Vec spare_[SUMS];
};

}  // namespace lcfl
