#include "cuda/staged_spmm_launch.cuh"

namespace gsp::cuda {

cudaError_t staged_spmm(const StagedSpmm& p, cudaStream_t stream) {
  return p.weight != nullptr ? staged_of<true>(p, stream) : staged_of<false>(p, stream);
}

}  // namespace gsp::cuda
