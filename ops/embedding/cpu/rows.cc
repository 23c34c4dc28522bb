// Rows of a table by index, and the gradient of the table.

#include <algorithm>

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

using Plain = Storage<kFp32>;

constexpr int64_t kElementsPerTask = 16384;
constexpr int64_t kColumnsPerTask = 64;

}  // namespace
}  // namespace msz

// out[i] = table[indices[i]] for n indices; rows of `size` elements.
MSZ_API int msz_rows(const void *table, const int32_t *indices, void *out, int dtype, int64_t n, int64_t size,
                     int threads) {
  using namespace msz;
  if (n < 0 || size < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using Element = typename decltype(storage)::Element;
    const auto *from = static_cast<const Element *>(table);
    auto *to = static_cast<Element *>(out);
    const int64_t grain = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, size));
    parallel_ranges(n, grain, threads, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) std::copy_n(from + indices[i] * size, size, to + i * size);
    });
  });
}

// sums[r] = sum of rows[i] over all i with indices[i] == r, in fp32, in ascending order of i; 0 without any.
MSZ_API int msz_sum_by_index(const void *rows, int dtype, const int32_t *indices, float *sums, int64_t n,
                             int64_t num_sums, int64_t size, int threads) {
  using namespace msz;
  if (n < 0 || num_sums < 0 || size < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(rows);
    parallel_ranges(size, kColumnsPerTask, threads, [&](int64_t begin, int64_t end) {
      for (int64_t r = 0; r < num_sums; ++r) std::fill(sums + r * size + begin, sums + r * size + end, 0.0f);
      for (int64_t i = 0; i < n; ++i) {
        float *sum = sums + indices[i] * size;
        each_vector(begin, end, [&](int64_t c, auto lanes) {
          put<Plain>(sum + c, get<Plain>(sum + c, lanes) + get<S>(in + i * size + c, lanes), lanes);
        });
      }
    });
  });
}
