#include "cuda/row_sweep_launch.cuh"

namespace gsp::cuda {
template cudaError_t edge_sum_of<__half>(RowOp, const RowSweep&, cudaStream_t);
}
