// What becomes of the sum of a row's messages before it is written: for every kernel that adds.
#pragma once

#include <type_traits>

#include "cuda/launch.h"
#include "cuda/vec.cuh"

namespace gsp::cuda {

// out = act(dst_scale * (sum / edges of the row, where `mean`) + self_scale * self + bias), each
// part where it is asked for. All branches are the same for every thread of a launch.
template <typename T>
struct Epilogue {
  const acc_t<T>* dst_scale;   // [rows], or null
  const T* self;               // [rows, width], or null
  const acc_t<T>* self_scale;  // [rows], or a single one, or null for 1
  const acc_t<T>* bias;        // [width], or null
  void* out;                   // [rows, width] of out_dtype
  int64_t self_stride;         // elements between rows of self
  int width;
  Dtype out_dtype;  // any for accumulation in float, float64 for double
  // Most rows are short, and then it counts how much there is to decide.
  bool plain;   // out is the sum, of type T, possibly of a mean or scaled by row
  bool scaled;  // it is one of these, or both
  bool self_scale_by_row;
  bool bias_aligned;  // to 16 bytes
  bool mean;
  bool relu;
};

template <typename T>
Epilogue<T> epilogue_of(const SumEnd& p) {
  Epilogue<T> e{};
  e.dst_scale = static_cast<const acc_t<T>*>(p.dst_scale);
  e.self = static_cast<const T*>(p.self);
  e.self_scale = static_cast<const acc_t<T>*>(p.self_scale);
  e.bias = static_cast<const acc_t<T>*>(p.bias);
  e.out = p.out;
  e.self_stride = p.self_stride;
  e.width = p.width;
  e.out_dtype = p.out_dtype;
  e.plain = p.self == nullptr && p.bias == nullptr && !p.relu && p.out_dtype == p.dtype;
  e.scaled = p.mean || p.dst_scale != nullptr;
  e.self_scale_by_row = p.self_scale_by_row;
  e.bias_aligned = reinterpret_cast<uintptr_t>(p.bias) % 16 == 0;
  e.mean = p.mean;
  e.relu = p.relu;
  return e;
}

template <typename Out, int kVec, typename Acc>
__device__ __forceinline__ void store_as(void* out, int64_t at, const Acc (&v)[kVec]) {
  Out narrowed[kVec];
#pragma unroll
  for (int i = 0; i < kVec; ++i) narrowed[i] = narrow<Out>(v[i]);
  store_wide<Out, kVec>(static_cast<Out*>(out) + at, narrowed);
}

template <int kVec, typename Acc>
__device__ __forceinline__ void multiply_all(Acc (&v)[kVec], Acc by) {
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = multiply(v[i], by);
}

template <int kVec, typename Acc>
__device__ __forceinline__ void divide_all(Acc (&v)[kVec], Acc by) {
  const Acc inverse = inverse_of(by);
#pragma unroll
  for (int i = 0; i < kVec; ++i) v[i] = quotient(v[i], by, inverse);
}

// Writes columns [column, column + kVec) of a row of `length` edges, whose sums are `v`, where the
// end is plain. Length: unsigned, and of 64 bits where a row may have 2^32 edges.
template <int kVec, typename T, typename Length>
__device__ __forceinline__ void finish_plain_sum(const Epilogue<T>& e, int64_t row, Length length,
                                                 int column, acc_t<T> (&v)[kVec]) {
  static_assert(std::is_unsigned_v<Length>);
  if (e.scaled) {
    if (e.mean) divide_all(v, acc_t<T>(length > 1 ? length : Length(1)));
    if (e.dst_scale != nullptr) multiply_all(v, e.dst_scale[row]);
  }
  store_as<T>(e.out, row * e.width + column, v);
}

// The same for any end: first everything is asked for, then it is added. Products are rounded one
// by one, whatever is around them, so that every kernel writes the same bits.
template <int kVec, typename T, typename Length>
__device__ __forceinline__ void finish_sum(const Epilogue<T>& e, int64_t row, Length length,
                                           int column, acc_t<T> (&v)[kVec]) {
  using Acc = acc_t<T>;
  if (e.plain) return finish_plain_sum<kVec>(e, row, length, column, v);
  keep(row);
  keep(column);
  Acc dst_scale = Acc(1), self_scale = Acc(1);
  if (e.dst_scale != nullptr) dst_scale = e.dst_scale[row];
  Vec<T, kVec> self;
  if (e.self != nullptr) {
    if (e.self_scale != nullptr) self_scale = e.self_scale[e.self_scale_by_row ? row : 0];
    self = load<T, kVec>(e.self + row * e.self_stride + column);
  }
  Vec<Acc, kVec> bias;
  if (e.bias != nullptr) {
    if (e.bias_aligned) {
      bias = load_wide_if<Acc, kVec>(true, e.bias + column);
    } else {
#pragma unroll
      for (int i = 0; i < kVec; ++i) bias.v[i] = e.bias[column + i];
    }
  }
  if (e.mean) divide_all(v, acc_t<T>(length > 1 ? length : Length(1)));
  if (e.dst_scale != nullptr) multiply_all(v, dst_scale);
  // What a row's edges say already has no part in it, be it infinite.
  if (e.self != nullptr && !(e.self_scale_by_row && self_scale == Acc(0))) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = multiply_add(widen<T>(self.v[i]), self_scale, v[i]);
  }
  if (e.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] += bias.v[i];
  }
  if (e.relu) {
#pragma unroll
    for (int i = 0; i < kVec; ++i) v[i] = v[i] <= Acc(0) ? Acc(0) : v[i];  // NaN stays
  }
  const int64_t at = row * e.width + column;
  if constexpr (sizeof(Acc) == 8) {
    store_as<double>(e.out, at, v);
  } else {
    switch (e.out_dtype) {
      case Dtype::kFloat16:
        return store_as<__half>(e.out, at, v);
      case Dtype::kBFloat16:
        return store_as<__nv_bfloat16>(e.out, at, v);
      default:
        return store_as<float>(e.out, at, v);
    }
  }
}

}  // namespace gsp::cuda
