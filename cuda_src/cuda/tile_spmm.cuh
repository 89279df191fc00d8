// Sums by the tensor cores: rows in windows of kHeight, of which the distinct columns are vectors,
// 16 of them a group (gnn_spmm_plugin/tiles.py builds it). A group is a tile of kHeight x 16
// weights, mostly zeros; times the 16 rows of x that its vectors name, it gives a term of the sums
// of all rows of the window. So a row of x is loaded once a window, not once an edge.
//
// A warp has a piece of a window and a slab of columns. x is the first operand, transposed: a
// matrix of 16 columns of x by vectors, and the tile the second. The columns of a slab, and the
// vectors of a group, are dealt to the places of the operands such that lane 4 g + t loads 16 bytes
// of the rows of vectors 4 t to 4 t + 3, all of which it needs itself, and ends with the sums of
// these very columns for rows 2 t and 2 t + 1: nothing goes through shared memory.
//
// The zeros of a tile are multiplied, too, and 0 * inf is NaN. So whatever sum comes out as NaN is
// computed anew from the edges: what is not finite stays in the rows of its own edges, as in every
// other kernel. No float is added atomically; pieces of a window leave their sums in scratch, and
// `tile_merge` adds them in order.
//
// The idea to have x as the first operand, for windows of 8 rows, is FlashSparse's (Shi et al.,
// 2025); RA-SpMM's families of tiles share it.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/merge_slots.cuh"
#include "cuda/mma.cuh"
#include "cuda/vec.cuh"

namespace gsp::cuda {

constexpr int kGroup = 16;         // vectors that are multiplied together
constexpr int kTileThreads = 128;  // of a block
constexpr int kOwn = kGroup / 4;   // vectors of a group whose rows of x a lane loads

template <typename T>
struct Tile {
  static constexpr int kColumns = 16 / sizeof(T);  // of x that a lane has
  static constexpr int kSlab = 8 * kColumns;       // that a warp has
  static constexpr int kWords = 4;                 // of a lane's columns of a row
};

// The matrix itself, for what is computed anew.
template <typename T>
struct Edges {
  const int* rowptr;
  const int* col;
  const T* weight;  // or null
  const T* x;
  unsigned x_stride;  // bytes between rows of x
};

template <typename T>
struct TileArgs {
  Edges<T> edges;
  const int* ptr;              // [pieces + 1], in groups
  const int* vectors;          // [groups * 16]: columns
  const unsigned short* bits;  // [groups, kHeight]: which vectors a row has an edge at
  const T* values;             // [groups, kHeight, 16], or null: all 1
  const int* rows;             // [windows * kHeight]: which, -1: none. Null: as they are
  const int* target;           // [pieces]: window, or ~slot. Null: piece p is window p
  const int4* merges;          // {window, first slot, end slot, 0} of windows in several pieces
  float* scratch;              // [slots, kHeight, width]
  const float* sums;           // [rows, width]: instead of all this (tile_end)
  Epilogue<T> epilogue;
  int64_t pieces;
  int num_rows;
  int width;
  int x_width;  // columns of x, a multiple of a lane's
  int slabs;
  bool wide_end;  // what is written and added at the end moves a lane's columns at once
};

// Sums anew what is NaN of columns [column, column + kVec) of a row.
template <int kVec, typename T>
__device__ __forceinline__ void mend(const Edges<T>& e, int row, int column, float (&sum)[kVec]) {
  bool whole = true;
#pragma unroll
  for (int i = 0; i < kVec; ++i) whole = whole && sum[i] == sum[i];
  if (whole) return;
  float anew[kVec] = {};
  const int end = e.rowptr[row + 1];
#pragma unroll 1
  for (int j = e.rowptr[row]; j < end; ++j) {
    const T* const from = row_of(e.x + column, unsigned(e.col[j]), e.x_stride);
    const float w = e.weight == nullptr ? 1.f : widen<T>(e.weight[j]);
#pragma unroll
    for (int i = 0; i < kVec; ++i) anew[i] = multiply_add(w, widen<T>(from[i]), anew[i]);
  }
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = sum[i] == sum[i] ? sum[i] : anew[i];
}

template <int kVec, typename T>
__device__ __forceinline__ void mend_and_finish(const TileArgs<T>& a, int row, int column,
                                                float (&sum)[kVec]) {
  mend<kVec>(a.edges, row, column, sum);
  const int* const at = a.edges.rowptr + row;
  finish_sum<kVec>(a.epilogue, row, unsigned(a.epilogue.mean ? at[1] - at[0] : 0), column, sum);
}

// The row at a place of the windows, or -1.
template <typename T>
__device__ __forceinline__ int row_at(const TileArgs<T>& a, int64_t place) {
  if (a.rows != nullptr) return a.rows[place];
  return place < a.num_rows ? int(place) : -1;
}

// What a lane needs of a group: its four vectors of columns of x, and its weights of a row for
// every eight rows of the window.
template <typename T, int kHeight, bool kWeighted>
struct TileOperands {
  static constexpr int kBlocks = kHeight / 8;
  Vec<T, Tile<T>::kColumns> x[kOwn];
  unsigned bits[kBlocks];  // four
  Vec<T, kOwn> values[kWeighted ? kBlocks : 1];

  __device__ __forceinline__ void load(const TileArgs<T>& a, bool ok, int group,
                                       const Vec<int, kOwn>& columns, const T* base, bool active,
                                       unsigned stride, int g, int t) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      x[i] =
          load_if<T, Tile<T>::kColumns>(ok && active, row_of(base, unsigned(columns.v[i]), stride));
    }
#pragma unroll
    for (int h = 0; h < kBlocks; ++h) {
      const int64_t row = int64_t(group) * kHeight + h * 8 + g;
      bits[h] = unsigned(load_if<unsigned short, 1>(ok, a.bits + row).v[0]) >> (t * kOwn);
      if constexpr (kWeighted) {
        values[h] = load_if<T, kOwn>(ok, a.values + row * kGroup + t * kOwn);
      }
    }
  }
};

// The words of a value.
template <typename V>
struct Words {
  unsigned w[sizeof(V) / 4];
  __device__ __forceinline__ explicit Words(const V& v) { __builtin_memcpy(w, &v, sizeof(V)); }
};

// Sums of a lane: those of its columns for rows 2 t and 2 t + 1 of each eight, as the operands have
// them: [m][j + 2 * c] is column 2 m + c of row 2 t + j.
template <typename T>
using TileSums = float[Tile<T>::kColumns / 2][4];

// Adds what a group gives. The tensor cores round what they add to towards zero, over thousands of
// groups always the same way; so they begin anew with each group, and this rounds to the nearest.
__device__ __forceinline__ void add_part(float (&sum)[4], const float (&part)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] += part[i];
}

// 16 bits: one product of each two columns. The first pair of k of a lane are its vectors 0 and 1,
// the second 2 and 3.
template <typename T, int kPasses, int kHeight, bool kWeighted>
__device__ __forceinline__ void multiply_tile(TileSums<T> (&sum)[kHeight / 8],
                                              const TileOperands<T, kHeight, kWeighted>& from) {
  constexpr int kColumns = Tile<T>::kColumns;
  if constexpr (sizeof(T) == 2) {
    constexpr unsigned kOne = std::is_same_v<T, __half> ? 0x3c00u : 0x3f80u;
    unsigned b[kHeight / 8][2];
#pragma unroll
    for (int h = 0; h < kHeight / 8; ++h) {
      // A bit in each half of a word.
      const unsigned n = from.bits[h];
      const unsigned low = (n & 1u) | (n & 2u) << 15, high = (n >> 2 & 1u) | (n & 8u) << 13;
      if constexpr (kWeighted) {
        const Words<Vec<T, kOwn>> values(from.values[h]);
        b[h][0] = values.w[0] & low * 0xffffu;
        b[h][1] = values.w[1] & high * 0xffffu;
      } else {
        b[h][0] = low * kOne;
        b[h][1] = high * kOne;
      }
    }
    const Words<Vec<T, kColumns>> x[kOwn] = {
        Words<Vec<T, kColumns>>(from.x[0]), Words<Vec<T, kColumns>>(from.x[1]),
        Words<Vec<T, kColumns>>(from.x[2]), Words<Vec<T, kColumns>>(from.x[3])};
#pragma unroll
    for (int m = 0; m < kColumns / 2; ++m) {
      const unsigned a[4] = {firsts(x[0].w[m], x[1].w[m]), seconds(x[0].w[m], x[1].w[m]),
                             firsts(x[2].w[m], x[3].w[m]), seconds(x[2].w[m], x[3].w[m])};
#pragma unroll
      for (int h = 0; h < kHeight / 8; ++h) {
        float part[4] = {};
        multiply_16_bits<T>(part, a, b[h]);
        add_part(sum[h][m], part);
      }
    }
  } else {
    // tf32: vectors 0 and 1 of a lane, then 2 and 3. In three passes, both operands are two parts
    // of half the digits; the product of the last parts is below what a float keeps.
    constexpr bool kParts = kPasses > 1;
#pragma unroll
    for (int s = 0; s < kOwn; s += 2) {
      unsigned b[kHeight / 8][2], b_rest[kHeight / 8][2];
#pragma unroll
      for (int h = 0; h < kHeight / 8; ++h) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool here = (from.bits[h] >> (s + i) & 1u) != 0;
          const float value = !here ? 0.f : kWeighted ? float(from.values[h].v[s + i]) : 1.f;
          b[h][i] = to_tf32(value);
          b_rest[h][i] = kParts && kWeighted ? to_tf32(value - of_bits(b[h][i])) : 0u;
        }
      }
#pragma unroll
      for (int m = 0; m < kColumns / 2; ++m) {
        const float v[4] = {from.x[s].v[2 * m], from.x[s].v[2 * m + 1], from.x[s + 1].v[2 * m],
                            from.x[s + 1].v[2 * m + 1]};
        unsigned a[4], a_rest[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i] = to_tf32(v[i]);
          a_rest[i] = kParts ? to_tf32(v[i] - of_bits(a[i])) : 0u;
        }
#pragma unroll
        for (int h = 0; h < kHeight / 8; ++h) {
          float part[4] = {};
          if constexpr (kParts) {
            multiply_tf32(part, a_rest, b[h]);
            if constexpr (kWeighted) multiply_tf32(part, a, b_rest[h]);
          }
          multiply_tf32(part, a, b[h]);
          add_part(sum[h][m], part);
        }
      }
    }
  }
}

// As many blocks share a multiprocessor as can without spilling: gathers wait for memory.
template <typename T, int kHeight, bool kWeighted>
constexpr int kTileBlocks = kHeight == 16                 ? (kWeighted ? 3 : 4)
                            : kWeighted && sizeof(T) == 2 ? 4
                                                          : 5;

template <typename T, int kHeight, bool kWeighted, int kPasses>
__global__ void __launch_bounds__(kTileThreads, (kTileBlocks<T, kHeight, kWeighted>))
    tile_spmm(const __grid_constant__ TileArgs<T> a) {
  using Operands = TileOperands<T, kHeight, kWeighted>;
  constexpr int kColumns = Tile<T>::kColumns, kBlocks = kHeight / 8;
  const int lane = int(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  // The slabs of a piece follow one another: they read the same tiles.
  const int64_t warp = int64_t(blockIdx.x) * (kTileThreads / 32) + (int(threadIdx.x) >> 5);
  const int64_t piece = warp / a.slabs;
  if (piece >= a.pieces) return;
  const int column = int(warp % a.slabs) * Tile<T>::kSlab + g * kColumns;
  const bool active = column < a.x_width;
  const T* base = a.edges.x + (active ? column : 0);
  keep(base);
  unsigned stride = a.edges.x_stride;
  keep(stride);
  const int begin = a.ptr[piece], end = a.ptr[piece + 1];
  const auto columns_of = [&](int group) {
    return load_if<int, kOwn>(group < end, a.vectors + int64_t(group) * kGroup + t * kOwn);
  };
  const auto operands_of = [&](int group, const Vec<int, kOwn>& columns) {
    Operands o;
    o.load(a, group < end, group, columns, base, active, stride, g, t);
    return o;
  };
  TileSums<T> sum[kBlocks] = {};
  // The rows of x of a group are on their way while those of the one before are multiplied, and so
  // are the columns of the next.
  Vec<int, kOwn> columns = columns_of(begin);
  Operands now = operands_of(begin, columns);
  columns = columns_of(begin + 1);
#pragma unroll 2
  for (int group = begin; group < end; ++group) {
    const Operands next = operands_of(group + 1, columns);
    columns = columns_of(group + 2);
    multiply_tile<T, kPasses, kHeight, kWeighted>(sum, now);
    now = next;
  }
  if (!active) return;
  const int target = a.target == nullptr ? int(piece) : a.target[piece];
#pragma unroll
  for (int h = 0; h < kBlocks; ++h) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int member = h * 8 + 2 * t + j;
      float v[kColumns];
#pragma unroll
      for (int i = 0; i < kColumns; ++i) v[i] = sum[h][i / 2][j + 2 * (i % 2)];
      if (target < 0) {
        float* const to = a.scratch + (int64_t(~target) * kHeight + member) * a.width + column;
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (column + i < a.width) to[i] = v[i];
        }
        continue;
      }
      const int row = row_at(a, int64_t(target) * kHeight + member);
      if (row < 0) continue;
      if (a.wide_end) {
        mend_and_finish<kColumns>(a, row, column, v);
      } else {
#pragma unroll
        for (int i = 0; i < kColumns; ++i) {
          if (column + i >= a.width) continue;
          float one[1] = {v[i]};
          mend_and_finish<1>(a, row, column + i, one);
        }
      }
    }
  }
}

// Adds the pieces of each window that has several: a block has one row and kMergeLanes vectors of
// its columns.
template <typename T, int kHeight, int kVec>
__global__ void __launch_bounds__(kThreads) tile_merge(const __grid_constant__ TileArgs<T> a) {
  const int4 merge = a.merges[blockIdx.x / unsigned(kHeight)];
  const int member = int(blockIdx.x % unsigned(kHeight));
  const int row = row_at(a, int64_t(merge.x) * kHeight + member);
  if (row < 0) return;
  const int column = (int(blockIdx.y) * kMergeLanes + int(threadIdx.x) % kMergeLanes) * kVec;
  float sum[kVec];
  if (add_slots<float, kVec>(a.scratch + int64_t(member) * a.width + column, merge.y, merge.z,
                             int64_t(kHeight) * a.width, column < a.width, sum)) {
    mend_and_finish<kVec>(a, row, column, sum);
  }
}

// The end of sums that are there already; kVec columns a thread.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) tile_end(const __grid_constant__ TileArgs<T> a) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + int(threadIdx.x);
  const int vectors = a.width / kVec;
  const int64_t row = thread / vectors;
  if (row >= a.num_rows) return;
  const int column = int(thread % vectors) * kVec;
  const Vec<float, kVec> from = load_wide_if<float, kVec>(true, a.sums + row * a.width + column);
  float sum[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) sum[i] = from.v[i];
  mend_and_finish<kVec>(a, int(row), column, sum);
}

}  // namespace gsp::cuda
