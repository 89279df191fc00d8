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

  // Where vector k starts, counted from the first column of the block.
  GSP_HD int64_t offset(int k) const {
    return k == kVectors - 1 ? columns.last - columns.begin : k * kLanes;
  }
  GSP_HD int64_t column(int k) const { return columns.begin + offset(k); }
};

// The columns of a block in the rows of a matrix.
template <typename B, typename Element = typename B::T>
struct Rows {
  const Element* data;
  int64_t stride;
  int64_t last_column;

  GSP_HD Rows(const B& block, const Matrix& matrix)
      : data(static_cast<const Element*>(matrix.data) + block.columns.begin),
        stride(matrix.stride),
        last_column(block.offset(B::kVectors - 1) + B::kLanes - 1) {}

  GSP_HD const Element* operator[](int64_t row) const { return data + row * stride; }

  // Fetches what a later edge will read: 64 bytes at a time, and the line of the last column.
  GSP_HD void prefetch(int64_t row) const {
    constexpr int kLines = (B::kVectors * B::kLanes * sizeof(Element) + 63) / 64;
    const Element* from = (*this)[row];
#pragma GCC unroll 8
    for (int line = 0; line < kLines - 1; ++line) {
      __builtin_prefetch(from + line * (64 / sizeof(Element)));
    }
    __builtin_prefetch(from + last_column);
  }
};

template <typename T>
constexpr T kOne = 1;
template <>
constexpr Half kOne<Half> = {0x3c00};
template <>
constexpr BFloat16 kOne<BFloat16> = {0x3f80};

// A factor per edge or per node, or always 1: then without a branch, by never moving on.
template <typename T>
struct Factors {
  const T* data;
  int64_t step;

  GSP_HD Factors(const void* values, int64_t offset, int64_t step)
      : data(values ? static_cast<const T*>(values) + offset : &kOne<T>), step(values ? step : 0) {}
  GSP_HD Accumulator<T> operator[](int64_t i) const { return load_scalar(data + i * step); }
};

template <typename B>
GSP_HD Factors<typename B::T> edge_weights(const B& block) {
  const Problem& p = block.problem;
  return {p.weight, block.columns.head, p.heads};
}

template <template <typename> class Message, typename T, typename Index>
Accumulator<T> mean_of_scaled(const Problem& problem, Columns column, int64_t first, int64_t last);

// The sum of a row's messages, which have a `factor`, divided by the number of its edges.
template <template <typename> class Message, typename B>
GSP_HD typename B::Value mean_of(const B& block, typename B::Value sum, int64_t first, int64_t last,
                                 int k) {
  using Scalar = Accumulator<typename B::T>;
  const Problem& p = block.problem;
  sum /= static_cast<Scalar>(last - first);
  const bool finite = sum_of_lanes<B::kLanes, Scalar>(sum - sum) == 0;
  if (!finite) {
    for (int lane = 0; lane < B::kLanes; ++lane) {
      const int64_t column = block.column(k) + lane;
      sum[lane] = mean_of_scaled<Message, typename B::T, typename B::Index>(
          p, {column, column, column / (p.width / p.heads)}, first, last);
    }
  }
  return sum;
}

// What an edge sends, operator by operator. row(r) comes first, then for each of its edges edge(j,
// col[j]), and message(k) for each vector of the block; ahead(j, col[j]) says that they will be
// asked for soon. finish() writes one vector of the result, finish_row() follows when all are
// written.
struct MessageBase {
  GSP_HD void row(int64_t) {}
  GSP_HD void finish_row(int64_t, int64_t, int64_t) const {}
};

// Stores accumulators as the type that the problem asks for.
template <int kLanes, typename V>
GSP_HD void store_result(const Problem& problem, int64_t at, V value) {
  if constexpr (sizeof(V) == kLanes * sizeof(double)) {
    store<kLanes>(static_cast<double*>(problem.result) + at, value);
  } else {
    switch (problem.result_dtype) {
      case Dtype::kFloat16:
        return store<kLanes>(static_cast<Half*>(problem.result) + at, value);
      case Dtype::kBFloat16:
        return store<kLanes>(static_cast<BFloat16*>(problem.result) + at, value);
      default:
        return store<kLanes>(static_cast<float*>(problem.result) + at, value);
    }
  }
}

template <typename B, bool kWeighted>
struct SumMessage;
template <typename B>
using WeightedSumMessage = SumMessage<B, true>;

// sum and mean: w * src_scale * x of the edge's source.
template <typename B, bool kWeighted>
struct SumMessage : MessageBase {
  using T = typename B::T;
  using Scalar = Accumulator<T>;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Factors<T> weights = edge_weights(block);
  Factors<Scalar> scales{block.problem.src_scale, 0, 1};
  const T* features = nullptr;
  Scalar factor = 1;

  explicit GSP_HD SumMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t source) const { x.prefetch(source); }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = x[source];
    if constexpr (kWeighted) factor = weights[j] * scales[source];
  }
  GSP_HD typename B::Value message(int k) const {
    const auto value = load<B::kLanes>(features + block.offset(k));
    if constexpr (kWeighted) return factor * value;
    return value;
  }

  template <typename R>
  GSP_HD void finish(int64_t row, int64_t first, int64_t last, const R& reducer, int k) const {
    const Problem& p = block.problem;
    typename B::Value value = reducer.value;
    if (p.mean && last > first) {
      value = mean_of<WeightedSumMessage>(block, value, first, last, k);
    }
    if (p.dst_scale != nullptr) value *= static_cast<const Scalar*>(p.dst_scale)[row];
    const int64_t column = block.column(k);
    if (p.self.data != nullptr) {
      const T* own = static_cast<const T*>(p.self.data) + row * p.self.stride + column;
      const auto* scale = static_cast<const Scalar*>(p.self_scale);
      const Scalar by = scale ? scale[p.self_scale_by_row ? row : 0] : 1;
      // What a row's edges say already has no part in it, be it infinite.
      if (by != 0 || !p.self_scale_by_row) value += by * load<B::kLanes>(own);
    }
    if (p.bias != nullptr) value += load<B::kLanes>(static_cast<const Scalar*>(p.bias) + column);
    if (p.relu) value = value <= 0 ? typename B::Value{} : value;  // NaN stays
    store_result<B::kLanes>(p, row * p.width + column, value);
  }
};

// The same where each head has weights of its own, in a block that may span several of them.
template <typename B>
struct HeadSumMessage : SumMessage<B, true> {
  using Base = SumMessage<B, true>;
  using typename Base::Scalar;
  using typename Base::T;
  const T* of_edge = nullptr;
  Scalar scale = 1;
  int64_t head[B::kVectors];  // of each vector

  explicit GSP_HD HeadSumMessage(const B& b) : Base(b) {
    const int64_t head_width = b.problem.width / b.problem.heads;
    for (int k = 0; k < B::kVectors; ++k) head[k] = b.column(k) / head_width;
  }
  GSP_HD void edge(int64_t j, int64_t source) {
    const Problem& p = this->block.problem;
    this->features = this->x[source];
    of_edge = static_cast<const T*>(p.weight) + j * p.heads;
    scale = this->scales[source];
  }
  GSP_HD typename B::Value message(int k) const {
    const Scalar factor = load_scalar(of_edge + head[k]) * scale;
    return factor * load<B::kLanes>(this->features + this->block.offset(k));
  }
};

// One column's mean over edges [first, last), where the plain sum overflows: each term is first
// made as small as keeps any sum of them in range.
template <template <typename> class Message, typename T, typename Index>
__attribute__((noinline, cold)) Accumulator<T> mean_of_scaled(const Problem& problem,
                                                              Columns column, int64_t first,
                                                              int64_t last) {
  using Scalar = Accumulator<T>;
  Scalar scale = 1;
  while (scale * static_cast<Scalar>(last - first) > 1) scale /= 2;
  const Block<T, Index, 1, 1> block{problem, column};
  Message<Block<T, Index, 1, 1>> message(block);
  Scalar sum = 0;
  for (int64_t j = first; j < last; ++j) {
    message.edge(j, static_cast<const Index*>(problem.csr.col)[j]);
    message.factor *= scale;
    sum += message.message(0)[0];
  }
  return sum / (scale * static_cast<Scalar>(last - first));
}

// max and min: w * x of the edge's source, rounded to the storage type, so that a tie is a tie for
// every operator.
template <typename B, bool kWeighted, Reduce kReduce_>
struct ArgMessage : MessageBase {
  using T = typename B::T;
  using Index = typename B::Index;
  static constexpr Reduce kReduce = kReduce_;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Factors<T> weights = edge_weights(block);
  const T* features = nullptr;
  Accumulator<T> factor = 1;

  explicit GSP_HD ArgMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t source) const { x.prefetch(source); }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = x[source];
    if constexpr (kWeighted) factor = weights[j];
  }
  GSP_HD typename B::Value message(int k) const {
    const auto value = load<B::kLanes>(features + block.offset(k));
    if constexpr (kWeighted) return rounded<T, B::kLanes>(factor * value);
    return value;
  }

  template <typename R>
  GSP_HD void finish(int64_t row, int64_t first, int64_t last, const R& reducer, int k) const {
    const Problem& p = block.problem;
    const int64_t at = row * p.width + block.column(k);
    T* out = static_cast<T*>(p.result) + at;
    Vector<Index, B::kLanes> arg = Vector<Index, B::kLanes>{} - 1;
    if (first == last) {
      store<B::kLanes>(out, typename B::Value{});
    } else {
      store<B::kLanes>(out, reducer.value);
      arg = __builtin_convertvector(reducer.position, decltype(arg)) + static_cast<Index>(first);
    }
    if (p.result_arg == nullptr) return;
    std::memcpy(static_cast<Index*>(p.result_arg) + at, &arg, sizeof(arg));
  }

  // From positions in row order to the caller's ids.
  GSP_HD void finish_row(int64_t row, int64_t first, int64_t last) const {
    const Problem& p = block.problem;
    const auto* perm = static_cast<const Index*>(p.csr.perm);
    if (perm == nullptr || p.result_arg == nullptr || first == last) return;
    Index* arg = static_cast<Index*>(p.result_arg) + row * p.width;
    for (int64_t column = block.columns.begin; column < block.columns.last + B::kLanes; ++column) {
      arg[column] = perm[arg[column]];
    }
  }
};

// The sums of the operators below are stored as they are: no scales. Counts in the accumulation
// type.
template <typename Stored, typename B, typename R>
GSP_HD void store_sum(const B& block, int64_t row, const R& reducer, int k) {
  const Problem& p = block.problem;
  store<B::kLanes>(static_cast<Stored*>(p.result) + row * p.width + block.column(k), reducer.value);
}

// Gradient of max and min, on the transposed graph: w * grad of the edge's destination where this
// edge won.
template <typename B>
struct ArgBackwardMessage : MessageBase {
  using T = typename B::T;
  using Index = typename B::Index;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> all_grad{block, block.problem.grad};
  Rows<B, Index> all_arg{block, block.problem.arg};
  Factors<T> weights = edge_weights(block);
  const Index* perm = static_cast<const Index*>(block.problem.csr.perm);
  const T* grad = nullptr;
  const Index* arg = nullptr;
  Index id = 0;
  Accumulator<T> factor = 1;

  explicit GSP_HD ArgBackwardMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t destination) const {
    all_grad.prefetch(destination);
    all_arg.prefetch(destination);
  }
  GSP_HD void edge(int64_t j, int64_t destination) {
    grad = all_grad[destination];
    arg = all_arg[destination];
    id = perm ? perm[j] : static_cast<Index>(j);
    factor = weights[j];
  }
  GSP_HD typename B::Value message(int k) const {
    const auto args = load_raw<Vector<Index, B::kLanes>>(arg + block.offset(k));
    const auto won = __builtin_convertvector(args == id, typename B::Position);
    const auto value = factor * load<B::kLanes>(grad + block.offset(k));
    return won ? value : typename B::Value{};
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<T>(block, row, reducer, k);
  }
};

// How many messages of the row equal its maximum or minimum; or the share of each in the gradient.
template <typename B>
struct TieCountMessage : MessageBase {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Rows<B> all_out{block, block.problem.out};
  Rows<B> all_grad{block, block.problem.grad};
  Factors<T> weights = edge_weights(block);
  const T* out = nullptr;
  const T* features = nullptr;
  Accumulator<T> factor = 1;

  explicit GSP_HD TieCountMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t source) const { x.prefetch(source); }
  GSP_HD void row(int64_t r) { out = all_out[r]; }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = x[source];
    factor = weights[j];
  }
  GSP_HD typename B::Value message(int k) const {
    using Value = typename B::Value;
    const Value sent = rounded<T, B::kLanes>(factor * load<B::kLanes>(features + block.offset(k)));
    return same(sent, load<B::kLanes>(out + block.offset(k))) ? Value{} + 1 : Value{};
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    using Value = typename B::Value;
    const Problem& p = block.problem;
    Value count = reducer.value;
    if (p.zero_wins) {
      const Value best = load<B::kLanes>(all_out[row] + block.offset(k));
      count += best == Value{} ? Value{} + 1 : Value{};
    }
    const int64_t at = row * p.width + block.column(k);
    if (p.grad.data == nullptr) {
      store<B::kLanes>(static_cast<Accumulator<T>*>(p.result) + at, count);
    } else {
      const Value share = load<B::kLanes>(all_grad[row] + block.offset(k)) / count;
      store<B::kLanes>(static_cast<T*>(p.result) + at, share);
    }
  }
};

// Gradient of max and min shared by all winners, on the transposed graph: w * grad of the edge's
// destination where this edge's message equals the result there.
template <typename B>
struct TieBackwardMessage : MessageBase {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Rows<B> all_out{block, block.problem.out};
  Rows<B> all_grad{block, block.problem.grad};
  Factors<T> weights = edge_weights(block);
  const T* features = nullptr;
  const T* out = nullptr;
  const T* grad = nullptr;
  Accumulator<T> factor = 1;

  explicit GSP_HD TieBackwardMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t destination) const {
    all_grad.prefetch(destination);
    all_out.prefetch(destination);
  }
  GSP_HD void row(int64_t r) { features = x[r]; }
  GSP_HD void edge(int64_t j, int64_t destination) {
    out = all_out[destination];
    grad = all_grad[destination];
    factor = weights[j];
  }
  GSP_HD typename B::Value message(int k) const {
    using Value = typename B::Value;
    const Value sent = rounded<T, B::kLanes>(factor * load<B::kLanes>(features + block.offset(k)));
    const Value value = factor * load<B::kLanes>(grad + block.offset(k));
    return same(sent, load<B::kLanes>(out + block.offset(k))) ? value : Value{};
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<T>(block, row, reducer, k);
  }
};

// The part of GATv2's gradient that takes all edges of a row: w where the sum of both ends is
// positive, slope * w where not.
template <typename B>
struct PairGradientMessage : MessageBase {
  using T = typename B::T;
  using Index = typename B::Index;
  using Scalar = Accumulator<T>;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Rows<B> all_own{block, block.problem.grad};
  Factors<T> weights = edge_weights(block);
  const Index* perm = static_cast<const Index*>(block.problem.csr.perm);
  Scalar slope = static_cast<Scalar>(block.problem.slope);
  const T* features = nullptr;
  const T* own = nullptr;
  Scalar factor = 1;

  explicit GSP_HD PairGradientMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t, int64_t source) const { x.prefetch(source); }
  GSP_HD void row(int64_t r) { own = all_own[r]; }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = x[source];
    factor = weights[perm ? int64_t{perm[j]} : j];
  }
  GSP_HD typename B::Value message(int k) const {
    using Value = typename B::Value;
    const Value sum =
        load<B::kLanes>(own + block.offset(k)) + load<B::kLanes>(features + block.offset(k));
    return sum > 0 ? Value{} + factor : Value{} + factor * slope;
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t, int64_t, const R& reducer, int k) const {
    store_sum<T>(block, row, reducer, k);
  }
};

// The rows of Problem::edge, which edges are found in by their ids.
template <typename B>
struct EdgeRows {
  using Index = typename B::Index;
  Rows<B> rows;
  const Index* perm;

  explicit GSP_HD EdgeRows(const B& block)
      : rows(block, block.problem.edge), perm(static_cast<const Index*>(block.problem.csr.perm)) {}
  GSP_HD int64_t id(int64_t j) const { return perm ? int64_t{perm[j]} : j; }
};

// sum and mean of w * relu(x + e), x of the edge's source and e its own.
template <typename B>
struct EdgeSumMessage : MessageBase {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  EdgeRows<B> edges{block};
  Factors<T> weights = edge_weights(block);
  const T* features = nullptr;
  const T* own = nullptr;
  Accumulator<T> factor = 1;

  explicit GSP_HD EdgeSumMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t j, int64_t source) const {
    x.prefetch(source);
    edges.rows.prefetch(edges.id(j));
  }
  GSP_HD void edge(int64_t j, int64_t source) {
    features = x[source];
    own = edges.rows[edges.id(j)];
    factor = weights[j];
  }
  GSP_HD typename B::Value message(int k) const {
    using Value = typename B::Value;
    const Value sum =
        load<B::kLanes>(features + block.offset(k)) + load<B::kLanes>(own + block.offset(k));
    return factor * (sum <= 0 ? Value{} : sum);  // NaN stays
  }
  template <typename R>
  GSP_HD void finish(int64_t row, int64_t first, int64_t last, const R& reducer, int k) const {
    const Problem& p = block.problem;
    auto value = reducer.value;
    if (p.mean && last > first) value = mean_of<EdgeSumMessage>(block, value, first, last, k);
    store<B::kLanes>(static_cast<T*>(p.result) + row * p.width + block.column(k), value);
  }
};

// Its gradient, on the transposed graph: w * grad of the edge's destination where x + e is
// positive, that of x added up, and where kEdges that of each e.
template <typename B, bool kEdges>
struct EdgeSumBackwardMessage : MessageBase {
  using T = typename B::T;
  static constexpr Reduce kReduce = Reduce::kSum;
  const B& block;
  Rows<B> x{block, block.problem.x};
  Rows<B> all_grad{block, block.problem.grad};
  EdgeRows<B> edges{block};
  Factors<T> weights = edge_weights(block);
  Rows<B> results{block, kEdges ? Matrix{block.problem.result_edge, block.problem.width}
                                : block.problem.edge};  // of edges, as `edges.rows`
  const T* features = nullptr;
  const T* own = nullptr;
  const T* grad = nullptr;
  T* result = nullptr;
  Accumulator<T> factor = 1;

  explicit GSP_HD EdgeSumBackwardMessage(const B& b) : block(b) {}
  GSP_HD void ahead(int64_t j, int64_t destination) const {
    const int64_t id = edges.id(j);
    all_grad.prefetch(destination);
    edges.rows.prefetch(id);
    if constexpr (kEdges) results.prefetch(id);  // or a store waits for its line
  }
  GSP_HD void row(int64_t r) { features = x[r]; }
  GSP_HD void edge(int64_t j, int64_t destination) {
    const int64_t id = edges.id(j);
    own = edges.rows[id];
    grad = all_grad[destination];
    factor = weights[j];
    if constexpr (kEdges) result = const_cast<T*>(results[id]);
  }
  GSP_HD typename B::Value message(int k) const {
    using Value = typename B::Value;
    const Value sum =
        load<B::kLanes>(features + block.offset(k)) + load<B::kLanes>(own + block.offset(k));
    const Value value = factor * load<B::kLanes>(grad + block.offset(k));
    const Value back = sum <= 0 ? Value{} : value;
    if constexpr (kEdges) store<B::kLanes>(result + block.offset(k), back);
    return back;
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
  static constexpr int64_t kAhead = kBytes >= 128 ? 8 : 16;  // edges to fetch in advance: some 2 KB

  const B& block;
  const Schedule& schedule;
  const Index* rowptr = static_cast<const Index*>(block.problem.csr.rowptr);
  const Index* col = static_cast<const Index*>(block.problem.csr.col);

  GSP_HD void edges(Message& message, State (&state)[B::kVectors], int64_t first, int64_t begin,
                    int64_t end) const {
    const int64_t last_edge = block.problem.csr.edges - 1;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t later = j + kAhead < last_edge ? j + kAhead : last_edge;
      message.ahead(later, col[later]);
      message.edge(j, col[j]);
      const auto position =
          typename B::Position{} + static_cast<PositionScalar<typename B::T>>(j - first);
#pragma GCC unroll 8
      for (int k = 0; k < B::kVectors; ++k) state[k].update(message.message(k), position);
    }
  }

  GSP_HD static void init(State (&state)[B::kVectors], int64_t first_position) {
#pragma GCC unroll 8
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

  // Not inlined: registers go to one operator and one block size.
  __attribute__((noinline)) void task(const Task& task) const {
    Message message(block);
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
#pragma GCC unroll 8
      for (int k = 0; k < B::kVectors; ++k) message.finish(row, first, last, state[k], k);
      message.finish_row(row, first, last);
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

  __attribute__((noinline)) void merge(const LongRow& row) const {
    Message message(block);
    State total = restore(row.first_slot, 0);
    for (int64_t slot = row.first_slot + 1; slot < row.end_slot; ++slot) {
      total.merge(restore(slot, 0));
    }
    const int64_t first = rowptr[row.row], last = rowptr[row.row + 1];
    message.finish(row.row, first, last, total, 0);
    message.finish_row(row.row, first, last);
  }
};

// Calls visit(Block) for blocks that cover the columns of all heads, of at most kMost vectors each;
// with kJoinHeads of any heads, where whole vectors fit into one.
template <typename T, typename Index, int kMost, bool kJoinHeads, int kLanes = kNativeLanes<T>,
          typename Visit>
void for_each_block(const Problem& problem, const Visit& visit) {
  int64_t heads = problem.heads, head_width = problem.width / heads;
  if constexpr (kLanes > 1) {
    constexpr int kFewer = kLanes > 4 ? kLanes / 2 : 1;
    if (head_width < kLanes) {
      return for_each_block<T, Index, kMost, kJoinHeads, kFewer>(problem, visit);
    }
  }
  if (kJoinHeads && head_width % kLanes == 0) {
    heads = 1;
    head_width = problem.width;
  }
  for (int64_t head = 0; head < heads; ++head) {
    const int64_t end = (head + 1) * head_width;
    for (int64_t begin = head * head_width; begin < end;) {
      // False where this many vectors are more than there are left, or a variant that is not
      // compiled.
      const auto visit_vectors = [&](auto count) {
        constexpr int kVectors = decltype(count)::value;
        // A narrow head has fewer than two native vectors, a head of one column has one.
        constexpr int kLimit = kLanes == 1 ? 1 : kLanes < kNativeLanes<T> ? 2 : kMost;
        if constexpr (kVectors <= kMost && kVectors <= kLimit) {
          if (kVectors > 1 && begin + (kVectors - 1) * kLanes >= end) return false;
          const int64_t wanted = begin + (kVectors - 1) * kLanes;
          const int64_t last = wanted < end - kLanes ? wanted : end - kLanes;
          visit(Block<T, Index, kVectors, kLanes>{problem,
                                                  {begin < last ? begin : last, last, head}});
          begin += kVectors * kLanes;
          return true;
        }
        return false;
      };
      visit_vectors(std::integral_constant<int, 8>{}) ||
          visit_vectors(std::integral_constant<int, 4>{}) ||
          visit_vectors(std::integral_constant<int, 3>{}) ||
          visit_vectors(std::integral_constant<int, 2>{}) ||
          visit_vectors(std::integral_constant<int, 1>{});
    }
  }
}

// Messages by operator, for sweep(). kMost: vectors of a block; the less usual operators come in
// fewer variants.
struct OperatorBase {
  static constexpr bool kJoinHeads = false;
};
template <bool kWeighted>
struct Sum : OperatorBase {
  template <typename B>
  using Message = SumMessage<B, kWeighted>;
  static constexpr int kMost = 8;
};
struct HeadSum {
  template <typename B>
  using Message = HeadSumMessage<B>;
  static constexpr int kMost = 4;
  static constexpr bool kJoinHeads = true;
};
template <bool kWeighted, Reduce kReduce>
struct Arg : OperatorBase {
  template <typename B>
  using Message = ArgMessage<B, kWeighted, kReduce>;
  static constexpr int kMost = 4;
};
struct ArgBackward : OperatorBase {
  template <typename B>
  using Message = ArgBackwardMessage<B>;
  static constexpr int kMost = 4;
};
struct TieCount : OperatorBase {
  template <typename B>
  using Message = TieCountMessage<B>;
  static constexpr int kMost = 2;
};
struct TieBackward : OperatorBase {
  template <typename B>
  using Message = TieBackwardMessage<B>;
  static constexpr int kMost = 2;
};
struct PairGradient : OperatorBase {
  template <typename B>
  using Message = PairGradientMessage<B>;
  static constexpr int kMost = 4;
};
struct EdgeSum : OperatorBase {
  template <typename B>
  using Message = EdgeSumMessage<B>;
  static constexpr int kMost = 4;
};
template <bool kEdges>
struct EdgeSumBackward : OperatorBase {
  template <typename B>
  using Message = EdgeSumBackwardMessage<B, kEdges>;
  static constexpr int kMost = 4;
};

template <typename T, typename Index, typename Operator>
void sweep(const Problem& problem, const Schedule& schedule) {
  // 64-bit indices are for graphs too large for 32: rare, so they share one variant.
  constexpr int kMost = sizeof(Index) == 8 ? 1 : Operator::kMost;
  for_each(problem.parallel_for, schedule.num_tasks, [&](int64_t i) {
    for_each_block<T, Index, kMost, Operator::kJoinHeads>(problem, [&](const auto& block) {
      using B = std::decay_t<decltype(block)>;
      Sweep<B, typename Operator::template Message<B>>{block, schedule}.task(schedule.tasks[i]);
    });
  });
  if (schedule.num_long_rows == 0) return;
  for_each(problem.parallel_for, schedule.num_long_rows, [&](int64_t i) {
    // One column at a time: there are few long rows.
    for_each_block<T, Index, 1, false, 1>(problem, [&](const auto& block) {
      using B = std::decay_t<decltype(block)>;
      Sweep<B, typename Operator::template Message<B>>{block, schedule}.merge(
          schedule.long_rows[i]);
    });
  });
}

}  // namespace
}  // namespace gsp::cpu
