// What the copy engine knows of a tensor (b, heads, tokens, columns) of 16-bit elements: a CUtensorMap, which kernels take by value as
// a `const __grid_constant__ CUtensorMap`, so that a CUDA graph keeps a copy.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/params.h"

namespace fastmax {

struct TokenTensor {
  const void* data;
  Stride stride;
  int batch, heads, tokens, columns;  // > 0
  MathMode math;                      // bf16 or fp16
};

// Whether a map can express the strides: multiples of 16 bytes below 2^40, and no expanded dimension. Of a dimension of one the
// stride does not matter.
bool has_tensor_map(const TokenTensor& tensor);

// Whether the driver makes tensor maps (CUDA 12 and newer do).
bool driver_makes_tensor_maps();

// Columns of a panel of a tile (core/sm90/tiles.h), whose rows are swizzled.
constexpr int panel_cols(int tile_cols) { return tile_cols % 64 == 0 ? 64 : 32; }

// Boxes of box_tokens (at most 256) x 64 or 32 columns (panel_cols), in the 128-byte or the 64-byte swizzle of core/sm90/tiles.h,
// coordinates {column, token, head, batch}. Kept by thread, since the same tensors come again and again; a map depends on nothing but
// what is given here.
CUtensorMap tensor_map(const TokenTensor& tensor, int box_tokens, int box_columns = 64);

}  // namespace fastmax
