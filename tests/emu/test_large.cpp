// Row sweeps over arrays of more than 2^31 elements.
#include "large_space.h"
#include "row_sweep_checks.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

// Row kFar has four edges to sources at the end of x; the ids of edges are as large.
template <typename T>
struct Large {
  static constexpr int kEdges = 4;
  int64_t row = kFar;
  FarRows<T> x{kFar, 9};
  FarRows<T> edge{kFar, 9};
  Buffer<int> col{kEdges}, perm{kEdges};
  Buffer<int4> item{1};
  Buffer<T> weight{kEdges * 2};
  Space<T> out{(kFar + 1) * kWide};
  Space<int> arg{(kFar + 9) * kWide};
  RowSweep p{};

  Large() {
    for (int j = 0; j < kEdges; ++j) {
      col[j] = int(kFar) + (5 * j + 2) % 9;
      perm[j] = int(kFar) + (7 * j + 1) % 9;
      weight[2 * j] = narrow<T>(acc_t<T>(j % 3 - 1));
      weight[2 * j + 1] = narrow<T>(acc_t<T>(2 - j));
    }
    item[0] = make_int4(int(row), 0, kEdges, -1);
    p.dtype = p.out_dtype = kDtype<T>;
    p.col = col.data();
    p.x = x.data();
    p.x_stride = p.other_stride = p.edge_stride = p.own_stride = kWide;
    p.width = kWide;
    p.rows = kFar + 1;
    p.edges = kEdges;
    p.cols = kFar + 9;
    p.items = item.data();
    p.num_items = 1;
    p.bundle = 1;
    p.out = out.data();
    p.l2_bytes = 1 << 20;
  }

  // One geometry, and vectors of 16 bytes: where rows begin does not depend on it.
  template <template <typename, typename, int, int> class Op, typename Want>
  void run(const char* name, const Want& want) {
    const cudaError_t error = launch_items<Op, T, 16 / sizeof(T), 1>(p, {4, 1, 1}, nullptr);
    expect(error == cudaSuccess, "%s: the launch failed", name);
    for (int f = 0; f < kWide; ++f) {
      expect(wide(out[at(f)]) == want(f), "%s, %d bytes: column %d: got %g, expected %g", name,
             int(sizeof(T)), f, wide(out[at(f)]), want(f));
    }
  }
  int64_t at(int f) const { return row * kWide + f; }
  double of(int j, int f) { return x.at(col[j], f); }
};

template <typename T>
void test_rows() {
  Large<T> g;
  const auto sum = [&](auto term) {
    return [&g, term](int f) {
      double total = 0;
      for (int j = 0; j < g.kEdges; ++j) total += term(j, f);
      return total;
    };
  };
  g.template run<PlainSum>("sum", sum([&](int j, int f) { return g.of(j, f); }));
  g.p.weight = g.weight.data();
  g.p.heads = 2;
  const auto by_head = [&](int j, int f) {
    return wide(g.weight[2 * j + f / (kWide / 2)]) * g.of(j, f);
  };
  g.template run<HeadSum>("sum of two heads", sum(by_head));
  g.p.weight = nullptr;
  g.p.heads = 0;
  Space<acc_t<T>> scale(kFar + 9);
  for (int64_t i = kFar; i < kFar + 9; ++i) scale[i] = acc_t<T>(i % 2 + 1);
  g.p.src_scale = g.p.dst_scale = scale.data();
  FarRows<T> own(kFar, 1);
  g.p.self = own.data();
  g.p.self_stride = kWide;
  const auto scaled =
      sum([&](int j, int f) { return double(scale[g.col[j]] * scale[kFar]) * g.of(j, f); });
  g.template run<ColumnSum>("scales, and the row itself",
                            [&](int f) { return scaled(f) + own.at(kFar, f); });
  g.p.src_scale = g.p.dst_scale = g.p.self = nullptr;

  // Partial results of which the last is beyond 2^31 elements of scratch.
  Buffer<int4> pieces(3);
  pieces[0] = make_int4(int(kFar), 0, 3, int(kFar));
  pieces[1] = make_int4(int(kFar), 3, 4, int(kFar) + 1);
  pieces[2] = make_int4(int(kFar), int(kFar), int(kFar) + 2, 0);
  Space<acc_t<T>> scratch((kFar + 2) * kWide);
  Space<int> scratch_arg((kFar + 2) * kWide), rowptr(kFar + 2);
  rowptr[kFar + 1] = g.kEdges;
  RowSweep whole = g.p;
  g.p.rowptr = rowptr.data();
  g.p.items = pieces.data();
  g.p.num_items = 2;
  g.p.num_merges = 1;
  g.p.num_slots = int(kFar) + 2;
  g.p.scratch = scratch.data();
  g.p.scratch_arg = scratch_arg.data();
  g.template run<PlainSum>("pieces", sum([&](int j, int f) { return g.of(j, f); }));

  const auto largest = [&](int f) {
    double most = g.of(0, f);
    for (int j = 1; j < g.kEdges; ++j) most = std::max(most, g.of(j, f));
    return most;
  };
  const auto first_of_largest = [&](int f) {
    int j = 0;
    while (g.of(j, f) != largest(f)) ++j;
    return g.perm[j];
  };
  g.p.perm = whole.perm = g.perm.data();
  for (const bool in_pieces : {true, false}) {
    if (!in_pieces) g.p = whole;
    for (int f = 0; f < kWide; ++f) g.arg[g.at(f)] = -7;
    g.p.out_arg = g.arg.data();
    g.template run<AnyArgmax>("maximum", largest);
    for (int f = 0; f < kWide; ++f) {
      expect(g.arg[g.at(f)] == first_of_largest(f), "column %d: edge %d won", f, g.arg[g.at(f)]);
    }
  }
  g.p.out_arg = nullptr;

  // x as the gradient of results, each of whose elements some edge has won.
  for (int64_t c = kFar; c < kFar + 9; ++c)
    for (int f = 0; f < kWide; ++f) g.arg[c * kWide + f] = int(kFar) + int((c + f) % 9);
  g.p.arg = g.arg.data();
  g.template run<ArgBackwardOp>(
      "gradient of a maximum", sum([&](int j, int f) {
        return g.arg[int64_t(g.col[j]) * kWide + f] == g.perm[j] ? g.of(j, f) : 0;
      }));
  FarRows<T> features(kFar, 9);
  g.p.own = features.data();
  g.p.other = g.edge.data();
  g.template run<TieBackwardOp>("gradient of ties", sum([&](int j, int f) {
                                  return g.edge.at(g.col[j], f) == features.at(kFar, f) ? g.of(j, f)
                                                                                        : 0;
                                }));
  if constexpr (sizeof(T) == 4) {  // counts are stored as they are added up
    FarRows<T> best(kFar, 1);
    g.p.own = best.data();
    for (int f = 0; f < kWide; ++f) best[g.at(f)] = T(largest(f));
    g.template run<TieCountOp>("ties",
                               sum([&](int j, int f) { return double(g.of(j, f) == largest(f)); }));
    g.p.own = features.data();
  }

  const auto message = [&](int j, int f, double other) { return other + g.edge.at(g.perm[j], f); };
  g.p.edge = g.edge.data();
  g.template run<EdgeSumOp>("messages with features", sum([&](int j, int f) {
                              return std::max(message(j, f, g.of(j, f)), 0.0);
                            }));
  Space<T> out_edge((kFar + 9) * kWide);
  g.p.out_edge = out_edge.data();
  const auto back = [&](int j, int f) {
    return message(j, f, features.at(kFar, f)) > 0 ? g.of(j, f) : 0;
  };
  g.template run<EdgeSumOfBoth>("their gradient", sum(back));
  for (int j = 0; j < g.kEdges; ++j)
    for (int f = 0; f < kWide; ++f)
      expect(wide(out_edge[int64_t(g.perm[j]) * kWide + f]) == back(j, f), "edge %d, column %d", j,
             f);
}

// Rows that are taken in order, in bundles and by the kernel that needs no plan.
void test_near_rows() {
  FarRows<float> x(kFar, 9);
  Buffer<int> rowptr(5), col(6);
  Buffer<float> out(4 * kWide);
  const int begins[] = {0, 2, 2, 5, 6};
  std::copy(begins, begins + 5, rowptr.data());
  for (int j = 0; j < 6; ++j) col[j] = int(kFar) + (4 * j + 3) % 9;
  RowSweep p{};
  p.dtype = p.out_dtype = gsp::Dtype::kFloat32;
  p.rowptr = rowptr.data();
  p.col = col.data();
  p.x = x.data();
  p.x_stride = p.width = kWide;
  p.rows = 4;
  p.edges = 6;
  p.cols = kFar + 9;
  p.l2_bytes = 1 << 20;
  p.out = out.data();
  p.chunk = p.longest = 3;
  for (const int bundle : {1, 2, 0}) {
    p.bundle = std::max(bundle, 1);
    p.long_row = bundle == 0 ? 8 : 0;
    const cudaError_t error = bundle == 0 ? launch_rows<PlainSum, float, int, 4>(p, nullptr)
                              : bundle == 1
                                  ? launch_items<PlainSum, float, 4, 1>(p, {4, 1, 1}, nullptr)
                                  : launch_stream<PlainSum, float, 4>(p, nullptr);
    expect(error == cudaSuccess, "bundles of %d: the launch failed", bundle);
    for (int r = 0; r < 4; ++r) {
      for (int f = 0; f < kWide; ++f) {
        double want = 0;
        for (int j = rowptr[r]; j < rowptr[r + 1]; ++j) want += x.at(col[j], f);
        expect(out[r * kWide + f] == want, "bundles of %d: row %d, column %d: %g", bundle, r, f,
               double(out[r * kWide + f]));
      }
    }
  }
}

template <typename T>
__global__ void finish_one(Epilogue<T> e, uint64_t length, acc_t<T> sum) {
  acc_t<T> v[1] = {sum};
  finish_sum<1>(e, 0, length, 0, v);
}

// The mean of a row of more edges than 32 bits can count.
template <typename T>
void test_mean() {
  T out{};
  SumEnd p{};
  p.dtype = p.out_dtype = kDtype<T>;
  p.width = 1;
  p.mean = true;
  p.out = &out;
  const uint64_t length = (uint64_t(1) << 32) + (uint64_t(1) << 30);
  emu::launch(finish_one<T>, dim3(1), dim3(1), epilogue_of<T>(p), length, acc_t<T>(length) / 2);
  expect(wide(out) == 0.5, "mean of 2^32 + 2^30 edges: got %g, expected 0.5", wide(out));
}

}  // namespace

int main() {
  test_rows<float>();
  test_near_rows();
  test_mean<float>();
  test_mean<double>();
  return checks::finish();
}
