// Sums and means of row_sweep.cuh, against sums in double.
#include "row_sweep_checks.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

struct Factors {
  bool weight = false;
  int heads = 0;
  bool src_scale = false, dst_scale = false, mean = false;
};

// What is added to a sum, and what becomes of it.
enum class Self { kNone, kPlain, kOne, kByRow };
struct End {
  Self self = Self::kNone;
  bool bias = false, relu = false;
  Layout layout = {};  // of both
};

template <typename T, typename Index = int, typename Out = T>
void check_sum(const char* name, const Shape& shape, int width, Factors with, Layout layout,
               const Launcher& launcher, bool special = false, End end = {}) {
  const int num_cols = 29;
  const Graph<Index> g(shape.lengths, num_cols);
  Matrix<T> x(num_cols, width, layout.pad, size_t(layout.offset));
  x.fill([](int64_t, int64_t) { return uniform(); });
  if (special) {
    x.at(3, width / 2) = narrow<T>(NAN);
    x.at(4, width - 1) = narrow<T>(-INFINITY);
    x.at(5, 0) = narrow<T>(INFINITY);
  }
  Weights<T, Index> weights(g, with.heads);
  weights.data.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<acc_t<T>> src_scale(num_cols), dst_scale(size_t(g.rows));
  for (int i = 0; i < num_cols; ++i) src_scale[i] = acc_t<T>(uniform());
  for (int64_t r = 0; r < g.rows; ++r) dst_scale[r] = acc_t<T>(1.5 + uniform());
  Matrix<T> self(g.rows, width, end.layout.pad, size_t(end.layout.offset));
  self.fill([](int64_t, int64_t) { return uniform(); });
  const bool by_row = end.self == Self::kByRow;
  Buffer<acc_t<T>> self_scale(by_row ? size_t(g.rows) : 1);
  for (int64_t r = 0; r < (by_row ? g.rows : 1); ++r) self_scale[r] = acc_t<T>(1.5 + uniform());
  Buffer<acc_t<T>> bias(size_t(width), size_t(end.layout.offset));
  for (int f = 0; f < width; ++f) bias[f] = acc_t<T>(uniform());

  RowSweep p{};
  p.x = x.data.data();
  p.x_stride = x.stride;
  p.width = width;
  p.heads = with.heads;
  p.mean = with.mean;
  if (with.weight) p.weight = weights.data.data.data();
  if (with.src_scale) p.src_scale = src_scale.data();
  if (with.dst_scale) p.dst_scale = dst_scale.data();
  if (end.self != Self::kNone) {
    p.self = self.data.data();
    p.self_stride = self.stride;
    p.self_scale = end.self == Self::kPlain ? nullptr : self_scale.data();
    p.self_scale_by_row = by_row;
  }
  if (end.bias) p.bias = bias.data();
  p.relu = end.relu;
  const auto all = sweep<T, Index, Out>(name, p, false, g, shape, launcher);

  for (int64_t r = 0; r < g.rows; ++r) {
    const int64_t length = int64_t(g.rowptr[r + 1]) - int64_t(g.rowptr[r]);
    double scale = with.mean ? 1.0 / double(std::max<int64_t>(length, 1)) : 1;
    if (with.dst_scale) scale *= double(dst_scale[r]);
    for (int64_t f = 0; f < width; ++f) {
      double sum = 0, magnitude = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        double term = double(widen<T>(x.at(g.col[j], f)));
        if (with.weight) term *= double(weights.of(j, f, width));
        if (with.src_scale) term *= double(src_scale[g.col[j]]);
        sum += term;
        magnitude += std::fabs(term);
      }
      sum *= scale;
      magnitude *= scale;
      if (end.self != Self::kNone) {
        const double factor = end.self == Self::kPlain ? 1 : double(self_scale[by_row ? r : 0]);
        sum += factor * double(widen<T>(self.at(r, f)));
        magnitude += std::fabs(factor * double(widen<T>(self.at(r, f))));
      }
      if (end.bias) {
        sum += double(bias[f]);
        magnitude += std::fabs(double(bias[f]));
      }
      if (end.relu && sum <= 0) sum = 0;
      for (size_t i = 0; i < all.size(); ++i) {
        const Out got = all[i]->out[r * width + f];
        expect(close(got, sum, magnitude, length),
               "%s, width %d, %d heads, run %d: row %d of %d edges, column %d: got %.9g, expected "
               "%.9g",
               name, width, with.heads, int(i), int(r), int(length), int(f),
               double(widen<Out>(got)), sum);
      }
    }
  }
}

constexpr Factors kNone{}, kScalar{true}, kColumn{false, 0, true}, kBoth{true, 0, true};

// float: everything that sum_of can choose.
void test_float() {
  const Launcher run = [](const RowSweep& p) { return sum_of<float>(p, nullptr); };
  // Vectors of 1, 2 and 4, of one fold and two, of one tile of columns and several.
  check_sum<float>("none", kMixed, 1, kNone, {}, run);
  check_sum<float>("none", kMixed, 100, kNone, {}, run, true);
  check_sum<float>("none", kMixed, 257, kNone, {}, run);
  check_sum<float>("none", kChunky, 130, kNone, {}, run);
  check_sum<float>("scalar", kMixed, 3, kScalar, {}, run);
  check_sum<float>("scalar", kMixed, 64, kScalar, {}, run);
  check_sum<float>("scalar", kChunky, 260, {true, 1}, {}, run, true);
  check_sum<float>("column", kMixed, 16, kColumn, {}, run, true);
  check_sum<float>("column", kChunky, 130, kColumn, {}, run);
  check_sum<float>("both", kMixed, 33, kBoth, {}, run);
  check_sum<float>("both", kMixed, 8, kBoth, {}, run);
  check_sum<float>("heads", kMixed, 8, {true, 2}, {}, run);
  check_sum<float>("heads", kMixed, 33, {true, 3}, {}, run);
  check_sum<float>("heads", kMixed, 64, {true, 4, true}, {}, run);
  check_sum<float>("heads", kMixed, 100, {true, 50}, {}, run);
  check_sum<float>("heads", kChunky, 264, {true, 3, true}, {}, run);
  // What happens to a sum in the end.
  check_sum<float>("mean", kMixed, 16, {false, 0, false, false, true}, {}, run);
  check_sum<float>("mean, scaled", kMixed, 33, {true, 0, false, true, true}, {}, run);
  check_sum<float>("scaled", kMixed, 100, {false, 0, true, true}, {}, run);
  // Rows that lie apart, and start where only shorter vectors may.
  check_sum<float>("apart", kMixed, 64, kNone, {4, 0}, run);
  check_sum<float>("apart", kMixed, 64, kScalar, {2, 0}, run);
  check_sum<float>("apart", kMixed, 64, kColumn, {3, 0}, run);
  check_sum<float>("shifted", kMixed, 64, kNone, {0, 2}, run);
  check_sum<float>("shifted", kMixed, 64, kScalar, {4, 1}, run);
  check_sum<float>("one row", kMixed, 16, kScalar, {-16, 0}, run);  // expanded, stride 0
  // Several groups of lanes to a row.
  check_sum<float>("2 groups", kTwoGroups, 16, kScalar, {}, run);
  check_sum<float>("2 groups", kTwoGroups, 64, kNone, {}, run);
  check_sum<float>("4 groups", kFourGroups, 8, {true, 2}, {}, run);
  check_sum<float>("4 groups", kFourGroups, 3, kNone, {}, run);
  check_sum<float>("32 groups", kManyGroups, 1, kBoth, {}, run);
  check_sum<float>("no edges", kEmpty, 16, {true, 0, true, true, true}, {}, run);
  // int64 indices
  check_sum<float, int64_t>("wide index", kMixed, 33, kBoth, {}, run);
  check_sum<float, int64_t>("wide index", kChunky, 8, {true, 2}, {3, 1}, run);
}

// The other dtypes: what is theirs are vectors, conversions and rounding.
void test_other_dtypes() {
  const Launcher half = [](const RowSweep& p) {
    return choose<ScalarSum, __half, true>(p, nullptr);
  };
  for (const int width : {1, 8, 33, 100, 264}) {
    check_sum<__half>("half", kMixed, width, kScalar, {}, half, width == 100);
  }
  check_sum<__half>("half", kChunky, 16, kScalar, {8, 0}, half);
  check_sum<__half>("half, apart", kMixed, 64, kScalar, {2, 0}, half);
  check_sum<__half>("half, shifted", kMixed, 64, kScalar, {0, 1}, half);
  check_sum<__half>("half, mean", kTwoGroups, 64, {true, 0, false, true, true}, {}, half);
  check_sum<__half>("half, heads", kMixed, 264, {true, 3, true}, {}, [](const RowSweep& p) {
    return launch_vectors<HeadSum, __half, 8, true>(p, nullptr);
  });
  check_sum<__nv_bfloat16>("bfloat16", kMixed, 16, kNone, {}, [](const RowSweep& p) {
    return launch_vectors<PlainSum, __nv_bfloat16, 8, true>(p, nullptr);
  });
  check_sum<double>("double", kMixed, 100, kBoth, {}, [](const RowSweep& p) {
    return launch_vectors<ScalarColumnSum, double, 2, true>(p, nullptr);
  });
}

// Everything that is added at the end, in every alignment, stored as every type.
void test_epilogue() {
  const Launcher run = [](const RowSweep& p) { return sum_of<float>(p, nullptr); };
  const Factors both{false, 0, true, true}, mean{false, 0, false, false, true};
  check_sum<float>("self", kMixed, 64, kNone, {}, run, true, {Self::kPlain});
  check_sum<float>("self, bias", kMixed, 33, kScalar, {}, run, true, {Self::kOne, true});
  check_sum<float>("GCN", kMixed, 16, both, {}, run, false, {Self::kByRow, true});
  check_sum<float>("GCN", kChunky, 260, both, {}, run, true, {Self::kByRow, true, true});
  check_sum<float>("bias", kTwoGroups, 66, mean, {}, run, true, {Self::kNone, true});
  check_sum<float>("relu", kManyGroups, 3, kNone, {}, run, true, {Self::kNone, false, true});
  check_sum<float>("all", kChunky, 8, {true, 2, true, true, true}, {}, run, false,
                   {Self::kByRow, true, true});
  check_sum<float>("no edges", kEmpty, 16, both, {}, run, false, {Self::kByRow, true, true});
  check_sum<float, int64_t>("wide index", kMixed, 33, both, {}, run, false,
                            {Self::kByRow, true, true});
  for (const Layout layout :
       {Layout{4, 0}, Layout{2, 0}, Layout{1, 0}, Layout{0, 2}, Layout{3, 1}}) {
    check_sum<float>("layout", kMixed, 64, kNone, {}, run, false,
                     {Self::kOne, true, false, layout});
    check_sum<float>("layout", kMixed, 100, both, {}, run, false,
                     {Self::kByRow, true, true, layout});
  }
  check_sum<float>("one row", kMixed, 16, kNone, {}, run, false,
                   {Self::kPlain, true, false, {-16, 0}});  // expanded, stride 0
  check_sum<float, int, __half>("to half", kMixed, 64, both, {}, run, true, {Self::kByRow, true});
  check_sum<float, int, __nv_bfloat16>("to bfloat16", kMixed, 33, kScalar, {}, run, true, {});
}

void test_epilogue_of_other_dtypes() {
  const Launcher half = [](const RowSweep& p) {
    return choose<ColumnSum, __half, true>(p, nullptr);
  };
  const Factors both{false, 0, true, true};
  for (const int width : {8, 33, 66, 264}) {
    check_sum<__half>("half", kMixed, width, both, {}, half, true, {Self::kByRow, true, true});
    check_sum<__half, int, float>("half to float", kMixed, width, both, {}, half, true,
                                  {Self::kByRow, true});
  }
  check_sum<__half, int, float>("half, layout", kMixed, 64, both, {}, half, false,
                                {Self::kOne, true, false, {2, 0}});
  check_sum<__half, int, __nv_bfloat16>("half to bfloat16", kMixed, 64, both, {}, half, false,
                                        {Self::kOne, true, true, {0, 1}});
  check_sum<__nv_bfloat16, int, float>("bfloat16 to float", kMixed, 16, {}, {},
                                       [](const RowSweep& p) {
                                         return launch_vectors<PlainSum, __nv_bfloat16, 8, true>(
                                             p, nullptr);
                                       },
                                       false, {Self::kOne, true, true});
  check_sum<double>(
      "double", kMixed, 100, both, {},
      [](const RowSweep& p) { return launch_vectors<ColumnSum, double, 2, true>(p, nullptr); },
      true, {Self::kByRow, true, true});
}

}  // namespace

int main() {
  test_float();
  test_other_dtypes();
  test_epilogue();
  test_epilogue_of_other_dtypes();
  return checks::finish();
}
