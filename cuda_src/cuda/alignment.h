// Which vectors memory allows, and other arithmetic that the launchers share.
#pragma once

#include <cstdint>

#include "cuda/launch.h"

namespace gsp::cuda {

inline int log2_ceil(int64_t v) {
  int log = 0;
  while ((int64_t(1) << log) < v) ++log;
  return log;
}

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int64_t size_of(Dtype dtype) {
  return dtype == Dtype::kFloat64 ? 8 : dtype == Dtype::kFloat32 ? 4 : 2;
}

inline bool aligned(const void* p, int64_t stride, int64_t elements, int64_t element_size) {
  const int64_t bytes = elements * element_size;
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && stride * element_size % bytes == 0;
}

// Whether the end of a sum can move `vec` elements of `size` bytes at once.
inline bool can_finish(const SumEnd& p, int vec, int64_t size) {
  const int64_t out_size = size_of(p.out_dtype), most = 16 / out_size;
  return aligned(p.self, p.self_stride, vec, size) &&
         aligned(p.out, p.width, vec < most ? vec : most, out_size);
}

}  // namespace gsp::cuda
