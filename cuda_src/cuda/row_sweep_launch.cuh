// Chooses the instantiation and the geometry of a row sweep. Included by one .cu file per feature
// dtype.
#pragma once

#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/row_sweep.cuh"

namespace gsp::cuda {

// Whether `vec` elements can be moved at once everywhere.
inline bool can_move(const RowSweep& p, int vec, int64_t size) {
  return p.width % vec == 0 && (p.heads <= 1 || p.width / p.heads % vec == 0) &&
         aligned(p.x, p.x_stride, vec, size) && aligned(p.other, p.other_stride, vec, size) &&
         aligned(p.own, p.own_stride, vec, size) && can_finish(p, vec, size) &&
         aligned(p.edge, p.edge_stride, vec, size) && aligned(p.out_edge, p.width, vec, size) &&
         aligned(p.arg, p.width, vec, p.arg == nullptr ? 1 : int64_t(16) / vec);
}

template <typename T, typename Index>
SweepArgs<T, Index> typed(const RowSweep& p) {
  SweepArgs<T, Index> a{};
  a.rowptr = static_cast<const Index*>(p.rowptr);
  a.col = static_cast<const Index*>(p.col);
  a.perm = static_cast<const Index*>(p.perm);
  a.weight = static_cast<const T*>(p.weight);
  a.x = static_cast<const T*>(p.x);
  a.other = static_cast<const T*>(p.other);
  a.own = static_cast<const T*>(p.own);
  a.arg = static_cast<const Index*>(p.arg);
  a.src_scale = static_cast<const acc_t<T>*>(p.src_scale);
  a.edge = static_cast<const T*>(p.edge);
  a.out_edge = static_cast<T*>(p.out_edge);
  a.epilogue = epilogue_of<T>(p);
  a.out_arg = static_cast<Index*>(p.out_arg);
  a.x_stride = Index(p.x_stride * int64_t(sizeof(T)));
  a.other_stride = Index(p.other_stride * int64_t(sizeof(T)));
  a.edge_stride = Index(p.edge_stride * int64_t(sizeof(T)));
  a.own_stride = p.own_stride;
  a.rows = p.rows;
  a.zero_wins = p.zero_wins;
  a.sign = p.minimum ? acc_t<T>(-1) : acc_t<T>(1);
  a.width = p.width;
  a.heads = p.heads > 0 ? p.heads : 1;
  a.head_width = p.width / a.heads;
  a.long_row = p.long_row;
  a.chunk = p.chunk;
  a.items = static_cast<const int4*>(p.items);
  a.num_items = p.num_items;
  a.num_merges = p.num_merges;
  a.scratch = static_cast<acc_t<T>*>(p.scratch);
  a.scratch_arg = static_cast<Index*>(p.scratch_arg);
  return a;
}

// What is chosen where nothing is asked for.
template <typename T, int kVec, bool kCanFold>
Geometry geometry_of(const RowSweep& p) {
  const int64_t pieces = p.items == nullptr ? p.rows : p.num_items, stride = p.x_stride * sizeof(T);
  const bool lines = (reinterpret_cast<uintptr_t>(p.x) | uintptr_t(stride)) % 128 == 0;
  return choose_geometry({pieces, p.edges, p.cols, divide_up(p.width, kVec), kVec * sizeof(T),
                          p.l2_bytes, kCanFold, lines, p.longest});
}

// Rows straight from the CSR arrays.
template <template <typename, typename, int, int> class Op, typename T, typename Index, int kVec>
cudaError_t launch_rows(const RowSweep& p, cudaStream_t stream) {
  auto a = typed<T, Index>(p);
  const Geometry g = p.geometry.lanes != 0 ? p.geometry : geometry_of<T, kVec, false>(p);
  a.log_lanes = log2_ceil(g.lanes);
  a.log_parallel = log2_ceil(g.parallel);
  a.long_row *= g.parallel;  // a limit on the chain of gathers of a group
  const dim3 grid(unsigned(divide_up(p.rows, kThreads / (g.lanes * g.parallel))),
                  unsigned(divide_up(divide_up(p.width, kVec), g.lanes)));
  GSP_LAUNCH((row_sweep<Op<T, Index, kVec, 1>>), grid, stream, a);
  return cudaGetLastError();
}

template <template <typename, typename, int, int> class Op, typename T, int kVec>
cudaError_t launch_merges(const SweepArgs<T, int>& a, int64_t num_slots, cudaStream_t stream) {
  if (a.num_merges > 0) {
    // The more threads the shorter a hub's chain of loads; there are more of them than a GPU holds
    // only where rows have many pieces.
    constexpr int kLogMembers = 3, kManyPieces = 16;
    using Merging = typename Op<T, int, kVec, 1>::Merging;
    const int64_t vectors = a.num_merges * divide_up(a.width, kVec);
    const bool idle = vectors << kLogMembers <= 1 << 18;
    const bool shared = idle || num_slots >= a.num_merges * kManyPieces;
    const unsigned blocks =
        unsigned(divide_up(vectors << (shared ? kLogMembers : 0), kItemThreads));
    if (shared) {
      GSP_LAUNCH_BLOCKS((merge_pieces<Merging, kLogMembers>), blocks, kItemThreads, stream, a);
    } else {
      GSP_LAUNCH_BLOCKS((merge_pieces<Merging, 0>), blocks, kItemThreads, stream, a);
    }
  }
  return cudaGetLastError();
}

// The items of a plan, then the rows that are split; or rows of which none is long.
template <template <typename, typename, int, int> class Op, typename T, int kVec, int kFold,
          int kLogLanes = -1, int kLogParallel = -1>
cudaError_t launch_items(const RowSweep& p, const Geometry& g, cudaStream_t stream) {
  auto a = typed<T, int>(p);
  a.log_lanes = log2_ceil(g.lanes);
  a.log_parallel = log2_ceil(g.parallel);
  if (p.items == nullptr) a.num_items = int(p.rows);
  const int64_t vectors = divide_up(p.width, kVec);
  const dim3 grid(unsigned(divide_up(a.num_items, kItemThreads / (g.lanes * g.parallel))),
                  unsigned(divide_up(vectors, int64_t(kFold) * g.lanes)));
  GSP_LAUNCH_BLOCKS((item_sweep<Op<T, int, kVec, kFold>, kLogLanes, kLogParallel>), grid,
                    kItemThreads, stream, a);
  return launch_merges<Op, T, kVec>(a, p.num_slots, stream);
}

// Bundles of rows, and the pieces of those that are split.
template <template <typename, typename, int, int> class Op, typename T, int kVec>
cudaError_t launch_stream(const RowSweep& p, cudaStream_t stream) {
  auto a = typed<T, int>(p);
  const int64_t vectors = divide_up(p.width, kVec);
  const int lanes = stream_lanes(vectors);
  a.log_lanes = log2_ceil(lanes);
  a.num_pieces = p.items == nullptr ? 0 : p.num_slots;
  a.bundle = p.bundle;
  const int64_t groups = a.num_pieces + divide_up(p.rows, p.bundle);
  const dim3 grid(unsigned(divide_up(groups, kItemThreads / lanes)),
                  unsigned(divide_up(vectors, 2 * lanes)));
  GSP_LAUNCH_BLOCKS((stream_sweep<Op<T, int, kVec, 2>>), grid, kItemThreads, stream, a);
  return launch_merges<Op, T, kVec>(a, p.num_slots, stream);
}

// The geometry of a plan is meant for vectors of 16 bytes; where alignment forbids them, as where
// there is none, it is chosen here.
template <template <typename, typename, int, int> class Op, typename T, int kVec, bool kCanFold>
cudaError_t launch_vectors(const RowSweep& p, cudaStream_t stream) {
  constexpr bool kWide = kVec * sizeof(T) == 16, kFolds = kWide && kCanFold;
  if (p.items == nullptr && p.long_row != 0) return launch_rows<Op, T, int, kVec>(p, stream);
  if constexpr (kWide && Op<T, int, kVec, 2>::kStreams) {
    // Of narrow rows a warp has enough as it is.
    const int64_t bytes = p.width * sizeof(T), wide = p.items == nullptr ? 128 : 256;
    if (p.bundle > 1 && p.geometry.lanes == 0 && bytes >= wide && epilogue_of<T>(p).plain)
      return launch_stream<Op, T, kVec>(p, stream);
  }
  Geometry g = p.geometry;
  if (!kWide || g.lanes == 0) g = geometry_of<T, kVec, kFolds>(p);
  if constexpr (kFolds) {
    if (g.fold == 2 && g.lanes == 8 && g.parallel == 4 && p.width % (16 * kVec) == 0)
      return launch_items<Op, T, kVec, 2, 3, 2>(p, g, stream);
    if (g.fold == 2) return launch_items<Op, T, kVec, 2>(p, g, stream);
  }
  return launch_items<Op, T, kVec, 1>(p, g, stream);
}

template <template <typename, typename, int, int> class Op, typename T, bool kCanFold>
cudaError_t choose(const RowSweep& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (p.wide_index) return launch_rows<Op, T, int64_t, 1>(p, stream);
  if (can_move(p, kWide, sizeof(T))) return launch_vectors<Op, T, kWide, kCanFold>(p, stream);
  if constexpr (kCanFold && sizeof(T) <= 4) {
    if (can_move(p, 2, sizeof(T))) return launch_vectors<Op, T, 2, true>(p, stream);
  }
  return launch_vectors<Op, T, 1, kCanFold>(p, stream);
}

template <typename T, typename I, int V, int F>
using PlainSum = SumOp<T, I, V, F, Weighting::kNone>;
template <typename T, typename I, int V, int F>
using ScalarSum = SumOp<T, I, V, F, Weighting::kScalar>;
template <typename T, typename I, int V, int F>
using ColumnSum = SumOp<T, I, V, F, Weighting::kColumn>;
template <typename T, typename I, int V, int F>
using ScalarColumnSum = SumOp<T, I, V, F, Weighting::kScalarColumn>;
template <typename T, typename I, int V, int F>
using HeadSum = SumOp<T, I, V, F, Weighting::kHeads>;
template <typename T, typename I, int V, int F>
using PlainMax = ExtremumOp<T, I, V, F, true, false>;
template <typename T, typename I, int V, int F>
using PlainArgmax = ExtremumOp<T, I, V, F, true, true>;
template <typename T, typename I, int V, int F>
using AnyMax = ExtremumOp<T, I, V, F, false, false>;
template <typename T, typename I, int V, int F>
using AnyArgmax = ExtremumOp<T, I, V, F, false, true>;

template <typename T, typename I, int V, int F>
using EdgeSumOfX = EdgeSumBackwardOp<T, I, V, F, false>;
template <typename T, typename I, int V, int F>
using EdgeSumOfBoth = EdgeSumBackwardOp<T, I, V, F, true>;

template <typename T>
cudaError_t sum_of(const RowSweep& p, cudaStream_t stream) {
  const bool scaled = p.src_scale != nullptr;
  if (p.weight != nullptr && p.heads > 1) return choose<HeadSum, T, true>(p, stream);
  if (p.weight != nullptr)
    return scaled ? choose<ScalarColumnSum, T, true>(p, stream)
                  : choose<ScalarSum, T, true>(p, stream);
  return scaled ? choose<ColumnSum, T, true>(p, stream) : choose<PlainSum, T, true>(p, stream);
}

template <typename T>
cudaError_t extremum_of(RowOp op, const RowSweep& p, cudaStream_t stream) {
  switch (op) {
    case RowOp::kExtremum: {
      constexpr bool kFolds = sizeof(T) <= 4;
      const bool arg = p.out_arg != nullptr;
      if (p.weight == nullptr && !p.minimum) {
        return arg ? choose<PlainArgmax, T, kFolds>(p, stream)
                   : choose<PlainMax, T, kFolds>(p, stream);
      }
      return arg ? choose<AnyArgmax, T, false>(p, stream) : choose<AnyMax, T, false>(p, stream);
    }
    case RowOp::kArgBackward:
      return choose<ArgBackwardOp, T, false>(p, stream);
    case RowOp::kTieCount:
      return choose<TieCountOp, T, false>(p, stream);
    case RowOp::kTieBackward:
      return choose<TieBackwardOp, T, false>(p, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

template <typename T>
cudaError_t edge_sum_of(RowOp op, const RowSweep& p, cudaStream_t stream) {
  if (op == RowOp::kEdgeSum) return choose<EdgeSumOp, T, false>(p, stream);
  return p.out_edge == nullptr ? choose<EdgeSumOfX, T, false>(p, stream)
                               : choose<EdgeSumOfBoth, T, false>(p, stream);
}

// Each in a file of its own, for the sake of build time.
#define GSP_FOR_EACH_DTYPE(MACRO) MACRO(float) MACRO(double) MACRO(__half) MACRO(__nv_bfloat16)
#define GSP_DECLARE(T)                                                              \
  extern template cudaError_t sum_of<T>(const RowSweep&, cudaStream_t);             \
  extern template cudaError_t extremum_of<T>(RowOp, const RowSweep&, cudaStream_t); \
  extern template cudaError_t edge_sum_of<T>(RowOp, const RowSweep&, cudaStream_t);

}  // namespace gsp::cuda
