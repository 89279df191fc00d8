#define GSP_KERNEL_TABLE kAvx512Kernels
#define GSP_INSTRUCTION_SET "avx512"
#include "cpu/kernels_impl.h"
