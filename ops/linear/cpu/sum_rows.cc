// The gradient of a bias: the sum over rows.

#include <algorithm>

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

using Plain = Storage<kFp32>;

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxBlocks = 256;

}  // namespace
}  // namespace msz

// sums[i] = sum over rows of x[row, i], in fp32, rounded to the dtype of x. The order of the additions follows
// from the number of rows: within blocks of rows, then over the blocks.
MSZ_API int msz_sum_rows(const void *x, void *sums, int dtype, int64_t rows, int64_t size, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  const int64_t block_rows = std::max(kRowsPerTask, (rows + kMaxBlocks - 1) / kMaxBlocks);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  Scratch parts(blocks * size);
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    auto *out = static_cast<typename S::Element *>(sums);
    parallel_ranges(blocks, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        float *part = parts.begin() + block * size;
        std::fill(part, part + size, 0.0f);
        for (int64_t row = block * block_rows; row < std::min(rows, (block + 1) * block_rows); ++row) {
          each_vector(0, size, [&](int64_t i, auto lanes) {
            put<Plain>(part + i, get<Plain>(part + i, lanes) + get<S>(in + row * size + i, lanes), lanes);
          });
        }
      }
    });
    parallel_ranges(size, 256, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        Floats sum{};
        for (int64_t block = 0; block < blocks; ++block) sum += get<Plain>(parts.begin() + block * size + i, lanes);
        put<S>(out + i, sum, lanes);
      });
    });
  });
}
