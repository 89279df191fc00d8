// What a stable grouping of edges by row needs besides a sort.
#pragma once

#include "cuda/device.cuh"

namespace gsp::cuda {

// keys[j] and values[j] = j of a key vector of any stride.
template <typename Key, typename Index>
__global__ void __launch_bounds__(kThreads)
    number_keys(const Key* key, int64_t stride, int64_t edges, Index* keys, Index* values) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= edges) return;
  keys[j] = Index(key[j * stride]);
  values[j] = Index(j);
}

// rowptr of sorted keys, by bisection: no run of empty rows is one thread's work.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    find_rowptr(const Index* keys, int64_t edges, int64_t rows, Index* rowptr) {
  const int64_t row = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (row > rows) return;
  int64_t low = 0, high = edges;  // the first key that is not below `row`
  while (low < high) {
    const int64_t mid = (low + high) / 2;
    if (int64_t(keys[mid]) < row) {
      low = mid + 1;
    } else {
      high = mid;
    }
  }
  rowptr[row] = Index(low);
}

}  // namespace gsp::cuda
