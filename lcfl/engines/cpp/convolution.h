// Convolutions: the forward pass, and the gradients of the input and of the weights.
//
// With a horizontal stride of 1, a row of pixels is computed as one vector after another. So a chunk with idle lanes is
// packed first: the samples of a pixel follow those of the pixel before it, and only the end of a row has idle lanes.

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

struct Window {  // a correlation of [channels][height][width] with kernels; the sizes include the margins of zeros
    int channels, height, width, kernel_h, kernel_w, stride_h, stride_w, out_channels, out_height, out_width;
    int top, bottom, left, right;  // outside of these rows and columns are zeros
    int pixel = 0;  // numbers from one pixel to the next: all lanes, or only the samples of a packed chunk
    bool is_packed = false;

    int taps() const { return channels * kernel_h * kernel_w; }
    int row_vectors() const { return whole(out_width * pixel, LANES) / LANES; }  // of the output
    int64_t plane() const { return int64_t(out_height) * row_vectors(); }

    // The output is computed in units of V vectors: pixels, or vectors of a packed row, where V is 1.
    int units() const { return is_packed ? row_vectors() : out_width; }
    int unit_step() const { return is_packed ? LANES : stride_w * pixel; }  // of the input
};

// Returns the window with the pixels of a chunk. Only the last chunk of a batch can be packed.
inline Window in_chunk(Window at, const Batch& batch, int chunk) {
    at.is_packed = at.stride_w == 1 && batch.in_chunk(chunk) < batch.lanes();
    at.pixel = at.is_packed ? batch.in_chunk(chunk) : batch.lanes();
    return at;
}

struct Span {  // the taps of a kernel that are not entirely in the margins
    int begin, end;
};

inline Span inside(int first, int last, int size, int low, int high) {
    return {std::max(0, low - last), std::min(size, high - first)};
}

inline Span columns_of(const Window& at, int unit, int count) {
    int first = unit, last = unit + count - 1;
    if (at.is_packed) {
        last = std::min(((last + 1) * LANES - 1) / at.pixel, at.out_width - 1);
        first = std::min(first * LANES / at.pixel, last);
    }
    return inside(first * at.stride_w, last * at.stride_w, at.kernel_w, at.left, at.right);
}

// A block of CB channels x XB units of out[o][y][x] = bias[o] + sum over taps of w[o][tap] in[tap at y, x], over the
// input channels from `channel` to `end`. Without a bias, the sum is added to the values in `out`. The first `skip`
// units are left unchanged.
template <int CB, int XB, int V>
void correlate_block(const Window& at, int channel, int end, Span rows, Span columns, int skip, const float* in,
                     const float* packed, const float* bias, Vec* out, int64_t plane) {
    Vec sum[CB][XB * V];
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i) sum[c][i] = held(bias ? fill(bias[c]) : out[c * plane + i]);
    const auto add = [&](auto width, auto step) {
        for (int each = channel; each < end; ++each)
            for (int ky = rows.begin; ky < rows.end; ++ky) {
                const float* row = in + ((int64_t(each) * at.height + ky) * at.width + columns.begin) * at.pixel;
                const float* weight = packed + ((int64_t(each) * at.kernel_h + ky) * at.kernel_w + columns.begin) * CB;
                for (int kx = 0; kx < width; ++kx, row += at.pixel, weight += CB)
                    add_products(
                        sum, [=](int c) { return fill(weight[c]); },
                        [=](int i) { return loaded(row + i / V * step + i % V * LANES); });
            }
    };
    const int width = columns.end - columns.begin;
    constexpr std::integral_constant<int, V * LANES> next;
    if (at.unit_step() != next)
        add(width, at.unit_step());
    else if (width == 3)  // a short loop is faster if its length is known
        add(std::integral_constant<int, 3>(), next);
    else if (width == 5)
        add(std::integral_constant<int, 5>(), next);
    else
        add(width, next);
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i)
            if (i >= skip * V) out[c * plane + i] = held(sum[c][i]);
}

// Adds up a row of CB output channels, from `first` on, in blocks of XB units. The last block overlaps the block
// before it. Channels beyond the last one have zero weights and are written to `spare`.
template <int CB, int XB, int V>
void correlate_row(const Window& at, int channel, int end, int first, int y, const float* in, const float* packed,
                   const float* bias, Vec* out, Vec* spare) {
    const int64_t plane = at.plane();
    const int units = at.units();
    const int valid = std::min(CB, at.out_channels - first);
    const float* weight = packed + int64_t(first) * at.taps();
    const float* begins = channel == 0 ? bias + first : nullptr;
    const Span rows = inside(y * at.stride_h, y * at.stride_h, at.kernel_h, at.top, at.bottom);
    for (int x = 0; x < units; x += XB) {
        const int left = std::min(x, units - XB);
        const Span columns = columns_of(at, left, XB);
        const float* from = in + int64_t(y) * at.stride_h * at.width * at.pixel + int64_t(left) * at.unit_step();
        Vec* to = out + first * plane + (int64_t(y) * units + left) * V;
        if (valid == CB) {
            correlate_block<CB, XB, V>(at, channel, end, rows, columns, x - left, from, weight, begins, to, plane);
            continue;
        }
        for (int c = 0; c < valid; ++c) std::copy_n(to + c * plane, XB * V, spare + c * XB * V);
        correlate_block<CB, XB, V>(at, channel, end, rows, columns, x - left, from, weight, begins, spare, XB * V);
        for (int c = 0; c < valid; ++c) std::copy_n(spare + c * XB * V, XB * V, to + c * plane);
    }
}

// Computes a whole value. Goes through all output channels with as many rows, and as many input channels, as stay in
// the second-level cache.
template <int CB, int XB, int V>
void correlate(const Window& at, const float* in, const float* packed, const float* bias, Vec* out, Vec* spare) {
    const int row = whole(at.width * at.pixel, LANES) / LANES;  // vectors of the input
    const int slab = std::clamp(NEAR / (at.kernel_h * row), 1, at.channels);
    const int band = std::max(1, (NEAR / (at.channels * row) - at.kernel_h) / at.stride_h + 1);
    for (int top = 0; top < at.out_height; top += band)
        for (int channel = 0; channel < at.channels; channel += slab)
            for (int first = 0; first < at.out_channels; first += CB)
                for (int y = top; y < std::min(top + band, at.out_height); ++y)
                    correlate_row<CB, XB, V>(at, channel, std::min(channel + slab, at.channels), first, y, in, packed,
                                             bias, out, spare);
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

// d loss / d w[o][tap] = sum over pixels and lanes of slope[o] in[tap], for CB channels x TB taps at a time.
template <int CB, int TB, int V>
void weigh_block(const Window& at, const float* const* in, const Vec* const* slope,
                 Vec (&__restrict sum)[CB][TB]) {  // without restrict, every product would be followed by a store
    const auto add = [&](int64_t to, int64_t from) {
        add_products(sum, [=](int c) { return slope[c][to]; }, [=](int t) { return loaded(in[t] + from); });
    };
    const int row = at.row_vectors(), next = at.stride_w * at.pixel;
    for (int y = 0; y < at.out_height; ++y) {
        const int64_t to = int64_t(y) * row, from = int64_t(y) * at.stride_h * at.width * at.pixel;
        if (at.stride_w == 1)
            for (int i = 0; i < row; ++i) add(to + i, from + i * LANES);
        else
            for (int x = 0; x < at.out_width; ++x)
                for (int v = 0; v < V; ++v) add(to + x * V + v, from + int64_t(x) * next + v * LANES);
    }
}

// Gives `receiver` the gradient of the weights, which begin at `weight` in the model.
template <int CB, int TB, int V>
void weigh_in_blocks(const std::vector<Part>& parts, int64_t weight, float* rows, Receiver& receiver) {
    const Window& at = parts[0].at;
    const int taps = at.taps();
    std::vector<int64_t> places;  // of each tap in the input, in pixels, for the first pixel of the output
    places.reserve(taps);
    for (int channel = 0; channel < at.channels; ++channel)
        for (int ky = 0; ky < at.kernel_h; ++ky)
            for (int kx = 0; kx < at.kernel_w; ++kx)
                places.push_back((int64_t(channel) * at.height + ky) * at.width + kx);
    for (int first = 0; first < at.out_channels; first += CB) {
        for (int tap = 0; tap < taps; tap += TB) {
            Vec sum[CB][TB] = {}, flat[CB * TB];
            for (const Part& part : parts) {
                const float* from[TB];
                const Vec* rise[CB];
                for (int t = 0; t < TB; ++t)  // beyond the last tap, the last one is used again
                    from[t] = part.in + places[std::min(tap + t, taps - 1)] * part.at.pixel;
                for (int c = 0; c < CB; ++c)
                    rise[c] = part.slope + std::min(first + c, at.out_channels - 1) * part.at.plane();
                weigh_block<CB, TB, V>(part.at, from, rise, sum);
            }
            float found[CB * TB];
            for (int c = 0; c < CB; ++c)
                for (int t = 0; t < TB; ++t) flat[c * TB + t] = held(sum[c][t]);
            totals_of<CB * TB>(flat, found);
            for (int c = 0; c < CB; ++c)
                for (int t = 0; t < TB && tap + t < taps; ++t) rows[int64_t(c) * taps + tap + t] = found[c * TB + t];
        }
        receiver.take(weight + int64_t(first) * taps, int64_t(std::min(CB, at.out_channels - first)) * taps, rows);
    }
}

// Uses blocks of few or of many channels, depending on which extend less beyond the last channel and the last tap.
template <int V>
void weigh(const std::vector<Part>& parts, int64_t weight, Memory& rows, Receiver& receiver) {
    constexpr int FEW = SUMS < 24 ? 3 : 4, MANY = SUMS / FEW;
    const Window& at = parts[0].at;
    const auto work = [&](int channels, int taps) {
        return int64_t(whole(at.out_channels, channels)) * whole(at.taps(), taps);
    };
    const auto blocks =
        work(MANY, FEW) < work(FEW, MANY) ? weigh_in_blocks<MANY, FEW, V> : weigh_in_blocks<FEW, MANY, V>;
    blocks(parts, weight, rows.floats(int64_t(MANY) * at.taps()), receiver);
}

struct Frame {  // of zeros, for a value whose pixels are `stride` apart in it
    int top, left, stride_h, stride_w, height;
    int pixel;  // numbers from one pixel to the next
    int row;    // and from one row to the next
};

struct Vectors {  // those of a pixel that hold samples of a chunk
    Vectors(const Batch& batch, int chunk)
        : count(whole(batch.in_chunk(chunk), LANES) / LANES),
          idle{Vec{} == batch.holds(chunk, 0), Vec{} == batch.holds(chunk, 1)} {}

    template <class Act>
    void each(int width, Act act) const {  // of a row of pixels
        for (int x = 0; x < width; ++x)
            for (int v = 0; v < count; ++v) act(x, v, idle[v]);
    }

    int count;
    Mask idle[2];
};

// Copies a value into a frame. Without idle lanes, each vector overlaps the next one, and a vector of zeros follows the
// frame, because its last row is read in whole vectors.
inline void frame(const Vec* in, const Value& shape, const Batch& batch, int chunk, const Frame& to, float* out) {
    const int64_t size = int64_t(shape.channels) * to.height * to.row, more = to.pixel < batch.lanes() ? LANES : 0;
    std::memset(out, 0, sizeof(float) * (size + more));
    const Vectors vectors(batch, chunk);
    for (int c = 0; c < shape.channels; ++c)
        for (int y = 0; y < shape.height; ++y) {
            const Vec* from = in + (int64_t(c) * shape.height + y) * shape.width * batch.V;
            float* row = out + (int64_t(c) * to.height + to.top + y * to.stride_h) * to.row + to.left * to.pixel;
            vectors.each(shape.width, [=](int x, int v, Mask idle) {
                const Vec value = from[x * batch.V + v];
                *reinterpret_cast<Loose*>(row + int64_t(x) * to.stride_w * to.pixel + v * LANES) = idle ? Vec{} : value;
            });
        }
}

// Copies packed rows to a value with idle lanes, which are zeros.
inline void unpack(const Vec* in, const Window& at, const Batch& batch, int chunk, Vec* out) {
    std::memset(static_cast<void*>(out), 0, sizeof(Vec) * at.out_channels * at.out_height * at.out_width * batch.V);
    const Vectors vectors(batch, chunk);
    for (int64_t y = 0; y < int64_t(at.out_channels) * at.out_height; ++y) {
        const float* from = reinterpret_cast<const float*>(in + y * at.row_vectors());
        Vec* row = out + y * at.out_width * batch.V;
        vectors.each(at.out_width, [=](int x, int v, Mask idle) {
            const Vec value = loaded(from + x * at.pixel + v * LANES);
            row[x * batch.V + v] = idle ? Vec{} : value;
        });
    }
}

}  // namespace lcfl
