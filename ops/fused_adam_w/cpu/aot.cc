// The update and the statistics as MindSpore's `aot` custom operators, for graph mode.
//
// MindSpore passes inputs, then outputs, each with shape and dtype name. Updated inputs are written in place; the
// operator is marked as having that side effect where it is made. Anything but 0 is an error to MindSpore.

#include <cstdint>
#include <cstring>

#include "abi.h"

MSZ_API int msz_adamw(float *, float *, float *, const void *, int, void *, int, int64_t, const float *, int);
MSZ_API int msz_sum_of_squares(const void *, int, int64_t, float *, int);

namespace {

constexpr int kBadArguments = 1;

int code(const char *name) {
  if (std::strcmp(name, "float32") == 0) return msz::kFp32;
  if (std::strcmp(name, "float16") == 0) return msz::kFp16;
  if (std::strcmp(name, "bfloat16") == 0) return msz::kBf16;
  return -1;
}

int64_t elements(int dims, const int64_t *shape) {
  int64_t n = 1;
  for (int i = 0; i < dims; ++i) n *= shape[i];
  return n;
}

}  // namespace

// param, exp_avg, exp_avg_sq, grad, scalars[, low_precision] -> token fp32 [1]: 1 after an update, 0 if it was skipped.
MSZ_API int FusedAdamWAot(int count, void **params, int *dims, int64_t **shapes, const char **dtypes, void *,
                          void *) {
  if (count != 6 && count != 7) return kBadArguments;
  const bool has_low = count == 7;
  const int64_t n = elements(dims[0], shapes[0]);
  for (int i = 0; i < 4; ++i) {
    if (elements(dims[i], shapes[i]) != n || (i < 3 && code(dtypes[i]) != msz::kFp32)) return kBadArguments;
  }
  if (elements(dims[4], shapes[4]) != 16 || code(dtypes[4]) != msz::kFp32) return kBadArguments;
  if (has_low && elements(dims[5], shapes[5]) != n) return kBadArguments;
  const float *scalars = static_cast<const float *>(params[4]);
  *static_cast<float *>(params[count - 1]) = scalars[9] == 0.0f ? 1.0f : 0.0f;
  return msz_adamw(static_cast<float *>(params[0]), static_cast<float *>(params[1]),
                   static_cast<float *>(params[2]), params[3], code(dtypes[3]), has_low ? params[5] : nullptr,
                   has_low ? code(dtypes[5]) : 0, n, scalars, 0);
}

// x -> the sum of squares, fp32 [1].
MSZ_API int SumOfSquaresAot(int count, void **params, int *dims, int64_t **shapes, const char **dtypes, void *,
                            void *) {
  if (count != 2) return kBadArguments;
  const int64_t n = elements(dims[0], shapes[0]);
  return msz_sum_of_squares(params[0], code(dtypes[0]), n, static_cast<float *>(params[1]), 0);
}
