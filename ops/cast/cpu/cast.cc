// Conversions between the float dtypes, rounding to nearest even.

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

constexpr int64_t kGrain = 16384;

}  // namespace
}  // namespace msz

// out = in, n elements, from one dtype to another.
MSZ_API int msz_cast(const void *in, int in_dtype, void *out, int out_dtype, int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  int status = kDone;
  const int in_status = with_storage(in_dtype, [&](auto from) {
    status = with_storage(out_dtype, [&](auto to) {
      using From = decltype(from);
      using To = decltype(to);
      const auto *x = static_cast<const typename From::Element *>(in);
      auto *y = static_cast<typename To::Element *>(out);
      parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
        each_vector(begin, end, [&](int64_t i, auto lanes) { put<To>(y + i, get<From>(x + i, lanes), lanes); });
      });
    });
  });
  return in_status == kDone ? status : in_status;
}

// out = in rounded to the grid of a 16-bit dtype and kept as fp32. out may be in.
MSZ_API int msz_round_to(const float *in, float *out, int grid, int64_t n, int threads) {
  using namespace msz;
  if (n < 0) return kBadLength;
  return with_storage(grid, [&](auto storage) {
    using S = decltype(storage);
    parallel_ranges(n, kGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        typename S::Element rounded[kWidth];
        S::write(rounded, get<Storage<kFp32>>(in + i, lanes));
        put<Storage<kFp32>>(out + i, S::read(rounded), lanes);
      });
    });
  });
}
