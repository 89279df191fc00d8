// Sums over PCSR (pcsr_spmm.cuh), against sums in double.
#include "cuda/pcsr_spmm_launch.cuh"
#include "kernel_checks.h"
#include "large_space.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

// What gnn_spmm_plugin/pcsr.py makes of a graph, the slow way: rows in the order of `schedule`.
struct Format {
  int height, num_slots = 0;
  std::vector<int> ptr{0}, target;  // of pieces
  std::vector<int4> merges;
  std::vector<unsigned> col;
  std::vector<int64_t> edge;  // position in the CSR of each value, -1 where there is none

  template <typename Index>
  Format(const Graph<Index>& g, int height_, int granularity, const std::vector<int>& schedule)
      : height(height_) {
    for (size_t first = 0; first < schedule.size(); first += size_t(height)) {
      int rows[2] = {-1, -1};
      struct Vector {
        int64_t col, edge[2];
      };
      std::vector<Vector> vectors;
      for (int r = 0; r < height && first + size_t(r) < schedule.size(); ++r) {
        rows[r] = schedule[first + size_t(r)];
        for (int64_t j = g.rowptr[rows[r]]; j < g.rowptr[rows[r] + 1]; ++j) {
          Vector* free = nullptr;  // that has this column, and no edge of this row
          for (Vector& v : vectors)
            if (free == nullptr && r > 0 && v.col == g.col[j] && v.edge[r] < 0) free = &v;
          if (free == nullptr) {
            vectors.push_back({int64_t(g.col[j]), {-1, -1}});
            free = &vectors.back();
          }
          free->edge[r] = j;
        }
      }
      const size_t length = vectors.size();
      const size_t most = granularity > 0 ? size_t(granularity) : std::max<size_t>(length, 1);
      const size_t pieces = std::max<size_t>((length + most - 1) / most, 1);
      if (pieces > 1) {
        merges.push_back(make_int4(rows[0], rows[1], num_slots, num_slots + int(pieces)));
      }
      for (size_t i = 0; i < pieces; ++i) {
        target.push_back(pieces > 1 ? ~num_slots++ : rows[0]);
        if (height == 2) target.push_back(pieces > 1 ? -1 : rows[1]);
        for (size_t v = i * most; v < std::min((i + 1) * most, length); ++v) {
          unsigned bits = 0;
          for (int r = 0; r < height; ++r) {
            bits |= unsigned(vectors[v].edge[r] >= 0) << r;
            edge.push_back(vectors[v].edge[r]);
          }
          col.push_back(unsigned(vectors[v].col) << height | bits);
        }
        while (col.size() % kPcsrFour != 0) {
          col.push_back(unsigned(below(int(g.num_cols))) << height);
          edge.insert(edge.end(), size_t(height), -1);
        }
        ptr.push_back(int(col.size()) / kPcsrFour);
      }
    }
  }
};

struct Case {
  int height = 1;
  int granularity = 0;  // 0: no panel is split
  int width = 16;
  bool shuffled = false;  // rows in another order than theirs
  bool weight = false;
  int heads = 0;
  bool src_scale = false, dst_scale = false, mean = false;
  int warps = 4, fold = 1;
  int pad = 0, offset = 0;  // of x: elements between rows, and past a 16-byte boundary
  // What is added to a sum, and how that lies in memory.
  bool self = false, self_scale = false, by_row = false, bias = false, relu = false;
  int end_pad = 0, end_offset = 0;
};

template <typename T, typename Index = int, typename Out = T>
void check_pcsr(const char* name, const std::vector<int>& lengths, Case with,
                bool special = false) {
  const int num_cols = 29, width = with.width, height = with.height;
  const Graph<Index> g(lengths, num_cols);
  std::vector<int> schedule(lengths.size());
  for (size_t i = 0; i < schedule.size(); ++i) schedule[i] = int(i);
  if (with.shuffled) std::shuffle(schedule.begin(), schedule.end(), checks::random);
  const Format format(g, height, with.granularity, schedule);

  Matrix<T> x(num_cols, width, with.pad, size_t(with.offset));
  x.fill([](int64_t, int64_t) { return uniform(); });
  if (special) {  // which a row that lacks the column must not see, though its panel has it
    x.at(3, width / 2) = narrow<T>(NAN);
    x.at(4, width - 1) = narrow<T>(-INFINITY);
    x.at(5, 0) = narrow<T>(INFINITY);
  }
  const int heads = std::max(with.heads, 1);
  Matrix<T> weight(g.edges, heads);
  weight.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<T> laid_out(with.weight ? format.edge.size() * size_t(heads) : 0);
  for (size_t i = 0; with.weight && i < format.edge.size(); ++i) {
    for (int h = 0; h < heads; ++h)  // where there is no edge, the weight is anything
      laid_out[int64_t(i) * heads + h] =
          format.edge[i] < 0 ? narrow<T>(NAN) : weight.at(format.edge[i], h);
  }
  Buffer<acc_t<T>> src_scale(num_cols), dst_scale(size_t(g.rows));
  for (int i = 0; i < num_cols; ++i) src_scale[i] = acc_t<T>(uniform());
  for (int64_t r = 0; r < g.rows; ++r) dst_scale[r] = acc_t<T>(1.5 + uniform());

  Matrix<T> self(g.rows, width, with.end_pad, size_t(with.end_offset));
  self.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<acc_t<T>> self_scale(with.by_row ? size_t(g.rows) : 1);
  for (int64_t r = 0; r < (with.by_row ? g.rows : 1); ++r)
    self_scale[r] = acc_t<T>(1.5 + uniform());
  Buffer<acc_t<T>> bias(size_t(width), size_t(with.end_offset));
  for (int f = 0; f < width; ++f) bias[f] = acc_t<T>(uniform());

  const auto ptr = buffer_of(format.ptr), target = buffer_of(format.target);
  const auto col = buffer_of(format.col);
  const auto merges = buffer_of(format.merges);
  PcsrSpmm p{};
  p.dtype = kDtype<T>;
  p.out_dtype = kDtype<Out>;
  p.wide_rowptr = sizeof(Index) == 8;
  p.rowptr = g.rowptr.data();
  p.ptr = ptr->data();
  p.col = col->data();
  if (with.shuffled || format.num_slots > 0) p.target = target->data();
  p.merges = merges->data();
  p.num_merges = int64_t(format.merges.size());
  p.x = x.data.data();
  p.x_stride = x.stride;
  p.rows = g.rows;
  p.pieces = int64_t(format.ptr.size()) - 1;
  p.vectors = int64_t(format.col.size());
  p.width = width;
  p.heads = with.heads;
  p.mean = with.mean;
  p.warps = with.warps;
  p.fold = with.fold;
  p.height = height;
  if (with.weight) p.weight = laid_out.data();
  if (with.src_scale) p.src_scale = src_scale.data();
  if (with.dst_scale) p.dst_scale = dst_scale.data();
  if (with.self) p.self = self.data.data();
  p.self_stride = self.stride;
  if (with.self_scale) p.self_scale = self_scale.data();
  p.self_scale_by_row = with.by_row;
  if (with.bias) p.bias = bias.data();
  p.relu = with.relu;

  Buffer<Out> out(size_t(g.rows * width), 0, kUnwritten);
  bool first = true;
  for (const auto order : {emu::Order::kForward, emu::Order::kReverse, emu::Order::kShuffled}) {
    Buffer<Out> again(size_t(g.rows * width), 0, kUnwritten);
    Buffer<acc_t<T>> scratch(size_t(format.num_slots) * size_t(height * width));
    p.out = first ? out.data() : again.data();
    p.scratch = scratch.data();
    emu::order = order;
    expect(pcsr_of<T>(p, nullptr) == cudaSuccess, "%s: the launch failed", name);
    expect(first || same_bits(out, again), "%s, width %d: other values", name, width);
    first = false;
  }
  for (int64_t r = 0; r < g.rows; ++r) {
    const int64_t length = int64_t(g.rowptr[r + 1]) - int64_t(g.rowptr[r]);
    double scale = with.mean ? 1.0 / double(std::max<int64_t>(length, 1)) : 1;
    if (with.dst_scale) scale *= double(dst_scale[r]);
    for (int64_t f = 0; f < width; ++f) {
      double sum = 0, magnitude = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        double term = double(widen<T>(x.at(g.col[j], f)));
        if (with.weight) term *= double(widen<T>(weight.at(j, f / (width / heads))));
        if (with.src_scale) term *= double(src_scale[g.col[j]]);
        sum += term;
        magnitude += std::fabs(term);
      }
      sum *= scale;
      magnitude *= scale;
      if (with.self) {
        const double factor = with.self_scale ? double(self_scale[with.by_row ? r : 0]) : 1;
        sum += factor * double(widen<T>(self.at(r, f)));
        magnitude += std::fabs(factor * double(widen<T>(self.at(r, f))));
      }
      if (with.bias) {
        sum += double(bias[f]);
        magnitude += std::fabs(double(bias[f]));
      }
      if (with.relu && sum <= 0) sum = 0;
      const Out got = out[r * width + f];
      expect(close(got, sum, magnitude, length),
             "%s, V %d, width %d: row %d of %d edges, column %d: got %.9g, expected %.9g", name,
             height, width, int(r), int(length), int(f), double(widen<Out>(got)), sum);
    }
  }
}

// Empty rows and panels, rows of less than, just, and more than a four, columns that repeat in a
// row, an odd number of rows.
const std::vector<int> kMixed{0, 1, 3, 4, 5, 0, 0, 0, 9, 2, 40, 38, 7, 0, 16, 1, 130, 6, 12};
// Pieces that several groups of lanes share.
const std::vector<int> kLong{70, 65, 90, 3, 80, 64, 0, 71, 66};
const std::vector<int> kNothing{0, 0, 0};

void test_float() {
  for (const int height : {1, 2}) {
    Case c;
    c.height = height;
    // Every width of vectors, one fold and several, one tile of columns and several.
    for (const int width : {1, 3, 8, 33, 64, 100, 129, 132, 260, 300}) {
      for (const int fold : {1, 2, 4}) {
        c.width = width;
        c.fold = fold;
        c.weight = fold != 2;
        check_pcsr<float>("whole", kMixed, c, width == 100);
      }
    }
    c = {height};
    c.granularity = 32;
    c.width = 40;
    check_pcsr<float>("split", kMixed, c);
    c.weight = c.mean = true;
    check_pcsr<float>("split", kMixed, c, true);
    c.shuffled = c.dst_scale = true;
    c.fold = 2;
    check_pcsr<float>("split, shuffled", kMixed, c);
    c.granularity = 4;  // so many pieces that a merge takes several rounds
    c.width = 33;
    check_pcsr<float>("split finely", {600, 3, 700, 550}, c);
    c = {height, 0, 48};
    c.shuffled = true;
    check_pcsr<float>("shuffled", kMixed, c, true);
    c.src_scale = c.dst_scale = c.mean = true;
    check_pcsr<float>("scaled", kMixed, c);
    c.weight = true;
    check_pcsr<float>("scaled and weighted", kMixed, c, true);
    c.heads = 4;
    check_pcsr<float>("heads", kMixed, c, true);
    c.src_scale = false;
    c.heads = 16;  // of 3 columns
    c.granularity = 8;
    check_pcsr<float>("heads", kMixed, c);
    // Blocks of every size; lanes that share a piece.
    for (const int warps : {1, 2, 4, 8}) {
      c = {height, 32, 4};
      c.warps = warps;
      c.weight = true;
      check_pcsr<float>("groups", kLong, c);
      c.width = 16;
      c.granularity = 0;
      check_pcsr<float>("groups", kLong, c, true);
    }
    // Rows that lie apart, start off the boundary of a vector, or are all one.
    c = {height, 32, 64};
    c.pad = 3;
    check_pcsr<float>("apart", kMixed, c);
    c.pad = 4;
    c.offset = 1;
    check_pcsr<float>("shifted", kMixed, c);
    c.pad = -64;
    c.offset = 0;
    check_pcsr<float>("one row", kMixed, c);
    check_pcsr<float>("no edges", kNothing, {height, 32, 20});
    check_pcsr<float, int64_t>("wide rowptr", kMixed,
                               {height, 32, 20, true, true, 0, false, false, true});
  }
}

// Everything that is added at the end, of whole panels and of merged ones, in every alignment,
// stored as every type.
template <typename T, typename Out>
void test_end(const char* name) {
  for (const int height : {1, 2}) {
    for (const int width : {3, 34, 64, 264}) {
      Case c{height, 16, width};
      c.self = c.bias = c.relu = true;
      c.shuffled = width == 64;
      check_pcsr<T, int, Out>(name, kMixed, c, true);
      c.self_scale = c.mean = c.weight = true;
      check_pcsr<T, int, Out>(name, kMixed, c);
      c.weight = false;
      c.by_row = c.src_scale = c.dst_scale = true;
      c.fold = 2;
      check_pcsr<T, int, Out>(name, kMixed, c);
      c.end_pad = width == 34 ? 1 : 2;
      c.end_offset = width == 64 ? 2 : width == 264 ? 1 : 0;
      check_pcsr<T, int, Out>(name, kMixed, c);
    }
    check_pcsr<T, int, Out>(name, kMixed, {height, 16, 64});
  }
}

// The other dtypes: what is theirs are vectors, conversions and rounding.
template <typename T>
void test_other(const char* name) {
  for (const int height : {1, 2}) {
    for (const int width : {1, 2, 33, 50, 64, 264}) {
      for (const int fold : {1, 2}) {
        Case c{height, 32, width};
        c.fold = fold;
        c.weight = fold == 1 || width > 64;
        c.mean = width == 33;
        c.src_scale = !c.weight && width == 50;
        check_pcsr<T>(name, kMixed, c, width == 64);
      }
    }
    Case c{height, 32, 64};
    c.pad = 2;
    c.weight = c.shuffled = true;
    check_pcsr<T>(name, kMixed, c);
    c.heads = 4;
    c.offset = 1;
    c.src_scale = c.dst_scale = true;
    check_pcsr<T>(name, kLong, c);
    c.offset = c.pad = 0;
    check_pcsr<T>(name, kLong, c);
  }
}

// ---- Offsets beyond 2^31

void test_far_rows() {
  // One panel of two rows, and one vector for each column; rows are named by `target`.
  FarRows<float> x(kFar, 9);
  Buffer<int> ptr(2), target(2);
  Buffer<unsigned> col(4);
  Space<float> out((kFar + 2) * kWide);
  ptr[0] = 0;
  ptr[1] = 1;
  target[0] = int(kFar) + 1;
  target[1] = int(kFar);
  const unsigned rows_of[] = {3, 1, 2, 0};  // bit 0: the first row
  for (int v = 0; v < 4; ++v) col[v] = unsigned(kFar + 2 * v) << 2 | rows_of[v];
  PcsrSpmm p{};
  p.dtype = p.out_dtype = gsp::Dtype::kFloat32;
  p.ptr = ptr.data();
  p.col = col.data();
  p.target = target.data();
  p.x = x.data();
  p.x_stride = p.width = kWide;
  p.rows = kFar + 2;
  p.pieces = 1;
  p.vectors = 4;
  p.height = 2;
  p.out = out.data();
  expect(pcsr_of<float>(p, nullptr) == cudaSuccess, "the launch failed");
  for (int f = 0; f < kWide; ++f) {
    const double first = x.at(kFar, f) + x.at(kFar + 2, f);
    const double second = x.at(kFar, f) + x.at(kFar + 4, f);
    expect(out[(kFar + 1) * kWide + f] == first && out[kFar * kWide + f] == second,
           "pcsr: column %d", f);
  }
}

}  // namespace

int main() {
  test_float();
  test_other<double>("double");
  test_other<__half>("half");
  test_other<__nv_bfloat16>("bfloat16");
  test_end<float, float>("end");
  test_end<float, __half>("end, to half");
  test_end<double, double>("end, double");
  test_end<__half, __half>("end, half");
  test_end<__nv_bfloat16, float>("end, bfloat16 to float");
  test_far_rows();
  return checks::finish();
}
