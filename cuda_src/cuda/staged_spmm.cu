#include "cuda/staged_spmm_launch.cuh"

namespace gsp::cuda {

cudaError_t staged_spmm(const StagedSpmm& p, cudaStream_t stream) {
  return with_dtype(p.dtype, [&](auto element) -> cudaError_t {
    using T = decltype(element);
    if constexpr (sizeof(T) <= 4) {
      return p.weight != nullptr ? staged_of<T, true>(p, stream) : staged_of<T, false>(p, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace gsp::cuda
