// Depthwise convolutions: each channel has a kernel of its own.
//
// A pixel of the output is a sum over taps, and so is a pixel of the input's gradient. Along one dimension, both read
// every `tap_step`-th tap, and the pixels that they meet lie `from_step` apart. Neighbours that meet the same taps are
// computed together (`Run`), and only those at the edges of an image meet fewer than the others.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "program.h"
#include "vectors.h"

namespace lcfl {

struct Run {                 // pixels that meet the same taps
    int first, step, count;  // of these pixels
    int tap, tap_step, taps;
    int from, from_step, next_from;  // the pixel at the first tap, from tap to tap, and from pixel to pixel
};

class Reach {  // which pixels of another value the pixels along one dimension read
  public:
    static Reach of_output(int in, int out, int kernel, int stride, int padding) {
        Reach reach;
        for (int t = 0; t < out; ++t) {
            const int from = t * stride - padding, begin = std::max(-from, 0), end = std::min(kernel, in - from);
            reach.add({t, 1, 1, begin, 1, std::max(end - begin, 0), from + begin, 1, stride});
        }
        return reach;
    }

    static Reach of_gradient(int in, int out, int kernel, int stride, int padding) {
        Reach reach;
        for (int phase = 0; phase < stride; ++phase)
            for (int t = phase; t < in; t += stride) {
                const int at = t + padding, least = std::max(at - stride * (out - 1), at % stride);
                const int most = std::min(kernel - 1, at);
                reach.add({t, stride, 1, least, stride, std::max((most - least + stride) / stride, 0),
                           (at - least) / stride, -1, 1});
            }
        return reach;
    }

    const std::vector<Run>& runs() const { return runs_; }

  private:
    void add(const Run& next) {
        if (!runs_.empty()) {
            Run& last = runs_.back();
            if (last.first + last.count * last.step == next.first && last.tap == next.tap && last.taps == next.taps) {
                ++last.count;
                return;
            }
        }
        runs_.push_back(next);
    }

    std::vector<Run> runs_;
};

class Depthwise {
  public:
    Depthwise(const Op& op, const Value& in, const Value& out)
        : op_(op),
          in_(in),
          out_(out),
          rows_(Reach::of_output(in.height, out.height, op.kernel_h, op.stride_h, op.padding_h)),
          columns_(Reach::of_output(in.width, out.width, op.kernel_w, op.stride_w, op.padding_w)),
          back_rows_(Reach::of_gradient(in.height, out.height, op.kernel_h, op.stride_h, op.padding_h)),
          back_columns_(Reach::of_gradient(in.width, out.width, op.kernel_w, op.stride_w, op.padding_w)) {}

    // Writes the output of a chunk.
    template <int V>
    void forward(const float* model, const Vec* in, Vec* out) const {
        for (int c = 0; c < out_.channels; ++c)
            correlate<V>(rows_, columns_, model + op_.weight + c * area(), op_.bias < 0 ? 0 : model[op_.bias + c],
                         in + c * plane<V>(in_), in_.width, out + c * plane<V>(out_), out_.width);
    }

    // Writes the gradient of the input of a chunk.
    template <int V>
    void backward(const float* model, const Vec* slope, Vec* back) const {
        for (int c = 0; c < in_.channels; ++c)
            correlate<V>(back_rows_, back_columns_, model + op_.weight + c * area(), 0, slope + c * plane<V>(out_),
                         out_.width, back + c * plane<V>(in_), in_.width);
    }

    // Writes the gradient of the weights [channels][taps]. `sums` has room for the taps of a channel.
    template <int V>
    void weigh(int chunks, const Vec* in, const Vec* slope, Vec* sums, float* gradient) const {
        for (int c = 0; c < in_.channels; ++c, gradient += area()) {
            std::fill_n(sums, area(), Vec{});
            for (int chunk = 0; chunk < chunks; ++chunk)
                weigh_plane<V>(in + (int64_t(chunk) * in_.channels + c) * plane<V>(in_),
                               slope + (int64_t(chunk) * out_.channels + c) * plane<V>(out_), sums);
            for (int tap = 0; tap < area(); ++tap) gradient[tap] = total(sums[tap]);
        }
    }

    int area() const { return op_.kernel_h * op_.kernel_w; }  // taps of a channel

  private:
    template <int V>
    static int64_t plane(const Value& value) {  // vectors of a channel
        return int64_t(value.height) * value.width * V;
    }

    // Writes every pixel of a channel that the reaches describe.
    template <int V>
    void correlate(const Reach& rows, const Reach& columns, const float* weight, float bias, const Vec* from,
                   int from_width, Vec* to, int to_width) const {
        constexpr int BLOCK = 8 / V;  // pixels whose sums are held in registers
        for (const Run& row : rows.runs())
            for (int y = 0; y < row.count; ++y) {
                const Vec* line = from + int64_t(row.from + y * row.next_from) * from_width * V;
                Vec* end = to + int64_t(row.first + y * row.step) * to_width * V;
                for (const Run& run : columns.runs()) {
                    int x = 0;
                    for (; x + BLOCK <= run.count; x += BLOCK)
                        correlate_block<V, BLOCK>(row, run, x, weight, bias, line, from_width, end);
                    for (; x < run.count; ++x) correlate_block<V, 1>(row, run, x, weight, bias, line, from_width, end);
                }
            }
    }

    template <int V, int X>
    void correlate_block(const Run& row, const Run& run, int x, const float* weight, float bias, const Vec* line,
                         int width, Vec* to) const {
        Vec sum[X][V];
        for (int i = 0; i < X; ++i)
            for (int v = 0; v < V; ++v) sum[i][v] = fill(bias);
        const int64_t next = int64_t(run.next_from) * V, down = int64_t(row.from_step) * width * V;
        for (int ky = 0; ky < row.taps; ++ky) {
            const float* factors = weight + (row.tap + ky * row.tap_step) * op_.kernel_w + run.tap;
            const Vec* pixel = line + ky * down + (run.from + x * run.next_from) * V;
            for (int kx = 0; kx < run.taps; ++kx, factors += run.tap_step, pixel += run.from_step * V) {
                const Vec factor = held(fill(*factors));
                for (int i = 0; i < X; ++i)
                    for (int v = 0; v < V; ++v) sum[i][v] += factor * pixel[i * next + v];
            }
        }
        for (int i = 0; i < X; ++i)
            for (int v = 0; v < V; ++v) to[(run.first + (x + i) * run.step) * V + v] = sum[i][v];
    }

    template <int V>
    void weigh_plane(const Vec* in, const Vec* slope, Vec* sums) const {
        for (const Run& row : rows_.runs())
            for (int y = 0; y < row.count; ++y)
                for (const Run& run : columns_.runs()) {
                    const Vec* rise = slope + (int64_t(row.first + y) * out_.width + run.first) * V;
                    for (int ky = 0; ky < row.taps; ++ky) {
                        const int line = row.from + y * row.next_from + ky;
                        const Vec* pixel = in + (int64_t(line) * in_.width + run.from) * V;
                        Vec* sum = sums + (row.tap + ky) * op_.kernel_w + run.tap;
                        int kx = 0;
                        for (; kx + 3 <= run.taps; kx += 3) weigh_taps<V, 3>(run, pixel + kx * V, rise, sum + kx);
                        for (; kx < run.taps; ++kx) weigh_taps<V, 1>(run, pixel + kx * V, rise, sum + kx);
                    }
                }
    }

    template <int V, int T>
    static void weigh_taps(const Run& run, const Vec* pixel, const Vec* rise, Vec* sums) {
        Vec sum[T][V] = {};
        for (int x = 0; x < run.count; ++x, pixel += run.next_from * V, rise += V)
            for (int v = 0; v < V; ++v) {
                const Vec factor = held(rise[v]);
                for (int tap = 0; tap < T; ++tap) sum[tap][v] += factor * pixel[tap * V + v];
            }
        for (int tap = 0; tap < T; ++tap)
            for (int v = 0; v < V; ++v) sums[tap] += sum[tap][v];
    }

    const Op op_;
    const Value in_, out_;
    const Reach rows_, columns_, back_rows_, back_columns_;
};

}  // namespace lcfl
