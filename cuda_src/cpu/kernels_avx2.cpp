#define GSP_KERNEL_TABLE kAvx2Kernels
#define GSP_INSTRUCTION_SET "avx2"
#include "cpu/kernels_impl.h"
