#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t sum_of<float>(const RowSweep&, cudaStream_t);
}
