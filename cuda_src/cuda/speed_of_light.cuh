// The fastest that a product with these gathers could be: no rows, no reduction across threads, no
// imbalance.
//
// A group of width / kVec threads takes a run of `run` consecutive entries of `col` and adds up the
// rows of x that they name, kGathers loads in flight a thread. At the end the threads of the grid
// write an output of the product's size together, with whatever they have added up, so that no load
// is optimised away and the traffic of a product is there: indices, weights if there are any,
// gathers, output.
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

template <typename T>
struct SpeedOfLightArgs {
  const int* col;   // [edges], starts at a multiple of 16 bytes
  const T* weight;  // [edges] likewise, or null
  const T* x;
  T* out;            // [out_size]
  int64_t x_stride;  // elements between rows of x
  int64_t edges;
  int64_t out_size;
  int lanes;  // threads that share a gathered row
  int tile;   // columns of all of them; blockIdx.y counts tiles
  int width;
  int64_t run;  // a multiple of kGathers
};

constexpr int kGathers = 8;

template <typename T, int kVec, bool kWeighted>
__global__ void __launch_bounds__(kThreads, 4) speed_of_light_kernel(SpeedOfLightArgs<T> a) {
  using Acc = acc_t<T>;
  const int groups = kThreads / a.lanes;
  const int group = int(threadIdx.x) / a.lanes;
  const int column = int(blockIdx.y) * a.tile + (int(threadIdx.x) - group * a.lanes) * kVec;
  Acc sum[kVec] = {};
  if (group < groups && column < a.width) {
    const T* const x = a.x + column;
    int64_t j = (int64_t(blockIdx.x) * groups + group) * a.run;
    const int64_t end = j + a.run < a.edges ? j + a.run : a.edges;
    const auto add = [&](const Vec<T, kVec>& v, Acc weight) {
#pragma unroll
      for (int q = 0; q < kVec; ++q) {
        sum[q] = kWeighted ? sum[q] + weight * widen<T>(v.v[q]) : sum[q] + widen<T>(v.v[q]);
      }
    };
    for (; j + kGathers <= end; j += kGathers) {
      Vec<int, 4> at[kGathers / 4];
#pragma unroll
      for (int i = 0; i < kGathers / 4; ++i) at[i] = load<int, 4>(a.col + j + 4 * i);
      Acc weight[kGathers] = {};
      if constexpr (kWeighted) {
        constexpr int kPiece = 16 / sizeof(T);
#pragma unroll
        for (int i = 0; i < kGathers; i += kPiece) {
          const Vec<T, kPiece> w = load<T, kPiece>(a.weight + j + i);
#pragma unroll
          for (int q = 0; q < kPiece; ++q) weight[i + q] = widen<T>(w.v[q]);
        }
      }
      Vec<T, kVec> v[kGathers];
#pragma unroll
      for (int i = 0; i < kGathers; ++i) v[i] = load<T, kVec>(x + at[i / 4].v[i % 4] * a.x_stride);
#pragma unroll
      for (int i = 0; i < kGathers; ++i) add(v[i], weight[i]);
    }
    for (; j < end; ++j) {
      Acc weight{};
      if constexpr (kWeighted) weight = widen<T>(a.weight[j]);
      add(load<T, kVec>(x + a.col[j] * a.x_stride), weight);
    }
  }
  Vec<T, kVec> result;
#pragma unroll
  for (int q = 0; q < kVec; ++q) result.v[q] = narrow<T>(sum[q]);
  const int64_t threads = int64_t(gridDim.x) * gridDim.y * kThreads;
  int64_t at = (int64_t(blockIdx.y) * gridDim.x + blockIdx.x) * kThreads + threadIdx.x;
  for (; at < a.out_size / kVec; at += threads) store<T, kVec>(a.out + at * kVec, result);
}

}  // namespace gsp::cuda
