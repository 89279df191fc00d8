#include "cuda/launch.h"
#include "cuda/speed_of_light.cuh"

namespace gsp::cuda {

namespace {

bool aligned(const void* p, int64_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

template <typename T, int kVec>
cudaError_t launch(const SpeedOfLight& p, cudaStream_t stream) {
  constexpr int64_t bytes = kVec * sizeof(T);
  if (p.width % kVec != 0 || p.x_stride * int64_t(sizeof(T)) % bytes != 0 || !aligned(p.x, bytes)) {
    if constexpr (kVec > 1) return launch<T, kVec / 2>(p, stream);
  }
  SpeedOfLightArgs<T> a{};
  a.col = static_cast<const int*>(p.col);
  a.weight = static_cast<const T*>(p.weight);
  a.x = static_cast<const T*>(p.x);
  a.out = static_cast<T*>(p.out);
  a.x_stride = p.x_stride;
  a.edges = p.edges;
  a.out_size = p.rows * p.width;
  a.width = p.width;
  a.run = p.run;
  const int vectors = p.width / kVec;
  a.lanes = vectors < kThreads ? vectors : kThreads;
  a.tile = a.lanes * kVec;
  const int64_t per_block = kThreads / a.lanes * p.run;
  const int64_t blocks = (p.edges + per_block - 1) / per_block;
  const dim3 grid(unsigned(blocks > 0 ? blocks : 1), unsigned((p.width + a.tile - 1) / a.tile));
  if (p.weight != nullptr) {
    GSP_LAUNCH((speed_of_light_kernel<T, kVec, true>), grid, stream, a);
  } else {
    GSP_LAUNCH((speed_of_light_kernel<T, kVec, false>), grid, stream, a);
  }
  return cudaGetLastError();
}

}  // namespace

cudaError_t speed_of_light(const SpeedOfLight& p, cudaStream_t stream) {
  if (p.width == 0 || p.rows == 0) return cudaSuccess;
  return with_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    return launch<T, 16 / int(sizeof(T))>(p, stream);
  });
}

}  // namespace gsp::cuda
