// Cross-entropy.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vectors.h"

namespace lcfl {

// Returns the mean over the batch and writes its gradient with respect to the scores: (softmax - one-hot) / samples.
inline double cross_entropy(const Batch& batch, int64_t classes, const Vec* scores, const int64_t* labels,
                            Vec* slopes) {
    const int lanes = batch.lanes();
    double loss = 0;
    for (int chunk = 0; chunk < batch.chunks; ++chunk) {
        const float* score = reinterpret_cast<const float*>(scores + chunk * classes * batch.V);
        float* slope = reinterpret_cast<float*>(slopes + chunk * classes * batch.V);
        for (int b = 0; b < lanes; ++b) {
            if (b >= batch.in_chunk(chunk)) {
                for (int64_t c = 0; c < classes; ++c) slope[c * lanes + b] = 0;
                continue;
            }
            const int64_t label = labels[int64_t(chunk) * lanes + b];
            float most = score[b], sum = 0;
            for (int64_t c = 1; c < classes; ++c) most = std::max(most, score[c * lanes + b]);
            for (int64_t c = 0; c < classes; ++c) sum += slope[c * lanes + b] = std::exp(score[c * lanes + b] - most);
            for (int64_t c = 0; c < classes; ++c) slope[c * lanes + b] /= sum * batch.samples;
            slope[label * lanes + b] -= 1.0f / batch.samples;
            loss += std::log(sum) + most - score[label * lanes + b];
        }
    }
    return loss / batch.samples;
}

}  // namespace lcfl
