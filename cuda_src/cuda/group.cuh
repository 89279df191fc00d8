// What a grouping by sorting does around the library's sort, which takes a part of the edges at a
// time: so no scratch is as long as they are.
#pragma once

#include <type_traits>

#include "cuda/device.cuh"

namespace gsp::cuda {

// Numbers of edges of each row.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    count_rows(const Index* key, int64_t edges, Index* count) {
  using Word = std::conditional_t<sizeof(Index) == 8, unsigned long long, unsigned>;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x; j < edges; j += step) {
    atomicAdd(reinterpret_cast<Word*>(count + key[j]), Word(1));
  }
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) number(Index edges, Index* ids) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j < edges) ids[j] = Index(j);
}

// Of the edges of a part, sorted by key: how far each row's are from their places, the first of
// which is next[row].
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    find_shifts(const Index* sorted, Index edges, const Index* next, Index* shift) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= edges) return;
  const Index row = sorted[j];
  if (j == 0 || sorted[j - 1] != row) shift[row] = next[row] - Index(j);
}

// Takes them there; `ids` are their numbers in the part, which begins with edge `first`.
template <typename Index>
__global__ void __launch_bounds__(kThreads)
    place_edges(const Index* sorted, const Index* ids, Index edges, Index first, const Index* other,
                const Index* shift, Index* next, Index* perm, Index* col) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= edges) return;
  const Index row = sorted[j], edge = first + ids[j], place = shift[row] + Index(j);
  perm[place] = edge;
  col[place] = other[edge];
  if (j + 1 == edges || sorted[j + 1] != row) next[row] = place + 1;
}

}  // namespace gsp::cuda
