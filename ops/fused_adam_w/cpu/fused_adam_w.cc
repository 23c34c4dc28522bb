// One AdamW step on fp32 master weights; ops/README.md states the arithmetic operation by operation.

#include <cstring>

#include "elementwise.h"
#include "threads.h"

namespace msz {
namespace {

// Positions in the scalar tensor.
enum Scalar {
  kKeep,
  kBeta1,
  kOneMinusBeta1,
  kBeta2,
  kOneMinusBeta2,
  kInverseRoot,
  kEps,
  kStepSize,
  kGradScale,
  kFoundInf,
};

constexpr int64_t kGrain = 16384;  // elements below which another thread does not pay

struct Coefficients {
  explicit Coefficients(const float *s)
      : keep(spread(s[kKeep])), beta1(spread(s[kBeta1])), one_minus_beta1(spread(s[kOneMinusBeta1])),
        beta2(spread(s[kBeta2])), one_minus_beta2(spread(s[kOneMinusBeta2])),
        inverse_root(spread(s[kInverseRoot])), eps(spread(s[kEps])), step_size(spread(s[kStepSize])),
        grad_scale(spread(s[kGradScale])) {}

  Floats keep, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, grad_scale;
};

MSZ_INLINE void update(Floats &p, Floats &m, Floats &v, Floats g, const Coefficients &c) {
  g = g * c.grad_scale;
  m = m * c.beta1 + g * c.one_minus_beta1;
  v = v * c.beta2 + g * g * c.one_minus_beta2;
  const Floats u = m / (root(v) * c.inverse_root + c.eps);
  p = p * c.keep - u * c.step_size;
}

struct Arrays {
  float *param, *exp_avg, *exp_avg_sq;
  const void *grad;
  void *low_precision;
};

struct NoOutput {};

template <class Low>
struct Output {
  typedef typename Low::Element Element;
  static constexpr bool exists = true;
  MSZ_INLINE void write(void *base, int64_t i, Floats value) { Low::write(at(static_cast<Element *>(base), i), value); }
};

template <>
struct Output<NoOutput> {
  typedef uint16_t Element;
  static constexpr bool exists = false;
  MSZ_INLINE void write(void *, int64_t, Floats) {}
};

// Loads of all arrays come before the first store: more of them are under way at a time.
template <class Grad, class Low, int count>
MSZ_INLINE void update_vectors(const Arrays &a, int64_t begin, const Coefficients &c) {
  const auto *grad = static_cast<const typename Grad::Element *>(a.grad);
  Floats p[count], m[count], v[count], g[count];
  for (int k = 0; k < count; ++k) g[k] = Grad::read(at(grad, begin + k * kWidth));
  for (int k = 0; k < count; ++k) m[k] = load(at(a.exp_avg, begin + k * kWidth));
  for (int k = 0; k < count; ++k) v[k] = load(at(a.exp_avg_sq, begin + k * kWidth));
  for (int k = 0; k < count; ++k) p[k] = load(at(a.param, begin + k * kWidth));
  for (int k = 0; k < count; ++k) update(p[k], m[k], v[k], g[k], c);
  for (int k = 0; k < count; ++k) store(at(a.exp_avg, begin + k * kWidth), m[k]);
  for (int k = 0; k < count; ++k) store(at(a.exp_avg_sq, begin + k * kWidth), v[k]);
  for (int k = 0; k < count; ++k) store(at(a.param, begin + k * kWidth), p[k]);
  for (int k = 0; k < count; ++k) Output<Low>::write(a.low_precision, begin + k * kWidth, p[k]);
}

// The last elements, fewer than a vector, in buffers padded with zeros.
template <class Grad, class Low>
void update_tail(const Arrays &a, int64_t begin, int64_t count, const Coefficients &c) {
  float p[kWidth] = {}, m[kWidth] = {}, v[kWidth] = {};
  typename Grad::Element g[kWidth] = {};
  typename Output<Low>::Element low[kWidth] = {};
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  std::memcpy(p, at(a.param, begin), bytes);
  std::memcpy(m, at(a.exp_avg, begin), bytes);
  std::memcpy(v, at(a.exp_avg_sq, begin), bytes);
  std::memcpy(g, at(static_cast<const typename Grad::Element *>(a.grad), begin), count * sizeof g[0]);
  update_vectors<Grad, Low, 1>({p, m, v, g, low}, 0, c);
  std::memcpy(at(a.exp_avg, begin), m, bytes);
  std::memcpy(at(a.exp_avg_sq, begin), v, bytes);
  std::memcpy(at(a.param, begin), p, bytes);
  if (Output<Low>::exists) {
    typedef typename Output<Low>::Element Element;
    std::memcpy(at(static_cast<Element *>(a.low_precision), begin), low, count * sizeof low[0]);
  }
}

template <class Grad, class Low>
void update_range(const Arrays &a, int64_t begin, int64_t end, const Coefficients &c) {
  constexpr int kUnroll = 4;
  int64_t i = begin;
  for (; i + kUnroll * kWidth <= end; i += kUnroll * kWidth) update_vectors<Grad, Low, kUnroll>(a, i, c);
  for (; i + kWidth <= end; i += kWidth) update_vectors<Grad, Low, 1>(a, i, c);
  if (i < end) update_tail<Grad, Low>(a, i, end - i, c);
}

typedef void (*Update)(const Arrays &, int64_t, int64_t, const Coefficients &);

template <class Grad>
Update choose_low(bool wanted, int low_dtype) {
  if (!wanted) return update_range<Grad, NoOutput>;
  if (low_dtype == kFp16) return update_range<Grad, Storage<kFp16>>;
  if (low_dtype == kBf16) return update_range<Grad, Storage<kBf16>>;
  return nullptr;
}

Update choose(int grad_dtype, bool wanted, int low_dtype) {
  if (grad_dtype == kFp32) return choose_low<Storage<kFp32>>(wanted, low_dtype);
  if (grad_dtype == kFp16) return choose_low<Storage<kFp16>>(wanted, low_dtype);
  if (grad_dtype == kBf16) return choose_low<Storage<kBf16>>(wanted, low_dtype);
  return nullptr;
}

}  // namespace
}  // namespace msz

MSZ_API int msz_adamw(float *param, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_dtype,
                      void *low_precision, int low_dtype, int64_t n, const float *scalars, int threads) {
  using namespace msz;
  const Update update = choose(grad_dtype, low_precision != nullptr, low_dtype);
  if (update == nullptr) return kBadDtype;
  if (n < 0) return kBadLength;
  if (scalars == nullptr) return kNullPointer;
  if (n == 0 || scalars[kFoundInf] != 0.0f) return kDone;
  if (param == nullptr || exp_avg == nullptr || exp_avg_sq == nullptr || grad == nullptr) return kNullPointer;
  const Arrays arrays{param, exp_avg, exp_avg_sq, grad, low_precision};
  const Coefficients coefficients(scalars);
  parallel_ranges(n, kGrain, threads,
                  [&](int64_t begin, int64_t end) { update(arrays, begin, end, coefficients); });
  return kDone;
}
