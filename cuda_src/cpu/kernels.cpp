#include "cpu/kernels.h"

#include "cpu/kernel_table.h"
#include "cpu/schedule.h"

namespace gsp::cpu {
namespace {

const KernelTable& kernels() {
  static const KernelTable& chosen = []() -> const KernelTable& {
#ifdef GSP_HAVE_AVX512
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return kAvx512Kernels;
    }
#endif
#ifdef GSP_HAVE_AVX2
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c")) {
      return kAvx2Kernels;
    }
#endif
    return kBaselineKernels;
  }();
  return chosen;
}

// scratch_width: values that a piece of a long row hands over.
void run(Kernel KernelTable::* kernel, const Problem& problem, int64_t scratch_width) {
  const ScheduleStorage storage(problem.csr, scratch_width);
  (kernels().*kernel)(problem, storage.schedule());
}

}  // namespace

const char* instruction_set() { return kernels().instruction_set; }

void spmm(const Problem& p) { run(&KernelTable::spmm, p, p.width); }
void spmm_arg(const Problem& p) { run(&KernelTable::spmm_arg, p, p.width); }
void spmm_arg_backward(const Problem& p) { run(&KernelTable::spmm_arg_backward, p, p.width); }
void spmm_tie_count(const Problem& p) { run(&KernelTable::spmm_tie_count, p, p.width); }
void spmm_tie_backward(const Problem& p) { run(&KernelTable::spmm_tie_backward, p, p.width); }
void sddmm(const Problem& p) { run(&KernelTable::sddmm, p, p.width); }
void sddmm_arg(const Problem& p) { run(&KernelTable::sddmm_arg, p, p.width); }
void sddmm_tie(const Problem& p) { run(&KernelTable::sddmm_tie, p, p.width); }
void pair_score(const Problem& p) { run(&KernelTable::pair_score, p, p.width); }
void pair_gradient(const Problem& p) { run(&KernelTable::pair_gradient, p, p.width); }
void edge_softmax(const Problem& p) { run(&KernelTable::edge_softmax, p, p.heads); }
void edge_softmax_backward(const Problem& p) {
  run(&KernelTable::edge_softmax_backward, p, p.heads);
}
void edge_sum(const Problem& p) { run(&KernelTable::edge_sum, p, p.width); }
void edge_sum_backward(const Problem& p) { run(&KernelTable::edge_sum_backward, p, p.width); }
void edge_sum_dot(const Problem& p) { run(&KernelTable::edge_sum_dot, p, p.width); }

}  // namespace gsp::cpu
