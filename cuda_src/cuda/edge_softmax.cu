#include "cuda/alignment.h"
#include "cuda/edge_softmax.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

template <typename T, typename Index>
static cudaError_t launch(const EdgeSoftmax& p, cudaStream_t stream) {
  SoftmaxArgs<T, Index> a{};
  a.rowptr = static_cast<const Index*>(p.rowptr);
  a.perm = static_cast<const Index*>(p.perm);
  a.in = static_cast<const T*>(p.in);
  a.grad = static_cast<const T*>(p.grad);
  a.out = static_cast<T*>(p.out);
  a.rows = p.rows;
  a.heads = p.heads;
  a.log_lanes = log2_ceil(p.heads < 32 ? p.heads : 32);
  a.long_row = 1024 >> a.log_lanes;  // a warp needs 32 rounds for it
  const unsigned blocks = unsigned((p.rows + kWarps - 1) / kWarps);
  if (p.grad == nullptr) {
    GSP_LAUNCH((edge_softmax<T, Index, false>), blocks, stream, a);
  } else {
    GSP_LAUNCH((edge_softmax<T, Index, true>), blocks, stream, a);
  }
  return cudaGetLastError();
}

template <typename T>
static cudaError_t run(const EdgeSoftmax& p, cudaStream_t stream) {
  return p.wide_index ? launch<T, int64_t>(p, stream) : launch<T, int>(p, stream);
}

cudaError_t edge_softmax(const EdgeSoftmax& p, cudaStream_t stream) {
  if (p.rows == 0 || p.heads == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto of) { return run<decltype(of)>(p, stream); });
}

}  // namespace gsp::cuda
