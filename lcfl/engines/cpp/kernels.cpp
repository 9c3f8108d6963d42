// One training step of a small network on one CPU thread, called by ctypes. All sums have a fixed order, which depends
// only on the network and the batch.

#include <cstdint>
#include <new>

#include "descent.h"
#include "network.h"
#include "program.h"

using namespace lcfl;

// Returns what `compute` returns, or `otherwise` if there is not enough memory: C has no exceptions.
template <class Result, class Compute>
Result unless_short_of_memory(Result otherwise, Compute compute) {
    try {
        return compute();
    } catch (const std::bad_alloc&) {
        return otherwise;
    }
}

extern "C" {

void* lcfl_open(const Op* ops, int32_t num_ops, const Value* values, int32_t num_values, int32_t input, int32_t output,
                const Loss* loss, int32_t bfloat16, float* frozen) {
    return unless_short_of_memory<void*>(nullptr, [=] {
        return new Program(ops, num_ops, values, num_values, input, output, *loss, bfloat16 && Bfloat16::exists(),
                           frozen);
    });
}

// Returns whether a program that was opened with `bfloat16` computes any operation in it on this processor.
int32_t lcfl_is_in_bfloat16(const void* program) { return static_cast<const Program*>(program)->is_in_bfloat16(); }

void lcfl_close(void* program) { delete static_cast<Program*>(program); }

double lcfl_gradient(void* program, const float* model, float* buffers, const float* inputs, const void* targets,
                     const float* const* masks, int64_t samples, float* gradient) {
    return unless_short_of_memory(NO_MEMORY, [=] {
        Kept kept(gradient);
        return static_cast<Program*>(program)->differentiate(model, buffers, inputs, targets, masks, samples, 0, kept);
    });
}

// One step of an optimizer. Returns the loss with the terms of the two pulls.
double lcfl_step(void* program, float* model, float* buffers, const float* inputs, const void* targets,
                 const float* const* masks, int64_t samples, const Optimizer* optimizer, float* first_moment,
                 float* second_moment, const float* centre, const float* embedding, const float* correction) {
    return unless_short_of_memory(NO_MEMORY, [=] {
        Descent descent(*optimizer, model, first_moment, second_moment, centre, embedding, correction);
        const double loss = static_cast<Program*>(program)->differentiate(model, buffers, inputs, targets, masks,
                                                                          samples, optimizer->begin, descent);
        return loss + descent.penalty;
    });
}

// Writes outputs, and returns 0.
double lcfl_scores(void* program, const float* model, float* buffers, const float* inputs, int64_t samples,
                   float* scores) {
    return unless_short_of_memory(NO_MEMORY, [=] {
        static_cast<Program*>(program)->scores(model, buffers, inputs, samples, scores);
        return 0.0;
    });
}

}  // extern "C"
