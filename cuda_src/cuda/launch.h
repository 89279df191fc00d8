// The launchers, free of torch: what bindings/cuda.cpp calls.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/types.h"

namespace gsp::cuda {

enum class RowOp { kSum, kMax, kMin, kArgBackward, kTieCount, kTieBackward };

// Arguments of a row sweep (row_sweep.cuh says what each Op reads), with the types erased.
struct RowSweep {
  Dtype dtype;
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
  const void* dst_scale = nullptr;
  void* out = nullptr;
  void* out_wide = nullptr;
  void* out_arg = nullptr;
  int64_t x_stride = 0, other_stride = 0, own_stride = 0;
  int64_t rows = 0, edges = 0;
  int width = 0;
  int heads = 0;  // 0: one weight for all columns
  bool mean = false;
  int64_t long_row = 0, chunk = 0;
  const void* items = nullptr;
  bool listed = false;
  int num_items = 0, num_merges = 0, num_slots = 0;
  void* scratch = nullptr;
  void* scratch_arg = nullptr;
};

cudaError_t row_sweep(RowOp op, const RowSweep& p, cudaStream_t stream);

// A sum over PCSR (pcsr_spmm.cuh says what the arrays are), under a configuration <W, F, V, S>.
struct PcsrSpmm {
  Dtype dtype;
  bool wide_rowptr;  // int64
  const void* rowptr = nullptr;
  const void* ptr = nullptr;
  const void* col = nullptr;
  const void* target = nullptr;
  const void* merges = nullptr;
  const void* weight = nullptr;
  const void* x = nullptr;
  const void* src_scale = nullptr;
  const void* dst_scale = nullptr;
  void* out = nullptr;
  void* scratch = nullptr;
  int64_t x_stride = 0;
  int64_t rows = 0, pieces = 0, vectors = 0;
  int64_t num_merges = 0;
  int width = 0;
  int heads = 0;  // 0: one weight for all columns
  bool mean = false;
  int warps = 4;   // W: of a block
  int fold = 1;    // F: vectors of columns a thread, at most
  int height = 1;  // V: rows of a panel
};

cudaError_t pcsr_spmm(const PcsrSpmm& p, cudaStream_t stream);

enum class EdgeOp { kDot, kArg, kTie };

// A dot product per edge of a[row] and b[column]: all of it, only where the edge won (picks = arg),
// or only where the message equals the result (picks = out).
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
  void* out = nullptr;
  int64_t a_stride = 0, b_stride = 0;
  int64_t rows = 0, edges = 0;
  int width = 0;
  int heads = 0;  // 0: one product an edge
};

cudaError_t edge_dot(EdgeOp op, const EdgeDot& p, cudaStream_t stream);

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

// out: [first bad position or -1, whether dst never decreases, unused]
cudaError_t check_coo(bool wide_index, const void* dst, const void* src, int64_t dst_stride,
                      int64_t src_stride, int64_t edges, int64_t num_dst, int64_t num_src,
                      int64_t* out, cudaStream_t stream);

// A stable grouping of `key` (all in [0, rows)): rowptr [rows + 1], and in `values` the position of
// each entry, by row.
struct Group {
  bool wide_index;  // int64 rowptr, keys and values
  bool wide_key;
  const void* key = nullptr;
  int64_t key_stride = 1, edges = 0, rows = 0;
  void *keys = nullptr, *more_keys = nullptr, *values = nullptr, *more_values = nullptr;  // [edges]
  void* rowptr = nullptr;
  void* temporary = nullptr;
  int64_t temporary_bytes = 0;
};

cudaError_t group_bytes(const Group& p, int64_t* bytes);  // that `temporary` must have
cudaError_t group(const Group& p, cudaStream_t stream);

}  // namespace gsp::cuda
