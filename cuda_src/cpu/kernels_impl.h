// The one source of the kernels, compiled once per instruction set: the file that includes this
// defines GSP_KERNEL_TABLE, the name of its table, and GSP_INSTRUCTION_SET. All else in here is
// internal to that file.
#include <type_traits>

#include "cpu/edge_kernels.h"
#include "cpu/kernel_table.h"
#include "cpu/spmm_kernels.h"

namespace gsp::cpu {
namespace {

template <typename T, typename Index>
struct Types {
  using Feature = T;
  using Idx = Index;
};

template <typename Run>
void dispatch(const Problem& problem, const Run& run) {
  const auto with_index = [&](auto feature) {
    using T = decltype(feature);
    if (problem.csr.wide) {
      run(Types<T, int64_t>{});
    } else {
      run(Types<T, int32_t>{});
    }
  };
  switch (problem.dtype) {
    case Dtype::kFloat32:
      return with_index(float{});
    case Dtype::kFloat64:
      return with_index(double{});
    case Dtype::kFloat16:
      return with_index(Half{});
    case Dtype::kBFloat16:
      return with_index(BFloat16{});
  }
}

template <typename Operator>
void run_sweep(const Problem& problem, const Schedule& schedule) {
  dispatch(problem, [&](auto types) {
    using S = decltype(types);
    sweep<typename S::Feature, typename S::Idx, Operator>(problem, schedule);
  });
}

template <Select kSelect>
void run_dots(const Problem& problem, const Schedule& schedule) {
  dispatch(problem, [&](auto types) {
    using S = decltype(types);
    dots<typename S::Feature, typename S::Idx, kSelect>(problem, schedule);
  });
}

void run_pair_gradient(const Problem& problem, const Schedule& schedule) {
  dispatch(problem, [&](auto types) {
    using S = decltype(types);
    gradient_of_pairs<typename S::Feature, typename S::Idx>(problem, schedule);
  });
}

template <template <typename, typename> class Operator>
void run_normalise(const Problem& problem, const Schedule& schedule) {
  dispatch(problem, [&](auto types) {
    using S = decltype(types);
    normalise_rows<typename S::Idx, Operator<typename S::Feature, typename S::Idx>>(problem,
                                                                                    schedule);
  });
}

void run_sum(const Problem& problem, const Schedule& schedule) {
  if (problem.weight != nullptr && problem.heads > 1) {
    run_sweep<HeadSum>(problem, schedule);
  } else if (problem.weight != nullptr || problem.src_scale != nullptr) {
    run_sweep<Sum<true>>(problem, schedule);
  } else {
    run_sweep<Sum<false>>(problem, schedule);
  }
}

void run_arg(const Problem& problem, const Schedule& schedule) {
  if (problem.minimum) {
    run_sweep<Arg<true, Reduce::kMin>>(problem,
                                       schedule);  // weighted or not: a weight of 1 changes nothing
  } else if (problem.weight != nullptr) {
    run_sweep<Arg<true, Reduce::kMax>>(problem, schedule);
  } else {
    run_sweep<Arg<false, Reduce::kMax>>(problem, schedule);
  }
}

void run_edge_sum_backward(const Problem& problem, const Schedule& schedule) {
  if (problem.result_edge != nullptr) {
    run_sweep<EdgeSumBackward<true>>(problem, schedule);
  } else {
    run_sweep<EdgeSumBackward<false>>(problem, schedule);
  }
}

}  // namespace

const KernelTable GSP_KERNEL_TABLE = {
    GSP_INSTRUCTION_SET,
    run_sum,
    run_arg,
    run_sweep<ArgBackward>,
    run_sweep<TieCount>,
    run_sweep<TieBackward>,
    run_dots<Select::kAll>,
    run_dots<Select::kArg>,
    run_dots<Select::kTie>,
    run_dots<Select::kPair>,
    run_pair_gradient,
    run_normalise<Softmax>,
    run_normalise<SoftmaxBackward>,
    run_sweep<EdgeSum>,
    run_edge_sum_backward,
    run_dots<Select::kMessage>,
};

}  // namespace gsp::cpu
