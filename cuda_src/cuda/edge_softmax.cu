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
  a.long_row = 1024;  // a warp needs 32 rounds for it
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

cudaError_t check_coo(bool wide_index, const void* dst, const void* src, int64_t dst_stride,
                      int64_t src_stride, int64_t edges, int64_t num_dst, int64_t num_src,
                      int64_t* out, cudaStream_t stream) {
  // All ones: no bad edge (-1), and sorted (not 0).
  cudaError_t error = cudaMemsetAsync(out, 0xff, 3 * sizeof(int64_t), stream);
  if (error != cudaSuccess || edges == 0) return error;
  const int64_t wanted = (edges + kThreads - 1) / kThreads;
  const unsigned blocks = unsigned(wanted < 4096 ? wanted : 4096);
  auto* flags = reinterpret_cast<unsigned long long*>(out);
  if (wide_index) {
    GSP_LAUNCH((check_coo<int64_t>), blocks, stream, static_cast<const int64_t*>(dst),
               static_cast<const int64_t*>(src), dst_stride, src_stride, edges, num_dst, num_src,
               flags);
  } else {
    GSP_LAUNCH((check_coo<int>), blocks, stream, static_cast<const int*>(dst),
               static_cast<const int*>(src), dst_stride, src_stride, edges, num_dst, num_src,
               flags);
  }
  return cudaGetLastError();
}

}  // namespace gsp::cuda
