// Grouping edges by row: by counting where they are few, else by a radix sort.
#include <cub/device/device_radix_sort.cuh>

#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

namespace {

int bits_of(int64_t rows) {
  int bits = 1;
  while ((int64_t(1) << bits) < rows) ++bits;
  return bits;
}

template <typename Index>
__global__ void __launch_bounds__(kThreads) number(int64_t edges, Index* ids) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j < edges) ids[j] = Index(j);
}

template <typename Index>
__global__ void __launch_bounds__(kThreads)
    gather(const Index* from, const Index* perm, int64_t edges, Index* to) {
  const int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (j < edges) to[j] = from[perm[j]];
}

// Keys and the edges' numbers from one buffer to the other and back, so that no more is held than
// the results and two copies of the keys: scratch is these and what the library needs itself.
template <typename Index>
struct Buffers {
  cub::DoubleBuffer<Index> keys, numbers;
};

template <typename Index>
cudaError_t sort(const Grouping& p, Buffers<Index>& b, void* temporary, size_t& bytes,
                 cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, b.keys, b.numbers, p.edges, 0,
                                         bits_of(p.rows), stream);
}

template <typename Index>
cudaError_t group_by_sorting(const Grouping& p, cudaStream_t stream) {
  const unsigned blocks = unsigned((p.edges + kThreads - 1) / kThreads);
  auto* keys = static_cast<Index*>(p.scratch);
  auto* perm = static_cast<Index*>(p.perm);
  auto* col = static_cast<Index*>(p.col);
  const size_t each = size_t(p.edges) * sizeof(Index);
  const Index* sorted = keys;
  if (p.edges > 0) {
    cudaError_t error = cudaMemcpyAsync(keys, p.key, each, cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
    GSP_LAUNCH((number<Index>), blocks, stream, p.edges, perm);
    Buffers<Index> b{{keys, keys + p.edges}, {perm, col}};
    size_t bytes = size_t(p.scratch_bytes) - 2 * each;
    error = sort<Index>(p, b, keys + 2 * p.edges, bytes, stream);
    if (error != cudaSuccess) return error;
    sorted = b.keys.Current();
    if (b.numbers.Current() != perm) {  // after an odd number of passes
      error = cudaMemcpyAsync(perm, col, each, cudaMemcpyDeviceToDevice, stream);
      if (error != cudaSuccess) return error;
    }
    GSP_LAUNCH((gather<Index>), blocks, stream, static_cast<const Index*>(p.other), perm, p.edges,
               col);
  }
  return find_rowptr(p.wide_index, sorted, p.edges, p.rows, p.rowptr, stream);
}

template <typename Index>
cudaError_t sorting_bytes(const Grouping& p, int64_t* bytes) {
  size_t needed = 0;
  Buffers<Index> none;
  const cudaError_t error = sort<Index>(p, none, nullptr, needed, nullptr);
  *bytes = int64_t(needed + 2 * size_t(p.edges) * sizeof(Index));
  return error;
}

}  // namespace

cudaError_t group_bytes(const Grouping& p, int64_t* bytes) {
  if (can_count(p)) {
    *bytes = counting_bytes(p);
    return cudaSuccess;
  }
  return p.wide_index ? sorting_bytes<int64_t>(p, bytes) : sorting_bytes<int>(p, bytes);
}

cudaError_t group(const Grouping& p, cudaStream_t stream) {
  if (can_count(p)) return group_by_counting(p, stream);
  return p.wide_index ? group_by_sorting<int64_t>(p, stream) : group_by_sorting<int>(p, stream);
}

}  // namespace gsp::cuda
