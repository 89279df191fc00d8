#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {

GSP_FOR_EACH_DTYPE(GSP_DECLARE)

template <typename T>
static cudaError_t run(RowOp op, const RowSweep& p, cudaStream_t stream) {
  switch (op) {
    case RowOp::kSum:
      return sum_of<T>(p, stream);
    case RowOp::kEdgeSum:
    case RowOp::kEdgeSumBackward:
      return edge_sum_of<T>(op, p, stream);
    default:
      return extremum_of<T>(op, p, stream);
  }
}

cudaError_t row_sweep(RowOp op, const RowSweep& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto of) { return run<decltype(of)>(op, p, stream); });
}

}  // namespace gsp::cuda
