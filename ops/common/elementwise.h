// Loads and stores of the three float dtypes, and the walk over a range in whole vectors plus one padded tail.
#pragma once

#include <type_traits>

#include "abi.h"
#include "simd.h"

namespace msz {

// Storage of a dtype: loads widen to fp32, stores round to nearest even.
template <Dtype dtype>
struct Storage;

template <>
struct Storage<kFp32> {
  typedef float Element;
  MSZ_INLINE Floats read(const Element *from) { return load(from); }
  MSZ_INLINE void write(Element *to, Floats value) { store(to, value); }
};

template <>
struct Storage<kFp16> {
  typedef uint16_t Element;
  MSZ_INLINE Floats read(const Element *from) { return widen_fp16(load_halves(from)); }
  MSZ_INLINE void write(Element *to, Floats value) { store_halves(to, round_fp16(value)); }
};

template <>
struct Storage<kBf16> {
  typedef uint16_t Element;
  MSZ_INLINE Floats read(const Element *from) { return widen_bf16(load_halves(from)); }
  MSZ_INLINE void write(Element *to, Floats value) { store_halves(to, round_bf16(value)); }
};

// A base address and elements after it. Arrays may lie at any byte address, so elements are reached by memcpy.
template <class Element>
MSZ_INLINE Element *at(Element *base, int64_t index) {
  typedef typename std::conditional<std::is_const<Element>::value, const char, char>::type Byte;
  return reinterpret_cast<Element *>(reinterpret_cast<Byte *>(base) + index * static_cast<int64_t>(sizeof(Element)));
}

}  // namespace msz
