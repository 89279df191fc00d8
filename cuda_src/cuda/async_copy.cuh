// Copies to shared memory that a thread does not wait for (cp.async). In the emulation they are
// made at once.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

// kBytes (4, 8 or 16) of shared memory at `to`, of which the first `bytes` are loaded and the rest
// is 0. Of 16 the L1 cache keeps nothing.
template <int kBytes>
__device__ __forceinline__ void copy_async(void* to, const void* from, int bytes = kBytes) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "what cp.async copies");
#ifdef __CUDA_ARCH__
  const unsigned at = unsigned(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at), "l"(from), "n"(kBytes),
                 "r"(bytes)
                 : "memory");
  }
#else
  char* const p = static_cast<char*>(to);
  for (int i = 0; i < kBytes; ++i) p[i] = i < bytes ? static_cast<const char*>(from)[i] : char(0);
#endif
}

// What was copied since the last call is one batch.
__device__ __forceinline__ void end_batch() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Until all batches of this thread but the last kLeft are there.
template <int kLeft>
__device__ __forceinline__ void wait_for_batches() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}

__device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

}  // namespace gsp::cuda
