// What the host tells the kernel. Plain data: the host fills it, the kernel copies it.
#ifndef MS_ZERO_FUSED_ADAM_W_TILING_H
#define MS_ZERO_FUSED_ADAM_W_TILING_H
#include <cstdint>

struct FusedAdamWTiling {
    uint64_t length;   // elements in all
    uint64_t perCore;  // elements of every core but the last
    uint32_t tile;     // elements in the unified buffer at once
    uint32_t cores;    // cores that have work, at least 1
};
#endif
