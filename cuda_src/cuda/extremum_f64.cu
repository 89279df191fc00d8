#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t extremum_of<double>(RowOp, const RowSweep&, cudaStream_t);
}
