// A convolution of a network: the forward pass, and the gradients of its input and of its weights.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "bfloat16.h"
#include "correlation.h"
#include "descent.h"
#include "program.h"
#include "vectors.h"
#include "winograd.h"

namespace lcfl {

struct Workspace {  // what all convolutions of a network use in turn
    Memory weight, packed, rows, frame, part, bias, gradient;
    Winograd winograd;
    Bfloat16 bfloat16;
    Vec spare[SUMS];
};

class Convolution {
  public:
    // With `bfloat16`, the factors are rounded to it if there are enough channels.
    Convolution(const Op& op, const Value& in, const Value& out, bool bfloat16)
        : op_(op),
          in_(in_one_row(op, in)),
          out_(in_one_row(op, out)),
          bfloat16_(bfloat16),
          phases_(phases_of(op, in_, out_)) {
        for (Phase& each : phases_) {
            each.at.is_run = op.dilation > 1;
            choose_way(each.at);
        }
    }

    bool is_in_bfloat16() const { return phases_[0].at.way == Way::BFLOAT16; }

    // Writes the output. `in` and `out` hold all chunks of a batch, as everywhere in this class.
    template <int V>
    void forward(const Batch& batch, const float* model, const Vec* in, Workspace& space, Vec* out) {
        const float* bias = padded(op_.bias < 0 ? nullptr : model + op_.bias, out_.channels, space);
        const int64_t size = out_.size() * V;
        for (size_t i = 0; i < phases_.size(); ++i, bias = nullptr) {
            const Window& at = phases_[i].at;
            const Vec* framed = framed_input(batch, in, i, true);
            const float* weight = weight_of(i, model, space);
            if (at.way == Way::WINOGRAD)
                return space.winograd.correlate(batch, at, {weight, false}, bias, framed, at.size() * V, out, size);
            if (at.way == Way::BFLOAT16) {
                space.bfloat16.correlate(batch, at, {weight, false}, bias, i > 0, framed, space.rows, out, size);
                continue;
            }
            const auto pack_for = [&](int block, float* packed) {
                pack(weight, out_.channels, at.taps(), block, packed);
            };
            correlate_chunks<V>(batch, at, pack_for, bias, framed, space, out, size);
        }
        unpack_chunks(batch, phases_[0].at, out, size, {0, 1, out_.height}, {0, 1, out_.width}, space, out, size);
    }

    // Writes the gradient of the input, from the slope of the output.
    template <int V>
    void backward(const Batch& batch, const float* model, const Vec* slope, Workspace& space, Vec* back) const {
        const float* none = padded(nullptr, in_.channels, space);
        const int64_t back_size = in_.size() * V;
        for (size_t i = 0; i < phases_.size(); ++i) {
            const Span rows = phases_[i].at.rows, columns = phases_[i].at.columns;  // of the pixels in this phase
            const bool is_whole = rows.size() == in_.height && columns.size() == in_.width;
            if (i == 0 && !is_whole) std::fill_n(back, back_size * batch.chunks, Vec{});
            if (rows.size() == 0 || columns.size() == 0) continue;
            Phase slopes = turned(phases_[i]);
            choose_way(slopes.at);
            const Vec* framed = slope;
            if (!is_framed(slopes.at, out_, batch)) {
                Vec* copy = space.frame.of(slopes.at.size() * V * batch.chunks + 1);
                frame_chunks(batch, slopes, slope, out_, copy);
                framed = copy;
            }
            const float* weight = weight_of(i, model, space);
            if (slopes.at.way == Way::WINOGRAD)
                return space.winograd.correlate(batch, slopes.at, {weight, true}, none, framed, slopes.at.size() * V,
                                                back, back_size);
            const int area = slopes.at.kernel_h * slopes.at.kernel_w;
            const auto pack_for = [&](int block, float* packed) {
                pack_turned(weight, out_.channels, in_.channels, area, block, packed);
            };
            const int64_t size = int64_t(in_.channels) * rows.size() * columns.size() * V;
            Vec* found = is_whole ? back : space.part.of(size * batch.chunks);
            if (slopes.at.way == Way::BFLOAT16)
                space.bfloat16.correlate(batch, slopes.at, {weight, true}, none, false, framed, space.rows, found,
                                         size);
            else
                correlate_chunks<V>(batch, slopes.at, pack_for, none, framed, space, found, size);
            unpack_chunks(batch, slopes.at, found, size, phases_[i].rows.from(rows.begin),
                          phases_[i].columns.from(columns.begin), space, back, back_size);
        }
    }

    // Gives `receiver` the gradient of the weights, after the forward pass of the same input.
    void weigh(const Batch& batch, const Vec* in, const Vec* slope, Workspace& space, Receiver& receiver) {
        const int64_t size = out_.size() * batch.V;
        const Window& first = phases_[0].at;
        if (first.way == Way::WINOGRAD)
            return space.winograd.weigh(batch, first, framed_input(batch, in, 0, false), first.size() * batch.V, slope,
                                        size, op_.weight, receiver);
        const int last = batch.chunks - 1;  // the one chunk that can be packed
        Window slopes = in_chunk(first, batch, last);
        const int height = slopes.rows_of_output(), width = slopes.row_pixels();
        slopes.height = height, slopes.rows = {0, height}, slopes.columns = {0, width};
        Vec* packed = nullptr;
        if (slopes.is_packed) {
            packed = space.rows.of(out_.channels * slopes.plane() + 1);
            frame(slope + last * size, {out_.channels, height, width}, batch, last, slopes, {0, 1, height},
                  {0, 1, width}, slopes.row_vectors() * LANES, reinterpret_cast<float*>(packed));
        }
        std::vector<PhaseParts> phases;
        for (size_t i = 0; i < phases_.size(); ++i) {
            const Vec* framed = framed_input(batch, in, i, false);
            phases.push_back({phases_[i].taps, {}});
            for (int chunk = 0; chunk < batch.chunks; ++chunk) {
                const Window at = in_chunk(phases_[i].at, batch, chunk);
                phases.back().chunks.push_back({at,
                                                reinterpret_cast<const float*>(framed + chunk * at.size() * batch.V),
                                                at.is_packed ? packed : slope + chunk * size});
            }
        }
        if (first.way == Way::BFLOAT16)
            space.bfloat16.weigh(phases, kernel_size(), op_.weight, receiver);
        else
            lcfl::weigh(phases, kernel_size(), op_.weight, space.gradient, receiver);
    }

  private:
    // Returns a small image as one row if the kernel has one pixel. Only the last vector of a row has idle lanes.
    static Value in_one_row(const Op& op, const Value& image) {
        const int pixels = image.height * image.width;
        const bool has_one_pixel = op.kernel_h * op.kernel_w * op.stride_h * op.stride_w == 1;
        return has_one_pixel && pixels <= 64 ? Value{image.channels, 1, pixels} : image;
    }

    // Whether all weights belong to one phase.
    bool has_one_phase() const { return int(phases_[0].taps.size()) == kernel_size(); }

    void choose_way(Window& at) const {
        if (bfloat16_ && Bfloat16::suits(at.channels, at.out_channels))
            at.way = Way::BFLOAT16, at.is_run = false;
        else if (has_one_phase())
            Winograd::choose(at);
    }

    int kernel_size() const { return in_.channels * op_.kernel_h * op_.kernel_w; }

    // Returns the weights [O][taps] of a phase.
    const float* weight_of(size_t phase, const float* model, Workspace& space) const {
        const float* all = model + op_.weight;
        if (has_one_phase()) return all;
        const std::vector<Tap>& taps = phases_[phase].taps;
        float* result = space.weight.floats(int64_t(out_.channels) * taps.size());
        float* next = result;
        for (int o = 0; o < out_.channels; ++o, all += kernel_size())
            for (const Tap& tap : taps) *next++ = all[tap.number];
        return result;
    }

    // Returns the input of a phase with its padding, packed if it can be. Copies it if `now`; otherwise the forward
    // pass of this batch has done that.
    const Vec* framed_input(const Batch& batch, const Vec* in, size_t phase, bool now) {
        const Window& at = phases_[phase].at;
        if (phases_.size() == 1 && is_framed(at, in_, batch)) return in;
        int64_t begin = 0, end = 0;
        for (size_t i = 0; i < phases_.size(); ++i) {
            if (i == phase) begin = end;
            end += phases_[i].at.size() * batch.V * batch.chunks + 1;
        }
        Vec* result = framed_.of(end) + begin;
        if (now) frame_chunks(batch, phases_[phase], in, in_, result);
        return result;
    }

    // Returns whether a value is its own frame: it has no margins, and no chunk is packed.
    static bool is_framed(const Window& at, const Value& shape, const Batch& batch) {
        return at.rows.size() == at.height && at.columns.size() == at.width && at.height == shape.height &&
               at.width == shape.width && !in_chunk(at, batch, batch.chunks - 1).is_packed;
    }

    static void frame_chunks(const Batch& batch, const Phase& phase, const Vec* in, const Value& shape, Vec* out) {
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            const Window at = in_chunk(phase.at, batch, chunk);
            frame(in + chunk * shape.size() * batch.V, shape, batch, chunk, at, phase.rows, phase.columns,
                  at.width * at.pixel, reinterpret_cast<float*>(out + chunk * at.size() * batch.V));
        }
    }

    // Computes all chunks, or without a bias, adds to them. A packed one is in `space.rows` afterwards. `pack_for`
    // packs the weights for blocks of a number of channels.
    template <int V, class Pack>
    static void correlate_chunks(const Batch& batch, const Window& shape, Pack pack_for, const float* bias,
                                 const Vec* in, Workspace& space, Vec* out, int64_t out_size) {
        float* packed = space.packed.floats(int64_t(whole(shape.out_channels, SUMS)) * shape.taps());
        for (int chunk = 0, block = 0; chunk < batch.chunks; ++chunk, in += shape.size() * V, out += out_size) {
            const Window at = in_chunk(shape, batch, chunk);
            const Blocks blocks = at.is_packed ? best_blocks<1>(at) : best_blocks<V>(at);
            if (blocks.channels != block) pack_for(block = blocks.channels, packed);
            const float* from = reinterpret_cast<const float*>(in);
            if (at.is_packed)
                correlate_with<1>(blocks, at, from, packed, bias, space.rows.of(at.out_channels * at.plane() + 1),
                                  space.spare);
            else
                correlate_with<V>(blocks, at, from, packed, bias, out, space.spare);
        }
    }

    // Copies the chunks that `correlate_chunks` has computed to where they belong.
    static void unpack_chunks(const Batch& batch, const Window& shape, const Vec* found, int64_t found_size,
                              const Line& rows, const Line& columns, const Workspace& space, Vec* out,
                              int64_t out_size) {
        for (int chunk = 0; chunk < batch.chunks; ++chunk) {
            const Window at = in_chunk(shape, batch, chunk);
            if (at.is_packed || found != out)
                unpack(at.is_packed ? space.rows.get() : found + chunk * found_size, batch, chunk, at, rows, columns,
                       out + chunk * out_size);
        }
    }

    // Returns biases with zeros for the channels that pad the last block.
    static const float* padded(const float* biases, int count, Workspace& space) {
        float* result = space.bias.floats(count + 32);
        std::fill_n(result, count + 32, 0.0f);
        if (biases) std::copy_n(biases, count, result);
        return result;
    }

    const Op op_;
    const Value in_, out_;
    const bool bfloat16_;
    std::vector<Phase> phases_;
    Memory framed_;  // the input of all phases
};

}  // namespace lcfl
