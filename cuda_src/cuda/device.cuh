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
#define GSP_LAUNCH(kernel, grid, stream, ...) kernel<<<grid, kThreads, 0, stream>>>(__VA_ARGS__)
#else
#define GSP_LAUNCH(kernel, grid, stream, ...) \
  (void)stream, emu::launch(kernel, dim3(grid), dim3(kThreads), __VA_ARGS__)
#endif

namespace gsp::cuda {

constexpr int kLogThreads = 8;
constexpr int kThreads = 1 << kLogThreads;  // of every block
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullMask = 0xffffffffu;

// What is computed from `v` after this is computed there and not earlier: a hot loop that comes
// before needs its registers for itself.
template <typename V>
__device__ __forceinline__ void not_earlier(V& v) {
#ifdef __CUDACC__
  if constexpr (sizeof(V) == 8) {
    asm volatile("" : "+l"(v));
  } else {
    asm volatile("" : "+r"(v));
  }
#else
  (void)v;
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
