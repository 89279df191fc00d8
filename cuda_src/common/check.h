// What the bindings of both libraries share: checks of every operator's inputs and allocation of
// its outputs. Indices are not looked at: a Graph has done that once. Only torch's stable headers
// may be included here.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "common/types.h"

// The headers of torch 2.10 to 2.12 know this check by another name.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace gsp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// ---- describing what was got

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t d = 0; d < t.dim(); ++d) text += (d ? ", " : "") + std::to_string(t.size(d));
  return text + "]";
}

inline std::string device_of(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  const std::string index = std::to_string(t.get_device_index());
  return t.is_cuda() ? "cuda:" + index : "device " + index + " of another kind";
}

// ---- single tensors

inline void check_same_device(const char* name, const Tensor& t, const Tensor& like) {
  int32_t type, index, like_type, like_index;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &index));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &like_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &like_index));
  STD_TORCH_CHECK(type == like_type && index == like_index, name, " is on ", device_of(t),
                  ", expected ", device_of(like), " like the graph: move one of them with .to()");
}

inline void check_dtype(const char* name, const Tensor& t, ScalarType expected) {
  STD_TORCH_CHECK(t.scalar_type() == expected, name, " is ", t.scalar_type(), ", expected ",
                  expected);
}

inline void check_contiguous(const char* name, const Tensor& t) {
  STD_TORCH_CHECK(t.is_contiguous(), name, " is not contiguous: call .contiguous()");
}

// A contiguous vector of `size`, of type `dtype`, on the graph's device.
inline void check_vector(const char* name, const Tensor& t, int64_t size, ScalarType dtype,
                         const Tensor& like) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size, name, " has shape ", shape_of(t),
                  ", expected [", size, "]");
  check_dtype(name, t, dtype);
  check_contiguous(name, t);
  check_same_device(name, t, like);
}

// Rows whose columns are adjacent: what every matrix of features must be. Returns the distance
// between rows.
inline int64_t check_rows(const char* name, const Tensor& t, const Tensor& like) {
  STD_TORCH_CHECK(t.dim() == 2, name, " has shape ", shape_of(t), ", expected 2 dimensions");
  STD_TORCH_CHECK(t.size(1) <= 1 || t.stride(1) == 1 || t.size(0) == 0, name, " has strides [",
                  t.stride(0), ", ", t.stride(1),
                  "], expected 1 between columns: call .contiguous()");
  check_same_device(name, t, like);
  return t.stride(0);
}

inline void check_matrix(const char* name, const Tensor& t, int64_t rows, int64_t width,
                         ScalarType dtype, const Tensor& like) {
  check_rows(name, t, like);
  STD_TORCH_CHECK(t.size(0) == rows && t.size(1) == width, name, " has shape ", shape_of(t),
                  ", expected [", rows, ", ", width, "]");
  check_dtype(name, t, dtype);
}

// ---- types

inline Dtype feature_dtype(const char* name, ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Double:
      return Dtype::kFloat64;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      STD_TORCH_CHECK(false, name, " is ", type,
                      ", expected float32, float64, float16 or bfloat16: convert it with .to()");
  }
}

inline ScalarType accumulator_type(ScalarType features) {
  return features == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// ---- a graph

struct CsrSizes {
  int64_t rows;
  int64_t edges;
  ScalarType index;
  bool wide() const { return index == ScalarType::Long; }
};

// rowptr and col (which edge_softmax does without) and perm.
inline CsrSizes check_csr(const Tensor& rowptr, const Tensor* col, const OptionalTensor& perm,
                          int64_t edges) {
  const ScalarType index = rowptr.scalar_type();
  STD_TORCH_CHECK(index == ScalarType::Int || index == ScalarType::Long, "rowptr is ", index,
                  ", expected int32 or int64");
  STD_TORCH_CHECK(rowptr.dim() == 1 && rowptr.size(0) >= 1, "rowptr has shape ", shape_of(rowptr),
                  ", expected [rows + 1]");
  check_contiguous("rowptr", rowptr);
  STD_TORCH_CHECK(index == ScalarType::Long || edges <= std::numeric_limits<int32_t>::max(),
                  "rowptr is ", index, ", expected int64 for ", edges, " edges");
  const int64_t rows = rowptr.size(0) - 1;
  STD_TORCH_CHECK(index == ScalarType::Long || rows <= std::numeric_limits<int32_t>::max(),
                  "rowptr is ", index, ", expected int64 for ", rows, " rows");
  if (col != nullptr) check_vector("col", *col, edges, index, rowptr);
  if (perm) check_vector("perm", *perm, edges, index, rowptr);
  return {rows, edges, index};
}

inline CsrSizes check_csr(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm) {
  STD_TORCH_CHECK(col.dim() == 1, "col has shape ", shape_of(col), ", expected [edges]");
  return check_csr(rowptr, &col, perm, col.size(0));
}

// ---- operators. Each takes what its operator takes, and returns all sizes that a kernel needs.

struct Sizes {
  CsrSizes csr;
  Dtype dtype;
  ScalarType type;
  int64_t width;
  int64_t heads;
};

inline int64_t check_heads(int64_t width, int64_t heads) {
  STD_TORCH_CHECK(heads >= 1 && width % heads == 0, "got ", heads, " heads for ", width,
                  " columns, expected a number that divides them");
  return heads;
}

// weight [E] or [E, H]; returns H, 1 if there are no heads.
inline int64_t check_weight(const OptionalTensor& weight, const CsrSizes& csr, int64_t width,
                            ScalarType type, const Tensor& like) {
  if (!weight) return 1;
  const int64_t dim = weight->dim();
  STD_TORCH_CHECK((dim == 1 || dim == 2) && weight->size(0) == csr.edges, "weight has shape ",
                  shape_of(*weight), ", expected [", csr.edges, "] or [", csr.edges, ", heads]");
  check_dtype("weight", *weight, type);
  check_contiguous("weight", *weight);
  check_same_device("weight", *weight, like);
  return dim == 1 ? 1 : check_heads(width, weight->size(1));
}

// The features that edges point at. Their number is known only here, so that much is checked: a
// graph with edges has sources.
inline Sizes check_features(const char* name, const Tensor& x, const CsrSizes& csr,
                            const Tensor& rowptr) {
  check_rows(name, x, rowptr);
  const Dtype dtype = feature_dtype(name, x.scalar_type());
  STD_TORCH_CHECK(csr.edges == 0 || x.size(0) > 0, name, " has shape ", shape_of(x),
                  ", expected a row for every node that the ", csr.edges, " edges come from");
  return {csr, dtype, x.scalar_type(), x.size(1), 1};
}

inline Sizes check_spmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                        const Tensor& x, const OptionalTensor& src_scale,
                        const OptionalTensor& dst_scale) {
  Sizes s = check_features("x", x, check_csr(rowptr, col, std::nullopt), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  const ScalarType scale = accumulator_type(s.type);
  if (src_scale) check_vector("src_scale", *src_scale, x.size(0), scale, rowptr);
  if (dst_scale) check_vector("dst_scale", *dst_scale, s.csr.rows, scale, rowptr);
  return s;
}

// stage [blocks + 2, rows] of a plan, for blocks of `sources` rows of x; how many blocks, 0 of
// none.
inline int64_t check_stage(const OptionalTensor& stage, int64_t sources, const Sizes& s,
                           const Tensor& x, const Tensor& rowptr) {
  if (!stage) return 0;
  STD_TORCH_CHECK(stage->dim() == 2 && stage->size(0) >= 3 && stage->size(1) == s.csr.rows,
                  "stage has shape ", shape_of(*stage), ", expected [blocks + 2, ", s.csr.rows,
                  "]");
  check_dtype("stage", *stage, ScalarType::Int);
  check_contiguous("stage", *stage);
  check_same_device("stage", *stage, rowptr);
  const int64_t blocks = stage->size(0) - 2;
  STD_TORCH_CHECK(sources >= 1 && sources <= (1 << 16) && x.size(0) <= blocks * sources, "x has ",
                  x.size(0), " rows, expected at most ", blocks, " blocks of sources = ", sources);
  return blocks;
}

struct PcsrSizes : Sizes {
  int64_t pieces;
  int64_t warps, fold, height, slots;  // the configuration
};

// What a kernel reads 16 bytes at a time: contiguous, of the given shape.
inline void check_wide_reads(const char* name, const Tensor& t,
                             std::initializer_list<int64_t> shape, ScalarType dtype,
                             const Tensor& like) {
  bool fits = t.dim() == static_cast<int64_t>(shape.size());
  std::string expected;
  for (size_t d = 0; d < shape.size(); ++d) {
    const int64_t size = shape.begin()[d];
    expected += (d ? ", " : "") + std::to_string(size);
    fits = fits && t.size(static_cast<int64_t>(d)) == size;
  }
  STD_TORCH_CHECK(fits, name, " has shape ", shape_of(t), ", expected [", expected, "]");
  check_dtype(name, t, dtype);
  check_contiguous(name, t);
  check_same_device(name, t, like);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                  " is not aligned to 16 bytes: call .clone()");
}

inline PcsrSizes check_pcsr_spmm(const Tensor& rowptr, const Tensor& ptr, const Tensor& col,
                                 const OptionalTensor& target, const OptionalTensor& merges,
                                 const OptionalTensor& weight, const Tensor& x,
                                 const OptionalTensor& src_scale, const OptionalTensor& dst_scale,
                                 const std::vector<int64_t>& config) {
  STD_TORCH_CHECK(config.size() == 4, "config has ", config.size(),
                  " entries, expected {W, F, V, scratch slots}");
  const int64_t warps = config[0], fold = config[1], height = config[2], slots = config[3];
  STD_TORCH_CHECK((warps == 1 || warps == 2 || warps == 4 || warps == 8) && fold >= 1 &&
                      fold <= 8 && (height == 1 || height == 2) && slots >= 0 &&
                      slots <= std::numeric_limits<int32_t>::max(),
                  "config is {", warps, ", ", fold, ", ", height, ", ", slots,
                  "}, expected W of 1, 2, 4 or 8, F from 1 to 8, V of 1 or 2, slots of a plan");
  STD_TORCH_CHECK(ptr.dim() == 1 && ptr.size(0) >= 1, "ptr has shape ", shape_of(ptr),
                  ", expected [pieces + 1]");
  STD_TORCH_CHECK(col.dim() == 1 && col.size(0) % 4 == 0, "col has shape ", shape_of(col),
                  ", expected [vectors], a multiple of 4");
  CsrSizes csr = check_csr(rowptr, nullptr, std::nullopt, 0);
  STD_TORCH_CHECK(csr.rows <= std::numeric_limits<int32_t>::max(), "rowptr has ", csr.rows,
                  " rows, expected fewer than 2^31");
  csr.edges = col.size(0);
  const int64_t pieces = ptr.size(0) - 1, panels = (csr.rows + height - 1) / height;
  STD_TORCH_CHECK(target ? pieces >= panels : pieces == panels, "ptr has ", pieces, " pieces for ",
                  panels, " panels, expected as many, or more with a target");
  STD_TORCH_CHECK(merges.has_value() == (slots > 0), "got ", slots, " scratch slots ",
                  merges ? "with" : "without", " merges");
  check_wide_reads("ptr", ptr, {pieces + 1}, ScalarType::Int, rowptr);
  check_wide_reads("col", col, {csr.edges}, ScalarType::Int, rowptr);
  if (target) check_wide_reads("target", *target, {pieces, height}, ScalarType::Int, rowptr);
  if (merges) {
    STD_TORCH_CHECK(merges->dim() == 2, "merges has shape ", shape_of(*merges),
                    ", expected [n, 4]");
    check_wide_reads("merges", *merges, {merges->size(0), 4}, ScalarType::Int, rowptr);
  }
  Sizes s = check_features("x", x, csr, rowptr);
  const int64_t apart = x.size(0) > 1 ? x.stride(0) * static_cast<int64_t>(x.element_size()) : 0;
  STD_TORCH_CHECK(apart <= std::numeric_limits<uint32_t>::max(), "x has rows that lie ", apart,
                  " bytes apart, expected fewer than 2^32: call .contiguous()");
  if (weight) {
    if (weight->dim() == 3) s.heads = check_heads(s.width, weight->size(2));
    if (weight->dim() == 3) {
      check_wide_reads("weight", *weight, {csr.edges, height, s.heads}, s.type, rowptr);
    } else {
      check_wide_reads("weight", *weight, {csr.edges, height}, s.type, rowptr);
    }
  }
  const ScalarType scale = accumulator_type(s.type);
  if (src_scale) check_vector("src_scale", *src_scale, x.size(0), scale, rowptr);
  if (dst_scale) check_vector("dst_scale", *dst_scale, csr.rows, scale, rowptr);
  return {s, pieces, warps, fold, height, slots};
}

struct TileSizes : Sizes {
  int64_t pieces;
  int64_t height, slots, passes;  // the configuration
};

// Of what tiles and the end of a GEMM share: the matrix, and x, whose rows are read 16 bytes at a
// time if `wide`; `width` columns of it are the result's.
inline Sizes check_tiled(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                         const Tensor& x, const OptionalTensor& dst_scale, int64_t width,
                         bool wide) {
  CsrSizes csr = check_csr(rowptr, col, std::nullopt);
  STD_TORCH_CHECK(!csr.wide(), "rowptr and col are int64, expected int32: tiles have no others");
  Sizes s = check_features("x", x, csr, rowptr);
  STD_TORCH_CHECK(s.dtype != Dtype::kFloat64,
                  "x is float64, expected float32, float16 or bfloat16: there are no tiles of it");
  const int64_t size = static_cast<int64_t>(x.element_size()), vec = 16 / size;
  const int64_t apart = x.size(0) > 1 ? x.stride(0) * size : 0;
  STD_TORCH_CHECK(apart <= std::numeric_limits<uint32_t>::max(), "x has rows that lie ", apart,
                  " bytes apart, expected fewer than 2^32: call .contiguous()");
  STD_TORCH_CHECK(width >= 0 && width <= s.width, "got a width of ", width, " for x with ", s.width,
                  " columns, expected as many at most");
  STD_TORCH_CHECK(!wide || (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0 &&
                            apart % 16 == 0 && s.width % vec == 0),
                  "x has ", s.width, " columns, rows ", apart,
                  " bytes apart, expected a multiple of ", vec,
                  " columns and rows that begin at multiples of 16 bytes: pass a padded copy");
  if (weight) {
    STD_TORCH_CHECK(weight->dim() == 1, "weight has shape ", shape_of(*weight), ", expected [",
                    csr.edges, "]: tiles have no heads");
    check_weight(weight, csr, s.width, s.type, rowptr);
  }
  if (dst_scale) check_vector("dst_scale", *dst_scale, csr.rows, ScalarType::Float, rowptr);
  s.width = width;
  return s;
}

inline TileSizes check_tile_spmm(const Tensor& rowptr, const Tensor& col,
                                 const OptionalTensor& weight, const Tensor& ptr,
                                 const Tensor& vectors, const Tensor& bits,
                                 const OptionalTensor& values, const OptionalTensor& rows,
                                 const OptionalTensor& target, const OptionalTensor& merges,
                                 const Tensor& x, const OptionalTensor& dst_scale,
                                 const std::vector<int64_t>& config) {
  STD_TORCH_CHECK(config.size() == 4, "config has ", config.size(),
                  " entries, expected {height, scratch slots, passes, width}");
  const int64_t height = config[0], slots = config[1], passes = config[2];
  STD_TORCH_CHECK((height == 8 || height == 16) && slots >= 0 &&
                      slots <= std::numeric_limits<int32_t>::max() && (passes == 1 || passes == 3),
                  "config is {", height, ", ", slots, ", ", passes, ", ", config[3],
                  "}, expected a height of 8 or 16, slots of a plan, 1 or 3 passes, a width");
  const Sizes s = check_tiled(rowptr, col, weight, x, dst_scale, config[3], true);
  STD_TORCH_CHECK(values.has_value() == weight.has_value(), "got ", values ? "" : "no ",
                  "values with ", weight ? "a" : "no", " weight, expected both or none");
  STD_TORCH_CHECK(ptr.dim() == 1 && ptr.size(0) >= 1, "ptr has shape ", shape_of(ptr),
                  ", expected [pieces + 1]");
  STD_TORCH_CHECK(vectors.dim() == 1 && vectors.size(0) % 16 == 0, "vectors has shape ",
                  shape_of(vectors), ", expected [groups * 16]");
  const int64_t groups = vectors.size(0) / 16, pieces = ptr.size(0) - 1;
  const int64_t windows = (s.csr.rows + height - 1) / height;
  STD_TORCH_CHECK(target ? pieces >= windows : pieces == windows, "ptr has ", pieces,
                  " pieces for ", windows, " windows, expected as many, or more with a target");
  STD_TORCH_CHECK(merges.has_value() == (slots > 0), "got ", slots, " scratch slots ",
                  merges ? "with" : "without", " merges");
  check_wide_reads("ptr", ptr, {pieces + 1}, ScalarType::Int, rowptr);
  check_wide_reads("vectors", vectors, {groups * 16}, ScalarType::Int, rowptr);
  check_wide_reads("bits", bits, {groups, height}, ScalarType::Short, rowptr);
  if (values) check_wide_reads("values", *values, {groups, height, 16}, s.type, rowptr);
  if (rows) check_wide_reads("rows", *rows, {windows * height}, ScalarType::Int, rowptr);
  if (target) check_wide_reads("target", *target, {pieces}, ScalarType::Int, rowptr);
  if (merges) {
    STD_TORCH_CHECK(merges->dim() == 2, "merges has shape ", shape_of(*merges),
                    ", expected [n, 4]");
    check_wide_reads("merges", *merges, {merges->size(0), 4}, ScalarType::Int, rowptr);
  }
  return {s, pieces, height, slots, passes};
}

inline Sizes check_tile_end(const Tensor& rowptr, const Tensor& col, const OptionalTensor& weight,
                            const Tensor& x, const Tensor& sums, const OptionalTensor& dst_scale) {
  const int64_t width = x.dim() == 2 ? x.size(1) : 0;
  const Sizes s = check_tiled(rowptr, col, weight, x, dst_scale, width, false);
  check_wide_reads("sums", sums, {s.csr.rows, s.width}, ScalarType::Float, rowptr);
  return s;
}

// What a sum is stored as.
struct Result {
  Dtype dtype;
  ScalarType type;
  bool self_scale_by_row;  // else one for all rows
};

inline Result check_epilogue(const Sizes& s, const Tensor& rowptr, const OptionalTensor& self_x,
                             const OptionalTensor& self_scale, const OptionalTensor& bias,
                             std::optional<ScalarType> out_dtype) {
  const ScalarType acc = accumulator_type(s.type);
  if (self_x) check_matrix("self_x", *self_x, s.csr.rows, s.width, s.type, rowptr);
  STD_TORCH_CHECK(self_x || !self_scale, "got self_scale without self_x, which it multiplies");
  const bool by_row = self_scale && !(self_scale->dim() == 1 && self_scale->size(0) == 1);
  if (self_scale) check_vector("self_scale", *self_scale, by_row ? s.csr.rows : 1, acc, rowptr);
  if (bias) check_vector("bias", *bias, s.width, acc, rowptr);
  const ScalarType type = out_dtype.value_or(s.type);
  const Dtype dtype = feature_dtype("out_dtype", type);
  STD_TORCH_CHECK((dtype == Dtype::kFloat64) == (s.dtype == Dtype::kFloat64), "out_dtype is ", type,
                  " for features of ", s.type,
                  ": sums of float64 are float64, other sums float32, float16 or bfloat16");
  return {dtype, type, by_row};
}

inline Sizes check_spmm_arg(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                            const OptionalTensor& weight, const Tensor& x) {
  Sizes s = check_features("x", x, check_csr(rowptr, col, perm), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  return s;
}

inline Sizes check_spmm_arg_backward(const Tensor& rowptr, const Tensor& col,
                                     const OptionalTensor& perm, const OptionalTensor& weight,
                                     const Tensor& grad, const Tensor& arg) {
  Sizes s = check_features("grad", grad, check_csr(rowptr, col, perm), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  check_matrix("arg", arg, grad.size(0), s.width, s.csr.index, rowptr);
  return s;
}

inline Sizes check_spmm_tie_count(const Tensor& rowptr, const Tensor& col,
                                  const OptionalTensor& weight, const Tensor& x, const Tensor& out,
                                  const OptionalTensor& grad) {
  Sizes s = check_features("x", x, check_csr(rowptr, col, std::nullopt), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  check_matrix("out", out, s.csr.rows, s.width, s.type, rowptr);
  if (grad) check_matrix("grad", *grad, s.csr.rows, s.width, s.type, rowptr);
  return s;
}

inline Sizes check_spmm_tie_backward(const Tensor& rowptr, const Tensor& col,
                                     const OptionalTensor& weight, const Tensor& grad,
                                     const Tensor& x, const Tensor& out) {
  Sizes s = check_features("grad", grad, check_csr(rowptr, col, std::nullopt), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  check_matrix("x", x, s.csr.rows, s.width, s.type, rowptr);
  check_matrix("out", out, grad.size(0), s.width, s.type, rowptr);
  return s;
}

// Dot products of rows of `a` (destinations) and `b` (sources). heads 0: one product over all
// columns, as 1 head.
inline Sizes check_sddmm(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                         const char* a_name, const Tensor& a, const char* b_name, const Tensor& b,
                         int64_t heads) {
  Sizes s = check_features(b_name, b, check_csr(rowptr, col, perm), rowptr);
  check_matrix(a_name, a, s.csr.rows, s.width, s.type, rowptr);
  s.heads = heads == 0 ? 1 : check_heads(s.width, heads);
  return s;
}

inline Sizes check_sddmm_arg(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                             const Tensor& grad, const Tensor& x, const Tensor& arg,
                             int64_t heads) {
  Sizes s = check_sddmm(rowptr, col, perm, "grad", grad, "x", x, heads);
  check_matrix("arg", arg, s.csr.rows, s.width, s.csr.index, rowptr);
  return s;
}

inline Sizes check_sddmm_tie(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                             const OptionalTensor& weight, const Tensor& grad, const Tensor& x,
                             const Tensor& out, int64_t heads) {
  Sizes s = check_sddmm(rowptr, col, perm, "grad", grad, "x", x, heads);
  check_matrix("out", out, s.csr.rows, s.width, s.type, rowptr);
  const int64_t weight_heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  STD_TORCH_CHECK(!weight || weight_heads == s.heads, "weight has ", weight_heads,
                  " heads, expected ", s.heads);
  return s;
}

inline Sizes check_pair_score(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                              const Tensor& a, const Tensor& b, const Tensor& att) {
  STD_TORCH_CHECK(att.dim() == 2 && att.size(0) > 0, "att has shape ", shape_of(att),
                  ", expected [heads, channels]");
  const Sizes s = check_sddmm(rowptr, col, perm, "a", a, "b", b, att.size(0));
  check_matrix("att", att, s.heads, s.width / s.heads, s.type, rowptr);
  check_contiguous("att", att);
  return s;
}

inline Sizes check_pair_gradient(const Tensor& rowptr, const Tensor& col,
                                 const OptionalTensor& perm, const Tensor& grad, const Tensor& a,
                                 const Tensor& b, const Tensor& att) {
  const Sizes s = check_pair_score(rowptr, col, perm, a, b, att);
  check_matrix("grad", grad, s.csr.edges, s.heads, s.type, rowptr);
  check_contiguous("grad", grad);
  return s;
}

// Features of edges, in the caller's order.
inline void check_edge_rows(const Tensor& e, const Sizes& s, const Tensor& rowptr) {
  check_matrix("e", e, s.csr.edges, s.width, s.type, rowptr);
}

inline void check_one_weight(const OptionalTensor& weight, const Sizes& s) {
  if (weight) check_vector("weight", *weight, s.csr.edges, s.type, *weight);
}

inline Sizes check_edge_sum(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                            const OptionalTensor& weight, const Tensor& x, const Tensor& e) {
  const Sizes s = check_spmm_arg(rowptr, col, perm, weight, x);
  check_one_weight(weight, s);
  check_edge_rows(e, s, rowptr);
  return s;
}

inline Sizes check_edge_sum_backward(const Tensor& rowptr, const Tensor& col,
                                     const OptionalTensor& perm, const OptionalTensor& weight,
                                     const Tensor& x, const Tensor& e, const Tensor& grad) {
  Sizes s = check_features("grad", grad, check_csr(rowptr, col, perm), rowptr);
  s.heads = check_weight(weight, s.csr, s.width, s.type, rowptr);
  check_one_weight(weight, s);
  check_matrix("x", x, s.csr.rows, s.width, s.type, rowptr);
  check_edge_rows(e, s, rowptr);
  return s;
}

inline Sizes check_edge_sum_dot(const Tensor& rowptr, const Tensor& col, const OptionalTensor& perm,
                                const Tensor& grad, const Tensor& x, const Tensor& e) {
  const Sizes s = check_sddmm(rowptr, col, perm, "grad", grad, "x", x, 0);
  check_edge_rows(e, s, rowptr);
  return s;
}

// values [E] or [E, H] per edge, contiguous.
inline Sizes check_edge_softmax(const Tensor& rowptr, const OptionalTensor& perm, const char* name,
                                const Tensor& values) {
  const int64_t dim = values.dim();
  STD_TORCH_CHECK(dim == 1 || dim == 2, name, " has shape ", shape_of(values),
                  ", expected [edges] or [edges, heads]");
  check_contiguous(name, values);
  check_same_device(name, values, rowptr);
  const Dtype dtype = feature_dtype(name, values.scalar_type());
  const CsrSizes csr = check_csr(rowptr, nullptr, perm, values.size(0));
  const int64_t heads = dim == 1 ? 1 : values.size(1);
  return {csr, dtype, values.scalar_type(), heads, heads};
}

inline Sizes check_edge_softmax_backward(const Tensor& rowptr, const OptionalTensor& perm,
                                         const Tensor& p, const Tensor& grad) {
  const Sizes s = check_edge_softmax(rowptr, perm, "p", p);
  check_dtype("grad", grad, s.type);
  check_contiguous("grad", grad);
  check_same_device("grad", grad, rowptr);
  bool same_shape = grad.dim() == p.dim();
  for (int64_t d = 0; same_shape && d < p.dim(); ++d) same_shape = grad.size(d) == p.size(d);
  STD_TORCH_CHECK(same_shape, "grad has shape ", shape_of(grad), ", expected ", shape_of(p));
  return s;
}

// A vector of indices with any stride.
inline void check_index_vector(const char* name, const Tensor& t) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, name, " is ", type,
                  ", expected int32 or int64");
  STD_TORCH_CHECK(t.dim() == 1, name, " has shape ", shape_of(t), ", expected 1 dimension");
}

// Two ends of edges, of any type and stride each; how many there are.
inline int64_t check_ends(const char* a_name, const Tensor& a, const char* b_name,
                          const Tensor& b) {
  check_index_vector(a_name, a);
  check_index_vector(b_name, b);
  check_same_device(b_name, b, a);
  STD_TORCH_CHECK(a.size(0) == b.size(0), a_name, " has ", a.size(0), " entries, ", b_name, " has ",
                  b.size(0), ", expected as many");
  return a.size(0);
}

inline void check_from_coo(const Tensor& dst, const Tensor& src, int64_t num_dst, int64_t num_src,
                           bool wide) {
  const int64_t edges = check_ends("dst", dst, "src", src);
  STD_TORCH_CHECK(num_dst >= 0 && num_src >= 0, "got num_dst = ", num_dst, ", num_src = ", num_src,
                  ", expected 0 or more");
  STD_TORCH_CHECK(
      wide || std::max({num_dst, num_src, edges}) <= std::numeric_limits<int32_t>::max(), "got ",
      num_dst, " rows, ", num_src, " columns and ", edges, " edges, expected wide = true for them");
}

// Copies that from_coo has made: contiguous and of one type. Returns whether that is int64.
inline bool check_transpose(const Tensor& dst, const Tensor& src, int64_t num_src) {
  const int64_t edges = check_ends("dst", dst, "src", src);
  check_contiguous("dst", dst);
  check_vector("src", src, edges, dst.scalar_type(), dst);
  const bool wide = dst.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(num_src > 0 || (num_src == 0 && edges == 0), "got num_src = ", num_src, " for ",
                  edges, " edges, expected more than every source");
  STD_TORCH_CHECK(wide || std::max(num_src, edges) <= std::numeric_limits<int32_t>::max(),
                  "dst is ", dst.scalar_type(), ", expected int64 for ", num_src, " sources and ",
                  edges, " edges");
  return wide;
}

// Factors of the rows of a CSR matrix, `col` null where only its degrees count.
inline CsrSizes check_row_scales(const Tensor& rowptr, const Tensor* col, ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double, "dtype is ", dtype,
                  ", expected float32 or float64");
  return col == nullptr ? check_csr(rowptr, nullptr, std::nullopt, 0)
                        : check_csr(rowptr, *col, std::nullopt);
}

inline int64_t check_same_coo(const Tensor& dst, const Tensor& src, const Tensor& own_dst,
                              const Tensor& own_src) {
  check_ends("dst", dst, "src", src);
  check_ends("dst", dst, "own_dst", own_dst);
  return check_ends("dst", dst, "own_src", own_src);
}

// ---- outputs

// A contiguous tensor on the device of `like`. torch::stable::new_empty would go through the
// dispatcher, which costs more than the rest of a small call.
inline Tensor fast_empty(const Tensor& like, std::initializer_list<int64_t> sizes,
                         ScalarType type) {
  int32_t device_type, device_index, dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  switch (type) {
    case ScalarType::Int:
      dtype = aoti_torch_dtype_int32();
      break;
    case ScalarType::Long:
      dtype = aoti_torch_dtype_int64();
      break;
    case ScalarType::Float:
      dtype = aoti_torch_dtype_float32();
      break;
    case ScalarType::Double:
      dtype = aoti_torch_dtype_float64();
      break;
    case ScalarType::Half:
      dtype = aoti_torch_dtype_float16();
      break;
    case ScalarType::BFloat16:
      dtype = aoti_torch_dtype_bfloat16();
      break;
    default:
      STD_TORCH_CHECK(false, "no output can be ", type);
  }
  int64_t strides[2] = {1, 1};
  STD_TORCH_CHECK(sizes.size() <= 2, "got ", sizes.size(), " dimensions, expected at most 2");
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error =
      aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                               device_type, device_index, &handle);
  if (error != AOTI_TORCH_SUCCESS) {
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    // _native.py makes a torch.OutOfMemoryError of an error that begins like this.
    STD_TORCH_CHECK(false, "out of memory: cannot allocate [", shape, "] of ", type, " on ",
                    device_of(like));
  }
  return Tensor(handle);
}

// The one number in `t`; waits for the device where that is a GPU.
inline int64_t item(const Tensor& t) {
  int64_t value;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_item_int64(t.get(), &value));
  return value;
}

inline const void* data_or_null(const OptionalTensor& t) {
  return t ? t->const_data_ptr() : nullptr;
}

}  // namespace gsp
