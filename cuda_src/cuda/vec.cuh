// Elements of the feature dtypes: vector loads, conversion to the accumulation type and back,
// rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/device.cuh"

namespace gsp::cuda {

template <typename T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};
template <typename T>
using acc_t = typename Accumulate<T>::type;

template <typename T>
__device__ __forceinline__ acc_t<T> widen(T v) {
  return static_cast<acc_t<T>>(v);
}
template <>
__device__ __forceinline__ float widen(__half v) {
  return __half2float(v);
}
template <>
__device__ __forceinline__ float widen(__nv_bfloat16 v) {
  return __bfloat162float(v);
}

template <typename T>
__device__ __forceinline__ T narrow(acc_t<T> v) {
  return static_cast<T>(v);
}
template <>
__device__ __forceinline__ __half narrow(float v) {
  return __float2half_rn(v);
}
template <>
__device__ __forceinline__ __nv_bfloat16 narrow(float v) {
  return __float2bfloat16_rn(v);
}

// The value that a message has once it is stored as T: maxima and ties are decided on these.
template <typename T>
__device__ __forceinline__ acc_t<T> round_to(acc_t<T> v) {
  return widen<T>(narrow<T>(v));
}

// Products that the compiler does not join to other operations in one place and not in another.
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
__device__ __forceinline__ double multiply_add(double a, double b, double c) {
  return __fma_rn(a, b, c);
}

// v / by, correctly rounded, in fewer steps than a division takes where several share `inverse`,
// that is 1 / by to the last bit: a quotient, then what it leaves. `by` is a number of edges.
#ifdef __CUDA_ARCH__
__device__ __forceinline__ float inverse_of(float by) {
  float about;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(about) : "f"(by));
  return multiply_add(multiply_add(-by, about, 1.f), about, about);
}
__device__ __forceinline__ float quotient(float v, float by, float inverse) {
  const float about = multiply(v, inverse);
  const float exact = multiply_add(multiply_add(-by, about, v), inverse, about);
  return exact == exact ? exact : about;  // of an infinity, nothing is left but NaN
}
#else
__device__ __forceinline__ float inverse_of(float) { return 0; }
__device__ __forceinline__ float quotient(float v, float by, float) { return v / by; }
#endif
__device__ __forceinline__ double inverse_of(double) { return 0; }
__device__ __forceinline__ double quotient(double v, double by, double) { return v / by; }

// to = max(to, v): NaN wins and stays, +0 wins over -0.
template <typename Acc>
__device__ __forceinline__ void raise(Acc& to, Acc v) {
  if (to == to) to = v == to ? (signbit(to) ? v : to) : v <= to ? to : v;
}
#ifdef __CUDA_ARCH__
// One instruction; of fmaxf and the tests for NaN the compiler makes several.
template <>
__device__ __forceinline__ void raise(float& to, float v) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(to) : "f"(v));
}
#endif

// The 32 bits that, repeated, are -inf.
template <typename T>
constexpr unsigned kLowest = 0xff800000u;
template <>
inline constexpr unsigned kLowest<__half> = 0xfc00fc00u;
template <>
inline constexpr unsigned kLowest<__nv_bfloat16> = 0xff80ff80u;

// kVec adjacent elements, moved in one access where kVec * sizeof(T) is 16, 8, 4 or 2 bytes.
template <typename T, int kVec>
struct alignas(sizeof(T) * kVec > 16 ? 16 : sizeof(T) * kVec) Vec {
  T v[kVec];
};

template <typename T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load(const T* p) {
  return *reinterpret_cast<const Vec<T, kVec>*>(p);
}

// Row `row` of a matrix, from the column that `first_row` points at; stride in bytes.
template <typename T, typename Index>
__device__ __forceinline__ const T* row_of(const T* first_row, Index row, Index stride) {
  const char* at = reinterpret_cast<const char*>(first_row);
#ifdef __CUDA_ARCH__
  // One instruction, where the compiler widens both factors ahead of the loop and needs four.
  const char* to;
  if constexpr (std::is_same_v<Index, int>) {
    asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(to) : "r"(row), "r"(stride), "l"(at));
    return reinterpret_cast<const T*>(to);
  } else if constexpr (std::is_same_v<Index, unsigned>) {
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(to) : "r"(row), "r"(stride), "l"(at));
    return reinterpret_cast<const T*>(to);
  }
#endif
  return reinterpret_cast<const T*>(at + int64_t(row) * stride);
}

// Loads from memory that no one writes to meanwhile, through a pointer that the compiler may
// have lost track of (see `keep`); `bits`, repeated, where there is nothing to load. Written as a
// predicated load, not as a branch, and of whole words: two halves of a register would be chosen
// one by one.
template <typename T, int kVec, bool kOnce = false>
__device__ __forceinline__ Vec<T, kVec> load_or(bool ok, const T* p, unsigned bits) {
  Vec<T, kVec> v;
  constexpr int kBytes = sizeof(v), kWords = (kBytes + 3) / 4;
  unsigned w[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) w[i] = bits;
#ifdef __CUDA_ARCH__
  using Word = std::conditional_t<
      kBytes == 16, uint4,
      std::conditional_t<kBytes == 8, uint2,
                         std::conditional_t<kBytes == 4, unsigned, unsigned short>>>;
  static_assert(sizeof(Word) == kBytes);
  Word word;
  __builtin_memcpy(&word, w, kBytes);
  if (ok) {
    const Word* from = reinterpret_cast<const Word*>(p);
    word = kOnce ? __ldcs(from) : __ldg(from);
  }
  __builtin_memcpy(&v, &word, kBytes);
#else
  __builtin_memcpy(&v, w, kBytes);
  if (ok) v = load<T, kVec>(p);
#endif
  return v;
}
template <typename T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_if(bool ok, const T* p) {
  return load_or<T, kVec>(ok, p, 0);
}
// What no one reads again: the caches are for the rest.
template <typename T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_once_if(bool ok, const T* p) {
  return load_or<T, kVec, true>(ok, p, 0);
}
// -inf where there is nothing to load.
template <typename T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_or_lowest(bool ok, const T* p) {
  if constexpr (sizeof(T) == 8) {
    Vec<T, kVec> v = load_if<T, kVec>(ok, p);
#pragma unroll
    for (int i = 0; i < kVec; ++i) v.v[i] = ok ? v.v[i] : T(-INFINITY);
    return v;
  } else {
    return load_or<T, kVec>(ok, p, kLowest<T>);
  }
}

// The same in 16-byte pieces, for vectors longer than that.
template <typename T, int kVec>
__device__ __forceinline__ Vec<T, kVec> load_wide_if(bool ok, const T* p) {
  constexpr int kPiece = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
  Vec<T, kVec> v;
#pragma unroll
  for (int i = 0; i < kVec; i += kPiece) {
    const Vec<T, kPiece> piece = load_if<T, kPiece>(ok, p + i);
#pragma unroll
    for (int q = 0; q < kPiece; ++q) v.v[i + q] = piece.v[q];
  }
  return v;
}

template <typename T, int kVec>
__device__ __forceinline__ void store(T* p, const Vec<T, kVec>& v) {
  *reinterpret_cast<Vec<T, kVec>*>(p) = v;
}

// The same in pieces of 16 bytes.
template <typename T, int kVec>
__device__ __forceinline__ void store_wide(T* p, const T (&v)[kVec]) {
  constexpr int kPiece = kVec * sizeof(T) > 16 ? 16 / sizeof(T) : kVec;
#pragma unroll
  for (int i = 0; i < kVec; i += kPiece) {
    Vec<T, kPiece> piece;
#pragma unroll
    for (int q = 0; q < kPiece; ++q) piece.v[q] = v[i + q];
    store<T, kPiece>(p + i, piece);
  }
}

}  // namespace gsp::cuda
