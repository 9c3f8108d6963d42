// Numbers in another order.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace lcfl {

// Takes the parts of all groups in turn: the first of each group, the second of each group, and so on. A part has
// `size` vectors.
inline void shuffle(int64_t groups, int64_t parts, int64_t size, const Vec* in, Vec* out) {
    for (int64_t part = 0; part < parts; ++part)
        for (int64_t group = 0; group < groups; ++group, out += size)
            std::copy_n(in + (group * parts + part) * size, size, out);
}

}  // namespace lcfl
