// The row sweep behind every _spmm* operator: for each row and each block of columns, combine the
// messages of the row's edges with a Reducer. An operator is a Message (what an edge sends) with a
// way to write the result. Part of kernels_impl.h.
#pragma once

#include "cpu/parallel.h"
#include "cpu/schedule.h"
#include "cpu/simd.h"

namespace gsp::cpu {
namespace {

// kVectors vectors of kLanes columns of one head. A width that is no multiple of kLanes is covered
// by moving the last vector back over columns that an earlier one has too: both compute the same,
// so nothing is masked.
struct Columns {
  int64_t begin;
  int64_t last;  // where the last vector starts
  int64_t head;
};

template <typename T_, typename Index_, int kVectors_, int kLanes_>
struct Block {
  using T = T_;
  using Index = Index_;
  static constexpr int kVectors = kVectors_;
  static constexpr int kLanes = kLanes_;
  using Value = gsp::cpu::Value<T, kLanes>;
  using Position = gsp::cpu::Position<T, kLanes>;

  const Problem& problem;
  Columns columns;

  GSP_HD int64_t column(int k) const {
    return k == kVectors - 1 ? columns.last : columns.begin + k * kLanes;
  }
};

template <typename T>
GSP_HD const T* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride;
}

// Weight of edge j in the head of the block, or 1.
template <typename T>
GSP_HD Accumulator<T> edge_weight(const Problem& problem, int64_t head, int64_t j) {
  if (problem.weight == nullptr) return 1;
  return load_scalar(static_cast<const T*>(problem.weight) + j * problem.heads + head);
}

// Fetches the columns of the block in a row that some later edge will read.
template <typename B>
GSP_HD void prefetch(const B& block, const Matrix& matrix, int64_t row) {
  const auto* features = row_of<typename B::T>(matrix, row);
  constexpr int64_t kLine = 64 / sizeof(typename B::T);
  const int64_t end = block.columns.last + B::kLanes;
#pragma GCC unroll 4
  for (int line = 0; line < (B::kVectors * B::kLanes + kLine - 1) / kLine; ++line) {
    const int64_t at = block.columns.begin + line * kLine;
    __builtin_prefetch(features + (at < end ? at : end - 1));
  }
}

// sum and mean: w * src_scale * x of the edge's source.
template <typename B, bool kWeighted>
struct SumMessage {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  const T* features = nullptr;
  Accumulator<T> factor = 1;

  GSP_HD void row(int64_t) {}
  GSP_HD void edge(int64_t j, int64_t source) {
    features = row_of<T>(block.problem.x, source);
    if constexpr (kWeighted) {
      factor = edge_weight<T>(block.problem, block.columns.head, j);
      if (block.problem.src_scale != nullptr) {
        factor *= static_cast<const Accumulator<T>*>(block.problem.src_scale)[source];
      }
    }
  }
  GSP_HD typename B::Value message(int k) const {
    const auto value = load<B::kLanes>(features + block.column(k));
    if constexpr (kWeighted) return factor * value;
    return value;
  }
  GSP_HD void ahead(int64_t source) const { prefetch(block, block.problem.x, source); }

  // The mean where the plain sum overflows: each term is first made as small as keeps any sum of
  // them in range.
  __attribute__((noinline, cold)) typename B::Value mean_of_scaled(int64_t first, int64_t last,
                                                                   int k) const {
    using Scalar = Accumulator<T>;
    Scalar scale = 1;
    while (scale * static_cast<Scalar>(last - first) > 1) scale /= 2;
    const auto* col = static_cast<const typename B::Index*>(block.problem.csr.col);
    typename B::Value sum{};
    SumMessage<B, true> message{block};
    for (int64_t j = first; j < last; ++j) {
      message.edge(j, col[j]);
      message.factor *= scale;
      sum += message.message(k);
    }
    return sum / (scale * static_cast<Scalar>(last - first));
  }

  template <typename R>
  GSP_HD void finish(int64_t row, int64_t first, int64_t last, const R& reducer, int k) const {
    using Scalar = Accumulator<T>;
    const Problem& p = block.problem;
    typename B::Value value = reducer.value;
    if (p.mean && last > first) {
      value /= static_cast<Scalar>(last - first);
      const bool finite = sum_of_lanes<B::kLanes, Scalar>(value - value) == 0;
      if (!finite) value = mean_of_scaled(first, last, k);
    }
    if (p.dst_scale != nullptr) value *= static_cast<const Scalar*>(p.dst_scale)[row];
    store<B::kLanes>(static_cast<T*>(p.result) + row * p.width + block.column(k), value);
  }
};

// max and min: w * x of the edge's source, rounded to the storage type, so that a tie is a tie for
// every operator.
template <typename B, bool kWeighted, Reduce kReduce_>
struct ArgMessage {
  using T = typename B::T;
  using Index = typename B::Index;
  static constexpr Reduce kReduce = kReduce_;
  const B& block;
  const T* features = nullptr;
  Accumulator<T> factor = 1;

  GSP_HD void row(int64_t) {}
  GSP_HD void edge(int64_t j, int64_t source) {
    features = row_of<T>(block.problem.x, source);
    if constexpr (kWeighted) factor = edge_weight<T>(block.problem, block.columns.head, j);
  }
  GSP_HD typename B::Value message(int k) const {
    const auto value = load<B::kLanes>(features + block.column(k));
    if constexpr (kWeighted) return rounded<T, B::kLanes>(factor * value);
    return value;
  }
  GSP_HD void ahead(int64_t source) const { prefetch(block, block.problem.x, source); }

  template <typename R>
  GSP_HD void finish(int64_t row, int64_t first, int64_t last, const R& reducer, int k) const {
    const Problem& p = block.problem;
    const int64_t at = row * p.width + block.column(k);
    T* out = static_cast<T*>(p.result) + at;
    Index* arg = static_cast<Index*>(p.result_arg) + at;
    if (first == last) {
      store<B::kLanes>(out, typename B::Value{});
      for (int lane = 0; lane < B::kLanes; ++lane) arg[lane] = -1;
      return;
    }
    store<B::kLanes>(out, reducer.value);
    const Index base = static_cast<Index>(first);
    if (const auto* perm = static_cast<const Index*>(p.csr.perm)) {
      for (int lane = 0; lane < B::kLanes; ++lane) {
        arg[lane] = perm[base + static_cast<Index>(reducer.position[lane])];
      }
    } else {
      for (int lane = 0; lane < B::kLanes; ++lane) {
        arg[lane] = base + static_cast<Index>(reducer.position[lane]);
      }
    }
  }
};

// The sums of the operators below are written in the accumulation type (counts) or the storage
// type.
template <typename Stored, typename B, typename R>
GSP_HD void store_sum(const B& block, int64_t row, const R& reducer, int k) {
  const Problem& p = block.problem;
  store<B::kLanes>(static_cast<Stored*>(p.result) + row * p.width + block.column(k), reducer.value);
}

// Gradient of max and min, on the transposed graph: w * grad of the edge's destination where this
// edge won.
template <typename B>
struct ArgBackwardMessage {
  using T = typename B::T;
  using Index = typename B::Index;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  const T* grad = nullptr;
  const Index* arg = nullptr;
  Index id = 0;
  Accumulator<T> factor = 1;

  GSP_HD void row(int64_t) {}
  GSP_HD void edge(int64_t j, int64_t destination) {
    const Problem& p = block.problem;
    grad = row_of<T>(p.grad, destination);
    arg = row_of<Index>(p.arg, destination);
    id = p.csr.perm ? static_cast<const Index*>(p.csr.perm)[j] : static_cast<Index>(j);
    factor = edge_weight<T>(p, block.columns.head, j);
  }
  GSP_HD typename B::Value message(int k) const {
    const auto args = load_raw<Vector<Index, B::kLanes>>(arg + block.column(k));
    const auto won = __builtin_convertvector(args == id, typename B::Position);
    const auto value = factor * load<B::kLanes>(grad + block.column(k));
    return won ? value : typename B::Value{};
  }
  GSP_HD void ahead(int64_t destination) const {
    prefetch(block, block.problem.grad, destination);
    Block<Index, Index, B::kVectors, B::kLanes> args{block.problem, block.columns};
    prefetch(args, block.problem.arg, destination);
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<T>(block, row, reducer, k);
  }
};

// How many messages of the row equal its maximum or minimum.
template <typename B>
struct TieCountMessage {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  const T* out = nullptr;
  const T* features = nullptr;
  Accumulator<T> factor = 1;

  GSP_HD void row(int64_t r) { out = row_of<T>(block.problem.out, r); }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = row_of<T>(block.problem.x, source);
    factor = edge_weight<T>(block.problem, block.columns.head, j);
  }
  GSP_HD typename B::Value message(int k) const {
    const auto sent = rounded<T, B::kLanes>(factor * load<B::kLanes>(features + block.column(k)));
    return same(sent, load<B::kLanes>(out + block.column(k))) ? typename B::Value{} + 1
                                                              : typename B::Value{};
  }
  GSP_HD void ahead(int64_t source) const { prefetch(block, block.problem.x, source); }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<Accumulator<T>>(block, row, reducer, k);
  }
};

// Gradient of max and min shared by all winners, on the transposed graph: w * grad of the edge's
// destination where this edge's message equals the result there.
template <typename B>
struct TieBackwardMessage {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  const T* features = nullptr;
  const T* out = nullptr;
  const T* grad = nullptr;
  Accumulator<T> factor = 1;

  GSP_HD void row(int64_t r) { features = row_of<T>(block.problem.x, r); }
  GSP_HD void edge(int64_t j, int64_t destination) {
    out = row_of<T>(block.problem.out, destination);
    grad = row_of<T>(block.problem.grad, destination);
    factor = edge_weight<T>(block.problem, block.columns.head, j);
  }
  GSP_HD typename B::Value message(int k) const {
    const auto sent = rounded<T, B::kLanes>(factor * load<B::kLanes>(features + block.column(k)));
    const auto value = factor * load<B::kLanes>(grad + block.column(k));
    return same(sent, load<B::kLanes>(out + block.column(k))) ? value : typename B::Value{};
  }
  GSP_HD void ahead(int64_t destination) const {
    prefetch(block, block.problem.grad, destination);
    prefetch(block, block.problem.out, destination);
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<T>(block, row, reducer, k);
  }
};

// Sweeps the rows of one task, for one block of columns.
template <typename B, typename Message>
struct Sweep {
  using Index = typename B::Index;
  using State = Reducer<Message::kReduce, typename B::Value, typename B::Position>;
  static constexpr int64_t kBytes = B::kVectors * B::kLanes * sizeof(typename B::T);
  static constexpr int64_t kAhead = kBytes >= 512 ? 4 : kBytes >= 128 ? 8 : 16;  // edges

  const B& block;
  const Schedule& schedule;
  const Index* rowptr = static_cast<const Index*>(block.problem.csr.rowptr);
  const Index* col = static_cast<const Index*>(block.problem.csr.col);

  GSP_HD void edges(Message& message, State (&state)[B::kVectors], int64_t first, int64_t begin,
                    int64_t end) const {
    const int64_t last_edge = block.problem.csr.edges - 1;
    for (int64_t j = begin; j < end; ++j) {
      message.ahead(col[j + kAhead < last_edge ? j + kAhead : last_edge]);
      message.edge(j, col[j]);
      const auto position =
          typename B::Position{} + static_cast<PositionScalar<typename B::T>>(j - first);
#pragma GCC unroll 4
      for (int k = 0; k < B::kVectors; ++k) state[k].update(message.message(k), position);
    }
  }

  GSP_HD static void init(State (&state)[B::kVectors], int64_t first_position) {
#pragma GCC unroll 4
    for (int k = 0; k < B::kVectors; ++k) {
      state[k] = State::init(typename B::Position{} +
                             static_cast<PositionScalar<typename B::T>>(first_position));
    }
  }

  // Where the partial result of a piece of a long row is kept.
  template <typename Scalar>
  GSP_HD Scalar* scratch(void* scratch, int64_t slot, int k) const {
    return static_cast<Scalar*>(scratch) + slot * schedule.scratch_width + block.column(k);
  }
  GSP_HD void* value_of(int64_t slot, int k) const {
    return scratch<Accumulator<typename B::T>>(schedule.partial_values, slot, k);
  }
  GSP_HD void* position_of(int64_t slot, int k) const {
    return scratch<PositionScalar<typename B::T>>(schedule.partial_positions, slot, k);
  }

  void task(const Task& task) const {
    Message message{block};
    State state[B::kVectors];
    const bool piece = task.slot >= 0;  // of a long row
    int64_t first = rowptr[task.row_begin];
    for (int64_t row = task.row_begin; row < task.row_end; ++row) {
      const int64_t last = rowptr[row + 1];
      const int64_t begin = piece ? task.edge_begin : first;
      message.row(row);
      init(state, begin - first);
      edges(message, state, first, begin, piece ? task.edge_end : last);
      if (piece) return save(state, task.slot);
#pragma GCC unroll 4
      for (int k = 0; k < B::kVectors; ++k) message.finish(row, first, last, state[k], k);
      first = last;
    }
  }

  GSP_HD void save(const State (&state)[B::kVectors], int64_t slot) const {
    for (int k = 0; k < B::kVectors; ++k) {
      std::memcpy(value_of(slot, k), &state[k].value, sizeof(state[k].value));
      if constexpr (Message::kReduce != Reduce::kSum) {
        std::memcpy(position_of(slot, k), &state[k].position, sizeof(state[k].position));
      }
    }
  }

  GSP_HD State restore(int64_t slot, int k) const {
    State state;
    std::memcpy(&state.value, value_of(slot, k), sizeof(state.value));
    if constexpr (Message::kReduce != Reduce::kSum) {
      std::memcpy(&state.position, position_of(slot, k), sizeof(state.position));
    }
    return state;
  }

  void merge(const LongRow& row) const {
    Message message{block};
    for (int k = 0; k < B::kVectors; ++k) {
      State total = restore(row.first_slot, k);
      for (int64_t slot = row.first_slot + 1; slot < row.end_slot; ++slot) {
        total.merge(restore(slot, k));
      }
      message.finish(row.row, rowptr[row.row], rowptr[row.row + 1], total, k);
    }
  }
};

// Calls visit(Block) for blocks that cover the columns of all heads, of at most kMost vectors each.
template <typename T, typename Index, int kMost, int kLanes = kNativeLanes<T>, typename Visit>
void for_each_block(const Problem& problem, const Visit& visit) {
  const int64_t head_width = problem.width / problem.heads;
  if constexpr (kLanes > 1) {
    if (head_width < kLanes) return for_each_block<T, Index, kMost, kLanes / 2>(problem, visit);
  }
  for (int64_t head = 0; head < problem.heads; ++head) {
    const int64_t end = (head + 1) * head_width;
    for (int64_t begin = head * head_width; begin < end;) {
      // False where this many vectors are more than there are left, or a variant that is not
      // compiled.
      const auto visit_vectors = [&](auto count) {
        constexpr int kVectors = decltype(count)::value;
        // A narrow head has fewer than two native vectors, a head of one column has one.
        constexpr int kLimit = kLanes == 1 ? 1 : kLanes < kNativeLanes<T> ? 2 : 4;
        if constexpr (kVectors <= kMost && kVectors <= kLimit) {
          if (kVectors > 1 && begin + (kVectors - 1) * kLanes >= end) return false;
          const int64_t last = begin + (kVectors - 1) * kLanes;
          visit(Block<T, Index, kVectors, kLanes>{
              problem, {begin, last < end - kLanes ? last : end - kLanes, head}});
          begin += kVectors * kLanes;
          return true;
        }
        return false;
      };
      visit_vectors(std::integral_constant<int, 4>{}) ||
          visit_vectors(std::integral_constant<int, 3>{}) ||
          visit_vectors(std::integral_constant<int, 2>{}) ||
          visit_vectors(std::integral_constant<int, 1>{});
    }
  }
}

// Messages by operator, for sweep(). kMost: vectors of a block; the less usual operators come in
// fewer variants.
template <bool kWeighted>
struct Sum {
  template <typename B>
  using Message = SumMessage<B, kWeighted>;
  static constexpr int kMost = 4;
};
template <bool kWeighted, Reduce kReduce>
struct Arg {
  template <typename B>
  using Message = ArgMessage<B, kWeighted, kReduce>;
  static constexpr int kMost = 4;
};
struct ArgBackward {
  template <typename B>
  using Message = ArgBackwardMessage<B>;
  static constexpr int kMost = 4;
};
struct TieCount {
  template <typename B>
  using Message = TieCountMessage<B>;
  static constexpr int kMost = 2;
};
struct TieBackward {
  template <typename B>
  using Message = TieBackwardMessage<B>;
  static constexpr int kMost = 2;
};

template <typename T, typename Index, typename Operator>
void sweep(const Problem& problem, const Schedule& schedule) {
  // 64-bit indices are for graphs too large for 32: rare, and bound by memory anyway.
  constexpr int kMost = sizeof(Index) == 8 && Operator::kMost > 2 ? 2 : Operator::kMost;
  for_each(problem.parallel_for, schedule.num_tasks, [&](int64_t i) {
    for_each_block<T, Index, kMost>(problem, [&](const auto& block) {
      using B = std::decay_t<decltype(block)>;
      Sweep<B, typename Operator::template Message<B>>{block, schedule}.task(schedule.tasks[i]);
    });
  });
  if (schedule.num_long_rows == 0) return;
  for_each(problem.parallel_for, schedule.num_long_rows, [&](int64_t i) {
    for_each_block<T, Index, 1>(problem, [&](const auto& block) {
      using B = std::decay_t<decltype(block)>;
      Sweep<B, typename Operator::template Message<B>>{block, schedule}.merge(
          schedule.long_rows[i]);
    });
  });
}

}  // namespace
}  // namespace gsp::cpu
