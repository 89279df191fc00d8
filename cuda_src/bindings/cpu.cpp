// The CPU implementations of all operators: check, describe the operands with plain pointers, run
// the kernel.
#include <torch/csrc/stable/ops.h>

#include <tuple>
#include <vector>

#include "common/check.h"
#include "cpu/build.h"
#include "cpu/kernels.h"

namespace gsp {
namespace {

std::atomic<int64_t> kernel_calls{0};

// Torch's own threads, which pick up the next item as soon as they are free. Results do not depend
// on who runs what.
void parallel_for(int64_t count, void (*body)(int64_t, void*), void* context) {
  const int64_t threads = std::min<int64_t>(count, torch::stable::get_num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i, context);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i, context);
  });
}

cpu::Csr csr_of(const CsrSizes& sizes, const Tensor& rowptr, const Tensor* col,
                const OptionalTensor& perm) {
  return {rowptr.const_data_ptr(),
          col ? col->const_data_ptr() : nullptr,
          data_or_null(perm),
          sizes.rows,
          sizes.edges,
          sizes.wide()};
}

cpu::Matrix rows_of(const Tensor& t) { return {t.const_data_ptr(), t.stride(0)}; }

cpu::Problem problem_of(const Sizes& sizes, const Tensor& rowptr, const Tensor* col,
                        const OptionalTensor& perm, const OptionalTensor& weight) {
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  cpu::Problem p;
  p.csr = csr_of(sizes.csr, rowptr, col, perm);
  p.dtype = sizes.dtype;
  p.width = sizes.width;
  p.heads = sizes.heads;
  p.weight = data_or_null(weight);
  p.parallel_for = parallel_for;
  return p;
}

Tensor spmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight, const Tensor& x,
            const OptionalTensor& src_scale, const OptionalTensor& dst_scale, const OptionalTensor&,
            const std::vector<int64_t>&, bool mean, const OptionalTensor& self_x,
            const OptionalTensor& self_scale, const OptionalTensor& bias, bool relu,
            std::optional<ScalarType> out_dtype, const OptionalTensor& stage, int64_t sources) {
  const Sizes sizes = check_spmm(rowptr, col, weight, x, src_scale, dst_scale);
  check_stage(stage, sources, sizes, x, rowptr);
  const Result result = check_epilogue(sizes, rowptr, self_x, self_scale, bias, out_dtype);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, result.type);
  cpu::Problem p = problem_of(sizes, rowptr, &col, std::nullopt, weight);
  p.x = rows_of(x);
  p.src_scale = data_or_null(src_scale);
  p.dst_scale = data_or_null(dst_scale);
  p.mean = mean;
  if (self_x) {
    p.self = rows_of(*self_x);
    p.self_scale = data_or_null(self_scale);
    p.self_scale_by_row = result.self_scale_by_row;
  }
  p.bias = data_or_null(bias);
  p.relu = relu;
  p.result = out.mutable_data_ptr();
  p.result_dtype = result.dtype;
  cpu::spmm(p);
  return out;
}

Tensor row_sum(const Tensor& rowptr, const Tensor& col, const Tensor& x, int64_t, bool mean) {
  return spmm(rowptr, col, {}, x, {}, {}, {}, {}, mean, {}, {}, {}, false, {}, {}, 0);
}

std::tuple<Tensor, Tensor> spmm_arg(const Tensor& rowptr, const Tensor& col,
                                    const OptionalTensor& perm, const OptionalTensor& weight,
                                    const Tensor& x, const OptionalTensor&,
                                    const std::vector<int64_t>&, bool minimum, bool with_arg) {
  const Sizes sizes = check_spmm_arg(rowptr, col, perm, weight, x);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor arg = fast_empty(x, {with_arg ? sizes.csr.rows : 0, sizes.width}, sizes.csr.index);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, weight);
  p.x = rows_of(x);
  p.minimum = minimum;
  p.result = out.mutable_data_ptr();
  if (with_arg) p.result_arg = arg.mutable_data_ptr();
  cpu::spmm_arg(p);
  return {out, arg};
}

Tensor spmm_arg_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                         const OptionalTensor& weight, const Tensor& grad, const Tensor& arg,
                         const OptionalTensor&, const std::vector<int64_t>&) {
  const Sizes sizes = check_spmm_arg_backward(rowptr, col, perm, weight, grad, arg);
  Tensor out = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, weight);
  p.grad = rows_of(grad);
  p.arg = rows_of(arg);
  p.result = out.mutable_data_ptr();
  cpu::spmm_arg_backward(p);
  return out;
}

Tensor spmm_tie_count(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                      const Tensor& x, const Tensor& out, const OptionalTensor&,
                      const std::vector<int64_t>&, const OptionalTensor& grad, bool zero_wins) {
  const Sizes sizes = check_spmm_tie_count(rowptr, col, weight, x, out, grad);
  Tensor result = fast_empty(x, {sizes.csr.rows, sizes.width},
                             grad ? sizes.type : accumulator_type(sizes.type));
  cpu::Problem p = problem_of(sizes, rowptr, &col, std::nullopt, weight);
  p.x = rows_of(x);
  p.out = rows_of(out);
  if (grad) p.grad = rows_of(*grad);
  p.zero_wins = zero_wins;
  p.result = result.mutable_data_ptr();
  cpu::spmm_tie_count(p);
  return result;
}

Tensor spmm_tie_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                         const Tensor& grad, const Tensor& x, const Tensor& out,
                         const OptionalTensor&, const std::vector<int64_t>&) {
  const Sizes sizes = check_spmm_tie_backward(rowptr, col, weight, grad, x, out);
  Tensor result = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cpu::Problem p = problem_of(sizes, rowptr, &col, std::nullopt, weight);
  p.grad = rows_of(grad);
  p.x = rows_of(x);
  p.out = rows_of(out);
  p.result = result.mutable_data_ptr();
  cpu::spmm_tie_backward(p);
  return result;
}

// The result of a dot product per edge: [E], or [E, heads] where heads were asked for.
Tensor empty_per_edge(const Tensor& like, const Sizes& sizes, int64_t heads) {
  if (heads == 0) return fast_empty(like, {sizes.csr.edges}, sizes.type);
  return fast_empty(like, {sizes.csr.edges, heads}, sizes.type);
}

Tensor sddmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm, const Tensor& a,
             const Tensor& b, int64_t heads) {
  const Sizes sizes = check_sddmm(rowptr, col, perm, "a", a, "b", b, heads);
  Tensor result = empty_per_edge(a, sizes, heads);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, std::nullopt);
  p.grad = rows_of(a);
  p.x = rows_of(b);
  p.result = result.mutable_data_ptr();
  cpu::sddmm(p);
  return result;
}

Tensor sddmm_arg(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                 const Tensor& grad, const Tensor& x, const Tensor& arg, int64_t heads) {
  const Sizes sizes = check_sddmm_arg(rowptr, col, perm, grad, x, arg, heads);
  Tensor result = empty_per_edge(grad, sizes, heads);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, std::nullopt);
  p.grad = rows_of(grad);
  p.x = rows_of(x);
  p.arg = rows_of(arg);
  p.result = result.mutable_data_ptr();
  cpu::sddmm_arg(p);
  return result;
}

Tensor sddmm_tie(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                 const OptionalTensor& weight, const Tensor& grad, const Tensor& x,
                 const Tensor& out, int64_t heads) {
  const Sizes sizes = check_sddmm_tie(rowptr, col, perm, weight, grad, x, out, heads);
  Tensor result = empty_per_edge(grad, sizes, heads);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, weight);
  p.grad = rows_of(grad);
  p.x = rows_of(x);
  p.out = rows_of(out);
  p.result = result.mutable_data_ptr();
  cpu::sddmm_tie(p);
  return result;
}

Tensor pair_score(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                  const Tensor& a, const Tensor& b, const Tensor& att, double slope) {
  const Sizes sizes = check_pair_score(rowptr, col, perm, a, b, att);
  Tensor result = empty_per_edge(a, sizes, sizes.heads);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, std::nullopt);
  p.grad = rows_of(a);
  p.x = rows_of(b);
  p.out = {att.const_data_ptr(), 0};
  p.slope = slope;
  p.result = result.mutable_data_ptr();
  cpu::pair_score(p);
  return result;
}

std::tuple<Tensor, Tensor> pair_gradient(const Tensor& rowptr, const Tensor& col,
                                         const OptionalTensor& perm, const Tensor& grad,
                                         const Tensor& a, const Tensor& b, const Tensor& att,
                                         double slope) {
  const Sizes sizes = check_pair_gradient(rowptr, col, perm, grad, a, b, att);
  Tensor result = fast_empty(a, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor of_att = fast_empty(a, {sizes.width}, accumulator_type(sizes.type));
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, grad);
  p.grad = rows_of(a);
  p.x = rows_of(b);
  p.out = {att.const_data_ptr(), 0};
  p.slope = slope;
  p.result = result.mutable_data_ptr();
  p.result_att = of_att.mutable_data_ptr();
  cpu::pair_gradient(p);
  return {result, of_att};
}

Tensor edge_softmax(const Tensor& rowptr, const OptionalTensor& perm, const Tensor& logits) {
  const Sizes sizes = check_edge_softmax(rowptr, perm, "logits", logits);
  Tensor result = empty_per_edge(logits, sizes, logits.dim() == 1 ? 0 : sizes.heads);
  cpu::Problem p = problem_of(sizes, rowptr, nullptr, perm, std::nullopt);
  p.x = {logits.const_data_ptr(), sizes.heads};
  p.result = result.mutable_data_ptr();
  cpu::edge_softmax(p);
  return result;
}

Tensor edge_softmax_backward(const Tensor& rowptr, const OptionalTensor& perm, const Tensor& p_,
                             const Tensor& grad) {
  const Sizes sizes = check_edge_softmax_backward(rowptr, perm, p_, grad);
  Tensor result = empty_per_edge(p_, sizes, p_.dim() == 1 ? 0 : sizes.heads);
  cpu::Problem p = problem_of(sizes, rowptr, nullptr, perm, std::nullopt);
  p.x = {p_.const_data_ptr(), sizes.heads};
  p.grad = {grad.const_data_ptr(), sizes.heads};
  p.result = result.mutable_data_ptr();
  cpu::edge_softmax_backward(p);
  return result;
}

Tensor edge_sum(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                const OptionalTensor& weight, const Tensor& x, const Tensor& e,
                const OptionalTensor&, const std::vector<int64_t>&, bool mean) {
  const Sizes sizes = check_edge_sum(rowptr, col, perm, weight, x, e);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, weight);
  p.x = rows_of(x);
  p.edge = rows_of(e);
  p.mean = mean;
  p.result = out.mutable_data_ptr();
  cpu::edge_sum(p);
  return out;
}

std::tuple<Tensor, Tensor> edge_sum_backward(const Tensor& rowptr, const Tensor& col,
                                             const OptionalTensor& perm,
                                             const OptionalTensor& weight, const Tensor& x,
                                             const Tensor& e, const Tensor& grad,
                                             const OptionalTensor&, const std::vector<int64_t>&,
                                             bool with_edges) {
  const Sizes sizes = check_edge_sum_backward(rowptr, col, perm, weight, x, e, grad);
  Tensor of_x = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor of_e = fast_empty(x, {with_edges ? sizes.csr.edges : 0, sizes.width}, sizes.type);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, weight);
  p.x = rows_of(x);
  p.edge = rows_of(e);
  p.grad = rows_of(grad);
  p.result = of_x.mutable_data_ptr();
  if (with_edges) p.result_edge = of_e.mutable_data_ptr();
  cpu::edge_sum_backward(p);
  return {of_x, of_e};
}

Tensor edge_sum_dot(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                    const Tensor& grad, const Tensor& x, const Tensor& e) {
  const Sizes sizes = check_edge_sum_dot(rowptr, col, perm, grad, x, e);
  Tensor result = empty_per_edge(grad, sizes, 0);
  cpu::Problem p = problem_of(sizes, rowptr, &col, perm, std::nullopt);
  p.grad = rows_of(grad);
  p.x = rows_of(x);
  p.edge = rows_of(e);
  p.result = result.mutable_data_ptr();
  cpu::edge_sum_dot(p);
  return result;
}

cpu::Indices indices_of(const Tensor& t) {
  return {t.const_data_ptr(), t.size(0), t.stride(0), t.scalar_type() == ScalarType::Long};
}

// As cuda::kMaxCounted: a larger graph's transpose is worth waiting until somebody asks for it.
constexpr int64_t kFewEdges = 1 << 18;

using FromCoo = std::tuple<int64_t, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                           OptionalTensor, OptionalTensor, OptionalTensor>;

FromCoo from_coo(const Tensor& dst, const Tensor& src, int64_t num_dst, int64_t num_src, bool wide,
                 bool both) {
  check_from_coo(dst, src, num_dst, num_src, wide);
  const ScalarType type = wide ? ScalarType::Long : ScalarType::Int;
  const int64_t edges = dst.size(0);
  Tensor own_dst = fast_empty(dst, {edges}, type), own_src = fast_empty(dst, {edges}, type);
  const cpu::CooFacts facts =
      cpu::check_coo(indices_of(dst), indices_of(src), num_dst, num_src, own_dst.mutable_data_ptr(),
                     own_src.mutable_data_ptr(), wide, parallel_for);
  if (facts.first_bad >= 0) return {facts.first_bad, own_dst, own_src, {}, {}, {}, {}, {}, {}};
  const auto grouped = [&](const Tensor& key, const Tensor& other, int64_t rows) {
    Tensor rowptr = fast_empty(dst, {rows + 1}, type);
    Tensor col = fast_empty(dst, {edges}, type), perm = fast_empty(dst, {edges}, type);
    cpu::group({key.const_data_ptr(), other.const_data_ptr(), edges, rows, wide,
                rowptr.mutable_data_ptr(), col.mutable_data_ptr(), perm.mutable_data_ptr()},
               parallel_for);
    return std::tuple(rowptr, col, perm);
  };
  OptionalTensor rowptr_t, col_t, perm_t;
  if (both && !wide && std::max({edges, num_dst, num_src}) <= kFewEdges) {
    std::tie(rowptr_t, col_t, perm_t) = grouped(own_src, own_dst, num_src);
  }
  if (facts.sorted) {
    Tensor rowptr = fast_empty(dst, {num_dst + 1}, type);
    cpu::find_rowptr(own_dst.const_data_ptr(), edges, num_dst, rowptr.mutable_data_ptr(), wide,
                     parallel_for);
    return {-1, own_dst, own_src, rowptr, {}, {}, rowptr_t, col_t, perm_t};
  }
  const auto [rowptr, col, perm] = grouped(own_dst, own_src, num_dst);
  return {-1, own_dst, own_src, rowptr, col, perm, rowptr_t, col_t, perm_t};
}

std::tuple<Tensor, Tensor, Tensor> transpose(const Tensor& dst, const Tensor& src,
                                             int64_t num_src) {
  const bool wide = check_transpose(dst, src, num_src);
  const ScalarType type = dst.scalar_type();
  const int64_t edges = dst.size(0);
  Tensor rowptr = fast_empty(dst, {num_src + 1}, type);
  Tensor col = fast_empty(dst, {edges}, type), perm = fast_empty(dst, {edges}, type);
  cpu::group({src.const_data_ptr(), dst.const_data_ptr(), edges, num_src, wide,
              rowptr.mutable_data_ptr(), col.mutable_data_ptr(), perm.mutable_data_ptr()},
             parallel_for);
  return {rowptr, col, perm};
}

void fill_row_scales(const CsrSizes& sizes, const Tensor& rowptr, const Tensor* col,
                     ScalarType dtype, Tensor& scale, Tensor* own) {
  cpu::row_scales({rowptr.const_data_ptr(), col ? col->const_data_ptr() : nullptr, sizes.rows,
                   sizes.wide(), dtype == ScalarType::Double, col == nullptr,
                   scale.mutable_data_ptr(), own ? own->mutable_data_ptr() : nullptr},
                  parallel_for);
}

Tensor inverse_degree(const Tensor& rowptr, ScalarType dtype) {
  const CsrSizes sizes = check_row_scales(rowptr, nullptr, dtype);
  Tensor out = fast_empty(rowptr, {sizes.rows}, dtype);
  fill_row_scales(sizes, rowptr, nullptr, dtype, out, nullptr);
  return out;
}

std::tuple<Tensor, Tensor> gcn_scales(const Tensor& rowptr, const Tensor& col, bool loops,
                                      ScalarType dtype) {
  const CsrSizes sizes = check_row_scales(rowptr, &col, dtype);
  Tensor scale = fast_empty(rowptr, {sizes.rows}, dtype);
  Tensor own = fast_empty(rowptr, {loops ? sizes.rows : 0}, dtype);
  fill_row_scales(sizes, rowptr, &col, dtype, scale, loops ? &own : nullptr);
  return {scale, own};
}

bool same_coo(const Tensor& dst, const Tensor& src, const Tensor& own_dst, const Tensor& own_src) {
  check_same_coo(dst, src, own_dst, own_src);
  return cpu::same_indices(indices_of(dst), indices_of(own_dst), parallel_for) &&
         cpu::same_indices(indices_of(src), indices_of(own_src), parallel_for);
}

int64_t kernel_calls_so_far() { return kernel_calls.load(std::memory_order_relaxed); }

}  // namespace
}  // namespace gsp

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CPU, m) {
  m.impl("_spmm", TORCH_BOX(&gsp::spmm));
  m.impl("_row_sum", TORCH_BOX(&gsp::row_sum));
  m.impl("_spmm_arg", TORCH_BOX(&gsp::spmm_arg));
  m.impl("_spmm_arg_backward", TORCH_BOX(&gsp::spmm_arg_backward));
  m.impl("_spmm_tie_count", TORCH_BOX(&gsp::spmm_tie_count));
  m.impl("_spmm_tie_backward", TORCH_BOX(&gsp::spmm_tie_backward));
  m.impl("_sddmm", TORCH_BOX(&gsp::sddmm));
  m.impl("_sddmm_arg", TORCH_BOX(&gsp::sddmm_arg));
  m.impl("_sddmm_tie", TORCH_BOX(&gsp::sddmm_tie));
  m.impl("_pair_score", TORCH_BOX(&gsp::pair_score));
  m.impl("_pair_gradient", TORCH_BOX(&gsp::pair_gradient));
  m.impl("_edge_softmax", TORCH_BOX(&gsp::edge_softmax));
  m.impl("_edge_softmax_backward", TORCH_BOX(&gsp::edge_softmax_backward));
  m.impl("_edge_sum", TORCH_BOX(&gsp::edge_sum));
  m.impl("_edge_sum_backward", TORCH_BOX(&gsp::edge_sum_backward));
  m.impl("_edge_sum_dot", TORCH_BOX(&gsp::edge_sum_dot));
  m.impl("_from_coo", TORCH_BOX(&gsp::from_coo));
  m.impl("_transpose", TORCH_BOX(&gsp::transpose));
  m.impl("_inverse_degree", TORCH_BOX(&gsp::inverse_degree));
  m.impl("_gcn_scales", TORCH_BOX(&gsp::gcn_scales));
  m.impl("_same_coo", TORCH_BOX(&gsp::same_coo));
}

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CompositeExplicitAutograd, m) {
  m.impl("_kernel_calls", TORCH_BOX(&gsp::kernel_calls_so_far));
}
