// Launches a sum from staged sources.
#pragma once

#include <atomic>

#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/staged_spmm.cuh"

namespace gsp::cuda {

// More dynamic shared memory than 48 KB has to be asked for, once a device and kernel: kernels of
// one type are told apart by their arguments.
template <typename T, bool kWeighted>
cudaError_t allow_shared(int device, int bytes) {
  static std::atomic<uint64_t> allowed{0};  // a bit for each device
  const uint64_t bit = device < 64 ? uint64_t(1) << device : 0;
  if ((allowed.load(std::memory_order_relaxed) & bit) != 0) return cudaSuccess;
  const cudaError_t error = cudaFuncSetAttribute(
      staged_spmm<T, kWeighted>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) allowed.fetch_or(bit, std::memory_order_relaxed);
  return error;
}

template <typename T, bool kWeighted>
cudaError_t staged_of(const StagedSpmm& p, cudaStream_t stream) {
  constexpr int kChunk = Slab<T>::kChunk, kSlabThreads = Slab<T>::kThreads;
  StagedArgs<T> a{};
  const StagedGeometry& g = p.staged;
  a.order = static_cast<const int*>(p.stage);
  a.cut = a.order + p.rows;
  a.rowptr = static_cast<const int*>(p.rowptr);
  a.col = static_cast<const int*>(p.col);
  a.weight = static_cast<const T*>(p.weight);
  a.x = static_cast<const T*>(p.x);
  a.partial = g.parts > 1 ? static_cast<float*>(p.scratch) : nullptr;
  a.epilogue = epilogue_of<T>(p);
  a.x_stride = p.x_stride;
  a.rows = int(p.rows);
  a.cols = int(p.cols);
  a.width = p.width;
  a.blocks = p.blocks;
  a.sources = p.sources;
  a.team = g.team;
  a.wide_x = aligned(p.x, p.x_stride, kChunk, sizeof(T));
  a.wide_end = p.width % kChunk == 0 && can_finish(p, kChunk, sizeof(T));
  const cudaError_t error = allow_shared<T, kWeighted>(p.device, p.shared_bytes);
  if (error != cudaSuccess) return error;
  const unsigned grid = unsigned(int64_t(g.slabs) * g.parts * g.team);
  GSP_LAUNCH_SHARED((staged_spmm<T, kWeighted>), grid, kSlabThreads, g.shared_bytes, stream, a);
  if (a.partial != nullptr) {
    const int vec = a.wide_end ? kChunk : 1;
    const dim3 blocks(unsigned(divide_up(p.rows * (Slab<T>::kColumns / vec), kThreads)),
                      unsigned(g.slabs));
    if (a.wide_end) {
      GSP_LAUNCH((staged_fold<T, kChunk>), blocks, stream, a);
    } else {
      GSP_LAUNCH((staged_fold<T, 1>), blocks, stream, a);
    }
  }
  return cudaGetLastError();
}

}  // namespace gsp::cuda
