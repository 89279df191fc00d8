// One sweep over the rows of a CSR matrix, for every reduction that ends in one value per row and
// column.
//
// A group of `lanes` threads covers the columns of a row, 16 bytes a thread where alignment allows;
// `parallel` such groups share a short row, each taking every `parallel`-th edge, with kUnroll
// gathers in flight a thread. A row of more than `long_row` edges would be a chain of dependent
// gathers, so a whole block sweeps it, `chunk` edges at a time. A warm plan lists these rows
// (items): each gets blocks of its own, one a chunk, and the blocks of short rows never wait for
// one another. A row of several chunks leaves partial results in scratch, and `merge_chunks` folds
// them in ascending order, which is also what a single block does under a cold plan. So a plan
// never changes a bit, no float is ever added atomically, and the order of a sum depends on the
// row, the width and the parameters alone.
#pragma once

#include <type_traits>

#include "cuda/epilogue.cuh"
#include "cuda/vec.cuh"

namespace gsp::cuda {

// Sweep parameters, and the arrays of every reduction; each Op below says which it reads.
template <typename T, typename Index>
struct SweepArgs {
  const Index* rowptr;
  const Index* col;
  const Index* perm;  // position -> caller's edge id, or null
  const T* weight;    // [edges, heads], row order, or null
  const T* x;         // gathered by column: features, or the gradient
  const T* other;     // gathered by column or read by row: see the Ops
  const T* own;       // read by row
  const Index* arg;   // gathered by column
  const acc_t<T>* src_scale;
  Epilogue<T> epilogue;  // of sums; it has the output of all
  Index* out_arg;
  int64_t x_stride;      // elements between rows of x
  int64_t other_stride;  // of other
  int64_t own_stride;    // of own
  int64_t rows;
  int width;
  int heads;       // 1 where a weight belongs to all columns
  int head_width;  // columns a head
  // geometry
  int log_lanes;
  int log_parallel;
  int64_t long_row;
  int64_t chunk;
  const int4* items;  // {row, begin, end, slot or -1} of num_items chunks, then {row, first slot,
                      // end slot, -} of rows
  bool listed;        // whether items hold every long row
  int num_items;
  int num_merges;
  acc_t<T>* scratch;   // [slots, width]
  Index* scratch_arg;  // [slots, width]
};

// The columns of one thread: kFold vectors of kVec, `lanes` vectors apart.
template <int kVec, int kFold>
struct Columns {
  int at[kFold];       // first column, 0 where the thread has none
  bool active[kFold];  // whether it has
};

template <typename Index>
constexpr Index kNoPosition = sizeof(Index) == 4 ? Index(0x7fffffff) : Index(0x7fffffffffffffffLL);

// What a message is multiplied by: nothing, the edge's weight, its column's scale, both, or a
// weight per head (and the scale, where there is one). All but the last are worth an inner loop of
// their own.
enum class Weighting { kNone, kScalar, kColumn, kScalarColumn, kHeads };

// Positions are unsigned in the inner loops: a step past the end must not overflow.
template <typename Index>
using Position = std::make_unsigned_t<Index>;

// ---- reductions
// -------------------------------------------------------------------------------------------------
//
// An Op has a State for the columns of one thread and says how an edge is gathered (Edge, gather),
// how it is folded in (update), how two States meet (merge, shuffle), and what is written (finish,
// save, restore).

template <typename T, typename Index, int kVec, int kFold>
struct OpBase {
  using Element = T;
  using Idx = Index;
  using Args = SweepArgs<T, Index>;
  using Acc = acc_t<T>;
  using Cols = Columns<kVec, kFold>;
  static constexpr int kVecSize = kVec;
  static constexpr int kFolds = kFold;
  // Gathers wait for memory: the more warps wait at once the better, as long as nothing spills. So
  // many blocks share a multiprocessor, and a thread has at most 65536 / (256 * kBlocks) registers.
  static constexpr int kBlocks = kVec == 8 ? 2 : 4;

  // For the Ops that are not instantiated per weighting.
  static __device__ __forceinline__ Acc weight_of(const Args& a, Position<Index> j, int column) {
    return a.weight == nullptr ? Acc(1)
                               : widen<T>(a.weight[int64_t(j) * a.heads + column / a.head_width]);
  }
  // A message before it is multiplied and rounded.
  struct Message {
    Acc w[kFold];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void gather_message(const Args& a, Position<Index> j, Index col,
                                                        bool ok, const Cols& c, Message& m) {
    const T* x = a.x + int64_t(col) * a.x_stride;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      m.x[k] = load_if<T, kVec>(ok, x + c.at[k]);
      m.w[k] = ok ? weight_of(a, j, c.at[k]) : Acc(0);
    }
  }
};

// State of the Ops that add: one accumulator a column.
template <typename T, typename Index, int kVec, int kFold>
struct AddOp : OpBase<T, Index, kVec, kFold> {
  using Base = OpBase<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  static constexpr bool kHasArg = false;

  struct State {
    Acc v[kFold][kVec];
  };
  static __device__ __forceinline__ void init(State& s, Index) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i] = Acc(0);
    }
  }
  static __device__ __forceinline__ void merge(State& s, const State& o) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i] += o.v[k][i];
    }
  }
  static __device__ __forceinline__ void merge_one(State& s, const State& o, int k, int i) {
    s.v[k][i] += o.v[k][i];
  }
  static __device__ __forceinline__ State shuffle(const State& s, int distance) {
    State o;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) o.v[k][i] = __shfl_xor_sync(kFullMask, s.v[k][i], distance);
    }
    return o;
  }
  // One word of the State at a time, through shared memory or scratch.
  static __device__ __forceinline__ void save(const State& s, int k, int i, Acc* v, Index*) {
    *v = s.v[k][i];
  }
  static __device__ __forceinline__ void restore(State& s, int k, int i, const Acc* v,
                                                 const Index*) {
    s.v[k][i] = *v;
  }

  static __device__ __forceinline__ void finish(const Args& a, State& s, int64_t row,
                                                int64_t length, const Cols& c) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (c.active[k]) finish_sum<kVec>(a.epilogue, row, length, c.at[k], s.v[k]);
    }
  }
};

// Weighted sum and mean: sum of w * src_scale[col] * x[col].
template <typename T, typename Index, int kVec, int kFold, Weighting kWeighting>
struct SumOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr bool kByHead = kWeighting == Weighting::kHeads;
  static constexpr int kUnroll = kByHead && kFold == 2 ? 2 : 4;
  static constexpr bool kPlain = kWeighting == Weighting::kNone || kWeighting == Weighting::kScalar;
  static constexpr int kBlocks = kVec == 4 && sizeof(T) == 4 && kPlain ? (kFold == 1 ? 6 : 3)
                                 : kVec == 8                           ? (kFold == 1 ? 3 : 2)
                                 : kPlain && sizeof(T) <= 4 && sizeof(Index) == 4 ? 4
                                                                                  : 2;

  struct Row {};
  struct Edge {
    Acc w[kByHead ? kFold : 1];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                Index col, bool ok, const Cols& c, Edge& e) {
    const T* x = a.x + int64_t(col) * a.x_stride;
#pragma unroll
    for (int k = 0; k < kFold; ++k) e.x[k] = load_if<T, kVec>(ok, x + c.at[k]);
    if constexpr (kByHead) {
#pragma unroll
      for (int k = 0; k < kFold; ++k) {
        e.w[k] = ok ? widen<T>(a.weight[int64_t(j) * a.heads + c.at[k] / a.head_width]) : Acc(0);
        if (ok && a.src_scale != nullptr) e.w[k] *= a.src_scale[col];
      }
    } else {
      e.w[0] = Acc(1);
      if constexpr (kWeighting == Weighting::kScalar || kWeighting == Weighting::kScalarColumn) {
        e.w[0] = ok ? widen<T>(a.weight[j]) : Acc(0);
      }
      if constexpr (kWeighting == Weighting::kColumn || kWeighting == Weighting::kScalarColumn) {
        e.w[0] *= ok ? a.src_scale[col] : Acc(0);
      }
    }
  }
  // An edge that is not there was gathered as zeros.
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index, bool) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc v = widen<T>(e.x[k].v[i]);
        if constexpr (kWeighting == Weighting::kNone) {
          s.v[k][i] += v;
        } else {
          s.v[k][i] += e.w[kByHead ? k : 0] * v;
        }
      }
    }
  }
};

// Maximum or minimum of the rounded messages, and the first position that attains it.
template <typename T, typename Index, int kVec, int kFold, Reduce kReduce>
struct ExtremumOp : OpBase<T, Index, kVec, kFold> {
  using Base = OpBase<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using Best = Reducer<kReduce, Acc, Index>;
  static constexpr bool kHasArg = true;
  static constexpr int kUnroll = 4;

  struct State {
    Best v[kFold][kVec];
  };
  struct Row {};
  using Edge = typename Base::Message;
  static __device__ __forceinline__ void init(State& s, Index first) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i] = Best::init(first);
    }
  }
  static __device__ __forceinline__ void merge(State& s, const State& o) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i].merge(o.v[k][i]);
    }
  }
  static __device__ __forceinline__ void merge_one(State& s, const State& o, int k, int i) {
    s.v[k][i].merge(o.v[k][i]);
  }
  static __device__ __forceinline__ State shuffle(const State& s, int distance) {
    State o;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        o.v[k][i].value = __shfl_xor_sync(kFullMask, s.v[k][i].value, distance);
        o.v[k][i].position = __shfl_xor_sync(kFullMask, s.v[k][i].position, distance);
      }
    }
    return o;
  }
  static __device__ __forceinline__ void save(const State& s, int k, int i, Acc* v, Index* p) {
    *v = s.v[k][i].value;
    *p = s.v[k][i].position;
  }
  static __device__ __forceinline__ void restore(State& s, int k, int i, const Acc* v,
                                                 const Index* p) {
    s.v[k][i].value = *v;
    s.v[k][i].position = *p;
  }
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                Index col, bool ok, const Cols& c, Edge& e) {
    Base::gather_message(a, j, col, ok, c, e);
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index j,
                                                bool ok) {
    if (!ok) return;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i)
        s.v[k][i].update(round_to<T>(e.w[k] * widen<T>(e.x[k].v[i])), j);
    }
  }
  static __device__ __forceinline__ void finish(const Args& a, const State& s, int64_t row,
                                                int64_t length, const Cols& c) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (!c.active[k]) continue;
      const int64_t at = row * a.width + c.at[k];
      Vec<T, kVec> o;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Index p = s.v[k][i].position;
        o.v[i] = narrow<T>(length == 0 ? Acc(0) : s.v[k][i].value);
        if (a.out_arg != nullptr) {
          a.out_arg[at + i] = length == 0 ? Index(-1) : a.perm == nullptr ? p : a.perm[p];
        }
      }
      store<T, kVec>(static_cast<T*>(a.epilogue.out) + at, o);
    }
  }
};

// Gradient of a maximum on the transposed graph: x is the gradient, arg the winning edge of each of
// its elements.
template <typename T, typename Index, int kVec, int kFold>
struct ArgBackwardOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr int kUnroll = 2;

  struct Row {};
  struct Edge {
    Acc w[kFold];
    Vec<T, kVec> g[kFold];
    Vec<Index, kVec> arg[kFold];
    Index id;
  };
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                Index col, bool ok, const Cols& c, Edge& e) {
    e.id = a.perm == nullptr ? Index(j) : ok ? a.perm[j] : Index(0);
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load_if<T, kVec>(ok, a.x + int64_t(col) * a.x_stride + c.at[k]);
      e.arg[k] = load_wide_if<Index, kVec>(ok, a.arg + int64_t(col) * a.width + c.at[k]);
      e.w[k] = ok ? Base::weight_of(a, j, c.at[k]) : Acc(0);
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index, bool) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (e.arg[k].v[i] == e.id) s.v[k][i] += e.w[k] * widen<T>(e.g[k].v[i]);
      }
    }
  }
};

// Number of messages equal to the extremum of their row (own = the result).
template <typename T, typename Index, int kVec, int kFold>
struct TieCountOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr int kUnroll = 2;

  struct Row {
    Vec<T, kVec> best[kFold];
  };
  using Edge = typename Base::Message;
  static __device__ __forceinline__ void begin(const Args& a, int64_t row, const Cols& c, Row& r) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) r.best[k] = load<T, kVec>(a.own + row * a.own_stride + c.at[k]);
  }
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                Index col, bool ok, const Cols& c, Edge& e) {
    Base::gather_message(a, j, col, ok, c, e);
  }
  static __device__ __forceinline__ void update(State& s, const Row& r, const Edge& e, Index,
                                                bool ok) {
    if (!ok) return;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc m = round_to<T>(e.w[k] * widen<T>(e.x[k].v[i]));
        if (same(m, widen<T>(r.best[k].v[i]))) s.v[k][i] += Acc(1);
      }
    }
  }
};

// Gradient of a maximum with ties split, on the transposed graph: x is the gradient's share, other
// the result (both gathered by column), own the features.
template <typename T, typename Index, int kVec, int kFold>
struct TieBackwardOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr int kUnroll = 2;

  struct Row {
    Vec<T, kVec> x[kFold];
  };
  struct Edge {
    Acc w[kFold];
    Vec<T, kVec> g[kFold];
    Vec<T, kVec> best[kFold];
  };
  static __device__ __forceinline__ void begin(const Args& a, int64_t row, const Cols& c, Row& r) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) r.x[k] = load<T, kVec>(a.own + row * a.own_stride + c.at[k]);
  }
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                Index col, bool ok, const Cols& c, Edge& e) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load_if<T, kVec>(ok, a.x + int64_t(col) * a.x_stride + c.at[k]);
      e.best[k] = load_if<T, kVec>(ok, a.other + int64_t(col) * a.other_stride + c.at[k]);
      e.w[k] = ok ? Base::weight_of(a, j, c.at[k]) : Acc(0);
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row& r, const Edge& e, Index,
                                                bool ok) {
    if (!ok) return;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc m = round_to<T>(e.w[k] * widen<T>(r.x[k].v[i]));
        if (same(m, widen<T>(e.best[k].v[i]))) s.v[k][i] += e.w[k] * widen<T>(e.g[k].v[i]);
      }
    }
  }
};

// ---- the sweep
// --------------------------------------------------------------------------------------------------

// Edges first, first + step, ... below end, in ascending order, kUnroll of them in flight: all
// their columns are asked for before the first is needed, then all their rows of x.
template <typename Op>
__device__ __forceinline__ void sweep(const typename Op::Args& a, typename Op::State& s,
                                      const typename Op::Row& row, const typename Op::Cols& c,
                                      Position<typename Op::Idx> first,
                                      Position<typename Op::Idx> end, unsigned step) {
  using Index = typename Op::Idx;
  Op::init(s, first < end ? Index(first) : kNoPosition<Index>);
  for (auto j = first; j < end; j += step * Op::kUnroll) {
    Index col[Op::kUnroll];
    bool ok[Op::kUnroll];
    typename Op::Edge e[Op::kUnroll];
#pragma unroll
    for (int u = 0; u < Op::kUnroll; ++u) {
      ok[u] = j + u * step < end;
      col[u] = ok[u] ? a.col[j + u * step] : Index(0);
    }
#pragma unroll
    for (int u = 0; u < Op::kUnroll; ++u) Op::gather(a, row, j + u * step, col[u], ok[u], c, e[u]);
#pragma unroll
    for (int u = 0; u < Op::kUnroll; ++u) Op::update(s, row, e[u], Index(j + u * step), ok[u]);
  }
}

// The State of a whole row or chunk, in the threads < lanes: every warp's part folded in the order
// of warps.
template <typename Op>
__device__ __forceinline__ void block_sweep(const typename Op::Args& a, typename Op::State& s,
                                            const typename Op::Row& own, const typename Op::Cols& c,
                                            Position<typename Op::Idx> begin,
                                            Position<typename Op::Idx> end) {
  constexpr int kVec = Op::kVecSize, kFold = Op::kFolds, kWords = kVec * kFold * 32;
  __shared__ typename Op::Acc part[kWarps][kWords];
  __shared__ typename Op::Idx part_arg[Op::kHasArg ? kWarps : 1][Op::kHasArg ? kWords : 1];
  const int thread = int(threadIdx.x), lanes = 1 << a.log_lanes, warp = thread >> 5;
  sweep<Op>(a, s, own, c, begin + (thread >> a.log_lanes), end, kThreads >> a.log_lanes);
  for (int d = lanes; d < 32; d <<= 1) {
    const typename Op::State o = Op::shuffle(s, d);
    Op::merge(s, o);
  }
  if ((thread & 31) < lanes) {
#pragma unroll
    for (int w = 0; w < kFold * kVec; ++w) {
      const int word = w * 32 + (thread & 31);
      Op::save(s, w / kVec, w % kVec, &part[warp][word],
               &part_arg[Op::kHasArg ? warp : 0][Op::kHasArg ? word : 0]);
    }
  }
  __syncthreads();
  if (thread < lanes) {
#pragma unroll
    for (int w = 0; w < kFold * kVec; ++w) {
      const int word = w * 32 + thread;
      typename Op::State o;
#pragma unroll 1
      for (int v = 1; v < kWarps; ++v) {
        Op::restore(o, w / kVec, w % kVec, &part[v][word],
                    &part_arg[Op::kHasArg ? v : 0][Op::kHasArg ? word : 0]);
        Op::merge_one(s, o, w / kVec, w % kVec);
      }
    }
  }
  __syncthreads();
}

template <typename Op>
__global__ void __launch_bounds__(kThreads, Op::kBlocks)
    row_sweep(const __grid_constant__ typename Op::Args a) {
  using Pos = Position<typename Op::Idx>;
  using State = typename Op::State;
  constexpr int kVec = Op::kVecSize, kFold = Op::kFolds;
  const int thread = int(threadIdx.x), lanes = 1 << a.log_lanes;
  typename Op::Cols c;
#pragma unroll
  for (int k = 0; k < kFold; ++k) {
    const int at = ((int(blockIdx.y) * kFold + k) * lanes + (thread & (lanes - 1))) * kVec;
    c.active[k] = at < a.width;
    c.at[k] = c.active[k] ? at : 0;
  }
  typename Op::Row own;
  State s;

  if (int(blockIdx.x) < a.num_items) {
    const int4 item = a.items[blockIdx.x];
    Op::begin(a, item.x, c, own);
    block_sweep<Op>(a, s, own, c, Pos(item.y), Pos(item.z));
    if (thread < lanes && item.w < 0) {
      Op::finish(a, s, item.x, int64_t(item.z) - item.y, c);
    } else if (thread < lanes) {
#pragma unroll
      for (int w = 0; w < kFold * kVec; ++w) {
        if (!c.active[w / kVec]) continue;
        const int64_t at = int64_t(item.w) * a.width + c.at[w / kVec] + w % kVec;
        Op::save(s, w / kVec, w % kVec, a.scratch + at, Op::kHasArg ? a.scratch_arg + at : nullptr);
      }
    }
    return;
  }

  const int log_group = a.log_lanes + a.log_parallel;
  const int64_t first_row = (int64_t(blockIdx.x) - a.num_items) << (kLogThreads - log_group);
  const int64_t row = first_row + (thread >> log_group);
  Pos begin = 0, end = 0;
  if (row < a.rows) {
    begin = Pos(a.rowptr[row]);
    end = Pos(a.rowptr[row + 1]);
  }
  const bool is_long = int64_t(end - begin) > a.long_row;
  // Whole warps take part, with empty ranges where a group has nothing to do: the shuffles need
  // every lane.
  const bool here = row < a.rows && !is_long;
  if (here) Op::begin(a, row, c, own);
  const int member = (thread >> a.log_lanes) & ((1 << a.log_parallel) - 1);
  sweep<Op>(a, s, own, c, here ? begin + member : Pos(0), here ? end : Pos(0),
            1u << a.log_parallel);
  for (int d = lanes; d < lanes << a.log_parallel; d <<= 1) {
    const State o = Op::shuffle(s, d);
    Op::merge(s, o);
  }
  if (here && member == 0) Op::finish(a, s, row, int64_t(end - begin), c);
  if (a.listed || !__syncthreads_or(is_long)) return;

  const int64_t stop = first_row + (kThreads >> log_group);
  for (int64_t r = first_row; r < stop && r < a.rows; ++r) {
    begin = Pos(a.rowptr[r]);
    end = Pos(a.rowptr[r + 1]);
    const int64_t length = int64_t(end - begin);
    if (length <= a.long_row) continue;
    Op::begin(a, r, c, own);
    State total;
    for (Pos from = begin; from < end; from += Pos(a.chunk)) {
      const Pos left = end - from;
      block_sweep<Op>(a, s, own, c, from, left > Pos(a.chunk) ? from + Pos(a.chunk) : end);
      if (from == begin) {
        total = s;
      } else {
        Op::merge(total, s);
      }
    }
    if (thread < lanes) Op::finish(a, total, r, length, c);
  }
}

// Folds the chunks of each split row, one thread a vector of columns.
template <typename Op>
__global__ void __launch_bounds__(kThreads) merge_chunks(typename Op::Args a) {
  constexpr int kVec = Op::kVecSize;
  static_assert(Op::kFolds == 1);
  const int at = (int(blockIdx.y) * kThreads + int(threadIdx.x)) * kVec;
  if (at >= a.width) return;
  const int4 merge = a.items[a.num_items + blockIdx.x];
  typename Op::State s, o;
  const auto fetch = [&](typename Op::State& to, int slot) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int64_t word = int64_t(slot) * a.width + at + i;
      Op::restore(to, 0, i, a.scratch + word, Op::kHasArg ? a.scratch_arg + word : nullptr);
    }
  };
  fetch(s, merge.y);
#pragma unroll 1
  for (int slot = merge.y + 1; slot < merge.z; ++slot) {
    fetch(o, slot);
    Op::merge(s, o);
  }
  typename Op::Cols c;
  c.at[0] = at;
  c.active[0] = true;
  Op::finish(a, s, merge.x, int64_t(a.rowptr[merge.x + 1]) - a.rowptr[merge.x], c);
}

}  // namespace gsp::cuda
