// The kernels of one instruction set.
#pragma once

#include "cpu/kernels.h"
#include "cpu/schedule.h"

namespace gsp::cpu {

using Kernel = void (*)(const Problem&, const Schedule&);

struct KernelTable {
  const char* instruction_set;
  Kernel spmm, spmm_arg, spmm_arg_backward, spmm_tie_count, spmm_tie_backward;
  Kernel sddmm, sddmm_arg, sddmm_tie, pair_score, pair_gradient;
  Kernel edge_softmax, edge_softmax_backward;
  Kernel edge_sum, edge_sum_backward, edge_sum_dot;
};

extern const KernelTable kBaselineKernels;
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;

}  // namespace gsp::cpu
