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
        : error == cudaErrorInvalidConfiguration || error == cudaErrorInvalidValue  // by driver
            ? ": more columns than one launch can have; pass the features in parts, x[:, :n]"
            : "";
    STD_TORCH_CHECK(false, what, ": ", cudaGetErrorString(error), " on ", properties.name,
                    " (compute capability ", properties.major, ".", properties.minor, ")", hint);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

template <cudaDeviceAttr kAttribute>
int64_t attribute(int device) {
  static std::atomic<int64_t> known[64];
  const bool listed = device >= 0 && device < 64;
  int64_t found = listed ? known[device].load(std::memory_order_relaxed) : 0;
  if (found == 0) {
    int value = 0;
    cudaDeviceGetAttribute(&value, kAttribute, device);
    found = std::max(value, 1);
    if (listed) known[device].store(found, std::memory_order_relaxed);
  }
  return found;
}

// Columns or heads: the kernels have 32 bits for them, and step past the last by some vectors.
int narrow(const char* what, int64_t count) {
  STD_TORCH_CHECK(count < (int64_t(1) << 31) - 1024, "got ", count, " ", what,
                  ", expected fewer than 2^31 - 1024");
  return static_cast<int>(count);
}

// Elements between rows of what is gathered; the kernels have 32 bits for as many bytes.
int64_t row_stride(const char* name, const Tensor& t, const Sizes& sizes) {
  const int64_t stride = t.size(0) > 1 ? t.stride(0) : t.size(1);
  STD_TORCH_CHECK(sizes.csr.wide() || stride <= std::numeric_limits<int32_t>::max() / 8, "rows of ",
                  name, " are ", stride, " elements apart, expected fewer than 2^28; ",
                  "make it contiguous");
  return stride;
}

// What a plan passes: config = {long row, chunk (of rows that are not split: the longest), items,
// merges, scratch slots, lanes, fold, parallel, bundle}; see Plan.
cuda::RowSweep sweep_of(const Sizes& sizes, const Tensor& rowptr, const Tensor& col,
                        const OptionalTensor& perm, const OptionalTensor& weight, const Tensor& x,
                        const OptionalTensor& items, const std::vector<int64_t>& config) {
  STD_TORCH_CHECK(
      config.size() == 9 && *std::min_element(config.begin(), config.end()) >= 0 && config[1] >= 1,
      "config has ", config.size(), " entries, expected the 9 of a plan for this graph");
  cuda::RowSweep p{{sizes.dtype}, sizes.csr.wide()};
  p.long_row = config[0];
  p.chunk = config[1];
  const int64_t lanes = config[5], fold = config[6], parallel = config[7];
  const auto power = [](int64_t v) { return v >= 1 && v <= 32 && (v & (v - 1)) == 0; };
  STD_TORCH_CHECK(lanes == 0 || (power(lanes) && power(parallel) && lanes * parallel <= 32 &&
                                 (fold == 1 || fold == 2)),
                  "config asks for ", lanes, " lanes, fold ", fold, ", ", parallel,
                  " groups, expected powers of two of at most 32 threads, and fold 1 or 2");
  STD_TORCH_CHECK(config[8] >= 1 && config[8] <= 1024, "config asks for ", config[8],
                  " rows at a time, expected 1 to 1024");
  if (lanes != 0) {
    p.geometry = {static_cast<int>(lanes), static_cast<int>(fold), static_cast<int>(parallel)};
  }
  if (items && !p.wide_index) {
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
  const bool unsplit = p.items == nullptr && p.long_row == 0;
  if (p.items != nullptr || unsplit) p.bundle = static_cast<int>(config[8]);
  if (unsplit) p.longest = p.chunk;
  p.l2_bytes = attribute<cudaDevAttrL2CacheSize>(rowptr.get_device_index());
  p.cols = x.size(0);
  p.rowptr = rowptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.perm = data_or_null(perm);
  p.weight = data_or_null(weight);
  p.rows = sizes.csr.rows;
  p.edges = sizes.csr.edges;
  p.width = narrow("columns", sizes.width);
  p.heads = narrow("heads", sizes.heads);
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
  if (p.out_arg != nullptr) {
    scratch_arg = fast_empty(like, {p.num_slots, sizes.width}, sizes.csr.index);
    p.scratch_arg = scratch_arg->mutable_data_ptr();
  }
  launch.check(what, cuda::row_sweep(op, p, launch.stream()));
}

void set_end(cuda::SumEnd& p, const Result& result, Tensor& out, const OptionalTensor& dst_scale,
             bool mean, const OptionalTensor& self_x, const OptionalTensor& self_scale,
             const OptionalTensor& bias, bool relu) {
  p.dst_scale = data_or_null(dst_scale);
  p.mean = mean;
  if (self_x) {
    p.self = self_x->const_data_ptr();
    p.self_stride = self_x->stride(0);
    p.self_scale = data_or_null(self_scale);
    p.self_scale_by_row = result.self_scale_by_row;
  }
  p.bias = data_or_null(bias);
  p.relu = relu;
  p.out = out.mutable_data_ptr();
  p.out_dtype = result.dtype;
}

// The way by shared memory, where a plan offers it and it does what is asked; else the items do.
bool run_staged(const cuda::RowSweep& sweep, const OptionalTensor& stage, int64_t blocks,
                int64_t sources, const Tensor& like) {
  const bool one_weight = sweep.weight == nullptr || sweep.heads <= 1;
  if (!stage || sweep.dtype == Dtype::kFloat64 || sweep.wide_index || !one_weight ||
      sweep.src_scale != nullptr) {
    return false;
  }
  cuda::StagedSpmm p{sweep};
  p.device = like.get_device_index();
  p.shared_bytes = static_cast<int>(attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(p.device) -
                                    cuda::kStagedStatic);
  p.staged = choose_staged(p.rows, p.width, blocks, sources,
                           attribute<cudaDevAttrMultiProcessorCount>(p.device), p.shared_bytes,
                           p.dtype == Dtype::kFloat32 ? 4 : 2);
  if (p.staged.team == 0) return false;
  p.stage = stage->const_data_ptr();
  p.blocks = static_cast<int>(blocks);
  p.sources = static_cast<int>(sources);
  const Launch launch(like);
  OptionalTensor scratch;  // freed at the end of this call, and reused in stream order only
  if (p.staged.parts > 1) {
    scratch = fast_empty(like, {p.staged.parts * p.rows, p.staged.slabs * p.staged.slab},
                         ScalarType::Float);
    p.scratch = scratch->mutable_data_ptr();
  }
  launch.check("spmm", cuda::staged_spmm(p, launch.stream()));
  return true;
}

Tensor spmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight, const Tensor& x,
            const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
            const OptionalTensor& items, const std::vector<int64_t>& config, bool mean,
            const OptionalTensor& self_x, const OptionalTensor& self_scale,
            const OptionalTensor& bias, bool relu, std::optional<ScalarType> out_dtype,
            const OptionalTensor& stage, int64_t sources) {
  const Sizes sizes = check_spmm(rowptr, col, weight, x, src_scale, dst_scale);
  const int64_t blocks = check_stage(stage, sources, sizes, x, rowptr);
  const Result result = check_epilogue(sizes, rowptr, self_x, self_scale, bias, out_dtype);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, result.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, x, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = row_stride("x", x, sizes);
  p.src_scale = data_or_null(src_scale);
  set_end(p, result, out, dst_scale, mean, self_x, self_scale, bias, relu);
  if (run_staged(p, stage, blocks, sources, x)) return out;
  run("spmm", cuda::RowOp::kSum, p, sizes, x);
  return out;
}

Tensor row_sum(const Tensor& rowptr, const Tensor& col, const Tensor& x, int64_t lengths,
               bool mean) {
  const int64_t long_row = lengths >> 32, low = lengths & 0xffffffff;
  const bool split = long_row > 0;
  const int64_t chunk = split ? low : std::max<int64_t>(low >> 16, 1);
  const std::vector<int64_t> config{long_row, chunk, 0, 0, 0, 0, 0, 0, split ? 1 : low & 0xffff};
  return spmm(rowptr, col, {}, x, {}, {}, {}, config, mean, {}, {}, {}, false, {}, {}, 0);
}

Tensor pcsr_spmm(const Tensor& rowptr, const Tensor& ptr, const Tensor& col,
                 const OptionalTensor& target, const OptionalTensor& merges,
                 const OptionalTensor& weight, const Tensor& x, const OptionalTensor& src_scale,
                 const OptionalTensor& dst_scale, const std::vector<int64_t>& config, bool mean,
                 const OptionalTensor& self_x, const OptionalTensor& self_scale,
                 const OptionalTensor& bias, bool relu, std::optional<ScalarType> out_dtype) {
  const PcsrSizes sizes =
      check_pcsr_spmm(rowptr, ptr, col, target, merges, weight, x, src_scale, dst_scale, config);
  const Result result = check_epilogue(sizes, rowptr, self_x, self_scale, bias, out_dtype);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, result.type);
  cuda::PcsrSpmm p{{sizes.dtype}, sizes.csr.wide()};
  p.rowptr = rowptr.const_data_ptr();
  p.ptr = ptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.target = data_or_null(target);
  p.merges = data_or_null(merges);
  p.weight = data_or_null(weight);
  p.x = x.const_data_ptr();
  p.src_scale = data_or_null(src_scale);
  p.x_stride = x.stride(0);
  p.rows = sizes.csr.rows;
  p.pieces = sizes.pieces;
  p.vectors = col.size(0);
  p.num_merges = merges ? merges->size(0) : 0;
  p.width = narrow("columns", sizes.width);
  p.heads = narrow("heads", sizes.heads);
  set_end(p, result, out, dst_scale, mean, self_x, self_scale, bias, relu);
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

// What _tile_spmm and _tile_end have in common.
cuda::TileSpmm tiles_of(const Sizes& sizes, const Tensor& rowptr, const Tensor& col,
                        const OptionalTensor& weight, const Tensor& x) {
  cuda::TileSpmm p{{sizes.dtype}};
  p.rowptr = rowptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.weight = data_or_null(weight);
  p.x = x.const_data_ptr();
  p.x_stride = x.size(0) > 1 ? x.stride(0) : x.size(1);
  p.rows = sizes.csr.rows;
  p.width = narrow("columns", sizes.width);
  p.x_width = narrow("columns", x.size(1));
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  return p;
}

Tensor tile_spmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                 const Tensor& ptr, const Tensor& vectors, const Tensor& bits,
                 const OptionalTensor& values, const OptionalTensor& rows,
                 const OptionalTensor& target, const OptionalTensor& merges, const Tensor& x,
                 const OptionalTensor& dst_scale, const std::vector<int64_t>& config, bool mean,
                 const OptionalTensor& self_x, const OptionalTensor& self_scale,
                 const OptionalTensor& bias, bool relu, std::optional<ScalarType> out_dtype) {
  const TileSizes sizes = check_tile_spmm(rowptr, col, weight, ptr, vectors, bits, values, rows,
                                          target, merges, x, dst_scale, config);
  const Result result = check_epilogue(sizes, rowptr, self_x, self_scale, bias, out_dtype);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, result.type);
  cuda::TileSpmm p = tiles_of(sizes, rowptr, col, weight, x);
  p.ptr = ptr.const_data_ptr();
  p.vectors = vectors.const_data_ptr();
  p.bits = bits.const_data_ptr();
  p.values = data_or_null(values);
  p.window_rows = data_or_null(rows);
  p.target = data_or_null(target);
  p.merges = data_or_null(merges);
  p.num_merges = merges ? merges->size(0) : 0;
  p.pieces = sizes.pieces;
  p.height = static_cast<int>(sizes.height);
  p.passes = static_cast<int>(sizes.passes);
  set_end(p, result, out, dst_scale, mean, self_x, self_scale, bias, relu);
  OptionalTensor scratch;  // freed at the end of this call, and reused in stream order only
  if (sizes.slots > 0) {
    scratch = fast_empty(x, {sizes.slots, sizes.height * sizes.width}, ScalarType::Float);
    p.scratch = scratch->mutable_data_ptr();
  }
  const Launch launch(x);
  launch.check("tile_spmm", cuda::tile_spmm(p, launch.stream()));
  return out;
}

Tensor tile_end(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                const Tensor& x, const Tensor& sums, const OptionalTensor& dst_scale, bool mean,
                const OptionalTensor& self_x, const OptionalTensor& self_scale,
                const OptionalTensor& bias, bool relu, std::optional<ScalarType> out_dtype) {
  const Sizes sizes = check_tile_end(rowptr, col, weight, x, sums, dst_scale);
  const Result result = check_epilogue(sizes, rowptr, self_x, self_scale, bias, out_dtype);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, result.type);
  cuda::TileSpmm p = tiles_of(sizes, rowptr, col, weight, x);
  p.sums = sums.const_data_ptr();
  set_end(p, result, out, dst_scale, mean, self_x, self_scale, bias, relu);
  const Launch launch(x);
  launch.check("tile_end", cuda::tile_end(p, launch.stream()));
  return out;
}

std::tuple<Tensor, Tensor> spmm_arg(const Tensor& rowptr, const Tensor& col,
                                    const OptionalTensor& perm, const OptionalTensor& weight,
                                    const Tensor& x, const OptionalTensor& items,
                                    const std::vector<int64_t>& config, bool minimum,
                                    bool with_arg) {
  const Sizes sizes = check_spmm_arg(rowptr, col, perm, weight, x);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor arg = fast_empty(x, {with_arg ? sizes.csr.rows : 0, sizes.width}, sizes.csr.index);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, x, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = row_stride("x", x, sizes);
  p.out = out.mutable_data_ptr();
  if (with_arg) p.out_arg = arg.mutable_data_ptr();
  p.minimum = minimum;
  run("spmm_arg", cuda::RowOp::kExtremum, p, sizes, x);
  return {out, arg};
}

Tensor spmm_arg_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                         const OptionalTensor& weight, const Tensor& grad, const Tensor& arg,
                         const OptionalTensor& items, const std::vector<int64_t>& config) {
  const Sizes sizes = check_spmm_arg_backward(rowptr, col, perm, weight, grad, arg);
  check_contiguous("arg", arg);
  Tensor out = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, grad, items, config);
  p.x = grad.const_data_ptr();
  p.x_stride = row_stride("grad", grad, sizes);
  p.arg = arg.const_data_ptr();
  p.out = out.mutable_data_ptr();
  run("spmm_arg_backward", cuda::RowOp::kArgBackward, p, sizes, grad);
  return out;
}

Tensor spmm_tie_count(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                      const Tensor& x, const Tensor& out, const OptionalTensor& items,
                      const std::vector<int64_t>& config, const OptionalTensor& grad,
                      bool zero_wins) {
  const Sizes sizes = check_spmm_tie_count(rowptr, col, weight, x, out, grad);
  Tensor result = fast_empty(x, {sizes.csr.rows, sizes.width},
                             grad ? sizes.type : accumulator_type(sizes.type));
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, x, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = row_stride("x", x, sizes);
  p.own = out.const_data_ptr();
  p.own_stride = out.stride(0);
  p.zero_wins = zero_wins;
  p.out = result.mutable_data_ptr();
  if (grad) {
    p.self = grad->const_data_ptr();
    p.self_stride = grad->stride(0);
  } else {
    p.out_dtype = sizes.dtype == Dtype::kFloat64 ? Dtype::kFloat64 : Dtype::kFloat32;
  }
  run("spmm_tie_count", cuda::RowOp::kTieCount, p, sizes, x);
  return result;
}

Tensor spmm_tie_backward(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                         const Tensor& grad, const Tensor& x, const Tensor& out,
                         const OptionalTensor& items, const std::vector<int64_t>& config) {
  const Sizes sizes = check_spmm_tie_backward(rowptr, col, weight, grad, x, out);
  Tensor result = fast_empty(grad, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, std::nullopt, weight, grad, items, config);
  p.x = grad.const_data_ptr();
  p.x_stride = row_stride("grad", grad, sizes);
  p.other = out.const_data_ptr();
  p.other_stride = row_stride("out", out, sizes);
  p.own = x.const_data_ptr();
  p.own_stride = x.stride(0);
  p.out = result.mutable_data_ptr();
  run("spmm_tie_backward", cuda::RowOp::kTieBackward, p, sizes, grad);
  return result;
}

Tensor edge_dot(const char* what, cuda::EdgeOp op, const Sizes& sizes, int64_t heads,
                const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                const OptionalTensor& weight, const Tensor& a, const Tensor& b, const Tensor* picks,
                const Tensor* edge = nullptr) {
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
  if (edge != nullptr) {
    p.edge = edge->const_data_ptr();
    p.edge_stride = edge->stride(0);
  }
  p.out = out.mutable_data_ptr();
  p.a_stride = a.stride(0);
  p.b_stride = b.stride(0);
  p.rows = sizes.csr.rows;
  p.edges = sizes.csr.edges;
  p.width = narrow("columns", sizes.width);
  p.heads = narrow("heads", sizes.heads);
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

cuda::Pair pair_of(const Sizes& sizes, const Tensor& rowptr, const Tensor& col,
                   const OptionalTensor& perm, const Tensor& a, const Tensor& b, const Tensor& att,
                   double slope) {
  cuda::Pair p{sizes.dtype, sizes.csr.wide()};
  p.rowptr = rowptr.const_data_ptr();
  p.col = col.const_data_ptr();
  p.perm = data_or_null(perm);
  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.att = att.const_data_ptr();
  p.width = narrow("columns", sizes.width);
  p.heads = narrow("heads", sizes.heads);
  p.a_stride = row_stride("a", a, sizes);
  p.b_stride = row_stride("b", b, sizes);
  p.rows = sizes.csr.rows;
  p.edges = sizes.csr.edges;
  p.slope = slope;
  kernel_calls.fetch_add(1, std::memory_order_relaxed);
  return p;
}

Tensor pair_score(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                  const Tensor& a, const Tensor& b, const Tensor& att, double slope) {
  const Sizes sizes = check_pair_score(rowptr, col, perm, a, b, att);
  Tensor out = fast_empty(a, {sizes.csr.edges, sizes.heads}, sizes.type);
  cuda::Pair p = pair_of(sizes, rowptr, col, perm, a, b, att, slope);
  p.out = out.mutable_data_ptr();
  const Launch launch(a);
  launch.check("pair_score", cuda::pair(p, launch.stream()));
  return out;
}

std::tuple<Tensor, Tensor> pair_gradient(const Tensor& rowptr, const Tensor& col,
                                         const OptionalTensor& perm, const Tensor& grad,
                                         const Tensor& a, const Tensor& b, const Tensor& att,
                                         double slope) {
  const Sizes sizes = check_pair_gradient(rowptr, col, perm, grad, a, b, att);
  Tensor out = fast_empty(a, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor out_att = fast_empty(a, {sizes.width}, accumulator_type(sizes.type));
  cuda::Pair p = pair_of(sizes, rowptr, col, perm, a, b, att, slope);
  p.gradient = true;
  p.grad = grad.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.out_att = out_att.mutable_data_ptr();
  const Launch launch(a);
  // Freed at the end of this call, and reused in stream order only.
  Tensor scratch = fast_empty(a, {cuda::pair_bytes(p) / 8 + 1}, ScalarType::Long);
  p.scratch = scratch.mutable_data_ptr();
  launch.check("pair_gradient", cuda::pair(p, launch.stream()));
  return {out, out_att};
}

Tensor edge_sum(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                const OptionalTensor& weight, const Tensor& x, const Tensor& e,
                const OptionalTensor& items, const std::vector<int64_t>& config, bool mean) {
  const Sizes sizes = check_edge_sum(rowptr, col, perm, weight, x, e);
  Tensor out = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, x, items, config);
  p.x = x.const_data_ptr();
  p.x_stride = row_stride("x", x, sizes);
  p.edge = e.const_data_ptr();
  p.edge_stride = row_stride("e", e, sizes);
  p.mean = mean;
  p.out = out.mutable_data_ptr();
  run("edge_sum", cuda::RowOp::kEdgeSum, p, sizes, x);
  return out;
}

std::tuple<Tensor, Tensor> edge_sum_backward(const Tensor& rowptr, const Tensor& col,
                                             const OptionalTensor& perm,
                                             const OptionalTensor& weight, const Tensor& x,
                                             const Tensor& e, const Tensor& grad,
                                             const OptionalTensor& items,
                                             const std::vector<int64_t>& config, bool with_edges) {
  const Sizes sizes = check_edge_sum_backward(rowptr, col, perm, weight, x, e, grad);
  Tensor of_x = fast_empty(x, {sizes.csr.rows, sizes.width}, sizes.type);
  Tensor of_e = fast_empty(x, {with_edges ? sizes.csr.edges : 0, sizes.width}, sizes.type);
  cuda::RowSweep p = sweep_of(sizes, rowptr, col, perm, weight, grad, items, config);
  p.x = grad.const_data_ptr();
  p.x_stride = row_stride("grad", grad, sizes);
  p.own = x.const_data_ptr();
  p.own_stride = x.stride(0);
  p.edge = e.const_data_ptr();
  p.edge_stride = row_stride("e", e, sizes);
  p.out = of_x.mutable_data_ptr();
  if (with_edges) p.out_edge = of_e.mutable_data_ptr();
  run("edge_sum_backward", cuda::RowOp::kEdgeSumBackward, p, sizes, x);
  return {of_x, of_e};
}

Tensor edge_sum_dot(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                    const Tensor& grad, const Tensor& x, const Tensor& e) {
  const Sizes sizes = check_edge_sum_dot(rowptr, col, perm, grad, x, e);
  return edge_dot("edge_sum_dot", cuda::EdgeOp::kMessage, sizes, 0, rowptr, col, perm, std::nullopt,
                  grad, x, nullptr, &e);
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
  p.heads = narrow("heads", sizes.heads);
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

// The first element of a vector, in the same memory.
Tensor first_of(const Tensor& vector) {
  const int64_t one = 1;
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(vector.get(), 1, &one, &one, 0, &handle));
  return Tensor(handle);
}

// Still without rowptr, col, perm and scratch.
cuda::Grouping grouping_of(const Tensor& key, const Tensor& other, int64_t rows) {
  cuda::Grouping p{key.scalar_type() == ScalarType::Long};
  p.key = key.const_data_ptr();
  p.other = other.const_data_ptr();
  p.edges = key.size(0);
  p.rows = rows;
  return p;
}

void group(cuda::Grouping& p, const Tensor& like, const Launch& launch) {
  launch.check("group", cuda::group_bytes(p, &p.scratch_bytes));
  // Freed at the end of this call, and reused in stream order only.
  Tensor scratch = fast_empty(like, {p.scratch_bytes / 8 + 1}, ScalarType::Long);
  p.scratch = scratch.mutable_data_ptr();
  launch.check("group", cuda::group(p, launch.stream()));
}

using FromCoo = std::tuple<int64_t, Tensor, Tensor, OptionalTensor, OptionalTensor, OptionalTensor,
                           OptionalTensor, OptionalTensor, OptionalTensor>;

FromCoo from_coo(const Tensor& dst, const Tensor& src, int64_t num_dst, int64_t num_src, bool wide,
                 bool both) {
  check_from_coo(dst, src, num_dst, num_src, wide);
  STD_TORCH_CHECK(dst.scalar_type() == src.scalar_type(), "dst is ", dst.scalar_type(),
                  " but src is ", src.scalar_type(), ", expected one type");
  const ScalarType type = wide ? ScalarType::Long : ScalarType::Int;
  const int64_t edges = dst.size(0);
  const Launch launch(dst);
  Tensor own_dst = fast_empty(dst, {edges}, type), own_src = fast_empty(dst, {edges}, type);
  cuda::Grouping grouping = grouping_of(own_dst, own_src, num_dst);
  cuda::Grouping transposed = grouping_of(own_src, own_dst, num_src);
  const bool counted = cuda::can_count(grouping);
  both = both && counted && cuda::can_count(transposed);
  const int64_t bytes = both      ? cuda::counting_bytes(grouping, transposed)
                        : counted ? cuda::counting_bytes(grouping)
                                  : int64_t(sizeof(int64_t));
  Tensor scratch = fast_empty(dst, {bytes / 8 + 1}, ScalarType::Long);
  // Of guessed sizes that bad edges have made absurd, no memory is asked for before these are
  // known.
  OptionalTensor rowptr, col, perm, rowptr_t, col_t, perm_t;
  const auto rows_of = [&](OptionalTensor& of, cuda::Grouping& p) {
    of = fast_empty(dst, {p.rows + 1}, type);
    p.rowptr = of->mutable_data_ptr();
  };
  const auto columns_of = [&](OptionalTensor& of, OptionalTensor& from, cuda::Grouping& p) {
    of = fast_empty(dst, {edges}, type);
    from = fast_empty(dst, {edges}, type);
    p.col = of->mutable_data_ptr();
    p.perm = from->mutable_data_ptr();
  };
  if (counted) rows_of(rowptr, grouping);
  if (both) rows_of(rowptr_t, transposed);
  cuda::CheckCoo p{dst.scalar_type() == ScalarType::Long, wide};
  p.dst = dst.const_data_ptr();
  p.src = src.const_data_ptr();
  p.dst_stride = dst.stride(0);
  p.src_stride = src.stride(0);
  p.edges = edges;
  p.num_dst = num_dst;
  p.num_src = num_src;
  p.own_dst = own_dst.mutable_data_ptr();
  p.own_src = own_src.mutable_data_ptr();
  p.fact = scratch.mutable_data_ptr();
  p.grouping = counted ? &grouping : nullptr;
  p.transposed = both ? &transposed : nullptr;
  launch.check("from_coo", cuda::check_coo(p, launch.stream()));
  if (both) {  // needs no answer, so the device has work while the host waits for one
    columns_of(col_t, perm_t, transposed);
    launch.check("from_coo", cuda::finish_grouping(transposed, launch.stream()));
  }
  const cuda::CooFacts facts = cuda::read_fact(item(first_of(scratch)));
  if (facts.first_bad >= 0) return {facts.first_bad, own_dst, own_src, {}, {}, {}, {}, {}, {}};
  if (!counted) rows_of(rowptr, grouping);
  if (!facts.sorted) {
    columns_of(col, perm, grouping);
    if (counted) {
      launch.check("from_coo", cuda::finish_grouping(grouping, launch.stream()));
    } else {
      group(grouping, dst, launch);
    }
  } else if (!counted) {
    launch.check("from_coo", cuda::find_rowptr(wide, p.own_dst, edges, num_dst, grouping.rowptr,
                                               launch.stream()));
  }
  return {-1, own_dst, own_src, rowptr, col, perm, rowptr_t, col_t, perm_t};
}

std::tuple<Tensor, Tensor, Tensor> transpose(const Tensor& dst, const Tensor& src,
                                             int64_t num_src) {
  check_transpose(dst, src, num_src);
  const Launch launch(dst);
  const int64_t edges = dst.size(0);
  // Not pieces of one allocation: results of an operator must not share memory.
  const ScalarType type = dst.scalar_type();
  Tensor rowptr = fast_empty(dst, {num_src + 1}, type);
  Tensor col = fast_empty(dst, {edges}, type), perm = fast_empty(dst, {edges}, type);
  cuda::Grouping grouping = grouping_of(src, dst, num_src);
  grouping.rowptr = rowptr.mutable_data_ptr();
  grouping.col = col.mutable_data_ptr();
  grouping.perm = perm.mutable_data_ptr();
  group(grouping, dst, launch);
  return {rowptr, col, perm};
}

void fill_row_scales(const CsrSizes& sizes, const Tensor& rowptr, const Tensor* col,
                     ScalarType dtype, Tensor& scale, Tensor* own) {
  cuda::RowScales p{sizes.wide(), dtype == ScalarType::Double, col == nullptr};
  p.rowptr = rowptr.const_data_ptr();
  p.col = col != nullptr ? col->const_data_ptr() : nullptr;
  p.rows = sizes.rows;
  p.scale = scale.mutable_data_ptr();
  p.own = own != nullptr ? own->mutable_data_ptr() : nullptr;
  const Launch launch(rowptr);
  launch.check("row_scales", cuda::row_scales(p, launch.stream()));
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
  const Launch launch(dst);
  Tensor fact = fast_empty(dst, {1}, ScalarType::Long);
  launch.check("same_coo",
               cudaMemsetAsync(fact.mutable_data_ptr(), 0xff, sizeof(int64_t), launch.stream()));
  for (const auto& [given, kept] : {std::pair(&dst, &own_dst), std::pair(&src, &own_src)}) {
    cuda::Compare p{given->scalar_type() == ScalarType::Long,
                    kept->scalar_type() == ScalarType::Long};
    p.a = given->const_data_ptr();
    p.b = kept->const_data_ptr();
    p.a_stride = given->stride(0);
    p.b_stride = kept->stride(0);
    p.size = given->size(0);
    p.fact = fact.mutable_data_ptr();
    launch.check("same_coo", cuda::compare(p, launch.stream()));
  }
  return item(fact) != 0;
}

Tensor speed_of_light(const Tensor& col, const OptionalTensor& weight, const Tensor& x,
                      int64_t rows, int64_t run) {
  check_vector("col", col, col.dim() == 1 ? col.size(0) : 0, ScalarType::Int, x);
  check_rows("x", x, col);
  cuda::SpeedOfLight p{feature_dtype("x", x.scalar_type())};
  const auto starts_at_16 = [](const Tensor& t) {
    return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
  };
  if (weight) check_vector("weight", *weight, col.size(0), x.scalar_type(), col);
  STD_TORCH_CHECK(starts_at_16(col) && (!weight || starts_at_16(*weight)),
                  "col and weight must start at a multiple of 16 bytes: call .clone()");
  STD_TORCH_CHECK(rows >= 0 && run > 0 && run % 8 == 0, "got rows = ", rows, ", run = ", run,
                  ", expected rows >= 0 and run a multiple of 8");
  STD_TORCH_CHECK(col.size(0) == 0 || x.size(0) > 0,
                  "x has no rows, expected those that col names");
  Tensor out = fast_empty(x, {rows, x.size(1)}, x.scalar_type());
  p.col = col.const_data_ptr();
  p.weight = data_or_null(weight);
  p.x = x.const_data_ptr();
  p.out = out.mutable_data_ptr();
  p.x_stride = x.stride(0);
  p.rows = rows;
  p.edges = col.size(0);
  p.run = run;
  p.width = narrow("columns", x.size(1));
  const Launch launch(x);
  launch.check("speed_of_light", cuda::speed_of_light(p, launch.stream()));
  return out;
}

int64_t calls() { return kernel_calls.load(std::memory_order_relaxed); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CUDA, m) {
  m.impl("_spmm", TORCH_BOX(&spmm));
  m.impl("_row_sum", TORCH_BOX(&row_sum));
  m.impl("_pcsr_spmm", TORCH_BOX(&pcsr_spmm));
  m.impl("_tile_spmm", TORCH_BOX(&tile_spmm));
  m.impl("_tile_end", TORCH_BOX(&tile_end));
  m.impl("_spmm_arg", TORCH_BOX(&spmm_arg));
  m.impl("_spmm_arg_backward", TORCH_BOX(&spmm_arg_backward));
  m.impl("_spmm_tie_count", TORCH_BOX(&spmm_tie_count));
  m.impl("_spmm_tie_backward", TORCH_BOX(&spmm_tie_backward));
  m.impl("_sddmm", TORCH_BOX(&sddmm));
  m.impl("_sddmm_arg", TORCH_BOX(&sddmm_arg));
  m.impl("_sddmm_tie", TORCH_BOX(&sddmm_tie));
  m.impl("_pair_score", TORCH_BOX(&pair_score));
  m.impl("_pair_gradient", TORCH_BOX(&pair_gradient));
  m.impl("_edge_sum", TORCH_BOX(&edge_sum));
  m.impl("_edge_sum_backward", TORCH_BOX(&edge_sum_backward));
  m.impl("_edge_sum_dot", TORCH_BOX(&edge_sum_dot));
  m.impl("_edge_softmax", TORCH_BOX(&edge_softmax));
  m.impl("_edge_softmax_backward", TORCH_BOX(&edge_softmax_backward));
  m.impl("_from_coo", TORCH_BOX(&from_coo));
  m.impl("_transpose", TORCH_BOX(&transpose));
  m.impl("_inverse_degree", TORCH_BOX(&inverse_degree));
  m.impl("_gcn_scales", TORCH_BOX(&gcn_scales));
  m.impl("_same_coo", TORCH_BOX(&same_coo));
  m.impl("_speed_of_light", TORCH_BOX(&speed_of_light));
}

STABLE_TORCH_LIBRARY_IMPL(gnn_spmm_plugin, CompositeExplicitAutograd, m) {
  m.impl("_kernel_calls_cuda", TORCH_BOX(&calls));
}

}  // namespace gsp
