// Factors of rotary positions: cosines and signed sines of angles, in one launch for all tokens.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "layer/layer.h"

namespace fastmax {

inline constexpr int kMaxRotaryAngles = kMaxLayerHeadDim / 2;  // of a token

struct RotaryParams {
  int64_t tokens;
  const void* positions;  // (tokens,), int32 or int64
  bool wide_positions;
  int half;     // angles of a token, of which the f-th is position * base^(-f / half)
  double base;
  float *cos, *sin;  // (tokens, 2 * half): cosines twice; sines negated, then as they are
};

// At least one token.
void launch_rotary_factors(const RotaryParams& p, cudaStream_t stream);

}  // namespace fastmax
