// Sum of squares on a GPU: exact fp64 squares, a fixed tree in each thread block, blocks added in ascending order.
// The number of blocks depends on n alone, so equal inputs at addresses of equal alignment give equal bits on every
// device.
#include "abi.h"
#include "vectors.cuh"

#ifdef __CUDACC__
#define MSZ_LAUNCH(kernel, blocks, threads, stream, ...) kernel<<<blocks, threads, 0, stream>>>(__VA_ARGS__)
#endif

namespace msz {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;  // the size of the workspace
constexpr int kUnroll = 4;        // vectors of a thread in flight
constexpr int kDeviceRefused = -4;

// Thread 0 gets the sum of `mine` over the block, added as a tree of halves.
MSZ_DEVICE double blockSum(double mine, double *shared) {
  shared[threadIdx.x] = mine;
  __syncthreads();
  for (int half = kThreads / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) shared[threadIdx.x] = shared[threadIdx.x] + shared[threadIdx.x + half];
    __syncthreads();
  }
  return shared[0];
}

// The product of two fp32 values is exact in fp64: fused or not, the same bits.
MSZ_DEVICE double addSquare(double sum, float x) { return __fma_rn(static_cast<double>(x), static_cast<double>(x), sum); }

template <typename T>
__global__ void __launch_bounds__(kThreads) partialSums(const T *__restrict__ x, int64_t n, int head,
                                                        double *__restrict__ partials) {
  constexpr int kPack = kVectorBytes / sizeof(T);
  using Items = Pack<T, kPack>;
  __shared__ double shared[kThreads];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  const int64_t me = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = head < 0 ? 0 : head, packs = head < 0 ? 0 : (n - first) / kPack;
  double sums[kPack] = {};
  int64_t i = me;
  for (; i + (kUnroll - 1) * stride < packs; i += kUnroll * stride) {
    Items loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = Items::load(x + first + (i + u * stride) * kPack);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
#pragma unroll
      for (int k = 0; k < kPack; ++k) sums[k] = addSquare(sums[k], widen(loaded[u].items[k]));
  }
  for (; i < packs; i += stride) {
    Items loaded = Items::load(x + first + i * kPack);
#pragma unroll
    for (int k = 0; k < kPack; ++k) sums[k] = addSquare(sums[k], widen(loaded.items[k]));
  }
  if (me < first) sums[0] = addSquare(sums[0], widen(x[me]));
  for (int64_t j = first + packs * kPack + me; j < n; j += stride) sums[0] = addSquare(sums[0], widen(x[j]));
#pragma unroll
  for (int width = kPack / 2; width > 0; width /= 2)
#pragma unroll
    for (int k = 0; k < width; ++k) sums[k] = sums[k] + sums[k + width];
  const double total = blockSum(sums[0], shared);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

__global__ void __launch_bounds__(kThreads) addPartials(const double *__restrict__ partials, int count,
                                                        float *__restrict__ result) {
  __shared__ double shared[kMaxBlocks];
  for (int i = threadIdx.x; i < count; i += kThreads) shared[i] = partials[i];
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0.0;
  for (int i = 0; i < count; ++i) total = total + shared[i];
  *result = static_cast<float>(total);
}

int blocksFor(int64_t n) {
  const int64_t perBlock = 8192;
  const int64_t blocks = n <= perBlock ? 1 : (n + perBlock - 1) / perBlock;
  return static_cast<int>(blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

template <typename T>
int sumOfSquares(const void *x, int64_t n, float *result, double *workspace, cudaStream_t stream) {
  int head = itemsToAlignment(x, sizeof(T));
  if (head > n) head = static_cast<int>(n);
  const int blocks = blocksFor(n);
  MSZ_LAUNCH(partialSums<T>, blocks, kThreads, stream, static_cast<const T *>(x), n, head, workspace);
  MSZ_LAUNCH(addPartials, 1, kThreads, stream, workspace, blocks, result);
  return cudaGetLastError() == cudaSuccess ? kDone : kDeviceRefused;
}

int dispatch(const void *x, int dtype, int64_t n, float *result, double *workspace, cudaStream_t stream) {
  if (n < 0) return kBadLength;
  if (result == nullptr || workspace == nullptr || (x == nullptr && n > 0)) return kNullPointer;
  switch (dtype) {
    case kFp32: return sumOfSquares<float>(x, n, result, workspace, stream);
    case kFp16: return sumOfSquares<Half>(x, n, result, workspace, stream);
    case kBf16: return sumOfSquares<Bfloat16>(x, n, result, workspace, stream);
    default: return kBadDtype;
  }
}

}  // namespace
}  // namespace msz

MSZ_API int msz_cuda_sum_of_squares(const void *x, int dtype, int64_t n, float *result, double *workspace,
                                    void *stream) {
  return msz::dispatch(x, dtype, n, result, workspace, static_cast<cudaStream_t>(stream));
}

// MindSpore's `aot` interface: x, result fp32 [1], workspace fp64 [1024]. 0 for success.
MSZ_API int SumOfSquaresAot(int nparam, void **params, int *ndims, int64_t **shapes, const char **dtypes,
                            void *stream, void * /*extra*/) {
  if (nparam != 3) return 1;
  int64_t n = 1, room = 1;
  for (int i = 0; i < ndims[0]; ++i) n *= shapes[0][i];
  for (int i = 0; i < ndims[2]; ++i) room *= shapes[2][i];
  if (room < msz::kMaxBlocks || strcmp(dtypes[1], "float32") != 0 || strcmp(dtypes[2], "float64") != 0) return 2;
  int dtype = -1;
  if (strcmp(dtypes[0], "float32") == 0) dtype = msz::kFp32;
  if (strcmp(dtypes[0], "float16") == 0) dtype = msz::kFp16;
  if (strcmp(dtypes[0], "bfloat16") == 0) dtype = msz::kBf16;
  const int status = msz::dispatch(params[0], dtype, n, static_cast<float *>(params[1]),
                                   static_cast<double *>(params[2]), static_cast<cudaStream_t>(stream));
  return status == msz::kDone ? 0 : 3;
}
