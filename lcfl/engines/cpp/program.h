// The structures that Python passes. kernels.py has the same fields in the same order.

#pragma once

#include <cstdint>

namespace lcfl {

// What a kernel returns in place of a loss: a label is not the number of a class, or there is too little memory.
// kernels.py has these, too.
constexpr double BAD_LABEL = -1e300, NO_MEMORY = -2e300;  // no sum of floats gets there

enum Kind : int32_t {
    CONV,
    DEPTHWISE,
    LINEAR,
    MAX_POOL,
    AVG_POOL,
    GROUP_NORM,
    LAYER_NORM,
    BATCH_NORM,
    ADD,
    MULTIPLY,
    CONCATENATE,
    PART,
    SHUFFLE,
    DROPOUT,
    RELU,
    RELU6,
    LEAKY_RELU,
    ELU,
    TANH,
    SIGMOID,
    HARDSIGMOID,
    GELU,
    SILU,
    HARDSWISH,
    AFFINE
};

struct Value {  // the shape of one sample
    int32_t channels, height, width;
    int64_t size() const { return int64_t(channels) * height * width; }
};

struct Op {
    int32_t kind, input, other, output;  // numbers of values; `other` is the second input of ADD and MULTIPLY
    int32_t kernel_h, kernel_w;          // 0 for the windows of an AVG_POOL that adapts them to its output
    int32_t stride_h, stride_w, padding_h, padding_w;
    int32_t dilation;  // from tap to tap of a signal; 0 or 1 for neighbours
    int32_t groups;    // of GROUP_NORM and SHUFFLE
    // Of a DROPOUT among the masks; of what CONCATENATE writes, and of what PART reads. SHUFFLE: numbers that stay
    // together.
    int32_t place;
    int32_t is_frozen;  // its parameters and statistics are in the frozen vector, and it does not change them
    // eps is also the slope of LEAKY_RELU below 0, the alpha of ELU, and the factor of an AVG_POOL, which is 0 if it
    // depends on the window. AFFINE is eps x + momentum.
    float eps, momentum;
    int64_t weight, bias;        // offsets in the model or the frozen vector; -1 if there is none
    int64_t mean, var, tracked;  // BATCH_NORM: offsets of its statistics in the buffers or the frozen vector
};

// Returns a signal with as many columns as its taps are apart, which divides its width. Its taps are then neighbours in
// a column, so a dilated convolution is that of an image. The memory is the same.
inline Value in_columns(const Op& op, const Value& signal) {
    return op.dilation > 1 ? Value{signal.channels, signal.width / op.dilation, op.dilation} : signal;
}

enum LossKind : int32_t { CROSS_ENTROPY, SQUARED_ERROR, BINARY_CROSS_ENTROPY, ABSOLUTE_ERROR, HUBER, SMOOTH_L1 };

struct Loss {
    int32_t kind;
    float smoothing;       // of labels, for CROSS_ENTROPY
    float threshold;       // of the errors whose squares count, for HUBER and SMOOTH_L1
    const float* weights;  // of the classes, or of the positive targets for BINARY_CROSS_ENTROPY; may be null
};

struct Optimizer {  // and the weights of the two pulls
    int32_t is_adam, nesterov, decoupled;
    int32_t step;  // from 1
    float rate, weight_decay;
    float momentum, dampening;  // of SGD
    double beta1, beta2, eps;   // of Adam
    float cluster_weight, global_weight;
    int64_t num_embedding;
    int64_t begin, end;  // of the parameters that are trained; the others stay as they are
};

}  // namespace lcfl
