// How a flat array is shared out among vector cores. Pure functions: no CANN, tested on the host.
#ifndef MS_ZERO_VECTOR_SPLIT_H
#define MS_ZERO_VECTOR_SPLIT_H
#include <algorithm>
#include <cstdint>

namespace ms_zero {
// What a kernel may use of the 192 KiB unified buffer: 256 bytes belong to the framework, 8 KiB to the compiler.
constexpr uint64_t kUsableUbBytes = 192 * 1024 - 256 - 8 * 1024;
// Memory is read at full speed from 512-byte borders: 256 elements of the narrowest dtype.
constexpr uint64_t kAlignedItems = 256;

constexpr uint64_t ceilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }
constexpr uint64_t roundUp(uint64_t a, uint64_t b) { return ceilDiv(a, b) * b; }

struct CoreSplit {
    uint64_t perCore;  // elements of every core but the last, a multiple of `unit`
    uint32_t cores;    // cores that have work; 1 when there is none
};

// Even shares in multiples of `unit` elements, on as few cores as these shares need.
inline CoreSplit splitAmongCores(uint64_t length, uint32_t cores, uint64_t unit) {
    uint64_t perCore = std::max(roundUp(ceilDiv(length, std::max(cores, 1u)), unit), unit);
    return {perCore, static_cast<uint32_t>(std::max<uint64_t>(ceilDiv(length, perCore), 1))};
}
}  // namespace ms_zero
#endif
