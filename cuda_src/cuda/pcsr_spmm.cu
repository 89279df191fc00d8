#include "cuda/pcsr_spmm_launch.cuh"

namespace gsp::cuda {

cudaError_t pcsr_spmm(const PcsrSpmm& p, cudaStream_t stream) {
  if (p.pieces == 0 || p.width == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto of) { return pcsr_of<decltype(of)>(p, stream); });
}

}  // namespace gsp::cuda
