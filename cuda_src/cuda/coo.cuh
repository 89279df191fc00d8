// From an edge list to CSR: checking and copying it, comparing it with a copy, and grouping the
// edges of small graphs by counting.
#pragma once

#include "common/row_scale.h"
#include "cuda/device.cuh"

namespace gsp::cuda {

// What check_coo leaves behind, one word: the complement of the first bad edge, a position below
// kUnsorted; else 0, or the bit kUnsorted where dst decreases somewhere.
using Fact = unsigned long long;
constexpr Fact kUnsorted = Fact(1) << 62;

// `fact` starts as 0. The copies of indices that are out of range mean nothing, but are in range
// themselves. With `count`, zeros, it also does what count_keys does, before the answer is known:
// by row, and with `count_t` by column.
template <typename Key, typename Index>
__global__ void __launch_bounds__(kThreads)
    check_coo(const Key* dst, const Key* src, int64_t dst_stride, int64_t src_stride, int64_t edges,
              int64_t num_dst, int64_t num_src, Index* own_dst, Index* own_src, Fact* fact,
              int* count, int* rank, int* count_t, int* rank_t) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  bool falls = false;
  for (int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x; j < edges; j += step) {
    const int64_t d = dst[j * dst_stride], s = src[j * src_stride];
    const bool good = d >= 0 && d < num_dst && s >= 0 && s < num_src;
    const Index row = good ? Index(d) : Index(0), column = good ? Index(s) : Index(0);
    own_dst[j] = row;
    own_src[j] = column;
    if (!good) atomicMax(fact, ~Fact(j));
    if (count != nullptr) rank[j] = atomicAdd(&count[row], 1);
    if (count_t != nullptr) rank_t[j] = atomicAdd(&count_t[column], 1);
    falls |= j > 0 && int64_t(dst[(j - 1) * dst_stride]) > d;
  }
  if (__syncthreads_or(falls) && threadIdx.x == 0) atomicOr(fact, kUnsorted);
}

// Clears *fact where two vectors differ.
template <typename A, typename B>
__global__ void __launch_bounds__(kThreads)
    compare(const A* a, const B* b, int64_t a_stride, int64_t b_stride, int64_t size, Fact* fact) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  bool differs = false;
  for (int64_t j = int64_t(blockIdx.x) * kThreads + threadIdx.x; j < size; j += step) {
    differs |= int64_t(a[j * a_stride]) != int64_t(b[j * b_stride]);
  }
  if (differs) *fact = 0;
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

// A warp for each row; see RowScales.
template <typename Index, typename Scalar>
__global__ void __launch_bounds__(kThreads)
    row_scales(const Index* rowptr, const Index* col, int64_t rows, bool inverse, Scalar* scale,
               Scalar* own) {
  const int64_t row = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> 5;
  const int lane = int(threadIdx.x) & 31;
  if (row >= rows) return;
  const int64_t begin = rowptr[row], end = rowptr[row + 1];
  int64_t loops = 0;
  if (own != nullptr) {
    for (int64_t j = begin + lane; j < end; j += 32) loops += int64_t(col[j]) == row;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) loops += __shfl_xor_sync(kFullMask, loops, d);
  }
  if (lane != 0) return;
  const RowScale<Scalar> found(inverse, own != nullptr, end - begin, loops);
  scale[row] = found.scale;
  if (own != nullptr) own[row] = found.own;
}

// ---- Grouping by counting. Edges find places within their row in any order, then each row is put
// in order: five short launches, where a radix sort takes about a dozen.

constexpr int kScanRows = 4;     // rows of a thread
constexpr int kLongRow = 1024;   // edges; longer rows are not put in order but collected anew
constexpr int kCollectKeys = 8;  // keys of a thread at a time
static_assert(kLongRow >= kThreads, "at most one long row may begin among the slots of a block");

__global__ void __launch_bounds__(kThreads)
    count_keys(const int* key, int edges, int* count, int* rank) {
  const int j = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (j < edges) rank[j] = atomicAdd(&count[key[j]], 1);
}

// The sum of `value` over the threads before this one; `total` is that over all.
inline __device__ int scan_block(int value, int* sums, int& total) {
  const int lane = int(threadIdx.x) & 31, warp = int(threadIdx.x) >> 5;
  int upto = value;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kFullMask, upto, d);
    if (lane >= d) upto += below;
  }
  __syncthreads();  // the sums of the last call have been read
  if (lane == 31) sums[warp] = upto;
  __syncthreads();
  int before = upto - value;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) before += sums[w];
    total += sums[w];
  }
  return before;
}

struct Counted {
  const int* count;  // [rows]
  int rows;
  int* rowptr;
};

// rowptr from the number of edges of each row, for up to two groupings, by y. Every block adds up
// all counts before its own: cheaper than another launch while they are few.
__global__ void __launch_bounds__(kThreads) scan_counts(Counted one, Counted two) {
  __shared__ int sums[kWarps];
  const Counted p = blockIdx.y == 0 ? one : two;
  const int* count = p.count;
  const int rows = p.rows;
  int* rowptr = p.rowptr;
  const int first = int(blockIdx.x) * kThreads * kScanRows;
  if (first > rows) return;  // this one of the two has fewer
  int earlier = 0;
  for (int i = int(threadIdx.x); i < first; i += kThreads) earlier += count[i];
  int begin = 0;  // of this block's rows
  scan_block(earlier, sums, begin);
  const int row = first + int(threadIdx.x) * kScanRows;
  int own[kScanRows], mine = 0, total = 0;
#pragma unroll
  for (int k = 0; k < kScanRows; ++k) {
    own[k] = row + k < rows ? count[row + k] : 0;
    mine += own[k];
  }
  int at = begin + scan_block(mine, sums, total);
#pragma unroll
  for (int k = 0; k < kScanRows; ++k) {
    if (row + k <= rows) rowptr[row + k] = at;
    at += own[k];
  }
}

__global__ void __launch_bounds__(kThreads)
    deal_edges(const int* key, const int* rank, const int* rowptr, int edges, int* slot) {
  const int j = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (j < edges) slot[rowptr[key[j]] + rank[j]] = j;
}

// The edges of one row, by a block that looks at all of them in order.
inline __device__ void collect_row(const int* key, const int* other, int edges, int row, int begin,
                                   int end, int* perm, int* col, int* sums) {
  int at = begin;
  for (int tile = 0; at < end; tile += kThreads * kCollectKeys) {
    const int first = tile + int(threadIdx.x) * kCollectKeys;
    unsigned hits = 0;
#pragma unroll
    for (int k = 0; k < kCollectKeys; ++k) {
      if (first + k < edges && key[first + k] == row) hits |= 1u << k;
    }
    int total = 0;
    int place = at + scan_block(__popc(hits), sums, total);
#pragma unroll
    for (int k = 0; k < kCollectKeys; ++k) {
      if (hits >> k & 1) {
        perm[place] = first + k;
        col[place++] = other[first + k];
      }
    }
    at += total;
  }
}

// A thread for each slot: the place of its edge is the number of edges of the row that come before.
__global__ void __launch_bounds__(kThreads)
    order_rows(const int* key, const int* other, const int* rowptr, const int* slot, int edges,
               int* perm, int* col) {
  __shared__ int long_row;
  __shared__ int sums[kWarps];
  if (threadIdx.x == 0) long_row = -1;
  __syncthreads();
  const int p = int(blockIdx.x) * kThreads + int(threadIdx.x);
  if (p < edges) {
    const int edge = slot[p], row = key[edge], begin = rowptr[row], end = rowptr[row + 1];
    if (end - begin <= kLongRow) {
      int place = begin;
      for (int q = begin; q < end; ++q) place += slot[q] < edge;
      perm[place] = edge;
      col[place] = other[edge];
    } else if (p == begin) {
      long_row = row;
    }
  }
  __syncthreads();
  if (long_row >= 0) {
    collect_row(key, other, edges, long_row, rowptr[long_row], rowptr[long_row + 1], perm, col,
                sums);
  }
}

}  // namespace gsp::cuda
