// Softmax cross entropy over rows of logits: the only array of the size of the logits that is written is their
// gradient. Computed in fp32 whatever the storage; a row's result depends on that row alone.
//
// The vocabulary may be cut into slices (tensor parallelism): the logits are then columns [first, first + size)
// of the whole rows, and the caller joins the statistics of the slices.

#include <atomic>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vmath.h"

namespace msz {
namespace {

constexpr int kBadLabel = -5;
constexpr int64_t kElementsPerTask = 16384;

int64_t row_grain(int64_t size) { return kElementsPerTask / (size + 1) + 1; }

struct Softmax {
  float max, sum;  // of the row, and of exp(x - max)
};

template <class S>
MSZ_INLINE Softmax row_softmax(const typename S::Element *x, int64_t size) {
  // A NaN does not become the maximum but makes the sum NaN.
  Floats tops = spread(-kInfinity);
  each_vector(0, size, [&](int64_t i, auto lanes) {
    tops = larger(only(get<S>(x + i, lanes), lanes, -kInfinity), tops);
  });
  const float top = max_lanes(tops);
  Floats sums{};
  each_vector(0, size, [&](int64_t i, auto lanes) { sums += only(exp(get<S>(x + i, lanes) - top), lanes); });
  return {top, sum_lanes(sums)};
}

template <class S>
MSZ_INLINE float element(const typename S::Element *x, int64_t i) {
  return get<S>(x + i, First{1})[0];
}

template <class S>
MSZ_INLINE void row_gradient(const typename S::Element *x, int64_t size, float log_sum, float scale, int64_t label,
                             typename S::Element *dx) {
  const bool picked = label >= 0 && label < size;
  const float at_label = picked ? element<S>(x, label) : 0.0f;  // read first: dx may be x
  each_vector(0, size, [&](int64_t i, auto lanes) {
    put<S>(dx + i, exp(get<S>(x + i, lanes) - log_sum) * scale, lanes);
  });
  if (picked) put<S>(dx + label, (exp(spread(at_label - log_sum)) - 1.0f) * scale, First{1});
}

}  // namespace
}  // namespace msz

// loss fp32 [1]: the sum over rows of log(sum(exp(logits))) - logits[label], added in fp64 in the order of the
// rows; log_sums fp32 [rows]: log(sum(exp(logits))), for the gradient. A row labelled `ignored` counts nothing and
// is not read. -5 for any other label outside [0, size).
MSZ_API int msz_cross_entropy(const void *logits, int dtype, const int32_t *labels, int32_t ignored, int64_t rows,
                              int64_t size, float *log_sums, float *loss, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  std::vector<float> losses(rows);
  std::atomic<bool> bad_label{false};
  const int status = with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *x = static_cast<const typename S::Element *>(logits);
    parallel_ranges(rows, row_grain(size), threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        log_sums[row] = 0.0f;
        if (labels[row] == ignored) continue;
        if (labels[row] < 0 || labels[row] >= size) {
          bad_label = true;
          continue;
        }
        const Softmax softmax = row_softmax<S>(x + row * size, size);
        log_sums[row] = softmax.max + std::log(softmax.sum);
        // In this order the difference is exact where the label has the largest logit by far.
        losses[row] = std::log(softmax.sum) + (softmax.max - element<S>(x + row * size, labels[row]));
      }
    });
  });
  if (status != kDone) return status;
  if (bad_label) return kBadLabel;
  double total = 0.0;
  for (const float value : losses) total += value;
  *loss = static_cast<float>(total);
  return kDone;
}

// Statistics of a slice of the vocabulary, fp32 [rows] each: max, sum of exp(logits - max), and the logit of the
// label where it lies in [first, first + size), else 0.
MSZ_API int msz_softmax_stats(const void *logits, int dtype, const int32_t *labels, int64_t first, int64_t rows,
                              int64_t size, float *maxima, float *sums, float *picked, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *x = static_cast<const typename S::Element *>(logits);
    parallel_ranges(rows, row_grain(size), threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const Softmax softmax = row_softmax<S>(x + row * size, size);
        const int64_t label = labels[row] - first;
        maxima[row] = softmax.max;
        sums[row] = softmax.sum;
        picked[row] = label >= 0 && label < size ? element<S>(x + row * size, label) : 0.0f;
      }
    });
  });
}

// dlogits = grad (exp(logits - log_sum) - [column + first == label]), 0 for rows labelled `ignored`. grad fp32:
// one value for all rows (grad_stride 0) or one a row (1). dlogits has the dtype of logits and may be logits.
MSZ_API int msz_cross_entropy_grad(const void *logits, int dtype, const int32_t *labels, int32_t ignored,
                                   int64_t first, int64_t rows, int64_t size, const float *log_sums,
                                   const float *grad, int64_t grad_stride, void *dlogits, int threads) {
  using namespace msz;
  if (rows < 0 || size < 0) return kBadLength;
  return with_storage(dtype, [&](auto storage) {
    using S = decltype(storage);
    const auto *x = static_cast<const typename S::Element *>(logits);
    auto *dx = static_cast<typename S::Element *>(dlogits);
    parallel_ranges(rows, row_grain(size), threads, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        if (labels[row] == ignored) {
          std::memset(dx + row * size, 0, size * sizeof(typename S::Element));
        } else {
          row_gradient<S>(x + row * size, size, log_sums[row], grad[row * grad_stride], labels[row] - first,
                          dx + row * size);
        }
      }
    });
  });
}
