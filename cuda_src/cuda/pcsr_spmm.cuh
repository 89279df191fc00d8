// Sums over PCSR, the format of ParamSpMM: rows in panels of kRows, the entries of a panel in
// vectors of one column, long panels cut into pieces (gnn_spmm_plugin/pcsr.py builds it).
//
// A group of `lanes` threads has a piece, kFold vectors of kVec columns a thread; each row of x is
// loaded once for all rows of the panel. Vectors are stored by fours, so a thread reads the columns
// of four in one access, a step ahead of their use. What fills up a four, or a vector of a panel,
// is marked as absent and is neither loaded nor multiplied: 0 * inf would be NaN. A panel in one
// piece is written at once, an empty one as zeros; several pieces leave their sums in scratch, and
// `pcsr_merge` adds them in a fixed order, so no float is ever added atomically.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/merge_slots.cuh"
#include "cuda/vec.cuh"

namespace gsp::cuda {

constexpr int kPcsrFour = 4;  // vectors that are stored and read together

template <typename T>
struct PcsrArgs {
  const int* ptr;       // [pieces + 1], in fours
  const unsigned* col;  // [fours * 4]: column << kRows | a bit for each row that has an edge there
  const int* target;    // [pieces, kRows] row or -1 where there is none; the first is ~slot if the
                        // panel has several pieces. Null: piece p has rows p * kRows, ...
  const int4* merges;   // of such a panel {first row, second row or -1, first slot, end slot}
  const T* weight;      // [fours * 4, kRows, heads], or null
  const T* x;           // gathered by column
  const acc_t<T>* src_scale;
  Epilogue<T> epilogue;
  const void* rowptr;  // of the CSR matrix: lengths of rows, for a mean
  acc_t<T>* scratch;   // [slots, kRows, width]
  int64_t rows;
  int64_t pieces;
  unsigned x_stride;  // bytes between rows of x
  int height;         // kRows
  int width;
  int heads;       // 1 where a weight belongs to all columns
  int head_width;  // columns a head
  bool wide_rowptr;
  // geometry
  int log_lanes;
  int log_parallel;  // groups that share a piece
};

// What a message is multiplied by: nothing, its weight, the scale of its column, or both, where a
// weight may belong to a head and a scale be missing.
enum class PcsrFactor { kNone, kWeight, kColumn, kAny };

// Edges of a row, where a mean asks for them; gnn_spmm_plugin/pcsr.py takes graphs of fewer than
// 2^32.
template <typename T>
__device__ __forceinline__ unsigned length_of(const PcsrArgs<T>& a, int row) {
  if (!a.epilogue.mean) return 0;
  const auto* wide = static_cast<const int64_t*>(a.rowptr);
  const auto* narrow = static_cast<const int*>(a.rowptr);
  return unsigned(a.wide_rowptr ? wide[row + 1] - wide[row] : narrow[row + 1] - narrow[row]);
}

// What a group adds up of a piece: kFold vectors of columns a thread.
template <typename T, int kRows, int kVec, int kFold, PcsrFactor kFactor>
struct PcsrPiece {
  using Acc = acc_t<T>;
  using Sums = Acc[kRows][kFold][kVec];
  // Vectors whose rows of x are in flight at once: 16 registers of a thread, of which an element
  // takes at least one.
  static constexpr int kRegisters =
      kFold * (kVec * int(sizeof(T)) < 4 ? 1 : kVec * int(sizeof(T)) / 4);
  static constexpr int kStep = kRegisters >= 16              ? 1
                               : 16 / kRegisters < kPcsrFour ? 16 / kRegisters
                                                             : kPcsrFour;
  // As many blocks of 256 threads share a multiprocessor, so a thread has 65536 / (256 * kBlocks)
  // registers at most: as few as it takes without spilling, for gathers wait for memory.
  static constexpr int kSums = kRows * kFold * kVec * int(sizeof(Acc)) / 4;
  static constexpr int kBlocks = kFactor == PcsrFactor::kAny || kSums > 16 ? 2
                                 : kSums > 8                               ? 3
                                 : kSums > 4 || kVec > 1                   ? 4
                                                                           : 5;

  static __device__ __forceinline__ Vec<unsigned, kPcsrFour> columns(const PcsrArgs<T>& a, int four,
                                                                     int end) {
    return load_if<unsigned, kPcsrFour>(four < end, a.col + int64_t(four) * kPcsrFour);
  }

  // Adds the fours begin, begin + step, ... below end. base: row 0 of x at columns `at`.
  static __device__ __forceinline__ void add(const PcsrArgs<T>& a, const T* const (&base)[kFold],
                                             const int (&at)[kFold], int begin, int end, int step,
                                             Sums& sum) {
    constexpr unsigned kAnyRow = (1u << kRows) - 1;
    unsigned stride = a.x_stride;
    keep(stride);
    Vec<unsigned, kPcsrFour> next = columns(a, begin, end);
    for (int four = begin; four < end; four += step) {
      const Vec<unsigned, kPcsrFour> now = next;
      next = columns(a, four + step, end);
#pragma unroll
      for (int first = 0; first < kPcsrFour; first += kStep) {
        const int64_t vector = int64_t(four) * kPcsrFour + first;
        Vec<T, kVec> x[kStep][kFold];
        Acc scale[kStep];
        Vec<T, kStep * kRows> w;
#pragma unroll
        for (int u = 0; u < kStep; ++u) {
          const unsigned entry = now.v[first + u], col = entry >> kRows;
          const bool ok = (entry & kAnyRow) != 0;
#pragma unroll
          for (int k = 0; k < kFold; ++k) {
            x[u][k] = load_if<T, kVec>(ok, row_of(base[k], col, stride));
          }
          if constexpr (kFactor == PcsrFactor::kColumn) {
            scale[u] = load_if<Acc, 1>(ok, a.src_scale + col).v[0];
          }
          if constexpr (kFactor == PcsrFactor::kAny) {
            scale[u] = load_if<Acc, 1>(ok && a.src_scale != nullptr, a.src_scale + col).v[0];
            if (a.src_scale == nullptr) scale[u] = Acc(1);
          }
        }
        if constexpr (kFactor == PcsrFactor::kWeight) {
          w = load_wide_if<T, kStep * kRows>(true, a.weight + vector * kRows);
        }
#pragma unroll
        for (int u = 0; u < kStep; ++u) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const bool ok = (now.v[first + u] >> r & 1) != 0;
#pragma unroll
            for (int k = 0; k < kFold; ++k) {
              Acc factor = Acc(1);
              if constexpr (kFactor == PcsrFactor::kWeight) factor = widen<T>(w.v[u * kRows + r]);
              if constexpr (kFactor == PcsrFactor::kColumn) factor = scale[u];
              if constexpr (kFactor == PcsrFactor::kAny) {
                const int64_t of = ((vector + u) * kRows + r) * a.heads + at[k] / a.head_width;
                factor = scale[u] * widen<T>(load_if<T, 1>(ok, a.weight + of).v[0]);
              }
#pragma unroll
              for (int i = 0; i < kVec; ++i) {
                const Acc v = widen<T>(x[u][k].v[i]), old = sum[r][k][i];
                sum[r][k][i] =
                    ok ? (kFactor == PcsrFactor::kNone ? old + v : old + factor * v) : old;
              }
            }
          }
        }
      }
    }
  }
};

template <typename T, int kRows, int kVec, int kFold, PcsrFactor kFactor>
__global__ void __launch_bounds__(kThreads, PcsrPiece<T, kRows, kVec, kFold, kFactor>::kBlocks)
    pcsr_spmm(const __grid_constant__ PcsrArgs<T> a) {
  using Piece = PcsrPiece<T, kRows, kVec, kFold, kFactor>;
  const int thread = int(threadIdx.x), lanes = 1 << a.log_lanes;
  const T* base[kFold];
  int at[kFold];
  bool active[kFold];
#pragma unroll
  for (int k = 0; k < kFold; ++k) {
    const int column = ((int(blockIdx.y) * kFold + k) * lanes + (thread & (lanes - 1))) * kVec;
    active[k] = column < a.width;
    at[k] = active[k] ? column : 0;
    base[k] = a.x + at[k];
    keep(base[k]);
  }
  const int64_t piece =
      (int64_t(blockIdx.x) * blockDim.x + thread) >> (a.log_lanes + a.log_parallel);
  const int member = (thread >> a.log_lanes) & ((1 << a.log_parallel) - 1);
  // Whole warps stay, with nothing to add where there is no piece: the shuffles need every lane.
  const bool here = piece < a.pieces;
  int begin = 0, end = 0;
  int row[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) row[r] = piece * kRows + r < a.rows ? int(piece * kRows + r) : -1;
  if (here) {
    begin = a.ptr[piece] + member;
    end = a.ptr[piece + 1];
    if (a.target != nullptr) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) row[r] = a.target[piece * kRows + r];
    }
  }
  typename Piece::Sums sum = {};
  Piece::add(a, base, at, begin, end, 1 << a.log_parallel, sum);
  for (int d = lanes; d < lanes << a.log_parallel; d <<= 1) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int k = 0; k < kFold; ++k) {
#pragma unroll
        for (int i = 0; i < kVec; ++i) sum[r][k][i] += __shfl_xor_sync(kFullMask, sum[r][k][i], d);
      }
    }
  }
  if (!here || member != 0) return;
  const bool is_part = row[0] < 0;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!is_part && row[r] < 0) continue;
    const unsigned length = is_part ? 0 : length_of(a, row[r]);
#pragma unroll
    for (int k = 0; k < kFold; ++k) {
      if (!active[k]) continue;
      if (is_part) {
        acc_t<T>* to = a.scratch + (int64_t(~row[0]) * kRows + r) * a.width + at[k];
#pragma unroll
        for (int i = 0; i < kVec; ++i) to[i] = sum[r][k][i];
      } else {
        finish_sum<kVec>(a.epilogue, row[r], length, at[k], sum[r][k]);
      }
    }
  }
}

// Adds the pieces of each panel that has several: a block has one row and kMergeLanes vectors of
// its columns.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads, 3) pcsr_merge(const __grid_constant__ PcsrArgs<T> a) {
  const int4 merge = a.merges[blockIdx.x / unsigned(a.height)];
  const int member = int(blockIdx.x % unsigned(a.height));
  const int row = member == 0 ? merge.x : merge.y;
  if (row < 0) return;
  const int at = (int(blockIdx.y) * kMergeLanes + int(threadIdx.x) % kMergeLanes) * kVec;
  const int64_t stride = int64_t(a.height) * a.width;
  acc_t<T> sum[kVec];
  if (add_slots<acc_t<T>, kVec>(a.scratch + int64_t(member) * a.width + at, merge.z, merge.w,
                                stride, at < a.width, sum)) {
    finish_sum<kVec>(a.epilogue, row, length_of(a, row), at, sum);
  }
}

}  // namespace gsp::cuda
