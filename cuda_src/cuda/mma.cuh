// Products of small matrices by the tensor cores: D += A * B, of a warp. Where in a warp the parts
// of A (16 x k), B (k x 8) and D (16 x 8) are is PTX's: lane 4 g + t has rows g and g + 8 of A,
// column g of B, and columns 2 t and 2 t + 1 of rows g and g + 8 of D.
//
// Which element of a sum has which k is of no meaning, as long as A and B agree: 16-bit operands
// have four of them a lane (k = 16), tf32 two (k = 8).
#pragma once

#include "cuda/vec.cuh"

namespace gsp::cuda {

// A float as the tensor cores read it, with 10 bits of mantissa: the nearest.
__device__ __forceinline__ unsigned to_tf32(float v) {
#ifdef __CUDA_ARCH__
  unsigned bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
#else
  unsigned bits;
  __builtin_memcpy(&bits, &v, 4);
  return v - v == 0 ? (bits + 0x1000u) & ~0x1fffu : bits;  // what is not finite stays
#endif
}

__device__ __forceinline__ float of_bits(unsigned bits) {
  float v;
  __builtin_memcpy(&v, &bits, 4);
  return v;
}

// What the tensor cores do, for the emulation, lane by lane: each word of A and B has `kPairs`
// elements.
template <int kPairs, typename Element>
__device__ inline void multiply_by_shuffles(float (&d)[4], const unsigned (&a)[4],
                                            const unsigned (&b)[2], const Element& element) {
  const int lane = int(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  float sum[4] = {};
  for (int from = 0; from < 4; ++from) {
    unsigned rows[4], columns[2][2];
    for (int i = 0; i < 4; ++i) rows[i] = __shfl_sync(kFullMask, a[i], g * 4 + from);
    for (int j = 0; j < 2; ++j)
      for (int i = 0; i < 2; ++i)
        columns[j][i] = __shfl_sync(kFullMask, b[i], (2 * t + j) * 4 + from);
    for (int half = 0; half < 2; ++half)  // rows g, then g + 8
      for (int j = 0; j < 2; ++j)
        for (int i = 0; i < 2; ++i)
          for (int pair = 0; pair < kPairs; ++pair)
            sum[half * 2 + j] += element(rows[2 * i + half], pair) * element(columns[j][i], pair);
  }
  for (int i = 0; i < 4; ++i) d[i] += sum[i];
}

// k = 16; a and b: pairs of elements of T. a[0], a[1]: rows g and g + 8 for the first pair of k,
// a[2], a[3]: for the second.
template <typename T>
__device__ __forceinline__ void multiply_16_bits(float (&d)[4], const unsigned (&a)[4],
                                                 const unsigned (&b)[2]) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  multiply_by_shuffles<2>(d, a, b, [](unsigned word, int i) {
    const unsigned short bits = static_cast<unsigned short>(word >> (16 * i));
    T v;
    __builtin_memcpy(&v, &bits, 2);
    return widen<T>(v);
  });
#endif
}

// k = 8; a and b: tf32. a[0], a[1]: rows g and g + 8 for the first k, a[2], a[3]: for the second.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const unsigned (&a)[4],
                                              const unsigned (&b)[2]) {
#ifdef __CUDA_ARCH__
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  multiply_by_shuffles<1>(d, a, b, [](unsigned word, int) { return of_bits(word & ~0x1fffu); });
#endif
}

// Words of 16-bit elements: the first of each of two words, or the second.
__device__ __forceinline__ unsigned firsts(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, 0x5410);
#else
  return (a & 0xffffu) | b << 16;
#endif
}
__device__ __forceinline__ unsigned seconds(unsigned a, unsigned b) {
#ifdef __CUDA_ARCH__
  return __byte_perm(a, b, 0x7632);
#else
  return a >> 16 | (b & 0xffff0000u);
#endif
}

}  // namespace gsp::cuda
