#define GSP_KERNEL_TABLE kBaselineKernels
#define GSP_INSTRUCTION_SET "baseline"
#include "cpu/kernels_impl.h"
