// Operators with a result per edge: dot products (_sddmm*) and the softmax over the edges into a
// row. Part of kernels_impl.h.
#pragma once

#include <cstdlib>
#include <new>

#include "cpu/parallel.h"
#include "cpu/schedule.h"
#include "cpu/simd.h"
#include "cpu/spmm_kernels.h"

namespace gsp::cpu {
namespace {

template <typename T>
GSP_HD const T* row_of(const Matrix& matrix, int64_t row) {
  return static_cast<const T*>(matrix.data) + row * matrix.stride;
}

// Calls visit(row, first edge, end edge) for the rows, or the piece of a long row, of one task.
template <typename Index, typename Visit>
GSP_HD void for_each_row(const Csr& csr, const Task& task, const Visit& visit) {
  const auto* rowptr = static_cast<const Index*>(csr.rowptr);
  if (task.slot >= 0) return visit(task.row_begin, task.edge_begin, task.edge_end);
  for (int64_t row = task.row_begin; row < task.row_end; ++row) {
    visit(row, int64_t{rowptr[row]}, int64_t{rowptr[row + 1]});
  }
}

template <typename Index>
GSP_HD Index edge_id(const Csr& csr, int64_t j) {
  return csr.perm ? static_cast<const Index*>(csr.perm)[j] : static_cast<Index>(j);
}

// Which columns count in a dot product: all, those that the edge won, or those where it is among
// the winners. Or all, of the activated sum of both rows with a third; or of one row with the
// positive part of what the other and the edge's own add up to.
enum class Select { kAll, kArg, kTie, kPair, kMessage };

template <typename T, typename Index, Select kSelect>
struct Dot {
  const T* a;
  const T* b;
  const Index* arg = nullptr;
  const T* out = nullptr;
  Index id = 0;
  Accumulator<T> weight = 1;
  Accumulator<T> slope = 0;

  template <int kLanes>
  GSP_HD Value<T, kLanes> term(int64_t column) const {
    const auto right = load<kLanes>(b + column);
    if constexpr (kSelect == Select::kPair) {
      const auto sum = load<kLanes>(a + column) + right;
      return (sum > 0 ? sum : slope * sum) * load<kLanes>(out + column);
    }
    if constexpr (kSelect == Select::kMessage) {
      const auto sum = right + load<kLanes>(out + column);
      return load<kLanes>(a + column) * (sum <= 0 ? Value<T, kLanes>{} : sum);
    }
    const auto product = load<kLanes>(a + column) * right;
    if constexpr (kSelect == Select::kArg) {
      const auto args = load_raw<Vector<Index, kLanes>>(arg + column);
      const auto won = __builtin_convertvector(args == id, Position<T, kLanes>);
      return won ? product : Value<T, kLanes>{};
    } else if constexpr (kSelect == Select::kTie) {
      const auto sent = rounded<T, kLanes>(weight * right);
      return same(sent, load<kLanes>(out + column)) ? product : Value<T, kLanes>{};
    }
    return product;
  }

  // The columns that fill no native vector, by halving.
  template <int kLanes>
  GSP_HD Accumulator<T> tail(int64_t column, int64_t end) const {
    Accumulator<T> sum = 0;
    if (end - column >= kLanes) {
      sum = sum_of_lanes<kLanes, Accumulator<T>>(term<kLanes>(column));
      column += kLanes;
    }
    if constexpr (kLanes > 1) sum += tail<kLanes / 2>(column, end);
    return sum;
  }

  GSP_HD Accumulator<T> operator()(int64_t column, int64_t end) const {
    constexpr int kLanes = kNativeLanes<T>;
    Value<T, kLanes> even{}, odd{};
    for (; end - column >= 2 * kLanes; column += 2 * kLanes) {
      even += term<kLanes>(column);
      odd += term<kLanes>(column + kLanes);
    }
    if (end - column >= kLanes) {
      even += term<kLanes>(column);
      column += kLanes;
    }
    Accumulator<T> sum = sum_of_lanes<kLanes, Accumulator<T>>(even + odd);
    if (column < end) sum += tail<kLanes / 2>(column, end);
    return sum;
  }
};

template <typename T, typename Index, Select kSelect>
void dots(const Problem& problem, const Schedule& schedule) {
  const Csr& csr = problem.csr;
  const auto* col = static_cast<const Index*>(csr.col);
  const int64_t heads = problem.heads;
  const int64_t head_width = problem.width / heads;
  const Factors<T> weights(problem.weight, 0, 1);
  const int64_t row_bytes = problem.width * int64_t{sizeof(T)};
  const int64_t ahead = row_bytes >= 512 ? 4 : 8;               // edges
  const int64_t fetched = row_bytes < 1024 ? row_bytes : 1024;  // the hardware follows a longer row
  for_each(problem.parallel_for, schedule.num_tasks, [&](int64_t i) {
    for_each_row<Index>(csr, schedule.tasks[i], [&](int64_t row, int64_t first, int64_t end) {
      Dot<T, Index, kSelect> dot{row_of<T>(problem.grad, row), nullptr};
      if constexpr (kSelect == Select::kArg) dot.arg = row_of<Index>(problem.arg, row);
      if constexpr (kSelect == Select::kTie || kSelect == Select::kPair) {
        dot.out = row_of<T>(problem.out, row);
        dot.slope = static_cast<Accumulator<T>>(problem.slope);
      }
      for (int64_t j = first; j < end; ++j) {
        const int64_t later = j + ahead < csr.edges ? j + ahead : csr.edges - 1;
        const auto* soon = reinterpret_cast<const char*>(row_of<T>(problem.x, col[later]));
        for (int64_t byte = 0; byte < fetched; byte += 64) __builtin_prefetch(soon + byte);
        dot.b = row_of<T>(problem.x, col[j]);
        dot.id = edge_id<Index>(csr, j);
        if constexpr (kSelect == Select::kMessage) dot.out = row_of<T>(problem.edge, dot.id);
        T* result = static_cast<T*>(problem.result) + int64_t{dot.id} * heads;
        for (int64_t head = 0; head < heads; ++head) {
          if constexpr (kSelect == Select::kTie) dot.weight = weights[j * heads + head];
          store_scalar(result + head, dot(head * head_width, (head + 1) * head_width));
        }
      }
    });
  });
}

// e^x to about an ulp: x = n ln 2 + r, a polynomial in r, and the exponent n added in two steps, so
// that results below the smallest normal number come out right too.
template <int kLanes>
GSP_HD Vector<float, kLanes> exponential(Vector<float, kLanes> x) {
  using F = Vector<float, kLanes>;
  using I = Vector<int32_t, kLanes>;
  x = x < -110.0f ? F{} - 110.0f : x;  // 0 in float
  x = x > 90.0f ? F{} + 90.0f : x;     // inf in float
  const F magic = F{} + 12582912.0f;   // 1.5 * 2^23: adding it rounds to an integer
  const F shifted = x * 1.44269504f + magic;
  const F n = shifted - magic;
  const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  F p = F{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const I exponent = bit_cast<I>(shifted) - bit_cast<I>(magic);
  const I half = exponent >> 1;
  return p * bit_cast<F>((half + 127) << 23) * bit_cast<F>((exponent - half + 127) << 23);
}
template <int kLanes>
GSP_HD Vector<double, kLanes> exponential(Vector<double, kLanes> x) {
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = std::exp(x[lane]);
  return x;
}

// values[i] = e^values[i], in whole vectors: up to one vector less one of what follows is
// overwritten.
template <typename Scalar>
GSP_HD void exponentiate(Scalar* values, int64_t count) {
  constexpr int kLanes = GSP_VECTOR_BYTES / sizeof(Scalar);
  using V = Vector<Scalar, kLanes>;
  for (int64_t i = 0; i < count; i += kLanes) {
    const V v = exponential<kLanes>(load_raw<V>(values + i));
    std::memcpy(values + i, &v, sizeof(v));
  }
}

// A buffer that throws where there is no memory. Not std::vector: see Schedule.
template <typename Scalar>
struct Buffer {
  Scalar* data;
  explicit Buffer(int64_t size)
      : data(static_cast<Scalar*>(std::calloc(size + 1, sizeof(Scalar)))) {
    if (data == nullptr) throw std::bad_alloc();
  }
  ~Buffer() { std::free(data); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
};

// The two operators that scale the edges of a row by something that takes all of them to know:
// gather() reads the edges, transform() runs over those of a whole task, add_up() makes one number
// per head, write() the results.
template <typename T, typename Index>
struct SoftmaxBase {
  using Scalar = Accumulator<T>;
  const Problem& problem;

  GSP_HD int64_t at(int64_t j) const {
    return int64_t{edge_id<Index>(problem.csr, j)} * problem.heads;
  }
  GSP_HD static Scalar read(const Matrix& values, int64_t i) {
    return load_scalar(static_cast<const T*>(values.data) + i);
  }
  GSP_HD void add_up(const Scalar* terms, int64_t edges, Scalar* sum) const {
    const int64_t heads = problem.heads;
    for (int64_t h = 0; h < heads; ++h) sum[h] = 0;
    for (int64_t i = 0; i < edges; ++i) {
      for (int64_t h = 0; h < heads; ++h) sum[h] += terms[i * heads + h];
    }
  }
};

// e^(logit - largest) / their sum.
template <typename T, typename Index>
struct Softmax : SoftmaxBase<T, Index> {
  using Base = SoftmaxBase<T, Index>;
  using Base::problem;
  using typename Base::Scalar;

  // A row of nothing but -inf is shifted by 0: its sum is 0 and its results are 0/0, as in
  // torch.softmax.
  static GSP_HD Scalar shift(Scalar largest) { return largest == -INFINITY ? 0 : largest; }

  // `largest` is found, or is known already: for a piece of a long row whose other pieces are done.
  GSP_HD void gather(int64_t first, int64_t end, Scalar* terms, Scalar* largest, bool known) const {
    const int64_t heads = problem.heads;
    for (int64_t h = 0; h < heads && !known; ++h) largest[h] = -INFINITY;
    for (int64_t j = first; j < end; ++j) {
      Scalar* z = terms + (j - first) * heads;
      const int64_t at = this->at(j);
      for (int64_t h = 0; h < heads; ++h) {
        z[h] = this->read(problem.x, at + h);
        largest[h] = !known && z[h] > largest[h] ? z[h] : largest[h];
      }
    }
    for (int64_t i = 0; i < end - first; ++i) {
      for (int64_t h = 0; h < heads; ++h) terms[i * heads + h] -= shift(largest[h]);
    }
  }
  GSP_HD void transform(Scalar* terms, int64_t count) const { exponentiate(terms, count); }

  // Adds another piece of a row.
  GSP_HD void merge(Scalar* largest, Scalar* sum, const Scalar* other_largest,
                    const Scalar* other_sum) const {
    for (int64_t h = 0; h < problem.heads; ++h) {
      const Scalar most = largest[h] > other_largest[h] ? largest[h] : other_largest[h];
      const auto scaled = [&](Scalar value, Scalar from) {
        return from == -INFINITY ? value : value * std::exp(from - most);
      };
      sum[h] = scaled(sum[h], largest[h]) + scaled(other_sum[h], other_largest[h]);
      largest[h] = most;
    }
  }

  GSP_HD void write(int64_t first, int64_t end, const Scalar* terms, const Scalar* sum) const {
    const int64_t heads = problem.heads;
    for (int64_t j = first; j < end; ++j) {
      T* result = static_cast<T*>(problem.result) + this->at(j);
      for (int64_t h = 0; h < heads; ++h) {
        store_scalar(result + h, terms[(j - first) * heads + h] / sum[h]);
      }
    }
  }
};

// p * (grad - sum of p * grad).
template <typename T, typename Index>
struct SoftmaxBackward : SoftmaxBase<T, Index> {
  using Base = SoftmaxBase<T, Index>;
  using Base::problem;
  using typename Base::Scalar;

  GSP_HD void gather(int64_t first, int64_t end, Scalar* terms, Scalar*, bool) const {
    const int64_t heads = problem.heads;
    for (int64_t j = first; j < end; ++j) {
      const int64_t at = this->at(j);
      for (int64_t h = 0; h < heads; ++h) {
        terms[(j - first) * heads + h] =
            this->read(problem.x, at + h) * this->read(problem.grad, at + h);
      }
    }
  }
  GSP_HD void transform(Scalar*, int64_t) const {}
  GSP_HD void merge(Scalar*, Scalar* sum, const Scalar*, const Scalar* other_sum) const {
    for (int64_t h = 0; h < problem.heads; ++h) sum[h] += other_sum[h];
  }
  GSP_HD void write(int64_t first, int64_t end, const Scalar*, const Scalar* sum) const {
    const int64_t heads = problem.heads;
    for (int64_t j = first; j < end; ++j) {
      const int64_t at = this->at(j);
      for (int64_t h = 0; h < heads; ++h) {
        const Scalar p = this->read(problem.x, at + h), g = this->read(problem.grad, at + h);
        store_scalar(static_cast<T*>(problem.result) + at + h, p * (g - sum[h]));
      }
    }
  }
};

// The sums of all rows; then they become the gradient of a, and what they make of att's, row by
// row, is added up, some rows at a time and then these in their order.
template <typename T, typename Index>
void gradient_of_pairs(const Problem& problem, const Schedule& schedule) {
  using Scalar = Accumulator<T>;
  sweep<T, Index, PairGradient>(problem, schedule);
  constexpr int64_t kRows = 1024;
  const int64_t width = problem.width, rows = problem.csr.rows;
  const int64_t parts = (rows + kRows - 1) / kRows;
  const Buffer<Scalar> buffer(parts * width);
  const T* att = static_cast<const T*>(problem.out.data);
  for_each(problem.parallel_for, parts, [&](int64_t part) {
    Scalar* total = buffer.data + part * width;
    const int64_t end = (part + 1) * kRows < rows ? (part + 1) * kRows : rows;
    for (int64_t row = part * kRows; row < end; ++row) {
      const T* own = row_of<T>(problem.grad, row);
      T* result = static_cast<T*>(problem.result) + row * width;
      for (int64_t c = 0; c < width; ++c) {
        const Scalar sum = load_scalar(result + c);
        total[c] += sum != 0 ? load_scalar(own + c) * sum : 0;  // it may have no edges, and be NaN
        store_scalar(result + c, load_scalar(att + c) * sum);
      }
    }
  });
  auto* result = static_cast<Scalar*>(problem.result_att);
  for (int64_t c = 0; c < width; ++c) {
    result[c] = 0;
    for (int64_t part = 0; part < parts; ++part) result[c] += buffer.data[part * width + c];
  }
}

// A piece of a long row keeps what it knows in the schedule's scratch until all pieces are done.
template <typename Index, typename Operator>
void normalise_rows(const Problem& problem, const Schedule& schedule) {
  using Scalar = typename Operator::Scalar;
  constexpr int64_t kPadding = GSP_VECTOR_BYTES / sizeof(Scalar);
  const Operator op{{problem}};
  const int64_t heads = problem.heads;
  const auto* rowptr = static_cast<const Index*>(problem.csr.rowptr);
  auto* all_largest = static_cast<Scalar*>(schedule.partial_values);
  auto* all_sums = static_cast<Scalar*>(schedule.partial_positions);

  for_each(problem.parallel_for, schedule.num_tasks, [&](int64_t i) {
    const Task& task = schedule.tasks[i];
    const bool piece = task.slot >= 0;
    const int64_t begin = piece ? task.edge_begin : rowptr[task.row_begin];
    const int64_t count = (piece ? task.edge_end : rowptr[task.row_end]) - begin;
    const Buffer<Scalar> buffer(count * heads + kPadding + 2 * heads);
    Scalar* terms = buffer.data;
    Scalar* largest = piece ? all_largest + task.slot * heads : terms + count * heads + kPadding;
    Scalar* sum = piece ? all_sums + task.slot * heads : largest + heads;
    for_each_row<Index>(problem.csr, task, [&](int64_t, int64_t first, int64_t end) {
      op.gather(first, end, terms + (first - begin) * heads, largest, false);
    });
    op.transform(terms, count * heads);
    for_each_row<Index>(problem.csr, task, [&](int64_t, int64_t first, int64_t end) {
      const Scalar* of_row = terms + (first - begin) * heads;
      op.add_up(of_row, end - first, sum);
      if (!piece) op.write(first, end, of_row, sum);
    });
  });
  if (schedule.num_long_rows == 0) return;

  for (int64_t i = 0; i < schedule.num_long_rows; ++i) {
    const LongRow& row = schedule.long_rows[i];
    const int64_t total = row.first_slot * heads;
    for (int64_t slot = row.first_slot + 1; slot < row.end_slot; ++slot) {
      op.merge(all_largest + total, all_sums + total, all_largest + slot * heads,
               all_sums + slot * heads);
    }
    for (int64_t slot = row.first_slot + 1; slot < row.end_slot; ++slot) {
      for (int64_t h = 0; h < heads; ++h) {
        all_largest[slot * heads + h] = all_largest[total + h];
        all_sums[slot * heads + h] = all_sums[total + h];
      }
    }
  }
  for_each(problem.parallel_for, schedule.num_tasks, [&](int64_t i) {
    const Task& task = schedule.tasks[i];
    if (task.slot < 0) return;
    const int64_t count = task.edge_end - task.edge_begin;
    const Buffer<Scalar> buffer(count * heads + kPadding);
    op.gather(task.edge_begin, task.edge_end, buffer.data, all_largest + task.slot * heads, true);
    op.transform(buffer.data, count * heads);
    op.write(task.edge_begin, task.edge_end, buffer.data, all_sums + task.slot * heads);
  });
}

}  // namespace
}  // namespace gsp::cpu
