// Building a graph: validating an edge list and sorting it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
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
void with_keys(const Indices& keys, const Run& run) {
  if (keys.wide) {
    run(Span<int64_t>{static_cast<const int64_t*>(keys.data), keys.stride});
  } else {
    run(Span<int32_t>{static_cast<const int32_t*>(keys.data), keys.stride});
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
template <typename Key, typename Result>
void counting_sort(Key key, int64_t size, int64_t n, Result* rowptr, Result* perm,
                   ParallelFor parallel_for) {
  if (n == 0 || size == 0) {
    std::fill(rowptr, rowptr + n + 1, Result{0});
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
    Result key;
    Result id;
  };
  const std::unique_ptr<Edge[]> dealt(new Edge[size]);
  for_each(parallel_for, chunks, [&](int64_t c) {
    int64_t* at = place.data() + c * buckets;
    const int64_t end = std::min(size, (c + 1) * chunk);
    for (int64_t i = c * chunk; i < end; ++i) {
      const int64_t k = key[i];
      dealt[at[k >> shift]++] = {static_cast<Result>(k), static_cast<Result>(i)};
    }
  });
  for_each(parallel_for, buckets, [&](int64_t b) {
    const int64_t first_key = b << shift;
    const int64_t keys = std::min(n - first_key, int64_t{1} << shift);
    const Edge* begin = dealt.get() + bucket_begin[b];
    const Edge* end = dealt.get() + bucket_begin[b + 1];
    Result* first = rowptr + first_key;
    std::fill(first, first + keys, Result{0});
    for (const Edge* e = begin; e < end; ++e) ++first[e->key - first_key];
    std::vector<Result> next(keys);
    Result at = static_cast<Result>(bucket_begin[b]);
    for (int64_t k = 0; k < keys; ++k) {
      const Result count = first[k];
      first[k] = next[k] = at;
      at += count;
    }
    for (const Edge* e = begin; e < end; ++e) perm[next[e->key - first_key]++] = e->id;
  });
  rowptr[n] = static_cast<Result>(size);
}

}  // namespace

CooFacts check_coo(const Indices& dst, const Indices& src, int64_t num_dst, int64_t num_src,
                   ParallelFor parallel_for) {
  const int64_t size = dst.size;
  std::atomic<int64_t> first_bad{size};
  std::atomic<bool> sorted{true};
  with_keys(dst, [&](auto to) {
    with_keys(src, [&](auto from) {
      for_each(parallel_for, chunks_of(size), [&](int64_t c) {
        const int64_t begin = c * kChunk, end = std::min(size, begin + kChunk);
        int64_t previous = begin > 0 ? to[begin - 1] : to[begin];
        bool bad = false, falls = false;
        for (int64_t i = begin; i < end; ++i) {
          const int64_t t = to[i], f = from[i];
          bad |= (t < 0) | (t >= num_dst) | (f < 0) | (f >= num_src);
          falls |= t < previous;
          previous = t;
        }
        if (falls) sorted.store(false, std::memory_order_relaxed);
        if (!bad) return;
        for (int64_t i = begin; i < end; ++i) {
          if (to[i] < 0 || to[i] >= num_dst || from[i] < 0 || from[i] >= num_src) {
            return lower(first_bad, i);
          }
        }
      });
    });
  });
  return {first_bad < size ? first_bad.load() : -1, sorted};
}

void group(const Indices& key, int64_t n, void* rowptr, void* perm, bool wide_result,
           ParallelFor parallel_for) {
  with_keys(key, [&](auto keys) {
    if (wide_result) {
      counting_sort(keys, key.size, n, static_cast<int64_t*>(rowptr), static_cast<int64_t*>(perm),
                    parallel_for);
    } else {
      counting_sort(keys, key.size, n, static_cast<int32_t*>(rowptr), static_cast<int32_t*>(perm),
                    parallel_for);
    }
  });
}

}  // namespace gsp::cpu
