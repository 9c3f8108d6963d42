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
#include <cstring>

#include "correlation.h"
#include "descent.h"
#include "products.h"
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

struct Kernels {  // [O][C][3][3], or [C][O][3][3] and turned by 180 degrees for the backward correlation
    const float* first;
    bool turned;
};

struct Tiles {  // from number `first` on, of the output of a convolution
    const Window& at;
    int first, count, samples, V, vectors;  // `vectors` hold the samples of all tiles

    // Elements are [16][channels][vectors]. The gap between them is for reading and writing whole vectors, and because
    // a power of two would crowd a few sets of the cache.
    int64_t apart(int channels) const { return int64_t(channels) * vectors + 5; }
    Columns element(Vec* first, int channels, int number) const {
        return {first + number * apart(channels), vectors, vectors};
    }

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
    // Chooses the filtering for a window if that is faster, with margins that fill up the last tiles. The choice does
    // not depend on the batch: a sample has the same scores in every batch. With few channels or tiles, the transforms
    // cost more than they save.
    static void choose(Window& at) {
        if (at.kernel_h != 3 || at.kernel_w != 3 || std::min(at.channels, at.out_channels) < 16 || num_tiles(at) < 4)
            return;
        at.way = Way::WINOGRAD;
        at.height = whole(at.height, 2), at.width = whole(at.width, 2);
    }

    // Computes whole values, of inputs with the margins of `choose`.
    void correlate(const Batch& batch, const Window& at, const Kernels& kernels, const float* bias, const Vec* in,
                   int64_t in_chunk, Vec* out, int64_t out_chunk) {
        const int room = ROOM / (at.channels + at.out_channels);
        const Factors wide = widen_all(kernels, at);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int first = 0, next; first < num_tiles(at); first = next) {
                const Tiles tiles = tiles_of(batch, chunk, at, first, room);
                next = first + tiles.count;
                Vec* d = spread_inputs(tiles, in + chunk * in_chunk);
                Vec* m = outputs_.of(ELEMENTS * tiles.apart(at.out_channels));
                for (int i = 0; i < ELEMENTS; ++i)
                    product_(wide[i], at.out_channels, at.channels, tiles.element(d, at.channels, i), false,
                             tiles.element(m, at.out_channels, i));
                gather_outputs(tiles, batch, chunk, m, bias, out + chunk * out_chunk);
            }
    }

    // Gives `receiver` the gradient of the kernels, G' s G, where s is the sum of (A y A') * (B' d B).
    void weigh(const Batch& batch, const Window& at, const Vec* in, int64_t in_chunk, const Vec* slope,
               int64_t slope_chunk, int64_t weight, Receiver& receiver) {
        const int row = whole(at.channels, LANES) / LANES;
        const int64_t sums_apart = int64_t(at.out_channels) * row + 1;
        Vec* sums = sums_.of(ELEMENTS * sums_apart);
        bool more = false;
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int first = 0, next; first < num_tiles(at); first = next, more = true) {
                const Tiles tiles = tiles_of(batch, chunk, at, first, WEIGH_VECTORS);
                next = first + tiles.count;
                const int depth = tiles.count * tiles.samples;
                const int64_t apart = int64_t(depth) * row + 1;
                Vec* d = spread_across(tiles, row, apart, in + chunk * in_chunk);
                Vec* y = scatter_slopes(tiles, slope + chunk * slope_chunk);
                for (int i = 0; i < ELEMENTS; ++i) {
                    const Columns slopes = tiles.element(y, at.out_channels, i);
                    const int64_t step = slopes.row_step * LANES;
                    product_({reinterpret_cast<const float*>(slopes.first), step, 1, step * Product::HEIGHT},
                             at.out_channels, depth, {d + i * apart, row, row}, more,
                             {sums + i * sums_apart, row, row});
                }
            }
        float* rows = rows_.floats(int64_t(row) * LANES * 9 + LANES);
        for (int o = 0; o < at.out_channels; ++o) {
            for (int v = 0; v < row; ++v) {
                Vec s[4][4], g[3][3];
                for (int i = 0; i < ELEMENTS; ++i) s[i / 4][i % 4] = sums[i * sums_apart + o * row + v];
                in_both(narrow<Vec>, s, g);
                write_kernels(g, rows + v * LANES * 9);
            }
            receiver.take(weight + o * at.taps(), at.taps(), rows);
        }
    }

  private:
    static constexpr int ROOM = NEAR / 2;     // vectors for an element of all inputs and outputs
    static constexpr int WEIGH_VECTORS = 64;  // of a channel

    static int num_tiles(const Window& at) { return (at.out_height + 1) / 2 * ((at.out_width + 1) / 2); }
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

    // The same with channels innermost, [16][samples of all tiles][row], elements `apart`.
    Vec* spread_across(const Tiles& tiles, int row, int64_t apart, const Vec* in) {
        const Window& at = tiles.at;
        Vec* result = inputs_.of(ELEMENTS * apart);
        for (int column = 0; column < row; ++column)
            tiles.each([=](int y, int x, int begin) {
                for (int v = 0; v * LANES < tiles.samples; ++v) {
                    Vec found[ELEMENTS][LANES];
                    for (int lane = 0; lane < LANES; ++lane) {
                        const int64_t c = std::min(column * LANES + lane, at.channels - 1);
                        const Vec* from = in + ((c * at.height + y) * at.width + x) * tiles.V + v;
                        Vec d[4][4], to[4][4];
                        for (int i = 0; i < ELEMENTS; ++i) d[i / 4][i % 4] = from[(i / 4 * at.width + i % 4) * tiles.V];
                        in_both(spread<Vec>, d, to);
                        for (int i = 0; i < ELEMENTS; ++i) found[i][lane] = to[i / 4][i % 4];
                    }
                    const int count = std::min(LANES, tiles.samples - v * LANES);
                    for (int i = 0; i < ELEMENTS; ++i) {
                        transpose(found[i]);
                        Vec* to = result + i * apart + int64_t(begin + v * LANES) * row + column;
                        for (int sample = 0; sample < count; ++sample) to[sample * row] = found[i][sample];
                    }
                }
            });
        return result;
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

    struct Factors {  // those of the elements, which are `apart`
        Factor first;
        int64_t apart;
        Factor operator[](int i) const { return first.moved(i * apart); }
    };

    // Returns G g G' for all kernels as left factors. A block is [depth][HEIGHT], so that products read it in the order
    // of memory. The lanes are rows.
    Factors widen_all(const Kernels& kernels, const Window& at) {
        constexpr int STRIP = std::min(LANES, Product::HEIGHT);  // lanes of one block
        const int rows = at.out_channels, depth = at.channels;
        const int64_t row_step = kernels.turned ? 9 : at.taps(), step = kernels.turned ? int64_t(rows) * 9 : 9;
        const int64_t block_step = int64_t(depth) * Product::HEIGHT;
        const int64_t apart = whole(rows, Product::HEIGHT) * int64_t(depth) + 5 * LANES;  // the gap: see Tiles
        float* result = kernels_.floats(ELEMENTS * apart);
        for (int r = 0; r < rows; r += LANES)
            for (int d = 0; d < depth; ++d) {
                Vec g[3][3], u[4][4];
                const bool is_last = r + LANES >= rows && d == depth - 1;
                read_kernels(kernels, r * row_step + d * step, row_step, std::min(LANES, rows - r), is_last, g);
                in_both(widen<Vec>, g, u);
                for (int lane = 0; lane < std::min(LANES, rows - r); lane += STRIP) {
                    const int row = r + lane;
                    float* to = result + row / Product::HEIGHT * block_step + row % Product::HEIGHT;
                    for (int i = 0; i < ELEMENTS; ++i)
                        std::memcpy(to + i * apart + d * Product::HEIGHT,
                                    reinterpret_cast<const float*>(&u[i / 4][i % 4]) + lane, STRIP * sizeof(float));
                }
            }
        return {{result, 1, Product::HEIGHT, block_step}, apart};
    }

    static constexpr int PARTS = (9 + LANES - 1) / LANES;  // vectors of a kernel

    // Reads `count` kernels, one for each lane, which are `step` apart. Only if they are not the last ones, it reads
    // beyond a kernel.
    static void read_kernels(const Kernels& kernels, int64_t begin, int64_t step, int count, bool is_last,
                             Vec (&g)[3][3]) {
        for (int part = 0; part < PARTS; ++part) {
            const int size = std::min(LANES, 9 - part * LANES);
            Vec rows[LANES] = {};
            for (int lane = 0; lane < count; ++lane) {
                const float* from = kernels.first + begin + lane * step + part * LANES;
                if (is_last)
                    std::memcpy(&rows[lane], from, size * sizeof(float));
                else
                    rows[lane] = *reinterpret_cast<const Loose*>(from);
            }
            transpose(rows);
            for (int i = 0; i < size; ++i) {
                const int tap = part * LANES + i, place = kernels.turned ? 8 - tap : tap;
                g[place / 3][place % 3] = rows[i];
            }
        }
    }

    // Writes LANES kernels, and then at most a vector of other values.
    static void write_kernels(const Vec (&g)[3][3], float* to) {
        Vec rows[PARTS][LANES] = {};
        for (int tap = 0; tap < 9; ++tap) rows[tap / LANES][tap % LANES] = g[tap / 3][tap % 3];
        for (int part = 0; part < PARTS; ++part) transpose(rows[part]);
        for (int lane = 0; lane < LANES; ++lane)
            for (int part = 0; part < PARTS; ++part)
                *reinterpret_cast<Loose*>(to + lane * 9 + part * LANES) = rows[part][lane];
    }

    Memory kernels_, inputs_, outputs_, sums_, rows_;
    Product product_;
};

}  // namespace lcfl
