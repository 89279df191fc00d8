// Offsets beyond 2^31 elements and 2^32 bytes: arrays of address space alone, of which only the
// rows that are used take memory.
#pragma once

#include "kernel_checks.h"

namespace checks {

using gsp::cuda::acc_t;
using gsp::cuda::narrow;
using gsp::cuda::widen;

constexpr int64_t kFar = (int64_t(1) << 25) + 77;  // rows before the ones that are used
constexpr int kWide = 64;                          // columns
static_assert(kFar * kWide > int64_t(1) << 31);

// Zeros, for as long as they are only read.
template <typename T>
class Space {
 public:
  explicit Space(int64_t count) : bytes_(size_t(count) * sizeof(T)) {
    void* got = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
      std::perror("mmap");
      std::exit(1);
    }
    data_ = static_cast<T*>(got);
  }
  Space(const Space&) = delete;
  Space& operator=(const Space&) = delete;
  ~Space() { munmap(data_, bytes_); }
  T* data() { return data_; }
  T& operator[](int64_t i) { return data_[i]; }

 private:
  size_t bytes_;
  T* data_;
};

// Small integers: sums are exact. Where an offset has wrapped around there are zeros.
inline double far_value(int64_t row, int64_t column) {
  return double((3 * row + 7 * column) % 11 - 5);
}

template <typename T>
struct FarRows : Space<T> {
  FarRows(int64_t first, int count, int width = kWide)
      : Space<T>((first + count) * width), width_(width) {
    for (int64_t r = first; r < first + count; ++r)
      for (int f = 0; f < width; ++f) (*this)[r * width + f] = narrow<T>(acc_t<T>(far_value(r, f)));
  }
  double at(int64_t row, int f) { return double(widen<T>((*this)[row * width_ + f])); }
  int width_;
};

template <typename T>
double wide(T v) {
  return double(widen<T>(v));
}

// The last row of many, all others without edges.
struct FarRow {
  static constexpr int kEdges = 5, kHeads = 4;
  Space<int> rowptr{kFar + 2};
  Buffer<int> col{kEdges}, perm{kEdges};
  FarRows<float> a{kFar, 1}, b{kFar, 9};
  FarRow() {
    rowptr[kFar + 1] = kEdges;
    for (int j = 0; j < kEdges; ++j) {
      col[j] = int(kFar) + (5 * j + 2) % 9;
      // Times the number of heads, more than 2^31.
      perm[j] = 600'000'000 + (7 * j + 1) % 9;
    }
  }
};

}  // namespace checks
