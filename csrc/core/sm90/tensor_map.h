// Tensor maps: the copy engine's descriptors of tensors (b, heads, tokens, columns) of 16-bit elements. Kernels take a
// CUtensorMap by value as `const __grid_constant__ CUtensorMap`, so that a CUDA graph holds a copy.
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

// Whether a map can express the strides: multiples of 16 bytes below 2^40, and no expanded dimension. The stride of a dimension
// of size 1 does not matter.
bool has_tensor_map(const TokenTensor& tensor);

// Whether the driver can make tensor maps (CUDA 12 and newer can).
bool driver_makes_tensor_maps();

// Columns of a panel (core/sm90/tiles.h) of a tile of tile_cols columns.
constexpr int panel_cols(int tile_cols) { return tile_cols % 64 == 0 ? 64 : 32; }

// Returns a map with boxes of box_tokens (at most 256) x box_columns (64 or 32, panel_cols) in the 128-byte or the 64-byte
// swizzle of core/sm90/tiles.h; coordinates {column, token, head, batch}. Maps are cached per thread, since the same tensors
// come again and again. A map depends only on these arguments.
CUtensorMap tensor_map(const TokenTensor& tensor, int box_tokens, int box_columns = 64);

}  // namespace fastmax
