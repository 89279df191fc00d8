// How the rows of a graph are cut into tasks. A function of rowptr alone, never of the number of
// threads, so that sums are added in the same order wherever they run.
#pragma once

#include <memory>
#include <vector>

#include "cpu/kernels.h"

namespace gsp::cpu {

// Whole rows [row_begin, row_end), or one piece of a long row: then edges [edge_begin, edge_end) of
// row_begin, and the partial result goes to `slot`.
struct Task {
  int64_t row_begin;
  int64_t row_end;
  int64_t edge_begin;
  int64_t edge_end;
  int64_t slot;  // -1: whole rows
};

// A row cut into pieces: its partial results are in slots [first_slot, end_slot), to be merged in
// this order.
struct LongRow {
  int64_t row;
  int64_t first_slot;
  int64_t end_slot;
};

// Plain pointers, for the files compiled for one instruction set each: they must not instantiate
// library code that another file could be linked to.
struct Schedule {
  const Task* tasks;
  int64_t num_tasks;
  const LongRow* long_rows;
  int64_t num_long_rows;
  void* partial_values;     // [slots, scratch_width], 8 bytes each
  void* partial_positions;  // the same again
  int64_t scratch_width;
};

class ScheduleStorage {
 public:
  // width: columns that an edge has; a piece of a long row keeps a partial result for each.
  ScheduleStorage(const Csr& csr, int64_t width);
  const Schedule& schedule() const { return schedule_; }

 private:
  std::vector<Task> tasks_;
  std::vector<LongRow> long_rows_;
  std::unique_ptr<double[]> scratch_;
  Schedule schedule_;
};

}  // namespace gsp::cpu
