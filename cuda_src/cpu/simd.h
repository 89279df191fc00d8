// Vectors of `kLanes` accumulators, and loads and stores that convert from and to the storage type.
// Written with GCC vector extensions; the files that include this are compiled once per instruction
// set, and everything here is internal to each of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "common/reducer.h"

#if defined(__AVX512F__)
#define GSP_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GSP_VECTOR_BYTES 32
#else
#define GSP_VECTOR_BYTES 16
#endif

// All functions with vector arguments are inlined: no call ever depends on how vectors are passed.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace gsp::cpu {
namespace {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

template <typename T, int kLanes>
struct VectorOf {
  typedef T type __attribute__((vector_size(sizeof(T) * kLanes)));
};
template <typename T, int kLanes>
using Vector = typename VectorOf<T, kLanes>::type;

// The accumulators of storage type T, and the integers and masks of the same shape.
template <typename T, int kLanes>
using Value = Vector<Accumulator<T>, kLanes>;
template <typename T>
using PositionScalar = std::conditional_t<sizeof(Accumulator<T>) == 8, int64_t, int32_t>;
template <typename T, int kLanes>
using Position = Vector<PositionScalar<T>, kLanes>;

template <typename T>
constexpr int kNativeLanes = GSP_VECTOR_BYTES / sizeof(Accumulator<T>);

template <typename To, typename From>
GSP_HD To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename V>
GSP_HD V load_raw(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <int kLanes>
GSP_HD Vector<float, kLanes> half_to_float(Vector<uint16_t, kLanes> half) {
#ifdef __F16C__
  if constexpr (kLanes == 8)
    return bit_cast<Vector<float, 8>>(_mm256_cvtph_ps(bit_cast<__m128i>(half)));
#endif
#ifdef __AVX512F__
  if constexpr (kLanes == 16)
    return bit_cast<Vector<float, 16>>(_mm512_cvtph_ps(bit_cast<__m256i>(half)));
#endif
  using U = Vector<uint32_t, kLanes>;
  using F = Vector<float, kLanes>;
  const U wide = __builtin_convertvector(half, U);
  const U magnitude = (wide & 0x7fff) << 13;
  const F finite = bit_cast<F>(magnitude) * 0x1p112f;  // moves the exponent's bias, subnormals too
  const U special = magnitude | 0x7f800000u;           // inf and NaN
  const U bits = (wide & 0x7c00) == 0x7c00 ? special : bit_cast<U>(finite);
  return bit_cast<F>(bits | ((wide & 0x8000) << 16));
}

template <int kLanes>
GSP_HD Vector<uint16_t, kLanes> float_to_half(Vector<float, kLanes> value) {
#ifdef __F16C__
  if constexpr (kLanes == 8) {
    return bit_cast<Vector<uint16_t, 8>>(
        _mm256_cvtps_ph(bit_cast<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#ifdef __AVX512F__
  if constexpr (kLanes == 16) {
    return bit_cast<Vector<uint16_t, 16>>(
        _mm512_cvtps_ph(bit_cast<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
  using U = Vector<uint32_t, kLanes>;
  using F = Vector<float, kLanes>;
  const U bits = bit_cast<U>(value);
  const U sign = bits & 0x80000000u;
  const U twice = bits + bits;
  const U exponent = twice & 0xff000000u;
  const U bias = exponent < 0x71000000u ? U{} + 0x71000000u : exponent;
  // Adding a power of two 2^13 times the last place that a half keeps lets the adder do the
  // rounding, to even.
  const F scaled = bit_cast<F>(bits & 0x7fffffffu) * 0x1p112f * 0x1p-110f;  // overflow goes to inf
  const U sum = bit_cast<U>(bit_cast<F>((bias >> 1) + 0x07800000u) + scaled);
  const U rounded = ((sum >> 13) & 0x7c00) + (sum & 0x0fff);
  const U half = (twice > 0xff000000u ? U{} + 0x7e00u : rounded) | (sign >> 16);
  return __builtin_convertvector(half, Vector<uint16_t, kLanes>);
}

// One place for every storage type: load kLanes of them as accumulators, store them rounded to
// nearest even.
template <int kLanes>
GSP_HD Vector<float, kLanes> load(const float* from) {
  return load_raw<Vector<float, kLanes>>(from);
}
template <int kLanes>
GSP_HD Vector<double, kLanes> load(const double* from) {
  return load_raw<Vector<double, kLanes>>(from);
}
template <int kLanes>
GSP_HD Vector<float, kLanes> load(const Half* from) {
  return half_to_float<kLanes>(load_raw<Vector<uint16_t, kLanes>>(from));
}
template <int kLanes>
GSP_HD Vector<float, kLanes> load(const BFloat16* from) {
  const auto wide =
      __builtin_convertvector(load_raw<Vector<uint16_t, kLanes>>(from), Vector<uint32_t, kLanes>);
  return bit_cast<Vector<float, kLanes>>(wide << 16);
}

template <int kLanes>
GSP_HD Vector<float, kLanes> to_storage(Vector<float, kLanes> value, const float*) {
  return value;
}
template <int kLanes>
GSP_HD Vector<double, kLanes> to_storage(Vector<double, kLanes> value, const double*) {
  return value;
}
template <int kLanes>
GSP_HD Vector<uint16_t, kLanes> to_storage(Vector<float, kLanes> value, const Half*) {
  return float_to_half<kLanes>(value);
}
template <int kLanes>
GSP_HD Vector<uint16_t, kLanes> to_storage(Vector<float, kLanes> value, const BFloat16*) {
  using U = Vector<uint32_t, kLanes>;
  const U bits = bit_cast<U>(value);
  const U rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const U safe = value != value ? U{} + 0x7fc0u : rounded;
  return __builtin_convertvector(safe, Vector<uint16_t, kLanes>);
}

template <int kLanes, typename T>
GSP_HD void store(T* to, Value<T, kLanes> value) {
  const auto stored = to_storage<kLanes>(value, to);
  std::memcpy(to, &stored, sizeof(stored));
}

// `value` as it would come back from storage type T.
template <typename T, int kLanes>
GSP_HD Value<T, kLanes> rounded(Value<T, kLanes> value) {
  if constexpr (sizeof(T) == sizeof(Accumulator<T>)) {
    return value;
  } else {
    const auto stored = to_storage<kLanes>(value, static_cast<const T*>(nullptr));
    return load<kLanes>(reinterpret_cast<const T*>(&stored));
  }
}

template <typename T>
GSP_HD Accumulator<T> load_scalar(const T* from) {
  return load<1>(from)[0];
}
template <typename T>
GSP_HD void store_scalar(T* to, Accumulator<T> value) {
  store<1>(to, Value<T, 1>{value});
}

// The sum of all lanes, by halving: a fixed order.
template <int kLanes, typename Scalar>
GSP_HD Scalar sum_of_lanes(Vector<Scalar, kLanes> v) {
  if constexpr (kLanes == 1) {
    return v[0];
  } else {
    using Halved = Vector<Scalar, kLanes / 2>;
    const char* bytes = reinterpret_cast<const char*>(&v);
    return sum_of_lanes<kLanes / 2, Scalar>(load_raw<Halved>(bytes) +
                                            load_raw<Halved>(bytes + sizeof(Halved)));
  }
}

}  // namespace
}  // namespace gsp::cpu
