// Convolutions: the forward pass, and the gradients of the input and of the weights.

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

struct Window {  // a correlation of [channels][height][width] with kernels; the sizes include the margins of zeros
    int channels, height, width, kernel_h, kernel_w, stride_h, stride_w, out_channels, out_height, out_width;
    int top, bottom, left, right;  // outside of these rows and columns are zeros
    int taps() const { return channels * kernel_h * kernel_w; }
};

inline int whole(int size, int block) { return (size + block - 1) / block * block; }  // rounded up to whole blocks

struct Span {  // the taps of a kernel that are not entirely in the margins
    int begin, end;
};

inline Span inside(int first, int last, int size, int low, int high) {
    return {std::max(0, low - last), std::min(size, high - first)};
}

// A block of CB channels x XB pixels of out[o][y][x] = bias[o] + sum over taps of w[o][tap] in[tap at y, x], over the
// input channels from `channel` to `end`. Without a bias, the sum is added to the values in `out`. The first `skip`
// pixels are left unchanged.
template <int CB, int XB, int V>
void correlate_block(const Window& at, int channel, int end, Span rows, Span columns, int skip, const Vec* in,
                     const float* packed, const float* bias, Vec* out, int64_t plane) {
    Vec sum[CB][XB * V];
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i) sum[c][i] = held(bias ? fill(bias[c]) : out[c * plane + i]);
    const int step = at.stride_w * V;
    const auto add = [&](auto width) {
        for (int each = channel; each < end; ++each)
            for (int ky = rows.begin; ky < rows.end; ++ky) {
                const Vec* row = in + ((int64_t(each) * at.height + ky) * at.width + columns.begin) * V;
                const float* weight = packed + ((int64_t(each) * at.kernel_h + ky) * at.kernel_w + columns.begin) * CB;
                for (int kx = 0; kx < width; ++kx, row += V, weight += CB)
                    add_products(
                        sum, [=](int c) { return fill(weight[c]); }, [=](int i) { return row[i / V * step + i % V]; });
            }
    };
    switch (const int width = columns.end - columns.begin) {  // a short loop is faster if its length is known
        case 3:
            add(std::integral_constant<int, 3>());
            break;
        case 5:
            add(std::integral_constant<int, 5>());
            break;
        default:
            add(width);
    }
    for (int c = 0; c < CB; ++c)
        for (int i = 0; i < XB * V; ++i)
            if (i >= skip * V) out[c * plane + i] = held(sum[c][i]);
}

// Adds up a row of CB output channels, from `first` on, in blocks of XB pixels. The last block overlaps the block
// before it. Channels beyond the last one have zero weights and are written to `spare`.
template <int CB, int XB, int V>
void correlate_row(const Window& at, int channel, int end, int first, int y, const Vec* in, const float* packed,
                   const float* bias, Vec* out, Vec* spare) {
    const int64_t plane = int64_t(at.out_height) * at.out_width * V;
    const int valid = std::min(CB, at.out_channels - first);
    const float* weight = packed + int64_t(first) * at.taps();
    const float* begins = channel == 0 ? bias + first : nullptr;
    const Span rows = inside(y * at.stride_h, y * at.stride_h, at.kernel_h, at.top, at.bottom);
    for (int x = 0; x < at.out_width; x += XB) {
        const int left = std::min(x, at.out_width - XB);
        const Span columns = inside(left * at.stride_w, (left + XB - 1) * at.stride_w, at.kernel_w, at.left, at.right);
        const Vec* from = in + (int64_t(y) * at.stride_h * at.width + int64_t(left) * at.stride_w) * V;
        Vec* to = out + first * plane + (int64_t(y) * at.out_width + left) * V;
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
void correlate(const Window& at, const Vec* in, const float* packed, const float* bias, Vec* out, Vec* spare) {
    const int slab = std::clamp(NEAR / (at.kernel_h * at.width * V), 1, at.channels);
    const int band = std::max(1, (NEAR / (at.channels * at.width * V) - at.kernel_h) / at.stride_h + 1);
    for (int top = 0; top < at.out_height; top += band)
        for (int channel = 0; channel < at.channels; channel += slab)
            for (int first = 0; first < at.out_channels; first += CB)
                for (int y = top; y < std::min(top + band, at.out_height); ++y)
                    correlate_row<CB, XB, V>(at, channel, std::min(channel + slab, at.channels), first, y, in, packed,
                                             bias, out, spare);
}

struct Blocks {
    int channels, pixels;
};

// Returns the fastest blocks for a shape, among the blocks whose sums fit into the registers. The time for a tap counts
// its products, its loads of weights and its loads of values. Loads of values count twice, because they come from the
// second-level cache.
template <int V>
Blocks best_blocks(const Window& at) {
    static const Blocks all[] = {{6, 4}, {4, 6}, {8, 3}, {3, 8}, {12, 2}, {24, 1},  // 24 sums
                                 {6, 2}, {4, 3}, {3, 4}, {2, 6}, {12, 1},           // 12 sums
                                 {3, 2}, {2, 3}, {6, 1}};                           // 6 sums
    Blocks best{1, 1};
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Blocks& each : all) {
        if (each.channels * each.pixels != SUMS / V || each.pixels > at.out_width) continue;
        const int64_t tap = SUMS + each.channels + 2 * each.pixels * V;
        const int64_t time = tap * whole(at.out_channels, each.channels) * whole(at.out_width, each.pixels);
        if (time < least) best = each, least = time;
    }
    return best;
}

template <int V>
void correlate_with(Blocks b, const Window& at, const Vec* in, const float* packed, const float* bias, Vec* out,
                    Vec* spare) {
    const int code = b.channels * 100 + b.pixels;
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
    correlate<1, 1, V>(at, in, packed, bias, out, spare);
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
    with_channels<1, 2, 3, 4, 6, 8, 12, 24>(block, [&](auto width) {
        constexpr int CB = decltype(width)::value;
        for (int first = 0; first < out_channels; first += CB)
            packed = interleave<CB>(weight + int64_t(first) * taps, taps, taps, 1, out_channels - first, packed);
    });
}

// Rearranges weights [O][C][KH][KW] for the backward correlation, as [C / CB][O][KH KW reversed][CB], padded in the
// same way.
inline void pack_turned(const float* weight, int out_channels, int channels, int area, int block, float* packed) {
    with_channels<1, 2, 3, 4, 6, 8, 12, 24>(block, [&](auto width) {
        constexpr int CB = decltype(width)::value;
        for (int o = 0; o < out_channels; ++o)
            for (int first = 0; first < channels; first += CB)
                interleave<CB>(weight + (int64_t(o) * channels + first) * area + area - 1, area, area, -1,
                               channels - first, packed + (int64_t(first) * out_channels + o * CB) * area);
    });
}

// d loss / d w[o][tap] = sum over pixels and lanes of slope[o] in[tap], for CB channels x TB taps at a time.
template <int CB, int TB, int V>
void weigh_block(const Window& at, const Vec* const* in, const Vec* const* slope,
                 Vec (&__restrict sum)[CB][TB]) {  // without restrict, every product would be followed by a store
    const auto add = [&](int64_t to, int64_t from) {
        add_products(sum, [=](int c) { return slope[c][to]; }, [=](int t) { return in[t][from]; });
    };
    for (int y = 0; y < at.out_height; ++y) {
        const int64_t to = int64_t(y) * at.out_width * V, from = int64_t(y) * at.stride_h * at.width * V;
        if (at.stride_w == 1)
            for (int i = 0; i < at.out_width * V; ++i) add(to + i, from + i);
        else
            for (int x = 0; x < at.out_width; ++x)
                for (int v = 0; v < V; ++v) add(to + x * V + v, from + int64_t(x) * at.stride_w * V + v);
    }
}

// Gives `receiver` the gradient of the weights, which begin at `weight` in the model.
template <int CB, int TB, int V>
void weigh_in_blocks(const Window& at, const Vec* in, int64_t in_chunk, const Vec* slope, int64_t slope_chunk,
                     int chunks, int64_t weight, float* rows, Receiver& receiver) {
    const int taps = at.taps();
    const int64_t plane = int64_t(at.out_height) * at.out_width * V;
    std::vector<int64_t> places;  // of each tap in the input, for the first pixel of the output
    places.reserve(taps);
    for (int channel = 0; channel < at.channels; ++channel)
        for (int ky = 0; ky < at.kernel_h; ++ky)
            for (int kx = 0; kx < at.kernel_w; ++kx)
                places.push_back(((int64_t(channel) * at.height + ky) * at.width + kx) * V);
    for (int first = 0; first < at.out_channels; first += CB) {
        for (int tap = 0; tap < taps; tap += TB) {
            Vec sum[CB][TB] = {}, flat[CB * TB];
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const Vec *from[TB], *rise[CB];
                for (int t = 0; t < TB; ++t)  // beyond the last tap, the last one is used again
                    from[t] = in + chunk * in_chunk + places[std::min(tap + t, taps - 1)];
                for (int c = 0; c < CB; ++c)
                    rise[c] = slope + chunk * slope_chunk + std::min(first + c, at.out_channels - 1) * plane;
                weigh_block<CB, TB, V>(at, from, rise, sum);
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
void weigh(const Window& at, const Vec* in, int64_t in_chunk, const Vec* slope, int64_t slope_chunk, int chunks,
           int64_t weight, Memory& rows, Receiver& receiver) {
    constexpr int FEW = SUMS < 24 ? 3 : 4, MANY = SUMS / FEW;
    const auto work = [&](int channels, int taps) {
        return int64_t(whole(at.out_channels, channels)) * whole(at.taps(), taps);
    };
    const auto blocks =
        work(MANY, FEW) < work(FEW, MANY) ? weigh_in_blocks<MANY, FEW, V> : weigh_in_blocks<FEW, MANY, V>;
    blocks(at, in, in_chunk, slope, slope_chunk, chunks, weight, rows.floats(int64_t(MANY) * at.taps()), receiver);
}

// Copies a value into a frame of zeros, with its pixels `stride` apart.
inline void frame(const Vec* in, const Value& shape, int V, int top, int left, int stride_h, int stride_w, int height,
                  int width, Vec* out) {
    std::memset(static_cast<void*>(out), 0, sizeof(Vec) * shape.channels * height * width * V);
    for (int c = 0; c < shape.channels; ++c)
        for (int y = 0; y < shape.height; ++y) {
            const Vec* from = in + (int64_t(c) * shape.height + y) * shape.width * V;
            Vec* to = out + ((int64_t(c) * height + top + y * stride_h) * width + left) * V;
            for (int x = 0; x < shape.width; ++x)
                for (int v = 0; v < V; ++v) to[int64_t(x) * stride_w * V + v] = from[x * V + v];
        }
}

}  // namespace lcfl
