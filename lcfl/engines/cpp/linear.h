// Fully connected layers with weights [O][I].

#pragma once

#include <algorithm>
#include <cstdint>

#include "descent.h"
#include "vectors.h"

namespace lcfl {

// out[o] = bias[o] + sum_i w[o][i] in[i], for OB outputs at a time.
template <int OB, int V>
void connect_block(const float* weight, int64_t inputs, const float* bias, const Vec* in, Vec* out) {
    Vec sum[OB][V];
    for (int o = 0; o < OB; ++o)
        for (int v = 0; v < V; ++v) sum[o][v] = fill(bias ? bias[o] : 0);
    for (int64_t i = 0; i < inputs; ++i)
        add_products(sum, [=](int o) { return fill(weight[o * inputs + i]); }, [=](int v) { return in[i * V + v]; });
    for (int o = 0; o < OB; ++o)
        for (int v = 0; v < V; ++v) out[o * V + v] = held(sum[o][v]);
}

template <int V>
void connect(const float* weight, int inputs, int outputs, const float* bias, const Vec* in, Vec* out) {
    constexpr int OB = SUMS / 2;
    int o = 0;
    for (; o + OB <= outputs; o += OB)
        connect_block<OB, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
    for (; OB > 4 && o + 4 <= outputs; o += 4)
        connect_block<4, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
    for (; o < outputs; ++o)
        connect_block<1, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
}

// back[i] += sum over OB rows o of w[o][i] slope[o], for IB inputs at a time.
template <int OB, int IB, int V>
void connect_back_block(const float* weight, int64_t inputs, const Vec* slope, Vec* back) {
    Vec sum[IB][V];
    for (int i = 0; i < IB; ++i)
        for (int v = 0; v < V; ++v) sum[i][v] = held(back[i * V + v]);
    for (int o = 0; o < OB; ++o)
        add_products(sum, [=](int i) { return fill(weight[o * inputs + i]); }, [=](int v) { return slope[o * V + v]; });
    for (int i = 0; i < IB; ++i)
        for (int v = 0; v < V; ++v) back[i * V + v] = held(sum[i][v]);
}

template <int OB, int IB, int V>
void connect_back_rows(const float* weight, int inputs, const Vec* slope, Vec* back) {
    int i = 0;
    for (; i + IB <= inputs; i += IB) connect_back_block<OB, IB, V>(weight + i, inputs, slope, back + i * V);
    for (; IB > 4 && i + 4 <= inputs; i += 4) connect_back_block<OB, 4, V>(weight + i, inputs, slope, back + i * V);
    for (; i < inputs; ++i) connect_back_block<OB, 1, V>(weight + i, inputs, slope, back + i * V);
}

template <int V>
void connect_back(const float* weight, int inputs, int outputs, const Vec* slope, Vec* back) {
    constexpr int OB = 16, IB = SUMS / 2;
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * inputs * V);
    int o = 0;
    for (; o + OB <= outputs; o += OB)
        connect_back_rows<OB, IB, V>(weight + int64_t(o) * inputs, inputs, slope + o * V, back);
    for (; o < outputs; ++o) connect_back_rows<1, IB, V>(weight + int64_t(o) * inputs, inputs, slope + o * V, back);
}

// found[o][at + i] = d loss / d w[o][i] = sum_b slope[o][b] in[b][i], for OB rows x IB vectors of inputs.
template <int OB, int IB, int RUN>
void outer_block(const Batch& batch, const float* const* slope, int64_t slope_chunk, const Vec* in, int64_t row,
                 Vec (&found)[OB][RUN], int at) {
    Vec sum[OB][IB] = {};
    for (int chunk = 0; chunk < batch.chunks; ++chunk)
        for (int b = 0; b < batch.in_chunk(chunk); ++b) {
            const Vec* values = in + (int64_t(chunk) * batch.lanes() + b) * row;
            add_products(
                sum, [=](int o) { return fill(slope[o][chunk * slope_chunk + b]); }, [=](int i) { return values[i]; });
        }
    for (int o = 0; o < OB; ++o)
        for (int i = 0; i < IB; ++i) found[o][at + i] = held(sum[o][i]);
}

// Gives `receiver` the gradient of the weights, which begin at `weight` in the model. `sideways` is the input with the
// batch outermost: chunks x [V LANES][I rounded up to vectors]. Goes through all outputs with a few KB of a row, so
// that these inputs stay in the second-level cache.
inline void outer(const Batch& batch, const Vec* slope, int64_t slope_chunk, const Vec* sideways, int inputs,
                  int outputs, int64_t weight, Receiver& receiver) {
    constexpr int IB = 4, OB = SUMS / IB, RUN = 4096 / sizeof(Vec);
    const int row = (inputs + LANES - 1) / LANES;
    Vec found[OB][RUN];
    for (int run = 0; run < row; run += RUN)
        for (int first = 0; first < outputs; first += OB) {
            const float* rise[OB];
            for (int o = 0; o < OB; ++o)
                rise[o] = reinterpret_cast<const float*>(slope + int64_t(std::min(first + o, outputs - 1)) * batch.V);
            const int end = std::min(run + RUN, row);
            int v = run;
            for (; v + IB <= end; v += IB)
                outer_block<OB, IB>(batch, rise, slope_chunk * LANES, sideways + v, row, found, v - run);
            for (; v < end; ++v)
                outer_block<OB, 1>(batch, rise, slope_chunk * LANES, sideways + v, row, found, v - run);
            for (int o = 0; o < OB && first + o < outputs; ++o)
                receiver.take(weight + int64_t(first + o) * inputs + run * LANES,
                              std::min(end * LANES, inputs) - run * LANES, reinterpret_cast<const float*>(found[o]));
        }
}

}  // namespace lcfl
