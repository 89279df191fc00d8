// Sums from staged sources (staged_spmm.cuh), against sums in double.
#include "cuda/staged_spmm_launch.cuh"
#include "kernel_checks.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

struct Case {
  int width = 32;
  int sources = 8;  // of a block
  bool weight = false;
  bool dst_scale = false, mean = false, self = false, by_row = false, bias = false, relu = false;
  int pad = 0, offset = 0;          // of x: elements between rows, and past a 16-byte boundary
  int end_pad = 0, end_offset = 0;  // of what is added at the end
  int multiprocessors = 5;
  int64_t room = 1 << 14;  // bytes of shared memory for sums
};

template <typename Out = float, typename T = float>
void check_staged(const char* name, const std::vector<int>& lengths, const Case& with,
                  bool special = false) {
  const int num_cols = 29, width = with.width,
            blocks = (num_cols + with.sources - 1) / with.sources;
  Graph<int> g(lengths, num_cols);
  const int rows = int(g.rows);
  for (int r = 0; r < rows; ++r) {
    int* col = g.col.data();
    for (int j = g.rowptr[r]; special && j < g.rowptr[r + 1]; ++j)
      if (r % 2 == 0 && col[j] >= 3 && col[j] <= 5) col[j] = 6;  // not of what is special
    std::sort(col + g.rowptr[r], col + g.rowptr[r + 1]);
  }
  // What gnn_spmm_plugin/schedule.py makes of it, the slow way.
  Buffer<int> stage(size_t(blocks + 2) * size_t(rows));
  for (int i = 0; i < rows; ++i) stage[i] = i;
  std::stable_sort(stage.data(), stage.data() + rows,
                   [&](int a, int b) { return lengths[size_t(a)] > lengths[size_t(b)]; });
  for (int b = 0; b <= blocks; ++b) {
    for (int i = 0; i < rows; ++i) {
      int j = g.rowptr[stage[i]];
      while (j < g.rowptr[stage[i] + 1] && g.col[j] < b * with.sources) ++j;
      stage[(b + 1) * rows + i] = j;
    }
  }

  Matrix<T> x(num_cols, width, with.pad, size_t(with.offset));
  x.fill([](int64_t, int64_t) { return uniform(); });
  if (special) {  // which a row without that column must not see
    x.at(3, width / 2) = narrow<T>(NAN);
    x.at(4, width - 1) = narrow<T>(-INFINITY);
    x.at(5, 0) = narrow<T>(INFINITY);
  }
  Buffer<T> weight(size_t(g.edges));
  Buffer<float> dst_scale(size_t(g.rows));
  for (int64_t j = 0; j < g.edges; ++j) weight[j] = narrow<T>(float(uniform()));
  for (int r = 0; r < rows; ++r) dst_scale[r] = float(1.5 + uniform());
  Matrix<T> self(rows, width, with.end_pad, size_t(with.end_offset));
  self.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<float> self_scale(with.by_row ? size_t(rows) : 1);
  for (int r = 0; r < (with.by_row ? rows : 1); ++r) self_scale[r] = float(1.5 + uniform());
  Buffer<float> bias(size_t(width), size_t(with.end_offset));
  for (int f = 0; f < width; ++f) bias[f] = float(uniform());

  StagedSpmm p{};
  p.dtype = kDtype<T>;
  p.out_dtype = kDtype<Out>;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  if (with.weight) p.weight = weight.data();
  p.x = x.data.data();
  p.x_stride = x.stride;
  p.rows = g.rows;
  p.cols = num_cols;
  p.width = width;
  p.mean = with.mean;
  if (with.dst_scale) p.dst_scale = dst_scale.data();
  if (with.self) p.self = self.data.data();
  p.self_stride = self.stride;
  if (with.self) p.self_scale = self_scale.data();
  p.self_scale_by_row = with.by_row;
  if (with.bias) p.bias = bias.data();
  p.relu = with.relu;
  p.stage = stage.data();
  p.blocks = blocks;
  p.sources = with.sources;
  p.shared_bytes = int(emu::kMaxSharedBytes);  // of the device; the case makes do with less
  p.staged = gsp::choose_staged(rows, width, blocks, with.sources, with.multiprocessors,
                                with.sources * 128 + with.room, sizeof(T));
  expect(p.staged.team > 0 && p.staged.shared_bytes <= with.sources * 128 + with.room,
         "%s: the geometry does not fit", name);

  Buffer<Out> out(size_t(g.rows * width), 0, kUnwritten);
  bool first = true;
  for (const auto order : {emu::Order::kForward, emu::Order::kReverse, emu::Order::kShuffled}) {
    Buffer<Out> again(size_t(g.rows * width), 0, kUnwritten);
    const size_t parts = p.staged.parts > 1 ? size_t(p.staged.parts) : 0;
    Buffer<float> scratch(parts * size_t(rows * p.staged.slabs * p.staged.slab));
    p.out = first ? out.data() : again.data();
    p.scratch = scratch.data();
    emu::order = order;
    expect((with.weight ? staged_of<T, true>(p, nullptr) : staged_of<T, false>(p, nullptr)) ==
               cudaSuccess,
           "%s: the launch failed", name);
    expect(first || same_bits(out, again), "%s, width %d: other values", name, width);
    first = false;
  }
  for (int r = 0; r < rows; ++r) {
    const int64_t length = g.rowptr[r + 1] - g.rowptr[r];
    double scale = with.mean ? 1.0 / double(std::max<int64_t>(length, 1)) : 1;
    if (with.dst_scale) scale *= double(dst_scale[r]);
    for (int f = 0; f < width; ++f) {
      double sum = 0, magnitude = 0;
      for (int j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        const double term =
            double(widen<T>(x.at(g.col[j], f))) * (with.weight ? double(widen<T>(weight[j])) : 1);
        sum += term;
        magnitude += std::fabs(term);
      }
      sum *= scale;
      magnitude *= scale;
      if (with.self) {
        const double term =
            double(self_scale[with.by_row ? r : 0]) * double(widen<T>(self.at(r, f)));
        sum += term;
        magnitude += std::fabs(term);
      }
      if (with.bias) {
        sum += double(bias[f]);
        magnitude += std::fabs(double(bias[f]));
      }
      if (with.relu && sum <= 0) sum = 0;
      const Out got = out[int64_t(r) * width + f];
      expect(close(got, sum, magnitude, length),
             "%s, width %d: row %d of %d edges, column %d: got %.9g, expected %.9g", name, width, r,
             int(length), f, double(widen<Out>(got)), sum);
    }
  }
}

// Empty rows, an odd number of rows, segments of none, one, just 16 and several rounds of edges.
const std::vector<int> kMixed{0, 1, 130, 4, 60, 0, 64, 17, 16, 2, 40, 38, 7, 0, 16, 1, 130, 6, 250};

// Both ways of sharing sources out: up to 128 columns each block of sources has a team of its own.
void test_widths() {
  for (const int width : {1, 4, 30, 32, 33, 100, 128, 132, 260}) {
    Case c;
    c.width = width;
    c.weight = width % 3 != 1;
    check_staged("blocks", kMixed, c, width % 2 == 0);
  }
  for (const int sources : {29, 15, 4}) {
    Case c;
    c.sources = sources;  // all at once; the last block shorter; one of a single source
    c.width = 40;
    c.weight = sources == 15;
    check_staged("sources", kMixed, c, true);
    c.width = 130;
    check_staged("sources", kMixed, c, true);
  }
}

// More shared memory than a kernel has unasked, for each of the kernels.
void test_much_memory() {
  for (const bool weight : {false, true}) {
    Case c;
    c.sources = 400;
    c.weight = weight;
    check_staged("much memory", kMixed, c);
  }
}

// Fewer and more multiprocessors than work; sums that fit only if rows are spread further.
void test_geometry() {
  for (const int multiprocessors : {1, 13, 40}) {
    Case c;
    c.multiprocessors = multiprocessors;
    c.width = 36;
    check_staged("split", kMixed, c);
    c.width = 160;
    check_staged("whole", kMixed, c);
  }
  Case c;
  c.width = 132;
  c.room = 256;  // two rows
  check_staged("little room", kMixed, c);
  check_staged("one row", {40}, c);
  check_staged("no edges", {0, 0, 0}, c);
  c.width = 8;
  c.room = 0;
  check_staged("no room", kMixed, c);
  const auto fits = [](int64_t width, int64_t room) {
    return gsp::choose_staged(19, width, 4, 8, 5, 8 * 128 + room, 4).team > 0;
  };
  expect(fits(128, 0) && !fits(128, -1) && !fits(129, 127) && fits(129, 128) && !fits(0, 1 << 14),
         "what fits");
}

template <typename Out>
void test_end(const char* name) {
  for (const int width : {34, 64, 136}) {
    Case c;
    c.width = width;
    c.self = c.bias = c.relu = true;
    check_staged<Out>(name, kMixed, c, true);
    c.weight = c.mean = c.dst_scale = c.by_row = true;
    check_staged<Out>(name, kMixed, c);
    c.end_pad = 2;
    c.end_offset = width == 64 ? 2 : 1;
    check_staged<Out>(name, kMixed, c);
  }
}

// Halves: twice the columns in a slab.
template <typename T>
void test_halves(const char* name) {
  for (const int width : {1, 8, 30, 64, 65, 128, 264}) {
    Case c;
    c.width = width;
    c.weight = width % 2 == 0;
    check_staged<T, T>(name, kMixed, c, true);
    c.sources = 15;
    c.mean = c.dst_scale = true;
    check_staged<float, T>(name, kMixed, c);
    c.self = c.bias = c.relu = true;
    c.pad = width == 64 ? 1 : 8;
    c.offset = width == 128 ? 2 : 0;
    check_staged<T, T>(name, kMixed, c);
  }
  Case c;
  c.width = 264;
  c.room = 512;  // two rows
  check_staged<T, T>(name, kMixed, c);
}

// Rows of x that lie apart, start off the boundary of a vector, or are all one.
void test_layouts() {
  Case c;
  for (const int width : {30, 132}) {
    c.width = width;
    c.offset = 0;
    c.pad = width == 30 ? 2 : 3;
    check_staged("apart", kMixed, c);
    c.pad = 4;
    c.offset = 1;
    check_staged("shifted", kMixed, c);
    c.pad = -width;
    check_staged("one row", kMixed, c);
  }
}

}  // namespace

int main() {
  test_halves<__half>("float16");
  test_halves<__nv_bfloat16>("bfloat16");
  test_widths();
  test_much_memory();
  test_geometry();
  test_end<float>("end");
  test_end<__half>("end, to half");
  test_layouts();
  return checks::finish();
}
