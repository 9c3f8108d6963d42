// Receivers of a gradient. A backward pass hands over each range of parameters as soon as its gradient is known and no
// operation reads these parameters again. So the gradient is used while it is in a cache, and is never stored as a
// whole.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "program.h"
#include "vectors.h"

namespace lcfl {

class Receiver {
  public:
    virtual ~Receiver() = default;
    // Takes the gradient of the parameters from `begin` on. It is null for parameters that are not trained, whose
    // gradient has not been computed.
    virtual void take(int64_t begin, int64_t size, const float* gradient) = 0;
};

class Kept : public Receiver {  // the gradient as a vector [P]
  public:
    explicit Kept(float* whole) : whole_(whole) {}
    void take(int64_t begin, int64_t size, const float* gradient) override {
        if (gradient) std::copy_n(gradient, size, whole_ + begin);
    }

  private:
    float* whole_;
};

// One step of torch.optim.SGD, Adam or AdamW on loss + mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2, whose gradient is
// corrected by a vector. The moments are Adam's m and v, or the velocity of SGD and nothing. Omega, Phi, the correction
// and the moments may be null.
class Descent : public Receiver {
  public:
    Descent(const Optimizer& optimizer, float* model, float* first_moment, float* second_moment, const float* centre,
            const float* embedding, const float* correction)
        : optimizer_(optimizer),
          model_(model),
          first_moment_(first_moment),
          second_moment_(second_moment),
          centre_(centre),
          embedding_(embedding),
          correction_(correction),
          in_gradient_(optimizer.decoupled ? 0 : optimizer.weight_decay) {}

    void take(int64_t begin, int64_t size, const float* gradient) override {
        const bool moves = begin < optimizer_.end && begin + size > optimizer_.begin;
        for (int64_t at = 0; at < size && (moves || centre_ || embedding_); at += BLOCK)
            descend(begin + at, std::min(BLOCK, size - at), gradient ? gradient + at : nullptr);
    }

    double penalty = 0;  // the terms of the two pulls before the step

  private:
    static constexpr int64_t BLOCK = 1024;  // what is read several times stays in the first-level cache

    void descend(int64_t begin, int64_t size, const float* gradient) {
        alignas(64) float slope[BLOCK];
        float* w = model_ + begin;
        for (int64_t i = 0; i < size; ++i) slope[i] = (gradient ? gradient[i] : 0) + in_gradient_ * w[i];
        if (centre_) penalty += pull(w, centre_ + begin, size, optimizer_.cluster_weight, slope);
        if (embedding_ && begin < optimizer_.num_embedding)
            penalty += pull(w, embedding_ + begin, std::min(size, optimizer_.num_embedding - begin),
                            optimizer_.global_weight, slope);
        if (correction_)
            for (int64_t i = 0; i < size; ++i) slope[i] += correction_[begin + i];
        const int64_t first = std::max<int64_t>(optimizer_.begin - begin, 0);
        const int64_t end = std::min(optimizer_.end - begin, size);
        if (optimizer_.is_adam)
            adam(w, first_moment_ + begin, second_moment_ + begin, slope, first, end);
        else
            sgd(w, first_moment_ ? first_moment_ + begin : nullptr, slope, first, end);
    }

    void sgd(float* w, float* v, float* slope, int64_t first, int64_t end) const {
        const Optimizer& by = optimizer_;
        if (v)
            for (int64_t i = first; i < end; ++i) {
                v[i] = by.step == 1 ? slope[i] : by.momentum * v[i] + (1 - by.dampening) * slope[i];
                slope[i] = by.nesterov ? slope[i] + by.momentum * v[i] : v[i];
            }
        for (int64_t i = first; i < end; ++i) w[i] -= by.rate * slope[i];
    }

    // m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2, w <- w - rate m^ / (sqrt(v^) + eps), where
    // m^ = m / (1 - beta1^t) and v^ = v / (1 - beta2^t).
    void adam(float* w, float* m, float* v, const float* g, int64_t first, int64_t end) const {
        const Optimizer& by = optimizer_;
        const float kept = by.decoupled ? float(1 - double(by.rate) * by.weight_decay) : 1;
        const float new1 = float(1 - by.beta1), old2 = float(by.beta2), new2 = float(1 - by.beta2), eps = float(by.eps);
        const float rate = float(by.rate / (1 - std::pow(by.beta1, by.step)));
        const float root = float(std::sqrt(1 - std::pow(by.beta2, by.step)));
        for (int64_t i = first; i < end; ++i) {
            m[i] += new1 * (g[i] - m[i]);
            v[i] = old2 * v[i] + new2 * g[i] * g[i];
            w[i] = kept * w[i] - rate * (m[i] / (std::sqrt(v[i]) / root + eps));
        }
    }

    // Returns weight/2 |w - target|^2 and adds its gradient to `slope`.
    static double pull(const float* w, const float* target, int64_t size, float weight, float* slope) {
        Vec squares = {};
        int64_t i = 0;
        for (; i + LANES <= size; i += LANES) {
            const Vec apart = *reinterpret_cast<const Loose*>(w + i) - *reinterpret_cast<const Loose*>(target + i);
            squares += apart * apart;
            *reinterpret_cast<Loose*>(slope + i) += weight * apart;
        }
        double sum = total(squares);
        for (; i < size; ++i) {
            const float apart = w[i] - target[i];
            sum += apart * apart;
            slope[i] += weight * apart;
        }
        return weight / 2 * sum;
    }

    const Optimizer& optimizer_;
    float *model_, *first_moment_, *second_moment_;
    const float *centre_, *embedding_, *correction_;
    const float in_gradient_;  // the weight decay that is part of the gradient
};

}  // namespace lcfl
