// Arithmetic shared by the compute kernels: elements of any storage type as vectors of fp32, fused
// multiply-add, exp, sums across lanes.
//
// Unlike the update kernels, the compute kernels contract a * b + c where the instruction set can: their bits
// depend on the instruction set, but on nothing else (not on threads, alignment or neighbouring rows).
#pragma once

#include <cstdlib>
#include <limits>
#include <new>

#include "elementwise.h"

namespace msz {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

MSZ_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if MSZ_VECTOR_BYTES == 64
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif MSZ_VECTOR_BYTES == 32 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The larger of two; `b` where either is NaN.
MSZ_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp(x) to about one unit in the last place; 0 below -87.3, inf above 88.3, NaN stays NaN.
MSZ_INLINE Floats exp(Floats x) {
  const Floats low = spread(-87.33654f), high = spread(88.37626f);
  const Ints is_low = x < low, is_high = x > high;
  const Floats bounded = is_low ? low : (is_high ? high : x);
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits. Cody-Waite reduction, then Cephes' polynomial.
  const Floats shift = spread(12582912.0f);
  const Floats shifted = fma(bounded, spread(1.44269504088896341f), shift);
  const Floats n = shifted - shift;
  Floats r = fma(n, spread(-0.693359375f), bounded);
  r = fma(n, spread(2.12194440e-4f), r);
  Floats p = spread(1.9875691500e-4f);
  p = fma(p, r, spread(1.3981999507e-3f));
  p = fma(p, r, spread(8.3334519073e-3f));
  p = fma(p, r, spread(4.1665795894e-2f));
  p = fma(p, r, spread(1.6666665459e-1f));
  p = fma(p, r, spread(5.0000001201e-1f));
  p = fma(p, r * r, r + 1.0f);
  const Ints power = (Ints)(((Words)shifted + (127u - 0x4b400000u)) << 23);
  const Floats value = p * (Floats)power;
  return is_low ? Floats{} : (is_high ? spread(kInfinity) : value);
}

MSZ_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

// Sums and maxima over the lanes, as a tree of halves.
MSZ_INLINE float sum_lanes(Floats x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

MSZ_INLINE float max_lanes(Floats x) {
  float lanes[kWidth];
  store(lanes, x);
  for (int half = kWidth / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
}

// How many lanes of a vector are meant: all, or the first `count` (the others are read as 0, never written).
struct All {};
struct First {
  int count;
};

template <class S>
MSZ_INLINE Floats get(const typename S::Element *from, All) {
  return S::read(from);
}

template <class S>
MSZ_INLINE Floats get(const typename S::Element *from, First lanes) {
  typename S::Element padded[kWidth] = {};
  std::memcpy(padded, from, lanes.count * sizeof padded[0]);
  return S::read(padded);
}

template <class S>
MSZ_INLINE void put(typename S::Element *to, Floats value, All) {
  S::write(to, value);
}

template <class S>
MSZ_INLINE void put(typename S::Element *to, Floats value, First lanes) {
  typename S::Element padded[kWidth];
  S::write(padded, value);
  std::memcpy(to, padded, lanes.count * sizeof padded[0]);
}

// `value` in the meant lanes, `other` in the others.
MSZ_INLINE Floats only(Floats value, All, float other = 0.0f) {
  (void)other;
  return value;
}
MSZ_INLINE Floats only(Floats value, First lanes, float other = 0.0f) {
  float given[kWidth], kept[kWidth];
  store(given, value);
  for (int i = 0; i < kWidth; ++i) kept[i] = i < lanes.count ? given[i] : other;
  return load(kept);
}

// Calls work(i, lanes) for the vectors of [begin, end).
template <class Work>
MSZ_INLINE void each_vector(int64_t begin, int64_t end, const Work &work) {
  int64_t i = begin;
  for (; i + kWidth <= end; i += kWidth) work(i, All{});
  if (i < end) work(i, First{static_cast<int>(end - i)});
}

// Floats at the alignment of a cache line, not initialised.
class Scratch {
 public:
  explicit Scratch(int64_t floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
    data_ = bytes ? static_cast<float *>(std::aligned_alloc(64, bytes)) : nullptr;
    if (bytes && !data_) std::abort();  // nothing may be thrown through the C interface
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch &) = delete;
  Scratch &operator=(const Scratch &) = delete;

  float *begin() const { return data_; }

 private:
  float *data_;
};

// Calls work(Storage<...>{}) for the storage of a dtype code; kBadDtype for an unknown code.
template <class Work>
int with_storage(int dtype, const Work &work) {
  switch (dtype) {
    case kFp32: work(Storage<kFp32>{}); return kDone;
    case kFp16: work(Storage<kFp16>{}); return kDone;
    case kBf16: work(Storage<kBf16>{}); return kDone;
    default: return kBadDtype;
  }
}

// n elements of any storage as fp32: in place for fp32, else widened into `scratch`.
inline const float *as_fp32(const void *from, int dtype, int64_t n, float *scratch) {
  if (dtype == kFp32) return static_cast<const float *>(from);
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(from);
    each_vector(0, n, [&](int64_t i, auto lanes) { put<Storage<kFp32>>(scratch + i, get<S>(in + i, lanes), lanes); });
  });
  return scratch;
}

}  // namespace msz
