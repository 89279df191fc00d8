// The CPU kernels' interface: plain pointers in, plain pointers out, no torch. What each operator
// computes is written in bindings/schema.cpp.
#pragma once

#include <cstdint>

#include "common/types.h"

namespace gsp::cpu {

// Calls body(i, context) for every i in [0, count), in any order and on any thread.
using ParallelFor = void (*)(int64_t count, void (*body)(int64_t i, void* context), void* context);

// Adjacency by rows. Indices are int32, or int64 where `wide`. perm may be null: the identity.
struct Csr {
  const void* rowptr = nullptr;
  const void* col = nullptr;
  const void* perm = nullptr;
  int64_t rows = 0;
  int64_t edges = 0;
  bool wide = false;
};

// Rows of features (or of args): the columns of a row are adjacent, rows are `stride` elements
// apart.
struct Matrix {
  const void* data = nullptr;
  int64_t stride = 0;
};

// The operands of one operator; those that it does not have stay null.
struct Problem {
  Csr csr;
  Dtype dtype = Dtype::kFloat32;
  int64_t width = 0;             // columns of a row of features, all heads together
  int64_t heads = 1;             // columns of weight, or of a result per edge
  const void* weight = nullptr;  // [edges, heads] in row order
  Matrix x;                      // the features that messages are made of
  Matrix grad;                   // one row per output row of the forward
  Matrix out;                    // the forward's output
  Matrix arg;                    // the forward's arg, index type
  Matrix edge;                   // one row per edge, in the caller's order
  const void* src_scale = nullptr;
  const void* dst_scale = nullptr;
  Matrix self;                       // added to the sum of each row
  const void* self_scale = nullptr;  // what it is multiplied by: one for each row, or for all
  bool self_scale_by_row = false;
  const void* bias = nullptr;
  bool mean = false;
  bool relu = false;
  bool minimum = false;
  bool zero_wins = false;                // of spmm_tie_count: 0 is one more of those that attain it
  double slope = 0;                      // of a leaky ReLU, below 0
  void* result = nullptr;                // contiguous
  Dtype result_dtype = Dtype::kFloat32;  // of spmm; the others know theirs
  void* result_arg = nullptr;            // contiguous, index type; null where no one asks
  void* result_att = nullptr;            // of pair_gradient, [width] in the accumulation type
  void* result_edge = nullptr;           // contiguous, as `edge`; null where no one asks
  ParallelFor parallel_for = nullptr;
};

void spmm(const Problem& problem);
void spmm_arg(const Problem& problem);
void spmm_arg_backward(const Problem& problem);
void spmm_tie_count(const Problem& problem);
void spmm_tie_backward(const Problem& problem);
void sddmm(const Problem& problem);  // grad: rows of destinations, x: rows of sources
void sddmm_arg(const Problem& problem);
void sddmm_tie(const Problem& problem);
void pair_score(const Problem& problem);             // as sddmm; out: att, the same for all rows
void pair_gradient(const Problem& problem);          // the same; weight: their gradient, by edge id
void edge_softmax(const Problem& problem);           // x: logits
void edge_softmax_backward(const Problem& problem);  // x: probabilities, grad: their gradient

void edge_sum(const Problem& problem);
void edge_sum_backward(const Problem& problem);  // x: rows of sources, grad: of destinations
void edge_sum_dot(const Problem& problem);       // as sddmm

const char* instruction_set();  // "avx512", "avx2" or "baseline": what the kernels run on here

}  // namespace gsp::cpu
