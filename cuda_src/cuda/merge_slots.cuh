// Partial sums in scratch, added in a fixed order.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

// A block adds up kMergeLanes vectors of columns: its groups take every kMergeGroups-th partial
// sum, and are then added up in order.
constexpr int kMergeLanes = 8, kMergeGroups = kThreads / kMergeLanes;

// The sum of partial sums `first` to `end`, `stride` elements apart, of kVec columns from `from`
// on, in the threads for which it returns true.
template <typename Acc, int kVec>
__device__ __forceinline__ bool add_slots(const Acc* from, int first, int end, int64_t stride,
                                          bool active, Acc (&sum)[kVec]) {
  constexpr int kInFlight = 4;
  __shared__ Acc part[kMergeGroups][kMergeLanes][kVec];
  const int lane = int(threadIdx.x) % kMergeLanes, group = int(threadIdx.x) / kMergeLanes;
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = Acc(0);
  for (int slot = first + group; slot < end; slot += kMergeGroups * kInFlight) {
    Vec<Acc, kVec> v[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
      const int64_t at = slot + u * kMergeGroups;
      v[u] = load_wide_if<Acc, kVec>(active && at < end, from + at * stride);
    }
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += v[u].v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) part[group][lane][i] = sum[i];
  __syncthreads();
  if (group != 0 || !active) return false;
#pragma unroll 1
  for (int g = 1; g < kMergeGroups; ++g) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] += part[g][lane][i];
  }
  return true;
}

}  // namespace gsp::cuda
