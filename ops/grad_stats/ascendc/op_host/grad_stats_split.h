// Tiling of GradStats as a pure function.
#ifndef MS_ZERO_GRAD_STATS_SPLIT_H
#define MS_ZERO_GRAD_STATS_SPLIT_H
#include "../op_kernel/grad_stats_tiling.h"
#include "vector_split.h"

namespace ms_zero {
// Whole tiles a core: the tiles, and with them the sums of tiles, do not depend on the number of cores.
inline GradStatsTiling computeGradStatsTiling(uint64_t length, uint32_t cores) {
    CoreSplit split = splitAmongCores(length, std::min(cores, kGradStatsRows), kGradStatsTile);
    return {length, split.perCore, split.cores, 0};
}
}  // namespace ms_zero
#endif
