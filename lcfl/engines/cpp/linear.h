// Fully connected layers with weights [O][I].

#pragma once

#include <algorithm>
#include <cstdint>

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
    for (; i < inputs; ++i) connect_back_block<OB, 1, V>(weight + i, inputs, slope, back + i * V);
}

template <int V>
void connect_back(const float* weight, int inputs, int outputs, const Vec* slope, Vec* back) {
    constexpr int OB = SUMS / 3, IB = 4;
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * inputs * V);
    int o = 0;
    for (; o + OB <= outputs; o += OB)
        connect_back_rows<OB, IB, V>(weight + int64_t(o) * inputs, inputs, slope + o * V, back);
    for (; o < outputs; ++o) connect_back_rows<1, IB, V>(weight + int64_t(o) * inputs, inputs, slope + o * V, back);
}

// d loss / d w[o][i] = sum_b slope[o][b] in[b][i], for OB rows x IB vectors of inputs at a time.
template <int OB, int IB>
void outer_block(const float* const* slope, const Vec* in, int64_t row, int samples, int64_t chunk_in, int chunks,
                 int64_t chunk_slope, Vec (&sum)[OB][IB]) {
    for (int chunk = 0; chunk < chunks; ++chunk)
        for (int b = 0; b < samples; ++b) {
            const Vec* values = in + chunk * chunk_in + b * row;
            add_products(
                sum, [=](int o) { return fill(slope[o][chunk * chunk_slope + b]); }, [=](int i) { return values[i]; });
        }
}

// `sideways` is the input with the batch outermost: chunks x [V LANES][I rounded up to vectors].
inline void outer(const Vec* slope, int64_t slope_chunk, const Vec* sideways, int inputs, int outputs, int V,
                  int chunks, float* gradient) {
    constexpr int IB = 4, OB = SUMS / IB;
    const int row = (inputs + LANES - 1) / LANES, samples = V * LANES;
    for (int v = 0; v < row; v += IB)
        for (int first = 0; first < outputs; first += OB) {
            const float* rise[OB];
            for (int o = 0; o < OB; ++o)
                rise[o] = reinterpret_cast<const float*>(slope + int64_t(std::min(first + o, outputs - 1)) * V);
            Vec sum[OB][IB] = {};
            const int begin = std::max(0, std::min(v, row - IB));
            if (row >= IB) {
                outer_block<OB, IB>(rise, sideways + begin, row, samples, int64_t(row) * samples, chunks,
                                    slope_chunk * LANES, sum);
            } else {
                for (int i = 0; i < row; ++i) {
                    Vec one[OB][1] = {};
                    outer_block<OB, 1>(rise, sideways + i, row, samples, int64_t(row) * samples, chunks,
                                       slope_chunk * LANES, one);
                    for (int o = 0; o < OB; ++o) sum[o][i] = one[o][0];
                }
            }
            for (int o = 0; o < OB && first + o < outputs; ++o)
                for (int i = 0; i < IB && begin + i < row; ++i) {
                    const int at = (begin + i) * LANES;
                    float* to = gradient + int64_t(first + o) * inputs + at;
                    if (at + LANES <= inputs)
                        *reinterpret_cast<Loose*>(to) = sum[o][i];
                    else
                        for (int lane = 0; at + lane < inputs; ++lane) to[lane] = sum[o][i][lane];
                }
        }
}

}  // namespace lcfl
