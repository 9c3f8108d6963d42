// y = (x - mean) / sqrt(var + eps) gamma + beta, over groups of channels, the channels of a pixel or the batch.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "program.h"
#include "vectors.h"

namespace lcfl {

inline Vec inverse_root(Vec values) {
    Vec result;
    for (int lane = 0; lane < LANES; ++lane) result[lane] = 1.0f / std::sqrt(values[lane]);
    return result;
}

// Normalises each sample over the channels of a group and all pixels. `stats` keeps mean and 1 / deviation.
inline void group_norm(const Op& op, const Value& shape, int V, const float* model, const Vec* in, Vec* out,
                       Vec* stats) {
    const int64_t area = int64_t(shape.height) * shape.width, width = shape.channels / op.groups;
    for (int g = 0; g < op.groups; ++g)
        for (int v = 0; v < V; ++v) {
            const Vec* from = in + g * width * area * V + v;
            Vec sum = {}, squares = {};
            for (int64_t i = 0; i < width * area; ++i) sum += from[i * V];
            const Vec mean = sum / float(width * area);
            for (int64_t i = 0; i < width * area; ++i) squares += (from[i * V] - mean) * (from[i * V] - mean);
            const Vec root = inverse_root(squares / float(width * area) + op.eps);
            stats[(g * 2) * V + v] = mean, stats[(g * 2 + 1) * V + v] = root;
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c],
                            beta = op.bias < 0 ? 0 : model[op.bias + c];
                for (int64_t i = c * area; i < (c + 1) * area; ++i)
                    out[i * V + v] = (in[i * V + v] - mean) * root * gamma + beta;
            }
        }
}

inline void group_norm_back(const Op& op, const Value& shape, int V, const float* model, const Vec* in,
                            const Vec* stats, const Vec* slope, Vec* back, float* weights, float* biases) {
    const int64_t area = int64_t(shape.height) * shape.width, width = shape.channels / op.groups;
    for (int g = 0; g < op.groups; ++g)
        for (int v = 0; v < V; ++v) {
            const Vec mean = stats[(g * 2) * V + v], root = stats[(g * 2 + 1) * V + v];
            Vec slopes = {}, products = {};
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                Vec plain = {}, along = {};
                for (int64_t i = c * area; i < (c + 1) * area; ++i) {
                    plain += slope[i * V + v];
                    along += slope[i * V + v] * (in[i * V + v] - mean) * root;
                }
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
                slopes += plain * gamma, products += along * gamma;
                if (weights) weights[c] += total(along);
                if (biases) biases[c] += total(plain);
            }
            slopes /= float(width * area), products /= float(width * area);
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
                for (int64_t i = c * area; i < (c + 1) * area; ++i) {
                    const Vec centred = (in[i * V + v] - mean) * root;
                    back[i * V + v] = (slope[i * V + v] * gamma - slopes - centred * products) * root;
                }
            }
        }
}

// Normalises each pixel of each sample over its channels. `stats` keeps the means and 1 / deviation of all pixels.
inline void layer_norm(const Op& op, const Value& shape, int V, const float* model, const Vec* in, Vec* out,
                       Vec* stats) {
    const int64_t area = int64_t(shape.height) * shape.width * V;
    Vec *mean = stats, *root = stats + area;
    std::fill_n(stats, 2 * area, Vec{});
    for (int c = 0; c < shape.channels; ++c)
        for (int64_t i = 0; i < area; ++i) mean[i] += in[c * area + i];
    for (int64_t i = 0; i < area; ++i) mean[i] /= float(shape.channels);
    for (int c = 0; c < shape.channels; ++c)
        for (int64_t i = 0; i < area; ++i) root[i] += (in[c * area + i] - mean[i]) * (in[c * area + i] - mean[i]);
    for (int64_t i = 0; i < area; ++i) root[i] = inverse_root(root[i] / float(shape.channels) + op.eps);
    for (int c = 0; c < shape.channels; ++c, in += area, out += area) {
        const float gamma = op.weight < 0 ? 1 : model[op.weight + c], beta = op.bias < 0 ? 0 : model[op.bias + c];
        for (int64_t i = 0; i < area; ++i) out[i] = (in[i] - mean[i]) * root[i] * gamma + beta;
    }
}

// `sums` is memory for two numbers of each pixel.
inline void layer_norm_back(const Op& op, const Value& shape, int V, const float* model, const Vec* in,
                            const Vec* stats, const Vec* slope, Vec* back, Vec* sums, float* weights, float* biases) {
    const int64_t area = int64_t(shape.height) * shape.width * V;
    const Vec *mean = stats, *root = stats + area;
    Vec *slopes = sums, *products = sums + area;
    std::fill_n(sums, 2 * area, Vec{});
    for (int c = 0; c < shape.channels; ++c) {
        const Vec *from = in + c * area, *rise = slope + c * area;
        const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
        Vec plain = {}, along = {};
        for (int64_t i = 0; i < area; ++i) {
            const Vec product = rise[i] * (from[i] - mean[i]) * root[i];
            plain += rise[i], along += product;
            slopes[i] += rise[i] * gamma, products[i] += product * gamma;
        }
        if (weights) weights[c] += total(along);
        if (biases) biases[c] += total(plain);
    }
    for (int64_t i = 0; i < 2 * area; ++i) sums[i] /= float(shape.channels);
    for (int c = 0; c < shape.channels; ++c, in += area, slope += area, back += area) {
        const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
        for (int64_t i = 0; i < area; ++i)
            back[i] = (slope[i] * gamma - slopes[i] - (in[i] - mean[i]) * root[i] * products[i]) * root[i];
    }
}

// Sums over all samples and pixels of a channel, whose pixels are `area` vectors in every chunk of `size`.
template <class Each>
double sum_over(const Batch& batch, const Vec* channel, int64_t size, int64_t area, Each each) {
    double sum = 0;
    for (int chunk = 0; chunk < batch.chunks; ++chunk)
        for (int v = 0; v < batch.V; ++v) {
            Vec part = {};
            for (int64_t i = v; i < area; i += batch.V) part += each(channel[chunk * size + i]);
            sum += total(part * batch.holds(chunk, v));
        }
    return sum;
}

// Normalises by the statistics of the batch in training, which also update those in `buffers`, and by the latter in
// evaluation. Writes zeros in lanes without a sample, where values could grow from layer to layer if a
// mean is far from 0.
inline void batch_norm(const Op& op, const Value& shape, const Batch& batch, const float* model, float* buffers,
                       bool training, const Vec* in, Vec* out, float* stats) {
    const int64_t area = int64_t(shape.height) * shape.width * batch.V, size = shape.size() * batch.V;
    const double count = double(batch.samples) * shape.height * shape.width;
    for (int c = 0; c < shape.channels; ++c) {
        double mean = buffers[op.mean + c], var = buffers[op.var + c];
        if (training) {
            mean = sum_over(batch, in + c * area, size, area, [](Vec x) { return x; }) / count;
            const float about = float(mean);
            var = sum_over(batch, in + c * area, size, area, [=](Vec x) { return (x - about) * (x - about); }) / count;
            buffers[op.mean + c] += op.momentum * (float(mean) - buffers[op.mean + c]);
            buffers[op.var + c] += op.momentum * (float(var * count / (count - 1)) - buffers[op.var + c]);
        }
        stats[2 * c] = float(mean), stats[2 * c + 1] = float(1 / std::sqrt(var + op.eps));
        const float gamma = op.weight < 0 ? 1 : model[op.weight + c], beta = op.bias < 0 ? 0 : model[op.bias + c];
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int v = 0; v < batch.V; ++v) {
                const Mask is_sample = batch.holds(chunk, v) > 0;
                for (int64_t i = chunk * size + c * area + v; i < chunk * size + (c + 1) * area; i += batch.V)
                    out[i] = is_sample ? (in[i] - stats[2 * c]) * (stats[2 * c + 1] * gamma) + beta : Vec{};
            }
    }
    if (training) buffers[op.tracked] += 1;
}

inline void batch_norm_back(const Op& op, const Value& shape, const Batch& batch, const float* model, const Vec* in,
                            const float* stats, const Vec* slope, Vec* back, float* weights, float* biases) {
    const int64_t area = int64_t(shape.height) * shape.width * batch.V, size = shape.size() * batch.V;
    const double count = double(batch.samples) * shape.height * shape.width;
    for (int c = 0; c < shape.channels; ++c) {
        const float mean = stats[2 * c], root = stats[2 * c + 1], gamma = op.weight < 0 ? 1 : model[op.weight + c];
        double plain = 0, along = 0;  // stay 0 if frozen: its statistics do not depend on the input
        if (!op.is_frozen) {
            plain = sum_over(batch, slope + c * area, size, area, [](Vec g) { return g; });
            for (int chunk = 0; chunk < batch.chunks; ++chunk) {
                Vec sum = {};
                for (int64_t i = chunk * size + c * area; i < chunk * size + (c + 1) * area; ++i)
                    sum += slope[i] * (in[i] - mean) * root;
                along += total(sum);
            }
        }
        if (weights) weights[c] = float(along);
        if (biases) biases[c] = float(plain);
        const float shift = float(plain / count), turn = float(along / count);
        for (int chunk = 0; chunk < batch.chunks; ++chunk)
            for (int v = 0; v < batch.V; ++v) {
                const Vec holds = batch.holds(chunk, v);
                for (int64_t i = chunk * size + c * area + v; i < chunk * size + (c + 1) * area; i += batch.V)
                    back[i] = op.is_frozen ? slope[i] * (root * gamma)
                                           : (slope[i] - shift - (in[i] - mean) * root * turn) * (root * gamma) * holds;
            }
    }
}

}  // namespace lcfl
