// The CPU kernels on exactly sized buffers, built with -fsanitize=address: any access past
// an end stops the run. What they compute is tested in tests/test_native_cpu.py. Built and run by
// tests/test_cpu_asan.py.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "cpu/build.h"
#include "cpu/edge_kernels.h"
#include "cpu/kernels.h"
#include "cpu/schedule.h"
#include "cpu/spmm_kernels.h"

namespace {

using namespace gsp;
using namespace gsp::cpu;

void serial(int64_t count, void (*body)(int64_t, void*), void* context) {
  for (int64_t i = 0; i < count; ++i) body(i, context);
}

// Heap memory of exactly `bytes`, filled with zeros: every value of every dtype is then a valid 0.
struct Exact {
  std::unique_ptr<char[]> data;
  explicit Exact(int64_t bytes) : data(new char[bytes]) { std::memset(data.get(), 0, bytes); }
};

template <typename Index>
struct Graph {
  std::unique_ptr<Index[]> rowptr, col, perm;
  Csr csr;

  Graph(int64_t rows, int64_t sources, int64_t edges, int64_t hub)
      : rowptr(new Index[rows + 1]), col(new Index[edges + hub]), perm(new Index[edges + hub]) {
    std::mt19937_64 random(rows + edges);
    std::vector<int64_t> degree(rows);
    for (int64_t j = 0; j < edges; ++j) ++degree[random() % rows];
    if (rows > 0) degree[rows - 1] += hub;
    rowptr[0] = 0;
    for (int64_t r = 0; r < rows; ++r) rowptr[r + 1] = static_cast<Index>(rowptr[r] + degree[r]);
    for (int64_t j = 0; j < edges + hub; ++j) {
      col[j] = static_cast<Index>(random() % sources);
      perm[j] = static_cast<Index>(edges + hub - 1 - j);
    }
    csr = {rowptr.get(), col.get(), perm.get(), rows, edges + hub, sizeof(Index) == 8};
  }
};

int64_t runs = 0;

using Kernel = void (*)(const Problem&, const Schedule&);

template <typename T>
constexpr gsp::Dtype kDtype = gsp::Dtype::kFloat32;
template <>
constexpr gsp::Dtype kDtype<double> = gsp::Dtype::kFloat64;
template <>
constexpr gsp::Dtype kDtype<Half> = gsp::Dtype::kFloat16;
template <>
constexpr gsp::Dtype kDtype<BFloat16> = gsp::Dtype::kBFloat16;

template <typename T, typename Index>
void run_all(int64_t width, int64_t heads, int64_t hub) {
  const int64_t rows = 13, sources = 7, edges = 60;
  const Graph<Index> graph(rows, sources, edges, hub);
  const int64_t all = edges + hub;
  const int64_t size = sizeof(T), sum_size = sizeof(Accumulator<T>);
  const int64_t most = rows > sources ? rows : sources;
  const Exact by_row(rows * width * size), by_source(sources * width * size),
      scales(most * sum_size);
  const Exact args(rows * width * static_cast<int64_t>(sizeof(Index))), weight(all * heads * size);

  Problem p;
  p.csr = graph.csr;
  p.width = width;
  p.heads = heads;
  p.parallel_for = serial;
  const auto run = [&](Kernel kernel, int64_t result_bytes, int64_t scratch_width) {
    const Exact result(result_bytes), arg(rows * width * static_cast<int64_t>(sizeof(Index)));
    p.result = result.data.get();
    p.result_arg = arg.data.get();
    const ScheduleStorage storage(p.csr, scratch_width);
    kernel(p, storage.schedule());
    ++runs;
  };
  for (const bool weighted : {false, true}) {
    p.weight = weighted ? weight.data.get() : nullptr;
    p.x = {by_source.data.get(), width};
    p.grad = p.out = {by_row.data.get(), width};
    p.arg = {args.data.get(), width};
    p.src_scale = p.dst_scale = weighted ? scales.data.get() : nullptr;
    p.mean = weighted;
    p.result_dtype = kDtype<T>;
    const Kernel sum = weighted ? sweep<T, Index, Sum<true>> : sweep<T, Index, Sum<false>>;
    run(sum, rows * width * size, width);
    const Exact bias(width * sum_size);
    p.self = {by_row.data.get(), width};
    p.self_scale = scales.data.get();
    p.self_scale_by_row = weighted;
    p.bias = bias.data.get();
    p.relu = true;
    run(sum, rows * width * size, width);
    if (sizeof(T) < sum_size) {
      p.result_dtype = gsp::Dtype::kFloat32;
      run(sum, rows * width * sum_size, width);
    }
    p.self = {};
    p.self_scale = p.bias = nullptr;
    p.src_scale = p.dst_scale = nullptr;
    run(weighted ? sweep<T, Index, Arg<true, Reduce::kMin>>
                 : sweep<T, Index, Arg<false, Reduce::kMax>>,
        rows * width * size, width);
    run(sweep<T, Index, TieCount>, rows * width * sum_size, width);
    run(dots<T, Index, Select::kAll>, all * heads * size, 0);
    run(dots<T, Index, Select::kArg>, all * heads * size, 0);
    run(dots<T, Index, Select::kTie>, all * heads * size, 0);
    if (weighted) {
      const Exact att(width * size), of_att(width * sum_size);
      p.out = {att.data.get(), 0};
      p.result_att = of_att.data.get();
      run(dots<T, Index, Select::kPair>, all * heads * size, 0);
      run(gradient_of_pairs<T, Index>, rows * width * size, width);
    }

    // On the "transposed" graph: rows are the forward's sources, so what is gathered belongs to its
    // rows.
    const Exact gathered(sources * width * size), own(rows * width * size);
    const Exact gathered_args(sources * width * static_cast<int64_t>(sizeof(Index)));
    p.grad = p.out = {gathered.data.get(), width};
    p.arg = {gathered_args.data.get(), width};
    p.x = {own.data.get(), width};
    run(sweep<T, Index, ArgBackward>, rows * width * size, width);
    run(sweep<T, Index, TieBackward>, rows * width * size, width);

    const Exact logits(all * heads * size), other(all * heads * size);
    p.x = {logits.data.get(), heads};
    p.grad = {other.data.get(), heads};
    run(normalise_rows<Index, Softmax<T, Index>>, all * heads * size, heads);
    run(normalise_rows<Index, SoftmaxBackward<T, Index>>, all * heads * size, heads);
  }
}

template <typename Key, typename Index>
void run_build(int64_t size, int64_t n) {
  std::unique_ptr<Key[]> key(new Key[size]);
  for (int64_t i = 0; i < size; ++i) key[i] = static_cast<Key>((i * 7919) % n);
  std::unique_ptr<Index[]> own(new Index[size]), other(new Index[size]);
  std::unique_ptr<Index[]> rowptr(new Index[n + 1]), col(new Index[size]), perm(new Index[size]);
  const bool wide = sizeof(Index) == 8;
  const Indices keys{key.get(), size, 1, sizeof(Key) == 8};
  const CooFacts facts = check_coo(keys, keys, n, n, own.get(), other.get(), wide, serial);
  if (facts.first_bad != -1 || !same_indices(keys, {own.get(), size, 1, wide}, serial))
    std::exit(1);
  group({own.get(), other.get(), size, n, wide, rowptr.get(), col.get(), perm.get()}, serial);
  for (int64_t i = 0; i < size; ++i) {
    const Key before = i > 0 ? key[perm[i - 1]] : 0, here = key[perm[i]];
    if (here != col[i] || before > here || (i > 0 && before == here && perm[i - 1] > perm[i])) {
      std::printf("group: not a stable sort at %ld\n", static_cast<long>(i));
      std::exit(1);
    }
  }
  const std::unique_ptr<Index[]> again(new Index[n + 1]);
  find_rowptr(col.get(), size, n, again.get(), wide, serial);
  if (!std::equal(again.get(), again.get() + n + 1, rowptr.get())) std::exit(1);
  ++runs;
}

}  // namespace

template <typename T, typename Index>
void run_widths() {
  for (const int64_t heads : {1, 3}) {
    for (const int64_t head_width : {0, 1, 2, 3, 5, 8, 12, 16, 17, 33, 48, 63, 64, 100, 257}) {
      run_all<T, Index>(head_width * heads, heads, head_width == 17 ? 9000 : 0);
    }
  }
}

int main() {
  run_widths<float, int32_t>();
  run_widths<Half, int32_t>();
  run_widths<double, int64_t>();
  for (const int64_t size : {0, 1, 1000, 200000}) {
    for (const int64_t n : {1, 5, 3000, 500000}) {
      run_build<int32_t, int32_t>(size, n);
      run_build<int64_t, int32_t>(size, n);
      run_build<int64_t, int64_t>(size, n);
    }
  }
  std::printf("%ld runs\n", static_cast<long>(runs));
}
