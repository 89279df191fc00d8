// How the threads of a warp share rows and columns, decided in this one place. No CUDA here.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gsp {

// `lanes` threads of `fold` vectors cover `lanes * fold` vectors of a row in one pass; `parallel`
// such groups share a row. lanes * parallel <= 32, both powers of two. No lanes: not chosen yet.
struct Geometry {
  int lanes = 0, fold = 1, parallel = 1;
};

inline int power_of_two_from(int64_t v) {
  int p = 1;
  while (p < v) p *= 2;
  return p;
}

// Threads that keep a large GPU busy: 128 multiprocessors of 64 warps.
constexpr int64_t kFill = 1 << 18;

// Passes over the columns that a launch can have: blocks of a grid along its second axis.
constexpr int64_t kMostPasses = 65535;

// What the choice looks at.
struct Work {
  int64_t rows = 0, edges = 0, cols = 0;
  int64_t vectors = 0;       // that a row of features has
  int64_t vector_bytes = 0;  // of each: 16, or less where alignment forbids
  int64_t l2_bytes = 0;
  bool can_fold = false;  // whether a thread may own two vectors
  bool lines = true;      // rows begin at whole cache lines
  int64_t longest = 0;    // edges of the longest row, where it is known
};

// Measured on an H200 (docs/benchmarks.md):
// - Two vectors a thread and one group a row are best for all but the narrowest and the longest
//   rows: fewer threads read the indices, and a warp holds more rows in flight.
// - Passes of 256 bytes keep more of what neighbouring rows share in the L1; where those of all
//   sources do not fit the L2 but half of them do, passes of 128. Each pass reads the indices
//   again, so the shortest rows take one. So do, up to 512 bytes, rows that share cache lines: a
//   line in which one pass ends and the next begins counts for both.
// - What few rows leave idle goes to sharing them; where a warp for each is not too much, every row
//   has one, and long ones several, for narrower passes.
// - Where the longest row is known, no more groups share rows than it has batches of 16 edges: more
//   of them cost more to fold than they save. Up to twice as slow on graphs of short rows.
inline Geometry choose_geometry(const Work& w) {
  const int64_t degree = w.rows > 0 ? w.edges / w.rows : 0;
  const auto fits = [&](int64_t vectors) {
    return w.cols * vectors * w.vector_bytes <= w.l2_bytes / 4 * 3;
  };
  const int64_t whole = 256 / w.vector_bytes, half = whole / 2;
  int64_t pass = w.vectors;
  if (degree >= 7 && pass > half) {
    pass = std::min(pass, w.lines ? whole : 2 * whole);
    if (w.lines && !fits(pass) && fits(half)) pass = half;
  }
  Geometry g;
  g.lanes = power_of_two_from(std::min<int64_t>(std::max<int64_t>(pass, 1), 64));
  const bool few = w.rows * 32 <= kFill;
  if (few && w.can_fold && g.lanes > 1 && degree < 64) {
    g.fold = 2;
    g.lanes = std::min(g.lanes / 2, w.vectors <= kMostPasses * 16 ? 8 : 32);
  } else if (few) {
    g.lanes = std::min(g.lanes, 32);
    while (g.lanes > 4 && w.rows * 64 * ((w.vectors + g.lanes - 1) / g.lanes) <= kFill / 4 * 3) {
      g.lanes /= 2;
    }
  } else if (w.can_fold && (g.lanes >= 8 || (g.lanes == 4 && degree < 4))) {
    g.fold = 2;
    g.lanes /= 2;
  }
  g.lanes = std::min(g.lanes, 32);
  const bool narrow = w.vectors * w.vector_bytes <= 64;
  const int64_t share[] = {narrow ? 10 : 64, narrow ? 64 : 128, 128};
  for (const int64_t edges : share) {
    if (degree >= edges && g.lanes * g.parallel < 32) g.parallel *= 2;
  }
  const auto shares = [&] {
    const int64_t threads = w.rows * g.lanes * g.parallel;
    if (w.longest > 0) return w.longest > 16 * g.parallel && threads < 2 * kFill;
    return (few || degree >= 8 * g.parallel) && threads < kFill;
  };
  while (g.lanes * g.parallel < 32 && shares()) g.parallel *= 2;
  return g;
}

// Threads of two vectors each that share a bundle of short rows: up to 512 bytes of a row in one
// pass, as each pass reads the indices again.
inline int stream_lanes(int64_t vectors) {
  return power_of_two_from(std::min<int64_t>((vectors + 1) / 2, 16));
}

// How a sum from staged sources is spread over blocks of threads, which have a multiprocessor each:
// `team` of them share a slab of columns and a part of the sources, that is one block of
// sources, or all where parts = 1. No team: it can't be done.
struct StagedGeometry {
  int slabs = 0, parts = 1, team = 0;
  int slab = 0;  // columns of each
  int shared_bytes = 0;
};

// Measured on an H200: up to 4 slabs it pays to keep each multiprocessor at one block of sources,
// and to add partial results afterwards. `shared_bytes` is what a block of threads may have,
// besides a little that it has anyway.
inline StagedGeometry choose_staged(int64_t rows, int64_t width, int64_t blocks, int64_t sources,
                                    int64_t multiprocessors, int64_t shared_bytes,
                                    int64_t element_bytes) {
  constexpr int64_t kRow = 128;  // bytes of a slab of a source
  const int64_t slab = kRow / element_bytes, sums_row = slab * 4;
  const int64_t slabs = (width + slab - 1) / slab, parts = slabs <= 4 ? blocks : 1;
  const int64_t room = (shared_bytes - sources * kRow) / sums_row - (shared_bytes < sources * kRow);
  if (rows < 1 || width < 1 || room < (parts > 1 ? 0 : 1)) return {};
  // The blocks of threads that there are multiprocessors for, or as many times more as the sums of
  // their rows take to fit in.
  const int64_t needed = parts > 1 ? 1 : (rows + room - 1) / room;
  const int64_t waves = (slabs * parts * needed + multiprocessors - 1) / multiprocessors;
  const int64_t team = std::min(rows, waves * multiprocessors / (slabs * parts));
  if (slabs * parts * team > INT32_MAX) return {};
  const int64_t sums = parts > 1 ? 0 : (rows + team - 1) / team;
  return {int(slabs), int(parts), int(team), int(slab), int(sources * kRow + sums * sums_row)};
}

}  // namespace gsp
