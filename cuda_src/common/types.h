// Element types that features may have. No torch here: CPU kernels, CUDA kernels and bindings share
// it.
#pragma once

namespace gsp {

enum class Dtype { kFloat32, kFloat64, kFloat16, kBFloat16 };

}  // namespace gsp
