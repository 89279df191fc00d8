// What the tests of the kernels share: exactly sized buffers, small graphs, comparisons.
#pragma once

#include "cuda_emu.h"
// After it, since device code names nothing of CUDA itself.
#include "cuda/launch.h"
#include "cuda/vec.cuh"

namespace checks {

inline int failures = 0;

[[gnu::format(printf, 2, 3)]] inline void expect(bool ok, const char* format, ...) {
  if (ok) return;
  if (++failures > 20) std::exit(1);
  va_list args;
  va_start(args, format);
  std::vprintf(format, args);
  va_end(args);
  std::printf("\n");
  std::fflush(stdout);
}

inline std::minstd_rand random{7};

inline int below(int n) { return int(random() % unsigned(n)); }
// In [-1, 1), with digits enough for a sum of floats to depend on the order of its terms.
inline double uniform() { return double(below(1 << 30)) / (1 << 29) - 1; }

// `count` elements up to the very end of an allocation, `offset` elements past a 16-byte boundary.
// ASan sees an access past the end; a write before the start is noticed in the end.
template <typename T>
class Buffer {
 public:
  explicit Buffer(size_t count, size_t offset = 0, unsigned char fill = 0xff)
      : before_(16 + offset * sizeof(T)), count_(count) {
    base_ = static_cast<unsigned char*>(
        ::operator new(before_ + count * sizeof(T), std::align_val_t(16)));
    std::memset(base_, fill, before_ + count * sizeof(T));
    std::memset(base_, kGuard, before_);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() {
    bool intact = true;
    for (size_t i = 0; i < before_; ++i) intact = intact && base_[i] == kGuard;
    expect(intact, "something was written before the start of a buffer");
    ::operator delete(base_, std::align_val_t(16));
  }
  T* data() { return reinterpret_cast<T*>(base_ + before_); }
  const T* data() const { return reinterpret_cast<const T*>(base_ + before_); }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  size_t bytes() const { return count_ * sizeof(T); }

 private:
  static constexpr unsigned char kGuard = 0xa5;
  size_t before_, count_;
  unsigned char* base_;
};

template <typename T>
std::unique_ptr<Buffer<T>> buffer_of(const std::vector<T>& values) {
  auto buffer = std::make_unique<Buffer<T>>(values.size());
  std::copy(values.begin(), values.end(), buffer->data());
  return buffer;
}

// What outputs hold beforehand: no result by accident, and no NaN.
constexpr unsigned char kUnwritten = 0x5b;

// Rows that lie `stride` elements apart; NaN between them.
template <typename T>
struct Matrix {
  int64_t rows, width, stride;
  Buffer<T> data;

  Matrix(int64_t rows_, int64_t width_, int64_t pad = 0, size_t offset = 0)
      : rows(rows_),
        width(width_),
        stride(width_ + pad),
        data(size_t(rows_ == 0 ? 0 : (rows_ - 1) * stride + width_), offset) {}
  T& at(int64_t row, int64_t column) { return data[row * stride + column]; }
  void fill(const std::function<double(int64_t row, int64_t column)>& value) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t f = 0; f < width; ++f)
        at(r, f) = gsp::cuda::narrow<T>(gsp::cuda::acc_t<T>(value(r, f)));
  }
};

// Rows of the given lengths over `num_cols` columns; the caller's order is a random one.
template <typename Index>
struct Graph {
  int64_t rows, edges, num_cols;
  Buffer<Index> rowptr, col, perm;

  Graph(const std::vector<int>& lengths, int num_cols_)
      : rows(int64_t(lengths.size())),
        edges(total(lengths)),
        num_cols(num_cols_),
        rowptr(lengths.size() + 1),
        col(size_t(edges)),
        perm(size_t(edges)) {
    rowptr[0] = 0;
    for (int64_t r = 0; r < rows; ++r) rowptr[r + 1] = rowptr[r] + Index(lengths[size_t(r)]);
    for (int64_t j = 0; j < edges; ++j) {
      col[j] = Index(below(num_cols_));
      perm[j] = Index(j);
    }
    for (int64_t j = edges - 1; j > 0; --j) std::swap(perm[j], perm[below(int(j) + 1)]);
  }
  // Position of any one edge of this column, or -1.
  int64_t any_edge_of(int64_t column) const {
    int64_t found = -1;
    for (int64_t j = 0, seen = 0; j < edges; ++j)
      if (col[j] == column && below(int(++seen)) == 0) found = j;
    return found;
  }
  int64_t row_of(int64_t j) const {
    int64_t r = 0;
    while (rowptr[r + 1] <= j) ++r;
    return r;
  }

 private:
  static int64_t total(const std::vector<int>& lengths) {
    int64_t sum = 0;
    for (const int length : lengths) sum += length;
    return sum;
  }
};

// What a warm plan lists: each row, or its pieces, in an order of no meaning.
struct Items {
  std::unique_ptr<Buffer<int4>> list;
  int num_items = 0, num_merges = 0, num_slots = 0;

  template <typename Index>
  Items(const Graph<Index>& g, int64_t chunk) {
    std::vector<int4> pieces, merges;
    for (int64_t r = 0; r < g.rows; ++r) {
      const int begin = int(g.rowptr[r]), end = int(g.rowptr[r + 1]);
      const bool split = end - begin > chunk;
      const int first_slot = num_slots;
      int from = begin;
      do {
        const int to = std::min(from + int(chunk), end);
        pieces.push_back(make_int4(int(r), from, to, split ? num_slots++ : -1));
        from = to;
      } while (from < end);
      if (split) merges.push_back(make_int4(int(r), first_slot, num_slots, 0));
    }
    num_items = int(pieces.size());
    num_merges = int(merges.size());
    for (int i = num_items - 1; i > 0; --i)
      std::swap(pieces[size_t(i)], pieces[size_t(below(i + 1))]);
    std::stable_partition(pieces.begin(), pieces.end(), [](const int4& p) { return p.w >= 0; });
    pieces.insert(pieces.end(), merges.begin(), merges.end());
    list = std::make_unique<Buffer<int4>>(pieces.size());
    std::copy(pieces.begin(), pieces.end(), list->data());
  }
};

template <typename T>
constexpr gsp::Dtype kDtype = gsp::Dtype::kFloat32;
template <>
constexpr gsp::Dtype kDtype<double> = gsp::Dtype::kFloat64;
template <>
constexpr gsp::Dtype kDtype<__half> = gsp::Dtype::kFloat16;
template <>
constexpr gsp::Dtype kDtype<__nv_bfloat16> = gsp::Dtype::kBFloat16;

template <typename T>
constexpr double kRounding = 0x1p-24;  // half an ulp of 1
template <>
constexpr double kRounding<double> = 0x1p-53;
template <>
constexpr double kRounding<__half> = 0x1p-11;
template <>
constexpr double kRounding<__nv_bfloat16> = 0x1p-8;

// `magnitude`: of what was added up, over which `terms` roundings of the accumulator may spread.
template <typename T>
bool close(T got, double want, double magnitude, int64_t terms) {
  const double value = double(gsp::cuda::widen<T>(got));
  if (std::isnan(want) || std::isinf(want)) {
    return std::isnan(want) ? std::isnan(value) : value == want;
  }
  const double accumulated =
      2 * double(terms + 4) * kRounding<gsp::cuda::acc_t<T>> * std::fabs(magnitude);
  return std::fabs(value - want) <= accumulated + 1.01 * kRounding<T> * std::fabs(want) + 0x1p-25;
}

// The same value; all NaN are one, +0 and -0 are two.
template <typename T>
bool identical(T got, T want) {
  const auto a = gsp::cuda::widen<T>(got), b = gsp::cuda::widen<T>(want);
  if (a != a || b != b) return a != a && b != b;
  return std::memcmp(&a, &b, sizeof a) == 0;
}

template <typename T>
bool same_bits(const Buffer<T>& a, const Buffer<T>& b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data(), b.data(), a.bytes()) == 0;
}

inline int finish() {
  if (failures == 0) return 0;
  std::printf("%d checks failed\n", failures);
  return 1;
}

}  // namespace checks
