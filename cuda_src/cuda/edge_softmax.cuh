// Softmax over the edges into each row, and its gradient. A warp has a row, whose edges it takes
// several at a time, a lane for each head; a long row is swept by the whole block.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

template <typename T, typename Index>
struct SoftmaxArgs {
  const Index* rowptr;
  const Index* perm;
  const T* in;    // [edges, heads], caller's order: logits, or p
  const T* grad;  // of p
  T* out;
  int64_t rows;
  int heads;
  int log_lanes;  // of an edge
  int long_row;
};

// Folds `v` over the threads of one row that have the same head, every `lanes`-th, in a fixed
// order; every one of them gets the result.
template <typename Acc, typename Fold>
__device__ __forceinline__ Acc fold_row(Acc v, Fold fold, int lanes, bool whole_block,
                                        Acc* shared) {
  for (int d = 16; d >= lanes; d >>= 1) v = fold(v, __shfl_xor_sync(kFullMask, v, d));
  if (!whole_block) return v;
  const int head = int(threadIdx.x) & (lanes - 1);
  __syncthreads();  // shared may still be read by the fold before
  if ((int(threadIdx.x) & 31) < lanes) shared[(threadIdx.x >> 5) * 32 + head] = v;
  __syncthreads();
  v = shared[head];
  for (int w = 1; w < kWarps; ++w) v = fold(v, shared[w * 32 + head]);
  return v;
}

template <typename T, typename Index, bool kBackward>
__device__ __forceinline__ void softmax_row(const SoftmaxArgs<T, Index>& a, int64_t begin,
                                            int64_t end, bool whole_block, acc_t<T>* shared) {
  using Acc = acc_t<T>;
  const int thread = whole_block ? int(threadIdx.x) : int(threadIdx.x) & 31;
  const int lanes = 1 << a.log_lanes, step = (whole_block ? kThreads : 32) >> a.log_lanes;
  const auto add = [](Acc x, Acc y) { return x + y; };
  for (int from = 0; from < a.heads; from += lanes) {
    const int h = from + (thread & (lanes - 1));
    // A lane without a head has no edges either.
    const int64_t first = h < a.heads ? begin + (thread >> a.log_lanes) : end;
    const auto at = [&](int64_t j) {
      return int64_t(a.perm == nullptr ? Index(j) : a.perm[j]) * a.heads + h;
    };
    if constexpr (kBackward) {
      Acc dot = 0;
#pragma unroll 1
      for (int64_t j = first; j < end; j += step)
        dot += widen<T>(a.in[at(j)]) * widen<T>(a.grad[at(j)]);
      dot = fold_row(dot, add, lanes, whole_block, shared);
#pragma unroll 1
      for (int64_t j = first; j < end; j += step) {
        const int64_t k = at(j);
        a.out[k] = narrow<T>(widen<T>(a.in[k]) * (widen<T>(a.grad[k]) - dot));
      }
    } else {
      Acc top = -INFINITY;
#pragma unroll 1
      for (int64_t j = first; j < end; j += step) {
        const Acc v = widen<T>(a.in[at(j)]);
        top = v > top || v != v ? v : top;
      }
      top = fold_row(
          top, [](Acc x, Acc y) { return y > x || y != y ? y : x; }, lanes, whole_block, shared);
      Acc sum = 0;
#pragma unroll 1
      for (int64_t j = first; j < end; j += step) sum += exp(widen<T>(a.in[at(j)]) - top);
      sum = fold_row(sum, add, lanes, whole_block, shared);
#pragma unroll 1
      for (int64_t j = first; j < end; j += step) {
        const int64_t k = at(j);
        a.out[k] = narrow<T>(exp(widen<T>(a.in[k]) - top) / sum);
      }
    }
  }
}

// (Without a number of blocks, ptxas keeps to 32 registers, and spills.)
template <typename T, typename Index, bool kBackward>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 5 : 6)
    edge_softmax(SoftmaxArgs<T, Index> a) {
  __shared__ acc_t<T> shared[kWarps * 32];
  const int64_t base = int64_t(blockIdx.x) * kWarps;
  const int64_t mine = base + (threadIdx.x >> 5);
  if (mine < a.rows && int64_t(a.rowptr[mine + 1]) - a.rowptr[mine] <= a.long_row) {
    softmax_row<T, Index, kBackward>(a, a.rowptr[mine], a.rowptr[mine + 1], false, shared);
  }
  for (int64_t row = base; row < base + kWarps && row < a.rows; ++row) {
    const int64_t begin = a.rowptr[row], end = a.rowptr[row + 1];
    if (end - begin > a.long_row) softmax_row<T, Index, kBackward>(a, begin, end, true, shared);
  }
}

}  // namespace gsp::cuda
