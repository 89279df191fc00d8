// Every native operator. Raw: no autograd, names start with "_"; gnn_spmm_plugin.functional builds
// on them.
//
// rowptr [M + 1], col [E], perm [E]: CSR of one direction, of one index type (int32 or int64),
// contiguous. perm maps
//   a position in row order to the caller's edge id; none means they are the same.
// x [N, F]: float32, float64, float16 or bfloat16; the columns of a row are adjacent, rows may have
// any stride. weight [E] or [E, H], in row order, of x's dtype, contiguous; column f belongs to
// head f / (F / H). self_x [M, F]: as x. src_scale [N], dst_scale [M], self_scale
// [M] (where it is 0, self_x is not looked at) or [1], bias [F]: float32, or float64 where x is;
// contiguous. items, config: a
// plan's data for CUDA, as are stage and sources (schedule.py); the CPU ignores them. Results are
// contiguous. Sums are kept in float32 (float64 for float64) and rounded once.
#include "common/check.h"

STABLE_TORCH_LIBRARY(gnn_spmm_plugin, m) {
  // out[r] = relu(dst_scale[r] * (1 / edges of r, if mean) * sum of weight * src_scale * x over the
  // edges into r + self_scale[r] * self_x[r] + bias), each part where it is given; self_scale may
  // have a single entry, for all rows. Of out_dtype, or x's.
  m.def(
      "_spmm(Tensor rowptr, Tensor col, Tensor? weight, Tensor x, Tensor? src_scale, "
      "Tensor? dst_scale, Tensor? items, int[] config, bool mean, Tensor? self_x=None, "
      "Tensor? self_scale=None, Tensor? bias=None, bool relu=False, ScalarType? out_dtype=None, "
      "Tensor? stage=None, int sources=0) -> Tensor");
  // The same of x alone, without items; lengths: 32 bits each of long row and chunk, or, where no
  // row is split, 16 bits each of the longest and the bundle.
  // Reading arguments is most of the host time of a small product, so the commonest has few: 1.3 us
  // less.
  m.def("_row_sum(Tensor rowptr, Tensor col, Tensor x, int lengths, bool mean=False) -> Tensor");
  // As _spmm, over PCSR (gnn_spmm_plugin/pcsr.py; CUDA only): ptr, col, target, merges as there,
  // rowptr of the CSR matrix, weight [vectors, V] or [vectors, V, H] in the order of its vectors,
  // config = {W, F, V, scratch slots}
  m.def(
      "_pcsr_spmm(Tensor rowptr, Tensor ptr, Tensor col, Tensor? target, Tensor? merges, "
      "Tensor? weight, Tensor x, Tensor? src_scale, Tensor? dst_scale, int[] config, bool mean, "
      "Tensor? self_x=None, Tensor? self_scale=None, Tensor? bias=None, bool relu=False, "
      "ScalarType? out_dtype=None) -> Tensor");
  // As _spmm, by tiles (gnn_spmm_plugin/tiles.py; CUDA only): ptr, vectors, bits, values, rows,
  // target, merges as there, all int32 but bits (int16) and values (x's dtype); weight [E] is that
  // which values were made from. config = {height, scratch slots, passes, width}: float32 takes 1
  // pass in tf32, or 3 with its own accuracy; width <= F is that of the result. Rows of x begin at
  // multiples of 16 bytes and have a multiple of as many bytes.
  m.def(
      "_tile_spmm(Tensor rowptr, Tensor col, Tensor? weight, Tensor ptr, Tensor vectors, "
      "Tensor bits, Tensor? values, Tensor? rows, Tensor? target, Tensor? merges, Tensor x, "
      "Tensor? dst_scale, int[] config, bool mean, Tensor? self_x=None, Tensor? self_scale=None, "
      "Tensor? bias=None, bool relu=False, ScalarType? out_dtype=None) -> Tensor");
  // The end of _spmm, of sums [M, F] (float32) of weight * x that a GEMM made, with the zeros of
  // the matrix multiplied: those that are NaN are made anew (CUDA only).
  m.def(
      "_tile_end(Tensor rowptr, Tensor col, Tensor? weight, Tensor x, Tensor sums, "
      "Tensor? dst_scale, bool mean, Tensor? self_x=None, Tensor? self_scale=None, "
      "Tensor? bias=None, bool relu=False, ScalarType? out_dtype=None) -> Tensor");
  // The largest (smallest) weight * x, each rounded to x's dtype, and the edge id of the first that
  // attains it, or no rows of those.
  m.def(
      "_spmm_arg(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor x, Tensor? items, "
      "int[] config, bool minimum, bool with_arg=True) -> (Tensor, Tensor)");
  // On the transposed graph: sum of weight * grad[col] where arg[col] is the edge's id.
  m.def(
      "_spmm_arg_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor grad, "
      "Tensor arg, Tensor? items, int[] config) -> Tensor");
  // How many messages of the row equal out, and one more if zero_wins and that is 0; in the type of
  // sums. With grad: instead of that, grad divided by it, of x's type.
  m.def(
      "_spmm_tie_count(Tensor rowptr, Tensor col, Tensor? weight, Tensor x, Tensor out, "
      "Tensor? items, int[] config, Tensor? grad=None, bool zero_wins=False) -> Tensor");
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
  // Per edge, in the caller's order, [E, heads]: <att, act(a[row] + b[col])>, act a leaky ReLU; att
  // [heads, F / heads] of the same type, contiguous.
  m.def(
      "_pair_score(Tensor rowptr, Tensor col, Tensor? perm, Tensor a, Tensor b, Tensor att, "
      "float slope) -> Tensor");
  // Of what has the gradient `grad`, [E, heads], of those scores: a's gradient, and a part of
  // att's, [F] in the type of sums. With S[r] the sum over the edges into a row of grad where a[r]
  // + b[col] is positive, of slope * grad where not, they are att * S[r] and the sum of a[r] * S[r]
  // over rows; the other part comes of b in the same way, on the transposed graph.
  m.def(
      "_pair_gradient(Tensor rowptr, Tensor col, Tensor? perm, Tensor grad, Tensor a, Tensor b, "
      "Tensor att, float slope) -> (Tensor, Tensor)");
  // Sum, or mean, of weight * relu(x[col] + e) over the edges into each row; e [E, F] in the
  // caller's order, as x. One weight an edge.
  m.def(
      "_edge_sum(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor x, Tensor e, "
      "Tensor? items, int[] config, bool mean) -> Tensor");
  // On the transposed graph, where x[row] + e is positive: weight * grad[col], added up for each
  // row and, if with_edges, of each edge in the caller's order (else no rows of those).
  m.def(
      "_edge_sum_backward(Tensor rowptr, Tensor col, Tensor? perm, Tensor? weight, Tensor x, "
      "Tensor e, Tensor grad, Tensor? items, int[] config, bool with_edges) -> (Tensor, Tensor)");
  // As _sddmm: <grad[row], relu(x[col] + e)>, [E].
  m.def(
      "_edge_sum_dot(Tensor rowptr, Tensor col, Tensor? perm, Tensor grad, Tensor x, Tensor e) "
      "-> Tensor");
  // Softmax over the edges into each row; [E] or [E, H], in the caller's order.
  m.def("_edge_softmax(Tensor rowptr, Tensor? perm, Tensor logits) -> Tensor");
  m.def("_edge_softmax_backward(Tensor rowptr, Tensor? perm, Tensor p, Tensor grad) -> Tensor");
  // The CSR of an edge list. Returns the first position with an index out of range (then nothing
  // else means anything) or -1; copies of dst and src; rowptr, col and perm, the last two only
  // where dst decreases somewhere: else col is the copy of src, which no two results may share. If
  // both, and there are so few that the host decides how long it takes, also what _transpose
  // returns. All int64 if wide, else int32.
  m.def(
      "_from_coo(Tensor dst, Tensor src, SymInt num_dst, SymInt num_src, bool wide, "
      "bool both=False) -> (int, Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?, Tensor?, "
      "Tensor?)");
  // rowptr, col and perm of the transposed graph, from those copies.
  m.def("_transpose(Tensor dst, Tensor src, SymInt num_src) -> (Tensor, Tensor, Tensor)");
  // 1 / max(entries of the row, 1), [rows] float32 or float64.
  m.def("_inverse_degree(Tensor rowptr, ScalarType dtype) -> Tensor");
  // Graph convolution, [rows] float32 or float64 each: scale = d^-1/2 of the entries d of a row, 0
  // where there are none; with `loops` d counts one self loop in place of those that there are, and
  // own = scale^2 * (1 - those), what is missing of it (else own is empty).
  m.def("_gcn_scales(Tensor rowptr, Tensor col, bool loops, ScalarType dtype) -> (Tensor, Tensor)");
  // Whether an edge list still is what those copies were made from.
  m.def("_same_coo(Tensor dst, Tensor src, Tensor own_dst, Tensor own_src) -> bool");
  // For measurements, on CUDA alone: gathers the rows of x that col (int32) names, in runs of
  // `run`, and writes an output of `rows` rows without meaning. See cuda/speed_of_light.cuh.
  m.def("_speed_of_light(Tensor col, Tensor? weight, Tensor x, SymInt rows, int run) -> Tensor");
  // How many of the operators above, but for the last four, each library has run in this process.
  m.def("_kernel_calls() -> int");
  m.def("_kernel_calls_cuda() -> int");
}
