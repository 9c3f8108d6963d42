// Maximum and average pooling.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "program.h"
#include "vectors.h"

namespace lcfl {

// Returns whether the windows split an image into parts, so that each pixel is in one of them.
inline bool are_split(const Op& op, const Value& in) {
    return op.stride_h == op.kernel_h && op.stride_w == op.kernel_w && op.padding_h == 0 && op.padding_w == 0 &&
           in.height % op.kernel_h == 0 && in.width % op.kernel_w == 0;
}

// Returns the pixels of window number t in one dimension. Windows without a size share the image equally, and overlap
// if its side is not a multiple of their number.
inline Span covered(int kernel, int stride, int padding, int in, int out, int t) {
    if (kernel == 0) return {int(int64_t(t) * in / out), int((int64_t(t + 1) * in + out - 1) / out)};
    const int begin = t * stride - padding;
    return {std::max(begin, 0), std::min(begin + kernel, in)};
}

// Calls `each` for every window, with the pixel of the output, the first pixel of the window, and its height and width.
template <class Each>
void windows(const Op& op, const Value& in, const Value& out, Each each) {
    constexpr std::integral_constant<int, 2> two;  // loops of known length are faster
    const bool is_usual = op.kernel_h == 2 && op.kernel_w == 2 && are_split(op, in);
    for (int c = 0; c < out.channels; ++c)
        for (int y = 0; y < out.height; ++y)
            for (int x = 0; x < out.width; ++x) {
                const int64_t to = (int64_t(c) * out.height + y) * out.width + x;
                const Span rows = covered(op.kernel_h, op.stride_h, op.padding_h, in.height, out.height, y);
                const Span columns = covered(op.kernel_w, op.stride_w, op.padding_w, in.width, out.width, x);
                const int64_t from = (int64_t(c) * in.height + rows.begin) * in.width + columns.begin;
                if (is_usual)
                    each(to, from, two, two);
                else
                    each(to, from, rows.size(), columns.size());
            }
}

inline void max_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    windows(op, shape, pooled, [&](int64_t to, int64_t from, auto height, auto width) {
        for (int v = 0; v < V; ++v) {
            Vec most = in[from * V + v];
            for (int y = 0; y < height; ++y)
                for (int x = 0; x < width; ++x) {
                    const Vec pixel = in[(from + int64_t(y) * shape.width + x) * V + v];
                    most = ((pixel > most) | (pixel != pixel)) ? pixel : most;  // NaN wins, as in torch
                }
            out[to * V + v] = most;
        }
    });
}

// The gradient goes to the first pixel of a window that equals the maximum.
inline void max_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, const Vec* out,
                          const Vec* slope, Vec* back) {
    const bool is_split = are_split(op, shape);  // then each pixel is written once
    if (!is_split) std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t from, auto height, auto width) {
        for (int v = 0; v < V; ++v) {
            const Vec most = out[to * V + v];
            Vec left_over = slope[to * V + v];
            for (int y = 0; y < height; ++y)
                for (int x = 0; x < width; ++x) {
                    const int64_t at = (from + int64_t(y) * shape.width + x) * V + v;
                    const Mask is_most = in[at] == most;
                    const Vec zero = {}, share = is_most ? left_over : zero;
                    back[at] = is_split ? share : back[at] + share;
                    left_over = is_most ? zero : left_over;
                }
        }
    });
}

// Returns the factor of an average over a window with so many pixels. Some averages count those in the padding, too.
inline float factor(const Op& op, int pixels) { return op.eps > 0 ? op.eps : 1.0f / pixels; }

inline void avg_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    windows(op, shape, pooled, [&](int64_t to, int64_t from, auto height, auto width) {
        const float part = factor(op, height * width);
        for (int v = 0; v < V; ++v) {
            Vec sum = {};
            for (int y = 0; y < height; ++y)
                for (int x = 0; x < width; ++x) sum += in[(from + int64_t(y) * shape.width + x) * V + v];
            out[to * V + v] = sum * part;
        }
    });
}

inline void avg_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* slope, Vec* back) {
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t from, auto height, auto width) {
        const float part = factor(op, height * width);
        for (int v = 0; v < V; ++v) {
            const Vec each = slope[to * V + v] * part;
            for (int y = 0; y < height; ++y)
                for (int x = 0; x < width; ++x) back[(from + int64_t(y) * shape.width + x) * V + v] += each;
        }
    });
}

}  // namespace lcfl
