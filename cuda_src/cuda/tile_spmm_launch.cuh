// Chooses the instantiation of a sum by tiles.
#pragma once

#include "cuda/alignment.h"
#include "cuda/launch.h"
#include "cuda/tile_spmm.cuh"

namespace gsp::cuda {

template <typename T>
TileArgs<T> tile_args(const TileSpmm& p) {
  TileArgs<T> a{};
  a.edges.rowptr = static_cast<const int*>(p.rowptr);
  a.edges.col = static_cast<const int*>(p.col);
  a.edges.weight = static_cast<const T*>(p.weight);
  a.edges.x = static_cast<const T*>(p.x);
  a.edges.x_stride = unsigned(p.x_stride * int64_t(sizeof(T)));
  a.ptr = static_cast<const int*>(p.ptr);
  a.vectors = static_cast<const int*>(p.vectors);
  a.bits = static_cast<const unsigned short*>(p.bits);
  a.values = static_cast<const T*>(p.values);
  a.rows = static_cast<const int*>(p.window_rows);
  a.target = static_cast<const int*>(p.target);
  a.merges = static_cast<const int4*>(p.merges);
  a.scratch = static_cast<float*>(p.scratch);
  a.sums = static_cast<const float*>(p.sums);
  a.epilogue = epilogue_of<T>(p);
  a.pieces = p.pieces;
  a.num_rows = int(p.rows);
  a.width = p.width;
  a.x_width = p.x_width;
  a.slabs = int(divide_up(p.width, Tile<T>::kSlab));
  a.wide_end =
      p.width % Tile<T>::kColumns == 0 && can_finish(p, Tile<T>::kColumns, int64_t(sizeof(T)));
  return a;
}

template <typename T, int kHeight, bool kWeighted, int kPasses>
cudaError_t launch_tiles(const TileSpmm& p, cudaStream_t stream) {
  const TileArgs<T> a = tile_args<T>(p);
  const unsigned grid = unsigned(divide_up(p.pieces * a.slabs, kTileThreads / 32));
  GSP_LAUNCH_BLOCKS((tile_spmm<T, kHeight, kWeighted, kPasses>), grid, kTileThreads, stream, a);
  return cudaGetLastError();
}

// Vectors of columns at the end: 16 bytes of sums, where all else moves as many at once.
template <typename T>
bool wide_tile_end(const TileSpmm& p) {
  return p.width % 4 == 0 && can_finish(p, 4, sizeof(T));
}

template <typename T, int kHeight, int kVec>
cudaError_t launch_tile_merge(const TileSpmm& p, cudaStream_t stream) {
  const dim3 grid(unsigned(p.num_merges * kHeight),
                  unsigned(divide_up(p.width, kMergeLanes * kVec)));
  GSP_LAUNCH((tile_merge<T, kHeight, kVec>), grid, stream, tile_args<T>(p));
  return cudaGetLastError();
}

template <typename T, int kHeight>
cudaError_t tiles_of_height(const TileSpmm& p, cudaStream_t stream) {
  constexpr int kMost = sizeof(T) == 4 ? 3 : 1;  // passes
  const bool weighted = p.values != nullptr, once = kMost == 1 || p.passes == 1;
  const cudaError_t error = weighted ? once ? launch_tiles<T, kHeight, true, 1>(p, stream)
                                            : launch_tiles<T, kHeight, true, kMost>(p, stream)
                            : once   ? launch_tiles<T, kHeight, false, 1>(p, stream)
                                     : launch_tiles<T, kHeight, false, kMost>(p, stream);
  if (error != cudaSuccess || p.num_merges == 0) return error;
  return wide_tile_end<T>(p) ? launch_tile_merge<T, kHeight, 4>(p, stream)
                             : launch_tile_merge<T, kHeight, 1>(p, stream);
}

template <typename T>
cudaError_t tiles_of(const TileSpmm& p, cudaStream_t stream) {
  return p.height == 8 ? tiles_of_height<T, 8>(p, stream) : tiles_of_height<T, 16>(p, stream);
}

template <typename T, int kVec>
cudaError_t launch_tile_end(const TileSpmm& p, cudaStream_t stream) {
  const unsigned grid = blocks_of(p.rows * (p.width / kVec));
  GSP_LAUNCH((tile_end<T, kVec>), grid, stream, tile_args<T>(p));
  return cudaGetLastError();
}

template <typename T>
cudaError_t tile_end_of(const TileSpmm& p, cudaStream_t stream) {
  return wide_tile_end<T>(p) ? launch_tile_end<T, 4>(p, stream) : launch_tile_end<T, 1>(p, stream);
}

}  // namespace gsp::cuda
