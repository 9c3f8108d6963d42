// One training step of a small network on one CPU thread.
//
// The batch lies innermost: LANES samples are one vector, V vectors (1 or 2) of them a chunk, and a value of C
// channels and H x W pixels is chunks x [C][H][W][V] vectors. So every loop below runs over whole vectors whatever
// the shape of a layer, and the same formula serves a convolution of 5 x 5 and one of 1 x 1. Lanes beyond the batch
// hold samples of zeros, whose gradient is zero.
//
// All sums have a fixed order, which depends on nothing but the network and the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>
#include <vector>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Loose __attribute__((vector_size(64), aligned(4), may_alias));  // anywhere in a flat vector
typedef int32_t Mask __attribute__((vector_size(64)));

// How many sums are held in registers at once: as many as there are registers, less a few for factors.
#ifdef __AVX512F__
constexpr int SUMS = 24;
#else
constexpr int SUMS = 6;
#endif

constexpr int NEAR = 4096;  // vectors, 256 KiB: what stays in the second cache while it is read again and again

inline Vec fill(float value) { return Vec{} + value; }

inline float total(Vec values) {  // by halves
    Vec8 eight[2];
    std::memcpy(eight, &values, sizeof values);
    const Vec8 folded = eight[0] + eight[1];
    Vec4 four[2];
    std::memcpy(four, &folded, sizeof folded);
    const Vec4 last = four[0] + four[1];
    return (last[0] + last[2]) + (last[1] + last[3]);
}

inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// ---- What Python hands over; kernels.py has the same fields. ----

enum Kind : int32_t { CONV, LINEAR, RELU, MAX_POOL, AVG_POOL, GROUP_NORM, BATCH_NORM, ADD };

struct Value {  // of one sample
    int32_t channels, height, width;
    int64_t size() const { return int64_t(channels) * height * width; }
};

struct Op {
    int32_t kind, input, other, output;  // numbers of values; `other` is ADD's second one
    int32_t kernel_h, kernel_w, stride_h, stride_w, padding_h, padding_w;
    int32_t groups;
    float eps, momentum;
    int64_t weight, bias;        // where they begin in the model, -1: there is none
    int64_t mean, var, tracked;  // BATCH_NORM: where its statistics begin in the buffers
};

struct Sgd {
    float rate, momentum, dampening, weight_decay;
    int32_t nesterov, first;
    float cluster_weight, global_weight;
    int64_t num_parameters, num_embedding;
};

// ---- Memory ----

class Memory {  // of vectors, that only grows
  public:
    Memory() = default;
    Memory(const Memory&) = delete;
    Memory(Memory&& other) noexcept : start_(other.start_), size_(other.size_) { other.start_ = nullptr; }
    ~Memory() { std::free(start_); }
    Vec* of(int64_t size) {
        if (size > size_) {
            std::free(start_);
            start_ = static_cast<Vec*>(std::aligned_alloc(64, size * sizeof(Vec)));
            if (!start_) throw std::bad_alloc();
            size_ = size;
            std::memset(static_cast<void*>(start_), 0, size * sizeof(Vec));
        }
        return start_;
    }
    Vec* get() const { return start_; }

  private:
    Vec* start_ = nullptr;
    int64_t size_ = 0;
};

// ---- Convolution ----

struct Window {  // a correlation of [channels][height][width] with kernels, whose margins of zeros are part of it
    int channels, height, width, kernel_h, kernel_w, stride_h, stride_w, out_channels, out_height, out_width;
    int top, bottom, left, right;  // beyond these rows and columns lie zeros
    int taps() const { return channels * kernel_h * kernel_w; }
};

struct Span {  // the taps of a kernel that do not lie wholly in the margins
    int begin, end;
};

inline Span inside(int first, int last, int size, int low, int high) {
    return {std::max(0, low - last), std::min(size, high - first)};
}

// A block of CB channels x XB pixels of out[o][y][x] = bias[o] + sum over taps of w[o][tap] in[tap at y, x], over the
// input channels from `channel` to `end`. Without a bias the sum goes on from what stands in `out`. The first `skip`
// pixels are left as they are.
template <int CB, int XB, int V>
void correlate_block(const Window& at, int channel, int end, Span rows, Span columns, int skip, const Vec* in,
                     const float* packed, const float* bias, Vec* out, int64_t plane) {
    Vec sum[CB][XB][V];
    for (int c = 0; c < CB; ++c)
        for (int x = 0; x < XB; ++x)
            for (int v = 0; v < V; ++v) sum[c][x][v] = bias ? fill(bias[c]) : out[c * plane + x * V + v];
    const int step = at.stride_w * V;
    for (; channel < end; ++channel)
        for (int ky = rows.begin; ky < rows.end; ++ky) {
            const Vec* row = in + ((int64_t(channel) * at.height + ky) * at.width + columns.begin) * V;
            const float* weight = packed + ((int64_t(channel) * at.kernel_h + ky) * at.kernel_w + columns.begin) * CB;
            for (int kx = columns.begin; kx < columns.end; ++kx, row += V, weight += CB)
                for (int x = 0; x < XB; ++x)
                    for (int v = 0; v < V; ++v) {
                        const Vec value = row[x * step + v];
                        for (int c = 0; c < CB; ++c) sum[c][x][v] += weight[c] * value;
                    }
        }
    for (int c = 0; c < CB; ++c)
        for (int x = 0; x < XB; ++x)
            for (int v = 0; v < V; ++v)
                if (x >= skip) out[c * plane + x * V + v] = sum[c][x][v];
}

// Blocks of CB x XB over a whole value, for as many input channels at a time as stay in the second cache. The last
// block of a row overlaps the one before. Channels beyond the last have weights of zero and lie in `spare`.
template <int CB, int XB, int V>
void correlate(const Window& at, const Vec* in, const float* packed, const float* bias, Vec* out, Vec* spare) {
    const int64_t plane = int64_t(at.out_height) * at.out_width * V;
    const int together = std::max(1, NEAR / (at.height * at.width * V));
    for (int channel = 0; channel < at.channels; channel += together) {
        const int end = std::min(channel + together, at.channels);
        for (int first = 0; first < at.out_channels; first += CB) {
            const float* weight = packed + int64_t(first) * at.taps();
            const float* begins = channel == 0 ? bias + first : nullptr;
            const int valid = std::min(CB, at.out_channels - first);
            for (int y = 0; y < at.out_height; ++y) {
                const Span rows = inside(y * at.stride_h, y * at.stride_h, at.kernel_h, at.top, at.bottom);
                for (int x = 0; x < at.out_width; x += XB) {
                    const int left = std::min(x, at.out_width - XB);
                    const Span columns =
                        inside(left * at.stride_w, (left + XB - 1) * at.stride_w, at.kernel_w, at.left, at.right);
                    const Vec* from = in + (int64_t(y) * at.stride_h * at.width + int64_t(left) * at.stride_w) * V;
                    Vec* to = out + first * plane + (int64_t(y) * at.out_width + left) * V;
                    if (valid == CB) {
                        correlate_block<CB, XB, V>(at, channel, end, rows, columns, x - left, from, weight, begins, to,
                                                   plane);
                        continue;
                    }
                    for (int c = 0; c < valid; ++c) std::copy_n(to + c * plane, XB * V, spare + c * XB * V);
                    correlate_block<CB, XB, V>(at, channel, end, rows, columns, x - left, from, weight, begins, spare,
                                               XB * V);
                    for (int c = 0; c < valid; ++c) std::copy_n(spare + c * XB * V, XB * V, to + c * plane);
                }
            }
        }
    }
}

struct Blocks {
    int channels, pixels;
};

// The blocks with the least work for a shape, among those whose sums fit the registers.
template <int V>
Blocks best_blocks(const Window& at) {
    static const Blocks wide[] = {{4, 3}, {3, 4}, {6, 2}, {2, 6}, {12, 1}};
    static const Blocks slim[] = {{6, 4}, {4, 6}, {8, 3}, {3, 8}, {12, 2}, {24, 1}};
    static const Blocks few[] = {{3, 2 / V}, {2, 1}};
    const Blocks* list = SUMS < 24 ? few : V == 2 ? wide : slim;
    const int length = SUMS < 24 ? 2 : V == 2 ? 5 : 6;
    Blocks best{1, 1};
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Blocks* each = list; each != list + length; ++each) {
        if (each->pixels > at.out_width) continue;
        const int64_t work = (at.out_channels + each->channels - 1) / each->channels * int64_t(each->channels) *
                             ((at.out_width + each->pixels - 1) / each->pixels) * each->pixels;
        if (work < least) best = *each, least = work;
    }
    return best;
}

template <int V>
void correlate_with(Blocks b, const Window& at, const Vec* in, const float* packed, const float* bias, Vec* out,
                    Vec* spare) {
    const int code = b.channels * 100 + b.pixels;
#define LCFL_CASE(C, X) \
    case C * 100 + X:   \
        return correlate<C, X, V>(at, in, packed, bias, out, spare);
    if constexpr (SUMS < 24) {
        switch (code) { LCFL_CASE(3, 1) LCFL_CASE(3, 2) LCFL_CASE(2, 1) }
    } else if constexpr (V == 2) {
        switch (code) { LCFL_CASE(4, 3) LCFL_CASE(3, 4) LCFL_CASE(6, 2) LCFL_CASE(2, 6) LCFL_CASE(12, 1) }
    } else {
        switch (code) {
            LCFL_CASE(6, 4) LCFL_CASE(4, 6) LCFL_CASE(8, 3) LCFL_CASE(3, 8) LCFL_CASE(12, 2) LCFL_CASE(24, 1)
        }
    }
#undef LCFL_CASE
    correlate<1, 1, V>(at, in, packed, bias, out, spare);
}

// Weights [O][taps] as [O / CB][taps][CB], with zeros in the last block.
void pack(const float* weight, int out_channels, int taps, int block, float* packed) {
    for (int first = 0; first < out_channels; first += block)
        for (int tap = 0; tap < taps; ++tap)
            for (int c = 0; c < block; ++c)
                *packed++ = first + c < out_channels ? weight[int64_t(first + c) * taps + tap] : 0;
}

// Weights [O][C][KH][KW] as those of the backward correlation, [C][O][KH][KW] with both kernel axes turned round.
void turn(const float* weight, int out_channels, int channels, int area, float* turned) {
    for (int c = 0; c < channels; ++c)
        for (int o = 0; o < out_channels; ++o)
            for (int k = 0; k < area; ++k)
                turned[(int64_t(c) * out_channels + o) * area + k] =
                    weight[(int64_t(o) * channels + c) * area + area - 1 - k];
}

// d loss / d w[o][tap] = sum over pixels and lanes of slope[o] in[tap], for CB channels x TB taps at a time.
template <int CB, int TB, int V>
void weigh_block(const Window& at, const Vec* const* in, const Vec* const* slope, Vec (&sum)[CB][TB]) {
    for (int y = 0; y < at.out_height; ++y) {
        const int64_t from = int64_t(y) * at.stride_h * at.width * V, to = int64_t(y) * at.out_width * V;
        for (int x = 0; x < at.out_width; ++x)
            for (int v = 0; v < V; ++v) {
                Vec rise[CB];
                for (int c = 0; c < CB; ++c) rise[c] = slope[c][to + x * V + v];
                for (int t = 0; t < TB; ++t) {
                    const Vec value = in[t][from + int64_t(x) * at.stride_w * V + v];
                    for (int c = 0; c < CB; ++c) sum[c][t] += rise[c] * value;
                }
            }
    }
}

template <int V>
void weigh(const Window& at, const Vec* in, int64_t in_chunk, const Vec* slope, int64_t slope_chunk, int chunks,
           float* gradient) {
    constexpr int CB = SUMS < 24 ? 2 : 4, TB = SUMS < 24 ? 3 : 6;
    const int area = at.kernel_h * at.kernel_w, taps = at.taps();
    const int64_t plane = int64_t(at.out_height) * at.out_width * V;
    for (int first = 0; first < at.out_channels; first += CB)
        for (int tap = 0; tap < taps; tap += TB) {
            Vec sum[CB][TB] = {};
            for (int chunk = 0; chunk < chunks; ++chunk) {
                const Vec *from[TB], *rise[CB];
                for (int t = 0; t < TB; ++t) {  // beyond the last tap: the last one again
                    const int each = std::min(tap + t, taps - 1), place = each % area;
                    from[t] =
                        in + chunk * in_chunk +
                        ((int64_t(each / area) * at.height + place / at.kernel_w) * at.width + place % at.kernel_w) * V;
                }
                for (int c = 0; c < CB; ++c)
                    rise[c] = slope + chunk * slope_chunk + std::min(first + c, at.out_channels - 1) * plane;
                weigh_block<CB, TB, V>(at, from, rise, sum);
            }
            for (int c = 0; c < CB && first + c < at.out_channels; ++c)
                for (int t = 0; t < TB && tap + t < taps; ++t)
                    gradient[int64_t(first + c) * taps + tap + t] = total(sum[c][t]);
        }
}

// A value inside a frame of zeros, its pixels `stride` apart.
void frame(const Vec* in, const Value& shape, int V, int top, int left, int stride_h, int stride_w, int height,
           int width, Vec* out) {
    std::memset(static_cast<void*>(out), 0, sizeof(Vec) * shape.channels * height * width * V);
    for (int c = 0; c < shape.channels; ++c)
        for (int y = 0; y < shape.height; ++y) {
            const Vec* from = in + (int64_t(c) * shape.height + y) * shape.width * V;
            Vec* to = out + ((int64_t(c) * height + top + y * stride_h) * width + left) * V;
            for (int x = 0; x < shape.width; ++x)
                for (int v = 0; v < V; ++v) to[int64_t(x) * stride_w * V + v] = from[x * V + v];
        }
}

// ---- Fully connected layers: w is [O][I] ----

// out[o] = bias[o] + sum_i w[o][i] in[i], for OB outputs at a time.
template <int OB, int V>
void connect_block(const float* weight, int64_t inputs, const float* bias, const Vec* in, Vec* out) {
    Vec sum[OB][V];
    for (int o = 0; o < OB; ++o)
        for (int v = 0; v < V; ++v) sum[o][v] = fill(bias ? bias[o] : 0);
    for (int64_t i = 0; i < inputs; ++i)
        for (int v = 0; v < V; ++v) {
            const Vec value = in[i * V + v];
            for (int o = 0; o < OB; ++o) sum[o][v] += weight[o * inputs + i] * value;
        }
    for (int o = 0; o < OB; ++o)
        for (int v = 0; v < V; ++v) out[o * V + v] = sum[o][v];
}

template <int V>
void connect(const float* weight, int inputs, int outputs, const float* bias, const Vec* in, Vec* out) {
    constexpr int OB = SUMS / 2 / (SUMS < 24 ? V : 1);
    int o = 0;
    for (; o + OB <= outputs; o += OB)
        connect_block<OB, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
    for (; OB > 4 && o + 4 <= outputs; o += 4)
        connect_block<4, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
    for (; o < outputs; ++o)
        connect_block<1, V>(weight + int64_t(o) * inputs, inputs, bias ? bias + o : nullptr, in, out + o * V);
}

// back[i] += sum over rows o of w[o][i] slope[o], for IB inputs at a time.
template <int IB, int V>
void connect_back_block(const float* weight, int64_t inputs, int rows, const Vec* slope, Vec* back) {
    Vec sum[IB][V];
    for (int i = 0; i < IB; ++i)
        for (int v = 0; v < V; ++v) sum[i][v] = back[i * V + v];
    for (int o = 0; o < rows; ++o, weight += inputs)
        for (int v = 0; v < V; ++v) {
            const Vec rise = slope[o * V + v];
            for (int i = 0; i < IB; ++i) sum[i][v] += weight[i] * rise;
        }
    for (int i = 0; i < IB; ++i)
        for (int v = 0; v < V; ++v) back[i * V + v] = sum[i][v];
}

template <int V>
void connect_back(const float* weight, int inputs, int outputs, const Vec* slope, Vec* back) {
    constexpr int IB = SUMS / 2 / (SUMS < 24 ? V : 1), ROWS = 64;  // so many rows' pages stay known
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * inputs * V);
    for (int first = 0; first < outputs; first += ROWS) {
        const float* rows = weight + int64_t(first) * inputs;
        const int count = std::min(ROWS, outputs - first);
        int i = 0;
        for (; i + IB <= inputs; i += IB)
            connect_back_block<IB, V>(rows + i, inputs, count, slope + first * V, back + i * V);
        for (; i < inputs; ++i) connect_back_block<1, V>(rows + i, inputs, count, slope + first * V, back + i * V);
    }
}

// d loss / d w[o][i] = sum_b slope[o][b] in[b][i], for OB rows x IB vectors of inputs at a time.
template <int OB, int IB>
void outer_block(const float* const* slope, const Vec* in, int64_t row, int samples, int64_t chunk_in, int chunks,
                 int64_t chunk_slope, Vec (&sum)[OB][IB]) {
    for (int chunk = 0; chunk < chunks; ++chunk)
        for (int b = 0; b < samples; ++b) {
            const Vec* values = in + chunk * chunk_in + b * row;
            for (int i = 0; i < IB; ++i) {
                const Vec value = values[i];
                for (int o = 0; o < OB; ++o) sum[o][i] += slope[o][chunk * chunk_slope + b] * value;
            }
        }
}

// `sideways` is the input with the batch outermost: chunks x [V LANES][I rounded up to vectors].
void outer(const Vec* slope, int64_t slope_chunk, const Vec* sideways, int inputs, int outputs, int V, int chunks,
           float* gradient) {
    constexpr int OB = SUMS < 24 ? 2 : 6, IB = SUMS < 24 ? 3 : 4;
    const int row = (inputs + LANES - 1) / LANES, samples = V * LANES;
    for (int v = 0; v < row; v += IB)
        for (int first = 0; first < outputs; first += OB) {
            const float* rise[OB];
            for (int o = 0; o < OB; ++o)
                rise[o] = reinterpret_cast<const float*>(slope + int64_t(std::min(first + o, outputs - 1)) * V);
            Vec sum[OB][IB] = {};
            const int begin = std::max(0, std::min(v, row - IB));
            if (row >= IB) {
                outer_block<OB, IB>(rise, sideways + begin, row, samples, int64_t(row) * samples, chunks,
                                    slope_chunk * LANES, sum);
            } else {
                for (int i = 0; i < row; ++i) {
                    Vec one[OB][1] = {};
                    outer_block<OB, 1>(rise, sideways + i, row, samples, int64_t(row) * samples, chunks,
                                       slope_chunk * LANES, one);
                    for (int o = 0; o < OB; ++o) sum[o][i] = one[o][0];
                }
            }
            for (int o = 0; o < OB && first + o < outputs; ++o)
                for (int i = 0; i < IB && begin + i < row; ++i) {
                    const int at = (begin + i) * LANES;
                    float* to = gradient + int64_t(first + o) * inputs + at;
                    if (at + LANES <= inputs)
                        *reinterpret_cast<Loose*>(to) = sum[o][i];
                    else
                        for (int lane = 0; at + lane < inputs; ++lane) to[lane] = sum[o][i][lane];
                }
        }
}

// ---- Between the batch innermost and the batch outermost ----

#ifdef __clang__
#define LCFL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LCFL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#endif

// Rows become columns: four times every row is interleaved with the one eight rows below.
void transpose(Vec (&rows)[LANES]) {
    for (int stage = 0; stage < 4; ++stage) {
        Vec woven[LANES];
        for (int r = 0; r < LANES / 2; ++r) {
            const Vec a = rows[r], b = rows[r + LANES / 2];
            woven[2 * r] = LCFL_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            woven[2 * r + 1] = LCFL_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        std::copy_n(woven, LANES, rows);
    }
}
#undef LCFL_SHUFFLE

// [size][V LANES] -> [V LANES][row], where row is a multiple of LANES; what lies beyond size in a row is of no account.
void to_outermost(const Vec* in, int64_t size, int V, int64_t row, float* out) {
    for (int64_t begin = 0; begin < size; begin += LANES)
        for (int v = 0; v < V; ++v) {
            Vec rows[LANES] = {};
            for (int64_t i = 0; i < std::min<int64_t>(LANES, size - begin); ++i) rows[i] = in[(begin + i) * V + v];
            transpose(rows);
            for (int lane = 0; lane < LANES; ++lane)
                *reinterpret_cast<Loose*>(out + (v * LANES + lane) * row + begin) = rows[lane];
        }
}

// [samples][size] -> [size][V LANES], with zeros for the lanes that have no sample.
void to_innermost(const float* in, int64_t size, int V, int samples, Vec* out) {
    for (int64_t begin = 0; begin < size; begin += LANES) {
        const int count = int(std::min<int64_t>(LANES, size - begin));
        for (int v = 0; v < V; ++v) {
            Vec rows[LANES] = {};
            for (int lane = 0; lane < LANES && v * LANES + lane < samples; ++lane) {
                const float* from = in + (v * LANES + lane) * size + begin;
                if (count == LANES)
                    rows[lane] = *reinterpret_cast<const Loose*>(from);
                else
                    std::memcpy(&rows[lane], from, count * sizeof(float));
            }
            transpose(rows);
            for (int i = 0; i < count; ++i) out[(begin + i) * V + v] = rows[i];
        }
    }
}

// ---- Pooling ----

template <class Each>
void windows(const Op& op, const Value& in, const Value& out, Each each) {
    for (int c = 0; c < out.channels; ++c)
        for (int y = 0; y < out.height; ++y)
            for (int x = 0; x < out.width; ++x) {
                const int top = y * op.stride_h - op.padding_h, left = x * op.stride_w - op.padding_w;
                each((int64_t(c) * out.height + y) * out.width + x, int64_t(c) * in.height * in.width, std::max(top, 0),
                     std::min(top + op.kernel_h, in.height), std::max(left, 0), std::min(left + op.kernel_w, in.width));
            }
}

void max_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            Vec most = in[(plane + int64_t(top) * shape.width + left) * V + v];
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x)
                    most = larger(in[(plane + int64_t(y) * shape.width + x) * V + v], most);
            out[to * V + v] = most;
        }
    });
}

// The slope goes to the first pixel of a window that is its maximum.
void max_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, const Vec* out,
                   const Vec* slope, Vec* back) {
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            const Vec most = out[to * V + v];
            Vec left_over = slope[to * V + v];
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) {
                    const int64_t at = (plane + int64_t(y) * shape.width + x) * V + v;
                    const Mask is_most = in[at] == most;
                    const Vec zero = {};
                    back[at] += is_most ? left_over : zero;
                    left_over = is_most ? zero : left_over;
                }
        }
    });
}

void avg_pool(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* in, Vec* out) {
    const float share = 1.0f / (op.kernel_h * op.kernel_w);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            Vec sum = {};
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) sum += in[(plane + int64_t(y) * shape.width + x) * V + v];
            out[to * V + v] = sum * share;
        }
    });
}

void avg_pool_back(const Op& op, const Value& shape, const Value& pooled, int V, const Vec* slope, Vec* back) {
    const float share = 1.0f / (op.kernel_h * op.kernel_w);
    std::memset(static_cast<void*>(back), 0, sizeof(Vec) * shape.size() * V);
    windows(op, shape, pooled, [&](int64_t to, int64_t plane, int top, int bottom, int left, int right) {
        for (int v = 0; v < V; ++v) {
            const Vec each = slope[to * V + v] * share;
            for (int y = top; y < bottom; ++y)
                for (int x = left; x < right; ++x) back[(plane + int64_t(y) * shape.width + x) * V + v] += each;
        }
    });
}

// ---- Normalisation: y = (x - mean) / sqrt(var + eps) gamma + beta ----

Vec inverse_root(Vec values) {
    Vec result;
    for (int lane = 0; lane < LANES; ++lane) result[lane] = 1.0f / std::sqrt(values[lane]);
    return result;
}

// Over the channels of a group and all pixels, every sample by itself; `stats` keeps mean and 1 / deviation.
void group_norm(const Op& op, const Value& shape, int V, const float* model, const Vec* in, Vec* out, Vec* stats) {
    const int64_t area = int64_t(shape.height) * shape.width, width = shape.channels / op.groups;
    for (int g = 0; g < op.groups; ++g)
        for (int v = 0; v < V; ++v) {
            const Vec* from = in + g * width * area * V + v;
            Vec sum = {}, squares = {};
            for (int64_t i = 0; i < width * area; ++i) sum += from[i * V];
            const Vec mean = sum / float(width * area);
            for (int64_t i = 0; i < width * area; ++i) squares += (from[i * V] - mean) * (from[i * V] - mean);
            const Vec root = inverse_root(squares / float(width * area) + op.eps);
            stats[(g * 2) * V + v] = mean, stats[(g * 2 + 1) * V + v] = root;
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c],
                            beta = op.bias < 0 ? 0 : model[op.bias + c];
                for (int64_t i = c * area; i < (c + 1) * area; ++i)
                    out[i * V + v] = (in[i * V + v] - mean) * root * gamma + beta;
            }
        }
}

void group_norm_back(const Op& op, const Value& shape, int V, const float* model, const Vec* in, const Vec* stats,
                     const Vec* slope, Vec* back, float* gradient) {
    const int64_t area = int64_t(shape.height) * shape.width, width = shape.channels / op.groups;
    for (int g = 0; g < op.groups; ++g)
        for (int v = 0; v < V; ++v) {
            const Vec mean = stats[(g * 2) * V + v], root = stats[(g * 2 + 1) * V + v];
            Vec slopes = {}, products = {};
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                Vec plain = {}, along = {};
                for (int64_t i = c * area; i < (c + 1) * area; ++i) {
                    plain += slope[i * V + v];
                    along += slope[i * V + v] * (in[i * V + v] - mean) * root;
                }
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
                slopes += plain * gamma, products += along * gamma;
                if (op.weight >= 0) gradient[op.weight + c] += total(along);
                if (op.bias >= 0) gradient[op.bias + c] += total(plain);
            }
            slopes /= float(width * area), products /= float(width * area);
            for (int64_t c = g * width; c < (g + 1) * width; ++c) {
                const float gamma = op.weight < 0 ? 1 : model[op.weight + c];
                for (int64_t i = c * area; i < (c + 1) * area; ++i) {
                    const Vec centred = (in[i * V + v] - mean) * root;
                    back[i * V + v] = (slope[i * V + v] * gamma - slopes - centred * products) * root;
                }
            }
        }
}

// ---- The network ----

class Program {
  public:
    Program(const Op* ops, int num_ops, const Value* values, int num_values, int input, int output)
        : ops_(ops, ops + num_ops),
          shapes_(values, values + num_values),
          input_(input),
          output_(output),
          value_(num_values),
          slope_(num_values),
          kept_(num_ops),
          has_slope_(num_values) {}

    // Mean cross-entropy of a batch; the gradient [P] replaces what was in it.
    double gradient(const float* model, float* buffers, const float* inputs, const int64_t* labels, int64_t samples,
                    float* gradient, int64_t num_parameters) {
        samples_ = samples;
        V_ = samples <= LANES ? 1 : 2;
        chunks_ = int((samples + V_ * LANES - 1) / (V_ * LANES));
        const int64_t size = shapes_[input_].size();
        Vec* first = value(input_);
        for (int chunk = 0; chunk < chunks_; ++chunk)
            to_innermost(inputs + chunk * V_ * LANES * size, size, V_, in_chunk(chunk), first + chunk * size * V_);
        for (size_t i = 0; i < ops_.size(); ++i)
            V_ == 1 ? forward<1>(i, model, buffers, true) : forward<2>(i, model, buffers, true);
        std::memset(gradient, 0, sizeof(float) * num_parameters);
        std::fill(has_slope_.begin(), has_slope_.end(), false);
        const double loss = cross_entropy(labels);
        for (size_t i = ops_.size(); i-- > 0;)
            V_ == 1 ? backward<1>(i, model, gradient) : backward<2>(i, model, gradient);
        return loss;
    }

    // Class scores [samples][classes] as the network gives them in evaluation.
    void scores(const float* model, float* buffers, const float* inputs, int64_t samples, float* result) {
        const int64_t size = shapes_[input_].size(), classes = shapes_[output_].size();
        chunks_ = 1;
        for (int64_t begin = 0; begin < samples; begin += samples_) {
            samples_ = std::min<int64_t>(2 * LANES, samples - begin);
            V_ = samples_ <= LANES ? 1 : 2;
            to_innermost(inputs + begin * size, size, V_, int(samples_), value(input_));
            for (size_t i = 0; i < ops_.size(); ++i)
                V_ == 1 ? forward<1>(i, model, buffers, false) : forward<2>(i, model, buffers, false);
            const float* found = reinterpret_cast<const float*>(value(output_));
            for (int64_t sample = 0; sample < samples_; ++sample)
                for (int64_t c = 0; c < classes; ++c)
                    result[(begin + sample) * classes + c] = found[c * V_ * LANES + sample];
        }
    }

  private:
    int in_chunk(int chunk) const { return int(std::min<int64_t>(V_ * LANES, samples_ - int64_t(chunk) * V_ * LANES)); }
    int64_t chunk_size(int number) const { return shapes_[number].size() * V_; }
    Vec* value(int number) { return value_[number].of(chunk_size(number) * chunks_); }
    Vec* slope(int number) { return slope_[number].of(chunk_size(number) * chunks_); }

    Window window(const Op& op) const {
        const Value &in = shapes_[op.input], &out = shapes_[op.output];
        return {in.channels,
                in.height + 2 * op.padding_h,
                in.width + 2 * op.padding_w,
                op.kernel_h,
                op.kernel_w,
                op.stride_h,
                op.stride_w,
                out.channels,
                out.height,
                out.width,
                op.padding_h,
                op.padding_h + in.height,
                op.padding_w,
                op.padding_w + in.width};
    }

    // 1 in lanes that hold a sample of the batch, 0 beyond.
    Vec lanes(int chunk, int v) const {
        Vec result;
        for (int lane = 0; lane < LANES; ++lane) result[lane] = v * LANES + lane < in_chunk(chunk);
        return result;
    }

    template <int V>
    void forward(size_t number, const float* model, float* buffers, bool training) {
        const Op& op = ops_[number];
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        Vec *in = value(op.input), *out = value(op.output);
        const int64_t in_size = chunk_size(op.input), out_size = chunk_size(op.output);
        if (op.kind == CONV) return convolve<V>(number, model);
        if (op.kind == BATCH_NORM) return batch_norm(number, model, buffers, training);
        for (int chunk = 0; chunk < chunks_; ++chunk, in += in_size, out += out_size) switch (op.kind) {
                case LINEAR:
                    connect<V>(model + op.weight, int(from.size()), int(to.size()),
                               op.bias < 0 ? nullptr : model + op.bias, in, out);
                    break;
                case RELU:
                    for (int64_t i = 0; i < in_size; ++i) out[i] = larger(in[i], Vec{});
                    break;
                case MAX_POOL:
                    max_pool(op, from, to, V, in, out);
                    break;
                case AVG_POOL:
                    avg_pool(op, from, to, V, in, out);
                    break;
                case GROUP_NORM:
                    group_norm(
                        op, from, V, model, in, out,
                        kept_[number].of(int64_t(op.groups) * 2 * V * chunks_) + int64_t(chunk) * op.groups * 2 * V);
                    break;
                case ADD: {
                    const Vec* other = value(op.other) + chunk * in_size;
                    for (int64_t i = 0; i < in_size; ++i) out[i] = in[i] + other[i];
                    break;
                }
            }
    }

    template <int V>
    void convolve(size_t number, const float* model) {
        const Op& op = ops_[number];
        const Window at = window(op);
        const Blocks blocks = best_blocks<V>(at);
        float* packed = floats(packed_, int64_t(at.out_channels + blocks.channels) * at.taps());
        pack(model + op.weight, at.out_channels, at.taps(), blocks.channels, packed);
        float* bias = biases(op.bias < 0 ? nullptr : model + op.bias, at.out_channels);
        const int64_t framed = int64_t(at.channels) * at.height * at.width * V;
        const Vec* in = framed_input<V>(number);
        for (int chunk = 0; chunk < chunks_; ++chunk)
            correlate_with<V>(blocks, at, in + chunk * framed, packed, bias,
                              value(op.output) + chunk * chunk_size(op.output), spare_);
    }

    // The input of a convolution with its padding; frames it where that has not been done in this pass.
    template <int V>
    const Vec* framed_input(size_t number, bool again = true) {
        const Op& op = ops_[number];
        if (op.padding_h == 0 && op.padding_w == 0) return value(op.input);
        const Window at = window(op);
        const int64_t framed = int64_t(at.channels) * at.height * at.width * V;
        Vec* result = kept_[number].of(framed * chunks_);
        for (int chunk = 0; again && chunk < chunks_; ++chunk)
            frame(value(op.input) + chunk * chunk_size(op.input), shapes_[op.input], V, op.padding_h, op.padding_w, 1,
                  1, at.height, at.width, result + chunk * framed);
        return result;
    }

    void batch_norm(size_t number, const float* model, float* buffers, bool training) {
        const Op& op = ops_[number];
        const Value& shape = shapes_[op.input];
        const int64_t area = int64_t(shape.height) * shape.width * V_, size = chunk_size(op.input);
        const double count = double(samples_) * shape.height * shape.width;
        const Vec* in = value(op.input);
        Vec* out = value(op.output);
        float* stats = reinterpret_cast<float*>(kept_[number].of((2 * shape.channels + LANES - 1) / LANES));
        for (int c = 0; c < shape.channels; ++c) {
            double mean = buffers[op.mean + c], var = buffers[op.var + c];
            if (training) {
                mean = sum_over(in + c * area, size, area, [](Vec x) { return x; }) / count;
                const float about = float(mean);
                var = sum_over(in + c * area, size, area, [=](Vec x) { return (x - about) * (x - about); }) / count;
                buffers[op.mean + c] += op.momentum * (float(mean) - buffers[op.mean + c]);
                buffers[op.var + c] += op.momentum * (float(var * count / (count - 1)) - buffers[op.var + c]);
            }
            stats[2 * c] = float(mean), stats[2 * c + 1] = float(1 / std::sqrt(var + op.eps));
            const float gamma = op.weight < 0 ? 1 : model[op.weight + c], beta = op.bias < 0 ? 0 : model[op.bias + c];
            for (int chunk = 0; chunk < chunks_; ++chunk)
                for (int64_t i = chunk * size + c * area; i < chunk * size + (c + 1) * area; ++i)
                    out[i] = (in[i] - stats[2 * c]) * (stats[2 * c + 1] * gamma) + beta;
        }
        if (training && op.tracked >= 0) buffers[op.tracked] += 1;
    }

    void batch_norm_back(size_t number, const float* model, const Vec* slopes, Vec* back, float* gradient) {
        const Op& op = ops_[number];
        const Value& shape = shapes_[op.input];
        const int64_t area = int64_t(shape.height) * shape.width * V_, size = chunk_size(op.input);
        const double count = double(samples_) * shape.height * shape.width;
        const Vec* in = value(op.input);
        const float* stats = reinterpret_cast<const float*>(kept_[number].get());
        for (int c = 0; c < shape.channels; ++c) {
            const float mean = stats[2 * c], root = stats[2 * c + 1], gamma = op.weight < 0 ? 1 : model[op.weight + c];
            const double plain = sum_over(slopes + c * area, size, area, [](Vec g) { return g; });
            double along = 0;
            for (int chunk = 0; chunk < chunks_; ++chunk) {
                Vec sum = {};
                for (int64_t i = chunk * size + c * area; i < chunk * size + (c + 1) * area; ++i)
                    sum += slopes[i] * (in[i] - mean) * root;
                along += total(sum);
            }
            if (op.weight >= 0) gradient[op.weight + c] = float(along);
            if (op.bias >= 0) gradient[op.bias + c] = float(plain);
            const float shift = float(plain / count), turn = float(along / count);
            for (int chunk = 0; chunk < chunks_; ++chunk)
                for (int64_t i = 0; i < area; ++i) {
                    const int64_t at = chunk * size + c * area + i;
                    back[at] = (slopes[at] - shift - (in[at] - mean) * root * turn) * (root * gamma) *
                               lanes(chunk, int(i % V_));
                }
        }
    }

    // Over all samples and pixels of a channel.
    template <class Each>
    double sum_over(const Vec* channel, int64_t size, int64_t area, Each each) const {
        double sum = 0;
        for (int chunk = 0; chunk < chunks_; ++chunk)
            for (int v = 0; v < V_; ++v) {
                Vec part = {};
                for (int64_t i = v; i < area; i += V_) part += each(channel[chunk * size + i]);
                sum += total(part * lanes(chunk, v));
            }
        return sum;
    }

    double cross_entropy(const int64_t* labels) {
        const int64_t classes = shapes_[output_].size();
        const int lanes = V_ * LANES;
        double loss = 0;
        has_slope_[output_] = true;
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            const float* score = reinterpret_cast<const float*>(value(output_) + chunk * chunk_size(output_));
            float* slope_of = reinterpret_cast<float*>(slope(output_) + chunk * chunk_size(output_));
            for (int b = 0; b < lanes; ++b) {
                if (b >= in_chunk(chunk)) {
                    for (int64_t c = 0; c < classes; ++c) slope_of[c * lanes + b] = 0;
                    continue;
                }
                const int64_t label = labels[int64_t(chunk) * lanes + b];
                float most = score[b], sum = 0;
                for (int64_t c = 1; c < classes; ++c) most = std::max(most, score[c * lanes + b]);
                for (int64_t c = 0; c < classes; ++c)
                    sum += slope_of[c * lanes + b] = std::exp(score[c * lanes + b] - most);
                for (int64_t c = 0; c < classes; ++c) slope_of[c * lanes + b] /= sum * samples_;
                slope_of[label * lanes + b] -= 1.0f / samples_;
                loss += std::log(sum) + most - score[label * lanes + b];
            }
        }
        return loss / samples_;
    }

    template <int V>
    void backward(size_t number, const float* model, float* gradient) {
        const Op& op = ops_[number];
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        const int64_t in_size = chunk_size(op.input), out_size = chunk_size(op.output);
        Vec *in = value(op.input), *out = value(op.output), *rise = slope(op.output);
        if (op.kind == RELU) {
            Vec* back = op.input == op.output ? rise : place_for(op.input);
            for (int64_t i = 0; i < in_size * chunks_; ++i) back[i] = out[i] > Vec{} ? rise[i] : Vec{};
            return op.input == op.output ? void() : settle(op.input, back);
        }
        if (op.kind == ADD) {
            for (int each : {op.input, op.other}) {
                Vec* back = place_for(each);
                std::copy_n(rise, in_size * chunks_, back);
                settle(each, back);
            }
            return;
        }
        if (op.kind == CONV)
            weigh<V>(window(op), framed_input<V>(number, false), framed_size(op), rise, out_size, chunks_,
                     gradient + op.weight);
        if (op.kind == LINEAR) connect_weights<V>(op, in, rise, gradient);
        if ((op.kind == CONV || op.kind == LINEAR) && op.bias >= 0) {
            const int64_t area = out_size / to.channels;
            for (int c = 0; c < to.channels; ++c) {
                Vec sum = {};
                for (int chunk = 0; chunk < chunks_; ++chunk)
                    for (int64_t i = 0; i < area; ++i) sum += rise[chunk * out_size + c * area + i];
                gradient[op.bias + c] = total(sum);
            }
        }
        if (op.input == input_ && (op.kind == CONV || op.kind == LINEAR)) return;  // nothing lies before it
        Vec* back = place_for(op.input);
        if (op.kind == BATCH_NORM) batch_norm_back(number, model, rise, back, gradient);
        if (op.kind == CONV) convolve_back<V>(op, model, rise, back);
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            const Vec *each_in = in + chunk * in_size, *each_rise = rise + chunk * out_size;
            Vec* each_back = back + chunk * in_size;
            switch (op.kind) {
                case LINEAR:
                    connect_back<V>(model + op.weight, int(from.size()), int(to.size()), each_rise, each_back);
                    break;
                case MAX_POOL:
                    max_pool_back(op, from, to, V, each_in, out + chunk * out_size, each_rise, each_back);
                    break;
                case AVG_POOL:
                    avg_pool_back(op, from, to, V, each_rise, each_back);
                    break;
                case GROUP_NORM:
                    group_norm_back(op, from, V, model, each_in,
                                    kept_[number].get() + int64_t(chunk) * op.groups * 2 * V, each_rise, each_back,
                                    gradient);
                    break;
            }
        }
        settle(op.input, back);
    }

    template <int V>
    void connect_weights(const Op& op, const Vec* in, const Vec* rise, float* gradient) {
        const int64_t inputs = shapes_[op.input].size(), row = (inputs + LANES - 1) / LANES;
        Vec* sideways = scratch_.of(row * V * LANES * chunks_);
        for (int chunk = 0; chunk < chunks_; ++chunk)
            to_outermost(in + chunk * inputs * V, inputs, V, row * LANES,
                         reinterpret_cast<float*>(sideways + chunk * row * V * LANES));
        outer(rise, chunk_size(op.output), sideways, int(inputs), int(shapes_[op.output].size()), V, chunks_,
              gradient + op.weight);
    }

    template <int V>
    void convolve_back(const Op& op, const float* model, const Vec* rise, Vec* back) {
        const Value &from = shapes_[op.input], &to = shapes_[op.output];
        const int top = op.kernel_h - 1 - op.padding_h, left = op.kernel_w - 1 - op.padding_w;
        const Window at{to.channels,
                        from.height + op.kernel_h - 1,
                        from.width + op.kernel_w - 1,
                        op.kernel_h,
                        op.kernel_w,
                        1,
                        1,
                        from.channels,
                        from.height,
                        from.width,
                        top,
                        top + (to.height - 1) * op.stride_h + 1,
                        left,
                        left + (to.width - 1) * op.stride_w + 1};
        const Blocks blocks = best_blocks<V>(at);
        float* turned = floats(turned_, int64_t(from.channels) * at.taps());
        float* packed = floats(packed_, int64_t(from.channels + blocks.channels) * at.taps());
        turn(model + op.weight, to.channels, from.channels, op.kernel_h * op.kernel_w, turned);
        pack(turned, from.channels, at.taps(), blocks.channels, packed);
        float* none = biases(nullptr, from.channels);
        Vec* framed = scratch_.of(int64_t(at.channels) * at.height * at.width * V);
        for (int chunk = 0; chunk < chunks_; ++chunk) {
            frame(rise + chunk * chunk_size(op.output), to, V, top, left, op.stride_h, op.stride_w, at.height, at.width,
                  framed);
            correlate_with<V>(blocks, at, framed, packed, none, back + chunk * chunk_size(op.input), spare_);
        }
    }

    int64_t framed_size(const Op& op) const {
        const Window at = window(op);
        return int64_t(at.channels) * at.height * at.width * V_;
    }

    // Where an operation writes the slope of its input: a value that several use sums theirs.
    Vec* place_for(int number) { return has_slope_[number] ? sum_.of(chunk_size(number) * chunks_) : slope(number); }

    void settle(int number, const Vec* found) {
        Vec* whole = slope(number);
        if (has_slope_[number])
            for (int64_t i = 0; i < chunk_size(number) * chunks_; ++i) whole[i] += found[i];
        has_slope_[number] = true;
    }

    static float* floats(Memory& memory, int64_t size) {
        return reinterpret_cast<float*>(memory.of((size + LANES - 1) / LANES));
    }

    float* biases(const float* given, int count) {  // with zeros for the channels that fill up the last block
        float* result = floats(bias_, count + 32);
        std::fill_n(result, count + 32, 0.0f);
        if (given) std::copy_n(given, count, result);
        return result;
    }

    std::vector<Op> ops_;
    std::vector<Value> shapes_;
    int input_, output_;
    std::vector<Memory> value_, slope_, kept_;
    std::vector<char> has_slope_;
    Memory packed_, turned_, bias_, scratch_, sum_;
    Vec spare_[48];
    int64_t samples_ = 1;
    int V_ = 1, chunks_ = 1;
};

// weight/2 |w - target|^2, whose slope is added.
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

}  // namespace

extern "C" {

void* lcfl_open(const Op* ops, int32_t num_ops, const Value* values, int32_t num_values, int32_t input,
                int32_t output) {
    return new Program(ops, num_ops, values, num_values, input, output);
}

void lcfl_close(void* program) { delete static_cast<Program*>(program); }

double lcfl_gradient(void* program, const float* model, float* buffers, const float* inputs, const int64_t* labels,
                     int64_t samples, float* gradient, int64_t num_parameters) {
    return static_cast<Program*>(program)->gradient(model, buffers, inputs, labels, samples, gradient, num_parameters);
}

void lcfl_scores(void* program, const float* model, float* buffers, const float* inputs, int64_t samples,
                 float* scores) {
    static_cast<Program*>(program)->scores(model, buffers, inputs, samples, scores);
}

// One step of torch.optim.SGD on loss + mu/2 |w - Omega|^2 + lambda/2 |phi - Phi|^2; returns the two pulls' part.
// Omega, Phi and the velocity may be null.
double lcfl_update(const Sgd* sgd, float* model, const float* gradient, float* velocity, const float* centre,
                   const float* embedding) {
    constexpr int64_t BLOCK = 1024;  // what is read several times stays in the nearest cache
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
        if (velocity) {
            float* v = velocity + begin;
            for (int64_t i = 0; i < size; ++i) {
                v[i] = sgd->first ? slope[i] : sgd->momentum * v[i] + (1 - sgd->dampening) * slope[i];
                slope[i] = sgd->nesterov ? slope[i] + sgd->momentum * v[i] : v[i];
            }
        }
        for (int64_t i = 0; i < size; ++i) w[i] -= sgd->rate * slope[i];
    }
    return penalty;
}
}
