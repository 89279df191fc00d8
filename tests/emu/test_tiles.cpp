// Sums by tiles (tile_spmm.cuh), against sums in double.
#include <map>

#include "cuda/tile_spmm_launch.cuh"
#include "kernel_checks.h"
#include "large_space.h"

namespace {

using namespace checks;
using namespace gsp::cuda;

// What gnn_spmm_plugin/tiles.py makes of a graph, the slow way: rows in the order of `schedule`.
struct Format {
  int height, num_slots = 0;
  std::vector<int> ptr{0}, vectors, rows, target;
  std::vector<unsigned short> bits;
  std::vector<int4> merges;
  std::vector<int64_t> edge;  // position in the CSR of each value, -1 where there is none

  Format(const Graph<int>& g, int height_, size_t most, const std::vector<int>& schedule)
      : height(height_) {
    for (size_t first = 0; first < schedule.size(); first += size_t(height)) {
      // By column, and which of a row's edges to that column it is.
      std::map<std::pair<int, int>, std::vector<int64_t>> tile;
      for (size_t r = 0; r < size_t(height); ++r) {
        const int row = first + r < schedule.size() ? schedule[first + r] : -1;
        rows.push_back(row);
        std::map<int, int> seen;
        for (int64_t j = row < 0 ? 0 : g.rowptr[row]; j < (row < 0 ? 0 : g.rowptr[row + 1]); ++j) {
          auto& members = tile[{g.col[j], seen[g.col[j]]++}];
          members.resize(size_t(height), -1);
          members[r] = j;
        }
      }
      const size_t groups = (tile.size() + kGroup - 1) / kGroup, longest = most ? most : groups;
      const size_t pieces = groups > longest ? (groups + longest - 1) / longest : 1;
      if (pieces > 1) {
        merges.push_back(make_int4(int(first) / height, num_slots, num_slots + int(pieces), 0));
      }
      auto it = tile.begin();
      for (size_t i = 0; i < groups; ++i) {
        std::vector<int64_t> of(size_t(height) * kGroup, -1);
        std::vector<unsigned short> has(size_t(height), 0);
        int column = 0;
        for (size_t k = 0; k < kGroup; ++k) {
          if (it != tile.end()) {
            column = it->first.first;
            for (size_t r = 0; r < size_t(height); ++r) {
              if (it->second[r] < 0) continue;
              of[r * kGroup + k] = it->second[r];
              has[r] = static_cast<unsigned short>(has[r] | 1u << k);
            }
            ++it;
          }
          vectors.push_back(column);
        }
        edge.insert(edge.end(), of.begin(), of.end());
        bits.insert(bits.end(), has.begin(), has.end());
        if ((i + 1) % longest == 0 && i + 1 < groups) end_piece(pieces, first);
      }
      end_piece(pieces, first);
    }
  }

 private:
  void end_piece(size_t pieces, size_t first) {
    ptr.push_back(int(vectors.size()) / kGroup);
    target.push_back(pieces > 1 ? ~num_slots++ : int(first) / height);
  }
};

struct Case {
  int height = 8;
  int most = 0;  // groups of a piece; 0: no window is split
  int width = 16;
  bool shuffled = false;  // rows in another order than theirs
  bool weight = false;
  int passes = 1;
  bool mean = false, dst_scale = false;
  int pad = 0;  // vectors of 16 bytes between rows of x
  // What is added to a sum, and how that lies in memory.
  bool self = false, self_scale = false, by_row = false, bias = false, relu = false;
  int end_pad = 0, end_offset = 0;
  int num_cols = 50;
};

enum class Special { kNone, kNotFinite, kLarge };

// Part of a product that an operand loses: 16 bits are exact, tf32 has 11 bits, three passes twice
// that.
template <typename T>
double operand_rounding(int passes) {
  return sizeof(T) == 2 ? 0 : passes == 1 ? 0x1p-11 : 0x1p-21;
}

template <typename T, typename Out = T>
void check_tiles(const char* name, const std::vector<int>& lengths, Case with,
                 Special special = Special::kNone) {
  constexpr int kLane = Tile<T>::kColumns;
  const int width = with.width, height = with.height, num_cols = with.num_cols;
  const int x_width = (width + kLane - 1) / kLane * kLane;
  const Graph<int> g(lengths, num_cols);
  std::vector<int> schedule(lengths.size());
  for (size_t i = 0; i < schedule.size(); ++i) schedule[i] = int(i);
  if (with.shuffled) std::shuffle(schedule.begin(), schedule.end(), checks::random);
  const Format format(g, height, size_t(with.most), schedule);

  Matrix<T> x(num_cols, x_width, with.pad * kLane);
  x.fill([](int64_t, int64_t) { return uniform(); });
  if (special ==
      Special::kNotFinite) {  // which rows of the window that lack the column must not see
    x.at(3, width / 2) = narrow<T>(NAN);
    x.at(4, width - 1) = narrow<T>(-INFINITY);
    x.at(5, 0) = narrow<T>(INFINITY);
  } else if (special == Special::kLarge) {  // rounds to infinity where half its digits are kept
    for (int f = 0; f < width; ++f) x.at(7, f) = narrow<T>(acc_t<T>(3.4028234e38));
  }
  Buffer<T> weight(size_t(g.edges));
  for (int64_t j = 0; j < g.edges; ++j) weight[j] = narrow<T>(acc_t<T>(uniform() / 4));
  Buffer<T> values(with.weight ? format.edge.size() : 0);
  for (size_t i = 0; with.weight && i < format.edge.size(); ++i)  // elsewhere it is anything
    values[int64_t(i)] = format.edge[i] < 0 ? narrow<T>(NAN) : weight[format.edge[i]];
  Buffer<acc_t<T>> dst_scale(size_t(g.rows));
  for (int64_t r = 0; r < g.rows; ++r) dst_scale[r] = acc_t<T>(1.5 + uniform());

  Matrix<T> self(g.rows, width, with.end_pad, size_t(with.end_offset));
  self.fill([](int64_t, int64_t) { return uniform(); });
  Buffer<acc_t<T>> self_scale(with.by_row ? size_t(g.rows) : 1);
  for (int64_t r = 0; r < (with.by_row ? g.rows : 1); ++r)
    self_scale[r] = acc_t<T>(1.5 + uniform());
  Buffer<acc_t<T>> bias(size_t(width), size_t(with.end_offset));
  for (int f = 0; f < width; ++f) bias[f] = acc_t<T>(uniform());

  const auto ptr = buffer_of(format.ptr), target = buffer_of(format.target);
  const auto vectors = buffer_of(format.vectors), rows = buffer_of(format.rows);
  const auto bits = buffer_of(format.bits);
  const auto merges = buffer_of(format.merges);
  TileSpmm p{};
  p.dtype = kDtype<T>;
  p.out_dtype = kDtype<Out>;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  p.ptr = ptr->data();
  p.vectors = vectors->data();
  p.bits = bits->data();
  if (with.weight) p.values = values.data();
  // Where all is finite nothing is summed anew: with these, it would not go unnoticed.
  Buffer<T> wrong(size_t(g.edges));
  for (int64_t j = 0; j < g.edges; ++j) wrong[j] = narrow<T>(NAN);
  if (special == Special::kNone) {
    p.weight = wrong.data();
  } else if (with.weight) {
    p.weight = weight.data();
  }
  if (with.shuffled) p.window_rows = rows->data();
  if (format.num_slots > 0) p.target = target->data();
  p.merges = merges->data();
  p.num_merges = int64_t(format.merges.size());
  p.x = x.data.data();
  p.x_stride = x.stride;
  p.rows = g.rows;
  p.pieces = int64_t(format.ptr.size()) - 1;
  p.width = width;
  p.x_width = x_width;
  p.height = height;
  p.passes = with.passes;
  p.mean = with.mean;
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
    Buffer<float> scratch(size_t(format.num_slots) * size_t(height * width));
    p.out = first ? out.data() : again.data();
    p.scratch = scratch.data();
    emu::order = order;
    expect(tiles_of<T>(p, nullptr) == cudaSuccess, "%s: the launch failed", name);
    expect(first || same_bits(out, again), "%s, width %d: other values", name, width);
    first = false;
  }
  const double lost = (with.weight ? 2 : 1) * operand_rounding<T>(with.passes);
  for (int64_t r = 0; r < g.rows; ++r) {
    const int64_t length = int64_t(g.rowptr[r + 1]) - int64_t(g.rowptr[r]);
    double scale = with.mean ? 1.0 / double(std::max<int64_t>(length, 1)) : 1;
    if (with.dst_scale) scale *= double(dst_scale[r]);
    for (int64_t f = 0; f < width; ++f) {
      double sum = 0, magnitude = 0;
      for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
        double term = double(widen<T>(x.at(g.col[j], f)));
        if (with.weight) term *= double(widen<T>(weight[j]));
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
      const double value = double(widen<Out>(got));
      const double bound = lost * magnitude + 1.01 * kRounding<Out> * std::fabs(sum) +
                           2 * double(length + 4) * 0x1p-24 * magnitude;
      // Infinities end as they are, or as 0.
      const bool right = std::isfinite(magnitude) ? std::fabs(value - sum) <= bound
                         : std::isnan(sum)        ? std::isnan(value)
                                                  : value == sum;
      expect(
          right,
          "%s, height %d, width %d, passes %d: row %d of %d edges, column %d: got %.9g, expected "
          "%.9g",
          name, height, width, with.passes, int(r), int(length), int(f), value, sum);
    }
  }
}

// Empty rows and windows, rows of less than, just, and more than a group, columns that repeat in a
// row, rows that no window is full of.
const std::vector<int> kMixed{0, 1,  3, 4, 5, 0, 0, 0, 0,  0,  0, 0, 0,  0, 0,
                              0, 33, 2, 0, 9, 1, 7, 0, 16, 40, 3, 1, 17, 12};
// Windows of many groups.
const std::vector<int> kLong{70, 65, 90, 3, 80, 64, 0, 71, 66, 120, 2};

template <typename T>
void test_dtype(const char* name) {
  for (const int height : {8, 16}) {
    for (const int passes : {1, 3}) {
      if (passes == 3 && sizeof(T) == 2) continue;
      Case c;
      c.height = height;
      c.passes = passes;
      // Part of a lane, of a slab, a slab, and several.
      for (const int width : {1, 7, 32, 44, 72, 130}) {
        c.width = width;
        c.weight = width != 7 && width != 72;
        c.pad = width == 44 ? 1 : 0;
        check_tiles<T>(name, kMixed, c);
      }
      c.width = 40;
      c.weight = false;
      c.shuffled = true;
      check_tiles<T>(name, kMixed, c);
      c.most = 1;
      c.mean = c.dst_scale = true;
      check_tiles<T>(name, kLong, c);
      c.weight = true;
      c.width = 33;
      check_tiles<T>(name, kLong, c);
      c.most = 3;
      c.num_cols = 900;
      check_tiles<T>(name, {600, 3, 0, 500, 40, 0, 0, 20, 700}, c);
    }
  }
}

// What is not finite is seen by its own rows alone.
template <typename T>
void test_special(const char* name) {
  for (const int height : {8, 16}) {
    for (const int passes : {1, 3}) {
      if (passes == 3 && sizeof(T) == 2) continue;
      Case c;
      c.height = height;
      c.passes = passes;
      for (const bool weight : {false, true}) {
        c.weight = weight;
        c.most = 0;
        c.width = 24;
        check_tiles<T>(name, kMixed, c, Special::kNotFinite);
        c.most = 2;
        c.width = 37;
        check_tiles<T>(name, kLong, c, Special::kNotFinite);
      }
    }
  }
}

// Everything that is added at the end, of whole windows and of merged ones, in every alignment,
// stored as every type.
template <typename T, typename Out>
void test_end(const char* name) {
  for (const int height : {8, 16}) {
    for (const int width : {3, 34, 64}) {
      Case c;
      c.height = height;
      c.width = width;
      c.most = 2;
      c.passes = sizeof(T) == 4 ? 3 : 1;
      c.self = c.bias = c.relu = true;
      c.shuffled = width == 64;
      check_tiles<T, Out>(name, kMixed, c, Special::kNotFinite);
      c.self_scale = c.mean = c.weight = true;
      check_tiles<T, Out>(name, kMixed, c);
      c.by_row = c.dst_scale = true;
      c.end_pad = width == 34 ? 1 : 2;
      c.end_offset = width == 64 ? 2 : 0;
      check_tiles<T, Out>(name, kMixed, c);
    }
  }
}

// ---- The end of sums that a GEMM made

template <typename T>
void test_tile_end(const char* name) {
  for (const int width : {1, 6, 36, 64}) {
    const Graph<int> g(kMixed, 20);
    Matrix<T> x(20, width, 1);
    x.fill([](int64_t, int64_t) { return uniform(); });
    x.at(2, 0) = narrow<T>(INFINITY);
    Buffer<T> weight(size_t(g.edges));
    for (int64_t j = 0; j < g.edges; ++j) weight[j] = narrow<T>(acc_t<T>(0.25 * (1 + below(7))));
    Buffer<acc_t<T>> bias{size_t(width)};
    for (int f = 0; f < width; ++f) bias[f] = acc_t<T>(uniform());
    // As a GEMM has it: every row sees every column of the matrix, with a weight of 0.
    Buffer<float> sums(size_t(g.rows * width));
    Buffer<T> out(size_t(g.rows * width), 0, kUnwritten);
    std::vector<double> want(size_t(g.rows * width));
    for (int64_t r = 0; r < g.rows; ++r) {
      const double length = double(std::max(g.rowptr[r + 1] - g.rowptr[r], 1));
      for (int f = 0; f < width; ++f) {
        double sum = 0;
        bool sees = false;
        for (int64_t j = g.rowptr[r]; j < g.rowptr[r + 1]; ++j) {
          sum += double(widen<T>(weight[j])) * double(widen<T>(x.at(g.col[j], f)));
          sees = sees || g.col[j] == 2;
        }
        sums[r * width + f] = f == 0 && !sees ? NAN : float(sum);
        want[size_t(r * width + f)] = sum / length + double(bias[f]);
      }
    }
    TileSpmm p{};
    p.dtype = p.out_dtype = kDtype<T>;
    p.rowptr = g.rowptr.data();
    p.col = g.col.data();
    p.weight = weight.data();
    p.x = x.data.data();
    p.x_stride = x.stride;
    p.rows = g.rows;
    p.width = p.x_width = width;
    p.sums = sums.data();
    p.mean = true;
    p.bias = bias.data();
    p.out = out.data();
    expect(tile_end_of<T>(p, nullptr) == cudaSuccess, "%s: the launch failed", name);
    for (int64_t i = 0; i < g.rows * width; ++i) {
      expect(close(out[i], want[size_t(i)], 60, 60), "%s, width %d: sum %d: got %g, expected %g",
             name, width, int(i), double(widen<T>(out[i])), want[size_t(i)]);
    }
  }
}

// ---- Offsets beyond 2^31

void test_far_rows() {
  FarRows<float> x(kFar, 9);
  Buffer<int> ptr(2), vectors(16), rows(8), rowptr(1), col(1);
  Buffer<unsigned short> bits(8);
  Space<float> out((kFar + 2) * kWide);
  ptr[0] = 0;
  ptr[1] = 1;
  for (int v = 0; v < 16; ++v) vectors[v] = int(kFar) + std::min(2 * v, 6);
  for (int r = 0; r < 8; ++r) {
    rows[r] = r < 2 ? int(kFar) + 1 - r : -1;
    bits[r] = 0;
  }
  bits[0] = 0b0011;
  bits[1] = 0b0101;
  TileSpmm p{};
  p.dtype = p.out_dtype = gsp::Dtype::kFloat32;
  p.rowptr = rowptr.data();
  p.col = col.data();
  p.ptr = ptr.data();
  p.vectors = vectors.data();
  p.bits = bits.data();
  p.window_rows = rows.data();
  p.x = x.data();
  p.x_stride = p.width = p.x_width = kWide;
  p.rows = kFar + 2;
  p.pieces = 1;
  p.passes = 3;
  p.out = out.data();
  expect(tiles_of<float>(p, nullptr) == cudaSuccess, "the launch failed");
  for (int f = 0; f < kWide; ++f) {
    const double first = x.at(kFar, f) + x.at(kFar + 2, f);
    const double second = x.at(kFar, f) + x.at(kFar + 4, f);
    expect(std::fabs(out[(kFar + 1) * kWide + f] - first) <= 0x1p-20 * std::fabs(first) &&
               std::fabs(out[kFar * kWide + f] - second) <= 0x1p-20 * std::fabs(second),
           "tiles: column %d", f);
  }
}

}  // namespace

int main() {
  test_dtype<float>("float");
  test_dtype<__half>("half");
  test_dtype<__nv_bfloat16>("bfloat16");
  test_special<float>("float, special");
  test_special<__half>("half, special");
  test_special<__nv_bfloat16>("bfloat16, special");
  Case large;
  large.passes = 3;
  check_tiles<float>("large", kMixed, large, Special::kLarge);
  test_end<float, float>("end");
  test_end<float, __half>("end, to half");
  test_end<__half, __half>("end, half");
  test_end<__nv_bfloat16, float>("end, bfloat16 to float");
  test_tile_end<float>("tile_end");
  test_tile_end<__half>("tile_end, half");
  test_far_rows();
  return checks::finish();
}
