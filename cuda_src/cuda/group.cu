#include <cub/device/device_radix_sort.cuh>

#include "cuda/group.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

namespace {

template <typename Index>
cub::DoubleBuffer<Index> buffer(void* a, void* b) {
  return {static_cast<Index*>(a), static_cast<Index*>(b)};
}

int bits_of(int64_t rows) {
  int bits = 1;
  while ((int64_t(1) << bits) < rows) ++bits;
  return bits;
}

template <typename Index>
cudaError_t sort(const Group& p, void* temporary, size_t& bytes, Index*& keys, Index*& values,
                 cudaStream_t stream) {
  auto k = buffer<Index>(p.keys, p.more_keys);
  auto v = buffer<Index>(p.values, p.more_values);
  const cudaError_t error =
      cub::DeviceRadixSort::SortPairs(temporary, bytes, k, v, p.edges, 0, bits_of(p.rows), stream);
  keys = k.Current();
  values = v.Current();
  return error;
}

template <typename Key, typename Index>
cudaError_t run(const Group& p, cudaStream_t stream) {
  const auto blocks = [](int64_t n) { return unsigned((n + kThreads - 1) / kThreads); };
  Index *keys = nullptr, *values = nullptr;
  if (p.edges > 0) {
    GSP_LAUNCH((number_keys<Key, Index>), blocks(p.edges), stream, static_cast<const Key*>(p.key),
               p.key_stride, p.edges, static_cast<Index*>(p.keys), static_cast<Index*>(p.values));
    size_t bytes = p.temporary_bytes;
    const cudaError_t error = sort<Index>(p, p.temporary, bytes, keys, values, stream);
    if (error != cudaSuccess) return error;
    // The sort ends in either buffer; the caller reads the first.
    if (values != p.values) {
      const cudaError_t copied = cudaMemcpyAsync(p.values, values, p.edges * sizeof(Index),
                                                 cudaMemcpyDeviceToDevice, stream);
      if (copied != cudaSuccess) return copied;
    }
  }
  GSP_LAUNCH((find_rowptr<Index>), blocks(p.rows + 1), stream, keys, p.edges, p.rows,
             static_cast<Index*>(p.rowptr));
  return cudaGetLastError();
}

}  // namespace

cudaError_t group_bytes(const Group& p, int64_t* bytes) {
  size_t needed = 0;
  cudaError_t error;
  if (p.wide_index) {
    int64_t *keys, *values;
    error = sort<int64_t>(p, nullptr, needed, keys, values, nullptr);
  } else {
    int *keys, *values;
    error = sort<int>(p, nullptr, needed, keys, values, nullptr);
  }
  *bytes = int64_t(needed);
  return error;
}

cudaError_t group(const Group& p, cudaStream_t stream) {
  if (p.wide_index) {
    return p.wide_key ? run<int64_t, int64_t>(p, stream) : run<int, int64_t>(p, stream);
  }
  return p.wide_key ? run<int64_t, int>(p, stream) : run<int, int>(p, stream);
}

}  // namespace gsp::cuda
