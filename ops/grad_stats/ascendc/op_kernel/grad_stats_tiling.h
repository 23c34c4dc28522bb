// What the host tells the kernel. Plain data: the host fills it, the kernel copies it.
#ifndef MS_ZERO_GRAD_STATS_TILING_H
#define MS_ZERO_GRAD_STATS_TILING_H
#include <cstdint>

// Elements in the unified buffer at once. Part of the numbers, not only of the speed: it fixes the tree of additions.
constexpr uint32_t kGradStatsTile = 8192;
// Rows of the output `partials`, for any number of cores up to this one; rows without a core are zero.
constexpr uint32_t kGradStatsRows = 64;
// Floats of a row: 32 bytes, so that no two cores write to the same block of memory. The first one counts.
constexpr uint32_t kGradStatsRowItems = 8;

struct GradStatsTiling {
    uint64_t length;   // elements in all
    uint64_t perCore;  // elements of every core but the last, whole tiles
    uint32_t cores;    // cores that run, at least 1
    uint32_t reserved;
};
#endif
