// One sweep over the rows of a CSR matrix, for every reduction that ends in one value per row and
// column.
//
// A group of `lanes` threads covers the columns of a row, 16 bytes a thread where alignment allows;
// `parallel` such groups share a row, each taking every `parallel`-th edge, with kUnroll gathers in
// flight a thread. Three kernels differ in how rows are handed out:
//
// - `row_sweep` needs nothing but the CSR arrays. A row of more than `long_row` edges would be a
//   chain of dependent gathers, so a whole block sweeps it, `chunk` edges at a time.
// - `item_sweep` takes rows of which none is long, or follows a warm plan's list of items, each a
//   row or a piece of one of at most `chunk` edges, sorted by length within short windows: the
//   groups of a warp end together, and rows that lie together are still swept together. A row of
//   several pieces leaves partial results in scratch, which `merge_pieces` folds.
// - `stream_sweep` takes bundles of consecutive rows, for sums over graphs of which most rows are
//   shorter than what a group can have in flight.
//
// No float is ever added atomically: the order of a sum depends on the row, the width and the
// parameters alone.
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
  const T* edge;         // read by edge id
  T* out_edge;           // written by edge id, [edges, width]
  Epilogue<T> epilogue;  // of sums; it has the output of all
  Index* out_arg;
  // Bytes between rows of what is gathered. As wide as indices, so that an address takes one
  // multiply-add.
  Index x_stride;
  Index other_stride;
  Index edge_stride;
  int64_t own_stride;
  int64_t rows;
  acc_t<T> sign;  // of extrema: 1 for maxima, -1 for minima
  int width;
  int heads;       // 1 where a weight belongs to all columns
  int head_width;  // columns a head
  // geometry
  int log_lanes;
  int log_parallel;
  int64_t long_row;  // 0: no row is too long for a group
  int64_t chunk;
  const int4* items;  // {row, begin, end, slot or -1} of num_items pieces, then {row, first slot,
                      // end slot, -} of split rows; null: every row
  int num_items;
  int num_merges;
  int num_pieces;      // of stream_sweep: of rows that are split, the first items
  int bundle;          // rows of a group
  acc_t<T>* scratch;   // [slots, width]
  Index* scratch_arg;  // [slots, width]
  bool zero_wins;      // of a count of ties: 0 is one more
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
  static constexpr int kItemBlocks = 2 * kBlocks;
  static constexpr bool kStreams = false;  // whether stream_sweep is worth instantiating

  // What is read of an edge before anything that its column leads to.
  struct Tap {
    Index col;
  };
  static __device__ __forceinline__ Tap tap(const Args& a, Position<Index> j, bool ok) {
    return {ok ? a.col[j] : Index(0)};
  }

  // For the Ops that are not instantiated per weighting.
  static __device__ __forceinline__ Acc weight_of(const Args& a, Position<Index> j, int column) {
    return a.weight == nullptr ? Acc(1)
                               : widen<T>(a.weight[int64_t(j) * a.heads + column / a.head_width]);
  }
  // Called where the geometry is not known to the compiler.
  template <typename Row>
  static __device__ __forceinline__ void settle(Row&) {}

  // Called after a sweep of the edges first, first + step, ... below end.
  template <typename State, typename Row>
  static __device__ __forceinline__ void close(const Args&, State&, const Row&, const Cols&,
                                               Position<Index>, Position<Index>, unsigned) {}

  // A message before it is multiplied and rounded.
  struct Message {
    Acc w[kFold];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void gather_message(const Args& a, Position<Index> j, Index col,
                                                        bool ok, const Cols& c, Message& m) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      m.x[k] = load_if<T, kVec>(ok, row_of(a.x + c.at[k], col, a.x_stride));
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
  using Merging = AddOp;  // what folds pieces of rows: the same for all that add
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
  // A vector of the State to scratch, and back.
  static __device__ __forceinline__ void save_vector(const State& s, int k, Acc* v, Index*) {
    store_wide<Acc, kVec>(v, s.v[k]);
  }
  static __device__ __forceinline__ void restore_vector(State& s, int k, const Acc* v,
                                                        const Index*) {
    const Vec<Acc, kVec> all = load_wide_if<Acc, kVec>(true, v);
#pragma unroll
    for (int i = 0; i < kVec; ++i) s.v[k][i] = all.v[i];
  }
  // One word of the State at a time, through shared memory.
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
      if (c.active[k]) finish_sum<kVec>(a.epilogue, row, Position<Index>(length), c.at[k], s.v[k]);
    }
  }
  static __device__ __forceinline__ void finish_plain(const Args& a, State& s, int64_t row,
                                                      int64_t length, const Cols& c) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (c.active[k])
        finish_plain_sum<kVec>(a.epilogue, row, Position<Index>(length), c.at[k], s.v[k]);
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
  static constexpr int kBlocks = kVec == 4 && sizeof(T) == 4 && kPlain            ? 6
                                 : kVec == 8                                      ? 3
                                 : kPlain && sizeof(T) <= 4 && sizeof(Index) == 4 ? 4
                                                                                  : 2;
  // Measured: 48 warps a multiprocessor are best, 32 where a thread has twice the columns.
  static constexpr int kItemBlocks = kByHead || sizeof(T) == 8 ? 4
                                     : kVec == 8               ? (kFold == 1 ? 6 : 4)
                                     : kFold == 1              ? (kPlain ? 12 : 10)
                                                               : (kPlain ? 8 : 6);
  static constexpr bool kStreams = kPlain && sizeof(Index) == 4;
  static constexpr int kStreamBlocks = sizeof(T) == 4 ? 9 : sizeof(T) == 8 ? 6 : 7;
  static constexpr bool kByEdge =
      kWeighting == Weighting::kScalar || kWeighting == Weighting::kScalarColumn;

  struct ColumnAndWeight {
    Index col;
    Acc w;
  };
  using Tap = std::conditional_t<kByEdge, ColumnAndWeight, typename Base::Tap>;
  static __device__ __forceinline__ Tap tap(const Args& a, Position<Index> j, bool ok) {
    if constexpr (kByEdge) {
      return {ok ? a.col[j] : Index(0), ok ? widen<T>(a.weight[j]) : Acc(0)};
    } else {
      return Base::tap(a, j, ok);
    }
  }

  struct Row {
    const T* x[kFold];  // the thread's columns of row 0
    Index stride;
  };
  struct Edge {
    Acc w[kByHead ? kFold : 1];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void begin(const Args& a, int64_t, const Cols& c, Row& r) {
    r.x[0] = a.x + c.at[0];
    r.stride = a.x_stride;
    keep(r.x[0]);
#pragma unroll
    for (int k = 1; k < kFold; ++k) r.x[k] = r.x[0] + (c.at[k] - c.at[0]);
  }
  static __device__ __forceinline__ void settle(Row& r) {
    keep(r.stride);
#pragma unroll
    for (int k = 1; k < kFold; ++k) keep(r.x[k]);
  }
  static __device__ __forceinline__ void gather(const Args& a, const Row& r, Position<Index> j,
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) e.x[k] = load_if<T, kVec>(ok, row_of(r.x[k], t.col, r.stride));
    if constexpr (kByHead) {
#pragma unroll
      for (int k = 0; k < kFold; ++k) {
        e.w[k] = ok ? widen<T>(a.weight[int64_t(j) * a.heads + c.at[k] / a.head_width]) : Acc(0);
        if (ok && a.src_scale != nullptr) e.w[k] *= a.src_scale[t.col];
      }
    } else {
      e.w[0] = Acc(1);
      if constexpr (kByEdge) e.w[0] = t.w;
      if constexpr (kWeighting == Weighting::kColumn || kWeighting == Weighting::kScalarColumn) {
        e.w[0] *= ok ? a.src_scale[t.col] : Acc(0);
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

// What an ExtremumOp holds of one thread's columns; positions only where someone asks for them.
template <typename Acc, typename Index, int kVec, int kFold, bool kArg>
struct Extrema {
  Acc v[kFold][kVec];
  Index p[kFold][kVec];
};
template <typename Acc, typename Index, int kVec, int kFold>
struct Extrema<Acc, Index, kVec, kFold, false> {
  Acc v[kFold][kVec];
};

// Maximum of the rounded messages and, where kArg, the first position that attains it. A minimum is
// the negative of the maximum of negative messages: `sign` says which is asked for. kPlain: a
// maximum without weights.
template <typename T, typename Index, int kVec, int kFold, bool kPlain, bool kArg>
struct ExtremumOp : OpBase<T, Index, kVec, kFold> {
  using Base = OpBase<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::Tap;
  using Merging = ExtremumOp;
  static constexpr bool kHasArg = kArg;
  static constexpr int kBlocks = kVec == 8 ? 2 : 3;
  static constexpr int kItemBlocks = !kPlain || sizeof(T) != 4 ? 2 * kBlocks : kFold == 1 ? 10 : 8;
  static constexpr int kUnroll = 4;

  using State = Extrema<Acc, Index, kVec, kFold, kArg>;
  struct Row {};
  struct PlainMessage {
    Vec<T, kVec> x[kFold];
  };
  using Edge = std::conditional_t<kPlain, PlainMessage, typename Base::Message>;

  static __device__ __forceinline__ void init(State& s, Index first) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        s.v[k][i] = -INFINITY;
        if constexpr (kArg) s.p[k][i] = first;  // of rows of nothing but -inf
      }
    }
  }
  static __device__ __forceinline__ void merge_one(State& s, const State& o, int k, int i) {
    if constexpr (kArg) {
      Reducer<Reduce::kMax, Acc, Index> best{s.v[k][i], s.p[k][i]};
      best.merge({o.v[k][i], o.p[k][i]});
      s.p[k][i] = best.position;
    }
    raise(s.v[k][i], o.v[k][i]);
  }
  static __device__ __forceinline__ void merge(State& s, const State& o) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) merge_one(s, o, k, i);
    }
  }
  static __device__ __forceinline__ State shuffle(const State& s, int distance) {
    State o;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        o.v[k][i] = __shfl_xor_sync(kFullMask, s.v[k][i], distance);
        if constexpr (kArg) o.p[k][i] = __shfl_xor_sync(kFullMask, s.p[k][i], distance);
      }
    }
    return o;
  }
  static __device__ __forceinline__ void save_vector(const State& s, int k, Acc* v, Index* p) {
    store_wide<Acc, kVec>(v, s.v[k]);
    if constexpr (kArg) store_wide<Index, kVec>(p, s.p[k]);
  }
  static __device__ __forceinline__ void restore_vector(State& s, int k, const Acc* v,
                                                        const Index* p) {
    const Vec<Acc, kVec> values = load_wide_if<Acc, kVec>(true, v);
#pragma unroll
    for (int i = 0; i < kVec; ++i) s.v[k][i] = values.v[i];
    if constexpr (kArg) {
      const Vec<Index, kVec> positions = load_wide_if<Index, kVec>(true, p);
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.p[k][i] = positions.v[i];
    }
  }
  static __device__ __forceinline__ void save(const State& s, int k, int i, Acc* v, Index* p) {
    *v = s.v[k][i];
    if constexpr (kArg) *p = s.p[k][i];
  }
  static __device__ __forceinline__ void restore(State& s, int k, int i, const Acc* v,
                                                 const Index* p) {
    s.v[k][i] = *v;
    if constexpr (kArg) s.p[k][i] = *p;
  }
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index> j,
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.x[k] = load_or_lowest<T, kVec>(ok, row_of(a.x + c.at[k], t.col, a.x_stride));
      if constexpr (!kPlain) e.w[k] = ok ? a.sign * Base::weight_of(a, j, c.at[k]) : Acc(1);
    }
  }
  static __device__ __forceinline__ Acc message(const Edge& e, int k, int i) {
    if constexpr (kPlain) {
      return widen<T>(e.x[k].v[i]);
    } else {
      return round_to<T>(e.w[k] * widen<T>(e.x[k].v[i]));
    }
  }
  // An edge that is not there was gathered as -inf. Once a maximum is NaN its position moves on,
  // which `close` mends: that makes three instructions an element.
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index j,
                                                bool) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc m = message(e, k, i);
        if constexpr (kArg) s.p[k][i] = m <= s.v[k][i] ? s.p[k][i] : j;
        raise(s.v[k][i], m);
      }
    }
  }
  // After a sweep of these edges: the first NaN is what attains a maximum that is NaN.
  static __device__ __forceinline__ void close(const Args& a, State& s, const Row& row,
                                               const Cols& c, Position<Index> first,
                                               Position<Index> end, unsigned step) {
    if constexpr (kArg) {
      bool found = false;
#pragma unroll
      for (int k = 0; k < kFold; ++k) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) found |= s.v[k][i] != s.v[k][i];
      }
      if (!found) return;
#pragma unroll 1
      for (Position<Index> left = (end - first + step - 1) / step; left > 0; --left) {
        const Position<Index> j = first + (left - 1) * step;
        Edge e;
        gather(a, row, j, Base::tap(a, j, true), true, c, e);
#pragma unroll
        for (int k = 0; k < kFold; ++k) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const Acc m = message(e, k, i);
            if (m != m) s.p[k][i] = Index(j);
          }
        }
      }
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
        const Acc v = kPlain ? s.v[k][i] : a.sign * s.v[k][i];
        o.v[i] = narrow<T>(length == 0 ? Acc(0) : v);
      }
      store<T, kVec>(static_cast<T*>(a.epilogue.out) + at, o);
      if constexpr (kArg) {
        Index edge[kVec];
#pragma unroll
        for (int i = 0; i < kVec; ++i) {
          const Index p = s.p[k][i];
          edge[i] = length == 0 ? Index(-1) : a.perm == nullptr ? p : a.perm[p];
        }
        store_wide<Index, kVec>(a.out_arg + at, edge);
      }
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
  using typename Base::Tap;
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
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
    const Index col = t.col;
    e.id = a.perm == nullptr ? Index(j) : ok ? a.perm[j] : Index(0);
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load_if<T, kVec>(ok, row_of(a.x + c.at[k], col, a.x_stride));
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

// Number of messages equal to the extremum of their row (own = the result); where there is a
// gradient, epilogue.self, what each of them gets of it.
template <typename T, typename Index, int kVec, int kFold>
struct TieCountOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  using typename Base::Tap;
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
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
    Base::gather_message(a, j, t.col, ok, c, e);
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
  using Merging = TieCountOp;  // which finishes as this one does
  static __device__ __forceinline__ void finish(const Args& a, State& s, int64_t row,
                                                int64_t length, const Cols& c) {
    const Epilogue<T>& e = a.epilogue;
    if (a.zero_wins) {
#pragma unroll
      for (int k = 0; k < kFold; ++k) {
        if (!c.active[k]) continue;
        const auto best = load<T, kVec>(a.own + row * a.own_stride + c.at[k]);
#pragma unroll
        for (int i = 0; i < kVec; ++i) s.v[k][i] += Acc(widen<T>(best.v[i]) == Acc(0) ? 1 : 0);
      }
    }
    if (e.self == nullptr) return Base::finish(a, s, row, length, c);
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (!c.active[k]) continue;
      const auto grad = load<T, kVec>(e.self + row * e.self_stride + c.at[k]);
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i] = widen<T>(grad.v[i]) / s.v[k][i];
      store_as<T>(e.out, row * e.width + c.at[k], s.v[k]);
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
  using typename Base::Tap;
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
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
    const Index col = t.col;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load_if<T, kVec>(ok, row_of(a.x + c.at[k], col, a.x_stride));
      e.best[k] = load_if<T, kVec>(ok, row_of(a.other + c.at[k], col, a.other_stride));
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

// What the two Ops below read of an edge before anything that its column leads to.
template <typename Acc, typename Index>
struct EdgeTap {
  Index col;
  Index id;
  Acc w;

  template <typename T>
  __device__ __forceinline__ EdgeTap(const SweepArgs<T, Index>& a, Position<Index> j, bool ok)
      : col(ok ? a.col[j] : Index(0)),
        id(a.perm == nullptr ? Index(j)
           : ok              ? a.perm[j]
                             : Index(0)),
        w(a.weight == nullptr ? Acc(1)
          : ok                ? widen<T>(a.weight[j])
                              : Acc(0)) {}
  EdgeTap() = default;
};

// Sum and mean of w * relu(x[col] + edge). An edge that is not there was gathered as zeros.
template <typename T, typename Index, int kVec, int kFold>
struct EdgeSumOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr int kUnroll = 4;

  using Tap = EdgeTap<Acc, Index>;
  static __device__ __forceinline__ Tap tap(const Args& a, Position<Index> j, bool ok) {
    return Tap(a, j, ok);
  }
  struct Row {};
  struct Edge {
    Acc w;
    Vec<T, kVec> x[kFold];
    Vec<T, kVec> own[kFold];
  };
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index>,
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
    e.w = t.w;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.x[k] = load_if<T, kVec>(ok, row_of(a.x + c.at[k], t.col, a.x_stride));
      e.own[k] = load_once_if<T, kVec>(ok, row_of(a.edge + c.at[k], t.id, a.edge_stride));
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index, bool) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc sum = widen<T>(e.x[k].v[i]) + widen<T>(e.own[k].v[i]);
        s.v[k][i] += e.w * (sum <= Acc(0) ? Acc(0) : sum);  // NaN stays
      }
    }
  }
};

// Its gradient, on the transposed graph: x is the gradient, own the features. Where kEdges, that of
// `edge` is written on the way.
template <typename T, typename Index, int kVec, int kFold, bool kEdges>
struct EdgeSumBackwardOp : AddOp<T, Index, kVec, kFold> {
  using Base = AddOp<T, Index, kVec, kFold>;
  using typename Base::Acc;
  using typename Base::Args;
  using typename Base::Cols;
  using typename Base::State;
  static constexpr int kUnroll = 2;
  static constexpr int kBlocks = sizeof(T) == 8 ? 3 : Base::kBlocks;

  using Tap = EdgeTap<Acc, Index>;
  static __device__ __forceinline__ Tap tap(const Args& a, Position<Index> j, bool ok) {
    return Tap(a, j, ok);
  }
  struct Row {
    Vec<T, kVec> x[kFold];
    T* out[kFold];  // the thread's columns of edge 0, or null where it has none
    int64_t stride;
  };
  struct Edge {
    Acc w;
    Index id;
    Vec<T, kVec> g[kFold];
    Vec<T, kVec> own[kFold];
  };
  static __device__ __forceinline__ void begin(const Args& a, int64_t row, const Cols& c, Row& r) {
    r.stride = a.width;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      r.x[k] = load<T, kVec>(a.own + row * a.own_stride + c.at[k]);
      r.out[k] = kEdges && c.active[k] ? a.out_edge + c.at[k] : nullptr;
    }
  }
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Position<Index>,
                                                const Tap& t, bool ok, const Cols& c, Edge& e) {
    e.w = t.w;
    e.id = t.id;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load_if<T, kVec>(ok, row_of(a.x + c.at[k], t.col, a.x_stride));
      e.own[k] = load_once_if<T, kVec>(ok, row_of(a.edge + c.at[k], t.id, a.edge_stride));
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row& r, const Edge& e, Index,
                                                bool ok) {
    if (!ok) return;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      Vec<T, kVec> back;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc sum = widen<T>(r.x[k].v[i]) + widen<T>(e.own[k].v[i]);
        const Acc v = sum <= Acc(0) ? Acc(0) : e.w * widen<T>(e.g[k].v[i]);
        s.v[k][i] += v;
        back.v[i] = narrow<T>(v);
      }
      if (kEdges && r.out[k] != nullptr) store<T, kVec>(r.out[k] + int64_t(e.id) * r.stride, back);
    }
  }
};

// ---- the sweep
// --------------------------------------------------------------------------------------------------

// Edges first, first + step, ... below end, in ascending order, kUnroll of them in flight: all
// their columns are asked for before the first is needed, then all their rows of x. For rows of
// many rounds (kLong) the columns of the next round are asked for before this round's rows are
// used, and only the last round asks which of its edges there are.
template <typename Op, bool kLong = false>
__device__ __forceinline__ void sweep(const typename Op::Args& a, typename Op::State& s,
                                      const typename Op::Row& row, const typename Op::Cols& c,
                                      Position<typename Op::Idx> first,
                                      Position<typename Op::Idx> end, unsigned step) {
  using Index = typename Op::Idx;
  using Pos = Position<Index>;
  constexpr int kUnroll = Op::kUnroll;
  Op::init(s, first < end ? Index(first) : kNoPosition<Index>);
  typename Op::Tap tap[kUnroll];
  typename Op::Edge e[kUnroll];
  const auto fetch = [&](Pos j) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) tap[u] = Op::tap(a, j + u * step, j + u * step < end);
  };
  Pos j = first;
  if constexpr (kLong) {
    fetch(j);
    for (; j + (kUnroll - 1) * step < end; j += step * kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) Op::gather(a, row, j + u * step, tap[u], true, c, e[u]);
      fetch(j + step * kUnroll);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) Op::update(s, row, e[u], Index(j + u * step), true);
    }
  } else {
    keep(step);
  }
  for (; j < end; j += step * kUnroll) {
    if constexpr (!kLong) fetch(j);
    bool ok[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      ok[u] = j + u * step < end;
      Op::gather(a, row, j + u * step, tap[u], ok[u], c, e[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) Op::update(s, row, e[u], Index(j + u * step), ok[u]);
  }
  Op::close(a, s, row, c, first, end, step);
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

// kAll: every thread has columns, in every fold.
template <typename Op, bool kAll = false>
__device__ __forceinline__ void find_columns(const typename Op::Args& a, int lanes,
                                             typename Op::Cols& c) {
  const int first =
      (int(blockIdx.y) * Op::kFolds * lanes + (int(threadIdx.x) & (lanes - 1))) * Op::kVecSize;
#pragma unroll
  for (int k = 0; k < Op::kFolds; ++k) {
    const int at = first + k * lanes * Op::kVecSize;
    c.active[k] = kAll || at < a.width;
    c.at[k] = c.active[k] ? at : 0;
  }
}

// Folds the States of the lane groups that share a row, `group` threads.
template <typename Op>
__device__ __forceinline__ void merge_groups(int lanes, int group, typename Op::State& s) {
  for (int d = lanes; d < group; d <<= 1) {
    const typename Op::State o = Op::shuffle(s, d);
    Op::merge(s, o);
  }
}

template <typename Op>
__global__ void __launch_bounds__(kThreads, Op::kBlocks)
    row_sweep(const __grid_constant__ typename Op::Args a) {
  using Pos = Position<typename Op::Idx>;
  using State = typename Op::State;
  const int thread = int(threadIdx.x), lanes = 1 << a.log_lanes;
  typename Op::Cols c;
  find_columns<Op>(a, lanes, c);
  typename Op::Row own;
  State s;

  const int log_group = a.log_lanes + a.log_parallel;
  const int64_t first_row = int64_t(blockIdx.x) << (kLogThreads - log_group);
  const int64_t row = first_row + (thread >> log_group);
  Pos begin = 0, end = 0;
  if (row < a.rows) {
    begin = Pos(a.rowptr[row]);
    end = Pos(a.rowptr[row + 1]);
  }
  const bool is_long = a.long_row != 0 && int64_t(end - begin) > a.long_row;
  // Whole warps take part, with empty ranges where a group has nothing to do: the shuffles need
  // every lane.
  const bool here = row < a.rows && !is_long;
  if (here) Op::begin(a, row, c, own);
  Op::settle(own);
  const int member = (thread >> a.log_lanes) & ((1 << a.log_parallel) - 1);
  sweep<Op>(a, s, own, c, here ? begin + member : Pos(0), here ? end : Pos(0),
            1u << a.log_parallel);
  merge_groups<Op>(lanes, 1 << log_group, s);
  if (here && member == 0) Op::finish(a, s, row, int64_t(end - begin), c);
  if (a.long_row == 0 || !__syncthreads_or(is_long)) return;

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

// A partial result to its slot of scratch.
template <typename Op>
__device__ __forceinline__ void save_state(const typename Op::Args& a, const typename Op::State& s,
                                           int slot, const typename Op::Cols& c) {
#pragma unroll
  for (int k = 0; k < Op::kFolds; ++k) {
    if (!c.active[k]) continue;
    const int64_t at = int64_t(slot) * a.width + c.at[k];
    Op::save_vector(s, k, a.scratch + at, Op::kHasArg ? a.scratch_arg + at : nullptr);
  }
}

// kLogLanes, kLogParallel: the geometry, where it is worth an instantiation of its own, for widths
// that it divides; -1: as the arguments say.
template <typename Op, int kLogLanes, int kLogParallel>
__global__ void __launch_bounds__(kItemThreads, Op::kItemBlocks)
    item_sweep(const __grid_constant__ typename Op::Args a) {
  using Pos = Position<typename Op::Idx>;
  constexpr bool kFixed = kLogLanes >= 0;
  const unsigned thread = threadIdx.x;
  const int log_lanes = kFixed ? kLogLanes : a.log_lanes;
  const int log_group = log_lanes + (kFixed ? kLogParallel : a.log_parallel);
  typename Op::Cols c;
  find_columns<Op, kFixed>(a, 1 << log_lanes, c);
  const unsigned at = (blockIdx.x << (kLogItemThreads - log_group)) + (thread >> log_group);
  const bool here = at < unsigned(a.num_items);
  int4 item = make_int4(0, 0, 0, -1);
  if (here) {
    item = a.items != nullptr ? a.items[at]
                              : make_int4(int(at), int(a.rowptr[at]), int(a.rowptr[at + 1]), -1);
  }
  typename Op::Row own;
  typename Op::State s;
  if (here) Op::begin(a, item.x, c, own);
  if constexpr (!kFixed) Op::settle(own);
  const unsigned parallel = 1u << (log_group - log_lanes);
  const unsigned member = (thread >> log_lanes) & (parallel - 1);
  sweep<Op, kFixed>(a, s, own, c, Pos(item.y) + member, Pos(item.z), parallel);
  merge_groups<Op>(1 << log_lanes, 1 << log_group, s);
  if (!here || member != 0) return;
  if (item.w < 0) {
    Op::finish(a, s, item.x, int64_t(item.z) - item.y, c);
    return;
  }
  save_state<Op>(a, s, item.w, c);
}

// A group reads the bounds of a row, then the columns of its edges, then x: three times in a row it
// waits for memory, and rows of two or three edges are over before much of it is in flight. So here
// it takes `bundle` consecutive rows, whose edges it streams as if they were of one, and writes a
// row wherever one ends. Of rows of more than `chunk` edges it takes the pieces, the first items of
// a plan. For plain ends alone (see Epilogue): with the code for the others it is slower.
template <typename Op>
__global__ void __launch_bounds__(kItemThreads, Op::kStreamBlocks)
    stream_sweep(const __grid_constant__ typename Op::Args a) {
  using Pos = Position<typename Op::Idx>;
  constexpr int kUnroll = 2;  // edges; as many more columns are on their way
  const unsigned thread = threadIdx.x;
  typename Op::Cols c;
  find_columns<Op>(a, 1 << a.log_lanes, c);
  unsigned at = (blockIdx.x << (kLogItemThreads - a.log_lanes)) + (thread >> a.log_lanes);
  int row, stop, last;  // rows up to `stop` are streamed at once, those up to `last` altogether
  Pos j, end, row_end;
  const bool piece = at < unsigned(a.num_pieces);
  if (piece) {
    const int4 item = a.items[at];
    row = -1 - item.w;  // its slot
    last = row + 1;
    j = Pos(item.y);
    end = Pos(item.z);
    row_end = end;
  } else {
    at -= unsigned(a.num_pieces);
    if (uint64_t(at) * unsigned(a.bundle) >= uint64_t(a.rows)) return;
    row = int(at) * a.bundle;
    last = int(min(int64_t(row) + a.bundle, a.rows));
    j = Pos(a.rowptr[row]);
    end = Pos(a.rowptr[last]);
    row_end = Pos(a.rowptr[row + 1]);
  }
  stop = last;
  Pos row_begin = j;
  typename Op::Row own;
  Op::begin(a, row, c, own);
  Op::settle(own);
  typename Op::State s;
  Op::init(s, 0);
  typename Op::Tap tap[kUnroll];
  typename Op::Edge e[kUnroll];
  const auto fetch = [&](Pos from) {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) tap[u] = Op::tap(a, from + u, from + u < end);
  };
  const bool skips = a.num_pieces > 0 && !piece;
  const auto in_pieces = [&](int r) { return int64_t(a.rowptr[r + 1]) - a.rowptr[r] > a.chunk; };
  do {
    if (skips) {
      while (row < last && in_pieces(row)) ++row;
      if (row == last) return;
      stop = row + 1;
      while (stop < last && !in_pieces(stop)) ++stop;
      j = row_begin = Pos(a.rowptr[row]);
      row_end = Pos(a.rowptr[row + 1]);
      end = Pos(a.rowptr[stop]);
    }
    fetch(j);
    for (; row < stop; j += kUnroll) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) Op::gather(a, own, j + u, tap[u], j + u < end, c, e[u]);
      fetch(j + kUnroll);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        while (j + u == row_end && row < stop) {
          if (row < 0) {
            save_state<Op>(a, s, -1 - row, c);
          } else {
            Op::finish_plain(a, s, row, int64_t(row_end - row_begin), c);
          }
          Op::init(s, 0);
          row_begin = row_end;
          if (++row < stop) row_end = Pos(a.rowptr[row + 1]);
        }
        Op::update(s, own, e[u], int(j + u), true);
      }
    }
    if (skips) Op::init(s, 0);
  } while (skips && row < last);
}

// Folds the pieces of each split row: for a vector of columns 2^kLogMembers threads of a warp, each
// of which takes every so many-th piece. (Without a number of blocks, ptxas keeps to 32 registers
// and so to three loads in flight.)
template <typename Op, int kLogMembers>
__global__ void __launch_bounds__(kItemThreads, 6)
    merge_pieces(const __grid_constant__ typename Op::Args a) {
  constexpr int kVec = Op::kVecSize, kMembers = 1 << kLogMembers, kShared = 32 / kMembers;
  static_assert(Op::kFolds == 1);
  const int member = (int(threadIdx.x) & 31) / kShared;
  const uint64_t thread = uint64_t(blockIdx.x) * kItemThreads + threadIdx.x;
  const uint64_t vector = (thread >> 5) * kShared + (threadIdx.x & (kShared - 1));
  const unsigned vectors = unsigned(a.width) / kVec;
  const uint64_t number = vector / vectors;
  const int at = int(vector % vectors) * kVec;
  // The shuffles need every lane, so where a thread has no piece it has an empty State.
  const bool here = number < unsigned(a.num_merges);
  const int4 merge = here ? a.items[a.num_items + number] : make_int4(0, 0, 0, 0);
  typename Op::State s;
  Op::init(s, kNoPosition<typename Op::Idx>);
  int slot = merge.y + member;
  const auto fold = [&](auto batch) {
    constexpr int kBatch = decltype(batch)::value;
    typename Op::State o[kBatch];
#pragma unroll
    for (int u = 0; u < kBatch; ++u) {
      Op::init(o[u], kNoPosition<typename Op::Idx>);
      if (slot + u * kMembers >= merge.z) continue;
      const int64_t from = int64_t(slot + u * kMembers) * a.width + at;
      Op::restore_vector(o[u], 0, a.scratch + from, Op::kHasArg ? a.scratch_arg + from : nullptr);
    }
#pragma unroll
    for (int u = 0; u < kBatch; ++u) Op::merge(s, o[u]);
    slot += kBatch * kMembers;
  };
  // Most rows have a few pieces, a hub hundreds: many loads in flight, folded one by one, as many
  // as there are registers for.
  using Acc = typename Op::Acc;
  constexpr int kBytes = kVec * int(sizeof(Acc) + (Op::kHasArg ? sizeof(typename Op::Idx) : 0));
  constexpr int kMany = sizeof(Acc) == 8 ? 8 : kBytes <= 16 ? 16 : kBytes <= 32 ? 8 : 2;
  constexpr int kFew = kMany < 4 ? kMany : 4;
  while (slot + (kMany / 2) * kMembers < merge.z) fold(std::integral_constant<int, kMany>());
  while (slot < merge.z) fold(std::integral_constant<int, kFew>());
  merge_groups<Op>(kShared, 32, s);
  if (!here || member != 0) return;
  typename Op::Cols c;
  c.at[0] = at;
  c.active[0] = true;
  Op::finish(a, s, merge.x, int64_t(a.rowptr[merge.x + 1]) - a.rowptr[merge.x], c);
}

}  // namespace gsp::cuda
