// From edge lists to CSR: the check of an edge list, comparisons, and grouping by counting.
#include <algorithm>

#include "kernel_checks.h"
// The launchers themselves.
#include "cuda/coo.cu"
#include "cuda/group.cuh"

namespace {

using namespace checks;
using namespace gsp::cuda;

constexpr emu::Order kOrders[] = {emu::Order::kForward, emu::Order::kReverse,
                                  emu::Order::kShuffled};

// ---- Checking and copying

// One direction of an edge list, with room for the CSR.
struct Direction {
  Direction(const int* key, const int* other, int64_t edges, int64_t rows)
      : rowptr(size_t(rows + 1), 1, kUnwritten), col{size_t(edges)}, perm{size_t(edges)} {
    p.key = key;
    p.other = other;
    p.edges = edges;
    p.rows = rows;
    p.rowptr = rowptr.data();
    p.col = col.data();
    p.perm = perm.data();
  }
  Grouping p{false};
  Buffer<int> rowptr, col, perm;

  void finish(const char* what) {
    expect(finish_grouping(p, nullptr) == cudaSuccess, "%s: a launch failed", what);
    expect(rowptr[p.rows] == p.edges, "%s of %d, begun: %d counted", what, int(p.edges),
           int(rowptr[p.rows]));
  }
  void check(const char* what) const {
    const auto *key = static_cast<const int*>(p.key), *other = static_cast<const int*>(p.other);
    for (int64_t r = 0; r < p.rows; ++r) {
      for (int i = rowptr[r]; i < rowptr[r + 1]; ++i) {
        expect(key[perm[i]] == r && (i == rowptr[r] || perm[i - 1] < perm[i]),
               "%s of %d, begun: place %d", what, int(p.edges), i);
        expect(col[i] == other[perm[i]], "%s of %d, begun: column %d", what, int(p.edges), i);
      }
    }
  }
};

// The same check with the grouping begun on the way, or with that of both directions: whatever the
// indices, nothing is written elsewhere.
void check_begun(CheckCoo p, bool both, const CooFacts& facts) {
  const auto *dst = static_cast<const int*>(p.own_dst), *src = static_cast<const int*>(p.own_src);
  Direction rows(dst, src, p.edges, p.num_dst), columns(src, dst, p.edges, p.num_src);
  const int64_t bytes = both ? counting_bytes(rows.p, columns.p) : counting_bytes(rows.p);
  Buffer<int64_t> scratch(size_t(bytes + 7) / 8, 1, kUnwritten);
  p.fact = scratch.data();
  p.grouping = &rows.p;
  p.transposed = both ? &columns.p : nullptr;
  expect(check_coo(p, nullptr) == cudaSuccess, "check_coo: a launch failed");
  if (both) columns.finish("the transpose");  // first, as an operator does
  const CooFacts found = read_fact(scratch[0]);
  expect(found.first_bad == facts.first_bad, "check_coo of %d, begun: first bad edge %d",
         int(p.edges), int(found.first_bad));
  rows.finish("check_coo");
  if (facts.first_bad >= 0) return;
  expect(found.sorted == facts.sorted, "check_coo of %d, begun: sorted is %d", int(p.edges),
         int(found.sorted));
  rows.check("check_coo");
  if (both) columns.check("the transpose");
}

template <typename Key, typename Index>
void check_list(int64_t edges, int64_t stride, std::vector<int64_t> bad, bool sorted,
                int64_t num_dst = 50, int64_t num_src = 30) {
  const auto size = size_t(edges == 0 ? 0 : (edges - 1) * stride + 1);
  Buffer<Key> dst(size), src(size);
  for (int64_t j = 0; j < edges; ++j) {
    dst[j * stride] = Key(j * num_dst / edges);
    src[j * stride] = Key(below(int(num_src)));
  }
  if (!sorted) std::swap(dst[(edges / 3) * stride], dst[(edges - 1) * stride]);
  for (size_t i = 0; i < bad.size(); ++i) {  // one above the range, one below it, ...
    src[bad[i] * stride] = i % 2 == 0 ? Key(num_src) : Key(-1);
    if (i == 2) dst[bad[i] * stride] = std::numeric_limits<Key>::max();
  }
  const int64_t first = bad.empty() ? -1 : *std::min_element(bad.begin(), bad.end());
  for (const emu::Order order : kOrders) {
    emu::order = order;
    Buffer<Index> own_dst(size_t(edges), 1, kUnwritten), own_src(size_t(edges), 1, kUnwritten);
    Buffer<int64_t> fact(1, 1, kUnwritten);
    CheckCoo p{sizeof(Key) == 8, sizeof(Index) == 8};
    p.dst = dst.data();
    p.src = src.data();
    p.dst_stride = p.src_stride = stride;
    p.edges = edges;
    p.num_dst = num_dst;
    p.num_src = num_src;
    p.own_dst = own_dst.data();
    p.own_src = own_src.data();
    p.fact = fact.data();
    Grouping grouping{sizeof(Index) == 8};
    grouping.edges = edges;
    grouping.rows = num_dst;
    expect(check_coo(p, nullptr) == cudaSuccess, "check_coo: the launch failed");
    const CooFacts facts = read_fact(fact[0]);
    expect(facts.first_bad == first, "check_coo of %d: first bad edge %d, expected %d", int(edges),
           int(facts.first_bad), int(first));
    for (const bool both : {false, true}) {
      if (can_count(grouping)) check_begun(p, both, facts);
    }
    if (first >= 0) continue;
    expect(facts.sorted == sorted, "check_coo of %d: sorted is %d, expected %d", int(edges),
           int(facts.sorted), int(sorted));
    bool same = true;
    for (int64_t j = 0; j < edges; ++j) {
      same = same && own_dst[j] == dst[j * stride] && own_src[j] == src[j * stride];
    }
    expect(same, "check_coo of %d: the copy differs", int(edges));
  }
}

void test_list() {
  check_list<int, int>(0, 1, {}, true);
  check_list<int, int>(1, 1, {}, true);
  check_list<int, int>(2, 1, {}, false);
  check_list<int, int64_t>(700, 1, {}, true);
  check_list<int, int>(700, 1, {699, 520}, true);
  check_list<int, int>(700, 2, {300, 0, 299}, false);
  check_list<int, int>(700, 2, {}, false);
  check_list<int64_t, int>(300, 1, {256}, false);
  check_list<int64_t, int64_t>(300, 2, {}, true);
  check_list<int64_t, int>(513, 1, {}, false);
  // Of the two directions one has many blocks of rows, the other a single one.
  check_list<int64_t, int>(900, 1, {}, true, 5000, 3);
  check_list<int64_t, int>(900, 1, {17}, false, 3, 5000);
  check_list<int, int>(900, 1, {}, false, 1024, 2048);
}

// ---- Comparing

template <typename A, typename B>
void check_compare(int64_t size, int64_t stride) {
  Buffer<A> a(size_t((size - 1) * stride + 1));
  Buffer<B> b{size_t(size)};
  for (int64_t j = 0; j < size; ++j) a[j * stride] = A(b[j] = B(below(1000)));
  Buffer<int64_t> fact(1);
  Compare p{sizeof(A) == 8, sizeof(B) == 8};
  p.a = a.data();
  p.b = b.data();
  p.a_stride = stride;
  p.size = size;
  p.fact = fact.data();
  fact[0] = -1;
  expect(compare(p, nullptr) == cudaSuccess && fact[0] == -1, "compare of %d: equal", int(size));
  for (const int64_t j : {int64_t(0), size / 2, size - 1}) {
    fact[0] = -1;
    b[j] ^= 1;
    expect(compare(p, nullptr) == cudaSuccess && fact[0] == 0, "compare of %d: %d differs",
           int(size), int(j));
    b[j] ^= 1;
  }
  if (sizeof(A) == 8 && sizeof(B) == 4) {  // the lower half agrees
    a[0] += A(int64_t(1) << 32);
    fact[0] = -1;
    expect(compare(p, nullptr) == cudaSuccess && fact[0] == 0, "compare: the upper half differs");
  }
}

void test_compare() {
  check_compare<int, int>(1, 1);
  check_compare<int64_t, int>(700, 2);
  check_compare<int64_t, int64_t>(256, 1);
  check_compare<int, int64_t>(300, 1);
}

// ---- Grouping

void check_grouping(const char* name, const std::vector<int>& keys, int64_t rows) {
  const auto edges = int64_t(keys.size());
  Buffer<int> key(keys.size()), other(keys.size());
  std::vector<int> expected(keys.size());
  for (int64_t j = 0; j < edges; ++j) {
    key[j] = keys[size_t(j)];
    other[j] = below(1 << 20);
    expected[size_t(j)] = int(j);
  }
  std::stable_sort(expected.begin(), expected.end(),
                   [&](int a, int b) { return keys[size_t(a)] < keys[size_t(b)]; });
  for (const emu::Order order : kOrders) {
    emu::order = order;
    Buffer<int> rowptr(size_t(rows + 1), 1, kUnwritten), again(size_t(rows + 1), 1, kUnwritten);
    Buffer<int> col(keys.size(), 1, kUnwritten), perm(keys.size(), 1, kUnwritten);
    Grouping p{false};
    p.key = key.data();
    p.other = other.data();
    p.edges = edges;
    p.rows = rows;
    p.rowptr = rowptr.data();
    p.col = col.data();
    p.perm = perm.data();
    expect(can_count(p), "%s: too large to be counted", name);
    p.scratch_bytes = counting_bytes(p);
    Buffer<char> scratch(size_t(p.scratch_bytes), 0, kUnwritten);
    p.scratch = scratch.data();
    expect(group_by_counting(p, nullptr) == cudaSuccess, "%s: a launch failed", name);
    bool stable = true, moved = true;
    Buffer<int> sorted(keys.size());
    for (int64_t j = 0; j < edges; ++j) {
      stable = stable && perm[j] == expected[size_t(j)];
      moved = moved && col[j] == other[expected[size_t(j)]];
      sorted[j] = keys[size_t(expected[size_t(j)])];
    }
    expect(stable, "%s: not a stable order", name);
    expect(moved, "%s: columns do not follow their edges", name);
    expect(find_rowptr(false, sorted.data(), edges, rows, again.data(), nullptr) == cudaSuccess,
           "%s: a launch failed", name);
    for (int64_t r = 0; r <= rows; ++r) {
      const auto begin = std::lower_bound(sorted.data(), sorted.data() + edges, int(r));
      const auto at = int(begin - sorted.data());
      expect(rowptr[r] == at && again[r] == at, "%s: row %d begins at %d and %d, expected %d", name,
             int(r), rowptr[r], again[r], at);
    }
  }
}

// What is done around the library's sort, for which the host's stands in.
template <typename Index>
void check_parts(const char* name, const std::vector<int>& keys, int64_t rows, int64_t part) {
  const auto edges = int64_t(keys.size());
  Buffer<Index> key(keys.size()), other(keys.size());
  std::vector<Index> expected(keys.size());
  for (int64_t j = 0; j < edges; ++j) {
    key[j] = Index(keys[size_t(j)]);
    other[j] = Index(below(1 << 20));
    expected[size_t(j)] = Index(j);
  }
  const auto by_key = [&](Index a, Index b) { return key[a] < key[b]; };
  std::stable_sort(expected.begin(), expected.end(), by_key);
  for (const emu::Order order : kOrders) {
    emu::order = order;
    Buffer<Index> rowptr{size_t(rows + 1)}, next{size_t(rows)}, shift(size_t(rows), 1, kUnwritten);
    Buffer<Index> col(keys.size(), 1, kUnwritten), perm(keys.size(), 1, kUnwritten);
    for (int64_t r = 0; r <= rows; ++r) rowptr[r] = 0;
    const cudaStream_t stream = nullptr;
    GSP_LAUNCH((count_rows<Index>), 3, stream, key.data(), edges, rowptr.data() + 1);
    for (int64_t r = 0; r < rows; ++r) {
      rowptr[r + 1] += rowptr[r];
      next[r] = rowptr[r];
    }
    for (int64_t first = 0; first < edges; first += part) {
      const auto size = Index(std::min(part, edges - first));
      const unsigned blocks = blocks_of(size);
      Buffer<Index> sorted{size_t(size)}, ids(size_t(size), 1, kUnwritten);
      GSP_LAUNCH((number<Index>), blocks, stream, size, ids.data());
      std::stable_sort(ids.data(), ids.data() + size, [&](Index a, Index b) {
        return by_key(Index(first) + a, Index(first) + b);
      });
      for (Index j = 0; j < size; ++j) sorted[j] = key[Index(first) + ids[j]];
      GSP_LAUNCH((find_shifts<Index>), blocks, stream, sorted.data(), size, next.data(),
                 shift.data());
      GSP_LAUNCH((place_edges<Index>), blocks, stream, sorted.data(), ids.data(), size,
                 Index(first), other.data(), shift.data(), next.data(), perm.data(), col.data());
    }
    bool stable = true, moved = true, ends = true;
    for (int64_t j = 0; j < edges; ++j) {
      stable = stable && perm[j] == expected[size_t(j)];
      moved = moved && col[j] == other[expected[size_t(j)]];
    }
    for (int64_t r = 0; r < rows; ++r) ends = ends && next[r] == rowptr[r + 1];
    expect(stable, "%s in parts: not a stable order", name);
    expect(moved, "%s in parts: columns do not follow their edges", name);
    expect(ends, "%s in parts: rows do not end where they should", name);
  }
}

std::vector<int> random_keys(size_t edges, int rows) {
  std::vector<int> keys(edges);
  for (int& key : keys) key = below(rows);
  return keys;
}

void test_parts() {
  check_parts<int>("one edge", {3}, 5, 1);
  check_parts<int>("edge by edge", random_keys(40, 3), 4, 1);
  check_parts<int>("few rows", random_keys(2000, 5), 5, 700);
  check_parts<int64_t>("short rows", random_keys(3000, 700), 900, 256);
  check_parts<int>("one row", std::vector<int>(1500, 2), 8, 257);
  check_parts<int64_t>("a single part", random_keys(300, 20), 20, 300);
}

void test_grouping() {
  check_grouping("one edge", {0}, 1);
  check_grouping("one edge of many rows", {4999}, 5000);
  check_grouping("few rows", random_keys(2000, 5), 5);
  check_grouping("short rows", random_keys(3000, 700), 700);
  check_grouping("empty rows", random_keys(500, 4000), 9000);
  for (const int64_t rows : {1023, 1024, 1025, 2048}) {
    check_grouping("rows that fill blocks", random_keys(1500, int(rows)), rows);
  }
  std::vector<int> keys =
      random_keys(6000, 40);  // rows above and below the limit, one of exactly it
  for (size_t j = 0; j < keys.size(); ++j) {
    if (j % 3 == 1) keys[j] = 17;
    if (j % 3 == 0) keys[j] = j < 3 * kLongRow ? 50 : 51;
  }
  check_grouping("long rows", keys, 60);
  check_grouping("one long row", std::vector<int>(5000, 3), 8);
  check_grouping(
      "a long row at the end",
      [] {
        std::vector<int> v = random_keys(3000, 7);
        for (size_t j = 1000; j < v.size(); ++j) v[j] = 7;
        return v;
      }(),
      8);
}

// ---- Factors of rows

template <typename Index, typename Scalar>
void check_row_scales(int64_t rows) {
  Buffer<Index> rowptr{size_t(rows + 1)};
  std::vector<Index> columns;
  for (int64_t r = 0; r < rows; ++r) {
    rowptr[r] = Index(columns.size());
    const int length = r == 5 ? 3000 : below(4) * below(30);
    for (int i = 0; i < length; ++i)
      columns.push_back(Index(i % 7 == r % 9 ? r : below(int(rows))));
  }
  rowptr[rows] = Index(columns.size());
  Buffer<Index> col(columns.size());
  std::copy(columns.begin(), columns.end(), col.data());
  for (const int kind : {0, 1, 2}) {  // inverse degrees; of graph convolutions without loops, with
    Buffer<Scalar> scale(size_t(rows), 1, kUnwritten), own(size_t(rows), 1, kUnwritten);
    RowScales p{sizeof(Index) == 8, sizeof(Scalar) == 8, kind == 0};
    p.rowptr = rowptr.data();
    p.col = kind == 0 ? nullptr : col.data();
    p.rows = rows;
    p.scale = scale.data();
    p.own = kind == 2 ? own.data() : nullptr;
    expect(row_scales(p, nullptr) == cudaSuccess, "row_scales: the launch failed");
    for (int64_t r = 0; r < rows; ++r) {
      const double degree = double(rowptr[r + 1] - rowptr[r]);
      double loops = 0;
      for (auto j = rowptr[r]; j < rowptr[r + 1]; ++j) loops += col[j] == r;
      const double counted = kind == 2 ? degree - loops + 1 : degree;
      const double expected = kind == 0     ? 1 / std::max(degree, 1.0)
                              : counted > 0 ? 1 / std::sqrt(counted)
                                            : 0;
      const double least = sizeof(Scalar) == 8 ? 1e-15 : 1e-7;
      expect(std::abs(scale[r] - expected) <= least, "row_scales %d: row %d", kind, int(r));
      if (kind != 2) continue;
      expect(std::abs(own[r] - expected * expected * (1 - loops)) <= 4 * least * (1 + loops),
             "row_scales: own of row %d", int(r));
      expect(loops != 1 || own[r] == 0, "row_scales: row %d has its loop", int(r));
    }
  }
}

void test_row_scales() {
  for (const emu::Order order : kOrders) {
    emu::order = order;
    check_row_scales<int, float>(300);
    check_row_scales<int, double>(9);
    check_row_scales<int64_t, float>(33);
    check_row_scales<int64_t, double>(65);
  }
  emu::order = emu::Order::kForward;
}

void test_limits() {
  Grouping p{false};
  p.edges = p.rows = kMaxCounted;
  expect(can_count(p), "the largest graph");
  p.edges = kMaxCounted + 1;
  expect(!can_count(p), "too many edges");
  p.edges = 1;
  p.rows = kMaxCounted + 1;
  expect(!can_count(p), "too many rows");
  p.rows = 0;
  expect(!can_count(p), "no rows");
  p.rows = 1;
  p.wide_index = true;
  expect(!can_count(p), "64-bit indices");
  p.wide_index = false;
  p.edges = 0;
  expect(!can_count(p), "no edges");
}

}  // namespace

int main() {
  test_list();
  test_compare();
  test_grouping();
  test_parts();
  test_row_scales();
  test_limits();
  return checks::finish();
}
