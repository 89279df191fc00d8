// Every native operator. Raw: no autograd, names start with "_"; gnn_spmm_plugin.functional builds
// on them.
//
// rowptr [M + 1], col [E], perm [E]: CSR of one direction, of one index type (int32 or int64),
// contiguous. perm maps
//   a position in row order to the caller's edge id; none means they are the same.
// x [N, F]: float32, float64, float16 or bfloat16; the columns of a row are adjacent, rows may have
// any stride. weight [E] or [E, H], in row order, of x's dtype, contiguous; column f belongs to
// head f / (F / H). src_scale [N], dst_scale [M]: float32, or float64 where x is. items, config: a
// plan's data for CUDA; the CPU ignores them. Results are contiguous. Sums are kept in float32
// (float64 for float64) and rounded once.
#include "common/check.h"

STABLE_TORCH_LIBRARY(gnn_spmm_plugin, m) {
  // out[r] = dst_scale[r] * (1 / edges of r, if mean) * sum of weight * src_scale * x over the
  // edges into r
  m.def(
      "_spmm(Tensor rowptr, Tensor col, Tensor? weight, Tensor x, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor? items, int[] config, bool mean) -> Tensor");
  // The same over PCSR (gnn_spmm_plugin/pcsr.py; CUDA only): ptr, col, target, merges as there,
  // rowptr of the CSR matrix, weight [vectors, V] or [vectors, V, H] in the order of its vectors,
  // config = {W, F, V, scratch slots}
  m.def(
      "_pcsr_spmm(Tensor rowptr, Tensor ptr, Tensor col, Tensor? target, Tensor? merges, "
      "Tensor? weight, Tensor x, Tensor? src_scale, Tensor? dst_scale, int[] config, bool mean) "
      "-> Tensor");
  // The largest (smallest) weight * x, each rounded to x's dtype, and the edge id of the first that
  // attains it.
  m.def(
      "_spmm_arg(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor x, Tensor? items, "
      "int[] config, bool minimum) -> (Tensor, Tensor)");
  // On the transposed graph: sum of weight * grad[col] where arg[col] is the edge's id.
  m.def(
      "_spmm_arg_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor grad, "
      "Tensor arg, Tensor? items, int[] config) -> Tensor");
  // How many messages of the row equal out.
  m.def(
      "_spmm_tie_count(Tensor rowptr, Tensor col, Tensor? weight, Tensor x, Tensor out, "
      "Tensor? items, int[] config) -> Tensor");
  // On the transposed graph: sum of weight * grad[col] where the edge's message equals out[col].
  m.def(
      "_spmm_tie_backward(Tensor rowptr, Tensor col, Tensor? weight, Tensor grad, Tensor x, "
      "Tensor out, Tensor? items, int[] config) -> Tensor");
  // Per edge, in the caller's order: the dot product of a[row] and b[col], [E], or [E, heads] where
  // heads > 0.
  m.def("_sddmm(Tensor rowptr, Tensor col, Tensor? perm, Tensor a, Tensor b, int heads) -> Tensor");
  // The same, over the columns where arg[row] is the edge's id.
  m.def(
      "_sddmm_arg(Tensor rowptr, Tensor col, Tensor? perm, Tensor grad, Tensor x, Tensor arg, "
      "int heads) -> Tensor");
  // The same, over the columns where the edge's message equals out[row].
  m.def(
      "_sddmm_tie(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor grad, Tensor x, "
      "Tensor out, int heads) -> Tensor");
  // Softmax over the edges into each row; [E] or [E, H], in the caller's order.
  m.def("_edge_softmax(Tensor rowptr, Tensor? perm, Tensor logits) -> Tensor");
  m.def("_edge_softmax_backward(Tensor rowptr, Tensor? perm, Tensor p, Tensor grad) -> Tensor");
  // int64 [3]: first position with an index out of range or -1; 1 if dst never decreases; 0.
  m.def("_check_coo(Tensor dst, Tensor src, SymInt num_dst, SymInt num_src) -> Tensor");
  // Stable counting sort: rowptr [n + 1] and perm [E].
  m.def("_group(Tensor key, SymInt n) -> (Tensor, Tensor)");
  // How many of the operators above, but for the last two, each library has run in this process.
  m.def("_kernel_calls() -> int");
  m.def("_kernel_calls_cuda() -> int");
}
