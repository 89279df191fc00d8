// One sweep over the rows of a CSR matrix, for every reduction that ends in one value per row and column.
//
// A group of `lanes` threads covers the columns of a row, 16 bytes a thread where alignment allows; `parallel` such
// groups share a short row, each taking every `parallel`-th edge, with kUnroll gathers in flight a thread. A row of more
// than `long_row` edges would be a chain of dependent gathers, so the whole block sweeps it, `chunk` edges at a time.
// A row of more than `chunk` edges is split over blocks where the plan says so (items): each chunk leaves a partial
// result in scratch, and `merge_chunks` folds them in ascending order, which is also what a single block does with the
// chunks of an unsplit row. So splitting never changes a bit, no float is ever added atomically, and the order of a sum
// depends on the row, the width and the parameters alone.
#pragma once

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
  const acc_t<T>* dst_scale;
  T* out;
  acc_t<T>* out_wide;  // instead of out, where the result has the accumulation type
  Index* out_arg;
  int64_t x_stride;      // elements between rows of x
  int64_t other_stride;  // of other
  int64_t own_stride;    // of own
  int64_t rows;
  int width;
  int heads;       // 1 where a weight belongs to all columns
  int head_width;  // columns a head
  bool mean;
  // geometry
  int log_lanes;
  int log_parallel;
  int64_t long_row;
  int64_t chunk;
  const int4* items;  // {row, begin, end, slot} of num_items chunks, then {row, first slot, end slot, -} of the rows
  int num_items;
  int num_merges;
  acc_t<T>* scratch;    // [slots, width]
  Index* scratch_arg;   // [slots, width]
};

// The columns of one thread: kFold vectors of kVec, `lanes` vectors apart.
template <int kVec, int kFold>
struct Columns {
  int at[kFold];       // first column, 0 where the thread has none
  bool active[kFold];  // whether it has
};

template <typename Index>
constexpr Index kNoPosition = sizeof(Index) == 4 ? Index(0x7fffffff) : Index(0x7fffffffffffffffLL);

enum class Weighting { kNone, kScalar, kHeads };

// ---- reductions -------------------------------------------------------------------------------------------------
//
// An Op has a State for the columns of one thread and says how an edge is gathered (Edge, gather), how it is folded
// in (update), how two States meet (merge, shuffle), and what is written (finish, save, restore).

template <typename T, typename Index, int kVec, int kFold>
struct OpBase {
  using Element = T;
  using Idx = Index;
  using Args = SweepArgs<T, Index>;
  using Acc = acc_t<T>;
  using Cols = Columns<kVec, kFold>;
  static constexpr int kVecSize = kVec;
  static constexpr int kFolds = kFold;

  template <Weighting kWeighting>
  static __device__ __forceinline__ Acc weight_of(const Args& a, Index position, int column) {
    if constexpr (kWeighting == Weighting::kNone) {
      return Acc(1);
    } else if constexpr (kWeighting == Weighting::kScalar) {
      return widen<T>(a.weight[position]);
    } else {
      return widen<T>(a.weight[int64_t(position) * a.heads + column / a.head_width]);
    }
  }
  // For the Ops that are not instantiated per weighting.
  static __device__ __forceinline__ Acc any_weight(const Args& a, Index position, int column) {
    return a.weight == nullptr ? Acc(1) : weight_of<Weighting::kHeads>(a, position, column);
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
  static __device__ __forceinline__ void merge_one(State& s, const State& o, int k, int i) { s.v[k][i] += o.v[k][i]; }
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
  static __device__ __forceinline__ void save(const State& s, int k, int i, Acc* v, Index*) { *v = s.v[k][i]; }
  static __device__ __forceinline__ void restore(State& s, int k, int i, const Acc* v, const Index*) { s.v[k][i] = *v; }

  static __device__ __forceinline__ void finish(const Args& a, const State& s, int64_t row, int64_t length,
                                                const Cols& c) {
    const Acc scale = a.dst_scale == nullptr ? Acc(1) : a.dst_scale[row];
    const Acc count = a.mean ? Acc(length > 1 ? length : 1) : Acc(1);
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (!c.active[k]) continue;
      const int64_t at = row * a.width + c.at[k];
      Vec<T, kVec> o;
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        Acc v = s.v[k][i];
        if (a.mean) v /= count;
        if (a.dst_scale != nullptr) v *= scale;
        if (a.out_wide != nullptr) {
          a.out_wide[at + i] = v;
        } else {
          o.v[i] = narrow<T>(v);
        }
      }
      if (a.out_wide == nullptr) store<T, kVec>(a.out + at, o);
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
  static constexpr int kUnroll = 4;

  struct Row {};
  struct Edge {
    Acc w[kWeighting == Weighting::kHeads ? kFold : 1];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Index position, const Cols& c, Edge& e) {
    const Index col = a.col[position];
    const T* x = a.x + int64_t(col) * a.x_stride;
#pragma unroll
    for (int k = 0; k < kFold; ++k) e.x[k] = load<T, kVec>(x + c.at[k]);
    const Acc scale = a.src_scale == nullptr ? Acc(1) : a.src_scale[col];
#pragma unroll
    for (int k = 0; k < (kWeighting == Weighting::kHeads ? kFold : 1); ++k) {
      e.w[k] = Base::template weight_of<kWeighting>(a, position, c.at[k]) * scale;
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      const Acc w = e.w[kWeighting == Weighting::kHeads ? k : 0];
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i] += w * widen<T>(e.x[k].v[i]);
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
  struct Edge {
    Acc w[kFold];
    Vec<T, kVec> x[kFold];
  };
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
  static __device__ __forceinline__ void restore(State& s, int k, int i, const Acc* v, const Index* p) {
    s.v[k][i].value = *v;
    s.v[k][i].position = *p;
  }
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Index position, const Cols& c, Edge& e) {
    const T* x = a.x + int64_t(a.col[position]) * a.x_stride;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.x[k] = load<T, kVec>(x + c.at[k]);
      e.w[k] = Base::any_weight(a, position, c.at[k]);
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index position) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) s.v[k][i].update(round_to<T>(e.w[k] * widen<T>(e.x[k].v[i])), position);
    }
  }
  static __device__ __forceinline__ void finish(const Args& a, const State& s, int64_t row, int64_t length,
                                                const Cols& c) {
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
      store<T, kVec>(a.out + at, o);
    }
  }
};

// Gradient of a maximum on the transposed graph: x is the gradient, arg the winning edge of each of its elements.
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
    Index arg[kFold][kVec];
    Index id;
  };
  static __device__ __forceinline__ void begin(const Args&, int64_t, const Cols&, Row&) {}
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Index position, const Cols& c, Edge& e) {
    const int64_t col = a.col[position];
    e.id = a.perm == nullptr ? position : a.perm[position];
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load<T, kVec>(a.x + col * a.x_stride + c.at[k]);
      e.w[k] = Base::any_weight(a, position, c.at[k]);
      const Index* arg = a.arg + col * a.width + c.at[k];
#pragma unroll
      for (int i = 0; i < kVec; ++i) e.arg[k][i] = arg[i];
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row&, const Edge& e, Index) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        if (e.arg[k][i] == e.id) s.v[k][i] += e.w[k] * widen<T>(e.g[k].v[i]);
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
  struct Edge {
    Acc w[kFold];
    Vec<T, kVec> x[kFold];
  };
  static __device__ __forceinline__ void begin(const Args& a, int64_t row, const Cols& c, Row& r) {
#pragma unroll
    for (int k = 0; k < kFold; ++k) r.best[k] = load<T, kVec>(a.own + row * a.own_stride + c.at[k]);
  }
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Index position, const Cols& c, Edge& e) {
    const T* x = a.x + int64_t(a.col[position]) * a.x_stride;
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.x[k] = load<T, kVec>(x + c.at[k]);
      e.w[k] = Base::any_weight(a, position, c.at[k]);
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row& r, const Edge& e, Index) {
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

// Gradient of a maximum with ties split, on the transposed graph: x is the gradient's share, other the result
// (both gathered by column), own the features.
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
  static __device__ __forceinline__ void gather(const Args& a, const Row&, Index position, const Cols& c, Edge& e) {
    const int64_t col = a.col[position];
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      e.g[k] = load<T, kVec>(a.x + col * a.x_stride + c.at[k]);
      e.best[k] = load<T, kVec>(a.other + col * a.other_stride + c.at[k]);
      e.w[k] = Base::any_weight(a, position, c.at[k]);
    }
  }
  static __device__ __forceinline__ void update(State& s, const Row& r, const Edge& e, Index) {
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

// ---- the sweep --------------------------------------------------------------------------------------------------

// Edges first, first + step, ... below end, in ascending order, kUnroll of them in flight.
template <typename Op>
__device__ __forceinline__ void sweep(const typename Op::Args& a, typename Op::State& s, const typename Op::Row& row,
                                      const typename Op::Cols& c, int64_t first, int64_t end, int step) {
  using Index = typename Op::Idx;
  Op::init(s, first < end ? Index(first) : kNoPosition<Index>);
  for (int64_t j = first; j < end; j += int64_t(step) * Op::kUnroll) {
    typename Op::Edge e[Op::kUnroll];
#pragma unroll
    for (int u = 0; u < Op::kUnroll; ++u) {
      if (j + u * step < end) Op::gather(a, row, Index(j + u * step), c, e[u]);
    }
#pragma unroll
    for (int u = 0; u < Op::kUnroll; ++u) {
      if (j + u * step < end) Op::update(s, row, e[u], Index(j + u * step));
    }
  }
}

template <typename Op>
__global__ void __launch_bounds__(kThreads) row_sweep(typename Op::Args a) {
  using Acc = typename Op::Acc;
  using Index = typename Op::Idx;
  using State = typename Op::State;
  constexpr int kVec = Op::kVecSize, kFold = Op::kFolds, kWords = kVec * kFold * 32;
  __shared__ Acc part[kWarps][kWords];
  __shared__ Index part_arg[Op::kHasArg ? kWarps : 1][Op::kHasArg ? kWords : 1];
  __shared__ int64_t long_rows[kThreads];
  __shared__ int num_long;

  const int thread = int(threadIdx.x), lanes = 1 << a.log_lanes, lane = thread & (lanes - 1);
  const int group = thread >> (a.log_lanes + a.log_parallel);
  const int warp = thread >> 5;
  typename Op::Cols c;
#pragma unroll
  for (int k = 0; k < kFold; ++k) {
    const int at = ((int(blockIdx.y) * kFold + k) * lanes + lane) * kVec;
    c.active[k] = at < a.width;
    c.at[k] = c.active[k] ? at : 0;
  }
  typename Op::Row own;
  State s;

  const bool is_item = int(blockIdx.x) < a.num_items;
  if (thread == 0) num_long = 0;
  __syncthreads();
  if (!is_item) {
    const int groups = kThreads >> (a.log_lanes + a.log_parallel);
    const int64_t row = (int64_t(blockIdx.x) - a.num_items) * groups + group;
    int64_t begin = 0, end = 0;
    if (row < a.rows) {
      begin = a.rowptr[row];
      end = a.rowptr[row + 1];
    }
    const int64_t length = end - begin;
    const bool is_long = length > a.long_row;
    const bool elsewhere = a.num_items > 0 && length > a.chunk;
    if (is_long && !elsewhere && (thread & ((1 << (a.log_lanes + a.log_parallel)) - 1)) == 0) {
      long_rows[atomicAdd(&num_long, 1)] = row;
    }
    // Whole warps take part, with empty ranges where a group has nothing to do: the shuffles need every lane.
    const bool here = row < a.rows && !is_long;
    if (here) Op::begin(a, row, c, own);
    const int member = (thread >> a.log_lanes) & ((1 << a.log_parallel) - 1);
    sweep<Op>(a, s, own, c, here ? begin + member : 0, here ? end : 0, 1 << a.log_parallel);
    for (int d = lanes; d < lanes << a.log_parallel; d <<= 1) {
      const State o = Op::shuffle(s, d);
      Op::merge(s, o);
    }
    if (here && member == 0) Op::finish(a, s, row, length, c);
    __syncthreads();
  }

  const int todo = is_item ? 1 : num_long;
  for (int t = 0; t < todo; ++t) {
    int64_t row, begin, end, slot = 0;
    if (is_item) {
      const int4 item = a.items[blockIdx.x];
      row = item.x;
      begin = item.y;
      end = item.z;
      slot = item.w;
    } else {
      row = long_rows[t];
      begin = a.rowptr[row];
      end = a.rowptr[row + 1];
    }
    Op::begin(a, row, c, own);
    State total;
    for (int64_t from = begin; from < end; from += a.chunk) {
      const int64_t to = from + a.chunk < end ? from + a.chunk : end;
      sweep<Op>(a, s, own, c, from + (thread >> a.log_lanes), to, kThreads >> a.log_lanes);
      for (int d = lanes; d < 32; d <<= 1) {
        const State o = Op::shuffle(s, d);
        Op::merge(s, o);
      }
      if ((thread & 31) < lanes) {
#pragma unroll
        for (int k = 0; k < kFold; ++k) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const int word = (k * kVec + i) * 32 + lane;
            Op::save(s, k, i, &part[warp][word], &part_arg[Op::kHasArg ? warp : 0][Op::kHasArg ? word : 0]);
          }
        }
      }
      __syncthreads();
      if (thread < lanes) {
#pragma unroll
        for (int k = 0; k < kFold; ++k) {
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const int word = (k * kVec + i) * 32 + lane;
            State o;
            for (int w = 1; w < kWarps; ++w) {
              Op::restore(o, k, i, &part[w][word], &part_arg[Op::kHasArg ? w : 0][Op::kHasArg ? word : 0]);
              Op::merge_one(s, o, k, i);
            }
          }
        }
        if (from == begin) {
          total = s;
        } else {
          Op::merge(total, s);
        }
      }
      __syncthreads();
    }
    if (thread < lanes) {
      if (!is_item) {
        Op::finish(a, total, row, end - begin, c);
      } else {
#pragma unroll
        for (int k = 0; k < kFold; ++k) {
          if (!c.active[k]) continue;
#pragma unroll
          for (int i = 0; i < kVec; ++i) {
            const int64_t at = slot * a.width + c.at[k] + i;
            Op::save(total, k, i, a.scratch + at, Op::kHasArg ? a.scratch_arg + at : nullptr);
          }
        }
      }
    }
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
  for (int slot = merge.y; slot < merge.z; ++slot) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      const int64_t word = int64_t(slot) * a.width + at + i;
      Op::restore(slot == merge.y ? s : o, 0, i, a.scratch + word, Op::kHasArg ? a.scratch_arg + word : nullptr);
    }
    if (slot > merge.y) Op::merge(s, o);
  }
  typename Op::Cols c;
  c.at[0] = at;
  c.active[0] = true;
  Op::finish(a, s, merge.x, int64_t(a.rowptr[merge.x + 1]) - a.rowptr[merge.x], c);
}

}  // namespace gsp::cuda
