// GATv2's scores and their gradient against loops in double.
#include "kernel_checks.h"
#include "large_space.h"
// The launcher itself, with every dtype that it dispatches to.
#include "cuda/pair.cu"

namespace {

using namespace checks;
using namespace gsp::cuda;

constexpr double kSlope = 0.2;
constexpr emu::Order kOrders[] = {emu::Order::kForward, emu::Order::kReverse,
                                  emu::Order::kShuffled};

// Rows that begin and end within a run of 16 edges, at its ends, and beyond: within a block of runs
// and over several, the longest over whole blocks; many without edges, one after another too.
const std::vector<int> kLengths{0, 0,  3, 13, 1, 0,   40, 0, 0,  0, 0,
                                0, 16, 5, 25, 1, 700, 0,  2, 97, 0};

struct Shape {
  int heads, channels;
  int pad = 0, offset = 0;    // elements between rows, and before the first
  int64_t threads = 1 << 20;  // few: long runs
};

template <typename T, typename Index = int>
void check_pair(const char* name, const Shape& shape, bool perm,
                const std::vector<int>& lengths = kLengths) {
  const int num_cols = 19, heads = shape.heads, width = heads * shape.channels;
  const Graph<Index> g(lengths, num_cols);
  Matrix<T> a(g.rows, width, shape.pad, size_t(shape.offset)), b(num_cols, width, shape.pad);
  Matrix<T> att(heads, shape.channels), grad(g.edges, heads);
  for (Matrix<T>* m : {&a, &b, &att, &grad}) m->fill([](int64_t, int64_t) { return uniform(); });
  // What has no edges may hold anything.
  for (int64_t r = 0; r < g.rows; ++r) {
    for (int f = 0; f < width && g.rowptr[r] == g.rowptr[r + 1]; ++f) a.at(r, f) = narrow<T>(NAN);
  }
  const auto id_of = [&](int64_t j) { return perm ? int64_t(g.perm[j]) : j; };
  const auto value = [](const T& v) { return double(widen<T>(v)); };

  Pair p{};
  p.dtype = kDtype<T>;
  p.wide_index = sizeof(Index) == 8;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  if (perm) p.perm = g.perm.data();
  p.a = a.data.data();
  p.b = b.data.data();
  p.att = att.data.data();
  p.a_stride = a.stride;
  p.b_stride = b.stride;
  p.rows = g.rows;
  p.edges = g.edges;
  p.width = width;
  p.heads = heads;
  p.slope = kSlope;
  p.threads = shape.threads;
  std::unique_ptr<Buffer<T>> scores, of_a;
  std::unique_ptr<Buffer<acc_t<T>>> of_att;
  for (const emu::Order order : kOrders) {
    emu::order = order;
    auto out = std::make_unique<Buffer<T>>(size_t(g.edges * heads), 0, kUnwritten);
    p.gradient = false;
    p.grad = nullptr;
    p.out = out->data();
    expect(pair(p, nullptr) == cudaSuccess, "%s: the launch failed", name);
    if (scores) expect(same_bits(*scores, *out), "%s: other scores in another order", name);
    scores = std::move(out);

    out = std::make_unique<Buffer<T>>(size_t(g.rows * width), 0, kUnwritten);
    auto out_att = std::make_unique<Buffer<acc_t<T>>>(size_t(width), 0, kUnwritten);
    p.gradient = true;
    p.grad = grad.data.data();
    p.out = out->data();
    p.out_att = out_att->data();
    Buffer<unsigned char> scratch(size_t(pair_bytes(p)));  // NaN: a slot that no one wrote shows
    p.scratch = scratch.data();
    expect(pair(p, nullptr) == cudaSuccess, "%s: the launch of the gradient failed", name);
    if (of_a) expect(same_bits(*of_a, *out), "%s: other gradients in another order", name);
    if (of_att) expect(same_bits(*of_att, *out_att), "%s: other sums in another order", name);
    of_a = std::move(out);
    of_att = std::move(out_att);
  }

  for (int64_t j = 0; j < g.edges; ++j) {
    const int64_t r = g.row_of(j);
    for (int h = 0; h < heads; ++h) {
      double sum = 0, magnitude = 0;
      for (int f = h * shape.channels; f < (h + 1) * shape.channels; ++f) {
        const double x = value(a.at(r, f)) + value(b.at(g.col[j], f));
        const double factor = value(att.data[f]);
        sum += factor * (x > 0 ? x : kSlope * x);
        magnitude += std::fabs(factor) * (std::fabs(value(a.at(r, f))) + 1);
      }
      const T got = (*scores)[id_of(j) * heads + h];
      expect(close(got, sum, magnitude, shape.channels),
             "%s, %d x %d: edge %d, head %d: got %g, expected %g", name, heads, shape.channels,
             int(j), h, value(got), sum);
    }
  }
  for (int f = 0; f < width; ++f) {
    double total = 0, total_magnitude = 0;
    for (int64_t r = 0; r < g.rows; ++r) {
      double sum = 0, magnitude = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        // As the kernel decides it: in the accumulator.
        const auto x = widen<T>(a.at(r, f)) + widen<T>(b.at(g.col[j], f));
        const double w = value(grad.at(id_of(j), f / shape.channels));
        sum += x > 0 ? w : kSlope * w;
        magnitude += std::fabs(w);
      }
      const T got = (*of_a)[r * width + f];
      const double factor = value(att.data[f]);
      expect(close(got, factor * sum, factor * magnitude, g.edges),
             "%s, %d x %d: gradient of row %d, column %d: got %g, expected %g", name, heads,
             shape.channels, int(r), f, value(got), factor * sum);
      if (magnitude > 0) total += value(a.at(r, f)) * sum;
      if (magnitude > 0) total_magnitude += std::fabs(value(a.at(r, f))) * magnitude;
    }
    expect(close((*of_att)[f], total, total_magnitude, g.edges),
           "%s, %d x %d: sum of column %d: got %g, expected %g", name, heads, shape.channels, f,
           double((*of_att)[f]), total);
  }
}

void test_pair() {
  check_pair<float>("pair", {1, 1}, true);
  check_pair<float>("pair", {3, 5}, true);
  check_pair<float>("pair", {1, 4}, false);
  check_pair<float>("pair", {4, 8}, true);
  check_pair<float>("pair", {3, 12, 4}, true);
  check_pair<float>("pair", {4, 32}, false);
  check_pair<float>("pair of several passes", {6, 32, 4}, true);
  check_pair<float>("pair of long heads", {2, 132}, true);
  check_pair<float>("pair of long heads", {1, 47, 1}, true);
  check_pair<float>("shifted pair", {2, 8, 0, 1}, true);
  check_pair<float, int64_t>("wide pair", {2, 8, 1}, true);
  check_pair<float, int64_t>("wide pair", {3, 11}, false);
  check_pair<double>("double pair", {2, 6}, true);
  check_pair<double>("double pair", {1, 3, 1}, false);
  check_pair<double, int64_t>("wide double pair", {2, 3}, true);
  check_pair<__half>("half pair", {2, 8}, true);
  check_pair<__half>("half pair", {3, 7, 1}, true);
  check_pair<__nv_bfloat16>("bfloat16 pair", {5, 16, 8}, false);
  check_pair<__nv_bfloat16>("bfloat16 pair", {1, 33}, true);
  check_pair<float>("one row", {2, 4}, true, {37});
  check_pair<float>("one hub", {8, 16}, true, {1500});
  check_pair<float>("long runs", {4, 32, 0, 0, 1000}, true);
  check_pair<float>("long runs", {3, 5, 0, 0, 500}, false);
  check_pair<float>("a single run", {1, 2, 0, 0, 1}, true);
  check_pair<float>("whole runs", {4, 32}, false, {16, 112, 128, 0, 256, 64});
  check_pair<float>("no edges", {2, 4}, true, {0, 0, 0});
  check_pair<float>("no channels", {2, 0}, true, {3, 0});
}

// The first row of a run is found in steps of 32: every edge of graphs around these sizes.
template <typename Index>
__global__ void find_all(const Index* rowptr, int64_t rows, int64_t edges, Index* found,
                         Index* from_first) {
  for (int64_t j = 0; j < edges; ++j) {
    const Index row = find_row(rowptr, rows, j);
    if (threadIdx.x == 0) found[j] = row;
    if (threadIdx.x == 0) from_first[j] = find_row_from(rowptr, found[0], rows, j);
  }
}

void test_find_row() {
  for (const int rows : {1, 2, 31, 32, 33, 100, 1025}) {
    std::vector<int> lengths;
    for (int r = 0; r < rows; ++r) lengths.push_back(below(3) == 0 ? below(4) : 0);
    lengths[size_t(rows / 2)] = 1;
    const Graph<int> g(lengths, 3);
    Buffer<int> found(size_t(g.edges)), from_first(size_t(g.edges));
    emu::launch(find_all<int>, dim3(1), dim3(32), g.rowptr.data(), g.rows, g.edges, found.data(),
                from_first.data());
    for (int64_t j = 0; j < g.edges; ++j) {
      expect(found[j] == g.row_of(j), "of %d rows: edge %d: got %d, expected %d", rows, int(j),
             found[j], int(g.row_of(j)));
      expect(from_first[j] == found[j], "of %d rows: edge %d, from the first", rows, int(j));
    }
  }
}

// ---- Offsets beyond 2^31

void test_far_pairs() {
  FarRow g;
  Space<float> out(int64_t(600'000'009) * g.kHeads);
  FarRows<float> att(0, 1);
  Pair p{};
  p.dtype = gsp::Dtype::kFloat32;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  p.perm = g.perm.data();
  p.a = g.a.data();
  p.b = g.b.data();
  p.att = att.data();
  p.out = out.data();
  p.a_stride = p.b_stride = p.width = kWide;
  p.rows = kFar + 1;
  p.edges = g.kEdges;
  p.heads = g.kHeads;
  p.slope = 0.25;
  expect(pair(p, nullptr) == cudaSuccess, "the launch failed");
  const auto slope_of = [&](int j, int f) {
    return g.a.at(kFar, f) + g.b.at(g.col[j], f) > 0 ? 1 : 0.25;
  };
  Space<float> grad(int64_t(600'000'009) * g.kHeads), of_a((kFar + 1) * kWide);
  Buffer<float> of_att(kWide);
  for (int j = 0; j < g.kEdges; ++j) {
    for (int h = 0; h < g.kHeads; ++h) {
      double want = 0;
      for (int f = h * 16; f < h * 16 + 16; ++f) {
        want += att.at(0, f) * slope_of(j, f) * (g.a.at(kFar, f) + g.b.at(g.col[j], f));
      }
      const int64_t at = int64_t(g.perm[j]) * g.kHeads + h;
      expect(out[at] == want, "scores: edge %d, head %d: got %g, expected %g", j, h,
             double(out[at]), want);
      grad[at] = float(far_value(j, h));
    }
  }
  p.gradient = true;
  p.grad = grad.data();
  p.out = of_a.data();
  p.out_att = of_att.data();
  Buffer<int64_t> scratch(size_t(pair_bytes(p)) / 8 + 1);
  p.scratch = scratch.data();
  // Without clearing all rows first: they are zeros, and would take memory.
  expect(launch<float, int, 4>(p, nullptr) == cudaSuccess, "the launch failed");
  for (int f = 0; f < kWide; ++f) {
    double want = 0;
    for (int j = 0; j < g.kEdges; ++j) {
      want += far_value(j, f / 16) * slope_of(j, f);
    }
    want *= att.at(0, f);
    expect(of_a[kFar * kWide + f] == want, "gradient: column %d: got %g, expected %g", f,
           double(of_a[kFar * kWide + f]), want);
  }
}

}  // namespace

int main() {
  test_find_row();
  test_pair();
  test_far_pairs();
  return checks::finish();
}
