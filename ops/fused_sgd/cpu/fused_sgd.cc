// One step of plain gradient descent on fp32 master weights; see ops/README.md.

#include <cstring>

#include "elementwise.h"
#include "threads.h"

namespace msz {
namespace {

enum Scalar { kKeep = 0, kRate = 1, kFoundInf = 9 };

constexpr int64_t kGrain = 16384;

struct Arrays {
  float *param;
  const void *grad;
  void *low_precision;
};

Floats read(int dtype, const void *base, int64_t i) {
  if (dtype == kFp32) return Storage<kFp32>::read(at(static_cast<const float *>(base), i));
  const uint16_t *from = at(static_cast<const uint16_t *>(base), i);
  return dtype == kFp16 ? Storage<kFp16>::read(from) : Storage<kBf16>::read(from);
}

void write(int dtype, void *base, int64_t i, Floats value) {
  uint16_t *to = at(static_cast<uint16_t *>(base), i);
  if (dtype == kFp16) {
    Storage<kFp16>::write(to, value);
  } else {
    Storage<kBf16>::write(to, value);
  }
}

void update_vector(const Arrays &a, int64_t i, int grad_dtype, int low_dtype, const float *scalars) {
  const Floats decayed = load(at(a.param, i)) * spread(scalars[kKeep]);
  const Floats p = decayed - read(grad_dtype, a.grad, i) * spread(scalars[kRate]);
  store(at(a.param, i), p);
  if (a.low_precision != nullptr) write(low_dtype, a.low_precision, i, p);
}

// The last elements, fewer than a vector, in buffers padded with zeros.
void update_tail(const Arrays &a, int64_t begin, int64_t count, int grad_dtype, int low_dtype,
                 const float *scalars) {
  float p[kWidth] = {}, g[kWidth] = {};
  uint16_t low[kWidth] = {};
  const size_t grad_size = grad_dtype == kFp32 ? sizeof(float) : sizeof(uint16_t);
  std::memcpy(p, at(a.param, begin), count * sizeof p[0]);
  std::memcpy(g, static_cast<const char *>(a.grad) + begin * grad_size, count * grad_size);
  update_vector({p, g, a.low_precision == nullptr ? nullptr : low}, 0, grad_dtype, low_dtype, scalars);
  std::memcpy(at(a.param, begin), p, count * sizeof p[0]);
  if (a.low_precision != nullptr) {
    std::memcpy(at(static_cast<uint16_t *>(a.low_precision), begin), low, count * sizeof low[0]);
  }
}

bool is_float(int dtype) { return dtype == kFp32 || dtype == kFp16 || dtype == kBf16; }

}  // namespace
}  // namespace msz

MSZ_API int msz_sgd(float *param, const void *grad, int grad_dtype, void *low_precision, int low_dtype, int64_t n,
                    const float *scalars, int threads) {
  using namespace msz;
  if (!is_float(grad_dtype)) return kBadDtype;
  if (low_precision != nullptr && (!is_float(low_dtype) || low_dtype == kFp32)) return kBadDtype;
  if (n < 0) return kBadLength;
  if (scalars == nullptr) return kNullPointer;
  if (n == 0 || scalars[kFoundInf] != 0.0f) return kDone;
  if (param == nullptr || grad == nullptr) return kNullPointer;
  const Arrays arrays{param, grad, low_precision};
  parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) update_vector(arrays, i, grad_dtype, low_dtype, scalars);
    if (i < end) update_tail(arrays, i, end - i, grad_dtype, low_dtype, scalars);
  });
  return kDone;
}
