// FusedAdamW on a GPU: any number of tensors in one launch. The arithmetic is that of ops/README.md.
#pragma once

#include "abi.h"
#include "vectors.cuh"

// One tensor of a call over many; all arrays have `length` elements. `low_precision` is null where there is none.
struct MszAdamWTensor {
  float *param;
  float *exp_avg;
  float *exp_avg_sq;
  const void *grad;
  void *low_precision;
  int64_t length;
};

namespace msz {

constexpr int kThreads = 256;
constexpr int kPack = 8;            // elements a thread takes at once: 16 bytes of a 16-bit dtype
constexpr int64_t kChunk = 8192;    // elements of a thread block
constexpr int kTensorsPerLaunch = 64;  // what fits into the 4 KiB of kernel parameters

// What one launch works on; travels as a kernel parameter, so that no table has to be copied to the device.
struct AdamWBatch {
  MszAdamWTensor tensors[kTensorsPerLaunch];
  uint32_t firstBlock[kTensorsPerLaunch + 1];  // tensor i has the blocks firstBlock[i] .. firstBlock[i + 1] - 1
  int8_t head[kTensorsPerLaunch];  // elements before all arrays are aligned; -1: they never are together
  int count;
  float *token;  // null, or where to write 1 after an update and 0 after a skipped one
};
static_assert(sizeof(AdamWBatch) <= 4096 - 16, "kernel parameters");

struct AdamWScalars {
  float keep, beta1, oneMinusBeta1, beta2, oneMinusBeta2, inverseRoot, eps, stepSize, gradScale, foundInf;
};

MSZ_DEVICE float updateOne(float &p, float &m, float &v, float g, const AdamWScalars &s) {
  g = __fmul_rn(g, s.gradScale);
  m = __fadd_rn(__fmul_rn(m, s.beta1), __fmul_rn(g, s.oneMinusBeta1));
  v = __fadd_rn(__fmul_rn(v, s.beta2), __fmul_rn(__fmul_rn(g, g), s.oneMinusBeta2));
  float root = __fadd_rn(__fmul_rn(__fsqrt_rn(v), s.inverseRoot), s.eps);
  float step = __fmul_rn(__fdiv_rn(m, root), s.stepSize);
  p = __fsub_rn(__fmul_rn(p, s.keep), step);
  return p;
}

// Low is void where no low-precision copy is written.
template <typename Grad, typename Low>
struct AdamWArrays {
  static constexpr bool kHasLow = sizeof(Low) == 2;
  float *param, *expAvg, *expAvgSq;
  const Grad *grad;
  Low *low;

  explicit MSZ_DEVICE AdamWArrays(const MszAdamWTensor &t)
      : param(t.param), expAvg(t.exp_avg), expAvgSq(t.exp_avg_sq), grad(static_cast<const Grad *>(t.grad)),
        low(static_cast<Low *>(t.low_precision)) {}

  MSZ_DEVICE void updateItem(int64_t i, const AdamWScalars &s) const {
    float p = param[i], m = expAvg[i], v = expAvgSq[i];
    updateOne(p, m, v, widen(grad[i]), s);
    param[i] = p;
    expAvg[i] = m;
    expAvgSq[i] = v;
    if constexpr (kHasLow) low[i] = narrow<Low>(p);
  }

  MSZ_DEVICE void updatePack(int64_t i, const AdamWScalars &s) const {
    auto g = Pack<Grad, kPack>::load(grad + i);
    auto p = Pack<float, kPack>::load(param + i);
    auto m = Pack<float, kPack>::load(expAvg + i);
    auto v = Pack<float, kPack>::load(expAvgSq + i);
#pragma unroll
    for (int k = 0; k < kPack; ++k) updateOne(p.items[k], m.items[k], v.items[k], widen(g.items[k]), s);
    p.store(param + i);
    m.store(expAvg + i);
    v.store(expAvgSq + i);
    if constexpr (kHasLow) {
      Pack<Low, kPack> rounded;
#pragma unroll
      for (int k = 0; k < kPack; ++k) rounded.items[k] = narrow<Low>(p.items[k]);
      rounded.store(low + i);
    }
  }
};

// The last tensor that starts at or before `block`.
MSZ_DEVICE int tensorOfBlock(const AdamWBatch &batch, uint32_t block) {
  int low = 0, high = batch.count - 1;
  while (low < high) {
    int middle = (low + high + 1) / 2;
    if (batch.firstBlock[middle] <= block) low = middle;
    else high = middle - 1;
  }
  return low;
}

template <typename Grad, typename Low>
MSZ_DEVICE void updateChunk(const MszAdamWTensor &tensor, int head, int64_t chunk, const AdamWScalars &s) {
  const AdamWArrays<Grad, Low> arrays(tensor);
  const int64_t first = head < 0 ? 0 : head;
  const int64_t begin = first + chunk * kChunk;
  const int64_t end = begin + kChunk < tensor.length ? begin + kChunk : tensor.length;
  if (chunk == 0 && threadIdx.x < first) arrays.updateItem(threadIdx.x, s);
  const int64_t packs = head < 0 || end < begin ? 0 : (end - begin) / kPack;
  for (int64_t i = threadIdx.x; i < packs; i += kThreads) arrays.updatePack(begin + i * kPack, s);
  for (int64_t i = begin + packs * kPack + threadIdx.x; i < end; i += kThreads) arrays.updateItem(i, s);
}

template <typename Grad, typename Low>
__global__ void __launch_bounds__(kThreads) adamWKernel(const __grid_constant__ AdamWBatch batch,
                                                        const float *__restrict__ scalars) {
  AdamWScalars s;
  float *values = &s.keep;
#pragma unroll
  for (int i = 0; i < 10; ++i) values[i] = scalars[i];
  const bool skip = !(s.foundInf == 0.0f);  // NaN skips as well
  if (batch.token != nullptr && blockIdx.x == 0 && threadIdx.x == 0) *batch.token = skip ? 0.0f : 1.0f;
  if (skip || batch.count == 0) return;
  const int index = tensorOfBlock(batch, blockIdx.x);
  const int64_t chunk = blockIdx.x - batch.firstBlock[index];
  updateChunk<Grad, Low>(batch.tensors[index], batch.head[index], chunk, s);
}

// Elements that no vector covers before all arrays of a tensor are aligned; at most kPack - 1, -1 for never.
inline int commonHead(const MszAdamWTensor &t, int gradBytes) {
  for (int head = 0; head < kPack; ++head) {
    bool aligned = itemsToAlignment(t.param + head, 4) == 0 && itemsToAlignment(t.exp_avg + head, 4) == 0 &&
                   itemsToAlignment(t.exp_avg_sq + head, 4) == 0;
    aligned = aligned && itemsToAlignment(static_cast<const char *>(t.grad) + head * gradBytes, gradBytes) == 0;
    if (t.low_precision != nullptr)
      aligned = aligned && itemsToAlignment(static_cast<char *>(t.low_precision) + head * 2, 2) == 0;
    if (aligned) return head;
  }
  return -1;
}

// Adds a tensor that has elements to a batch; false when the batch has no room for its blocks.
inline bool addTensor(AdamWBatch &batch, const MszAdamWTensor &tensor, int gradBytes) {
  int head = commonHead(tensor, gradBytes);
  if (head > tensor.length) head = static_cast<int>(tensor.length);
  const int64_t rest = tensor.length - (head < 0 ? 0 : head);
  const int64_t blocks = rest <= kChunk ? 1 : (rest + kChunk - 1) / kChunk;
  if (batch.count == kTensorsPerLaunch || batch.firstBlock[batch.count] + blocks > 0x7fffffff) return false;
  batch.tensors[batch.count] = tensor;
  batch.head[batch.count] = static_cast<int8_t>(head);
  batch.firstBlock[batch.count + 1] = batch.firstBlock[batch.count] + static_cast<uint32_t>(blocks);
  ++batch.count;
  return true;
}

}  // namespace msz
