#include "cuda/tile_spmm_launch.cuh"

namespace gsp::cuda {

namespace {

// Of the types that have tiles.
template <typename Run>
cudaError_t with_tile_dtype(Dtype dtype, const Run& run) {
  return with_dtype(dtype, [&](auto element) -> cudaError_t {
    if constexpr (sizeof(element) <= 4) return run(element);
    return cudaErrorInvalidValue;
  });
}

}  // namespace

cudaError_t tile_spmm(const TileSpmm& p, cudaStream_t stream) {
  if (p.pieces == 0 || p.width == 0) return cudaSuccess;
  return with_tile_dtype(p.dtype, [&](auto of) { return tiles_of<decltype(of)>(p, stream); });
}

cudaError_t tile_end(const TileSpmm& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  return with_tile_dtype(p.dtype, [&](auto of) { return tile_end_of<decltype(of)>(p, stream); });
}

}  // namespace gsp::cuda
