// Arithmetic that the launchers share.
#pragma once

#include <cstdint>

namespace gsp::cuda {

inline int log2_ceil(int64_t v) {
  int log = 0;
  while ((int64_t(1) << log) < v) ++log;
  return log;
}

inline bool aligned(const void* p, int64_t stride, int64_t elements, int64_t element_size) {
  const int64_t bytes = elements * element_size;
  return reinterpret_cast<uintptr_t>(p) % bytes == 0 && stride * element_size % bytes == 0;
}

}  // namespace gsp::cuda
