// Chooses the instantiation and the geometry of a sum over PCSR.
#pragma once

#include <algorithm>

#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/pcsr_spmm.cuh"

namespace gsp::cuda {

// Whether rows can be moved in vectors of `vec` elements; `natural`: by their width alone, which is
// what F counts.
template <typename T>
bool can_move(const PcsrSpmm& p, int vec, bool natural) {
  return p.width % vec == 0 && (p.heads <= 1 || p.width / p.heads % vec == 0) &&
         (natural || (aligned(p.x, p.x_stride, vec, sizeof(T)) && can_finish(p, vec, sizeof(T))));
}

template <typename T>
PcsrArgs<T> typed(const PcsrSpmm& p) {
  PcsrArgs<T> a{};
  a.ptr = static_cast<const int*>(p.ptr);
  a.col = static_cast<const unsigned*>(p.col);
  a.target = static_cast<const int*>(p.target);
  a.merges = static_cast<const int4*>(p.merges);
  a.weight = static_cast<const T*>(p.weight);
  a.x = static_cast<const T*>(p.x);
  a.src_scale = static_cast<const acc_t<T>*>(p.src_scale);
  a.epilogue = epilogue_of<T>(p);
  a.rowptr = p.rowptr;
  a.scratch = static_cast<acc_t<T>*>(p.scratch);
  a.x_stride = unsigned(p.x_stride * int64_t(sizeof(T)));
  a.rows = p.rows;
  a.pieces = p.pieces;
  a.height = p.height;
  a.width = p.width;
  a.heads = p.heads > 0 ? p.heads : 1;
  a.head_width = p.width / a.heads;
  a.wide_rowptr = p.wide_rowptr;
  return a;
}

template <typename T, int kRows, int kVec, int kFold, PcsrFactor kFactor>
cudaError_t launch_pcsr(const PcsrSpmm& p, cudaStream_t stream) {
  auto a = typed<T>(p);
  a.log_lanes = std::min(log2_ceil(divide_up(divide_up(p.width, kVec), kFold)), 5);
  // Several groups share a piece where pieces are long enough to keep each busy for several fours.
  while (a.log_lanes + a.log_parallel < 5 && p.vectors / p.pieces >= int64_t(4 * kPcsrFour)
                                                                         << a.log_parallel)
    ++a.log_parallel;
  const int64_t groups = int64_t(p.warps) * 32 >> (a.log_lanes + a.log_parallel);
  const int64_t per_tile = int64_t(kVec) * kFold << a.log_lanes;
  const dim3 grid(unsigned(divide_up(p.pieces, groups)), unsigned(divide_up(p.width, per_tile)));
  GSP_LAUNCH_BLOCKS((pcsr_spmm<T, kRows, kVec, kFold, kFactor>), grid, unsigned(p.warps * 32),
                    stream, a);
  return cudaGetLastError();
}

template <typename T, int kVec>
cudaError_t launch_pcsr_merge(const PcsrSpmm& p, cudaStream_t stream) {
  const dim3 grid(unsigned(p.num_merges * p.height),
                  unsigned(divide_up(p.width, kMergeLanes * kVec)));
  GSP_LAUNCH((pcsr_merge<T, kVec>), grid, stream, typed<T>(p));
  return cudaGetLastError();
}

template <typename T, int kRows, int kVec, int kFold>
cudaError_t choose_factor(const PcsrSpmm& p, cudaStream_t stream) {
  const bool weighted = p.weight != nullptr, scaled = p.src_scale != nullptr;
  if (weighted) return launch_pcsr<T, kRows, kVec, kFold, PcsrFactor::kWeight>(p, stream);
  if (scaled) return launch_pcsr<T, kRows, kVec, kFold, PcsrFactor::kColumn>(p, stream);
  return launch_pcsr<T, kRows, kVec, kFold, PcsrFactor::kNone>(p, stream);
}

template <typename T, int kRows, int kVec, int kMostFolds>
cudaError_t choose_fold(const PcsrSpmm& p, int fold, cudaStream_t stream) {
  if (p.weight != nullptr && (p.heads > 1 || p.src_scale != nullptr))
    return launch_pcsr<T, kRows, kVec, 1, PcsrFactor::kAny>(p, stream);
  return fold >= kMostFolds ? choose_factor<T, kRows, kVec, kMostFolds>(p, stream)
                            : choose_factor<T, kRows, kVec, 1>(p, stream);
}

// Of 16 bytes a load, 2 folds exist besides 1; of fewer, 4.
template <typename T, int kRows>
cudaError_t choose_pcsr(const PcsrSpmm& p, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(T);
  if (can_move<T>(p, kWide, false)) return choose_fold<T, kRows, kWide, 2>(p, p.fold, stream);
  // A thread keeps as many columns as the configuration gave it, if x does not lie as well as its
  // width lets expect.
  const int natural = can_move<T>(p, kWide, true)                 ? kWide
                      : sizeof(T) == 2 && can_move<T>(p, 2, true) ? 2
                                                                  : 1;
  if constexpr (sizeof(T) == 2) {
    if (can_move<T>(p, 2, false))
      return choose_fold<T, kRows, 2, 4>(p, p.fold * natural / 2, stream);
  }
  return choose_fold<T, kRows, 1, 4>(p, p.fold * natural, stream);
}

template <typename T>
cudaError_t pcsr_of(const PcsrSpmm& p, cudaStream_t stream) {
  const cudaError_t error =
      p.height == 1 ? choose_pcsr<T, 1>(p, stream) : choose_pcsr<T, 2>(p, stream);
  if (error != cudaSuccess || p.num_merges == 0) return error;
  constexpr int kWide = 16 / sizeof(acc_t<T>);
  return p.width % kWide == 0 && can_finish(p, kWide, sizeof(T))
             ? launch_pcsr_merge<T, kWide>(p, stream)
             : launch_pcsr_merge<T, 1>(p, stream);
}

}  // namespace gsp::cuda
