#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {

GSP_FOR_EACH_DTYPE(GSP_DECLARE)

template <typename T>
static cudaError_t run(RowOp op, const RowSweep& p, cudaStream_t stream) {
  return op == RowOp::kSum ? sum_of<T>(p, stream) : extremum_of<T>(op, p, stream);
}

cudaError_t row_sweep(RowOp op, const RowSweep& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  switch (p.dtype) {
    case Dtype::kFloat32:
      return run<float>(op, p, stream);
    case Dtype::kFloat64:
      return run<double>(op, p, stream);
    case Dtype::kFloat16:
      return run<__half>(op, p, stream);
    case Dtype::kBFloat16:
      return run<__nv_bfloat16>(op, p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace gsp::cuda
