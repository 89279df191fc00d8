// How the messages of one row are combined: the one definition for every reduction, on CPU and
// CUDA. `Value` is a scalar or, on the CPU, a GCC vector whose lanes are columns; `Position` is the
// integer type of the same shape. No torch here, and every function is inlined: files for different
// instruction sets include this.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define GSP_HD __host__ __device__ __forceinline__
#else
#define GSP_HD inline __attribute__((always_inline))
#endif

namespace gsp {

enum class Reduce { kSum, kMax, kMin };

// Equal, where NaN equals NaN and -0 equals +0: what makes two messages a tie.
template <typename Value>
GSP_HD auto same(Value a, Value b) {
  return (a == b) | ((a != a) & (b != b));
}

// max and min: the winning value and the position of the message that holds it. NaN wins, and of
// several winners the one with the lowest position: so an order of updates by ascending position
// and any order of merges agree.
template <Reduce kReduce, typename Value, typename Position>
struct Reducer {
  static_assert(kReduce == Reduce::kMax || kReduce == Reduce::kMin);
  Value value;
  Position position;

  // `first`: position of the first message of this accumulator, so that a row of nothing but -inf
  // (max) needs no special case; where there is no message at all, a position above every real one.
  static GSP_HD Reducer init(Position first) {
    return {Value{} + (kReduce == Reduce::kMax ? -INFINITY : INFINITY), first};
  }

  static GSP_HD auto better(Value a, Value b) {
    if constexpr (kReduce == Reduce::kMax) {
      return (!(a <= b)) & (b == b);
    } else {
      return (!(a >= b)) & (b == b);
    }
  }

  // `at` must be above the positions of earlier updates.
  GSP_HD void update(Value message, Position at) {
    const auto take = better(message, value);
    value = take ? message : value;
    position = take ? at : position;
  }

  GSP_HD void merge(const Reducer& other) {
    const auto take =
        better(other.value, value) | (same(other.value, value) & (other.position < position));
    value = take ? other.value : value;
    position = take ? other.position : position;
  }
};

template <typename Value, typename Position>
struct Reducer<Reduce::kSum, Value, Position> {
  Value value;

  static GSP_HD Reducer init(Position) { return {Value{}}; }
  GSP_HD void update(Value message, Position) { value += message; }
  GSP_HD void merge(const Reducer& other) { value += other.value; }
};

}  // namespace gsp
