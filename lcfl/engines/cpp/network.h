// A network as a list of operations: the gradient of the mean loss of a batch, and outputs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "activation.h"
#include "convolution.h"
#include "depthwise.h"
#include "descent.h"
#include "gate.h"
#include "linear.h"
#include "loss.h"
#include "normalisation.h"
#include "pooling.h"
#include "program.h"
#include "shuffle.h"
#include "tiles.h"
#include "vectors.h"

namespace lcfl {

class Program {
  public:
    // With `bfloat16`, wide convolutions and linear layers round their factors to it if the processor has the
    // instructions. Frozen operations read their parameters and statistics from `frozen`.
    Program(const Op* ops, int num_ops, const Value* values, int num_values, int input, int output, const Loss& loss,
            bool bfloat16, float* frozen)
        : ops_(ops, ops + num_ops),
          shapes_(values, values + num_values),
          input_(input),
          output_(output),
          loss_(loss, values[output].size()),
          frozen_(frozen),
          value_(num_values),
          slope_(num_values),
          kept_(num_ops),
          has_slope_(num_values),
          needs_slope_(num_values) {
        for (const Op& op : ops_) {
            const Value &from = values[op.input], &to = values[op.output];
            const Value in = in_columns(op, from), out = in_columns(op, to);
            convolutions_.emplace_back(op.kind == CONV ? new Convolution(op, in, out, bfloat16) : nullptr);
            depthwise_.emplace_back(op.kind == DEPTHWISE ? new Depthwise(op, in, out) : nullptr);
            if (op.kind == CONV)
                in_bfloat16_.push_back(convolutions_.back()->is_in_bfloat16());
            else
                in_bfloat16_.push_back(op.kind == LINEAR && bfloat16 &&
                                       Bfloat16::suits(int(from.size()), int(to.size())));
        }
    }

    bool is_in_bfloat16() const {  // in part
        return std::any_of(in_bfloat16_.begin(), in_bfloat16_.end(), [](char each) { return each; });
    }

    // Returns the mean loss of a batch and gives its gradient to `receiver`, which may change the model.
    // Each DROPOUT has a mask [samples][size], by which it multiplies. Leaves out what only parameters before `begin`
    // need.
    double differentiate(const float* model, float* buffers, const float* inputs, const void* targets,
                         const float* const* masks, int64_t samples, int64_t begin, Receiver& receiver) {
        const TilesInUse tiles(is_in_bfloat16());
        batch_ = Batch(samples);
        masks_ = masks;
        const int64_t size = shapes_[input_].size();
        Vec* first = value(input_);
        for (int chunk = 0; chunk < batch_.chunks; ++chunk)
            to_innermost(inputs + chunk * batch_.lanes() * size, size, batch_.V, batch_.in_chunk(chunk),
                         first + chunk * chunk_size(input_));
        for (size_t i = 0; i < ops_.size(); ++i)
            batch_.V == 1 ? forward<1>(i, model, buffers, true) : forward<2>(i, model, buffers, true);
        std::fill(has_slope_.begin(), has_slope_.end(), false);
        const double loss =
            loss_.differentiate({batch_, shapes_[output_].size(), value(output_), slope(output_)}, targets);
        if (loss == BAD_LABEL) return loss;
        has_slope_[output_] = true;
        mark_needed_slopes(begin);
        for (size_t i = ops_.size(); i-- > 0;)
            if (needs_slope_[ops_[i].output])
                batch_.V == 1 ? backward<1>(i, model, receiver) : backward<2>(i, model, receiver);
        // Pulls also concern parameters that get no gradient, but not frozen ones.
        for (size_t i = 0; i < ops_.size(); ++i) {
            if (needs_slope_[ops_[i].output] || ops_[i].is_frozen) continue;
            if (ops_[i].weight >= 0) receiver.take(ops_[i].weight, num_weights(ops_[i]), nullptr);
            if (ops_[i].bias >= 0) receiver.take(ops_[i].bias, shapes_[ops_[i].output].channels, nullptr);
        }
        return loss;
    }

    // Writes the outputs [samples][C] of the network in evaluation mode.
    void scores(const float* model, float* buffers, const float* inputs, int64_t samples, float* result) {
        const TilesInUse tiles(is_in_bfloat16());
        const int64_t size = shapes_[input_].size(), outputs = shapes_[output_].size();
        for (int64_t begin = 0; begin < samples; begin += 2 * LANES) {
            batch_ = Batch(std::min<int64_t>(2 * LANES, samples - begin));
            to_innermost(inputs + begin * size, size, batch_.V, batch_.in_chunk(0), value(input_));
            for (size_t i = 0; i < ops_.size(); ++i)
                batch_.V == 1 ? forward<1>(i, model, buffers, false) : forward<2>(i, model, buffers, false);
            const float* found = reinterpret_cast<const float*>(value(output_));
            for (int64_t sample = 0; sample < batch_.samples; ++sample)
                for (int64_t c = 0; c < outputs; ++c)
                    result[(begin + sample) * outputs + c] = found[c * batch_.lanes() + sample];
        }
    }

  private:
    // Marks the outputs of operations with a parameter from `begin` on that is not frozen, and all values computed from
    // them.
    void mark_needed_slopes(int64_t begin) {
        std::fill(needs_slope_.begin(), needs_slope_.end(), false);
        for (const Op& op : ops_) {
            const bool is_trained = !op.is_frozen && std::max(op.weight, op.bias) >= begin;
            if (is_trained || needs_slope_[op.input] || (op.other >= 0 && needs_slope_[op.other]))
                needs_slope_[op.output] = true;
        }
    }

    int64_t chunk_size(int number) const { return shapes_[number].size() * batch_.V; }
    int64_t chunk_pixels(int number) const { return chunk_size(number) / shapes_[number].channels; }
    Vec* value(int number) { return value_[number].of(chunk_size(number) * batch_.chunks); }
    Vec* slope(int number) { return slope_[number].of(chunk_size(number) * batch_.chunks); }

    template <int V>
    void forward(size_t number, const float* model, float* buffers, bool training) {
        const Op& op = ops_[number];
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        Vec *in = value(op.input), *out = value(op.output);
        const int64_t in_size = chunk_size(op.input), out_size = chunk_size(op.output);
        if (op.is_frozen) model = buffers = frozen_;
        if (op.kind == CONV) return convolutions_[number]->forward<V>(batch_, model, in, workspace_, out);
        if (op.kind == LINEAR && in_bfloat16_[number])
            return workspace_.bfloat16.connect(batch_, model + op.weight, int(from.size()), int(to.size()),
                                               op.bias < 0 ? nullptr : model + op.bias, in, out);
        if (op.kind == DROPOUT && training) read_mask(number);
        if (op.kind == BATCH_NORM)
            return batch_norm(op, from, batch_, model, buffers, training && !op.is_frozen, in, out,
                              kept_[number].floats(2 * from.channels));
        for (int chunk = 0; chunk < batch_.chunks; ++chunk, in += in_size, out += out_size) switch (op.kind) {
                case LINEAR:
                    connect<V>(model + op.weight, int(from.size()), int(to.size()),
                               op.bias < 0 ? nullptr : model + op.bias, in, out);
                    break;
                case DEPTHWISE:
                    depthwise_[number]->forward<V>(model, in, out);
                    break;
                case RELU:
                case RELU6:
                case LEAKY_RELU:
                case ELU:
                case TANH:
                case SIGMOID:
                case HARDSIGMOID:
                case GELU:
                case SILU:
                case HARDSWISH:
                case AFFINE:
                    activate(op, in_size, in, out);
                    break;
                case DROPOUT: {
                    const Vec* mask = kept_[number].get() + chunk * in_size;
                    for (int64_t i = 0; i < in_size; ++i) out[i] = training ? in[i] * mask[i] : in[i];
                    break;
                }
                case MAX_POOL:
                    max_pool(op, from, to, V, in, out);
                    break;
                case AVG_POOL:
                    avg_pool(op, from, to, V, in, out);
                    break;
                case GROUP_NORM:
                    group_norm(op, from, V, model, in, out,
                               kept_[number].of(int64_t(op.groups) * 2 * V * batch_.chunks) +
                                   int64_t(chunk) * op.groups * 2 * V);
                    break;
                case LAYER_NORM:
                    layer_norm(op, from, V, model, in, out,
                               kept_[number].of(2 * chunk_pixels(op.input) * batch_.chunks) +
                                   2 * chunk * chunk_pixels(op.input));
                    break;
                case MULTIPLY:
                    multiply(from.size(), shapes_[op.other].size(), V, in,
                             value(op.other) + chunk * chunk_size(op.other), out);
                    break;
                case CONCATENATE:
                    std::copy_n(in, in_size, out + int64_t(op.place) * V);
                    break;
                case PART:
                    std::copy_n(in + int64_t(op.place) * V, out_size, out);
                    break;
                case SHUFFLE:
                    shuffle(op.groups, from.size() / op.groups / op.place, int64_t(op.place) * V, in, out);
                    break;
                case ADD: {
                    const Vec* other = value(op.other) + chunk * in_size;
                    for (int64_t i = 0; i < in_size; ++i) out[i] = in[i] + other[i];
                    break;
                }
            }
    }

    void read_mask(size_t number) {
        const Op& op = ops_[number];
        const int64_t size = shapes_[op.input].size();
        Vec* mask = kept_[number].of(chunk_size(op.input) * batch_.chunks);
        for (int chunk = 0; chunk < batch_.chunks; ++chunk)
            to_innermost(masks_[op.place] + chunk * batch_.lanes() * size, size, batch_.V, batch_.in_chunk(chunk),
                         mask + chunk * chunk_size(op.input));
    }

    template <int V>
    void backward(size_t number, const float* model, Receiver& receiver) {
        const Op& op = ops_[number];
        const Value& to = shapes_[op.output];
        const int64_t in_size = chunk_size(op.input), out_size = chunk_size(op.output);
        Vec *in = value(op.input), *out = value(op.output), *rise = slope(op.output);
        if (op.is_frozen) model = frozen_;
        if (is_activation(op.kind)) {
            Vec* back = op.input == op.output ? rise : place_for(op.input);
            activate_back(op, in_size * batch_.chunks, in, out, rise, back);
            return op.input == op.output ? void() : settle(op.input, back);
        }
        if (op.kind == DROPOUT) {
            const Vec* mask = kept_[number].get();
            Vec* back = place_for(op.input);
            for (int64_t i = 0; i < in_size * batch_.chunks; ++i) back[i] = rise[i] * mask[i];
            return settle(op.input, back);
        }
        if (op.kind == CONCATENATE) {
            if (!needs_slope_[op.input]) return;
            Vec* back = place_for(op.input);
            for (int chunk = 0; chunk < batch_.chunks; ++chunk)
                std::copy_n(rise + chunk * out_size + int64_t(op.place) * V, in_size, back + chunk * in_size);
            return settle(op.input, back);
        }
        if (op.kind == PART) {  // adds to a part of the slope of its input
            Vec* whole = slope(op.input);
            if (!has_slope_[op.input]) std::fill_n(whole, in_size * batch_.chunks, Vec{});
            has_slope_[op.input] = true;
            for (int chunk = 0; chunk < batch_.chunks; ++chunk) {
                Vec* back = whole + chunk * in_size + int64_t(op.place) * V;
                for (int64_t i = 0; i < out_size; ++i) back[i] += rise[chunk * out_size + i];
            }
            return;
        }
        if (op.kind == MULTIPLY) {
            const int64_t size = shapes_[op.input].size(), gates = shapes_[op.other].size(), gates_size = gates * V;
            if (needs_slope_[op.input]) {
                Vec* back = place_for(op.input);
                for (int chunk = 0; chunk < batch_.chunks; ++chunk)
                    multiply(size, gates, V, rise + chunk * in_size, value(op.other) + chunk * gates_size,
                             back + chunk * in_size);
                settle(op.input, back);
            }
            if (needs_slope_[op.other]) {
                Vec* back = place_for(op.other);
                for (int chunk = 0; chunk < batch_.chunks; ++chunk)
                    multiply_back(size, gates, V, rise + chunk * in_size, in + chunk * in_size,
                                  back + chunk * gates_size);
                settle(op.other, back);
            }
            return;
        }
        if (op.kind == ADD) {
            for (int each : {op.input, op.other}) {
                if (!needs_slope_[each]) continue;
                Vec* back = place_for(each);
                std::copy_n(rise, in_size * batch_.chunks, back);
                settle(each, back);
            }
            return;
        }
        const bool is_norm = op.kind == GROUP_NORM || op.kind == LAYER_NORM || op.kind == BATCH_NORM;
        const bool is_trained = !op.is_frozen;
        float* weights = is_norm && op.weight >= 0 && is_trained ? weight_gradient_.floats(to.channels) : nullptr;
        float* biases = op.bias >= 0 && is_trained ? bias_gradient_.floats(to.channels) : nullptr;
        if (biases && !is_norm) {
            const int64_t area = out_size / to.channels;
            for (int c = 0; c < to.channels; ++c) {
                Vec sum = {};
                for (int chunk = 0; chunk < batch_.chunks; ++chunk)
                    for (int64_t i = 0; i < area; ++i) sum += rise[chunk * out_size + c * area + i];
                biases[c] = total(sum);
            }
        }
        if (needs_slope_[op.input] || (is_norm && is_trained)) {  // a norm's parameters get their gradients there, too
            Vec* back = place_for(op.input);
            backward_to<V>(number, model, in, out, rise, back, weights, biases);
            settle(op.input, back);
        }
        if (!is_trained) return;
        if (op.kind == LINEAR && in_bfloat16_[number])
            workspace_.bfloat16.outer(batch_, in, rise, int(shapes_[op.input].size()), int(to.size()), op.weight,
                                      receiver);
        else if (op.kind == LINEAR)
            connect_weights<V>(op, in, rise, receiver);
        if (op.kind == DEPTHWISE) {
            float* found = scratch_.floats(num_weights(op));
            depthwise_[number]->weigh<V>(batch_.chunks, in, rise, sum_.of(depthwise_[number]->area()), found);
            receiver.take(op.weight, num_weights(op), found);
        }
        if (op.kind == CONV) convolutions_[number]->weigh(batch_, in, rise, workspace_, receiver);
        if (weights) receiver.take(op.weight, to.channels, weights);
        if (biases) receiver.take(op.bias, to.channels, biases);
    }

    // Writes the gradient of an operation's input, and that of the parameters of a normalisation.
    template <int V>
    void backward_to(size_t number, const float* model, const Vec* in, const Vec* out, const Vec* rise, Vec* back,
                     float* weights, float* biases) {
        const Op& op = ops_[number];
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        if (op.kind == BATCH_NORM)
            return batch_norm_back(op, from, batch_, model, in, kept_[number].floats(2 * from.channels), rise, back,
                                   weights, biases);
        if (op.kind == CONV) return convolutions_[number]->backward<V>(batch_, model, rise, workspace_, back);
        if (op.kind == LINEAR && in_bfloat16_[number])
            return workspace_.bfloat16.connect_back(batch_, model + op.weight, int(from.size()), int(to.size()), rise,
                                                    back);
        if (op.kind == GROUP_NORM || op.kind == LAYER_NORM)  // their chunks add to these parts of the gradient
            for (float* part : {weights, biases})
                if (part) std::fill_n(part, from.channels, 0.0f);
        const int64_t in_size = chunk_size(op.input), out_size = chunk_size(op.output);
        for (int chunk = 0; chunk < batch_.chunks;
             ++chunk, in += in_size, out += out_size, rise += out_size, back += in_size)
            switch (op.kind) {
                case LINEAR:
                    connect_back<V>(model + op.weight, int(from.size()), int(to.size()), rise, back);
                    break;
                case DEPTHWISE:
                    depthwise_[number]->backward<V>(model, rise, back);
                    break;
                case MAX_POOL:
                    max_pool_back(op, from, to, V, in, out, rise, back);
                    break;
                case AVG_POOL:
                    avg_pool_back(op, from, to, V, rise, back);
                    break;
                case SHUFFLE:  // with groups and parts exchanged, it undoes itself
                    shuffle(from.size() / op.groups / op.place, op.groups, int64_t(op.place) * V, rise, back);
                    break;
                case GROUP_NORM:
                    group_norm_back(op, from, V, model, in, kept_[number].get() + int64_t(chunk) * op.groups * 2 * V,
                                    rise, back, weights, biases);
                    break;
                case LAYER_NORM:
                    layer_norm_back(op, from, V, model, in, kept_[number].get() + 2 * chunk * chunk_pixels(op.input),
                                    rise, back, scratch_.of(2 * chunk_pixels(op.input)), weights, biases);
                    break;
            }
    }

    template <int V>
    void connect_weights(const Op& op, const Vec* in, const Vec* rise, Receiver& receiver) {
        const int64_t inputs = shapes_[op.input].size(), row = (inputs + LANES - 1) / LANES;
        Vec* sideways = scratch_.of(row * V * LANES * batch_.chunks);
        for (int chunk = 0; chunk < batch_.chunks; ++chunk)
            to_outermost(in + chunk * inputs * V, inputs, V, row * LANES,
                         reinterpret_cast<float*>(sideways + chunk * row * V * LANES));
        outer(batch_, rise, chunk_size(op.output), sideways, int(inputs), int(shapes_[op.output].size()), op.weight,
              receiver);
    }

    int64_t num_weights(const Op& op) const {
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        if (op.kind == CONV) return int64_t(to.channels) * from.channels * op.kernel_h * op.kernel_w;
        if (op.kind == DEPTHWISE) return int64_t(to.channels) * op.kernel_h * op.kernel_w;
        return op.kind == LINEAR ? from.size() * to.size() : from.channels;
    }

    // Returns where an operation writes the gradient of its input. A value that several use gets the sum.
    Vec* place_for(int number) {
        return has_slope_[number] ? sum_.of(chunk_size(number) * batch_.chunks) : slope(number);
    }

    void settle(int number, const Vec* found) {
        Vec* whole = slope(number);
        if (has_slope_[number])
            for (int64_t i = 0; i < chunk_size(number) * batch_.chunks; ++i) whole[i] += found[i];
        has_slope_[number] = true;
    }

    std::vector<Op> ops_;
    std::vector<Value> shapes_;
    int input_, output_;
    MeanLoss loss_;
    float* const frozen_;
    std::vector<Memory> value_, slope_, kept_;
    std::vector<char> has_slope_, needs_slope_, in_bfloat16_;
    std::vector<std::unique_ptr<Convolution>> convolutions_;  // null for other operations
    std::vector<std::unique_ptr<Depthwise>> depthwise_;       // null for other operations
    Memory scratch_, sum_, weight_gradient_, bias_gradient_;
    Workspace workspace_;
    const float* const* masks_ = nullptr;
    Batch batch_{1};
};

}  // namespace lcfl
