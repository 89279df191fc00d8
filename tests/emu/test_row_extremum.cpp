// Maxima, minima and their gradients in row_sweep.cuh, against loops over the edges of a row.
#include "row_sweep_checks.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

constexpr int kNumCols = 23;

// Few values, so that messages tie, also after rounding only; two zeros, infinities and NaN.
double some_value() {
  constexpr double kValues[] = {-1.5, -0.7, -0.0, 0.0, 0.3, 0.7, 1.1};
  const int pick = below(60);
  return pick == 0 ? NAN : pick == 1 ? -INFINITY : pick == 2 ? INFINITY : kValues[pick % 7];
}
double some_weight() {
  constexpr double kWeights[] = {1, 0.5, -0.7, 1.3, 1};
  return kWeights[below(5)];
}

template <typename T, typename Index>
struct Problem {
  Graph<Index> g;
  Matrix<T> x;  // of the columns
  Weights<T, Index> weights;
  bool weighted;

  Problem(const Shape& shape, int width, bool weighted_, int heads, Layout layout)
      : g(shape.lengths, kNumCols),
        x(kNumCols, width, layout.pad, size_t(layout.offset)),
        weights(g, heads),
        weighted(weighted_) {
    x.fill([](int64_t row, int64_t) {
      return row == 0 ? -INFINITY : row == 1 ? INFINITY : some_value();
    });
    weights.data.fill([](int64_t, int64_t) { return some_weight(); });
    // Rows of nothing but -inf or +inf, where not even the first message is an improvement.
    for (int64_t r = 0; r < g.rows; ++r) {
      if (r % 5 < 3) continue;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) g.col[j] = Index(r % 5 - 3);
    }
  }
  RowSweep sweep_args() const {
    RowSweep p{};
    p.x = x.data.data();
    p.x_stride = x.stride;
    p.width = int(x.width);
    p.heads = weights.heads;
    if (weighted) p.weight = weights.data.data.data();
    return p;
  }
  acc_t<T> weight(int64_t j, int64_t f) {
    return weighted ? weights.of(j, f, x.width) : acc_t<T>(1);
  }
  T message(int64_t j, int64_t f, T value) { return narrow<T>(weight(j, f) * widen<T>(value)); }
};

template <typename T>
bool tie(T a, T b) {
  return gsp::same(widen<T>(a), widen<T>(b));
}

// Of row r, or zero and -1: the first NaN, else the first of the largest or smallest messages.
template <typename T, typename Index>
std::pair<T, int64_t> extremum(Problem<T, Index>& problem, bool minimum, int64_t r, int64_t f) {
  const auto& g = problem.g;
  T best = narrow<T>(0);
  int64_t at = -1;
  for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
    const T message = problem.message(j, f, problem.x.at(g.col[j], f));
    const auto m = widen<T>(message), b = widen<T>(best);
    if (at < 0 || (b == b && (m != m || (minimum ? m < b : m > b)))) {
      best = message;
      at = j;
    }
  }
  return {best, at};
}

struct Options {
  bool weighted = true;
  int heads = 0;
  bool perm = true;
  Layout layout = {};
};

template <typename T, typename Index = int>
void check_extremum(const char* name, bool minimum, const Shape& shape, int width, Options with,
                    const Launcher& launcher, bool arg = true) {
  Problem<T, Index> problem(shape, width, with.weighted, with.heads, with.layout);
  RowSweep p = problem.sweep_args();
  p.minimum = minimum;
  if (with.perm) p.perm = problem.g.perm.data();
  const auto all = sweep<T, Index>(name, p, arg, problem.g, shape, launcher);
  for (const auto& other : all) {
    expect(same_bits(all[0]->out, other->out) && same_bits(all[0]->arg, other->arg),
           "%s, width %d: other values under a plan", name, width);
  }
  for (int64_t r = 0; r < problem.g.rows; ++r) {
    for (int64_t f = 0; f < width; ++f) {
      const auto [value, at] = extremum(problem, minimum, r, f);
      const T got = all[0]->out[r * width + f];
      expect(tie(got, value), "%s, width %d: row %d, column %d: got %g, expected %g", name, width,
             int(r), int(f), double(widen<T>(got)), double(widen<T>(value)));
      if (!arg) continue;
      const int64_t id = at < 0 || !with.perm ? at : int64_t(problem.g.perm[at]);
      const int64_t got_id = all[0]->arg[r * width + f];
      expect(got_id == id, "%s, width %d: row %d, column %d: got edge %d, expected %d", name, width,
             int(r), int(f), int(got_id), int(id));
    }
  }
}

template <typename T, typename Index>
void check_sums(const char* name, const Problem<T, Index>& problem, const Results<T, Index>& got,
                const std::vector<double>& want, const std::vector<double>& magnitude) {
  const int64_t width = problem.x.width;
  for (int64_t i = 0; i < problem.g.rows * width; ++i) {
    const int64_t r = i / width, length = problem.g.rowptr[r + 1] - problem.g.rowptr[r];
    expect(close(got.out[i], want[size_t(i)], magnitude[size_t(i)], length),
           "%s, width %d: row %d, column %d: got %g, expected %g", name, int(width), int(r),
           int(i % width), double(widen<T>(got.out[i])), want[size_t(i)]);
  }
}

// Both gradients are sweeps over the transposed graph: its rows are what was gathered, its columns
// the rows of the result.
template <typename T, typename Index = int>
void check_arg_backward(const char* name, const Shape& shape, int width, Options with,
                        const Launcher& launcher, int arg_offset = 0) {
  Problem<T, Index> problem(shape, width, with.weighted, with.heads, with.layout);
  const auto& g = problem.g;
  problem.x.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<Index> arg(size_t(kNumCols * width), size_t(arg_offset));
  for (int64_t i = 0; i < int64_t(kNumCols) * width; ++i) {
    const int64_t j = below(8) == 0 ? -1 : g.any_edge_of(i / width);
    arg[i] = j < 0 ? Index(-1) : with.perm ? g.perm[j] : Index(j);
  }
  RowSweep p = problem.sweep_args();
  p.arg = arg.data();
  if (with.perm) p.perm = g.perm.data();
  const auto all = sweep<T, Index>(name, p, false, g, shape, launcher);
  std::vector<double> want(size_t(g.rows * width)), magnitude(want.size());
  for (int64_t j = 0; j < g.edges; ++j) {
    for (int64_t f = 0; f < width; ++f) {
      if (arg[g.col[j] * width + f] != (with.perm ? g.perm[j] : Index(j))) continue;
      const double term =
          double(problem.weight(j, f)) * double(widen<T>(problem.x.at(g.col[j], f)));
      want[size_t(g.row_of(j) * width + f)] += term;
      magnitude[size_t(g.row_of(j) * width + f)] += std::fabs(term);
    }
  }
  for (const auto& results : all) check_sums(name, problem, *results, want, magnitude);
}

template <typename T, typename Index = int>
void check_tie_count(const char* name, const Shape& shape, int width, Options with,
                     const Launcher& launcher) {
  Problem<T, Index> problem(shape, width, with.weighted, with.heads, with.layout);
  const auto& g = problem.g;
  Matrix<T> best(g.rows, width, with.layout.pad);
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int64_t f = 0; f < width; ++f) best.at(r, f) = extremum(problem, false, r, f).first;
  }
  RowSweep p = problem.sweep_args();
  p.own = best.data.data();
  p.own_stride = best.stride;
  const auto all = sweep<T, Index, acc_t<T>>(name, p, false, g, shape, launcher);
  for (const auto& other : all) {
    expect(same_bits(all[0]->out, other->out), "%s, width %d: other counts under a plan", name,
           width);
  }
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int64_t f = 0; f < width; ++f) {
      int count = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j)
        count += tie(problem.message(j, f, problem.x.at(g.col[j], f)), best.at(r, f));
      const double got = double(all[0]->out[r * width + f]);
      expect(got == count, "%s, width %d: row %d, column %d: got %g ties, expected %d", name, width,
             int(r), int(f), got, count);
    }
  }
  // With a gradient: the share in it of each of them, and of 0 where that takes part.
  Matrix<T> grad(g.rows, width, 3 * with.layout.pad);
  grad.fill([](int64_t, int64_t) { return uniform(); });
  p.self = grad.data.data();
  p.self_stride = grad.stride;
  for (const bool zero_wins : {false, true}) {
    p.zero_wins = zero_wins;
    const auto shares = sweep<T, Index, T>(name, p, false, g, shape, launcher);
    for (const auto& results : shares) {
      for (int64_t i = 0; i < g.rows * width; ++i) {
        const int64_t r = i / width, f = i % width;
        const acc_t<T> zero = acc_t<T>(zero_wins && widen<T>(best.at(r, f)) == acc_t<T>(0) ? 1 : 0);
        const acc_t<T> count = all[0]->out[i] + zero;
        if (count == acc_t<T>(0)) continue;  // of no edges: anything
        const T want = narrow<T>(widen<T>(grad.at(r, f)) / count);
        expect(widen<T>(results->out[i]) == widen<T>(want),
               "%s, width %d: row %d, column %d: got a share of %g, expected %g", name, width,
               int(r), int(f), double(widen<T>(results->out[i])), double(widen<T>(want)));
      }
    }
  }
}

template <typename T, typename Index = int>
void check_tie_backward(const char* name, const Shape& shape, int width, Options with,
                        const Launcher& launcher) {
  Problem<T, Index> problem(shape, width, with.weighted, with.heads, with.layout);
  const auto& g = problem.g;
  problem.x.fill([](int64_t, int64_t) { return uniform(); });  // the gradient
  Matrix<T> features(g.rows, width, 2 * with.layout.pad);
  features.fill([](int64_t, int64_t) { return some_value(); });
  Matrix<T> best(kNumCols, width, with.layout.pad);
  for (int64_t r = 0; r < kNumCols; ++r) {
    for (int64_t f = 0; f < width; ++f) {
      const int64_t j = g.any_edge_of(r);
      best.at(r, f) = j < 0 ? narrow<T>(0) : problem.message(j, f, features.at(g.row_of(j), f));
    }
  }
  RowSweep p = problem.sweep_args();
  p.other = best.data.data();
  p.other_stride = best.stride;
  p.own = features.data.data();
  p.own_stride = features.stride;
  const auto all = sweep<T, Index>(name, p, false, g, shape, launcher);
  std::vector<double> want(size_t(g.rows * width)), magnitude(want.size());
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
      for (int64_t f = 0; f < width; ++f) {
        if (!tie(problem.message(j, f, features.at(r, f)), best.at(g.col[j], f))) continue;
        const double term =
            double(problem.weight(j, f)) * double(widen<T>(problem.x.at(g.col[j], f)));
        want[size_t(r * width + f)] += term;
        magnitude[size_t(r * width + f)] += std::fabs(term);
      }
    }
  }
  for (const auto& results : all) check_sums(name, problem, *results, want, magnitude);
}

void test_float() {
  const auto run = [](RowOp op) -> Launcher {
    return [op](const RowSweep& p) { return extremum_of<float>(op, p, nullptr); };
  };
  const Launcher launcher = run(RowOp::kExtremum);
  for (const bool minimum : {false, true}) {
    const char* name = minimum ? "min" : "max";
    check_extremum<float>(name, minimum, kMixed, 16, {false}, launcher);
    check_extremum<float>(name, minimum, kMixed, 33, {true, 3}, launcher);
    check_extremum<float>(name, minimum, kChunky, 130, {true, 0, false}, launcher);
    check_extremum<float, int64_t>(name, minimum, kMixed, 3, {}, launcher);
  }
  const Launcher& max = launcher;
  check_extremum<float>("max", false, kChunky, 64, {false}, max);
  check_extremum<float>("max", false, kTwoGroups, 6, {false}, max);
  check_extremum<float>("max", false, kMixed, 128, {false}, max, false);
  check_extremum<float>("max", false, kMixed, 1, {}, max);
  check_extremum<float>("max", false, kMixed, 257, {}, max, false);  // without positions
  check_extremum<float>("max", false, kTwoGroups, 8, {true, 2}, max);
  check_extremum<float>("max", false, kManyGroups, 1, {}, max);
  check_extremum<float>("max", false, kEmpty, 8, {}, max);
  check_extremum<float>("max, apart", false, kMixed, 64, {true, 0, true, {4, 0}}, max);
  check_extremum<float>("max, shifted", false, kMixed, 64, {true, 0, true, {0, 3}}, max);

  const Launcher arg = run(RowOp::kArgBackward);
  check_arg_backward<float>("arg backward", kMixed, 33, {true, 3}, arg);
  check_arg_backward<float>("arg backward", kMixed, 100, {false, 0, false}, arg);
  check_arg_backward<float>("arg backward", kChunky, 8, {true, 2, true, {4, 0}}, arg);
  check_arg_backward<float>("arg backward, shifted", kMixed, 16, {}, arg, 1);
  check_arg_backward<float>("arg backward", kFourGroups, 3, {}, arg);
  check_arg_backward<float, int64_t>("arg backward, wide index", kMixed, 8, {}, arg);

  const Launcher count = run(RowOp::kTieCount);
  check_tie_count<float>("tie count", kMixed, 33, {true, 3}, count);
  check_tie_count<float>("tie count", kMixed, 64, {false}, count);
  check_tie_count<float>("tie count", kChunky, 8, {true, 2, true, {4, 0}}, count);
  check_tie_count<float>("tie count", kTwoGroups, 16, {true, 0, true, {1, 1}}, count);
  check_tie_count<float, int64_t>("tie count, wide index", kMixed, 3, {}, count);

  const Launcher split = run(RowOp::kTieBackward);
  check_tie_backward<float>("tie backward", kMixed, 33, {true, 3}, split);
  check_tie_backward<float>("tie backward", kMixed, 130, {false}, split);
  check_tie_backward<float>("tie backward", kChunky, 8, {true, 2, true, {4, 0}}, split);
  check_tie_backward<float>("tie backward", kTwoGroups, 16, {true, 0, true, {1, 1}}, split);
  check_tie_backward<float, int64_t>("tie backward, wide index", kMixed, 3, {}, split);
}

// The other dtypes: what is theirs are vectors, conversions and rounding.
void test_other_dtypes() {
  const Launcher max = [](const RowSweep& p) {
    return choose<AnyArgmax, __half, false>(p, nullptr);
  };
  const Launcher plain = [](const RowSweep& p) {
    return choose<PlainArgmax, __half, true>(p, nullptr);
  };
  check_extremum<__half>("plain half max", false, kMixed, 128, {false}, plain);
  check_extremum<__half>("half max", false, kMixed, 264, {}, max);
  check_extremum<__half>("half max", false, kMixed, 33, {}, max);
  check_extremum<__half>("half max", false, kTwoGroups, 16, {true, 2, true, {8, 0}}, max);
  check_extremum<__half>("half max", false, kMixed, 8, {}, max);
  check_arg_backward<__half>("half arg backward", kMixed, 64, {}, [](const RowSweep& p) {
    return launch_vectors<ArgBackwardOp, __half, 8, false>(p, nullptr);
  });
  check_tie_count<__half>("half tie count", kMixed, 64, {}, [](const RowSweep& p) {
    return launch_vectors<TieCountOp, __half, 8, false>(p, nullptr);
  });
  check_tie_backward<__half>("half tie backward", kMixed, 64, {}, [](const RowSweep& p) {
    return launch_vectors<TieBackwardOp, __half, 8, false>(p, nullptr);
  });
  check_extremum<__nv_bfloat16>("bfloat16 min", true, kMixed, 16, {}, [](const RowSweep& p) {
    return launch_vectors<AnyArgmax, __nv_bfloat16, 8, false>(p, nullptr);
  });
  check_tie_count<double>("double tie count", kMixed, 16, {true, 4}, [](const RowSweep& p) {
    return launch_vectors<TieCountOp, double, 2, false>(p, nullptr);
  });
}

}  // namespace

int main() {
  test_float();
  test_other_dtypes();
  return checks::finish();
}
