// Channels in another order.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace lcfl {

// Takes the channels of each group in turn: the first of each group, the second of each group, and so on.
// A channel has `area` vectors.
inline void shuffle(int channels, int groups, int64_t area, const Vec* in, Vec* out) {
    const int of_group = channels / groups;
    for (int c = 0; c < of_group; ++c)
        for (int group = 0; group < groups; ++group, out += area)
            std::copy_n(in + (int64_t(group) * of_group + c) * area, area, out);
}

}  // namespace lcfl
