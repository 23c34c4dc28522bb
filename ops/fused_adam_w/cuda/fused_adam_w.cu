// Entry points of FusedAdamW on a GPU: one tensor, many tensors, MindSpore's ahead-of-time custom operator.
#include "fused_adam_w.cuh"

#ifdef __CUDACC__
#define MSZ_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace msz {
namespace {

constexpr int kDeviceRefused = -4;
struct NoLow {};

template <typename Grad, typename Low>
int launch(const AdamWBatch &batch, const float *scalars, cudaStream_t stream) {
  const uint32_t blocks = batch.firstBlock[batch.count] > 0 ? batch.firstBlock[batch.count] : 1;
  MSZ_LAUNCH((adamWKernel<Grad, Low>), blocks, kThreads, stream, batch, scalars);
  return cudaGetLastError() == cudaSuccess ? kDone : kDeviceRefused;
}

template <typename Grad>
int launchFor(const AdamWBatch &batch, bool hasLow, int lowDtype, const float *scalars, cudaStream_t stream) {
  if (!hasLow) return launch<Grad, NoLow>(batch, scalars, stream);
  return lowDtype == kFp16 ? launch<Grad, Half>(batch, scalars, stream)
                           : launch<Grad, Bfloat16>(batch, scalars, stream);
}

int launchBatch(const AdamWBatch &batch, int gradDtype, bool hasLow, int lowDtype, const float *scalars,
                cudaStream_t stream) {
  if (gradDtype == kFp32) return launchFor<float>(batch, hasLow, lowDtype, scalars, stream);
  return gradDtype == kFp16 ? launchFor<Half>(batch, hasLow, lowDtype, scalars, stream)
                            : launchFor<Bfloat16>(batch, hasLow, lowDtype, scalars, stream);
}

// Whether the arguments are of the contract; nothing is launched before all of them were seen.
int checkArguments(const MszAdamWTensor *tensors, int count, int gradDtype, bool hasLow, int lowDtype,
                   const float *scalars) {
  if (gradDtype < kFp32 || gradDtype > kBf16) return kBadDtype;
  if (hasLow && lowDtype != kFp16 && lowDtype != kBf16) return kBadDtype;
  if (count < 0) return kBadLength;
  if (scalars == nullptr || (tensors == nullptr && count > 0)) return kNullPointer;
  for (int i = 0; i < count; ++i) {
    const MszAdamWTensor &t = tensors[i];
    if (t.length < 0) return kBadLength;
    bool missing = !t.param || !t.exp_avg || !t.exp_avg_sq || !t.grad || (hasLow && !t.low_precision);
    if (t.length > 0 && missing) return kNullPointer;
  }
  return kDone;
}

int update(const MszAdamWTensor *tensors, int count, int gradDtype, bool hasLow, int lowDtype, const float *scalars,
           float *token, cudaStream_t stream) {
  int status = checkArguments(tensors, count, gradDtype, hasLow, lowDtype, scalars);
  if (status != kDone) return status;
  AdamWBatch batch{};
  batch.token = token;
  for (int i = 0; i < count; ++i) {
    if (tensors[i].length == 0) continue;
    MszAdamWTensor tensor = tensors[i];
    if (!hasLow) tensor.low_precision = nullptr;
    const int gradBytes = gradDtype == kFp32 ? 4 : 2;
    if (addTensor(batch, tensor, gradBytes)) continue;
    status = launchBatch(batch, gradDtype, hasLow, lowDtype, scalars, stream);
    if (status != kDone) return status;
    batch = AdamWBatch{};
    if (!addTensor(batch, tensor, gradBytes)) return kBadLength;  // beyond 2^31 blocks of one tensor
  }
  if (batch.count == 0 && batch.token == nullptr) return kDone;
  return launchBatch(batch, gradDtype, hasLow, lowDtype, scalars, stream);
}

int dtypeOf(const char *name) {
  if (strcmp(name, "float32") == 0) return kFp32;
  if (strcmp(name, "float16") == 0) return kFp16;
  return strcmp(name, "bfloat16") == 0 ? kBf16 : -1;
}

int64_t elements(int ndim, const int64_t *shape) {
  int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

}  // namespace
}  // namespace msz

MSZ_API int msz_cuda_adamw_many(const MszAdamWTensor *tensors, int count, int grad_dtype, int has_low_precision,
                                int low_dtype, const float *scalars, void *stream) {
  return msz::update(tensors, count, grad_dtype, has_low_precision != 0, low_dtype, scalars, nullptr,
                     static_cast<cudaStream_t>(stream));
}

MSZ_API int msz_cuda_adamw(float *param, float *exp_avg, float *exp_avg_sq, const void *grad, int grad_dtype,
                           void *low_precision, int low_dtype, int64_t n, const float *scalars, void *stream) {
  const MszAdamWTensor tensor{param, exp_avg, exp_avg_sq, grad, low_precision, n};
  return msz::update(&tensor, 1, grad_dtype, low_precision != nullptr, low_dtype, scalars, nullptr,
                     static_cast<cudaStream_t>(stream));
}

// MindSpore's `aot` interface: param, exp_avg, exp_avg_sq, grad, scalars[, low_precision], token. 0 for success.
MSZ_API int FusedAdamWAot(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes, void *stream,
                          void * /*extra*/) {
  if (nparam != 6 && nparam != 7) return 1;
  const bool hasLow = nparam == 7;
  const int64_t n = msz::elements(ndims[0], shapes[0]);
  for (int i = 0; i < nparam - 1; ++i)
    if (msz::elements(ndims[i], shapes[i]) != (i == 4 ? 16 : n)) return 2;
  for (int i : {0, 1, 2, 4, nparam - 1})
    if (msz::dtypeOf(dtypes[i]) != msz::kFp32) return 3;
  const MszAdamWTensor tensor{static_cast<float *>(params[0]), static_cast<float *>(params[1]),
                              static_cast<float *>(params[2]), params[3], hasLow ? params[5] : nullptr, n};
  const int status =
      msz::update(&tensor, 1, msz::dtypeOf(dtypes[3]), hasLow, hasLow ? msz::dtypeOf(dtypes[5]) : 0,
                  static_cast<const float *>(params[4]), static_cast<float *>(params[nparam - 1]),
                  static_cast<cudaStream_t>(stream));
  return status == msz::kDone ? 0 : 4;
}
