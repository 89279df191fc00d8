// A dot product per edge: the gradient of an edge weight, and attention scores.
//
// A group of lanes takes kRun consecutive edges, so that work is even whatever the degrees; it
// finds the row of its first edge by bisection and walks on. Every edge is one group's own, so
// nothing is shared and nothing is atomic.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

template <typename T, typename Index>
struct EdgeDotArgs {
  const Index* rowptr;
  const Index* col;
  const Index* perm;
  const T* weight;
  const T* a;
  const T* b;
  const Index* arg;  // EdgeOp::kArg: winning edge of each element of a
  const T* best;     // EdgeOp::kTie: result that a message has to equal
  const T* edge;     // EdgeOp::kMessage: a row an edge, in the caller's order
  T* out;
  int64_t a_stride;
  int64_t b_stride;
  int64_t edge_stride;
  int64_t rows;
  int64_t edges;
  int width;
  int heads;
  int head_width;
  int log_lanes;
};

enum class Pick { kAll, kArg, kTie, kMessage };

template <typename T, typename Index, int kVec, Pick kPick>
__global__ void __launch_bounds__(kThreads, 2) edge_dot(EdgeDotArgs<T, Index> p) {
  using Acc = acc_t<T>;
  constexpr int kRun = 16;  // edges a group
  // Of them in flight.
  constexpr int kUnroll = sizeof(Index) == 8 ? 1 : kPick == Pick::kMessage ? 2 : 4;
  const int lanes = 1 << p.log_lanes, lane = int(threadIdx.x) & (lanes - 1);
  const int64_t group = (int64_t(blockIdx.x) * kThreads + threadIdx.x) >> p.log_lanes;
  const int64_t first = group * kRun, end = first + kRun < p.edges ? first + kRun : p.edges;
  // Every lane of the warp stays to the end: the shuffles need all of them.
  int64_t low = 0, high = p.rows;  // the last row that begins at or before `first`
  if (first < end) {
    while (high - low > 1) {
      const int64_t mid = (low + high) / 2;
      if (int64_t(p.rowptr[mid]) <= first) {
        low = mid;
      } else {
        high = mid;
      }
    }
  }
  for (int64_t j = first; j < first + kRun; j += kUnroll) {
    int64_t row[kUnroll], col[kUnroll];
    Index id[kUnroll];
    bool ok[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      ok[u] = j + u < end;
      row[u] = col[u] = 0;
      id[u] = 0;
      if (ok[u]) {
        while (int64_t(p.rowptr[low + 1]) <= j + u) ++low;
        row[u] = low;
        col[u] = p.col[j + u];
        id[u] = p.perm == nullptr ? Index(j + u) : p.perm[j + u];
      }
    }
    for (int h = 0; h < p.heads; ++h) {
      Acc sum[kUnroll] = {};
      Acc w[kUnroll];
      if constexpr (kPick == Pick::kTie) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          w[u] = ok[u] && p.weight != nullptr ? widen<T>(p.weight[(j + u) * p.heads + h]) : Acc(1);
        }
      }
      const int stop = (h + 1) * p.head_width;
      for (int c = h * p.head_width + lane * kVec; c < stop; c += lanes * kVec) {
        Vec<T, kVec> a[kUnroll], b[kUnroll], own[kPick == Pick::kMessage ? kUnroll : 1];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (!ok[u]) continue;
          a[u] = load<T, kVec>(p.a + row[u] * p.a_stride + c);
          b[u] = load<T, kVec>(p.b + col[u] * p.b_stride + c);
          if constexpr (kPick == Pick::kMessage)
            own[u] = load_once_if<T, kVec>(true, p.edge + int64_t(id[u]) * p.edge_stride + c);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          if (!ok[u]) continue;
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const Acc av = widen<T>(a[u].v[i]), bv = widen<T>(b[u].v[i]);
            if constexpr (kPick == Pick::kAll) {
              sum[u] += av * bv;
            } else if constexpr (kPick == Pick::kArg) {
              if (p.arg[row[u] * p.width + c + i] == id[u]) sum[u] += av * bv;
            } else if constexpr (kPick == Pick::kMessage) {
              const Acc message = bv + widen<T>(own[u].v[i]);
              sum[u] += av * (message <= Acc(0) ? Acc(0) : message);  // NaN stays
            } else {
              const Acc best = widen<T>(p.best[row[u] * p.width + c + i]);
              if (same(round_to<T>(w[u] * bv), best)) sum[u] += av * bv;
            }
          }
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        for (int d = lanes >> 1; d > 0; d >>= 1) sum[u] += __shfl_xor_sync(kFullMask, sum[u], d);
        if (ok[u] && lane == 0) p.out[int64_t(id[u]) * p.heads + h] = narrow<T>(sum[u]);
      }
    }
  }
}

}  // namespace gsp::cuda
