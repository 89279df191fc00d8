// Building a graph: checking an edge list, copying and sorting it.
#include "cpu/build.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "common/row_scale.h"
#include "cpu/parallel.h"

namespace gsp::cpu {
namespace {

constexpr int64_t kChunk = 1 << 16;  // edges of a task

int64_t chunks_of(int64_t size) { return (size + kChunk - 1) / kChunk; }

template <typename T>
struct Span {
  const T* data;
  int64_t stride;
  int64_t operator[](int64_t i) const { return data[i * stride]; }
};

template <typename Run>
void with_span(const Indices& indices, const Run& run) {
  if (indices.wide) {
    run(Span<int64_t>{static_cast<const int64_t*>(indices.data), indices.stride});
  } else {
    run(Span<int32_t>{static_cast<const int32_t*>(indices.data), indices.stride});
  }
}

void lower(std::atomic<int64_t>& minimum, int64_t value) {
  int64_t seen = minimum.load(std::memory_order_relaxed);
  while (value < seen && !minimum.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

// Stable counting sort in two levels: edges are first dealt into buckets of adjacent keys, each
// small enough to be counted in cache, then every bucket is sorted by itself. Chunks of edges count
// and deal in parallel: each has its own place in every bucket, so the result does not depend on
// who runs first.
template <typename Index>
void counting_sort(const Grouping& g, ParallelFor parallel_for) {
  const int64_t size = g.edges, n = g.rows;
  const auto* key = static_cast<const Index*>(g.key);
  const auto* other = static_cast<const Index*>(g.other);
  auto *rowptr = static_cast<Index*>(g.rowptr), *col = static_cast<Index*>(g.col),
       *perm = static_cast<Index*>(g.perm);
  if (n == 0 || size == 0) {
    std::fill(rowptr, rowptr + n + 1, Index{0});
    return;
  }
  int shift = 8;  // keys of a bucket: as many as keep the number of buckets below 1024
  while ((n - 1) >> shift >= 1024) ++shift;
  const int64_t buckets = ((n - 1) >> shift) + 1;
  // Few enough chunks that their counts stay small beside the edges.
  const int64_t chunk = std::max(kChunk, (size + 255) / 256);
  const int64_t chunks = (size + chunk - 1) / chunk;

  std::vector<int64_t> place(
      chunks * buckets);  // first the counts, then where each chunk writes in each bucket
  for_each(parallel_for, chunks, [&](int64_t c) {
    int64_t* count = place.data() + c * buckets;
    const int64_t end = std::min(size, (c + 1) * chunk);
    for (int64_t i = c * chunk; i < end; ++i) ++count[key[i] >> shift];
  });
  std::vector<int64_t> bucket_begin(buckets + 1);
  int64_t total = 0;
  for (int64_t b = 0; b < buckets; ++b) {
    bucket_begin[b] = total;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t count = place[c * buckets + b];
      place[c * buckets + b] = total;
      total += count;
    }
  }
  bucket_begin[buckets] = total;

  struct Edge {
    Index key;
    Index id;
  };
  const std::unique_ptr<Edge[]> dealt(new Edge[size]);
  for_each(parallel_for, chunks, [&](int64_t c) {
    int64_t* at = place.data() + c * buckets;
    const int64_t end = std::min(size, (c + 1) * chunk);
    for (int64_t i = c * chunk; i < end; ++i) {
      dealt[at[key[i] >> shift]++] = {key[i], static_cast<Index>(i)};
    }
  });
  for_each(parallel_for, buckets, [&](int64_t b) {
    const int64_t first_key = b << shift;
    const int64_t keys = std::min(n - first_key, int64_t{1} << shift);
    const Edge* begin = dealt.get() + bucket_begin[b];
    const Edge* end = dealt.get() + bucket_begin[b + 1];
    Index* first = rowptr + first_key;
    std::fill(first, first + keys, Index{0});
    for (const Edge* e = begin; e < end; ++e) ++first[e->key - first_key];
    std::vector<Index> next(keys);
    auto at = static_cast<Index>(bucket_begin[b]);
    for (int64_t k = 0; k < keys; ++k) {
      const Index count = first[k];
      first[k] = next[k] = at;
      at += count;
    }
    for (const Edge* e = begin; e < end; ++e) {
      const Index place = next[e->key - first_key]++;
      perm[place] = e->id;
      col[place] = other[e->id];
    }
  });
  rowptr[n] = static_cast<Index>(size);
}

// rowptr of keys that never decrease: each edge writes the rows that begin with it.
template <typename Index>
void find_rowptr(const Index* key, int64_t size, int64_t n, Index* rowptr,
                 ParallelFor parallel_for) {
  for_each(parallel_for, chunks_of(size), [&](int64_t c) {
    const int64_t begin = c * kChunk, end = std::min(size, begin + kChunk);
    int64_t row = begin > 0 ? int64_t{key[begin - 1]} + 1 : 0;
    for (int64_t i = begin; i < end; ++i) {
      for (; row <= key[i]; ++row) rowptr[row] = static_cast<Index>(i);
    }
  });
  const int64_t last = size > 0 ? key[size - 1] : -1;
  std::fill(rowptr + last + 1, rowptr + n + 1, static_cast<Index>(size));
}

template <typename To, typename From, typename Index>
CooFacts check_and_copy(To to, From from, int64_t size, int64_t num_dst, int64_t num_src,
                        Index* own_dst, Index* own_src, ParallelFor parallel_for) {
  std::atomic<int64_t> first_bad{size};
  std::atomic<bool> sorted{true};
  for_each(parallel_for, chunks_of(size), [&](int64_t c) {
    const int64_t begin = c * kChunk, end = std::min(size, begin + kChunk);
    int64_t previous = begin > 0 ? to[begin - 1] : to[begin];
    bool bad = false, falls = false;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = to[i], f = from[i];
      bad |= (t < 0) | (t >= num_dst) | (f < 0) | (f >= num_src);
      falls |= t < previous;
      previous = t;
      own_dst[i] = static_cast<Index>(t);
      own_src[i] = static_cast<Index>(f);
    }
    if (falls) sorted.store(false, std::memory_order_relaxed);
    if (!bad) return;
    for (int64_t i = begin; i < end; ++i) {
      if (to[i] < 0 || to[i] >= num_dst || from[i] < 0 || from[i] >= num_src) {
        return lower(first_bad, i);
      }
    }
  });
  return {first_bad < size ? first_bad.load() : -1, sorted};
}

template <typename Index, typename Scalar>
void row_scales_as(const RowScales& p, ParallelFor parallel_for) {
  const auto *rowptr = static_cast<const Index*>(p.rowptr), *col = static_cast<const Index*>(p.col);
  auto *scale = static_cast<Scalar*>(p.scale), *own = static_cast<Scalar*>(p.own);
  constexpr int64_t kRows = 1 << 12;
  for_each(parallel_for, (p.rows + kRows - 1) / kRows, [&](int64_t c) {
    for (int64_t row = c * kRows; row < std::min(p.rows, (c + 1) * kRows); ++row) {
      const int64_t begin = rowptr[row], end = rowptr[row + 1];
      const int64_t loops = own ? std::count(col + begin, col + end, static_cast<Index>(row)) : 0;
      const RowScale<Scalar> found(p.inverse, own != nullptr, end - begin, loops);
      scale[row] = found.scale;
      if (own != nullptr) own[row] = found.own;
    }
  });
}

}  // namespace

void row_scales(const RowScales& p, ParallelFor parallel_for) {
  if (p.wide) {
    p.precise ? row_scales_as<int64_t, double>(p, parallel_for)
              : row_scales_as<int64_t, float>(p, parallel_for);
  } else {
    p.precise ? row_scales_as<int32_t, double>(p, parallel_for)
              : row_scales_as<int32_t, float>(p, parallel_for);
  }
}

CooFacts check_coo(const Indices& dst, const Indices& src, int64_t num_dst, int64_t num_src,
                   void* own_dst, void* own_src, bool wide, ParallelFor parallel_for) {
  CooFacts facts;
  with_span(dst, [&](auto to) {
    with_span(src, [&](auto from) {
      if (wide) {
        facts = check_and_copy(to, from, dst.size, num_dst, num_src, static_cast<int64_t*>(own_dst),
                               static_cast<int64_t*>(own_src), parallel_for);
      } else {
        facts = check_and_copy(to, from, dst.size, num_dst, num_src, static_cast<int32_t*>(own_dst),
                               static_cast<int32_t*>(own_src), parallel_for);
      }
    });
  });
  return facts;
}

void group(const Grouping& g, ParallelFor parallel_for) {
  if (g.wide) {
    counting_sort<int64_t>(g, parallel_for);
  } else {
    counting_sort<int32_t>(g, parallel_for);
  }
}

void find_rowptr(const void* key, int64_t edges, int64_t rows, void* rowptr, bool wide,
                 ParallelFor parallel_for) {
  if (wide) {
    find_rowptr(static_cast<const int64_t*>(key), edges, rows, static_cast<int64_t*>(rowptr),
                parallel_for);
  } else {
    find_rowptr(static_cast<const int32_t*>(key), edges, rows, static_cast<int32_t*>(rowptr),
                parallel_for);
  }
}

bool same_indices(const Indices& a, const Indices& b, ParallelFor parallel_for) {
  std::atomic<bool> same{true};
  with_span(a, [&](auto left) {
    with_span(b, [&](auto right) {
      for_each(parallel_for, chunks_of(a.size), [&](int64_t c) {
        const int64_t begin = c * kChunk, end = std::min(a.size, begin + kChunk);
        bool differs = !same.load(std::memory_order_relaxed);
        for (int64_t i = begin; i < end; ++i) differs |= left[i] != right[i];
        if (differs) same.store(false, std::memory_order_relaxed);
      });
    });
  });
  return same;
}

}  // namespace gsp::cpu
