#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t sum_of<double>(const RowSweep&, cudaStream_t);
}
