// One vector type for every instruction set: the width follows from the flags this file is compiled with.
//
// `Floats` has +, -, *, / by the compiler's vector extension; each operation is one rounded IEEE operation
// (compile with -ffp-contract=off). Loads and stores need no alignment. The same arithmetic on any width gives
// the same bits, so a tail may be computed in a padded vector.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define MSZ_VECTOR_BYTES 64
#define MSZ_VARIANT "avx512"
#elif defined(__AVX2__) && defined(__F16C__)
#define MSZ_VECTOR_BYTES 32
#define MSZ_VARIANT "avx2"
#elif defined(__aarch64__)
#define MSZ_VECTOR_BYTES 16
#define MSZ_VARIANT "neon"
#else
#define MSZ_VECTOR_BYTES 16
#define MSZ_VARIANT "plain"
#endif

#define MSZ_INLINE static inline __attribute__((always_inline))

namespace msz {

constexpr int kWidth = MSZ_VECTOR_BYTES / 4;  // floats in a vector

typedef float Floats __attribute__((vector_size(MSZ_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(MSZ_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(MSZ_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(MSZ_VECTOR_BYTES / 2)));

MSZ_INLINE Floats spread(float value) { return value - Floats{}; }  // exact, -0.0f included

MSZ_INLINE Floats load(const float *from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

MSZ_INLINE void store(float *to, Floats value) { std::memcpy(to, &value, sizeof value); }

MSZ_INLINE Halves load_halves(const uint16_t *from) {
  Halves value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

MSZ_INLINE void store_halves(uint16_t *to, Halves value) { std::memcpy(to, &value, sizeof value); }

MSZ_INLINE Floats root(Floats x) {
#if MSZ_VECTOR_BYTES == 64
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif MSZ_VECTOR_BYTES == 32
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)x);
#elif defined(__SSE2__)
  return (Floats)_mm_sqrt_ps((__m128)x);
#else
  for (int i = 0; i < kWidth; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

MSZ_INLINE Floats widen_bf16(Halves x) {
  return (Floats)(__builtin_convertvector(x, Words) << 16);
}

MSZ_INLINE Halves round_bf16(Floats x) {
  const Words bits = (Words)x;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;
  const Words is_nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), Halves);
}

MSZ_INLINE Floats widen_fp16(Halves x) {
#if MSZ_VECTOR_BYTES == 64
  return (Floats)_mm512_cvtph_ps((__m256i)x);
#elif MSZ_VECTOR_BYTES == 32
  return (Floats)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)x));
#else
  Floats out;
  for (int i = 0; i < kWidth; ++i) out[i] = fp16_to_float(x[i]);
  return out;
#endif
}

MSZ_INLINE Halves round_fp16(Floats x) {
#if MSZ_VECTOR_BYTES == 64
  return (Halves)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif MSZ_VECTOR_BYTES == 32
  return (Halves)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (Halves)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x));
#else
  Halves out;
  for (int i = 0; i < kWidth; ++i) out[i] = float_to_fp16(x[i]);
  return out;
#endif
}

}  // namespace msz
