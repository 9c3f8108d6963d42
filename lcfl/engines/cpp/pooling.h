// Maximum and average pooling.

#pragma once

#include <algorithm>
#include <cstdint>

#include "program.h"
#include "vectors.h"

namespace lcfl {

template <class Each>
void windows(const Op& op, const Value& in, const Value& out, Each each) {
    for (int c = 0; c < out.channels; ++c)
        for (int y = 0; y < out.height; ++y)
            for (int x = 0; x < out.width; ++x) {
                const int top = y * op.stride_h - op.padding_h, left = x * op.stride_w - op.padding_w;
                each((int64_t(c) * out.height + y) * out.width + x, int64_t(c) * in.height * in.width, std::max(top, 0),
                     std::min(top + op.kernel_h, in.height), std::max(left, 0), std::min(left + op.kernel_w, in.width));
            }
}

inline void max_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            Vec most = in[(plane + int64_t(top) * shape.width + left) * V + v];
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) {
                    const Vec pixel = in[(plane + int64_t(y) * shape.width + x) * V + v];
                    most = ((pixel > most) | (pixel != pixel)) ? pixel : most;  // NaN wins, as in torch
                }
            out[to * V + v] = most;
        }
    });
}

// The gradient goes to the first pixel of a window that equals the maximum.
inline void max_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, const Vec* out,
                          const Vec* slope, Vec* back) {
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            const Vec most = out[to * V + v];
            Vec left_over = slope[to * V + v];
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) {
                    const int64_t at = (plane + int64_t(y) * shape.width + x) * V + v;
                    const Mask is_most = in[at] == most;
                    const Vec zero = {};
                    back[at] += is_most ? left_over : zero;
                    left_over = is_most ? zero : left_over;
                }
        }
    });
}

inline void avg_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    const float share = 1.0f / (op.kernel_h * op.kernel_w);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            Vec sum = {};
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) sum += in[(plane + int64_t(y) * shape.width + x) * V + v];
            out[to * V + v] = sum * share;
        }
    });
}

inline void avg_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* slope, Vec* back) {
    const float share = 1.0f / (op.kernel_h * op.kernel_w);
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            const Vec each = slope[to * V + v] * share;
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) back[(plane + int64_t(y) * shape.width + x) * V + v] += each;
        }
    });
}

}  // namespace lcfl
