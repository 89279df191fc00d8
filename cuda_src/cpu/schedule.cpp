#include "cpu/schedule.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace gsp::cpu {
namespace {

constexpr int64_t kLongRow = 8192;     // edges; a longer row is cut into pieces of this many
constexpr int64_t kTaskCost = 4096;    // edges + rows of a task: some 50 us of work at 64 columns
constexpr int64_t kTasksWanted = 512;  // of a graph large enough: balance for many threads

// Edges + rows of the smallest task worth handing out: a graph with fewer runs without other
// threads.
int64_t small_task(int64_t width) {
  return std::clamp<int64_t>(65536 / std::max<int64_t>(width, 1), 1024, kLongRow);
}

// First row >= from that ends beyond `cost`, where the cost up to row r is rowptr[r] + r. The
// answer is near `from`, so the search gallops.
template <typename Index>
int64_t row_at(const Index* rowptr, int64_t rows, int64_t from, int64_t cost) {
  const auto ends_before = [&](int64_t r) { return int64_t{rowptr[r + 1]} + r + 1 <= cost; };
  int64_t step = 1;
  while (from + step < rows && ends_before(from + step - 1)) {
    from += step;
    step *= 2;
  }
  int64_t end = std::min(rows, from + step);
  while (from < end) {
    const int64_t middle = from + (end - from) / 2;
    if (ends_before(middle)) {
      from = middle + 1;
    } else {
      end = middle;
    }
  }
  return from;
}

template <typename Index>
void build(const Index* rowptr, int64_t rows, int64_t width, std::vector<Task>& tasks,
           std::vector<LongRow>& long_rows) {
  const int64_t total = rows == 0 ? 0 : int64_t{rowptr[rows]} + rows;
  const int64_t smallest = small_task(width);
  const int64_t target = std::clamp(total / kTasksWanted, smallest, std::max(smallest, kTaskCost));
  int64_t slots = 0;
  int64_t begin = 0;
  const auto cut_before = [&](int64_t row) {
    if (begin < row) tasks.push_back({begin, row, 0, 0, -1});
    begin = row;
  };
  for (int64_t cost = target; begin < rows; cost += target) {
    // A long row costs more than a task, so one of the borders lies in it: looking at the borders
    // finds them all.
    const int64_t row = row_at(rowptr, rows, begin, cost);
    cut_before(row);
    if (row == rows) break;
    const int64_t first = rowptr[row], last = rowptr[row + 1];
    if (last - first <= kLongRow) continue;
    if (last - first > std::numeric_limits<int32_t>::max()) {
      throw std::runtime_error("row " + std::to_string(row) + " has " +
                               std::to_string(last - first) +
                               " edges, the CPU kernels take at most 2^31 - 1 in one row");
    }
    const int64_t first_slot = slots;
    for (int64_t edge = first; edge < last; edge += kLongRow) {
      tasks.push_back({row, row + 1, edge, std::min(edge + kLongRow, last), slots++});
    }
    long_rows.push_back({row, first_slot, slots});
    begin = row + 1;
    cost = std::max(cost, (last + row + 1) / target * target);
  }
}

}  // namespace

ScheduleStorage::ScheduleStorage(const Csr& csr, int64_t width) {
  if (csr.wide) {
    build(static_cast<const int64_t*>(csr.rowptr), csr.rows, width, tasks_, long_rows_);
  } else {
    build(static_cast<const int32_t*>(csr.rowptr), csr.rows, width, tasks_, long_rows_);
  }
  const int64_t slots = long_rows_.empty() ? 0 : long_rows_.back().end_slot;
  if (slots > 0) scratch_.reset(new double[2 * slots * width]);
  schedule_ = {tasks_.data(),
               int64_t(tasks_.size()),
               long_rows_.data(),
               int64_t(long_rows_.size()),
               scratch_.get(),
               scratch_.get() + slots * width,
               width};
}

}  // namespace gsp::cpu
