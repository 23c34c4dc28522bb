// Elements and 16-byte vectors of the three dtypes on a GPU. The arithmetic is spelled with the intrinsics that round
// to nearest and are never contracted, so that the bits do not depend on compiler options.
//
// Everything here also compiles with a C++ compiler alone (the tests run the kernels on the host that way).
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define MSZ_DEVICE __device__ __forceinline__
#else
#include "cuda_on_host.h"
#define MSZ_DEVICE inline
#endif

namespace msz {

constexpr int kVectorBytes = 16;

struct alignas(kVectorBytes) Vector {
  uint32_t words[4];
};

// One access of 16 bytes to global memory. Spelled in PTX: from C++ the compiler makes narrow accesses of some.
MSZ_DEVICE Vector loadVector(const void *address) {
#ifdef __CUDACC__
  Vector v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.words[0]), "=r"(v.words[1]), "=r"(v.words[2]), "=r"(v.words[3])
               : "l"(__cvta_generic_to_global(address)));
  return v;
#else
  cuda_on_host::checkAligned(address);
  return *static_cast<const Vector *>(address);
#endif
}
MSZ_DEVICE void storeVector(void *address, const Vector &v) {
#ifdef __CUDACC__
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]),
                 "r"(v.words[3])
               : "memory");
#else
  cuda_on_host::checkAligned(address);
  *static_cast<Vector *>(address) = v;
#endif
}

struct Half {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

MSZ_DEVICE float bitsToFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}
MSZ_DEVICE uint32_t floatToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

MSZ_DEVICE float widen(float x) { return x; }
MSZ_DEVICE float widen(Bfloat16 x) { return bitsToFloat(static_cast<uint32_t>(x.bits) << 16); }
MSZ_DEVICE float widen(Half x) {
#ifdef __CUDACC__
  return __half2float(__ushort_as_half(x.bits));
#else
  return hostHalfToFloat(x.bits);
#endif
}

// Rounds to nearest even; NaN stays NaN.
template <typename T>
MSZ_DEVICE T narrow(float x);
template <>
MSZ_DEVICE Half narrow<Half>(float x) {
#ifdef __CUDACC__
  return {__half_as_ushort(__float2half_rn(x))};
#else
  return {hostFloatToHalf(x)};
#endif
}
template <>
MSZ_DEVICE Bfloat16 narrow<Bfloat16>(float x) {
  uint32_t bits = floatToBits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// Elements of a vector: taken out of its words, and put together to words. Spelled out, because a copy of memory
// from 16-bit items is compiled into narrow accesses.
MSZ_DEVICE float itemOf(const Vector &v, int i, float) { return bitsToFloat(v.words[i]); }
template <typename T>
MSZ_DEVICE T itemOf(const Vector &v, int i, T) {
  return {static_cast<uint16_t>(v.words[i / 2] >> (16 * (i % 2)))};
}
MSZ_DEVICE uint32_t wordOf(const float *items, int i) { return floatToBits(items[i]); }
template <typename T>
MSZ_DEVICE uint32_t wordOf(const T *items, int i) {
  return items[2 * i].bits | static_cast<uint32_t>(items[2 * i + 1].bits) << 16;
}

// `N` consecutive elements in registers, moved by 16-byte accesses. The address has to be 16-byte aligned.
template <typename T, int N>
struct Pack {
  static_assert(N * sizeof(T) % kVectorBytes == 0, "whole vectors");
  static constexpr int kVectors = N * sizeof(T) / kVectorBytes;
  static constexpr int kPerVector = N / kVectors;
  T items[N];

  static MSZ_DEVICE Pack load(const T *address) {
    Pack pack;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const Vector vector = loadVector(address + i * kPerVector);
#pragma unroll
      for (int k = 0; k < kPerVector; ++k) pack.items[i * kPerVector + k] = itemOf(vector, k, T{});
    }
    return pack;
  }
  MSZ_DEVICE void store(T *address) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      Vector vector;
#pragma unroll
      for (int w = 0; w < 4; ++w) vector.words[w] = wordOf(items + i * kPerVector, w);
      storeVector(address + i * kPerVector, vector);
    }
  }
};

// Elements before `address` is aligned, in steps of `itemBytes`; -1 when no whole element leads there.
inline int itemsToAlignment(const void *address, int itemBytes) {
  int missing = static_cast<int>(-reinterpret_cast<intptr_t>(address) & (kVectorBytes - 1));
  return missing % itemBytes == 0 ? missing / itemBytes : -1;
}

}  // namespace msz
