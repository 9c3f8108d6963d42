// Products of a value and gates: one gate for each number of a sample, or one for each channel.

#pragma once

#include <cstdint>

#include "vectors.h"

namespace lcfl {

// out = in gate, for a chunk. A gate belongs to size / gates numbers in a row.
inline void multiply(int64_t size, int64_t gates, int V, const Vec* in, const Vec* gate, Vec* out) {
    const int64_t area = size / gates;
    for (int64_t g = 0; g < gates; ++g)
        for (int64_t i = g * area; i < (g + 1) * area; ++i)
            for (int v = 0; v < V; ++v) out[i * V + v] = in[i * V + v] * gate[g * V + v];
}

// Writes the gradient of the gates: the sum of slope times input over the numbers that a gate belongs to.
inline void multiply_back(int64_t size, int64_t gates, int V, const Vec* slope, const Vec* in, Vec* back) {
    const int64_t area = size / gates;
    for (int64_t g = 0; g < gates; ++g)
        for (int v = 0; v < V; ++v) {
            Vec sum = {};
            for (int64_t i = g * area; i < (g + 1) * area; ++i) sum += slope[i * V + v] * in[i * V + v];
            back[g * V + v] = sum;
        }
}

}  // namespace lcfl
