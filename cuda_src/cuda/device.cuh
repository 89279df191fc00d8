// What device code may use, under nvcc and under the CPU emulation of tests/emu.
#pragma once

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include <cstdint>

#include "common/reducer.h"

namespace gsp::cuda {

constexpr int kThreads = 256;  // of every block
constexpr int kWarps = kThreads / 32;
constexpr unsigned kFullMask = 0xffffffffu;

}  // namespace gsp::cuda
