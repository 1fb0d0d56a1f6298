// normalize="token": rows of q and k that are longer than a limit, scaled back to it, and the gradient of that.
#pragma once

#include <cuda_runtime.h>

#include <climits>

#include "core/params.h"

namespace fastmax {

inline constexpr int kMaxNormalizedDim = 256;           // what the lanes of a warp hold
inline constexpr int kMaxNormalizedRows = INT_MAX / 2;  // of a tensor: numbers of rows, with what rounds them up, are int
inline constexpr double kMaxNormalizedLim = 0x1p60;     // and at least its reciprocal, so that no factor underflows

// q or k, (b, h, n, d). Rows are numbered as they lie in a dense tensor, token-major (b, n, h) or contiguous (b, h, n).
struct NormalizedTensor {
  int rows;          // b h n, up to kMaxNormalizedRows; 0: there is nothing to do
  int inner, outer;  // h and n where token-major, else n and h
  bool token_major;

  const void* x;                 // forward: the rows; backward: what the forward made of them
  const void* grad;              // backward: of that
  Stride x_stride, grad_stride;  // the last dimension has unit stride, any alignment
  void* out;         // dense; forward: the scaled rows; backward: the gradient of the rows
  float* factor;     // by number, written forward and read backward: what a row was scaled by, less than 1 where it was, and there alone
};

struct NormalizeParams {
  int d;          // 1 to kMaxNormalizedDim
  MathMode math;  // of all rows; the arithmetic is fp32
  bool aligned;   // all rows are whole 16-byte words at multiples of 16 bytes
  float lim;
  NormalizedTensor tensors[2];  // q and k
};

void launch_normalize_tokens(const NormalizeParams& p, cudaStream_t stream);
void launch_normalize_tokens_backward(const NormalizeParams& p, cudaStream_t stream);

}  // namespace fastmax
