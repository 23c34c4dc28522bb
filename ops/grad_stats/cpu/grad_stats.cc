// Sum of squares in fp64 in the one order that ops/README.md states: finiteness and norm in one pass.

#include <cstring>

#include "elementwise.h"
#include "threads.h"

namespace msz {
namespace {

constexpr int64_t kBlock = 32768;  // elements with 16 running sums of their own
constexpr int kLanes = 16;

// Sixteen fp64 values, in as many registers as the instruction set needs.
typedef double Doubles __attribute__((vector_size(MSZ_VECTOR_BYTES)));
constexpr int kDoubles = MSZ_VECTOR_BYTES / 8;
constexpr int kRegisters = kLanes / kDoubles;

typedef float HalfFloats __attribute__((vector_size(MSZ_VECTOR_BYTES / 2)));

// Adds the squares of 16 elements to the lanes. A square of fp32 is exact in fp64.
template <class Source>
MSZ_INLINE void add_squares(const typename Source::Element *from, Doubles *lanes) {
  float wide[kLanes];
  for (int i = 0; i < kLanes; i += kWidth) store(wide + i, Source::read(at(from, i)));
  for (int r = 0; r < kRegisters; ++r) {
    HalfFloats part;
    std::memcpy(&part, wide + r * kDoubles, sizeof part);
    const Doubles x = __builtin_convertvector(part, Doubles);
    lanes[r] += x * x;
  }
}

double add_tree(const Doubles *lanes) {
  double sums[kLanes];
  std::memcpy(sums, lanes, sizeof sums);
  for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  return sums[0];
}

template <class Source>
double block_sum(const void *base, int64_t begin, int64_t end) {
  typedef typename Source::Element Element;
  const Element *x = static_cast<const Element *>(base);
  Doubles lanes[kRegisters] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) add_squares<Source>(at(x, i), lanes);
  if (i < end) {
    Element tail[kLanes] = {};  // adding the square of 0 changes nothing
    std::memcpy(tail, at(x, i), (end - i) * sizeof(Element));
    add_squares<Source>(tail, lanes);
  }
  return add_tree(lanes);
}

typedef double (*BlockSum)(const void *, int64_t, int64_t);

BlockSum choose(int dtype) {
  if (dtype == kFp32) return block_sum<Storage<kFp32>>;
  if (dtype == kFp16) return block_sum<Storage<kFp16>>;
  if (dtype == kBf16) return block_sum<Storage<kBf16>>;
  return nullptr;
}

// A round of blocks small enough that their sums fit on the stack of the caller.
constexpr int64_t kRound = 1024;

int sum_of_squares(const void *x, int dtype, int64_t n, double *result, int threads) {
  const BlockSum sum = choose(dtype);
  if (sum == nullptr) return kBadDtype;
  if (n < 0) return kBadLength;
  if (result == nullptr || (x == nullptr && n > 0)) return kNullPointer;
  const int64_t blocks = (n + kBlock - 1) / kBlock;
  double total = 0.0, sums[kRound];
  for (int64_t first = 0; first < blocks; first += kRound) {
    const int64_t count = blocks - first < kRound ? blocks - first : kRound;
    parallel_ranges(count, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t start = (first + block) * kBlock;
        const int64_t stop = start + kBlock < n ? start + kBlock : n;
        sums[block] = sum(x, start, stop);
      }
    });
    for (int64_t block = 0; block < count; ++block) total += sums[block];
  }
  *result = total;
  return kDone;
}

}  // namespace
}  // namespace msz

MSZ_API int msz_sum_of_squares(const void *x, int dtype, int64_t n, float *result, int threads) {
  using namespace msz;
  double total = 0.0;
  const int status = sum_of_squares(x, dtype, n, result == nullptr ? nullptr : &total, threads);
  if (status != kDone) return status;
  // As a part of work: the rounding must not see a flush to zero that the process may have set.
  parallel_ranges(1, 1, 1, [&](int64_t, int64_t) { *result = static_cast<float>(total); });
  return kDone;
}

// The same without the last rounding, for sums that go on.
MSZ_API int msz_sum_of_squares_fp64(const void *x, int dtype, int64_t n, double *result, int threads) {
  return msz::sum_of_squares(x, dtype, n, result, threads);
}
