// Convolutions and linear layers with factors in bfloat16 and sums in float32, as products of tiles (tiles.h). For an
// output, k counts input channels, m output channels and n samples, and the products of all taps are added up in one
// tile. For the gradient of the weights, k counts samples, and n input channels. For the gradient of a linear layer's
// input, k counts outputs, m samples and n inputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "correlation.h"
#include "descent.h"
#include "tiles.h"
#include "vectors.h"
#include "winograd.h"

namespace lcfl {

#ifdef LCFL_TILES

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

class Bfloat16 {
  public:
    // Returns whether the processor has the instructions and the system lets this process use them.
    static bool exists() { return has_tiles(); }

    // With fewer channels, most of a tile would be zeros.
    static bool suits(int channels, int out_channels) { return std::min(channels, out_channels) >= SIDE; }

    // Computes all chunks, or with `more`, adds to them. A packed one is in `rows` afterwards. `bias` may be null.
    void correlate(const Batch& batch, const Window& shape, const Kernels& kernels, const float* bias, bool more,
                   const Vec* in, Memory& rows, Vec* out, int64_t out_size) {
        std::vector<Image> images;
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            const Window at = in_chunk(shape, batch, chunk);
            Vec* to = at.is_packed ? rows.of(at.out_channels * at.plane() + 1) : out + chunk * out_size;
            images.push_back({at, reinterpret_cast<const float*>(in + chunk * at.size() * batch.V), to});
        }
        correlate(images, kernels, bias, more);
    }

    // Gives `receiver` the gradient of the weights [O][kernel_size]. Goes through all samples with as many output
    // channels as have their sums in the second-level cache.
    void weigh(const std::vector<PhaseParts>& phases, int kernel_size, int64_t weight, Receiver& receiver) {
        const Window& any = phases[0].chunks[0].at;
        const int tops = tiles_in(any.out_channels), sides = tiles_in(any.channels);
        const int size = sides * (kernel_size / any.channels);  // tiles of sums for 16 output channels
        const int group = std::max(2, NEAR / SIDE / size / 2 * 2);
        const std::vector<Pairs> pairs = pair(phases);
        Tile* sums = tiles(sums_, int64_t(std::min(group, tops)) * size);
        for (int begin = 0, end; begin < tops; begin = end) {
            end = std::min(begin + group, tops);
            for (const Pairs& each : pairs) {
                const Window& at = each.at;
                Tile* sum = sums + each.taps * sides * (end - begin);
                const int band = std::max(1, BAND / slope_units(at));
                for (int y = 0; y < at.out_height; y += band)
                    for (int top = begin; top < end; top += 2)
                        for (int side = 0; side < sides; side += 2)
                            with_numbers(top + 1 < end, side + 1 < sides, [&](auto m, auto n) {
                                const Span rows{y, std::min(y + band, at.out_height)};
                                weigh_rows<m, n>(each, rows, top, side, !each.is_first || y > 0,
                                                 sum + (top - begin) * sides * at.kernel_h * at.kernel_w);
                            });
            }
            give(phases, kernel_size, {begin, end}, sums, weight, receiver);
        }
    }

    // out[o] = bias[o] + sum over i of w[o][i] in[i]. `bias` may be null.
    void connect(const Batch& batch, const float* weight, int inputs, int outputs, const float* bias, const Vec* in,
                 Vec* out) {
        const Window at = linear(batch, inputs, outputs);
        std::vector<Image> images;
        for (int64_t chunk = 0; chunk < batch.chunks; ++chunk)
            images.push_back(
                {at, reinterpret_cast<const float*>(in + chunk * inputs * batch.V), out + chunk * outputs * batch.V});
        correlate(images, {weight, false}, bias, false);
    }

    // back[i] = sum over o of w[o][i] slope[o]. Reads the weights in runs of a row, row by row.
    void connect_back(const Batch& batch, const float* weight, int inputs, int outputs, const Vec* slope, Vec* back) {
        const int sides = tiles_in(inputs), depth = whole(outputs, DEPTH) / DEPTH, V = batch.V;
        Tile* slopes = tiles(slopes_, int64_t(depth) * V * batch.chunks);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            turn_slopes(outputs, V, slope + int64_t(chunk) * outputs * V, slopes + int64_t(chunk) * depth * V);
        Tile* sums = tiles(sums_, int64_t(sides) * V * batch.chunks);
        Tile* weights = tiles(kernels_, RUN / SIDE);
        for (int d = 0; d < depth; ++d)
            for (int begin = 0; begin < inputs; begin += RUN) {
                const int end = std::min(begin + RUN, inputs);
                pair_outputs(weight, inputs, {begin, end}, outputs, d * DEPTH, weights);
                for (int side = begin / SIDE; side < tiles_in(end); side += 2)
                    with_numbers(V == 2, side + 1 < tiles_in(end), [&](auto m, auto n) {
                        for (int chunk = 0; chunk < batch.chunks; ++chunk)
                            back_of<m, n>(slopes + (int64_t(chunk) * depth + d) * V, weights + side - begin / SIDE,
                                          pairs_in(outputs - d * DEPTH), d > 0,
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
        constexpr int ROW = RUN / SIDE + 1;  // a power of two would crowd a few sets of the cache
        const Window at = linear(batch, inputs, outputs);
        const int tops = tiles_in(outputs), sides = tiles_in(inputs), V = batch.V;
        const int64_t plane = plane_of_pairs(at);
        Tile* slopes = tiles(slopes_, int64_t(tops) * batch.chunks);
        Vec* pairs = inputs_.of(sides * plane * batch.chunks);
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            join_slopes(at, slope + int64_t(chunk) * outputs * V, slopes + int64_t(chunk) * tops);
            pair_samples(at, reinterpret_cast<const float*>(in + int64_t(chunk) * inputs * V),
                         pairs + chunk * sides * plane);
        }
        Vec* found = row_.of(SIDE * ROW);
        for (int begin = 0; begin < inputs; begin += RUN)
            for (int top = 0; top < tops; ++top) {
                for (int side = begin / SIDE; side < std::min((begin + RUN) / SIDE, sides); ++side) {
                    Vec* to = found + side - begin / SIDE;
                    const auto factors = [&](auto add) {
                        for (int chunk = 0; chunk < batch.chunks; ++chunk)
                            add(slopes + int64_t(chunk) * tops + top, nullptr,
                                pairs + (int64_t(chunk) * sides + side) * plane, nullptr,
                                pairs_in(batch.in_chunk(chunk)));
                    };
                    accumulate<1, 1>({}, {to, nullptr, nullptr, nullptr, ROW}, 1, factors);
                }
                for (int m = 0; m < std::min(SIDE, outputs - top * SIDE); ++m)
                    receiver.take(weight + int64_t(top * SIDE + m) * inputs + begin, std::min(RUN, inputs - begin),
                                  reinterpret_cast<const float*>(found + m * ROW));
            }
    }

  private:
    static constexpr int BAND = 16;   // tiles of slopes that stay in the first-level cache
    static constexpr int RUN = 1024;  // inputs of a linear layer at a time

    struct Image {  // a chunk's part of a correlation
        Window at;
        const float* in;
        Vec* out;
    };

    // Returns the window of a linear layer, whose idle lanes stay where they are.
    static Window linear(const Batch& batch, int inputs, int outputs) {
        return {inputs, 1, 1, 1, 1, outputs, 1, 1, {0, 1}, {0, 1}, Way::BFLOAT16, batch.lanes()};
    }

    static int pairs_in(int factors) { return (std::min(factors, DEPTH) + 1) / 2; }  // of a tile
    static int tiles_in(int channels) { return whole(channels, SIDE) / SIDE; }
    static Tile* tiles(Memory& memory, int64_t number) { return reinterpret_cast<Tile*>(memory.of(number * SIDE)); }

    // ---- Outputs ----

    void correlate(const std::vector<Image>& images, const Kernels& kernels, const float* bias, bool more) {
        const Window& any = images[0].at;
        const int tops = tiles_in(any.out_channels), depth = whole(any.channels, DEPTH) / DEPTH;
        std::vector<int64_t> begins = {0};  // of the images in inputs_
        for (const Image& each : images)
            begins.push_back(begins.back() + int64_t(depth) * each.at.height * SIDE * row_of_pairs(each.at));
        Vec* inputs = inputs_.of(begins.back() + 1);  // the last row is read in whole vectors
        for (size_t i = 0; i < images.size(); ++i) pair_channels(images[i].at, images[i].in, inputs + begins[i]);
        for (int top = 0; top < tops; top += 2) {
            pack_kernels(kernels, any, top, std::min(2, tops - top));
            fill_biases(any, top, bias);
            for (size_t i = 0; i < images.size(); ++i) {
                const Window& at = images[i].at;
                for (int y = 0; y < at.out_height; ++y)
                    for (int vector = 0; vector < at.row_vectors(); vector += 2)
                        with_numbers(top + 1 < tops, vector + 1 < at.row_vectors(), [&](auto m, auto n) {
                            correlate_block<m, n>(at, top, y, vector, more, inputs + begins[i], images[i].out);
                        });
            }
        }
    }

    // kernels_: [tops from `first` on][input channels / 32][taps] tiles of [16][32] weights
    void pack_kernels(const Kernels& kernels, const Window& at, int first, int tops) {
        const int depth = whole(at.channels, DEPTH) / DEPTH, area = at.kernel_h * at.kernel_w;
        const int rows = std::min(tops * SIDE, at.out_channels - first * SIDE);
        Tile* to = tiles(kernels_, int64_t(tops) * depth * area);
        if (rows < tops * SIDE) std::fill_n(to + (tops - 1) * depth * area, depth * area, Tile{});
        const auto put = [=](int m, int d, int tap, Vec values) {
            to[(m / SIDE * depth + d) * area + tap].rows[m % SIDE] = values;
        };
        if (kernels.turned) {
            const int64_t step = at.out_channels * area;  // from one channel to the next
            for (int d = 0; d < depth; ++d)
                join_channels(kernels.first + d * DEPTH * step + first * SIDE * area, step, at.channels - d * DEPTH,
                              rows * area, [=](int i, Vec values) { put(i / area, d, area - 1 - i % area, values); });
            return;
        }
        const float* from = kernels.first + int64_t(first) * SIDE * at.taps();
        for (int m = 0; m < rows; ++m, from += at.taps())
            for (int d = 0; d < depth; ++d) {
                const float* here = from + d * DEPTH * area;
                const int channels = at.channels - d * DEPTH;
                if (area == 1)
                    put(m, d, 0, joined(some(here, channels), some(here + LANES, channels - LANES)));
                else
                    join_channels(here, area, channels, area, [=](int tap, Vec values) { put(m, d, tap, values); });
            }
    }

    // Calls `act` with each of `size` numbers of 32 channels, which are `step` numbers apart.
    template <class Act>
    static void join_channels(const float* from, int64_t step, int channels, int size, Act act) {
        for (int begin = 0; begin < size; begin += LANES) {
            Vec half[2][LANES];
            for (int c = 0; c < DEPTH; ++c)
                half[c / LANES][c % LANES] = c < channels ? some(from + c * step + begin, size - begin) : Vec{};
            transpose(half[0]), transpose(half[1]);
            for (int i = 0; i < std::min(LANES, size - begin); ++i) act(begin + i, joined(half[0][i], half[1][i]));
        }
    }

    struct Steps {       // vectors
        int64_t vector;  // from 16 samples of a row to the next 16
        int64_t pair;    // from one pair of channels to the next
    };

    // Returns the vectors of a row. A power of two would crowd a few sets of the cache.
    static int64_t row_of_pairs(const Window& at) { return whole(at.width * at.pixel, LANES) / LANES | 1; }

    // A row is one tile after the other, but if it is packed, one pair after the other: a factor may begin anywhere.
    static Steps steps_of(const Window& at) { return at.is_packed ? Steps{1, row_of_pairs(at)} : Steps{SIDE, 1}; }

    // to: [input channels / 32][height] rows of 16 pairs of channels
    static void pair_channels(const Window& at, const float* in, Vec* to) {
        const int64_t row = int64_t(at.width) * at.pixel, channel = at.height * row;
        const Steps steps = steps_of(at);
        for (int first = 0; first < at.channels; first += DEPTH)
            for (int y = 0; y < at.height; ++y, to += SIDE * row_of_pairs(at))
                for (int pair = 0; pair < SIDE; ++pair) {
                    const int c = first + 2 * pair;
                    const float *even = in + c * channel + y * row, *odd = even + channel;
                    Vec* next = to + pair * steps.pair;
                    for (int64_t i = 0; i < row; i += LANES, next += steps.vector)
                        *next = c >= at.channels       ? Vec{}
                                : c + 1 >= at.channels ? paired(loaded(even + i), Vec{})
                                                       : paired(loaded(even + i), loaded(odd + i));
                }
    }

    // biases_: two tiles of sums
    void fill_biases(const Window& at, int top, const float* bias) {
        Vec* to = biases_.of(2 * SIDE);
        for (int o = top * SIDE; o < (top + 2) * SIDE; ++o) *to++ = fill(bias && o < at.out_channels ? bias[o] : 0);
    }

    // Computes M x 16 channels of N vectors of a row.
    template <int M, int N>
    void correlate_block(const Window& at, int top, int y, int vector, bool more, const Vec* inputs, Vec* out) {
        const int area = at.kernel_h * at.kernel_w, depth = whole(at.channels, DEPTH) / DEPTH;
        const int count = std::min(M * SIDE, at.out_channels - top * SIDE);
        const int64_t plane = at.plane();
        const Steps steps = steps_of(at);
        const Tile* kernels = reinterpret_cast<Tile*>(kernels_.get());
        Vec* to = out + top * SIDE * plane + int64_t(y) * at.row_vectors() + vector;
        const Sums there{to, to + 1, to + SIDE * plane, to + SIDE * plane + 1, plane};
        Vec* biases = biases_.get();
        Vec* spare = spare_.of(4 * SIDE);  // for channels beyond the last one
        const Sums aside{spare, spare + 1, spare + SIDE * N, spare + SIDE * N + 1, N};
        const bool is_whole = count == M * SIDE;
        if (more && !is_whole)
            for (int o = 0; o < count; ++o) std::copy_n(to + o * plane, N, spare + o * N);
        const Span rows = inside(y, y, at.kernel_h, at.rows), columns = columns_of(at, vector, N);
        const int64_t row = SIDE * LANES * row_of_pairs(at), next = LANES * steps.vector,
                      shift = at.pixel * steps.vector;
        const float* first = reinterpret_cast<const float*>(inputs) + y * row + vector * next;
        const auto factors = [&](auto add) {
            for (int d = 0; d < depth; ++d) {
                const int pairs = pairs_in(at.channels - d * DEPTH);
                for (int ky = rows.begin; ky < rows.end; ++ky) {
                    const Tile* weights = kernels + d * area + ky * at.kernel_w;
                    const float* from = first + (int64_t(d) * at.height + ky) * row;
                    for (int kx = columns.begin; kx < columns.end; ++kx)
                        add(weights + kx, weights + kx + depth * area, from + kx * shift, from + kx * shift + next,
                            pairs);
                }
            }
        };
        const Sums &sums = is_whole ? there : aside, begin{biases, biases, biases + SIDE, biases + SIDE};
        accumulate<M, N>(more ? sums : begin, sums, steps.pair, factors);
        for (int o = 0; o < count && !is_whole; ++o) std::copy_n(spare + o * N, N, to + o * plane);
    }

    // ---- The gradient of the weights. A unit is two vectors of a row. ----

    struct Pairs {  // of samples of a chunk and a phase
        const Window& at;
        const Tile* slopes;
        const Vec* inputs;
        int taps;       // of the phases before
        bool is_first;  // chunk
    };

    std::vector<Pairs> pair(const std::vector<PhaseParts>& phases) {
        int64_t num_slopes = 0, num_inputs = 0;
        for (const Part& each : phases[0].chunks) num_slopes += slope_tiles(each.at);
        for (const PhaseParts& phase : phases)
            for (const Part& each : phase.chunks) num_inputs += tiles_in(each.at.channels) * plane_of_pairs(each.at);
        Tile* slopes = tiles(slopes_, num_slopes);
        Vec* inputs = inputs_.of(num_inputs);
        std::vector<Pairs> result;
        for (size_t chunk = 0; chunk < phases[0].chunks.size(); ++chunk) {
            const Part& first = phases[0].chunks[chunk];
            join_slopes(first.at, first.slope, slopes);
            int taps = 0;
            for (const PhaseParts& phase : phases) {
                const Part& part = phase.chunks[chunk];
                pair_samples(part.at, part.in, inputs);
                result.push_back({part.at, slopes, inputs, taps, chunk == 0});
                inputs += tiles_in(part.at.channels) * plane_of_pairs(part.at);
                taps += part.at.kernel_h * part.at.kernel_w;
            }
            slopes += slope_tiles(first.at);
        }
        return result;
    }

    // Gives `receiver` the sums of these tiles of output channels: [phases][tops][input channels / 16][taps] tiles.
    void give(const std::vector<PhaseParts>& phases, int kernel_size, Span tops, const Tile* sums, int64_t weight,
              Receiver& receiver) {
        const Window& any = phases[0].chunks[0].at;
        const int sides = tiles_in(any.channels);
        const int64_t row = whole(kernel_size, LANES) + LANES;  // a power of two would crowd a few sets of the cache
        float* rows = row_.floats(SIDE * row);
        std::fill_n(rows, SIDE * row, 0.0f);  // also for taps that meet no pixel
        for (int top = tops.begin; top < tops.end; ++top) {
            const Tile* of_phase = sums;
            for (const PhaseParts& phase : phases) {
                const int area = int(phase.taps.size()) / any.channels;
                const Tile* of_top = of_phase + (top - tops.begin) * sides * area;
                for (int tap = 0; tap < int(phase.taps.size()); ++tap) {
                    const int c = tap / area;
                    const Tile& sum = of_top[c / SIDE * area + tap % area];
                    for (int m = 0; m < SIDE; ++m) rows[m * row + phase.taps[tap].number] = sum.rows[m][c % SIDE];
                }
                of_phase += tops.size() * sides * area;
            }
            for (int m = 0; m < std::min(SIDE, any.out_channels - top * SIDE); ++m)
                receiver.take(weight + int64_t(top * SIDE + m) * kernel_size, kernel_size, rows + m * row);
        }
    }

    static int slope_units(const Window& at) { return (at.row_vectors() + 1) / 2; }
    static int64_t slope_tiles(const Window& at) {
        return int64_t(tiles_in(at.out_channels)) * at.out_height * slope_units(at);
    }

    // to: [output channels / 16][height][units] tiles of [16][32 samples]
    static void join_slopes(const Window& at, const Vec* slope, Tile* to) {
        const int tops = tiles_in(at.out_channels), units = slope_units(at), vectors = at.row_vectors();
        for (int o = 0; o < tops * SIDE; ++o) {
            Tile* row = to + int64_t(o / SIDE) * at.out_height * units;
            for (int y = 0; y < at.out_height; ++y, row += units)
                for (int unit = 0; unit < units; ++unit) {
                    const Vec* from = slope + o * at.plane() + y * vectors + 2 * unit;
                    const bool has_second = 2 * unit + 1 < vectors;
                    row[unit].rows[o % SIDE] =
                        o < at.out_channels ? joined(from[0], has_second ? from[1] : Vec{}) : Vec{};
                }
        }
    }

    // [pairs of samples of all pixels][16 channels][2], and a whole tile
    static int64_t plane_of_pairs(const Window& at) { return whole(at.height * at.width * at.pixel, DEPTH) / 2 + SIDE; }

    // to: [input channels / 16] such planes
    static void pair_samples(const Window& at, const float* in, Vec* to) {
        const int size = at.height * at.width * at.pixel;
        for (int first = 0; first < at.channels; first += SIDE) {
            for (int begin = 0; begin < size; begin += DEPTH, to += SIDE) {
                const auto read = [=](int c, int from) -> Vec {
                    return c < at.channels ? some(in + int64_t(c) * size + from, size - from) : Vec{};
                };
                Vec pairs[LANES];
                for (int i = 0; i < SIDE; ++i)
                    pairs[i] = joined(read(first + i, begin), read(first + i, begin + LANES));
                transpose(pairs);
                std::copy_n(pairs, LANES, to);
            }
            to = std::fill_n(to, SIDE, Vec{});
        }
    }

    // Sums up the products of these rows for M x 16 output channels and N x 16 input channels, or with `more`, adds
    // them.
    template <int M, int N>
    static void weigh_rows(const Pairs& from, Span band, int top, int side, bool more, Tile* sums) {
        const Window& at = from.at;
        const int sides = tiles_in(at.channels), area = at.kernel_h * at.kernel_w, units = slope_units(at);
        const int64_t apart = int64_t(at.out_height) * units, plane = plane_of_pairs(at);
        const Tile* slopes = from.slopes + top * apart;
        const Vec* inputs = from.inputs + side * plane;
        for (int ky = 0; ky < at.kernel_h; ++ky)
            for (int kx = 0; kx < at.kernel_w; ++kx) {
                Tile* sum = sums + side * area + ky * at.kernel_w + kx;
                Tile* below = sum + int64_t(sides) * area;
                const Span rows{std::max(band.begin, at.rows.begin - ky), std::min(band.end, at.rows.end - ky)};
                const auto factors = [&](auto add) {
                    for (int y = rows.begin; y < rows.end; ++y) {
                        const Tile* a = slopes + int64_t(y) * units;
                        const Vec* b = inputs + (int64_t(y + ky) * at.width + kx) * at.pixel / 2;
                        for (int unit = 0; unit < units; ++unit, ++a, b += SIDE)
                            add(a, a + apart, b, b + plane, pairs_in(at.out_width * at.pixel - unit * DEPTH));
                    }
                };
                const Sums both{sum->rows, sum[area].rows, below->rows, below[area].rows};
                accumulate<M, N>(more ? both : Sums{}, both, 1, factors);
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

    // to: tiles of [16 pairs of outputs][16 inputs][2], for a run of inputs and the outputs from `first` on
    static void pair_outputs(const float* weight, int inputs, Span run, int outputs, int first, Tile* to) {
        for (int o = first; o < first + DEPTH; o += 2) {
            const float *even = weight + int64_t(o) * inputs, *odd = even + inputs;
            for (int i = run.begin; i < run.end; i += SIDE)
                to[(i - run.begin) / SIDE].rows[(o - first) / 2] =
                    paired(o < outputs ? some(even + i, run.end - i) : Vec{},
                           o + 1 < outputs ? some(odd + i, run.end - i) : Vec{});
        }
    }

    // sums[v][n] = slopes[v] times the weights of 32 outputs and of the inputs in tile n, or with `more`, adds them
    template <int M, int N>
    static void back_of(const Tile* slopes, const Tile* weights, int pairs, bool more, Tile* sums, int64_t apart) {
        const Sums all{sums->rows, sums[1].rows, sums[apart].rows, sums[apart + 1].rows};
        accumulate<M, N>(more ? all : Sums{}, all, 1,
                         [=](auto add) { add(slopes, slopes + 1, weights, weights + 1, pairs); });
    }

    Memory kernels_, inputs_, biases_, spare_, slopes_, sums_, row_;
};

#else

class Bfloat16 {  // does not exist
  public:
    static bool exists() { return false; }
    static bool suits(int, int) { return false; }
    void correlate(const Batch&, const Window&, const Kernels&, const float*, bool, const Vec*, Memory&, Vec*,
                   int64_t) {}
    void weigh(const std::vector<PhaseParts>&, int, int64_t, Receiver&) {}
    void connect(const Batch&, const float*, int, int, const float*, const Vec*, Vec*) {}
    void connect_back(const Batch&, const float*, int, int, const Vec*, Vec*) {}
    void outer(const Batch&, const Vec*, const Vec*, int, int, int64_t, Receiver&) {}
};

#endif

}  // namespace lcfl
