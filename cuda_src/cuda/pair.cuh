// GATv2's score of an edge, <att, act(a[row] + b[col])> for each head, and its gradient.
//
// A group of lanes takes a run of consecutive edges, so that work is even whatever the degrees and
// no hub is a chain. A score belongs to one group. A sum over the edges of a row may have terms
// from several groups: those of a block meet in shared memory, those of several blocks in scratch,
// always in the order of the edges.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

template <typename T, typename Index>
struct PairArgs {
  const Index* rowptr;
  const Index* col;
  const Index* perm;
  const T* grad;  // [edges, heads], by edge id
  const T* a;
  const T* b;
  const T* att;    // [width]
  T* out;          // [edges, heads], or [rows, width]
  Index a_stride;  // bytes
  Index b_stride;
  int64_t rows;
  int64_t edges;
  acc_t<T> slope;
  int width;
  int heads;
  int head_width;
  int log_head;   // lanes of a head
  int log_lanes;  // and of a group
  int run;        // edges of a group
  // Of a gradient, for each block: sums of the row that began before it and of the one that goes on
  // after it, which one that is or -1, and its part of out_att.
  acc_t<T>* open_sum;  // [blocks, 2, width]
  Index* open_row;     // [blocks]
  acc_t<T>* att_sum;   // [blocks, width]
  acc_t<T>* out_att;   // [width]
  int64_t blocks;
};

// The row of edge j: the last that begins at or before it. All lanes of a warp ask for the same
// one.
template <typename Index>
__device__ __forceinline__ Index find_row(const Index* rowptr, int64_t rows, int64_t j) {
  int64_t low = 0;
  for (int64_t size = rows; size > 1;) {
    const int64_t step = (size + 31) / 32, mine = step * (threadIdx.x & 31);
    const bool begun = mine < size && int64_t(rowptr[low + mine]) <= j;
    const int64_t skipped = step * (__popc(__ballot_sync(kFullMask, begun)) - 1);
    low += skipped;
    size = size - skipped < step ? size - skipped : step;
  }
  return Index(low);
}

// The same from a row on that begins before, most often the one before.
template <typename Index>
__device__ __forceinline__ Index find_row_from(const Index* rowptr, Index low, int64_t rows,
                                               std::make_unsigned_t<Index> j) {
  using Pos = std::make_unsigned_t<Index>;
  Pos row = Pos(low), step = 1;
  const auto go = [&] {
    const bool begun = row + step < Pos(rows) && Pos(rowptr[row + step]) <= j;
    if (begun) row += step;
    return begun;
  };
  while (go()) step *= 2;
  while (step > 1) {
    step /= 2;
    go();
  }
  return Index(row);
}

// The edges of a group, several at a time.
template <typename T, typename Index>
struct PairRun {
  using Pos = std::make_unsigned_t<Index>;
  static constexpr int kUnroll = sizeof(Index) == 4 ? 4 : 1;

  const PairArgs<T, Index>& p;
  Pos next, end;
  Index row_end, next_row_end;  // the latter is there before it is needed
  Index next_col[kUnroll], next_id[kUnroll];
  // The edges that it stands at, the first of which is there if any is. What is not there has the
  // row of the one before.
  bool ok[kUnroll];
  Index row[kUnroll], col[kUnroll], id[kUnroll];

  __device__ __forceinline__ explicit PairRun(const PairArgs<T, Index>& args) : p(args) {
    const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
    const int64_t first = (thread >> p.log_lanes) * p.run;
    const int64_t of_warp = ((thread & ~int64_t(31)) >> p.log_lanes) * p.run;
    next = Pos(first < p.edges ? first : p.edges);
    end = Pos(first + p.run < p.edges ? first + p.run : p.edges);
    Index at = find_row(p.rowptr, p.rows, of_warp < p.edges ? of_warp : p.edges - 1);
    if (next < end) at = find_row_from(p.rowptr, at, p.rows, next);
    row[kUnroll - 1] = at;
    row_end = begin_of(at, 1);
    next_row_end = begin_of(at, 2);
    fetch();
  }

  // Where the row `at` + `ahead` begins, if there is one.
  __device__ __forceinline__ Index begin_of(Index at, int64_t ahead) const {
    return p.rowptr[at + ahead < p.rows ? at + ahead : p.rows];
  }

  // Before anything is done with the edges at hand, those that come next are asked for.
  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Pos j = next + u;
      next_col[u] = j < end ? p.col[j] : Index(0);
      next_id[u] = p.perm == nullptr ? Index(j) : j < end ? p.perm[j] : Index(0);
    }
  }

  __device__ __forceinline__ void step() {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Pos j = next + u;
      ok[u] = j < end;
      col[u] = next_col[u];
      id[u] = next_id[u];
      row[u] = row[u == 0 ? kUnroll - 1 : u - 1];
      if (ok[u] && j >= Pos(row_end)) {
        if (j < Pos(next_row_end)) {
          ++row[u];
          row_end = next_row_end;
        } else {  // rows without edges lie between
          row[u] = find_row_from(p.rowptr, row[u], p.rows, j);
          row_end = begin_of(row[u], 1);
        }
        next_row_end = begin_of(row[u], 2);
      }
    }
    next += kUnroll;
    fetch();
  }

  // kVec columns of both ends of these edges, from `column` on.
  template <int kVec>
  __device__ __forceinline__ void gather(int column, Vec<T, kVec> (&a)[kUnroll],
                                         Vec<T, kVec> (&b)[kUnroll]) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      b[u] = load_if<T, kVec>(ok[u], row_of(p.b + column, col[u], p.b_stride));
      if (u > 0) a[u] = a[u - 1];
      if (u == 0 || row[u] != row[u - 1]) {
        a[u] = load_if<T, kVec>(ok[u], row_of(p.a + column, row[u], p.a_stride));
      }
    }
  }
};

// Blocks on a multiprocessor: a thread has 65536 / (256 * kPairBlocks) registers. Of the vectors of
// floats of a gradient, three spill on sm_86 and sm_89.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900
constexpr int kFloatPairBlocks = 2;
#else
constexpr int kFloatPairBlocks = 3;
#endif
template <typename T, int kVec>
constexpr int kPairBlocks = kVec == 1        ? 3
                            : sizeof(T) == 4 ? kFloatPairBlocks
                                             : 2;

// Each head has some lanes, and a group as many heads as fit; blockIdx.y counts groups of heads.
template <typename T, typename Index, int kVec>
__global__ void __launch_bounds__(kThreads, kPairBlocks<T, kVec>)
    pair_score(const __grid_constant__ PairArgs<T, Index> p) {
  using Acc = acc_t<T>;
  using Run = PairRun<T, Index>;
  const int lane = int(threadIdx.x) & ((1 << p.log_lanes) - 1), lanes = 1 << p.log_head;
  const int head = (int(blockIdx.y) << (p.log_lanes - p.log_head)) + (lane >> p.log_head);
  const int in_head = lane & (lanes - 1), stop = head < p.heads ? (head + 1) * p.head_width : 0;
  Run run(p);
  // To the end of a full run, since the shuffles need every lane.
  for (int done = 0; done < p.run; done += Run::kUnroll) {
    run.step();
    Acc sum[Run::kUnroll] = {};
    for (int c = head * p.head_width + in_head * kVec; c < stop; c += lanes * kVec) {
      Vec<T, kVec> a[Run::kUnroll], b[Run::kUnroll];
      run.gather(c, a, b);
      const Vec<T, kVec> att = load<T, kVec>(p.att + c);
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        const Acc factor = widen<T>(att.v[i]);
#pragma unroll
        for (int u = 0; u < Run::kUnroll; ++u) {
          const Acc x = widen<T>(a[u].v[i]) + widen<T>(b[u].v[i]);
          sum[u] += factor * (x > 0 ? x : p.slope * x);
        }
      }
    }
#pragma unroll
    for (int u = 0; u < Run::kUnroll; ++u) {
      for (int d = lanes >> 1; d > 0; d >>= 1) sum[u] += __shfl_xor_sync(kFullMask, sum[u], d);
      if (run.ok[u] && in_head == 0 && head < p.heads) {
        p.out[int64_t(run.id[u]) * p.heads + head] = narrow<T>(sum[u]);
      }
    }
  }
}

// Lanes of a group are adjacent columns; blockIdx.y counts groups of columns. `out` is zero.
template <typename T, typename Index, int kVec>
__global__ void __launch_bounds__(kThreads, kPairBlocks<T, kVec>)
    pair_gradient(const __grid_constant__ PairArgs<T, Index> p) {
  using Acc = acc_t<T>;
  using Run = PairRun<T, Index>;
  constexpr int kUnroll = Run::kUnroll;
  // Sums of the first and of the last row of each group, and which rows these are.
  __shared__ __align__(16) Acc piece[2 * kThreads * kVec];
  __shared__ Index piece_row[2 * kThreads];
  const int thread = int(threadIdx.x), group = thread >> p.log_lanes;
  const int columns = kVec << p.log_lanes, mine = (thread & ((1 << p.log_lanes) - 1)) * kVec;
  const int first_column = int(blockIdx.y) * columns;
  const bool active = first_column + mine < p.width;
  const int c = active ? first_column + mine : 0;
  const T* grad = p.grad + c / p.head_width;
  Run run(p);
  Index open = run.next < run.end ? run.row[kUnroll - 1] : Index(-1);  // whose sum this is
  Acc sum[kVec] = {}, of_att[kVec] = {};
  Vec<T, kVec> own;
  const auto keep_piece = [&](int which) {
    store_wide<Acc, kVec>(piece + (2 * group + which) * columns + mine, sum);
    if (mine == 0) piece_row[2 * group + which] = open;
  };
  const auto close = [&] {
#pragma unroll
    for (int i = 0; i < kVec; ++i) of_att[i] += widen<T>(own.v[i]) * sum[i];
  };
  bool first = true;
  while (run.next < run.end) {
    run.step();
    Vec<T, kVec> a[kUnroll], b[kUnroll];
    Acc g[kUnroll];
    run.gather(c, a, b);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      g[u] = run.ok[u] ? widen<T>(grad[int64_t(run.id[u]) * p.heads]) : Acc(0);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (run.row[u] != open) {
        close();
        if (first) {
          keep_piece(0);
        } else if (active) {
          const Vec<T, kVec> att = load<T, kVec>(p.att + c);
          Vec<T, kVec> result;
#pragma unroll
          for (int i = 0; i < kVec; ++i) result.v[i] = narrow<T>(widen<T>(att.v[i]) * sum[i]);
          store<T, kVec>(p.out + int64_t(open) * p.width + c, result);
        }
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[i] = Acc(0);
        first = false;
        open = run.row[u];
      }
      own = a[u];
      const Acc low = p.slope * g[u];
#pragma unroll
      for (int i = 0; i < kVec; ++i) {
        sum[i] += widen<T>(own.v[i]) + widen<T>(b[u].v[i]) > 0 ? g[u] : low;
      }
    }
  }
  if (open >= 0) close();
  if (first) {
    keep_piece(0);
#pragma unroll
    for (int i = 0; i < kVec; ++i) sum[i] = Acc(0);
  }
  keep_piece(1);
  __syncthreads();

  // Each row that has pieces here: finished, or left to `merge_pairs`.
  const int pieces = 2 << (kLogThreads - p.log_lanes);
  const int64_t begin = int64_t(blockIdx.x) * (pieces / 2) * p.run;
  const int64_t stop = begin + (pieces / 2) * int64_t(p.run);
  for (int task = thread; task < pieces * columns; task += kThreads) {
    const int of = task / columns, column = first_column + task % columns;
    const Index row = piece_row[of];
    if (row < 0 || (of > 0 && piece_row[of - 1] == row) || column >= p.width) continue;
    Acc total = 0;
    for (int k = of; k < pieces && piece_row[k] == row; ++k)
      total += piece[k * columns + task % columns];
    const bool began = p.rowptr[row] >= begin;
    if (began && p.rowptr[row + 1] <= stop) {
      p.out[int64_t(row) * p.width + column] = narrow<T>(widen<T>(p.att[column]) * total);
    } else {
      p.open_sum[(2 * int64_t(blockIdx.x) + began) * p.width + column] = total;
    }
  }
  if (thread == 0) {
    const Index row = piece_row[pieces - 1];
    const bool goes_on = row >= 0 && p.rowptr[row] >= begin && p.rowptr[row + 1] > stop;
    p.open_row[blockIdx.x] = goes_on ? row : Index(-1);
  }
  __syncthreads();

  store_wide<Acc, kVec>(piece + group * columns + mine, of_att);
  __syncthreads();
  for (int k = thread; k < columns && first_column + k < p.width; k += kThreads) {
    Acc total = 0;
    for (int g = 0; g < pieces / 2; ++g) total += piece[g * columns + k];
    p.att_sum[int64_t(blockIdx.x) * p.width + first_column + k] = total;
  }
}

constexpr int kAttColumns = 8;  // that a block of `merge_pairs` adds up

// The rows that several blocks had edges of, a thread a column; and, in the first blocks, out_att.
template <typename T, typename Index>
__global__ void __launch_bounds__(kThreads)
    merge_pairs(const __grid_constant__ PairArgs<T, Index> p) {
  using Acc = acc_t<T>;
  constexpr int kMembers = kThreads / kAttColumns;
  __shared__ Acc part[kMembers][kAttColumns];
  const int64_t att_blocks = (p.width + kAttColumns - 1) / kAttColumns;
  if (blockIdx.x < att_blocks) {
    const int k = int(threadIdx.x) % kAttColumns, member = int(threadIdx.x) / kAttColumns;
    const int column = int(blockIdx.x) * kAttColumns + k;
    Acc total = 0;
    if (column < p.width) {
#pragma unroll 8
      for (int64_t block = member; block < p.blocks; block += kMembers) {
        total += p.att_sum[block * p.width + column];
      }
    }
    part[member][k] = total;
    __syncthreads();
    if (member != 0 || column >= p.width) return;
    for (int m = 1; m < kMembers; ++m) total += part[m][k];
    p.out_att[column] = total;
    return;
  }
  const int64_t at = (int64_t(blockIdx.x) - att_blocks) * kThreads + threadIdx.x;
  const int64_t block = at / p.width, column = at % p.width;
  if (block >= p.blocks) return;
  const Index row = p.open_row[block];
  if (row < 0) return;
  const int64_t of_block = int64_t(p.run) << (kLogThreads - p.log_lanes);
  const int64_t last = (int64_t(p.rowptr[row + 1]) - 1) / of_block;
  Acc total = p.open_sum[(2 * block + 1) * p.width + column];
#pragma unroll 8
  for (int64_t k = block + 1; k <= last; ++k) total += p.open_sum[2 * k * p.width + column];
  p.out[int64_t(row) * p.width + column] = narrow<T>(widen<T>(p.att[column]) * total);
}

}  // namespace gsp::cuda
