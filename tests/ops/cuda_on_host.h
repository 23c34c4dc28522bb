// Runs a CUDA kernel on the host: thread blocks one after another, the threads of a block as fibers that change
// places at __syncthreads(). For the logic and the bits of a kernel; it says nothing about a GPU's speed.
#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define __global__
#define __shared__ static
#define __launch_bounds__(threads)
#define __grid_constant__
#define MSZ_LAUNCH(kernel, blocks, threads, stream, ...) \
  ::cuda_on_host::launch([&] { (kernel)(__VA_ARGS__); }, blocks, threads, stream)

using cudaStream_t = void *;
enum cudaError_t { cudaSuccess, cudaErrorLaunchFailure };

namespace cuda_on_host {
struct Index {
  uint32_t x = 0;
};
struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(64 * 1024);
  bool done = false;
};
struct State {
  Index thread, block, grid;
  ucontext_t scheduler;
  std::vector<Fiber> fibers;
  std::function<void()> kernel;
  cudaError_t error = cudaSuccess;
  int launches = 0;
};
inline State &state() {
  static State state;
  return state;
}
inline void runFiber() {
  State &s = state();
  s.kernel();
  s.fibers[s.thread.x].done = true;
  swapcontext(&s.fibers[s.thread.x].context, &s.scheduler);
}
// From one __syncthreads() to the next; a block where only some threads end is a fault.
inline void runBlock(uint32_t threads) {
  State &s = state();
  for (uint32_t i = 0; i < threads; ++i) {
    Fiber &fiber = s.fibers[i];
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, runFiber, 0);
  }
  for (uint32_t ended = 0; ended == 0;) {
    for (s.thread.x = 0; s.thread.x < threads; ++s.thread.x)
      swapcontext(&s.scheduler, &s.fibers[s.thread.x].context);
    for (uint32_t i = 0; i < threads; ++i) ended += s.fibers[i].done;
    if (ended != 0 && ended != threads) {
      s.error = cudaErrorLaunchFailure;
      return;
    }
  }
}
inline void launch(std::function<void()> kernel, uint32_t blocks, uint32_t threads, cudaStream_t) {
  State &s = state();
  ++s.launches;
  s.kernel = std::move(kernel);
  s.fibers.resize(threads);
  s.grid.x = blocks;
  for (s.block.x = 0; s.block.x < blocks; ++s.block.x) runBlock(threads);
}
inline void sync() {
  State &s = state();
  swapcontext(&s.fibers[s.thread.x].context, &s.scheduler);
}
inline void checkAligned(const void *address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    std::fprintf(stderr, "a vector access to an unaligned address\n");
    std::abort();
  }
}
}  // namespace cuda_on_host

#define threadIdx (::cuda_on_host::state().thread)
#define blockIdx (::cuda_on_host::state().block)
#define gridDim (::cuda_on_host::state().grid)
inline void __syncthreads() { cuda_on_host::sync(); }
inline cudaError_t cudaGetLastError() {
  cudaError_t error = cuda_on_host::state().error;
  cuda_on_host::state().error = cudaSuccess;
  return error;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
inline float hostHalfToFloat(uint16_t bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return static_cast<float>(value);
}
inline uint16_t hostFloatToHalf(float x) {
  _Float16 value = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &value, 2);
  return bits;
}
extern "C" inline __attribute__((used, visibility("default"))) int cuda_on_host_launches() {
  int launches = cuda_on_host::state().launches;
  cuda_on_host::state().launches = 0;
  return launches;
}
