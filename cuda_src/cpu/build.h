// How a graph is built from an edge list: plain pointers in, plain pointers out, no torch.
#pragma once

#include "cpu/kernels.h"

namespace gsp::cpu {

// A vector of indices, int32 or int64 where `wide`.
struct Indices {
  const void* data = nullptr;
  int64_t size = 0;
  int64_t stride = 1;
  bool wide = false;
};

// First position where dst or src is out of range, or -1, and whether dst never decreases.
struct CooFacts {
  int64_t first_bad = -1;
  bool sorted = true;
};

// Checks an edge list and copies it; the copies are int64 where `wide`. Where an index is bad, they
// mean nothing.
CooFacts check_coo(const Indices& dst, const Indices& src, int64_t num_dst, int64_t num_src,
                   void* own_dst, void* own_src, bool wide, ParallelFor parallel_for);

// Edges to be grouped by `key` (all in [0, rows)), the order within a row kept: rowptr [rows + 1],
// and for each place in row order which edge it was (perm) and its `other` (col).
struct Grouping {
  const void* key = nullptr;    // [edges], contiguous
  const void* other = nullptr;  // [edges]
  int64_t edges = 0, rows = 0;
  bool wide = false;  // int64, all of them
  void* rowptr = nullptr;
  void* col = nullptr;
  void* perm = nullptr;
};
void group(const Grouping& grouping, ParallelFor parallel_for);

// rowptr [rows + 1] of keys that never decrease.
void find_rowptr(const void* key, int64_t edges, int64_t rows, void* rowptr, bool wide,
                 ParallelFor parallel_for);

// _inverse_degree of bindings/schema.cpp, which needs no col, or _gcn_scales, whose own is null
// unless there are to be loops. All indices int64 where `wide`, all results double where `precise`.
struct RowScales {
  const void* rowptr = nullptr;
  const void* col = nullptr;
  int64_t rows = 0;
  bool wide = false, precise = false, inverse = false;
  void* scale = nullptr;
  void* own = nullptr;
};
void row_scales(const RowScales& p, ParallelFor parallel_for);

// Whether two vectors of one length hold the same numbers.
bool same_indices(const Indices& a, const Indices& b, ParallelFor parallel_for);

}  // namespace gsp::cpu
