// Runs a row sweep without a plan and under several, each in every order of threads, which must
// leave the same bits.
#pragma once

#include "cuda/row_sweep_launch.cuh"
#include "kernel_checks.h"

namespace checks {

using gsp::cuda::acc_t;
using gsp::cuda::RowOp;
using gsp::cuda::RowSweep;

// What is under test: `p` to an instantiation. Erased, for the sake of build time.
using Launcher = std::function<cudaError_t(const RowSweep& p)>;

// Row lengths and where they are split. Column 0 is for rows of equal messages.
struct Shape {
  std::vector<int> lengths;
  int64_t long_row, chunk;
};

// Empty, short, just not long, long in one chunk, in exactly one, in two, in several; most of a row
// in a block of rows, and rows past the end of the last one.
inline const Shape kMixed{{0, 1, 3, 8, 9, 24, 25, 0, 60, 5, 2, 73, 7, 4, 6, 48, 1, 0}, 8, 24};
// Chunks that take a group of lanes several rounds of gathers.
inline const Shape kChunky{{3, 150, 0, 17, 72, 5}, 16, 72};
// Rows shared by 2, 4, 32 groups of lanes.
inline const Shape kTwoGroups{{20, 31, 0, 17, 70, 9, 12}, 32, 64};
inline const Shape kFourGroups{{40, 61, 3, 33, 64, 90, 47}, 64, 80};
inline const Shape kManyGroups{{300, 0, 515, 400, 150}, 400, 256};
// Nothing to sweep.
inline const Shape kEmpty{{0, 0, 0}, 8, 24};

// How the operands lie in memory.
struct Layout {
  int pad = 0;     // elements between rows
  int offset = 0;  // elements past a 16-byte boundary
};

template <typename Out, typename Index>
struct Results {
  Buffer<Out> out;
  Buffer<Index> arg;
  Results(const RowSweep& p, bool with_arg)
      : out(size_t(p.rows * p.width), 0, kUnwritten),
        arg(with_arg ? size_t(p.rows * p.width) : 0, 0, kUnwritten) {}
};

template <typename T, typename Index, typename Out>
std::unique_ptr<Results<Out, Index>> sweep_once(const char* name, RowSweep p, bool with_arg,
                                                const Items* items, emu::Order order,
                                                const Launcher& launcher) {
  auto results = std::make_unique<Results<Out, Index>>(p, with_arg);
  p.out = results->out.data();
  p.dtype = kDtype<T>;
  p.out_dtype = kDtype<Out>;
  if (with_arg) p.out_arg = results->arg.data();
  const size_t slots = items == nullptr ? 0 : size_t(items->num_slots);
  Buffer<acc_t<T>> scratch(slots * size_t(p.width));
  Buffer<Index> scratch_arg(slots * size_t(p.width));
  if (items != nullptr) {
    p.items = items->list->data();
    p.num_items = items->num_items;
    p.num_merges = items->num_merges;
    p.num_slots = items->num_slots;
    p.scratch = scratch.data();
    p.scratch_arg = scratch_arg.data();
  }
  emu::order = order;
  expect(launcher(p) == cudaSuccess, "%s: the launch failed", name);
  return results;
}

// All that the launcher may be asked for; the first are without a plan.
template <typename T, typename Index, typename Out = T>
std::vector<std::unique_ptr<Results<Out, Index>>> sweep(const char* name, RowSweep p, bool with_arg,
                                                        const Graph<Index>& g, const Shape& shape,
                                                        const Launcher& launcher) {
  using emu::Order;
  p.wide_index = sizeof(Index) == 8;
  p.rowptr = g.rowptr.data();
  p.col = g.col.data();
  p.rows = g.rows;
  p.edges = g.edges;
  p.long_row = shape.long_row;
  p.chunk = shape.chunk;
  std::vector<std::unique_ptr<Results<Out, Index>>> all;
  const auto run = [&](const char* how, const Items* items) {
    auto first = sweep_once<T, Index, Out>(name, p, with_arg, items, Order::kForward, launcher);
    for (const Order order : {Order::kReverse, Order::kShuffled}) {
      const auto other = sweep_once<T, Index, Out>(name, p, with_arg, items, order, launcher);
      expect(same_bits(first->out, other->out) && same_bits(first->arg, other->arg),
             "%s, width %d, %d heads, %s: other values in another order", name, p.width, p.heads,
             how);
    }
    all.push_back(std::move(first));
  };
  run("rows", nullptr);  // groups share rows: there are few
  p.geometry = {16, 1, 1};
  run("rows, 16 lanes", nullptr);
  p.geometry = {2, 1, 4};
  run("rows, 2 lanes, 4 groups", nullptr);
  if (p.wide_index) return all;
  p.geometry = {};
  p.cols = 29;
  p.l2_bytes = int64_t(1) << 20;
  const Items items(g, shape.chunk);
  run("items", &items);
  // What is chosen for many rows: short ones, longer ones, and very long ones, which have a kernel
  // of their own.
  p.geometry = {4, 2, 1};
  run("items, two passes", &items);
  p.geometry = {2, 1, 4};
  run("items, 2 lanes, 4 groups", &items);
  p.geometry = {8, 2, 4};
  run("items, long", &items);
  p.long_row = 0;
  run("rows of any length", nullptr);
  p.geometry = {};
  p.bundle = 4;
  run("rows in bundles", nullptr);
  p.long_row = shape.long_row;
  run("items, short rows in bundles", &items);
  return all;
}

// Weights [edges, max(heads, 1)].
template <typename T, typename Index>
struct Weights {
  int heads;
  Matrix<T> data;
  Weights(const Graph<Index>& g, int heads_)
      : heads(heads_), data(g.edges, heads_ > 0 ? heads_ : 1) {}
  acc_t<T> of(int64_t j, int64_t f, int64_t width) {
    return gsp::cuda::widen<T>(data.at(j, f / (width / data.width)));
  }
};

}  // namespace checks
