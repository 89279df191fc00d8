// What device code may use, under nvcc and under the CPU emulation of tests/emu.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "common/reducer.h"
#include "common/types.h"

// The one way a kernel is launched; under the emulation of tests/emu it runs to its end on the CPU.
#ifdef __CUDACC__
#define GSP_LAUNCH_SHARED(kernel, grid, threads, shared, stream, ...) \
  kernel<<<grid, threads, shared, stream>>>(__VA_ARGS__)
#define GSP_DYNAMIC_SHARED(T, name)                                    \
  extern __shared__ __align__(128) unsigned char gsp_dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(gsp_dynamic_shared)
#else
#define GSP_LAUNCH_SHARED(kernel, grid, threads, shared, stream, ...)                            \
  (void)stream, emu::launch(kernel, dim3(grid), dim3(threads), emu::SharedBytes{size_t(shared)}, \
                            __VA_ARGS__)
#endif
#define GSP_LAUNCH_BLOCKS(kernel, grid, threads, stream, ...) \
  GSP_LAUNCH_SHARED(kernel, grid, threads, 0, stream, __VA_ARGS__)
#define GSP_LAUNCH(kernel, grid, stream, ...) \
  GSP_LAUNCH_BLOCKS(kernel, grid, kThreads, stream, __VA_ARGS__)

namespace gsp::cuda {

constexpr int kLogThreads = 8;
constexpr int kThreads = 1 << kLogThreads;  // of a block, where nothing else is said
constexpr int kLogItemThreads = 7;
constexpr int kItemThreads =
    1 << kLogItemThreads;  // short blocks: they end when their longest item does
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullMask = 0xffffffffu;

inline unsigned blocks_of(int64_t threads) { return unsigned((threads + kThreads - 1) / kThreads); }

// Pins a value to its register at this point. The compiler would rather compute what a loop needs
// anew in every round, and what is needed after a loop before it.
template <typename V>
__device__ __forceinline__ void keep(V& value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(V) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
#else
  (void)value;
#endif
}

// run(value of the element type that `dtype` names).
template <typename Run>
cudaError_t with_dtype(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::kFloat32:
      return run(float{});
    case Dtype::kFloat64:
      return run(double{});
    case Dtype::kFloat16:
      return run(__half{});
    case Dtype::kBFloat16:
      return run(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace gsp::cuda
