#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/pair.cuh"

namespace gsp::cuda {

// How groups of lanes share the columns and the edges.
struct PairGeometry {
  int log_head, log_lanes;
  int run;
  int64_t blocks, passes;
};

static int vector_of(const Pair& p) {
  const int wide = int(16 / size_of(p.dtype));
  const bool fits = !p.wide_index && p.width / p.heads % wide == 0 &&
                    aligned(p.a, p.a_stride, wide, size_of(p.dtype)) &&
                    aligned(p.b, p.b_stride, wide, size_of(p.dtype)) &&
                    aligned(p.att, 0, wide, size_of(p.dtype));
  return fits ? wide : 1;
}

static PairGeometry geometry_of(const Pair& p) {
  const int vec = vector_of(p);
  const auto lanes_for = [](int64_t vectors) { return log2_ceil(vectors < 32 ? vectors : 32); };
  PairGeometry g{};
  if (!p.gradient) {
    g.log_head = lanes_for(divide_up(p.width / p.heads, vec));
    const int64_t fit = 32 >> g.log_head;
    g.log_lanes = g.log_head + log2_ceil(p.heads < fit ? p.heads : fit);
    g.passes = divide_up(p.heads, 1 << (g.log_lanes - g.log_head));
  } else {
    g.log_lanes = lanes_for(p.width / vec);
    g.passes = divide_up(p.width / vec, 1 << g.log_lanes);
  }
  // Fewer edges would not be worth the search for the first one's row.
  constexpr int64_t kLeastRun = 16;
  const int64_t run = divide_up(divide_up(p.edges << g.log_lanes, p.threads), 4) * 4;
  g.run = int(run < kLeastRun ? kLeastRun : run);
  g.blocks = divide_up(divide_up(p.edges, g.run), kThreads >> g.log_lanes);
  return g;
}

// open_sum and att_sum, then open_row.
static int64_t sums_of(const Pair& p) { return 3 * geometry_of(p).blocks * p.width; }

int64_t pair_bytes(const Pair& p) {
  const int64_t size = p.dtype == Dtype::kFloat64 ? 8 : 4;
  return divide_up(sums_of(p) * size, 8) * 8 + geometry_of(p).blocks * (p.wide_index ? 8 : 4);
}

template <typename T, typename Index, int kVec>
static cudaError_t launch(const Pair& p, cudaStream_t stream) {
  const PairGeometry g = geometry_of(p);
  PairArgs<T, Index> a{};
  a.rowptr = static_cast<const Index*>(p.rowptr);
  a.col = static_cast<const Index*>(p.col);
  a.perm = static_cast<const Index*>(p.perm);
  a.grad = static_cast<const T*>(p.grad);
  a.a = static_cast<const T*>(p.a);
  a.b = static_cast<const T*>(p.b);
  a.att = static_cast<const T*>(p.att);
  a.out = static_cast<T*>(p.out);
  a.a_stride = Index(p.a_stride * int64_t(sizeof(T)));
  a.b_stride = Index(p.b_stride * int64_t(sizeof(T)));
  a.rows = p.rows;
  a.edges = p.edges;
  a.slope = acc_t<T>(p.slope);
  a.width = p.width;
  a.heads = p.heads;
  a.head_width = p.width / p.heads;
  a.log_head = g.log_head;
  a.log_lanes = g.log_lanes;
  a.run = g.run;
  a.blocks = g.blocks;
  const dim3 grid(unsigned(g.blocks), unsigned(g.passes));
  if (!p.gradient) {
    GSP_LAUNCH((pair_score<T, Index, kVec>), grid, stream, a);
    return cudaGetLastError();
  }
  a.open_sum = static_cast<acc_t<T>*>(p.scratch);
  a.att_sum = a.open_sum + 2 * g.blocks * p.width;
  a.open_row = static_cast<Index*>(p.scratch) +
               divide_up(sums_of(p) * int64_t(sizeof(acc_t<T>)), 8) * 8 / int64_t(sizeof(Index));
  a.out_att = static_cast<acc_t<T>*>(p.out_att);
  GSP_LAUNCH((pair_gradient<T, Index, kVec>), grid, stream, a);
  const int64_t blocks =
      divide_up(p.width, kAttColumns) + divide_up(g.blocks * p.width, int64_t(kThreads));
  GSP_LAUNCH((merge_pairs<T, Index>), unsigned(blocks), stream, a);
  return cudaGetLastError();
}

template <typename T>
static cudaError_t run(const Pair& p, cudaStream_t stream) {
  if (p.wide_index) return launch<T, int64_t, 1>(p, stream);
  return vector_of(p) > 1 ? launch<T, int, 16 / sizeof(T)>(p, stream)
                          : launch<T, int, 1>(p, stream);
}

cudaError_t pair(const Pair& p, cudaStream_t stream) {
  if (p.gradient) {  // rows without edges
    if (p.width == 0) return cudaSuccess;
    const int64_t sum_size = p.dtype == Dtype::kFloat64 ? 8 : 4;
    cudaError_t error =
        cudaMemsetAsync(p.out, 0, size_t(p.rows * p.width * size_of(p.dtype)), stream);
    if (error == cudaSuccess && p.edges == 0) {
      error = cudaMemsetAsync(p.out_att, 0, size_t(p.width * sum_size), stream);
    }
    if (error != cudaSuccess) return error;
  }
  if (p.edges == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto of) { return run<decltype(of)>(p, stream); });
}

}  // namespace gsp::cuda
