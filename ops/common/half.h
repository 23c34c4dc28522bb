// fp16 and bf16 bits to fp32 and back, one value at a time, for tails and for targets without instructions.
// Rounds to nearest even, keeps denormals, overflows to inf, keeps NaN.
#pragma once

#include <cstdint>
#include <cstring>

namespace msz {

inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float bf16_to_float(uint16_t half) { return bits_float(static_cast<uint32_t>(half) << 16); }

inline uint16_t float_to_bf16(float value) {
  const uint32_t bits = float_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {  // rounding a NaN up could turn it into inf
    return static_cast<uint16_t>((bits >> 16) | 0x40u);
  }
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fp16_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // inf and NaN
    return bits_float(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
  }
  if (magnitude >= 0x400u) {
    return bits_float(sign | ((magnitude << 13) + (112u << 23)));
  }
  // A denormal is magnitude * 2^-24, which fp32 holds exactly.
  const float value = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
  return bits_float(sign | float_bits(value));
}

inline uint16_t float_to_fp16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    return static_cast<uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
  }
  if (magnitude >= 0x477ff000u) {  // 65520, half way to the next step beyond the range: rounds to inf
    return static_cast<uint16_t>(sign | 0x7c00u);
  }
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is 2^-24: adding 0.5 leaves the rounded count of steps in the low bits.
    const uint32_t steps = float_bits(bits_float(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | steps);
  }
  const uint32_t odd = (magnitude >> 13) & 1u;
  return static_cast<uint16_t>(sign | ((magnitude + 0xfffu + odd - (112u << 23)) >> 13));
}

}  // namespace msz
