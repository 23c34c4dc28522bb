// GELU in its tanh form and SwiGLU, with their gradients; elementwise, computed in fp32.

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

constexpr int64_t kGrain = 8192;

// 0.5 x (1 + tanh u) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
constexpr float kLinear = 1.5957691216057308f;
constexpr float kCubic = 0.071354816272600247f;

MSZ_INLINE Floats gelu_gate(Floats x) { return sigmoid(x * fma(x * x, spread(kCubic), spread(kLinear))); }

MSZ_INLINE Floats gelu(Floats x) { return x * gelu_gate(x); }

MSZ_INLINE Floats gelu_slope(Floats x) {
  const Floats gate = gelu_gate(x);
  const Floats inner_slope = fma(x * x, spread(3.0f * kCubic), spread(kLinear));
  const Floats slope = fma(x * gate * (1.0f - gate), inner_slope, gate);
  // Far out gate (1 - gate) is 0 while the cubic overflows: the limits are 0 and 1.
  return x < -20.0f ? Floats{} : (x > 20.0f ? spread(1.0f) : slope);
}

}  // namespace
}  // namespace msz

// y = gelu(x), n elements of one dtype. y may be x.
MSZ_API int msz_gelu(const void *x, void *y, int dtype, int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    auto *out = static_cast<typename S::Element *>(y);
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) { put<S>(out + i, gelu(get<S>(in + i, lanes)), lanes); });
    });
  });
}

// dx = dy gelu'(x). dx may be dy.
MSZ_API int msz_gelu_grad(const void *x, const void *dy, void *dx, int dtype, int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    const auto *grad = static_cast<const typename S::Element *>(dy);
    auto *out = static_cast<typename S::Element *>(dx);
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        put<S>(out + i, get<S>(grad + i, lanes) * gelu_slope(get<S>(in + i, lanes)), lanes);
      });
    });
  });
}

// y = gate sigmoid(gate) up
MSZ_API int msz_swiglu(const void *gate, const void *up, void *y, int dtype, int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *a = static_cast<const typename S::Element *>(gate);
    const auto *b = static_cast<const typename S::Element *>(up);
    auto *out = static_cast<typename S::Element *>(y);
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        const Floats g = get<S>(a + i, lanes);
        put<S>(out + i, g * sigmoid(g) * get<S>(b + i, lanes), lanes);
      });
    });
  });
}

// dgate = dy up silu'(gate), dup = dy silu(gate)
MSZ_API int msz_swiglu_grad(const void *gate, const void *up, const void *dy, void *dgate, void *dup, int dtype,
                            int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *a = static_cast<const typename S::Element *>(gate);
    const auto *b = static_cast<const typename S::Element *>(up);
    const auto *grad = static_cast<const typename S::Element *>(dy);
    auto *out_a = static_cast<typename S::Element *>(dgate);
    auto *out_b = static_cast<typename S::Element *>(dup);
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        const Floats g = get<S>(a + i, lanes), d = get<S>(grad + i, lanes), s = sigmoid(g);
        const Floats slope = s * fma(g, 1.0f - s, spread(1.0f));
        put<S>(out_a + i, d * get<S>(b + i, lanes) * slope, lanes);
        put<S>(out_b + i, d * g * s, lanes);
      });
    });
  });
}
