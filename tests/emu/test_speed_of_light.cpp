// Gathers without rows: what they add up to, and that an output of the product's size is written.
#include "kernel_checks.h"
#include "large_space.h"
// The launcher with it: its choice of vectors is part of what is tested.
#include "cuda/speed_of_light.cu"

namespace {

using namespace checks;
using namespace gsp::cuda;
using gsp::Dtype;

struct Layout {
  int64_t pad = 0;
  size_t offset = 0;
};

// `vector`: how many columns a thread must take at once. Every thread writes what it has added up,
// in the order of threads, and then again: so the first pass over the threads adds up to all
// gathers, exactly, as features are quarters and runs short.
template <typename T>
void check_gathers(Dtype dtype, int width, int vector, int64_t edges, bool weighted,
                   Layout layout = {}, int64_t rows = 0) {
  const int64_t run = 16;
  const int lanes = std::min(width / vector, kThreads);
  const int64_t per_block = kThreads / lanes * run;
  const int64_t tiles = (width + lanes * vector - 1) / (lanes * vector);
  const int64_t blocks = std::max<int64_t>((edges + per_block - 1) / per_block, 1);
  const int64_t pass = blocks * tiles * kThreads * vector;
  if (rows == 0) rows = (pass * 5 / 2 + width - 1) / width;
  const int num_cols = 23;
  Buffer<int> col{size_t(edges)};
  Buffer<T> weight{size_t(edges)}, out(size_t(rows * width), 0, kUnwritten);
  Matrix<T> x(num_cols, width, layout.pad, layout.offset);
  x.fill([](int64_t r, int64_t f) { return double((r * 7 + f) % 4) / 4; });
  double want = 0;
  for (int64_t j = 0; j < edges; ++j) {
    col[j] = below(num_cols);
    weight[j] = narrow<T>(acc_t<T>(below(2) / 2.0));
    for (int f = 0; f < width; ++f) {
      want += double(widen<T>(x.at(col[j], f))) * (weighted ? double(widen<T>(weight[j])) : 1);
    }
  }
  SpeedOfLight p{dtype};
  p.col = col.data();
  p.weight = weighted ? weight.data() : nullptr;
  p.x = x.data.data();
  p.out = out.data();
  p.x_stride = x.stride;
  p.rows = rows;
  p.edges = edges;
  p.run = run;
  p.width = width;
  expect(speed_of_light(p, nullptr) == cudaSuccess, "width %d: the launch failed", width);
  double got = 0;
  for (int64_t i = 0; i < rows * width; ++i) {
    const double value = double(widen<T>(out[i]));
    expect(value >= 0 && value <= run, "width %d: element %d was not written", width, int(i));
    if (i < pass) got += value;
    if (i >= pass) expect(identical(out[i], out[i - pass]), "width %d: element %d", width, int(i));
  }
  if (rows * width < pass) return;
  expect(got == want, "width %d, vectors of %d: got %.10g, expected %.10g", width, vector, got,
         want);
}

// ---- Offsets beyond 2^31

void test_far_gathers() {
  FarRows<float> x(kFar, 9);
  Buffer<int> col(16);
  Buffer<float> out(kWide);
  for (int j = 0; j < 16; ++j) col[j] = int(kFar) + j % 9;
  SpeedOfLight p{};
  p.dtype = gsp::Dtype::kFloat32;
  p.col = col.data();
  p.x = x.data();
  p.out = out.data();
  p.x_stride = p.width = kWide;
  p.rows = 1;
  p.edges = p.run = 16;
  expect(speed_of_light(p, nullptr) == cudaSuccess, "the launch failed");
  for (int f = 0; f < kWide; ++f) {
    double want = 0;
    for (int j = 0; j < 16; ++j) want += x.at(col[j], f);
    expect(out[f] == want, "gathers: column %d", f);
  }
}

}  // namespace

int main() {
  for (const bool weighted : {false, true}) {
    // 16 bytes a thread; then what strides, addresses and widths allow.
    check_gathers<float>(Dtype::kFloat32, 64, 4, 495, weighted);
    check_gathers<float>(Dtype::kFloat32, 100, 4, 400, weighted);
    check_gathers<float>(Dtype::kFloat32, 64, 2, 200, weighted, {2, 0});
    check_gathers<float>(Dtype::kFloat32, 64, 1, 200, weighted, {0, 1});
    check_gathers<float>(Dtype::kFloat32, 3, 1, 3000, weighted);
    check_gathers<double>(Dtype::kFloat64, 32, 2, 495, weighted);
    check_gathers<__half>(Dtype::kFloat16, 64, 8, 700, weighted);
    check_gathers<__nv_bfloat16>(Dtype::kBFloat16, 36, 4, 700, weighted);
  }
  check_gathers<float>(Dtype::kFloat32, 2048, 4, 50, true);   // two tiles of columns
  check_gathers<float>(Dtype::kFloat32, 1028, 4, 50, false);  // the second with one vector in it
  check_gathers<float>(Dtype::kFloat32, 16, 4, 0, true);      // no edges: an output all the same
  check_gathers<float>(Dtype::kFloat32, 16, 4, 9000, false, {}, 3);  // fewer outputs than threads
  test_far_gathers();
  return finish();
}
