#include "cuda/edge_dot.cuh"
#include "cuda/launch.h"

namespace gsp::cuda {

template <typename T, typename Index, int kVec, Pick kPick>
static cudaError_t launch(const EdgeDot& p, cudaStream_t stream) {
  EdgeDotArgs<T, Index> a{};
  a.rowptr = static_cast<const Index*>(p.rowptr);
  a.col = static_cast<const Index*>(p.col);
  a.perm = static_cast<const Index*>(p.perm);
  a.weight = static_cast<const T*>(p.weight);
  a.a = static_cast<const T*>(p.a);
  a.b = static_cast<const T*>(p.b);
  if (kPick == Pick::kArg) a.arg = static_cast<const Index*>(p.picks);
  if (kPick == Pick::kTie) a.best = static_cast<const T*>(p.picks);
  a.edge = static_cast<const T*>(p.edge);
  a.out = static_cast<T*>(p.out);
  a.a_stride = p.a_stride;
  a.b_stride = p.b_stride;
  a.edge_stride = p.edge_stride;
  a.rows = p.rows;
  a.edges = p.edges;
  a.width = p.width;
  a.heads = p.heads > 0 ? p.heads : 1;
  a.head_width = p.width / a.heads;
  while (a.log_lanes < 5 && (kVec << a.log_lanes) < a.head_width) ++a.log_lanes;
  const int64_t run = 16, groups = (p.edges + run - 1) / run, per_block = kThreads >> a.log_lanes;
  GSP_LAUNCH((edge_dot<T, Index, kVec, kPick>), (unsigned((groups + per_block - 1) / per_block)),
             stream, a);
  return cudaGetLastError();
}

template <typename T, Pick kPick>
static cudaError_t choose(const EdgeDot& p, cudaStream_t stream) {
  constexpr int64_t kWide = 16 / sizeof(T);
  const auto aligned = [](const void* q, int64_t stride) {
    return reinterpret_cast<uintptr_t>(q) % 16 == 0 && stride * int64_t(sizeof(T)) % 16 == 0;
  };
  if (p.wide_index) return launch<T, int64_t, 1, kPick>(p, stream);
  if (p.width / (p.heads > 0 ? p.heads : 1) % kWide == 0 && aligned(p.a, p.a_stride) &&
      aligned(p.b, p.b_stride) && aligned(p.edge, p.edge_stride)) {
    return launch<T, int, kWide, kPick>(p, stream);
  }
  return launch<T, int, 1, kPick>(p, stream);
}

template <typename T>
static cudaError_t run(EdgeOp op, const EdgeDot& p, cudaStream_t stream) {
  switch (op) {
    case EdgeOp::kDot:
      return choose<T, Pick::kAll>(p, stream);
    case EdgeOp::kArg:
      return choose<T, Pick::kArg>(p, stream);
    case EdgeOp::kTie:
      return choose<T, Pick::kTie>(p, stream);
    case EdgeOp::kMessage:
      return choose<T, Pick::kMessage>(p, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t edge_dot(EdgeOp op, const EdgeDot& p, cudaStream_t stream) {
  if (p.edges == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto of) { return run<decltype(of)>(op, p, stream); });
}

}  // namespace gsp::cuda
