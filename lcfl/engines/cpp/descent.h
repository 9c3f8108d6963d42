// Receivers of a gradient. A backward pass hands over each range of parameters as soon as its gradient is known and no
// operation reads these parameters again. So the gradient is used while it is in a cache, and is never stored as a
// whole.

#pragma once

#include <algorithm>
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

// One step of torch.optim.SGD on loss + mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2, whose gradient is corrected by a
// vector. Omega, Phi, the correction and the velocity may be null.
class Descent : public Receiver {
  public:
    Descent(const Sgd& sgd, float* model, float* velocity, const float* centre, const float* embedding,
            const float* correction)
        : sgd_(sgd),
          model_(model),
          velocity_(velocity),
          centre_(centre),
          embedding_(embedding),
          correction_(correction) {}

    void take(int64_t begin, int64_t size, const float* gradient) override {
        const bool moves = begin < sgd_.end && begin + size > sgd_.begin;
        for (int64_t at = 0; at < size && (moves || centre_ || embedding_); at += BLOCK)
            descend(begin + at, std::min(BLOCK, size - at), gradient ? gradient + at : nullptr);
    }

    double penalty = 0;  // the terms of the two pulls before the step

  private:
    static constexpr int64_t BLOCK = 1024;  // what is read several times stays in the first-level cache

    void descend(int64_t begin, int64_t size, const float* gradient) {
        alignas(64) float slope[BLOCK];
        float* w = model_ + begin;
        for (int64_t i = 0; i < size; ++i) slope[i] = (gradient ? gradient[i] : 0) + sgd_.weight_decay * w[i];
        if (centre_) penalty += pull(w, centre_ + begin, size, sgd_.cluster_weight, slope);
        if (embedding_ && begin < sgd_.num_embedding)
            penalty +=
                pull(w, embedding_ + begin, std::min(size, sgd_.num_embedding - begin), sgd_.global_weight, slope);
        if (correction_)
            for (int64_t i = 0; i < size; ++i) slope[i] += correction_[begin + i];
        const int64_t first = std::max<int64_t>(sgd_.begin - begin, 0), end = std::min(sgd_.end - begin, size);
        if (velocity_) {
            float* v = velocity_ + begin;
            for (int64_t i = first; i < end; ++i) {
                v[i] = sgd_.first ? slope[i] : sgd_.momentum * v[i] + (1 - sgd_.dampening) * slope[i];
                slope[i] = sgd_.nesterov ? slope[i] + sgd_.momentum * v[i] : v[i];
            }
        }
        for (int64_t i = first; i < end; ++i) w[i] -= sgd_.rate * slope[i];
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

    const Sgd& sgd_;
    float *model_, *velocity_;
    const float *centre_, *embedding_, *correction_;
};

}  // namespace lcfl
