// Sums over small dense graphs, whose rows of x are gathered from shared memory: there, every
// source of such a graph is read hundreds of times a multiprocessor, faster than the L2 can serve.
//
// Columns are cut into slabs of 128 bytes, and sources into blocks of as many as leave room in
// shared memory (gnn_spmm_plugin/schedule.py, `stage_of`). A team of K blocks of threads has a
// slab, and either one block of sources, or all of them one after the other. Its member k has rows
// order[k], order[k + K], ... of an order by falling length, so that all have about as many edges.
// A warp takes two rows at a time, 16 lanes each. Of teams with all sources, sums are kept in
// shared memory until the last block; others leave partial sums, which `staged_fold` adds in order.
// So no float is added atomically, and the order of a sum depends on the graph, the width and the
// device.
//
// Lanes. A load of 16 bytes a lane is served to 8 lanes at a time, without conflict where their
// chunks of 16 bytes lie in different banks: where they are different chunks of their rows of 128
// bytes, whatever the rows. So lane q of 8 reads chunk q ^ t of the source of an edge of its own in
// step t = 0 .. 7. A lane reads index and weight of its own edges only; were the lanes of an edge
// to read them together, that would cost half as much again as the gathers. In return a lane has
// sums of all columns of the slab, which are added over the lanes at the end of a row.
#pragma once

#include "cuda/epilogue.cuh"
#include "cuda/vec.cuh"

namespace gsp::cuda {

// What a source of an element type takes of a slab.
template <typename T>
struct Slab {
  static constexpr int kColumns = 128 / sizeof(T);
  static constexpr int kChunk = 16 / sizeof(T);  // columns that are loaded at once
  // A thread has a sum for each column: 80 registers, or 128.
  static constexpr int kThreads = sizeof(T) == 4 ? 768 : 512;
};

template <typename T>
struct StagedArgs {
  const int* order;  // [rows]: rows by falling length
  const int* cut;    // [blocks + 1, rows]: first edge of row order[i] into sources of each block
  const int* rowptr;
  const int* col;
  const T* weight;  // or null
  const T* x;
  float* partial;  // [blocks, rows, slabs * columns], or null: all sources are of one team
  Epilogue<T> epilogue;
  int64_t x_stride;
  int rows, cols, width;
  int blocks, sources;  // blocks of sources; sources of each
  int team;             // blocks of threads
  bool wide_x;          // chunks of x are aligned to 16 bytes
  bool wide_end;        // so is what is written and added at the end
};

// 16 bytes of shared memory at `to`, of which the first `bytes` are loaded and the rest is 0.
__device__ __forceinline__ void copy_chunk(char* to, const void* from, int bytes) {
#ifdef __CUDA_ARCH__
  asm volatile(
      "cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(unsigned(__cvta_generic_to_shared(to))),
      "l"(from), "r"(bytes)
      : "memory");
#else
  for (int i = 0; i < 16; ++i) to[i] = i < bytes ? static_cast<const char*>(from)[i] : char(0);
#endif
}

// One element, or 0.
template <typename T>
__device__ __forceinline__ void copy_element(T* to, const T* from, bool ok) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == 4) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                     unsigned(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(ok ? 4 : 0)
                 : "memory");
    return;
  }
#endif
  *to = ok ? *from : narrow<T>(0.f);
}

__device__ __forceinline__ void wait_for_copies() {
#ifdef __CUDA_ARCH__
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// Shared memory by 32-bit address, which an xor can be applied to. In the emulation, by distance.
struct SharedBytes {
#ifdef __CUDA_ARCH__
  unsigned base;
  __device__ __forceinline__ explicit SharedBytes(const char* p)
      : base(unsigned(__cvta_generic_to_shared(p))) {}
  __device__ __forceinline__ float4 load(unsigned at) const {
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at));
    return v;
  }
#else
  const char* start;
  unsigned base = 0;
  explicit SharedBytes(const char* p) : start(p) {}
  float4 load(unsigned at) const { return *reinterpret_cast<const float4*>(start + at); }
#endif
};

// The columns of a slab of `count` rows of x from `first` on, zeros past the last column.
template <typename T>
__device__ __forceinline__ void stage_sources(const StagedArgs<T>& a, char* to, int first,
                                              int count, int slab) {
  constexpr int kThreads = Slab<T>::kThreads, kChunk = Slab<T>::kChunk;
  const int thread = int(threadIdx.x), column = slab * Slab<T>::kColumns + (thread & 7) * kChunk;
  const int columns = min(a.width - column, kChunk);
  const T* from = a.x + (first + (thread >> 3)) * a.x_stride + (columns > 0 ? column : 0);
  const int64_t step = kThreads / 8 * a.x_stride;
  to += thread * 16;
  if (a.wide_x) {
#pragma unroll 4
    for (int i = thread; i < count * 8; i += kThreads) {
      copy_chunk(to, from, max(columns, 0) * int(sizeof(T)));
      to += kThreads * 16;
      from += step;
    }
  } else {
#pragma unroll 1
    for (int i = thread; i < count * 8; i += kThreads) {
#pragma unroll
      for (int v = 0; v < kChunk; ++v) {
        const bool ok = v < columns;
        copy_element(reinterpret_cast<T*>(to) + v, from + (ok ? v : 0), ok);
      }
      to += kThreads * 16;
      from += step;
    }
  }
}

// Writes columns [column, column + kVec) of row order[i].
template <int kVec, typename T>
__device__ __forceinline__ void finish_staged(const StagedArgs<T>& a, int i, int column,
                                              float (&sum)[kVec]) {
  const int row = a.order[i];
  finish_sum<kVec>(a.epilogue, row,
                   unsigned(a.epilogue.mean ? a.rowptr[row + 1] - a.rowptr[row] : 0), column, sum);
}

// All rows of a block of threads, whose sums are in shared memory.
template <int kVec, typename T>
__device__ __forceinline__ void finish_rows(const StagedArgs<T>& a, const float* sums, int rows,
                                            int member, int slab) {
  constexpr int kColumns = Slab<T>::kColumns, kVectors = kColumns / kVec;
  for (int j = int(threadIdx.x); j < rows * kVectors; j += Slab<T>::kThreads) {
    const int column = slab * kColumns + j % kVectors * kVec;
    if (column >= a.width) continue;
    float sum[kVec];
#pragma unroll
    for (int v = 0; v < kVec; ++v) sum[v] = sums[j * kVec + v];
    finish_staged<kVec>(a, member + j / kVectors * a.team, column, sum);
  }
}

// sum += what the lane `distance` away has in `other`.
template <int kCount>
__device__ __forceinline__ void add_from(float (&sum)[kCount], const float (&other)[kCount],
                                         int distance) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum[i] += __shfl_xor_sync(kFullMask, other[i], distance);
}

template <typename T, bool kWeighted>
__global__ void __launch_bounds__(Slab<T>::kThreads, 1)
    staged_spmm(const __grid_constant__ StagedArgs<T> a) {
  constexpr int kColumns = Slab<T>::kColumns, kChunk = Slab<T>::kChunk;
  GSP_DYNAMIC_SHARED(char, memory);  // sources, then sums
  __shared__ int next[2];            // pair of rows to take; of even and of odd blocks of sources
  __shared__ const void* pointers[2];
  const int lane = int(threadIdx.x) & 31, q = lane & 7;
  const bool partial = a.partial != nullptr;
  const int member = int(blockIdx.x) % a.team, team = int(blockIdx.x) / a.team;
  const int slab = partial ? team / a.blocks : team;
  const int first = partial ? team % a.blocks : 0, last = partial ? first : a.blocks - 1;
  const int rows = (a.rows - member + a.team - 1) / a.team;  // of this block
  // Where row i of this block is summed: at sums + i * sums_step.
  float* sums = reinterpret_cast<float*>(memory + a.sources * 128);
  int sums_step = kColumns;
  if (partial) {
    const int slabs = int(gridDim.x) / (a.team * a.blocks);
    sums_step = a.team * slabs * kColumns;
    sums = a.partial + ((int64_t(first) * a.rows + member) * slabs + slab) * kColumns;
  }
  const SharedBytes shared(memory);

  if (threadIdx.x == 0) {
    next[first & 1] = 0;
    pointers[0] = a.col;
    pointers[1] = a.weight;
  }
  for (int b = first; b <= last; ++b) {
    if (b != first) __syncthreads();  // no one reads the sources before
    stage_sources<T>(a, memory, b * a.sources, min(a.sources, a.cols - b * a.sources), slab);
    wait_for_copies();
    __syncthreads();
    if (threadIdx.x == 0) next[(b + 1) & 1] = 0;
    // By way of shared memory they stay in registers, else every edge has to read them anew.
    const void* const volatile* const kept = pointers;
    const auto* const col = static_cast<const int*>(kept[0]);
    const auto* const weight = static_cast<const T*>(kept[1]);
    // Chunk q ^ t of a source is at (column * 128 + here) ^ (t * 16): memory begins at a multiple
    // of 128.
    const unsigned here = shared.base + unsigned(q * 16) - unsigned(b * a.sources) * 128u;

    struct Task {
      int pair;  // the same in all lanes
      unsigned begin, end;
    };
    const auto take = [&] {
      Task t{0, 0, 0};
      if (lane == 0) t.pair = atomicAdd(&next[b & 1], 1);
      t.pair = __shfl_sync(kFullMask, t.pair, 0);
      const int i = t.pair * 2 + (lane >> 4);
      if (i < rows) {
        const int* const cut = a.cut + int64_t(b) * a.rows + (member + i * a.team);
        t.begin = unsigned(cut[0]);
        t.end = unsigned(cut[a.rows]);
      }
      return t;
    };
    Task t = take();
    unsigned j = 0;
    int c0 = 0, c1 = 0, c2 = 0;
    float w0 = 0, w1 = 0, w2 = 0;
    const auto fetch = [&](unsigned at, int& c, float& w) {
      if (at < t.end) {
        c = __ldg(col + at);
        if constexpr (kWeighted) w = widen<T>(__ldg(weight + at));
      }
    };
    // One edge of this lane; begins to load the one after the next.
    const auto add_edge = [&](float (&s)[8][kChunk], int c, float w, int& c_after, float& w_after) {
      fetch(j + 32, c_after, w_after);
      const unsigned at = (unsigned(c) << 7) + here;
      float4 v[8];
#pragma unroll
      for (int u = 0; u < 8; ++u) v[u] = shared.load(at ^ unsigned(u << 4));
#pragma unroll
      for (int u = 0; u < 8; ++u) {
        Vec<T, kChunk> x;
        __builtin_memcpy(&x, &v[u], 16);
#pragma unroll
        for (int i = 0; i < kChunk; ++i) {
          if constexpr (kWeighted) {
            s[u][i] += w * widen<T>(x.v[i]);
          } else {
            s[u][i] += widen<T>(x.v[i]);
          }
        }
      }
      j += 16;
    };
    const auto start = [&] {
      j = t.begin + unsigned(lane & 15);
      fetch(j, c0, w0);
      fetch(j + 16, c1, w1);
    };
    start();
    while (t.pair * 2 < rows) {
      const Task after = take();
      float s[8][kChunk];
#pragma unroll
      for (int u = 0; u < 8; ++u) {
#pragma unroll
        for (int i = 0; i < kChunk; ++i) s[u][i] = 0;
      }
      // Three edges in turn, so that no register is moved while it is still being loaded.
      while (true) {
        if (j >= t.end) break;
        add_edge(s, c0, w0, c2, w2);
        if (j >= t.end) break;
        add_edge(s, c1, w1, c0, w0);
        if (j >= t.end) break;
        add_edge(s, c2, w2, c1, w1);
      }
      __syncwarp();
      const int i = t.pair * 2 + (lane >> 4);
      t = after;
      start();
      // s[u] is of chunk q ^ u; halving what each lane is left with, chunk q ends in s[0].
#pragma unroll
      for (int d = 4; d >= 1; d /= 2) {
#pragma unroll
        for (int u = 0; u < d; ++u) add_from(s[u], s[u + d], d);
      }
      add_from(s[0], s[0], 8);
      if ((lane & 8) == 0 && i < rows) {
        float* const to = sums + int64_t(i) * sums_step + q * kChunk;
        if (b != first) {
#pragma unroll
          for (int v = 0; v < kChunk; ++v) s[0][v] += to[v];
        }
        store_wide<float, kChunk>(to, s[0]);
      }
    }
  }
  if (partial) return;
  __syncthreads();
  if (a.wide_end) {
    finish_rows<kChunk>(a, sums, rows, member, slab);
  } else {
    finish_rows<1>(a, sums, rows, member, slab);
  }
}

// Adds the partial sums, kVec columns a thread; blockIdx.y: the slab.
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) staged_fold(const __grid_constant__ StagedArgs<T> a) {
  constexpr int kColumns = Slab<T>::kColumns, kVectors = kColumns / kVec;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + int(threadIdx.x), i = thread / kVectors;
  const int column = int(blockIdx.y) * kColumns + int(thread % kVectors) * kVec;
  if (i >= a.rows || column >= a.width) return;
  const int64_t stride = int64_t(gridDim.y) * kColumns;
  const float* from = a.partial + i * stride + column;
  float sum[kVec] = {};
#pragma unroll 4
  for (int b = 0; b < a.blocks; ++b) {
    const Vec<float, kVec> v = load_wide_if<float, kVec>(true, from + int64_t(b) * a.rows * stride);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum[k] += v.v[k];
  }
  finish_staged<kVec>(a, int(i), column, sum);
}

}  // namespace gsp::cuda
