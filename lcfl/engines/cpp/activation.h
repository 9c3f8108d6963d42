// Functions of single numbers, and their derivatives from their results, or from their inputs (ELU, GELU, SiLU and
// those that begin with "hard"). The derivative of AFFINE is a constant.

#pragma once

#include <cstdint>

#include "program.h"
#include "vectors.h"

namespace lcfl {

// e^x to the last bits: 2^n e^r with |r| <= ln 2 / 2, and a polynomial for e^r. It is 0 below -88 and infinite above
// 89, and NaN for NaN.
inline Vec exponential(Vec x) {
    const Vec low = fill(-88), high = fill(89), to_integers = fill(12582912);  // 1.5 x 2^23, beyond which are integers
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec n = x * 1.44269504f + to_integers - to_integers;
    const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;  // ln 2 in two parts
    Vec sum = fill(1.9875691500e-4f);
    for (float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        sum = sum * r + factor;
    const Mask power = (__builtin_convertvector(n, Mask) + 127) << 23;
    return (sum * r * r + r + 1) * (Vec)power;
}

inline Vec between(Vec x, float least, float most) {  // keeps NaN
    x = least > x ? fill(least) : x;
    return x > most ? fill(most) : x;
}

inline Vec sigmoid(Vec x) { return 1 / (1 + exponential(-x)); }

inline Vec tangent(Vec x) {  // hyperbolic; near 0 by a polynomial, because a difference would lose digits there
    const Vec square = x * x, far = 1 - 2 / (exponential(2 * x) + 1);
    Vec sum = fill(-5.70498872745e-3f);
    for (float factor : {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f})
        sum = sum * square + factor;
    return square < 0.390625f ? sum * square * x + x : far;
}

struct Normal {  // the standard normal distribution: P(X < x), to 1.5e-7, and its density (Abramowitz, Stegun, 7.1.26)
    Vec below, density;
    explicit Normal(Vec x) {
        const Vec size = x < 0 ? -x : x, falling = exponential(-0.5f * x * x), t = 1 / (1 + 0.2316418882f * size);
        Vec sum = fill(1.061405429f);
        for (float factor : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f}) sum = sum * t + factor;
        const Vec beyond = 0.5f * sum * t * falling;  // P(X > |x|)
        below = x < 0 ? beyond : 1 - beyond;
        density = 0.3989422804f * falling;
    }
};

inline bool is_activation(int32_t kind) { return kind >= RELU; }

inline void activate(const Op& op, int64_t size, const Vec* in, Vec* out) {
    switch (op.kind) {
        case RELU:
            for (int64_t i = 0; i < size; ++i) out[i] = Vec{} > in[i] ? Vec{} : in[i];  // keeps NaN
            break;
        case RELU6:
            for (int64_t i = 0; i < size; ++i) out[i] = between(in[i], 0, 6);
            break;
        case LEAKY_RELU:
            for (int64_t i = 0; i < size; ++i) out[i] = Vec{} > in[i] ? op.eps * in[i] : in[i];
            break;
        case ELU:
            for (int64_t i = 0; i < size; ++i) {
                const Vec half = tangent(0.5f * in[i]);  // e^x - 1 = 2 t / (1 - t) loses no digits near 0
                out[i] = Vec{} > in[i] ? op.eps * 2 * half / (1 - half) : in[i];
            }
            break;
        case TANH:
            for (int64_t i = 0; i < size; ++i) out[i] = tangent(in[i]);
            break;
        case SIGMOID:
            for (int64_t i = 0; i < size; ++i) out[i] = sigmoid(in[i]);
            break;
        case HARDSIGMOID:
            for (int64_t i = 0; i < size; ++i) out[i] = between(in[i] / 6 + 0.5f, 0, 1);
            break;
        case HARDSWISH:
            for (int64_t i = 0; i < size; ++i) out[i] = in[i] * between(in[i] + 3, 0, 6) / 6;
            break;
        case GELU:
            for (int64_t i = 0; i < size; ++i) out[i] = in[i] * Normal(in[i]).below;
            break;
        case SILU:
            for (int64_t i = 0; i < size; ++i) out[i] = in[i] * sigmoid(in[i]);
            break;
        case AFFINE:
            for (int64_t i = 0; i < size; ++i) out[i] = op.eps * in[i] + op.momentum;
            break;
    }
}

inline void activate_back(const Op& op, int64_t size, const Vec* in, const Vec* out, const Vec* rise, Vec* back) {
    switch (op.kind) {
        case RELU:
            for (int64_t i = 0; i < size; ++i) back[i] = Vec{} >= out[i] ? Vec{} : rise[i];
            break;
        case RELU6:
            for (int64_t i = 0; i < size; ++i) back[i] = ((Vec{} >= out[i]) | (out[i] >= 6)) ? Vec{} : rise[i];
            break;
        case ELU:
            for (int64_t i = 0; i < size; ++i)
                back[i] = Vec{} >= in[i] ? rise[i] * op.eps * exponential(in[i]) : rise[i];
            break;
        case LEAKY_RELU:
            for (int64_t i = 0; i < size; ++i) back[i] = Vec{} >= out[i] ? op.eps * rise[i] : rise[i];
            break;
        case TANH:
            for (int64_t i = 0; i < size; ++i) back[i] = rise[i] * (1 - out[i] * out[i]);
            break;
        case SIGMOID:
            for (int64_t i = 0; i < size; ++i) back[i] = rise[i] * out[i] * (1 - out[i]);
            break;
        case HARDSIGMOID:
            for (int64_t i = 0; i < size; ++i) back[i] = ((in[i] > -3) & (in[i] < 3)) ? rise[i] / 6 : Vec{};
            break;
        case HARDSWISH:
            for (int64_t i = 0; i < size; ++i) {
                const Vec middle = in[i] >= 3 ? rise[i] : rise[i] * (in[i] / 3 + 0.5f);
                back[i] = in[i] <= -3 ? Vec{} : middle;
            }
            break;
        case GELU:
            for (int64_t i = 0; i < size; ++i) {
                const Normal normal(in[i]);
                back[i] = rise[i] * (normal.below + in[i] * normal.density);
            }
            break;
        case SILU:
            for (int64_t i = 0; i < size; ++i) {
                const Vec share = sigmoid(in[i]);
                back[i] = rise[i] * share * (1 + in[i] * (1 - share));
            }
            break;
        case AFFINE:
            for (int64_t i = 0; i < size; ++i) back[i] = op.eps * rise[i];
            break;
    }
}

}  // namespace lcfl
