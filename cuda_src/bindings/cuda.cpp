// The CUDA implementations of the operators: check, describe the operands with plain pointers,
// launch.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include <tuple>
#include <vector>

#include "common/check.h"
#include "cuda/launch.h"

namespace gsp {
namespace {

std::atomic<int64_t> kernel_calls{0};

// The tensors' own device and torch's current stream on it.
class Launch {
 public:
  explicit Launch(const Tensor& like) : guard_(like.get_device_index()) {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(like.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

  void check(const char* what, cudaError_t error) const {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // not to be reported again by an innocent caller
    int device = 0;
    cudaDeviceProp properties{};
    cudaGetDevice(&device);
    cudaGetDeviceProperties(&properties, device);
    const char* hint =
        error == cudaErrorNoKernelImageForDevice || error == cudaErrorUnsupportedPtxVersion
            ? ": rebuild the package with this architecture in TORCH_CUDA_ARCH_LIST"
        : error == cudaErrorInsufficientDriver
            ? ": update the driver, or rebuild with an older CUDA toolkit"
            : "";
    STD_TORCH_CHECK(false, what, ": ", cudaGetErrorString(error), " on ", properties.name,
                    " (compute capability ", properties.major, ".", properties.minor, ")", hint);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// What a plan passes: config = {long row, chunk, chunk items, merged rows, scratch slots, whether
// items hold every long row}.
cuda::RowSweep sweep_of(const Sizes& sizes, const Tensor& rowptr, const Tensor& col,
                        const OptionalTensor& perm, const OptionalTensor& weight,
                        const OptionalTensor& items, const std::vector<int64_t>& config) {
  STD_TORCH_CHECK(sizes.width <= std::numeric_limits<int32_t>::max(), "got ", sizes.width,
                  " columns, expected fewer than 2^31");
  STD_TORCH_CHECK(
      config.size() == 6 && *std::min_element(config.begin(), config.end()) >= 0 && config[1] >= 1,
      "config has ", config.size(), " entries, expected the 6 of a plan for this graph");
  cuda::RowSweep p{sizes.dtype, sizes.csr.wide()};
  p.long_row = config[0];
  p.chunk = config[1];
  p.listed = config[5] != 0;
  if (items && config[2] > 0) {
    STD_TORCH_CHECK(
        items->dim() == 2 && items->size(0) == config[2] + config[3] && items->size(1) == 4,
        "items has shape ", shape_of(*items), ", expected [", config[2] + config[3], ", 4]");
    check_dtype("items", *items, ScalarType::Int);
    check_contiguous("items", *items);
    check_same_device("items", *items, rowptr);
    p.items = items->const_data_ptr();
    p.num_items = static_cast<int>(config[2]);
    p.num_merges = static_cast<int>(config[3]);
    p.num_slots = static_cast<int>(config[4]);
  }
  p.rowptr = rowptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.perm = data_or_null(perm);
  p.weight = data_or_null(weight);
  p.rows = sizes.csr.rows;
  p.edges = sizes.csr.edges;
  p.width = static_cast<int>(sizes.width);
  p.heads = static_cast<int>(sizes.heads);
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  return p;
}

// Launches, with room for the partial results of rows that are split over blocks.
void run(const char* what, cuda::RowOp op, cuda::RowSweep& p, const Sizes& sizes,
         const Tensor& like) {
  const Launch launch(like);
  if (p.num_slots == 0) {
    launch.check(what, cuda::row_sweep(op, p, launch.stream()));
    return;
  }
  // Freed at the end of this call, and reused in stream order only.
  Tensor scratch = fast_empty(like, {p.num_slots, sizes.width}, accumulator_type(sizes.type));
  p.scratch = scratch.mutable_data_ptr();
  OptionalTensor scratch_arg;
  if (op == cuda::RowOp::kMax || op == cuda::RowOp::kMin) {
    scratch_arg = fast_empty(like, {p.num_slots, sizes.width}, sizes.csr.index);
    p.scratch_arg = scratch_arg->mutable_data_ptr();
  }
  launch.check(what, cuda::row_sweep(op, p, launch.stream()));
}

Tensor spmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight, const Tensor& x,
            const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
            const OptionalTensor& items, const std::vector<int64_t>& config, bool mean) {
  const Sizes sizes = check_spmm(rowptr, col, weight, x, src_scale, dst_scale);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.src_scale = data_or_null(src_scale);
  p.dst_scale = data_or_null(dst_scale);
  p.mean = mean;
  p.out = out.mutable_data_ptr();
  run("spmm", cuda::RowOp::kSum, p, sizes, x);
  return out;
}

Tensor pcsr_spmm(const Tensor& rowptr, const Tensor& ptr, const Tensor& col,
                 const OptionalTensor& target, const OptionalTensor& merges,
                 const OptionalTensor& weight, const Tensor& x, const OptionalTensor& src_scale,
                 const OptionalTensor& dst_scale, const std::vector<int64_t>& config, bool mean) {
  const PcsrSizes sizes =
      check_pcsr_spmm(rowptr, ptr, col, target, merges, weight, x, src_scale, dst_scale, config);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::PcsrSpmm p{sizes.dtype, sizes.csr.wide()};
  p.rowptr = rowptr.const_data_ptr();
  p.ptr = ptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.target = data_or_null(target);
  p.merges = data_or_null(merges);
  p.weight = data_or_null(weight);
  p.x = x.const_data_ptr();
  p.src_scale = data_or_null(src_scale);
  p.dst_scale = data_or_null(dst_scale);
  p.out = out.mutable_data_ptr();
  p.x_stride = x.stride(0);
  p.rows = sizes.csr.rows;
  p.pieces = sizes.pieces;
  p.vectors = col.size(0);
  p.num_merges = merges ? merges->size(0) : 0;
  p.width = static_cast<int>(sizes.width);
  p.heads = static_cast<int>(sizes.heads);
  p.mean = mean;
  p.warps = static_cast<int>(sizes.warps);
  p.fold = static_cast<int>(sizes.fold);
  p.height = static_cast<int>(sizes.height);
  OptionalTensor scratch;  // freed at the end of this call, and reused in stream order only
  if (sizes.slots > 0) {
    scratch =
        fast_empty(x, {sizes.slots, sizes.height * sizes.width}, accumulator_type(sizes.type));
    p.scratch = scratch->mutable_data_ptr();
  }
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  const Launch launch(x);
  launch.check("pcsr_spmm", cuda::pcsr_spmm(p, launch.stream()));
  return out;
}

std::tuple<Tensor, Tensor> spmm_arg(const Tensor& rowptr, const Tensor& col,
                                    const OptionalTensor& perm, const OptionalTensor& weight,
                                    const Tensor& x, const OptionalTensor& items,
                                    const std::vector<int64_t>& config, bool minimum) {
  const Sizes sizes = check_spmm_arg(rowptr, col, perm, weight, x);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor arg = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.csr.index);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.out = out.mutable_data_ptr();
  p.out_arg = arg.mutable_data_ptr();
  run("spmm_arg", minimum ? cuda::RowOp::kMin : cuda::RowOp::kMax, p, sizes, x);
  return {out, arg};
}

Tensor spmm_arg_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                         const OptionalTensor& weight, const Tensor& grad, const Tensor& arg,
                         const OptionalTensor& items, const std::vector<int64_t>& config) {
  const Sizes sizes = check_spmm_arg_backward(rowptr, col, perm, weight, grad, arg);
  check_contiguous("arg", arg);
  Tensor out = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, items, config);
  p.x = grad.const_data_ptr();
  p.x_stride = grad.stride(0);
  p.arg = arg.const_data_ptr();
  p.out = out.mutable_data_ptr();
  run("spmm_arg_backward", cuda::RowOp::kArgBackward, p, sizes, grad);
  return out;
}

Tensor spmm_tie_count(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                      const Tensor& x, const Tensor& out, const OptionalTensor& items,
                      const std::vector<int64_t>& config) {
  const Sizes sizes = check_spmm_tie_count(rowptr, col, weight, x, out);
  Tensor count = fast_empty(x, {sizes.csr.rows, sizes.width}, accumulator_type(sizes.type));
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = x.stride(0);
  p.own = out.const_data_ptr();
  p.own_stride = out.stride(0);
  p.out_wide = count.mutable_data_ptr();
  run("spmm_tie_count", cuda::RowOp::kTieCount, p, sizes, x);
  return count;
}

Tensor spmm_tie_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                         const Tensor& grad, const Tensor& x, const Tensor& out,
                         const OptionalTensor& items, const std::vector<int64_t>& config) {
  const Sizes sizes = check_spmm_tie_backward(rowptr, col, weight, grad, x, out);
  Tensor result = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, items, config);
  p.x = grad.const_data_ptr();
  p.x_stride = grad.stride(0);
  p.other = out.const_data_ptr();
  p.other_stride = out.stride(0);
  p.own = x.const_data_ptr();
  p.own_stride = x.stride(0);
  p.out = result.mutable_data_ptr();
  run("spmm_tie_backward", cuda::RowOp::kTieBackward, p, sizes, grad);
  return result;
}

Tensor edge_dot(const char* what, cuda::EdgeOp op, const Sizes& sizes, int64_t heads,
                const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                const OptionalTensor& weight, const Tensor& a, const Tensor& b,
                const Tensor* picks) {
  if (picks != nullptr) check_contiguous(op == cuda::EdgeOp::kArg ? "arg" : "out", *picks);
  Tensor out = heads == 0 ? fast_empty(a, {sizes.csr.edges}, sizes.type)
                          : fast_empty(a, {sizes.csr.edges, heads}, sizes.type);
  cuda::EdgeDot p{sizes.dtype, sizes.csr.wide()};
  p.rowptr = rowptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.perm = data_or_null(perm);
  p.weight = data_or_null(weight);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.picks = picks != nullptr ? picks->const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  p.a_stride = a.stride(0);
  p.b_stride = b.stride(0);
  p.rows = sizes.csr.rows;
  p.edges = sizes.csr.edges;
  p.width = static_cast<int>(sizes.width);
  p.heads = static_cast<int>(sizes.heads);
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  const Launch launch(a);
  launch.check(what, cuda::edge_dot(op, p, launch.stream()));
  return out;
}

Tensor sddmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm, const Tensor& a,
             const Tensor& b, int64_t heads) {
  const Sizes sizes = check_sddmm(rowptr, col, perm, "a", a, "b", b, heads);
  return edge_dot("sddmm", cuda::EdgeOp::kDot, sizes, heads, rowptr, col, perm, std::nullopt, a, b,
                  nullptr);
}

Tensor sddmm_arg(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                 const Tensor& grad, const Tensor& x, const Tensor& arg, int64_t heads) {
  const Sizes sizes = check_sddmm_arg(rowptr, col, perm, grad, x, arg, heads);
  return edge_dot("sddmm_arg", cuda::EdgeOp::kArg, sizes, heads, rowptr, col, perm, std::nullopt,
                  grad, x, &arg);
}

Tensor sddmm_tie(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                 const OptionalTensor& weight, const Tensor& grad, const Tensor& x,
                 const Tensor& out, int64_t heads) {
  const Sizes sizes = check_sddmm_tie(rowptr, col, perm, weight, grad, x, out, heads);
  return edge_dot("sddmm_tie", cuda::EdgeOp::kTie, sizes, heads, rowptr, col, perm, weight, grad, x,
                  &out);
}

Tensor softmax(const char* what, const Sizes& sizes, const Tensor& rowptr,
               const OptionalTensor& perm, const Tensor& in, const Tensor* grad) {
  Tensor out = in.dim() == 1 ? fast_empty(in, {in.size(0)}, sizes.type)
                             : fast_empty(in, {in.size(0), in.size(1)}, sizes.type);
  cuda::EdgeSoftmax p{sizes.dtype, sizes.csr.wide()};
  p.rowptr = rowptr.const_data_ptr();
  p.perm = data_or_null(perm);
  p.in = in.const_data_ptr();
  p.grad = grad != nullptr ? grad->const_data_ptr() : nullptr;
  p.out = out.mutable_data_ptr();
  p.rows = sizes.csr.edges == 0 ? 0 : sizes.csr.rows;
  p.heads = static_cast<int>(sizes.heads);
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  const Launch launch(in);
  launch.check(what, cuda::edge_softmax(p, launch.stream()));
  return out;
}

Tensor edge_softmax(const Tensor& rowptr, const OptionalTensor& perm, const Tensor& logits) {
  return softmax("edge_softmax", check_edge_softmax(rowptr, perm, "logits", logits), rowptr, perm,
                 logits, nullptr);
}

Tensor edge_softmax_backward(const Tensor& rowptr, const OptionalTensor& perm, const Tensor& p,
                             const Tensor& grad) {
  return softmax("edge_softmax_backward", check_edge_softmax_backward(rowptr, perm, p, grad),
                 rowptr, perm, p, &grad);
}

Tensor check_coo(const Tensor& dst, const Tensor& src, int64_t num_dst, int64_t num_src) {
  check_coo_inputs(dst, src, num_dst, num_src);
  STD_TORCH_CHECK(dst.scalar_type() == src.scalar_type(), "dst is ", dst.scalar_type(),
                  " but src is ", src.scalar_type(), ", expected one type");
  Tensor out = fast_empty(dst, {3}, ScalarType::Long);
  const Launch launch(dst);
  launch.check(
      "check_coo",
      cuda::check_coo(dst.scalar_type() == ScalarType::Long, dst.const_data_ptr(),
                      src.const_data_ptr(), dst.stride(0), src.stride(0), dst.size(0), num_dst,
                      num_src, static_cast<int64_t*>(out.mutable_data_ptr()), launch.stream()));
  return out;
}

std::tuple<Tensor, Tensor> group(const Tensor& key, int64_t n) {
  check_index_vector("key", key);
  const int64_t edges = key.size(0);
  STD_TORCH_CHECK(n >= 0 && (n > 0 || edges == 0), "got n = ", n, " for ", edges,
                  " keys, expected more than every key");
  cuda::Group p{std::max(n, edges) > std::numeric_limits<int32_t>::max(),
                key.scalar_type() == ScalarType::Long};
  const ScalarType type = p.wide_index ? ScalarType::Long : ScalarType::Int;
  Tensor rowptr = fast_empty(key, {n + 1}, type), values = fast_empty(key, {edges}, type);
  Tensor buffers = fast_empty(key, {3, edges}, type);
  const int64_t bytes = edges * (p.wide_index ? 8 : 4);
  auto* first = static_cast<char*>(buffers.mutable_data_ptr());
  p.key = key.const_data_ptr();
  p.key_stride = key.stride(0);
  p.edges = edges;
  p.rows = n;
  p.keys = first;
  p.more_keys = first + bytes;
  p.more_values = first + 2 * bytes;
  p.values = values.mutable_data_ptr();
  p.rowptr = rowptr.mutable_data_ptr();
  const Launch launch(key);
  launch.check("group", cuda::group_bytes(p, &p.temporary_bytes));
  Tensor temporary = fast_empty(key, {p.temporary_bytes / 4 + 1}, ScalarType::Int);
  p.temporary = temporary.mutable_data_ptr();
  launch.check("group", cuda::group(p, launch.stream()));
  return {rowptr, values};
}

int64_t calls() { return kernel_calls.load(std::memory_order_relaxed); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CUDA, m) {
  m.impl("_spmm", TORCH_BOX(&spmm));
  m.impl("_pcsr_spmm", TORCH_BOX(&pcsr_spmm));
  m.impl("_spmm_arg", TORCH_BOX(&spmm_arg));
  m.impl("_spmm_arg_backward", TORCH_BOX(&spmm_arg_backward));
  m.impl("_spmm_tie_count", TORCH_BOX(&spmm_tie_count));
  m.impl("_spmm_tie_backward", TORCH_BOX(&spmm_tie_backward));
  m.impl("_sddmm", TORCH_BOX(&sddmm));
  m.impl("_sddmm_arg", TORCH_BOX(&sddmm_arg));
  m.impl("_sddmm_tie", TORCH_BOX(&sddmm_tie));
  m.impl("_edge_softmax", TORCH_BOX(&edge_softmax));
  m.impl("_edge_softmax_backward", TORCH_BOX(&edge_softmax_backward));
  m.impl("_check_coo", TORCH_BOX(&check_coo));
  m.impl("_group", TORCH_BOX(&group));
}

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CompositeExplicitAutograd, m) {
  m.impl("_kernel_calls_cuda", TORCH_BOX(&calls));
}

}  // namespace gsp
