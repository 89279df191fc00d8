#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t extremum_of<float>(RowOp, const RowSweep&, cudaStream_t);
}
