#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t sum_of<__nv_bfloat16>(const RowSweep&, cudaStream_t);
}
