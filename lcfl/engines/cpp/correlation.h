// Correlations of images with kernels: their outputs, and the gradients of the kernels.
//
// A convolution with strides is the sum of correlations without strides, one for each phase of its input (`Phase`).
//
// A row of pixels is computed as one vector after another. So a chunk with idle lanes is packed first: the samples of a
// pixel follow those of the pixel before it. Only the end of a row has idle lanes then, and in bfloat16, a pixel with
// an odd number of samples.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <vector>

#include "descent.h"
#include "program.h"
#include "vectors.h"

namespace lcfl {

inline int whole(int size, int block) { return (size + block - 1) / block * block; }  // rounded up to whole blocks

struct Line {  // in one dimension, pixel t of a frame is pixel first + t step of a value that has `size` pixels
    int first, step, size;

    int of(int t) const { return first + t * step; }
    Line from(int t) const { return {of(t), step, size}; }
    Span inside(int length) const {  // the pixels of a frame that are in the value; the others are zeros
        const auto place = [=](int pixel, int least) {
            return std::clamp((pixel - first + step - 1) / step, least, length);
        };
        const int begin = place(0, 0);
        return {begin, place(size, begin)};
    }
};

enum class Way { DIRECT, WINOGRAD, BFLOAT16 };

struct Window {  // a correlation of frames [channels][height][width] with kernels
    int channels, height, width, kernel_h, kernel_w, out_channels, out_height, out_width;
    Span rows, columns;  // of a frame that are not zeros
    Way way = Way::DIRECT;
    int pixel = 0;  // numbers from one pixel to the next: all lanes, or those that a packed chunk needs
    bool is_packed = false;
    // The output is computed as one row, whose pixels all read the taps of a column below one another. Frame and output
    // are equally wide, and the kernel is one column.
    bool is_run = false;

    int taps() const { return channels * kernel_h * kernel_w; }
    int64_t size() const { return int64_t(channels) * height * width; }  // of a frame, in pixels
    int rows_of_output() const { return is_run ? 1 : out_height; }
    int row_pixels() const { return is_run ? out_height * out_width : out_width; }
    int row_vectors() const { return whole(row_pixels() * pixel, LANES) / LANES; }
    int64_t plane() const { return int64_t(rows_of_output()) * row_vectors(); }

    // The output is computed in units of V vectors: pixels, or vectors of a packed row, where V is 1.
    int units() const { return is_packed ? row_vectors() : row_pixels(); }
};

// Returns the window with the pixels of a chunk. Only the last chunk of a batch can be packed. In bfloat16, pixels have
// an even number of samples, because these are multiplied in pairs.
inline Window in_chunk(Window at, const Batch& batch, int chunk) {
    at.is_packed = at.way != Way::WINOGRAD && batch.in_chunk(chunk) < batch.lanes();
    at.pixel = at.is_packed ? whole(batch.in_chunk(chunk), at.way == Way::BFLOAT16 ? 2 : 1) : batch.lanes();
    return at;
}

struct Tap {
    int number;     // in a kernel [channels][kernel_h][kernel_w] of all phases
    int64_t pixel;  // of a frame, for the first pixel of the output
};

struct Phase {  // every stride_h-th row and stride_w-th column of a padded input, and the taps that it meets
    Window at;
    Line rows, columns;  // of the input
    std::vector<Tap> taps;
};

// Returns the taps of a kernel that are not entirely in the margins, for the outputs from `first` to `last`.
inline Span inside(int first, int last, int size, Span pixels) {
    return {std::max(0, pixels.begin - last), std::min(size, pixels.end - first)};
}

// Returns the phases of a convolution that have taps. Without strides, there is one. Taps that meet no pixel for any
// output, such as all but the middle one if there is one pixel, are left out.
inline std::vector<Phase> phases_of(const Op& op, const Value& in, const Value& out) {
    const auto met = [](Line& pixels, int length, int taps) {  // moves the frame to the first of these taps
        const Span found = inside(0, length - 1, taps, pixels.inside(length + taps - 1));
        pixels = pixels.from(found.begin);
        return found;
    };
    std::vector<Phase> result;
    for (int top = 0; top < std::min(op.stride_h, op.kernel_h); ++top)
        for (int left = 0; left < std::min(op.stride_w, op.kernel_w); ++left) {
            Line rows{top - op.padding_h, op.stride_h, in.height}, columns{left - op.padding_w, op.stride_w, in.width};
            const Span ys = met(rows, out.height, whole(op.kernel_h - top, op.stride_h) / op.stride_h);
            const Span xs = met(columns, out.width, whole(op.kernel_w - left, op.stride_w) / op.stride_w);
            if (ys.size() <= 0 || xs.size() <= 0) continue;
            const int height = out.height + ys.size() - 1, width = out.width + xs.size() - 1;
            std::vector<Tap> taps;
            for (int channel = 0; channel < in.channels; ++channel)
                for (int y = 0; y < ys.size(); ++y)
                    for (int x = 0; x < xs.size(); ++x) {
                        const int row = channel * op.kernel_h + top + (ys.begin + y) * op.stride_h;
                        taps.push_back({row * op.kernel_w + left + (xs.begin + x) * op.stride_w,
                                        (int64_t(channel) * height + y) * width + x});
                    }
            result.push_back({{in.channels, height, width, ys.size(), xs.size(), out.channels, out.height, out.width,
                               rows.inside(height), columns.inside(width)},
                              rows,
                              columns,
                              std::move(taps)});
        }
    return result;
}

// Returns the correlation that gives the gradient of a phase's input. Its frame holds the slope, and its output is the
// part of the input that is in the phase, without the padding.
inline Phase turned(const Phase& phase) {
    const Window& at = phase.at;
    const int height = at.rows.size() + at.kernel_h - 1, width = at.columns.size() + at.kernel_w - 1;
    const Line rows{at.rows.begin - at.kernel_h + 1, 1, at.out_height};
    const Line columns{at.columns.begin - at.kernel_w + 1, 1, at.out_width};
    Phase result{{at.out_channels, height, width, at.kernel_h, at.kernel_w, at.channels, at.rows.size(),
                  at.columns.size(), rows.inside(height), columns.inside(width)},
                 rows,
                 columns,
                 {}};
    result.at.is_run = at.is_run;
    return result;
}

// Returns these columns of taps for `count` vectors of a row of the output, from number `vector` on.
inline Span columns_of(const Window& at, int vector, int count) {
    if (at.is_run) return {0, 1};
    const int last = std::min(((vector + count) * LANES - 1) / at.pixel, at.out_width - 1);
    return inside(std::min(vector * LANES / at.pixel, last), last, at.kernel_w, at.columns);
}

// Where the sums of a block begin, and where they go: rows of vectors for each channel.
struct Place {
    Vec* first;
    int64_t step;  // from one channel to the next
};

// Adds to a block of CB channels x XB units the sum over taps of w[o][tap] in[tap at y, x], over the input channels
// from `channel` to `end` and the taps in `rows` and the `width` columns of taps from `left` on. There is at least one
// tap: gcc keeps sums in registers before and after a loop only if it is sure that the loop runs. The first `skip`
// units are not written.
template <int CB, int XB, int V, class Width>
void correlate_block(const Window& at, int channel, int end, Span rows, int left, Width width, const float* in,
                     const float* packed, const Place& from, int skip, const Place& to) {
    Vec sum[CB][XB * V];
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i) sum[c][i] = held(from.first[c * from.step + i]);
    do {
        int ky = rows.begin;
        do {
            const float* row = in + ((int64_t(channel) * at.height + ky) * at.width + left) * at.pixel;
            const float* weight = packed + ((int64_t(channel) * at.kernel_h + ky) * at.kernel_w + left) * CB;
            int kx = 0;
            do {
                add_products(
                    sum, [=](int c) { return fill(weight[c]); }, [=](int i) { return loaded(row + i * LANES); });
                row += at.pixel, weight += CB;
            } while (++kx < width);
        } while (++ky < rows.end);
    } while (++channel < end);
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i)
            if (i >= skip * V) to.first[c * to.step + i] = held(sum[c][i]);
}

// Adds up a row of CB output channels, from `first` on, in blocks of XB units. The last block overlaps the block
// before it. The sums begin with `bias`, a block, or without one, with the values in `out`. Channels beyond the last
// one have zero weights and are written to `spare`.
template <int CB, int XB, int V>
void correlate_row(const Window& at, int channel, int end, int first, int y, const float* in, const float* packed,
                   Vec* bias, Vec* out, Vec* spare) {
    const int64_t plane = at.plane();
    const int units = at.units();
    const int valid = std::min(CB, at.out_channels - first);
    const float* weight = packed + int64_t(first) * at.taps();
    const Span rows = at.is_run ? Span{0, at.kernel_h} : inside(y, y, at.kernel_h, at.rows);
    for (int x = 0; x < units; x += XB) {
        const int left = std::min(x, units - XB);
        const Span columns = columns_of(at, left * V, XB * V);
        const Place there{out + first * plane + (int64_t(y) * units + left) * V, plane}, aside{spare, XB * V};
        const Place to = valid == CB ? there : aside, from = bias ? Place{bias, XB * V} : to;
        const float* inputs = in + int64_t(y) * at.width * at.pixel + int64_t(left) * V * LANES;
        const auto copy = [&](const Place& from, const Place& to) {
            for (int c = 0; c < valid; ++c) std::copy_n(from.first + c * from.step, XB * V, to.first + c * to.step);
        };
        const auto correlate = [&](auto width) {
            correlate_block<CB, XB, V>(at, channel, end, rows, columns.begin, width, inputs, weight, from, x - left,
                                       to);
        };
        if (valid < CB) copy(there, aside);
        const int width = columns.size();
        if (width <= 0 || rows.size() <= 0)  // no taps
            copy(from, to);
        else if (width == 2)  // a short loop is faster if its length is known
            correlate(std::integral_constant<int, 2>());
        else if (width == 3)
            correlate(std::integral_constant<int, 3>());
        else if (width == 5)
            correlate(std::integral_constant<int, 5>());
        else
            correlate(width);
        if (valid < CB) copy(aside, there);
    }
}

// Computes a whole value, or without a bias, adds to it. Goes through all output channels with as many rows, and as
// many input channels, as stay in the second-level cache.
template <int CB, int XB, int V>
void correlate(const Window& at, const float* in, const float* packed, const float* bias, Vec* out, Vec* spare) {
    const int row = whole(at.width * at.pixel, LANES) / LANES;  // vectors of the input
    const int slab = std::clamp(NEAR / ((at.is_run ? at.height : at.kernel_h) * row), 1, at.channels);
    const int band = std::max(1, NEAR / (at.channels * row) - at.kernel_h + 1);
    for (int top = 0; top < at.rows_of_output(); top += band)
        for (int channel = 0; channel < at.channels; channel += slab)
            for (int first = 0; first < at.out_channels; first += CB) {
                Vec begins[CB * XB * V];
                const bool begin = bias && channel == 0;
                if (begin)
                    for (int i = 0; i < CB * XB * V; ++i) begins[i] = fill(bias[first + i / (XB * V)]);
                for (int y = top; y < std::min(top + band, at.rows_of_output()); ++y)
                    correlate_row<CB, XB, V>(at, channel, std::min(channel + slab, at.channels), first, y, in, packed,
                                             begin ? begins : nullptr, out, spare);
            }
}

struct Blocks {
    int channels, units;
};

// Returns the fastest blocks for a shape, among the blocks whose sums fit into the registers. The time for a tap counts
// its products, its loads of weights and its loads of values. Loads of values count twice, because they come from the
// second-level cache.
template <int V>
Blocks best_blocks(const Window& at) {
    static const Blocks all[] = {{6, 4}, {4, 6}, {8, 3}, {3, 8}, {12, 2}, {24, 1},  // 24 sums
                                 {6, 2}, {4, 3}, {3, 4}, {2, 6}, {12, 1},           // 12 sums
                                 {3, 2}, {2, 3}, {6, 1}};                           // 6 sums
    Blocks best{};
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Blocks& each : all) {
        if (each.channels * each.units != SUMS / V || each.units > at.units()) continue;
        const int64_t tap = SUMS + each.channels + 2 * each.units * V;
        const int64_t time = tap * whole(at.out_channels, each.channels) * whole(at.units(), each.units);
        if (time < least) best = each, least = time;
    }
    return best;
}

template <int V>
void correlate_with(Blocks b, const Window& at, const float* in, const float* packed, const float* bias, Vec* out,
                    Vec* spare) {
    const int code = b.channels * 100 + b.units;
#define LCFL_CASE(C, X) \
    case C * 100 + X:   \
        return correlate<C, X, V>(at, in, packed, bias, out, spare);
    if constexpr (SUMS / V == 24) {
        switch (code) {
            LCFL_CASE(6, 4) LCFL_CASE(4, 6) LCFL_CASE(8, 3) LCFL_CASE(3, 8) LCFL_CASE(12, 2) LCFL_CASE(24, 1)
        }
    } else if constexpr (SUMS / V == 12) {
        switch (code) { LCFL_CASE(4, 3) LCFL_CASE(3, 4) LCFL_CASE(6, 2) LCFL_CASE(2, 6) LCFL_CASE(12, 1) }
    } else {
        switch (code) { LCFL_CASE(3, 2) LCFL_CASE(2, 3) LCFL_CASE(6, 1) }
    }
#undef LCFL_CASE
    std::abort();  // a block of `best_blocks` is missing
}

// Interleaves CB rows of `size` values. The rows are `stride` apart, and the values of a row are `step` apart. Rows
// from `count` on are zeros. Returns the end of what it has written.
template <int CB>
float* interleave(const float* rows, int64_t stride, int64_t size, int64_t step, int count, float* packed) {
    for (int64_t i = 0; i < size; ++i, rows += step, packed += CB)
        if (count >= CB)
            for (int c = 0; c < CB; ++c) packed[c] = rows[c * stride];
        else
            for (int c = 0; c < CB; ++c) packed[c] = c < count ? rows[c * stride] : 0;
    return packed;
}

// Calls `act` with a block's number of channels as a constant. A loop of that length is then three times as fast.
template <int... known, class Act>
void with_channels(int channels, Act act) {
    const bool is_known = (... || (channels == known && (act(std::integral_constant<int, known>()), true)));
    if (!is_known) std::abort();  // a block of `best_blocks` is missing
}

// Rearranges weights [O][taps] as [O / CB][taps][CB] and pads the last block with zeros.
inline void pack(const float* weight, int out_channels, int taps, int block, float* packed) {
    with_channels<2, 3, 4, 6, 8, 12, 24>(block, [&](auto width) {
        constexpr int CB = decltype(width)::value;
        for (int first = 0; first < out_channels; first += CB)
            packed = interleave<CB>(weight + int64_t(first) * taps, taps, taps, 1, out_channels - first, packed);
    });
}

// Rearranges weights [O][C][KH][KW] for the backward correlation, as [C / CB][O][KH KW reversed][CB], padded in the
// same way.
inline void pack_turned(const float* weight, int out_channels, int channels, int area, int block, float* packed) {
    with_channels<2, 3, 4, 6, 8, 12, 24>(block, [&](auto width) {
        constexpr int CB = decltype(width)::value;
        for (int o = 0; o < out_channels; ++o)
            for (int first = 0; first < channels; first += CB)
                interleave<CB>(weight + (int64_t(o) * channels + first) * area + area - 1, area, area, -1,
                               channels - first, packed + (int64_t(first) * out_channels + o * CB) * area);
    });
}

struct Part {  // what the gradient of the weights reads of a chunk
    Window at;
    const float* in;
    const Vec* slope;
};

struct PhaseParts {  // the same of a phase
    const std::vector<Tap>& taps;
    std::vector<Part> chunks;
};

// d loss / d w[o][tap] = sum over pixels and lanes of slope[o] in[tap], for CB channels x TB taps at a time.
template <int CB, int TB>
void weigh_block(const Window& at, const float* const* in, const Vec* const* slope,
                 Vec (&__restrict sum)[CB][TB]) {  // without restrict, every product would be followed by a store
    const int row = at.row_vectors();
    for (int y = 0; y < at.rows_of_output(); ++y) {
        const int64_t to = int64_t(y) * row, from = int64_t(y) * at.width * at.pixel;
        for (int i = 0; i < row; ++i)
            add_products(
                sum, [=](int c) { return slope[c][to + i]; }, [=](int t) { return loaded(in[t] + from + i * LANES); });
    }
}

// Returns how many blocks of CB channels use the same inputs in turn: one if all inputs stay in the second-level cache
// anyway, and otherwise as many as have their slopes and their gradient in half of it.
template <int CB>
int blocks_at_once(const std::vector<PhaseParts>& phases, int size) {
    int64_t inputs = 0, channel = size / LANES;
    for (const PhaseParts& phase : phases)
        for (const Part& part : phase.chunks) inputs += part.at.size() * part.at.pixel / LANES;
    for (const Part& part : phases[0].chunks) channel += part.at.plane();
    return inputs <= NEAR ? 1 : int(std::clamp<int64_t>(NEAR / 2 / (CB * channel), 1, 8));
}

// Writes d loss / d w[o][tap] for CB channels from `first` on and the taps from `begin` to `end` to rows[CB][size].
// If it were inlined into the loops below, its pointers would not stay in registers.
template <int CB, int TB>
__attribute__((noinline)) void weigh_taps(const PhaseParts& phase, int first, int begin, int end, int size,
                                          float* rows) {
    const int last_tap = int(phase.taps.size()) - 1, last = phase.chunks[0].at.out_channels - 1;
    for (int tap = begin; tap < end; tap += TB) {
        Vec sum[CB][TB] = {}, flat[CB * TB];
        for (const Part& part : phase.chunks) {
            const float* from[TB];
            const Vec* rise[CB];
            for (int t = 0; t < TB; ++t)  // beyond the last tap, the last one is used again
                from[t] = part.in + phase.taps[std::min(tap + t, last_tap)].pixel * part.at.pixel;
            for (int c = 0; c < CB; ++c) rise[c] = part.slope + std::min(first + c, last) * part.at.plane();
            weigh_block<CB, TB>(part.at, from, rise, sum);
        }
        float found[CB * TB];
        for (int c = 0; c < CB; ++c)
            for (int t = 0; t < TB; ++t) flat[c * TB + t] = held(sum[c][t]);
        totals_of<CB * TB>(flat, found);
        for (int c = 0; c < CB; ++c)
            for (int t = 0; t < TB && tap + t <= last_tap; ++t)
                rows[int64_t(c) * size + phase.taps[tap + t].number] = found[c * TB + t];
    }
}

// Gives `receiver` the gradient of the weights, which begin at `weight` in the model. A kernel has `size` taps.
template <int CB, int TB>
void weigh_in_blocks(const std::vector<PhaseParts>& phases, int size, int64_t weight, Memory& memory,
                     Receiver& receiver) {
    const int out_channels = phases[0].chunks[0].at.out_channels, blocks = blocks_at_once<CB>(phases, size);
    const int group = CB * blocks, panel = blocks == 1 ? size : 4 * TB;
    float* rows = memory.floats(int64_t(group) * size);
    std::fill_n(rows, int64_t(group) * size, 0.0f);  // also for taps that meet no pixel
    for (int begin = 0, end; begin < out_channels; begin = end) {
        end = std::min(begin + group, out_channels);
        for (const PhaseParts& phase : phases) {
            const int taps = int(phase.taps.size());
            for (int tap = 0; tap < taps; tap += panel)
                for (int first = begin; first < end; first += CB)
                    weigh_taps<CB, TB>(phase, first, tap, std::min(tap + panel, taps), size,
                                       rows + int64_t(first - begin) * size);
        }
        receiver.take(weight + int64_t(begin) * size, int64_t(end - begin) * size, rows);
    }
}

// Uses blocks of few or of many channels, depending on which extend less beyond the last channel and the last tap.
inline void weigh(const std::vector<PhaseParts>& phases, int size, int64_t weight, Memory& memory, Receiver& receiver) {
    constexpr int FEW = SUMS < 24 ? 3 : 4, MANY = SUMS / FEW;
    const auto work = [&](int channels, int taps) {
        int64_t result = 0;
        for (const PhaseParts& phase : phases) result += whole(int(phase.taps.size()), taps);
        return result * whole(phases[0].chunks[0].at.out_channels, channels);
    };
    const auto blocks = work(MANY, FEW) < work(FEW, MANY) ? weigh_in_blocks<MANY, FEW> : weigh_in_blocks<FEW, MANY>;
    blocks(phases, size, weight, memory, receiver);
}

struct Vectors {  // those of a pixel that hold samples of a chunk
    Vectors(const Batch& batch, int chunk)
        : count(whole(batch.in_chunk(chunk), LANES) / LANES),
          idle{Vec{} == batch.holds(chunk, 0), Vec{} == batch.holds(chunk, 1)} {}

    int count;
    Mask idle[2];
};

// Copies a chunk of a value into a frame, whose rows are `row` numbers apart, and writes zeros around it and into idle
// lanes. A packed frame has no vectors without a sample. In it, each vector overlaps the next one, and a vector of
// zeros follows the frame, because its last row is read in whole vectors.
inline void frame(const Vec* in, const Value& shape, const Batch& batch, int chunk, const Window& at, const Line& rows,
                  const Line& columns, int row, float* out) {
    const Vectors vectors(batch, chunk);
    const int count = at.is_packed ? vectors.count : batch.V;
    for (int c = 0; c < shape.channels; ++c)
        for (int y = 0; y < at.height; ++y, out += row) {
            const Span inside = y >= at.rows.begin && y < at.rows.end ? at.columns : Span{0, 0};
            std::fill_n(out, inside.begin * at.pixel, 0.0f);
            for (int x = inside.begin; x < inside.end; ++x) {
                const int64_t pixel = (int64_t(c) * shape.height + rows.of(y)) * shape.width + columns.of(x);
                for (int v = 0; v < count; ++v) {
                    const Vec value = in[pixel * batch.V + v];
                    *reinterpret_cast<Loose*>(out + int64_t(x) * at.pixel + v * LANES) =
                        vectors.idle[v] ? Vec{} : value;
                }
            }
            std::fill(out + inside.end * at.pixel, out + row, 0.0f);
        }
    if (at.is_packed) std::fill_n(out, LANES, 0.0f);
}

// Copies the output of a window to pixels of a value, with zeros in idle lanes.
inline void unpack(const Vec* in, const Batch& batch, int chunk, const Window& at, const Line& rows,
                   const Line& columns, Vec* out) {
    const Vectors vectors(batch, chunk);
    const int row = at.is_run ? at.out_width * at.pixel : at.row_vectors() * LANES;
    for (int c = 0; c < at.out_channels; ++c, in += at.plane())
        for (int y = 0; y < at.out_height; ++y) {
            Vec* to = out + (int64_t(c) * rows.size + rows.of(y)) * columns.size * batch.V;
            for (int x = 0; x < at.out_width; ++x)
                for (int v = 0; v < batch.V; ++v) {
                    const float* from = reinterpret_cast<const float*>(in) + y * row + x * at.pixel + v * LANES;
                    const Vec value = v < vectors.count ? loaded(from) : Vec{};
                    to[columns.of(x) * batch.V + v] = vectors.idle[v] ? Vec{} : value;
                }
        }
}

}  // namespace lcfl
