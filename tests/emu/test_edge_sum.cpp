// Sums of messages that have features of their own, and their gradients, against loops in double.
#include "row_sweep_checks.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

constexpr int kNumCols = 23;

struct Options {
  bool weighted = false;
  bool perm = true;
  bool mean = false;
  Layout layout = {};
  bool special = false;
};

// Features with few values, so that some messages are 0, where the ReLU has its corner.
template <typename T, typename Index>
struct Problem {
  Graph<Index> g;
  Matrix<T> x, edge;  // of the columns, and in the caller's order
  Weights<T, Index> weights;
  Options with;

  Problem(const Shape& shape, int width, Options with_)
      : g(shape.lengths, kNumCols),
        x(kNumCols, width, with_.layout.pad, size_t(with_.layout.offset)),
        edge(g.edges, width, 2 * with_.layout.pad),
        weights(g, 0),
        with(with_) {
    x.fill([](int64_t, int64_t) { return below(7) - 3; });
    edge.fill([](int64_t, int64_t) { return below(7) - 3; });
    if (with.special) {
      edge.at(4, 0) = narrow<T>(NAN);
      x.at(3, width / 2) = narrow<T>(INFINITY);
      edge.at(5, width - 1) = narrow<T>(-INFINITY);
    }
    weights.data.fill([](int64_t, int64_t) { return uniform(); });
  }
  int64_t id(int64_t j) const { return with.perm ? int64_t(g.perm[j]) : j; }
  double weight(int64_t j) { return with.weighted ? double(weights.of(j, 0, x.width)) : 1; }
  RowSweep sweep_args() const {
    RowSweep p{};
    p.x = x.data.data();
    p.x_stride = x.stride;
    p.width = int(x.width);
    p.edge = edge.data.data();
    p.edge_stride = edge.stride;
    if (with.perm) p.perm = g.perm.data();
    if (with.weighted) p.weight = weights.data.data.data();
    return p;
  }
};

template <typename T>
double wide(T v) {
  return double(widen<T>(v));
}

template <typename T, typename Index = int>
void check_sum(const char* name, const Shape& shape, int width, Options with,
               const Launcher& launcher) {
  Problem<T, Index> problem(shape, width, with);
  const auto& g = problem.g;
  RowSweep p = problem.sweep_args();
  p.mean = with.mean;
  const auto all = sweep<T, Index>(name, p, false, g, shape, launcher);
  for (int64_t r = 0; r < g.rows; ++r) {
    const int64_t length = int64_t(g.rowptr[r + 1] - g.rowptr[r]);
    for (int64_t f = 0; f < width; ++f) {
      double sum = 0, magnitude = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        const double v = wide(problem.x.at(g.col[j], f)) + wide(problem.edge.at(problem.id(j), f));
        const double term = problem.weight(j) * (v <= 0 ? 0 : v);
        sum += term;
        magnitude += std::fabs(term);
      }
      if (with.mean) sum /= double(std::max<int64_t>(length, 1));
      for (size_t i = 0; i < all.size(); ++i) {
        const T got = all[i]->out[r * width + f];
        expect(close(got, sum, magnitude, length),
               "%s, width %d, run %d: row %d, column %d: got %g, expected %g", name, width, int(i),
               int(r), int(f), wide(got), sum);
      }
    }
  }
}

// A sweep over the transposed graph: its rows are what was gathered, its columns the rows of the
// result.
template <typename T, typename Index = int>
void check_backward(const char* name, const Shape& shape, int width, Options with, bool edges,
                    const Launcher& launcher) {
  Problem<T, Index> problem(shape, width, with);
  const auto& g = problem.g;
  Matrix<T> features(g.rows, width, with.layout.pad);
  features.fill([](int64_t, int64_t) { return below(7) - 3; });
  problem.x.fill([](int64_t, int64_t) { return uniform(); });  // the gradient
  RowSweep p = problem.sweep_args();
  p.own = features.data.data();
  p.own_stride = features.stride;

  std::vector<double> want(size_t(g.rows * width)), magnitude(want.size());
  std::vector<double> of_edges(size_t(g.edges * width));
  for (int64_t j = 0; j < g.edges; ++j) {
    for (int64_t f = 0; f < width; ++f) {
      const int64_t r = g.row_of(j), id = problem.id(j);
      const double v = wide(features.at(r, f)) + wide(problem.edge.at(id, f));
      const double term = v <= 0 ? 0 : problem.weight(j) * wide(problem.x.at(g.col[j], f));
      want[size_t(r * width + f)] += term;
      magnitude[size_t(r * width + f)] += std::fabs(term);
      of_edges[size_t(id * width + f)] = term;
    }
  }
  // Every run writes all of them: what is left unwritten is found.
  const auto checked = [&](const RowSweep& q) {
    if (!edges) return launcher(q);
    Buffer<T> out(size_t(g.edges * width), 0, kUnwritten);
    RowSweep with_edges = q;
    with_edges.out_edge = out.data();
    const cudaError_t error = launcher(with_edges);
    for (int64_t i = 0; i < g.edges * width; ++i) {
      const double expected = of_edges[size_t(i)];
      expect(close(out[i], expected, expected, 1),
             "%s, width %d: edge %d, column %d: got %g, expected %g", name, width, int(i / width),
             int(i % width), wide(out[i]), expected);
    }
    return error;
  };
  const auto all = sweep<T, Index>(name, p, false, g, shape, checked);
  for (const auto& results : all) {
    for (int64_t i = 0; i < g.rows * width; ++i) {
      const int64_t r = i / width, length = int64_t(g.rowptr[r + 1] - g.rowptr[r]);
      expect(close(results->out[i], want[size_t(i)], magnitude[size_t(i)], length),
             "%s, width %d: row %d, column %d: got %g, expected %g", name, width, int(r),
             int(i % width), wide(results->out[i]), want[size_t(i)]);
    }
  }
}

template <typename T>
void test_dtype() {
  const Launcher forward = [](const RowSweep& p) {
    return edge_sum_of<T>(RowOp::kEdgeSum, p, nullptr);
  };
  const Launcher backward = [](const RowSweep& p) {
    return edge_sum_of<T>(RowOp::kEdgeSumBackward, p, nullptr);
  };
  constexpr int kWide = 16 / sizeof(T);
  for (const int width : {1, 3 * kWide, 36 * kWide}) {
    check_sum<T>("sum", kMixed, width, {}, forward);
    check_backward<T>("backward", kMixed, width, {}, true, backward);
  }
  check_sum<T>("weighted mean", kChunky, 8 * kWide, {true, false, true}, forward);
  check_sum<T>("padded", kMixed, kWide, {true, true, false, {kWide, 0}}, forward);
  check_sum<T>("shifted", kMixed, kWide, {false, true, true, {1, 1}}, forward);
  check_sum<T>("special", kMixed, 2 * kWide, {true, true, false, {}, true}, forward);
  check_sum<T, int64_t>("int64", kMixed, 5, {true}, forward);
  check_sum<T>("nothing", kEmpty, kWide, {}, forward);
  check_backward<T>("weighted backward", kChunky, 8 * kWide, {true, false}, true, backward);
  check_backward<T>("backward of x", kMixed, 2 * kWide, {true}, false, backward);
  check_backward<T>("padded backward", kMixed, kWide, {true, true, false, {kWide, 0}}, true,
                    backward);
  check_backward<T>("shifted backward", kMixed, kWide, {false, true, false, {1, 1}}, true,
                    backward);
  check_backward<T, int64_t>("int64 backward", kMixed, 5, {true}, true, backward);
  check_backward<T>("backward of nothing", kEmpty, kWide, {}, true, backward);
}

}  // namespace

int main() {
  test_dtype<float>();
  test_dtype<double>();
  test_dtype<__half>();
  test_dtype<__nv_bfloat16>();
  return finish();
}
