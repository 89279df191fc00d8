#include <algorithm>
#include <utility>

#include "cuda/coo.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

namespace {

// For kernels whose threads take one element after another.
unsigned some_blocks(int64_t threads) {
  return blocks_of(std::min<int64_t>(threads, 4096 * kThreads));
}

Counted counted(const Grouping* p) {
  if (p == nullptr) return {nullptr, 0, nullptr};
  return {p->count, int(p->rows), static_cast<int*>(p->rowptr)};
}

cudaError_t scan(const Grouping& p, const Grouping* other, cudaStream_t stream) {
  const int64_t rows = std::max(p.rows, other != nullptr ? other->rows : 0);
  const dim3 grid(unsigned(rows / (kThreads * kScanRows) + 1), other != nullptr ? 2 : 1);
  GSP_LAUNCH(scan_counts, grid, stream, counted(&p), counted(other));
  return cudaGetLastError();
}

template <typename Key, typename Index>
void check(const CheckCoo& p, cudaStream_t stream) {
  GSP_LAUNCH((check_coo<Key, Index>), some_blocks(p.edges), stream, static_cast<const Key*>(p.dst),
             static_cast<const Key*>(p.src), p.dst_stride, p.src_stride, p.edges, p.num_dst,
             p.num_src, static_cast<Index*>(p.own_dst), static_cast<Index*>(p.own_src),
             static_cast<Fact*>(p.fact), p.grouping ? p.grouping->count : nullptr,
             p.grouping ? p.grouping->rank : nullptr, p.transposed ? p.transposed->count : nullptr,
             p.transposed ? p.transposed->rank : nullptr);
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
  int64_t zeros = sizeof(Fact);
  if (p.grouping != nullptr) zeros = share_scratch(p.fact, *p.grouping, p.transposed);
  const cudaError_t error = cudaMemsetAsync(p.fact, 0, size_t(zeros), stream);
  if (error != cudaSuccess || p.edges == 0) return error;
  if (p.wide_index) {
    p.wide_key ? check<int64_t, int64_t>(p, stream) : check<int, int64_t>(p, stream);
  } else {
    p.wide_key ? check<int64_t, int>(p, stream) : check<int, int>(p, stream);
  }
  return p.grouping != nullptr ? scan(*p.grouping, p.transposed, stream) : cudaGetLastError();
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

int64_t counting_bytes(const Grouping& p, const Grouping& other) {
  return counting_bytes(p) + (other.rows + other.edges) * int64_t(sizeof(int));
}

int64_t share_scratch(void* scratch, Grouping& p, Grouping* other) {
  // What starts as 0 first; the slots of one are done with before the other needs them.
  int* next = reinterpret_cast<int*>(static_cast<Fact*>(scratch) + 1);
  const auto take = [&next](int64_t size) { return std::exchange(next, next + size); };
  p.count = take(p.rows);
  if (other != nullptr) other->count = take(other->rows);
  const auto zeros = reinterpret_cast<char*>(next) - static_cast<char*>(scratch);
  p.rank = take(p.edges);
  if (other != nullptr) other->rank = take(p.edges);
  p.slot = take(p.edges);
  if (other != nullptr) other->slot = p.slot;
  return zeros;
}

cudaError_t finish_grouping(const Grouping& p, cudaStream_t stream) {
  const auto *key = static_cast<const int*>(p.key), *rowptr = static_cast<const int*>(p.rowptr);
  const int edges = int(p.edges);
  GSP_LAUNCH(deal_edges, blocks_of(edges), stream, key, p.rank, rowptr, edges, p.slot);
  GSP_LAUNCH(order_rows, blocks_of(edges), stream, key, static_cast<const int*>(p.other), rowptr,
             p.slot, edges, static_cast<int*>(p.perm), static_cast<int*>(p.col));
  return cudaGetLastError();
}

cudaError_t group_by_counting(const Grouping& given, cudaStream_t stream) {
  Grouping p = given;
  const int64_t zeros = share_scratch(p.scratch, p, nullptr);
  cudaError_t error = cudaMemsetAsync(p.scratch, 0, size_t(zeros), stream);
  if (error != cudaSuccess) return error;
  GSP_LAUNCH(count_keys, blocks_of(p.edges), stream, static_cast<const int*>(p.key), int(p.edges),
             p.count, p.rank);
  error = scan(p, nullptr, stream);
  return error == cudaSuccess ? finish_grouping(p, stream) : error;
}

}  // namespace gsp::cuda
