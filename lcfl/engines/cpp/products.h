// Products of matrices whose columns are vectors, as large as the second-level cache and larger.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace lcfl {

struct Factor {  // a matrix [rows][depth] of single numbers
    const float* first;
    int64_t row_step, depth_step;
};

struct Columns {  // a matrix [rows][vectors]
    Vec* first;
    int64_t row_step;
    int vectors;
};

class Product {
  public:
    // Rows of a block. Up to HEIGHT - 1 more are read beyond the last row of `left`, and are not used.
    static constexpr int HEIGHT = SUMS / 3;

    // out[r] = sum over d of left[r][d] right[d]. With `more`, the sum is added to `out`. Copies a few columns of
    // `right` at a time, and as many of their rows as stay in the first-level cache, and goes through all rows of
    // `left`.
    void operator()(const Factor& left, int rows, int depth, const Columns& right, bool more, const Columns& out) {
        for (int begin = 0, end; begin < depth; begin = end, more = true) {
            end = begin + next_part(depth - begin, DEPTH);
            for (int column = 0, width; column < right.vectors; column += width) {
                width = next_part(right.vectors - column, WIDTH);
                for (int d = begin; d < end; ++d)
                    for (int v = 0; v < width; ++v)
                        panel_[(d - begin) * width + v] = right.first[d * right.row_step + column + v];
                const Factor from{left.first + begin * left.depth_step, left.row_step, left.depth_step};
                multiply<WIDTH>(from, rows, end - begin, more, {out.first + column, out.row_step, width});
            }
        }
    }

  private:
    static constexpr int WIDTH = 3, DEPTH = 24 * 1024 / (sizeof(Vec) * WIDTH);  // of a panel

    // Returns the first of equal parts that have at most `most` elements.
    static int next_part(int size, int most) {
        const int parts = (size + most - 1) / most;
        return (size + parts - 1) / parts;
    }

    template <int VB>
    void multiply(const Factor& left, int rows, int depth, bool more, const Columns& out) const {
        if constexpr (VB > 1)
            if (out.vectors < VB) return multiply<VB - 1>(left, rows, depth, more, out);
        for (int first = 0; first < rows; first += HEIGHT)
            multiply_block<HEIGHT, VB>(left.first + first * left.row_step, left.row_step, left.depth_step, depth,
                                       panel_, more, out.first + first * out.row_step, out.row_step,
                                       std::min(HEIGHT, rows - first));
    }

    // A block of RB x VB vectors. The addresses are sums of a few steps: pointers to rows would not stay in registers.
    template <int RB, int VB>
    static __attribute__((noinline)) void multiply_block(const float* left, int64_t row, int64_t step, int depth,
                                                         const Vec* panel, bool more, Vec* out, int64_t out_row,
                                                         int rows) {
        Vec sum[RB][VB] = {};
        if (more)
            for (int r = 0; r < RB; ++r)
                for (int v = 0; v < VB && r < rows; ++v) sum[r][v] = held(out[r * out_row + v]);
        for (int d = 0; d < depth; ++d, left += step, panel += VB)
            add_products(sum, [=](int r) { return fill(left[r * row]); }, [=](int v) { return panel[v]; });
        for (int r = 0; r < RB; ++r)
            for (int v = 0; v < VB && r < rows; ++v) out[r * out_row + v] = held(sum[r][v]);
    }

    Vec panel_[DEPTH * WIDTH];
};

}  // namespace lcfl
