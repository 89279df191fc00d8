// Products per edge, and softmax over the edges of a row, against loops in double.
#include "kernel_checks.h"
#include "large_space.h"
// The launchers themselves, with every dtype they dispatch to.
#include "cuda/edge_dot.cu"
#include "cuda/edge_softmax.cu"

namespace {

using namespace checks;
using namespace gsp::cuda;
using gsp::Dtype;

constexpr emu::Order kOrders[] = {emu::Order::kForward, emu::Order::kReverse,
                                  emu::Order::kShuffled};

// Writes with `act` in every order of threads; the results must have the same bits. Returns one.
template <typename T>
std::unique_ptr<Buffer<T>> in_every_order(const char* name, int64_t count,
                                          const std::function<cudaError_t(T*)>& act) {
  std::unique_ptr<Buffer<T>> first;
  for (const emu::Order order : kOrders) {
    auto out = std::make_unique<Buffer<T>>(size_t(count), 1, kUnwritten);
    emu::order = order;
    expect(act(out->data()) == cudaSuccess, "%s: the launch failed", name);
    if (first) expect(same_bits(*first, *out), "%s: other values in another order", name);
    if (!first) first = std::move(out);
  }
  return first;
}

// ---- Dot products
// -------------------------------------------------------------------------------------------

// Runs of 16 edges that begin in the middle of rows, at their start, and after empty rows.
const std::vector<int> kLengths{0, 0, 3, 13, 1, 0, 40, 0, 0, 16, 5, 25, 1, 0};

template <typename T, typename Index = int>
void check_dot(const char* name, EdgeOp op, int width, int heads, bool perm, int pad = 0,
               int offset = 0, const std::vector<int>& lengths = kLengths) {
  const int num_cols = 19;
  const Graph<Index> g(lengths, num_cols);
  const int64_t per_edge = heads > 0 ? heads : 1;
  constexpr double kFew[] = {-0.7, 0.3, 1.1, -0.0, 0.0};
  Matrix<T> a(g.rows, width, pad, size_t(offset)), b(num_cols, width, pad), best(g.rows, width);
  Matrix<T> weight(g.edges, per_edge), edge(g.edges, width, 2 * pad);
  Buffer<Index> arg(size_t(g.rows * width));
  a.fill([](int64_t, int64_t) { return uniform(); });
  edge.fill([](int64_t, int64_t) { return uniform(); });
  weight.fill([&](int64_t, int64_t) { return kFew[below(3)]; });
  b.fill([&](int64_t, int64_t) {
    return op == EdgeOp::kTie ? below(30) == 0 ? NAN : kFew[below(5)] : uniform();
  });
  // What an element of a row has been taken from: one of its edges.
  for (int64_t r = 0; r < g.rows; ++r) {
    const int length = int(g.rowptr[r + 1] - g.rowptr[r]);
    for (int f = 0; f < width; ++f) {
      const int64_t j = length == 0 ? -1 : int64_t(g.rowptr[r]) + below(length);
      arg[r * width + f] = j < 0 ? Index(-1) : perm ? g.perm[j] : Index(j);
      best.at(r, f) = narrow<T>(0);
      if (j >= 0) {
        best.at(r, f) =
            narrow<T>(widen<T>(weight.at(j, f / (width / per_edge))) * widen<T>(b.at(g.col[j], f)));
      }
    }
  }

  EdgeDot p{};
  p.dtype = kDtype<T>;
  p.wide_index = sizeof(Index) == 8;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  if (perm) p.perm = g.perm.data();
  if (op == EdgeOp::kTie) p.weight = weight.data.data();
  if (op == EdgeOp::kArg) p.picks = arg.data();
  if (op == EdgeOp::kTie) p.picks = best.data.data();
  if (op == EdgeOp::kMessage) {
    p.edge = edge.data.data();
    p.edge_stride = edge.stride;
  }
  p.a = a.data.data();
  p.b = b.data.data();
  p.a_stride = a.stride;
  p.b_stride = b.stride;
  p.rows = g.rows;
  p.edges = g.edges;
  p.width = width;
  p.heads = heads;
  const auto out = in_every_order<T>(name, g.edges * per_edge, [&](T* to) {
    p.out = to;
    return edge_dot(op, p, nullptr);
  });

  for (int64_t j = 0; j < g.edges; ++j) {
    const int64_t r = g.row_of(j), id = perm ? int64_t(g.perm[j]) : j;
    for (int64_t h = 0; h < per_edge; ++h) {
      double sum = 0, magnitude = 0;
      for (int64_t f = h * (width / per_edge); f < (h + 1) * (width / per_edge); ++f) {
        auto x = widen<T>(b.at(g.col[j], f));
        if (op == EdgeOp::kMessage) x = std::max(x + widen<T>(edge.at(id, f)), acc_t<T>(0));
        if (op == EdgeOp::kArg && arg[r * width + f] != id) continue;
        if (op == EdgeOp::kTie &&
            !gsp::same(round_to<T>(widen<T>(weight.at(j, h)) * x), widen<T>(best.at(r, f)))) {
          continue;
        }
        const double term = double(widen<T>(a.at(r, f))) * double(x);
        sum += term;
        magnitude += std::fabs(term);
      }
      const T got = (*out)[id * per_edge + h];
      expect(close(got, sum, magnitude, width),
             "%s, width %d: edge %d, head %d: got %g, expected %g", name, width, int(j), int(h),
             double(widen<T>(got)), sum);
    }
  }
}

void test_dot() {
  for (const EdgeOp op : {EdgeOp::kDot, EdgeOp::kArg, EdgeOp::kTie, EdgeOp::kMessage}) {
    const char* name = op == EdgeOp::kDot   ? "dot"
                       : op == EdgeOp::kArg ? "arg dot"
                       : op == EdgeOp::kTie ? "tie dot"
                                            : "message dot";
    check_dot<float>(name, op, 1, 0, true);
    check_dot<float>(name, op, 3, 3, true);
    check_dot<float>(name, op, 16, 0, false);
    check_dot<float>(name, op, 64, 2, true, 4);
    check_dot<float>(name, op, 33, 0, true, 2);
    check_dot<float>(name, op, 130, 5, true);
    check_dot<float>(name, op, 257, 0, true);
    check_dot<float, int64_t>(name, op, 8, 2, true, 1, 1);
    check_dot<__half>(name, op, 8, 0, true);
    check_dot<__half>(name, op, 100, 2, false);
    check_dot<__half>(name, op, 264, 3, true, 8);
    check_dot<__half>(name, op, 16, 0, true, 0, 1);  // shifted
    check_dot<double>(name, op, 16, 2, true);
    check_dot<__nv_bfloat16>(name, op, 24, 3, true);
  }
  check_dot<float>("dot of nothing", EdgeOp::kDot, 0, 0, true);
  check_dot<float>("no edges", EdgeOp::kDot, 8, 0, true, 0, 0, {0, 0});
  check_dot<float>("one row", EdgeOp::kDot, 8, 0, true, 0, 0, {37});
}

// ---- Softmax
// ------------------------------------------------------------------------------------------------

// Rows of a warp in one round and in several, more of them than a block has warps; with one head,
// one that the block takes (over 1024 edges), one that it just does not.
const std::vector<int> kSoftmaxLengths{1, 0, 31, 32, 33, 2, 70, 1030, 7, 0, 1024, 5, 64};

template <typename T, typename Index = int>
void check_softmax(const char* name, int heads, bool perm, const std::vector<int>& lengths) {
  const Graph<Index> g(lengths, 1);
  Buffer<T> logits(size_t(g.edges * heads), 1), grad(size_t(g.edges * heads));
  const auto at = [&](int64_t j, int64_t h) { return (perm ? int64_t(g.perm[j]) : j) * heads + h; };
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
      for (int h = 0; h < heads; ++h) {
        // Some masked edges; a row of nothing else, one with NaN and one with +inf.
        const double value = r == 2 || below(6) == 0                     ? -INFINITY
                             : r == 4 && j == g.rowptr[r] + 20           ? NAN
                             : r == 6 && h == 0 && j == g.rowptr[r] + 66 ? INFINITY
                                                                         : 20 * uniform() + 30;
        logits[at(j, h)] = narrow<T>(value);
        grad[at(j, h)] = narrow<T>(uniform());
      }
    }
  }
  EdgeSoftmax p{};
  p.dtype = kDtype<T>;
  p.wide_index = sizeof(Index) == 8;
  p.rowptr = g.rowptr.data();
  if (perm) p.perm = g.perm.data();
  p.rows = g.rows;
  p.heads = heads;
  p.in = logits.data();
  const auto softmax = in_every_order<T>(name, g.edges * heads, [&](T* to) {
    p.out = to;
    return edge_softmax(p, nullptr);
  });
  p.in = softmax->data();
  p.grad = grad.data();
  const auto gradient = in_every_order<T>(name, g.edges * heads, [&](T* to) {
    p.out = to;
    return edge_softmax(p, nullptr);
  });

  for (int64_t r = 0; r < g.rows; ++r) {
    const int64_t begin = g.rowptr[r], end = g.rowptr[r + 1];
    for (int h = 0; h < heads; ++h) {
      double top = -INFINITY, sum = 0, dot = 0, magnitude = 0;
      const auto value = [&](const Buffer<T>& of, int64_t j) {
        return double(widen<T>(of[at(j, h)]));
      };
      for (int64_t j = begin; j < end; ++j) {
        const double v = value(logits, j);
        if (v > top || std::isnan(v)) top = v;
        if (std::isnan(top)) break;
      }
      for (int64_t j = begin; j < end; ++j) {
        sum += std::exp(value(logits, j) - top);
        dot += value(*softmax, j) * value(grad, j);
        magnitude += std::fabs(value(*softmax, j) * value(grad, j));
      }
      for (int64_t j = begin; j < end; ++j) {
        // The accumulator rounds logit - top, which is up to 40, before it is an exponent.
        const double want = std::exp(value(logits, j) - top) / sum;
        expect(close((*softmax)[at(j, h)], want, want, end - begin + 40),
               "%s: row %d, head %d: got %g, expected %g", name, int(r), h, value(*softmax, j),
               want);
        const double p_j = value(*softmax, j), g_j = value(grad, j);
        expect(close((*gradient)[at(j, h)], p_j * (g_j - dot),
                     std::fabs(p_j) * (std::fabs(g_j) + magnitude), end - begin),
               "%s: gradient of row %d, head %d: got %g, expected %g", name, int(r), h,
               value(*gradient, j), p_j * (g_j - dot));
      }
    }
  }
}

void test_softmax() {
  check_softmax<float>("softmax", 1, true, kSoftmaxLengths);
  check_softmax<float>("softmax", 3, true, kSoftmaxLengths);
  check_softmax<float>("softmax", 4, false, {7, 256, 257, 0, 600, 1});  // to 256 edges for a warp
  check_softmax<float>("softmax", 40, true, {1, 40, 0, 2, 32, 33});
  check_softmax<float>("softmax", 2, false, {5, 0, 3});
  check_softmax<float, int64_t>("softmax", 2, true, {40, 3, 0, 1100});
  check_softmax<__half>("half softmax", 2, true, kSoftmaxLengths);
  check_softmax<__nv_bfloat16>("bfloat16 softmax", 1, true, {40, 3, 0, 1100});
  check_softmax<double>("double softmax", 1, true, {40, 3, 0, 1100});
}

// ---- Offsets beyond 2^31

void test_far_dots() {
  FarRow g;
  Space<float> out(int64_t(600'000'009) * g.kHeads);
  Space<int> arg((kFar + 1) * kWide);
  FarRows<float> edge(0, 1);
  EdgeDot p{};
  p.dtype = gsp::Dtype::kFloat32;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  p.perm = g.perm.data();
  p.a = g.a.data();
  p.b = g.b.data();
  p.out = out.data();
  p.a_stride = p.b_stride = p.width = kWide;
  p.rows = kFar + 1;
  p.edges = g.kEdges;
  p.heads = g.kHeads;
  for (int f = 0; f < kWide; ++f) arg[kFar * kWide + f] = g.perm[f % g.kEdges];
  for (const EdgeOp op : {EdgeOp::kDot, EdgeOp::kArg, EdgeOp::kTie}) {
    p.picks = op == EdgeOp::kArg ? static_cast<const void*>(arg.data()) : g.a.data();
    expect(edge_dot(op, p, nullptr) == cudaSuccess, "the launch failed");
    for (int j = 0; j < g.kEdges; ++j) {
      for (int h = 0; h < g.kHeads; ++h) {
        double want = 0;
        for (int f = h * 16; f < h * 16 + 16; ++f) {
          const double left = g.a.at(kFar, f), right = g.b.at(g.col[j], f);
          const bool taken = op == EdgeOp::kDot   ? true
                             : op == EdgeOp::kArg ? arg[kFar * kWide + f] == g.perm[j]
                                                  : left == right;
          want += taken ? left * right : 0;
        }
        const double got = out[int64_t(g.perm[j]) * g.kHeads + h];
        expect(got == want, "dot %d: edge %d, head %d: got %g, expected %g", int(op), j, h, got,
               want);
      }
    }
  }
  // Features of edges, 64 columns each.
  FarRows<float> far(kFar, 9);
  for (int j = 0; j < g.kEdges; ++j) g.perm[j] = int(kFar) + (7 * j + 1) % 9;
  p.edge = far.data();
  p.edge_stride = kWide;
  p.heads = 0;
  expect(edge_dot(EdgeOp::kMessage, p, nullptr) == cudaSuccess, "the launch failed");
  for (int j = 0; j < g.kEdges; ++j) {
    double want = 0;
    for (int f = 0; f < kWide; ++f) {
      want += g.a.at(kFar, f) * std::max(g.b.at(g.col[j], f) + far.at(g.perm[j], f), 0.0);
    }
    expect(out[g.perm[j]] == want, "messages: edge %d: got %g, expected %g", j,
           double(out[g.perm[j]]), want);
  }
}

void test_far_softmax() {
  FarRow g;
  const int64_t size = int64_t(600'000'009) * g.kHeads;
  Space<float> in(size), out(size), back(size);
  EdgeSoftmax p{};
  p.dtype = gsp::Dtype::kFloat32;
  Buffer<int> rowptr(2);
  rowptr[0] = 0;
  rowptr[1] = g.kEdges;
  p.rowptr = rowptr.data();
  p.perm = g.perm.data();
  p.in = in.data();
  p.out = out.data();
  p.rows = 1;
  p.heads = g.kHeads;
  const auto at = [&](int j, int h) { return int64_t(g.perm[j]) * g.kHeads + h; };
  for (int j = 0; j < g.kEdges; ++j)
    for (int h = 0; h < g.kHeads; ++h) in[at(j, h)] = float(far_value(j, h)) / 4;
  expect(edge_softmax(p, nullptr) == cudaSuccess, "the launch failed");
  p.in = out.data();
  p.grad = in.data();
  p.out = back.data();
  expect(edge_softmax(p, nullptr) == cudaSuccess, "the launch failed");
  for (int h = 0; h < g.kHeads; ++h) {
    double sum = 0, dot = 0;
    for (int j = 0; j < g.kEdges; ++j) sum += std::exp(double(in[at(j, h)]));
    for (int j = 0; j < g.kEdges; ++j)
      dot += std::exp(double(in[at(j, h)])) / sum * double(in[at(j, h)]);
    for (int j = 0; j < g.kEdges; ++j) {
      const double want = std::exp(double(in[at(j, h)])) / sum, got = out[at(j, h)];
      const double want_back = want * (double(in[at(j, h)]) - dot), got_back = back[at(j, h)];
      expect(std::fabs(got - want) < 1e-6 && std::fabs(got_back - want_back) < 1e-6,
             "softmax: edge %d, head %d: got %g and %g, expected %g and %g", j, h, got, got_back,
             want, want_back);
    }
  }
}

}  // namespace

int main() {
  test_dot();
  test_softmax();
  test_far_dots();
  test_far_softmax();
  return checks::finish();
}
