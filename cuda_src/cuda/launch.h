// The launchers, free of torch: what bindings/cuda.cpp calls.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/geometry.h"
#include "common/types.h"

namespace gsp::cuda {

enum class RowOp {
  kSum,
  kExtremum,
  kArgBackward,
  kTieCount,
  kTieBackward,
  kEdgeSum,
  kEdgeSumBackward
};

// What becomes of a sum (epilogue.cuh), with the types erased; and where any result goes.
struct SumEnd {
  Dtype dtype;  // of the features
  int width = 0;
  const void* dst_scale = nullptr;
  const void* self = nullptr;
  const void* self_scale = nullptr;
  const void* bias = nullptr;
  int64_t self_stride = 0;
  bool self_scale_by_row = false;
  bool mean = false;
  bool relu = false;
  void* out = nullptr;
  Dtype out_dtype = dtype;
};

// Arguments of a row sweep (row_sweep.cuh says what each Op reads), with the types erased.
struct RowSweep : SumEnd {
  bool wide_index;  // int64 rowptr, col, perm, arg
  const void* rowptr = nullptr;
  const void* col = nullptr;
  const void* perm = nullptr;
  const void* weight = nullptr;
  const void* x = nullptr;
  const void* other = nullptr;
  const void* own = nullptr;
  const void* arg = nullptr;
  const void* src_scale = nullptr;
  const void* edge = nullptr;  // a row an edge, in the caller's order
  void* out_edge = nullptr;    // as `edge`, or null
  bool minimum = false;        // of extrema: not the maximum
  bool zero_wins = false;      // of a count of ties: 0 is one more
  void* out_arg = nullptr;     // of extrema, or null
  int64_t x_stride = 0, other_stride = 0, own_stride = 0, edge_stride = 0;
  int64_t rows = 0, edges = 0, cols = 0;
  int heads = 0;  // 0: one weight for all columns
  int64_t long_row = 0, chunk = 0;
  int64_t longest = 0;     // edges of the longest row, where it is known
  Geometry geometry = {};  // of item_sweep; lanes 0: chosen by what the work looks like
  int64_t l2_bytes = 0;
  const void* items = nullptr;  // null: row_sweep; where bundle > 1, pieces of split rows first
  int num_items = 0, num_merges = 0, num_slots = 0;
  int bundle = 1;  // rows that a group of lanes takes at a time, where they are short
  void* scratch = nullptr;
  void* scratch_arg = nullptr;
};

cudaError_t row_sweep(RowOp op, const RowSweep& p, cudaStream_t stream);

// A sum from staged sources (staged_spmm.cuh). It needs scratch where staged.parts > 1.
struct StagedSpmm : RowSweep {
  StagedGeometry staged = {};
  const void* stage = nullptr;  // [blocks + 2, rows]: order, then cut
  int blocks = 0, sources = 0;  // blocks of sources; sources of each
  int device = 0;
  int shared_bytes = 0;  // that a block of threads of this device may have
};

constexpr int kStagedStatic = 256;  // bytes of shared memory that it has besides, and more

cudaError_t staged_spmm(const StagedSpmm& p, cudaStream_t stream);

// A sum over PCSR (pcsr_spmm.cuh says what the arrays are), under a configuration <W, F, V, S>.
struct PcsrSpmm : SumEnd {
  bool wide_rowptr;  // int64
  const void* rowptr = nullptr;
  const void* ptr = nullptr;
  const void* col = nullptr;
  const void* target = nullptr;
  const void* merges = nullptr;
  const void* weight = nullptr;
  const void* x = nullptr;
  const void* src_scale = nullptr;
  void* scratch = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0, pieces = 0, vectors = 0;
  int64_t num_merges = 0;
  int heads = 0;   // 0: one weight for all columns
  int warps = 4;   // W: of a block
  int fold = 1;    // F: vectors of columns a thread, at most
  int height = 1;  // V: rows of a panel
};

cudaError_t pcsr_spmm(const PcsrSpmm& p, cudaStream_t stream);

// A sum by tiles (tile_spmm.cuh says what the arrays are); all indices are int32.
struct TileSpmm : SumEnd {
  const void* rowptr = nullptr;
  const void* col = nullptr;
  const void* weight = nullptr;
  const void* ptr = nullptr;
  const void* vectors = nullptr;
  const void* bits = nullptr;
  const void* values = nullptr;
  const void* window_rows = nullptr;
  const void* target = nullptr;
  const void* merges = nullptr;
  const void* x = nullptr;
  void* scratch = nullptr;
  const void* sums = nullptr;  // of tile_end, which reads none of the tiles
  int64_t x_stride = 0;
  int64_t rows = 0, pieces = 0;
  int64_t num_merges = 0;
  int x_width = 0;
  int height = 8;  // rows of a window: 8 or 16
  int passes = 1;  // of float: 1 in tf32, 3 as accurate as float
};

cudaError_t tile_spmm(const TileSpmm& p, cudaStream_t stream);
// The end of sums that are there already.
cudaError_t tile_end(const TileSpmm& p, cudaStream_t stream);

enum class EdgeOp { kDot, kArg, kTie, kMessage };

// A dot product per edge of a[row] and b[column]: all of it, only where the edge won (picks = arg),
// or only where the message equals the result (picks = out); or of a[row] and the positive part of
// b[column] + edge.
struct EdgeDot {
  Dtype dtype;
  bool wide_index;
  const void* rowptr = nullptr;
  const void* col = nullptr;
  const void* perm = nullptr;
  const void* weight = nullptr;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* picks = nullptr;
  const void* edge = nullptr;
  void* out = nullptr;
  int64_t a_stride = 0, b_stride = 0, edge_stride = 0;
  int64_t rows = 0, edges = 0;
  int width = 0;
  int heads = 0;  // 0: one product an edge
};

cudaError_t edge_dot(EdgeOp op, const EdgeDot& p, cudaStream_t stream);

// GATv2's scores of edges (pair.cuh), or, where `grad` is given, their gradient by a.
struct Pair {
  Dtype dtype;
  bool wide_index;
  bool gradient = false;  // of the scores, else these themselves
  const void* rowptr = nullptr;
  const void* col = nullptr;
  const void* perm = nullptr;
  const void* grad = nullptr;
  const void* a = nullptr;
  const void* b = nullptr;
  const void* att = nullptr;
  void* out = nullptr;
  void* out_att = nullptr;  // of a gradient
  int64_t a_stride = 0, b_stride = 0;
  int64_t rows = 0, edges = 0;
  int width = 0;
  int heads = 1;
  double slope = 0;
  void* scratch = nullptr;    // of a gradient: pair_bytes
  int64_t threads = 1 << 20;  // to share the edges of a large graph: a few rounds of a large GPU's
};

int64_t pair_bytes(const Pair& p);
cudaError_t pair(const Pair& p, cudaStream_t stream);

struct EdgeSoftmax {
  Dtype dtype;
  bool wide_index;
  const void* rowptr = nullptr;
  const void* perm = nullptr;
  const void* in = nullptr;    // logits, or p
  const void* grad = nullptr;  // backward only
  void* out = nullptr;
  int64_t rows = 0;
  int heads = 1;
};

cudaError_t edge_softmax(const EdgeSoftmax& p, cudaStream_t stream);

// Edges grouped by `key` (all in [0, rows)), the order within a row kept: rowptr [rows + 1], and
// for each place in row order which edge it was (perm) and its `other` (col). All of one index
// type.
struct Grouping {
  bool wide_index;
  const void* key = nullptr;
  const void* other = nullptr;
  int64_t edges = 0, rows = 0;
  void* rowptr = nullptr;
  void* col = nullptr;
  void* perm = nullptr;
  void* scratch = nullptr;
  int64_t scratch_bytes = 0;
  // For counting, in scratch: edges of each row [rows], then [edges] without meaning afterwards.
  int* count = nullptr;
  int* rank = nullptr;
  int* slot = nullptr;
};

cudaError_t group_bytes(const Grouping& p, int64_t* bytes);  // that `scratch` must have
cudaError_t group(const Grouping& p, cudaStream_t stream);

// One of its two ways, for graphs whose counts every block can add up by itself.
constexpr int64_t kMaxCounted = 1 << 18;  // edges, and rows
bool can_count(const Grouping& p);
int64_t counting_bytes(const Grouping& p);
cudaError_t group_by_counting(const Grouping& p, cudaStream_t stream);

// The two directions of one edge list share a scratch of so many bytes, one after the other where
// they can. Sets where in it each finds its own; returns how many bytes have to start as 0.
int64_t counting_bytes(const Grouping& p, const Grouping& other);
int64_t share_scratch(void* scratch, Grouping& p, Grouping* other);

// An edge list that is checked, and copied in the index type. `fact`, one word on the device, is
// what `read_fact` reads.
struct CheckCoo {
  bool wide_key;  // dst and src are int64
  bool wide_index;
  const void* dst = nullptr;
  const void* src = nullptr;
  int64_t dst_stride = 1, src_stride = 1;
  int64_t edges = 0, num_dst = 0, num_src = 0;
  void* own_dst = nullptr;
  void* own_src = nullptr;
  void* fact = nullptr;
  // By own_dst and by own_src, each to be begun on the way, where fact is the scratch that they
  // share.
  Grouping* grouping = nullptr;
  Grouping* transposed = nullptr;
};

struct CooFacts {
  int64_t first_bad;  // or -1
  bool sorted;        // dst never decreases
};

cudaError_t check_coo(const CheckCoo& p, cudaStream_t stream);
CooFacts read_fact(int64_t fact);
// What check_coo has begun, of good edges or not.
cudaError_t finish_grouping(const Grouping& p, cudaStream_t stream);

// Two vectors of one length; `fact`, one word, becomes 0 where they differ.
struct Compare {
  bool wide_a, wide_b;
  const void* a = nullptr;
  const void* b = nullptr;
  int64_t a_stride = 1, b_stride = 1;
  int64_t size = 0;
  void* fact = nullptr;
};

cudaError_t compare(const Compare& p, cudaStream_t stream);

// rowptr [rows + 1] of keys that never decrease.
cudaError_t find_rowptr(bool wide_index, const void* key, int64_t edges, int64_t rows, void* rowptr,
                        cudaStream_t stream);

// Factors of the rows of a CSR matrix: _inverse_degree of bindings/schema.cpp, which needs no
// `col`, or _gcn_scales, whose `own` is null unless there are to be loops.
struct RowScales {
  bool wide_index;
  bool precise;  // results are double
  bool inverse;
  const void* rowptr = nullptr;
  const void* col = nullptr;
  int64_t rows = 0;
  void* scale = nullptr;
  void* own = nullptr;
};

cudaError_t row_scales(const RowScales& p, cudaStream_t stream);

// Gathers of the rows of x that col names, in that order, with no row structure at all; the limit
// that products are measured against (speed_of_light.cuh).
struct SpeedOfLight {
  Dtype dtype;
  const void* col = nullptr;
  const void* weight = nullptr;
  const void* x = nullptr;
  void* out = nullptr;  // [rows, width]
  int64_t x_stride = 0;
  int64_t rows = 0, edges = 0, run = 0;
  int width = 0;
};

cudaError_t speed_of_light(const SpeedOfLight& p, cudaStream_t stream);

}  // namespace gsp::cuda
