#include <algorithm>

#include "cuda/coo.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

namespace {

// For kernels whose threads take one element after another.
unsigned some_blocks(int64_t threads) {
  return blocks_of(std::min<int64_t>(threads, 4096 * kThreads));
}

// The scratch of a grouping by counting.
struct Counts {
  explicit Counts(const Grouping& p)
      : fact(static_cast<Fact*>(p.scratch)),
        count(reinterpret_cast<int*>(fact + 1)),
        rank(count + p.rows),
        slot(rank + p.edges) {}
  Fact* fact;  // of check_coo, cleared together with `count`
  int* count;
  int* rank;
  int* slot;
};

cudaError_t scan(const Grouping& p, cudaStream_t stream) {
  GSP_LAUNCH(scan_counts, unsigned(p.rows / (kThreads * kScanRows) + 1), stream, Counts(p).count,
             int(p.rows), static_cast<int*>(p.rowptr));
  return cudaGetLastError();
}

template <typename Key, typename Index>
void check(const CheckCoo& p, cudaStream_t stream) {
  GSP_LAUNCH((check_coo<Key, Index>), some_blocks(p.edges), stream, static_cast<const Key*>(p.dst),
             static_cast<const Key*>(p.src), p.dst_stride, p.src_stride, p.edges, p.num_dst,
             p.num_src, static_cast<Index*>(p.own_dst), static_cast<Index*>(p.own_src),
             static_cast<Fact*>(p.fact), p.grouping ? Counts(*p.grouping).count : nullptr,
             p.grouping ? Counts(*p.grouping).rank : nullptr);
}

template <typename Index, typename Scalar>
void scales_as(const RowScales& p, cudaStream_t stream) {
  GSP_LAUNCH((row_scales<Index, Scalar>), blocks_of(p.rows * 32), stream,
             static_cast<const Index*>(p.rowptr), static_cast<const Index*>(p.col), p.rows,
             p.inverse, static_cast<Scalar*>(p.scale), static_cast<Scalar*>(p.own));
}

template <typename A, typename B>
void compare_as(const Compare& p, cudaStream_t stream) {
  GSP_LAUNCH((compare<A, B>), some_blocks(p.size), stream, static_cast<const A*>(p.a),
             static_cast<const B*>(p.b), p.a_stride, p.b_stride, p.size,
             reinterpret_cast<Fact*>(p.fact));
}

}  // namespace

cudaError_t check_coo(const CheckCoo& p, cudaStream_t stream) {
  const size_t counts = p.grouping != nullptr ? p.grouping->rows * sizeof(int) : 0;
  const cudaError_t error = cudaMemsetAsync(p.fact, 0, sizeof(Fact) + counts, stream);
  if (error != cudaSuccess || p.edges == 0) return error;
  if (p.wide_index) {
    p.wide_key ? check<int64_t, int64_t>(p, stream) : check<int, int64_t>(p, stream);
  } else {
    p.wide_key ? check<int64_t, int>(p, stream) : check<int, int>(p, stream);
  }
  return p.grouping != nullptr ? scan(*p.grouping, stream) : cudaGetLastError();
}

CooFacts read_fact(int64_t fact) {
  return {fact < 0 ? ~fact : -1, (static_cast<Fact>(fact) & kUnsorted) == 0};
}

cudaError_t compare(const Compare& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  if (p.wide_a) {
    p.wide_b ? compare_as<int64_t, int64_t>(p, stream) : compare_as<int64_t, int>(p, stream);
  } else {
    p.wide_b ? compare_as<int, int64_t>(p, stream) : compare_as<int, int>(p, stream);
  }
  return cudaGetLastError();
}

cudaError_t find_rowptr(bool wide_index, const void* key, int64_t edges, int64_t rows, void* rowptr,
                        cudaStream_t stream) {
  if (wide_index) {
    GSP_LAUNCH((find_rowptr<int64_t>), blocks_of(rows + 1), stream,
               static_cast<const int64_t*>(key), edges, rows, static_cast<int64_t*>(rowptr));
  } else {
    GSP_LAUNCH((find_rowptr<int>), blocks_of(rows + 1), stream, static_cast<const int*>(key), edges,
               rows, static_cast<int*>(rowptr));
  }
  return cudaGetLastError();
}

cudaError_t row_scales(const RowScales& p, cudaStream_t stream) {
  if (p.rows == 0) return cudaSuccess;
  if (p.wide_index) {
    p.precise ? scales_as<int64_t, double>(p, stream) : scales_as<int64_t, float>(p, stream);
  } else {
    p.precise ? scales_as<int, double>(p, stream) : scales_as<int, float>(p, stream);
  }
  return cudaGetLastError();
}

bool can_count(const Grouping& p) {
  return !p.wide_index && p.edges > 0 && p.rows > 0 && std::max(p.edges, p.rows) <= kMaxCounted;
}

int64_t counting_bytes(const Grouping& p) {
  return int64_t(sizeof(Fact)) + (p.rows + 2 * p.edges) * int64_t(sizeof(int));
}

cudaError_t finish_grouping(const Grouping& p, cudaStream_t stream) {
  const auto *key = static_cast<const int*>(p.key), *rowptr = static_cast<const int*>(p.rowptr);
  const Counts counts(p);
  const int edges = int(p.edges);
  GSP_LAUNCH(deal_edges, blocks_of(edges), stream, key, counts.rank, rowptr, edges, counts.slot);
  GSP_LAUNCH(order_rows, blocks_of(edges), stream, key, static_cast<const int*>(p.other), rowptr,
             counts.slot, edges, static_cast<int*>(p.perm), static_cast<int*>(p.col));
  return cudaGetLastError();
}

cudaError_t group_by_counting(const Grouping& p, cudaStream_t stream) {
  const Counts counts(p);
  cudaError_t error = cudaMemsetAsync(counts.count, 0, p.rows * sizeof(int), stream);
  if (error != cudaSuccess) return error;
  GSP_LAUNCH(count_keys, blocks_of(p.edges), stream, static_cast<const int*>(p.key), int(p.edges),
             counts.count, counts.rank);
  error = scan(p, stream);
  return error == cudaSuccess ? finish_grouping(p, stream) : error;
}

}  // namespace gsp::cuda
