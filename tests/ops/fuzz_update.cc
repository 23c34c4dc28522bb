// Random sizes, alignments, dtypes, values and thread counts for the update and statistics kernels.
//
// Every result is compared with a scalar version, bit by bit (any NaN equals any NaN). Arrays have exactly the
// size that is needed and a guard before and after, so that an address sanitizer or the guards catch every
// access outside.    usage: fuzz_update SEED ITERATIONS
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "half.h"

extern "C" {
const char *msz_variant();
int msz_adamw(float *, float *, float *, const void *, int, void *, int, int64_t, const float *, int);
int msz_sgd(float *, const void *, int, void *, int, int64_t, const float *, int);
int msz_sum_of_squares(const void *, int, int64_t, float *, int);
}

namespace {

std::mt19937_64 engine;

int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }

constexpr int kGuard = 64;

// An array at any byte address, with guards.
struct Array {
  Array(int64_t n, size_t element) : bytes(n * element), offset(below(8)), memory(new char[total()]) {
    std::memset(memory, 0x5a, total());
    for (size_t i = 0; i < bytes; i += 4) {
      const uint32_t word = random_word();
      std::memcpy(data() + i, &word, bytes - i < 4 ? bytes - i : 4);
    }
  }
  Array(const Array &other) : bytes(other.bytes), offset(other.offset), memory(new char[total()]) {
    std::memcpy(memory, other.memory, total());
  }
  ~Array() { delete[] memory; }

  size_t total() const { return bytes + offset + 2 * kGuard; }
  char *data() const { return memory + kGuard + offset; }

  template <class T>
  T get(int64_t i) const {
    T value;
    std::memcpy(&value, data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(int64_t i, T value) {
    std::memcpy(data() + i * sizeof(T), &value, sizeof(T));
  }
  bool guards_hold() const {
    for (size_t i = 0; i < kGuard + offset; ++i) {
      if (memory[i] != 0x5a) return false;
    }
    for (size_t i = kGuard + offset + bytes; i < total(); ++i) {
      if (memory[i] != 0x5a) return false;
    }
    return true;
  }

  // Ordinary values, and one in eight any bits: inf, NaN, denormals, huge and tiny ones.
  static uint32_t random_word() {
    if (below(8) == 0) return static_cast<uint32_t>(engine());
    return msz::float_bits(static_cast<float>(std::normal_distribution<double>(0, 1)(engine)));
  }

  size_t bytes;
  size_t offset;
  char *memory;
};

float widen(int dtype, const Array &a, int64_t i) {
  if (dtype == 0) return a.get<float>(i);
  return dtype == 1 ? msz::fp16_to_float(a.get<uint16_t>(i)) : msz::bf16_to_float(a.get<uint16_t>(i));
}

uint16_t narrow(int dtype, float x) { return dtype == 1 ? msz::float_to_fp16(x) : msz::float_to_bf16(x); }

bool same(float a, float b) { return (a != a && b != b) || msz::float_bits(a) == msz::float_bits(b); }

bool same_array(const Array &a, const Array &b, int dtype) {
  const int64_t n = static_cast<int64_t>(a.bytes / (dtype == 0 ? 4 : 2));
  for (int64_t i = 0; i < n; ++i) {
    if (!same(widen(dtype, a, i), widen(dtype, b, i))) return false;
  }
  return a.guards_hold();
}

std::vector<float> random_scalars() {
  std::vector<float> s = {0.9999f, 0.9f, 0.1f, 0.95f, 0.05f, 1.5f, 1e-8f, 1e-3f, 0.25f, 0, 0, 0, 0, 0, 0, 0};
  if (below(4) == 0) {
    for (int i = 0; i < 9; ++i) s[i] = msz::bits_float(Array::random_word());
  }
  if (below(8) == 0) s[9] = below(2) ? 1.0f : NAN;
  return s;
}

void expect_adamw(Array &p, Array &m, Array &v, const Array &grad, int dtype, Array *low, int low_dtype, int64_t n,
                  const float *s) {
  for (int64_t i = 0; i < n; ++i) {
    const float g = widen(dtype, grad, i) * s[8];
    const float mean = m.get<float>(i) * s[1] + g * s[2];
    const float square = v.get<float>(i) * s[3] + g * g * s[4];
    const float step = mean / (std::sqrt(square) * s[5] + s[6]);
    const float value = p.get<float>(i) * s[0] - step * s[7];
    m.set(i, mean);
    v.set(i, square);
    p.set(i, value);
    if (low != nullptr) low->set(i, narrow(low_dtype, value));
  }
}

void expect_sgd(Array &p, const Array &grad, int dtype, Array *low, int low_dtype, int64_t n, const float *s) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = p.get<float>(i) * s[0] - widen(dtype, grad, i) * s[1];
    p.set(i, value);
    if (low != nullptr) low->set(i, narrow(low_dtype, value));
  }
}

float expect_sum(const Array &x, int dtype, int64_t n) {
  double total = 0;
  for (int64_t start = 0; start < n; start += 32768) {
    double lanes[16] = {};
    for (int64_t i = start; i < n && i < start + 32768; ++i) {
      const double value = widen(dtype, x, i);
      lanes[i % 16] += value * value;
    }
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    total += lanes[0];
  }
  return static_cast<float>(total);
}

float *floats(const Array &a) { return reinterpret_cast<float *>(a.data()); }

bool one_case() {
  const int64_t n = below(8) ? below(100) : below(70000);
  const int dtype = static_cast<int>(below(3)), low_dtype = 1 + static_cast<int>(below(2));
  const int threads = static_cast<int>(below(5));
  const bool has_low = below(2), skips_low = !has_low;
  const std::vector<float> s = random_scalars();
  Array p(n, 4), m(n, 4), v(n, 4), grad(n, dtype == 0 ? 4 : 2), low(n, 2);
  Array p0(p), m0(m), v0(v), grad0(grad), low0(low), p1(p), low1(low), p2(p);
  void *low_data = skips_low ? nullptr : low.data();
  if (msz_adamw(floats(p), floats(m), floats(v), grad.data(), dtype, low_data, low_dtype, n, s.data(), threads)) {
    return false;
  }
  if (s[9] == 0) expect_adamw(p0, m0, v0, grad0, dtype, has_low ? &low0 : nullptr, low_dtype, n, s.data());
  bool good = same_array(p, p0, 0) && same_array(m, m0, 0) && same_array(v, v0, 0) &&
              same_array(grad, grad0, dtype) && same_array(low, low0, low_dtype);
  low_data = skips_low ? nullptr : low1.data();
  if (msz_sgd(floats(p1), grad.data(), dtype, low_data, low_dtype, n, s.data(), threads)) return false;
  Array low2(n, 2);
  if (s[9] == 0) expect_sgd(p2, grad0, dtype, has_low ? &low2 : nullptr, low_dtype, n, s.data());
  good = good && same_array(p1, p2, 0);
  if (has_low && s[9] == 0) good = good && same_array(low1, low2, low_dtype);
  float sum = -1;
  if (msz_sum_of_squares(grad.data(), dtype, n, &sum, threads)) return false;
  good = good && same(sum, expect_sum(grad, dtype, n)) && same_array(grad, grad0, dtype);
  if (!good) std::printf("n %ld dtype %d low %d threads %d\n", static_cast<long>(n), dtype, low_dtype, threads);
  return good;
}

}  // namespace

int main(int, char **arguments) {
  engine.seed(std::strtoull(arguments[1], nullptr, 10));
  const long iterations = std::strtol(arguments[2], nullptr, 10);
  for (long i = 0; i < iterations; ++i) {
    if (!one_case()) {
      std::printf("case %ld of seed %s is wrong\n", i, arguments[1]);
      return 1;
    }
  }
  std::printf("%s: %ld cases\n", msz_variant(), iterations);
  return 0;
}
