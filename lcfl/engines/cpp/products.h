// Products of matrices whose columns are vectors, as large as the second-level cache and larger.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace lcfl {

struct Factor {  // a matrix [rows][depth] of single numbers, in blocks of Product::HEIGHT rows
    const float* first;
    int64_t row_step, depth_step, block_step;
    Factor moved(int64_t step) const { return {first + step, row_step, depth_step, block_step}; }
};

struct Columns {  // a matrix [rows][vectors]
    Vec* first;
    int64_t row_step;
    int vectors;
    Columns from(int row) const { return {first + row * row_step, row_step, vectors}; }
};

class Product {
  public:
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
                multiply<WIDTH>(left.moved(begin * left.depth_step), rows, end - begin, more,
                                {out.first + column, out.row_step, width});
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
            multiply_rows<HEIGHT, VB>(left.moved(first / HEIGHT * left.block_step), std::min(HEIGHT, rows - first),
                                      depth, more, out.from(first));
    }

    // Up to RB rows: a block, or halves, quarters and so on of a block.
    template <int RB, int VB>
    void multiply_rows(const Factor& left, int rows, int depth, bool more, const Columns& out) const {
        const int now = rows < RB ? 0 : RB;
        if (now > 0) multiply_block<RB, VB>(left, depth, panel_, more, out);
        if constexpr (RB > 1)
            if (now < rows)
                multiply_rows<RB / 2, VB>(left.moved(now * left.row_step), rows - now, depth, more, out.from(now));
    }

    // A block of RB x VB vectors. The addresses are sums of a few steps: pointers to rows would not stay in registers.
    // Nor would the sums, before and after the loop, if it might not run or if they began in one of two ways.
    template <int RB, int VB>
    static __attribute__((noinline)) void multiply_block(const Factor& left, int depth, const Vec* panel, bool more,
                                                         const Columns& out) {
        static constexpr Vec zeros[VB] = {};
        const Vec* begin = more ? out.first : zeros;
        const int64_t begin_step = more ? out.row_step : 0, row = left.row_step, step = left.depth_step;
        Vec sum[RB][VB];
        for (int r = 0; r < RB; ++r)
            for (int v = 0; v < VB; ++v) sum[r][v] = held(begin[r * begin_step + v]);
        const float* from = left.first;
        do {
            add_products(sum, [=](int r) { return fill(from[r * row]); }, [=](int v) { return panel[v]; });
            from += step, panel += VB;
        } while (--depth > 0);
        Vec* to = out.first;
        for (int r = 0; r < RB; ++r)
            for (int v = 0; v < VB; ++v) to[r * out.row_step + v] = held(sum[r][v]);
    }

    Vec panel_[DEPTH * WIDTH];
};

}  // namespace lcfl
