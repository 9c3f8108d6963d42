// Losses: means over a batch, and their gradients with respect to the outputs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "activation.h"
#include "program.h"
#include "vectors.h"

namespace lcfl {

// A batch whose gradient is being computed: C outputs, and their slopes. Lanes beyond the batch get slopes of 0.
struct Outputs {
    const Batch& batch;
    int64_t size;  // C
    const Vec* values;
    Vec* slopes;

    // Calls `each(sample, value, slope)` for every sample, where value[c * lanes] is output c.
    template <class Each>
    void for_each(Each each) const {
        const int lanes = batch.lanes();
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            const float* value = reinterpret_cast<const float*>(values + chunk * size * batch.V);
            float* slope = reinterpret_cast<float*>(slopes + chunk * size * batch.V);
            for (int b = 0; b < lanes; ++b) {
                if (b < batch.in_chunk(chunk))
                    each(int64_t(chunk) * lanes + b, value + b, slope + b);
                else
                    for (int64_t c = 0; c < size; ++c) slope[c * lanes + b] = 0;
            }
        }
    }
};

class MeanLoss {
  public:
    // The weights of `settings` are copied; there is one for each output.
    MeanLoss(const Loss& settings, int64_t outputs)
        : kind_(settings.kind),
          smoothing_(settings.smoothing),
          threshold_(settings.threshold),
          weights_(settings.weights ? std::vector<float>(settings.weights, settings.weights + outputs)
                                    : std::vector<float>(outputs, 1)) {}

    // Targets are labels [B] in int64, or numbers [B][C] in float32. Returns BAD_LABEL if a label is no class.
    double differentiate(const Outputs& outputs, const void* targets) {
        if (kind_ == CROSS_ENTROPY) return cross_entropy(outputs, static_cast<const int64_t*>(targets));
        const float* numbers = static_cast<const float*>(targets);
        switch (kind_) {
            case SQUARED_ERROR:
                return squared_error(outputs, numbers);
            case BINARY_CROSS_ENTROPY:
                return binary_cross_entropy(outputs, numbers);
            case ABSOLUTE_ERROR:
                return absolute_error(outputs, numbers);
            default:
                return huber(outputs, numbers);
        }
    }

  private:
    // The mean, weighted by the class weights w, of -sum over c of q_c log softmax(x)_c. With label smoothing s,
    // q_c = (1 - s) [c = label] + s / C, and each term has the weight of its own class.
    double cross_entropy(const Outputs& outputs, const int64_t* labels) const {
        const int lanes = outputs.batch.lanes();
        const int64_t classes = outputs.size, samples = outputs.batch.samples;
        if (std::any_of(labels, labels + samples, [=](int64_t label) { return label < 0 || label >= classes; }))
            return BAD_LABEL;
        double loss = 0;
        const float sure = 1 - smoothing_, spread = smoothing_ / classes;
        const float all = spread * std::accumulate(weights_.begin(), weights_.end(), 0.0f);
        const float whole = std::accumulate(labels, labels + samples, 0.0f,
                                            [&](float sum, int64_t label) { return sum + weights_[label]; });
        outputs.for_each([&](int64_t sample, const float* score, float* slope) {
            const int64_t label = labels[sample];
            const float own = sure * weights_[label];
            float most = score[0], sum = 0;
            for (int64_t c = 1; c < classes; ++c) most = std::max(most, score[c * lanes]);
            for (int64_t c = 0; c < classes; ++c) sum += slope[c * lanes] = std::exp(score[c * lanes] - most);
            for (int64_t c = 0; c < classes; ++c) slope[c * lanes] = slope[c * lanes] * (own + all) / (sum * whole);
            slope[label * lanes] -= own / whole;
            loss += own * (std::log(sum) + most - score[label * lanes]);
            if (spread == 0) return;
            for (int64_t c = 0; c < classes; ++c) {
                slope[c * lanes] -= spread * weights_[c] / whole;
                loss += spread * weights_[c] * (std::log(sum) + most - score[c * lanes]);
            }
        });
        return loss / whole;
    }

    double squared_error(const Outputs& outputs, const float* targets) {
        return mean_of(outputs, targets, [](int64_t, Vec value, Vec target, Vec& slope) {
            const Vec apart = value - target;
            slope = 2 * apart;
            return apart * apart;
        });
    }

    double absolute_error(const Outputs& outputs, const float* targets) {
        return mean_of(outputs, targets, [](int64_t, Vec value, Vec target, Vec& slope) {
            const Vec apart = value - target;
            slope = apart > 0 ? fill(1) : apart < 0 ? fill(-1) : apart;  // 0, or NaN
            return apart < 0 ? -apart : apart;
        });
    }

    // The mean of e^2 / 2 for errors e up to the threshold t, and of t (|e| - t / 2) beyond; SMOOTH_L1 divides by t.
    double huber(const Outputs& outputs, const float* targets) {
        const float scale = kind_ == HUBER ? 1 : 1 / threshold_;
        return mean_of(outputs, targets, [=](int64_t, Vec value, Vec target, Vec& slope) {
            const Vec apart = value - target;
            const Vec near = apart > threshold_ ? fill(threshold_) : apart < -threshold_ ? fill(-threshold_) : apart;
            slope = near * scale;
            return slope * (apart - 0.5f * near);
        });
    }

    // The mean of -w_c y log sigmoid(x) - (1 - y) log(1 - sigmoid(x)).
    double binary_cross_entropy(const Outputs& outputs, const float* targets) {
        return mean_of(outputs, targets, [&](int64_t c, Vec x, Vec y, Vec& slope) {
            const Vec smaller = exponential(x < 0 ? x : -x), both = 1 + (weights_[c] - 1) * y;
            slope = both * (x < 0 ? smaller : fill(1)) / (1 + smaller) - weights_[c] * y;
            return (1 - y) * x + both * (logarithm(smaller) + (x < 0 ? -x : Vec{}));
        });
    }

    // ln(1 + x) for x from 0 to 1, by the series of 2 artanh(x / (2 + x)).
    static Vec logarithm(Vec x) {
        const Vec part = x / (2 + x), square = part * part;
        Vec sum = fill(1.0f / 13);
        for (int power = 11; power > 0; power -= 2) sum = sum * square + 1.0f / float(power);
        return 2 * part * sum;
    }

    // Returns the mean over all outputs of what `term(c, values, targets, slopes)` returns for a vector of samples.
    template <class Term>
    double mean_of(const Outputs& outputs, const float* targets, Term term) {
        const Batch& batch = outputs.batch;
        const float count = float(outputs.size * batch.samples);
        Vec* wanted = targets_.of(outputs.size * batch.V);
        double sum = 0;
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            to_innermost(targets + int64_t(chunk) * batch.lanes() * outputs.size, outputs.size, batch.V,
                         batch.in_chunk(chunk), wanted);
            for (int64_t i = 0; i < outputs.size * batch.V; ++i) {
                const Mask is_sample = batch.holds(chunk, int(i % batch.V)) > 0;
                const int64_t at = chunk * outputs.size * batch.V + i;
                Vec slope;
                const Vec loss = term(i / batch.V, outputs.values[at], wanted[i], slope);
                outputs.slopes[at] = is_sample ? slope / count : Vec{};
                sum += total(is_sample ? loss : Vec{});
            }
        }
        return sum / count;
    }

    const int32_t kind_;
    const float smoothing_, threshold_;
    const std::vector<float> weights_;
    Memory targets_;  // of a chunk
};

}  // namespace lcfl
