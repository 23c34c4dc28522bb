// Tiling of FusedAdamW as a pure function.
#ifndef MS_ZERO_FUSED_ADAM_W_SPLIT_H
#define MS_ZERO_FUSED_ADAM_W_SPLIT_H
#include "../op_kernel/fused_adam_w_tiling.h"
#include "vector_split.h"

namespace ms_zero {
// Unified buffer for one element of a tile: parameter, both moments and gradient twice (one transferred, one
// computed on), the low-precision copy, one fp32 scratch, and another where the gradient has to be widened.
constexpr uint64_t adamWBytesPerItem(uint32_t gradBytes, uint32_t lowBytes) {
    return 2 * (3 * 4 + gradBytes) + lowBytes + 4 + (gradBytes == 4 ? 0 : 4);
}
constexpr uint64_t kAdamWScalarBytes = 96;

// lowBytes is 0 without a low-precision copy. ubBytes has to hold at least one aligned tile.
inline FusedAdamWTiling computeFusedAdamWTiling(uint64_t length, uint32_t cores, uint64_t ubBytes, uint32_t gradBytes,
                                                uint32_t lowBytes) {
    uint64_t fits = (ubBytes - kAdamWScalarBytes) / adamWBytesPerItem(gradBytes, lowBytes);
    CoreSplit split = splitAmongCores(length, cores, kAlignedItems);
    return {length, split.perCore, static_cast<uint32_t>(fits / kAlignedItems * kAlignedItems), split.cores};
}
}  // namespace ms_zero
#endif
