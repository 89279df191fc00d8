// Grouping edges by row: by counting where they are few, else by a radix sort of one part of them
// after the other.
#include <algorithm>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include "cuda/group.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

namespace {

// Enough for a large GPU; of more edges a sixteenth, so that scratch is a quarter of a result.
constexpr int64_t kLeastPart = 1 << 20;

int bits_of(int64_t rows) {
  int bits = 1;
  while ((int64_t(1) << bits) < rows) ++bits;
  return bits;
}

// What scratch holds, in this order; then what the library needs.
template <typename Index>
struct Parts {
  explicit Parts(const Grouping& p)
      : rows(p.rows),
        part(std::min(p.edges, std::max(kLeastPart, (p.edges + 15) / 16))),
        next(static_cast<Index*>(p.scratch)),
        shift(next + p.rows),
        keys{shift + p.rows, shift + p.rows + part},
        ids{shift + p.rows + 2 * part, shift + p.rows + 3 * part},
        rest(shift + p.rows + 4 * part) {}

  int64_t bytes() const { return (2 * rows + 4 * part) * int64_t(sizeof(Index)); }

  int64_t rows;
  int64_t part;  // edges that are sorted at a time
  Index* next;   // of each row, the place of its next edge
  Index* shift;
  Index* keys[2];
  Index* ids[2];
  Index* rest;
};

template <typename Index>
cudaError_t sort(const Grouping& p, cub::DoubleBuffer<Index>& keys, cub::DoubleBuffer<Index>& ids,
                 Index edges, void* temporary, size_t& bytes, cudaStream_t stream) {
  return cub::DeviceRadixSort::SortPairs(temporary, bytes, keys, ids, edges, 0, bits_of(p.rows),
                                         stream);
}

template <typename Index>
cudaError_t scan(const Grouping& p, Index* count, void* temporary, size_t& bytes,
                 cudaStream_t stream) {
  return cub::DeviceScan::InclusiveSum(temporary, bytes, count, count, p.rows, stream);
}

template <typename Index>
cudaError_t group_by_sorting(const Grouping& p, cudaStream_t stream) {
  const Parts<Index> s(p);
  const auto* key = static_cast<const Index*>(p.key);
  auto* rowptr = static_cast<Index*>(p.rowptr);
  size_t bytes = size_t(p.scratch_bytes - s.bytes());
  cudaError_t error = cudaMemsetAsync(rowptr, 0, (p.rows + 1) * sizeof(Index), stream);
  if (error != cudaSuccess || p.edges == 0) return error;
  GSP_LAUNCH((count_rows<Index>), std::min(blocks_of(p.edges), 1u << 14), stream, key, p.edges,
             rowptr + 1);
  error = scan<Index>(p, rowptr + 1, s.rest, bytes, stream);
  if (error != cudaSuccess) return error;
  error = cudaMemcpyAsync(s.next, rowptr, p.rows * sizeof(Index), cudaMemcpyDeviceToDevice, stream);
  for (int64_t first = 0; first < p.edges && error == cudaSuccess; first += s.part) {
    const Index edges = Index(std::min(s.part, p.edges - first));
    const unsigned blocks = blocks_of(edges);
    error = cudaMemcpyAsync(s.keys[0], key + first, size_t(edges) * sizeof(Index),
                            cudaMemcpyDeviceToDevice, stream);
    if (error != cudaSuccess) return error;
    GSP_LAUNCH((number<Index>), blocks, stream, edges, s.ids[0]);
    cub::DoubleBuffer<Index> keys(s.keys[0], s.keys[1]), ids(s.ids[0], s.ids[1]);
    bytes = size_t(p.scratch_bytes - s.bytes());
    error = sort<Index>(p, keys, ids, edges, s.rest, bytes, stream);
    if (error != cudaSuccess) return error;
    GSP_LAUNCH((find_shifts<Index>), blocks, stream, keys.Current(), edges, s.next, s.shift);
    GSP_LAUNCH((place_edges<Index>), blocks, stream, keys.Current(), ids.Current(), edges,
               Index(first), static_cast<const Index*>(p.other), s.shift, s.next,
               static_cast<Index*>(p.perm), static_cast<Index*>(p.col));
  }
  return error;
}

template <typename Index>
cudaError_t sorting_bytes(const Grouping& p, int64_t* bytes) {
  const Parts<Index> s(p);
  size_t of_sort = 0, of_scan = 0;
  cub::DoubleBuffer<Index> none;
  cudaError_t error = sort<Index>(p, none, none, Index(s.part), nullptr, of_sort, nullptr);
  if (error == cudaSuccess) error = scan<Index>(p, nullptr, nullptr, of_scan, nullptr);
  *bytes = s.bytes() + int64_t(std::max(of_sort, of_scan));
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
