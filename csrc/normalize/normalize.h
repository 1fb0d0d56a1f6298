// normalize="token": scales rows of q and k that are longer than a limit back to it; and the gradient.
#pragma once

#include <cuda_runtime.h>

#include <climits>

#include "core/params.h"

namespace fastmax {

inline constexpr int kMaxNormalizedDim = 256;           // capacity of the lanes of a warp
inline constexpr int kMaxNormalizedRows = INT_MAX / 2;  // per tensor: row indices, rounded up, are int
inline constexpr double kMaxNormalizedLim = 0x1p60;  // and its reciprocal is the smallest limit, so that no factor underflows

// q or k, (b, h, n, d). Row indices follow the order of a dense tensor: token-major (b, n, h) or contiguous (b, h, n).
struct NormalizedTensor {
  int rows;          // b h n, up to kMaxNormalizedRows; 0: nothing to do
  int inner, outer;  // h and n if token_major, else n and h
  bool token_major;

  const void* x;                 // forward: the rows; backward: the forward's result
  const void* grad;              // backward: gradient of the forward's result
  Stride x_stride, grad_stride;  // unit stride in the last dimension, any alignment
  void* out;         // dense; forward: the scaled rows; backward: the gradient of the rows
  float* factor;     // by row index: scale of the row, below 1 only if it was scaled; forward: written, backward: read
};

struct NormalizeParams {
  int d;          // 1 to kMaxNormalizedDim
  MathMode math;  // of all rows; the arithmetic is fp32
  bool aligned;   // whether all rows are whole 16-byte words at multiples of 16 bytes
  float lim;
  NormalizedTensor tensors[2];  // q and k
};

void launch_normalize_tokens(const NormalizeParams& p, cudaStream_t stream);
void launch_token_factors(const NormalizeParams& p, cudaStream_t stream);  // the factors alone, of aligned rows in bf16
void launch_normalize_tokens_backward(const NormalizeParams& p, cudaStream_t stream);

}  // namespace fastmax
