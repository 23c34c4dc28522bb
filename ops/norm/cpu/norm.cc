// LayerNorm and RMSNorm over rows, with their gradients. Statistics and arithmetic are fp32 whatever the storage.
//
// A row's result depends on that row alone. The gradients of weight and bias are summed over blocks of rows
// whose size follows from the number of rows, then over the blocks in order.

#include <algorithm>
#include <cmath>

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

using Plain = Storage<kFp32>;

constexpr int64_t kRowsPerTask = 16;
constexpr int64_t kMaxBlocks = 256;
constexpr int64_t kColumnGrain = 256;

struct Moments {
  float mean, inverse_deviation;
};

template <class S>
MSZ_INLINE Moments row_moments(const typename S::Element *x, int64_t size, float eps, bool centred) {
  float mean = 0.0f;
  if (centred) {
    Floats sum{};
    each_vector(0, size, [&](int64_t i, auto lanes) { sum += get<S>(x + i, lanes); });
    mean = sum_lanes(sum) / static_cast<float>(size);
  }
  Floats squares{};
  each_vector(0, size, [&](int64_t i, auto lanes) {
    const Floats off = only(get<S>(x + i, lanes) - mean, lanes);
    squares = fma(off, off, squares);
  });
  return {mean, 1.0f / std::sqrt(sum_lanes(squares) / static_cast<float>(size) + eps)};
}

template <class S>
MSZ_INLINE void normalise_row(const typename S::Element *x, const float *weight, const float *bias, Moments m,
                              int64_t size, typename S::Element *y) {
  each_vector(0, size, [&](int64_t i, auto lanes) {
    const Floats w = get<Plain>(weight + i, lanes);
    const Floats normal = (get<S>(x + i, lanes) - m.mean) * m.inverse_deviation;
    put<S>(y + i, bias ? fma(normal, w, get<Plain>(bias + i, lanes)) : normal * w, lanes);
  });
}

// dx of one row; adds the row's part to dweight and dbias [size] where asked for.
template <class S>
MSZ_INLINE void row_gradient(const typename S::Element *x, const typename S::Element *dy, const float *weight,
                             Moments m, bool centred, int64_t size, typename S::Element *dx, float *dweight,
                             float *dbias) {
  Floats sum{}, product{};
  each_vector(0, size, [&](int64_t i, auto lanes) {
    const Floats d = get<S>(dy + i, lanes), g = d * get<Plain>(weight + i, lanes);
    const Floats normal = only((get<S>(x + i, lanes) - m.mean) * m.inverse_deviation, lanes);
    sum += g;
    product = fma(g, normal, product);
    if (dweight) put<Plain>(dweight + i, fma(d, normal, get<Plain>(dweight + i, lanes)), lanes);
    if (dbias) put<Plain>(dbias + i, d + get<Plain>(dbias + i, lanes), lanes);
  });
  if (!dx) return;
  const float mean_g = centred ? sum_lanes(sum) / static_cast<float>(size) : 0.0f;
  const float mean_product = sum_lanes(product) / static_cast<float>(size);
  each_vector(0, size, [&](int64_t i, auto lanes) {
    const Floats g = get<S>(dy + i, lanes) * get<Plain>(weight + i, lanes);
    const Floats normal = (get<S>(x + i, lanes) - m.mean) * m.inverse_deviation;
    put<S>(dx + i, (g - mean_g - normal * mean_product) * m.inverse_deviation, lanes);
  });
}

// out[i] = sum over blocks of parts[block][i], in order, in the storage of `dtype`.
void add_blocks(const float *parts, int64_t stride, int64_t blocks, int64_t size, void *out, int dtype,
                int threads) {
  with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    auto *to = static_cast<typename S::Element *>(out);
    parallel_ranges(size, kColumnGrain, threads, [&](int64_t begin, int64_t end) {
      each_vector(begin, end, [&](int64_t i, auto lanes) {
        Floats sum{};
        for (int64_t block = 0; block < blocks; ++block) sum += get<Plain>(parts + block * stride + i, lanes);
        put<S>(to + i, sum, lanes);
      });
    });
  });
}

}  // namespace
}  // namespace msz

// y = (x - mean) / sqrt(var + eps) * weight + bias for each of `rows` rows of `size` elements. Without bias
// (null): y = x / sqrt(mean(x^2) + eps) * weight. x and y share a dtype, weight and bias another.
// moments fp32 [rows, 2]: mean (0 without bias) and 1 / sqrt(...), for the gradient; may be null.
MSZ_API int msz_norm(const void *x, int dtype, const void *weight, const void *bias, int weight_dtype, void *y,
                     float *moments, int64_t rows, int64_t size, float eps, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  if (with_storage(weight_dtype, [](auto) {}) != kDone) return kBadDtype;
  Scratch wide(weight_dtype == kFp32 ? 0 : 2 * size);
  const float *w = as_fp32(weight, weight_dtype, size, wide.begin());
  const float *b = bias ? as_fp32(bias, weight_dtype, size, wide.begin() + size) : nullptr;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    auto *out = static_cast<typename S::Element *>(y);
    parallel_ranges(rows, kRowsPerTask, threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const Moments m = row_moments<S>(in + row * size, size, eps, b != nullptr);
        normalise_row<S>(in + row * size, w, b, m, size, out + row * size);
        if (moments) moments[2 * row] = m.mean, moments[2 * row + 1] = m.inverse_deviation;
      }
    });
  });
}

// Gradients of msz_norm. dx, dweight, dbias: null where not wanted; dweight and dbias are in weight_dtype.
// centred: 1 for LayerNorm, 0 for RMSNorm.
MSZ_API int msz_norm_grad(const void *x, const void *dy, int dtype, const void *weight, int weight_dtype,
                          const float *moments, int centred, void *dx, void *dweight, void *dbias, int64_t rows,
                          int64_t size, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  if (with_storage(weight_dtype, [](auto) {}) != kDone) return kBadDtype;
  const int64_t block_rows = std::max(kRowsPerTask, (rows + kMaxBlocks - 1) / kMaxBlocks);
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  Scratch wide(weight_dtype == kFp32 ? 0 : size), parts(dweight || dbias ? 2 * blocks * size : 0);
  const float *w = as_fp32(weight, weight_dtype, size, wide.begin());
  const int status = with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *in = static_cast<const typename S::Element *>(x);
    const auto *grad = static_cast<const typename S::Element *>(dy);
    auto *out = static_cast<typename S::Element *>(dx);
    parallel_ranges(blocks, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        float *sums = parts.begin() ? parts.begin() + 2 * block * size : nullptr;
        if (sums) std::fill(sums, sums + 2 * size, 0.0f);
        for (int64_t row = block * block_rows; row < std::min(rows, (block + 1) * block_rows); ++row) {
          const Moments m{moments[2 * row], moments[2 * row + 1]};
          row_gradient<S>(in + row * size, grad + row * size, w, m, centred != 0, size,
                          out ? out + row * size : nullptr, dweight ? sums : nullptr,
                          dbias ? sums + size : nullptr);
        }
      }
    });
  });
  if (status != kDone) return status;
  if (dweight) add_blocks(parts.begin(), 2 * size, blocks, size, dweight, weight_dtype, threads);
  if (dbias) add_blocks(parts.begin() + size, 2 * size, blocks, size, dbias, weight_dtype, threads);
  return kDone;
}
