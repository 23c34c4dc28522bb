// What every C entry point shares: visibility, dtype codes, return codes.
#pragma once

#include <cstdint>

#define MSZ_API extern "C" __attribute__((visibility("default")))

namespace msz {

enum Dtype : int { kFp32 = 0, kFp16 = 1, kBf16 = 2 };

enum Status : int { kDone = 0, kBadDtype = -1, kBadLength = -2, kNullPointer = -3 };

}  // namespace msz
