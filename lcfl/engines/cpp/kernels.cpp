// One training step of a small network on one CPU thread, called by ctypes. All sums have a fixed order, which depends
// only on the network and the batch.

#include <algorithm>
#include <cstdint>

#include "network.h"
#include "program.h"
#include "vectors.h"

namespace lcfl {

// Returns weight/2 |w - target|^2 and adds its gradient to `slope`.
double pull(const float* w, const float* target, int64_t size, float weight, float* slope) {
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

}  // namespace lcfl

using namespace lcfl;

extern "C" {

void* lcfl_open(const Op* ops, int32_t num_ops, const Value* values, int32_t num_values, int32_t input,
                int32_t output) {
    return new Program(ops, num_ops, values, num_values, input, output);
}

void lcfl_close(void* program) { delete static_cast<Program*>(program); }

double lcfl_gradient(void* program, const float* model, float* buffers, const float* inputs, const int64_t* labels,
                     int64_t samples, int64_t begin, float* gradient) {
    return static_cast<Program*>(program)->gradient(model, buffers, inputs, labels, samples, begin, gradient);
}

void lcfl_scores(void* program, const float* model, float* buffers, const float* inputs, int64_t samples,
                 float* scores) {
    static_cast<Program*>(program)->scores(model, buffers, inputs, samples, scores);
}

// One step of torch.optim.SGD on loss + mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2, whose gradient is corrected by a
// vector; returns the terms of the two pulls. Omega, Phi, the correction and the velocity may be null.
double lcfl_update(const Sgd* sgd, float* model, const float* gradient, float* velocity, const float* centre,
                   const float* embedding, const float* correction) {
    constexpr int64_t BLOCK = 1024;  // what is read several times stays in the first-level cache
    alignas(64) float slope[BLOCK];
    double penalty = 0;
    for (int64_t begin = 0; begin < sgd->num_parameters; begin += BLOCK) {
        const int64_t size = std::min(BLOCK, sgd->num_parameters - begin);
        float* w = model + begin;
        for (int64_t i = 0; i < size; ++i) slope[i] = gradient[begin + i] + sgd->weight_decay * w[i];
        if (centre) penalty += pull(w, centre + begin, size, sgd->cluster_weight, slope);
        if (embedding && begin < sgd->num_embedding)
            penalty +=
                pull(w, embedding + begin, std::min(size, sgd->num_embedding - begin), sgd->global_weight, slope);
        if (correction)
            for (int64_t i = 0; i < size; ++i) slope[i] += correction[begin + i];
        const int64_t first = std::max<int64_t>(sgd->begin - begin, 0), end = std::min(sgd->end - begin, size);
        if (velocity) {
            float* v = velocity + begin;
            for (int64_t i = first; i < end; ++i) {
                v[i] = sgd->first ? slope[i] : sgd->momentum * v[i] + (1 - sgd->dampening) * slope[i];
                slope[i] = sgd->nesterov ? slope[i] + sgd->momentum * v[i] : v[i];
            }
        }
        for (int64_t i = first; i < end; ++i) w[i] -= sgd->rate * slope[i];
    }
    return penalty;
}

}  // extern "C"
