// The parts of a self-attention layer around attention. split_heads: convolution over the channels of q, k and v, RMS norm and
// rotary positions of the heads of q and k. join_heads: RMS norm of the heads of the output, times silu of a gate.
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>

#include "core/params.h"

namespace fastmax {

inline constexpr int kMaxLayerHeadDim = 256;  // capacity of the lanes of a warp
inline constexpr int kMaxConvolution = 8;     // tokens
inline constexpr int kMaxLayerTokens = INT_MAX / 2;

// A learned weight, contiguous. The kernels round it to the dtype of the tokens.
struct Weight {
  const void* data;  // null: none
  bool is_float;     // float32; otherwise the dtype of the tokens
};

// How tokens and heads are divided among warps. A warp owns a unit, which is as many heads as its lanes can hold, and walks along
// a strip of tokens of one sequence.
struct Strips {
  int tokens;          // of a strip
  int per_sequence;    // strips
  int64_t warps;       // of the grid: b * per_sequence * units
};

// The heads of q, of k or of v.
struct HeadGroup {
  int heads;
  int width;                // columns of a head, a multiple of 8
  int first_channel;        // of the first head, among the channels of a token
  int lanes_log2, units;    // log2 of the lanes per head, and units of all heads; the launcher computes them
  Weight norm;              // (width,), of RMS norm
  float eps;                // added to the mean squares
  void* out;                // forward: (b, n, heads, width), contiguous
  const void* grad;         // backward: gradient of out, or null for zeros; unit stride in the last dimension
  Stride grad_stride;
  void* grad_norm;          // backward: the gradient of norm, in its dtype
};

// Pointers of tokens and their strides are multiples of 16 bytes.
struct SplitHeadsParams {
  int b, n, channels;
  MathMode math;  // dtype of the tokens; the arithmetic is fp32
  int sm_count;

  const void* x;  // (b, n, channels)
  int64_t x_batch, x_token;
  const void* recent;  // (b, width - 1, channels), the tokens before x; null: zeros
  int64_t recent_batch, recent_token;
  Weight convolution;  // (channels, 1, width)
  int width;           // of the convolution, up to kMaxConvolution; 1: none
  const void* places;  // (n,), number of tokens before each one in its sequence, int32 or int64; null: all that exist
  bool wide_places;
  const float *cos, *sin;  // (n, rotated) or (b, n, rotated); null: no rotation
  int64_t rotation_batch;  // stride, or 0
  int rotated;             // channels of each head of q and k, even; 0: none

  HeadGroup groups[3];  // q, k and v
  Strips strips;        // the launcher computes them

  // backward
  void* grad_x;       // (b, n, channels), contiguous
  void* grad_recent;  // (b, width - 1, channels), contiguous, or null
  void* grad_convolution;  // in the dtype of the weight
  float* workspace;        // split_heads_workspace(p) floats: sums of each strip for the gradients of weights
};

struct JoinHeadsParams {
  int b, n;
  MathMode math;
  int sm_count;

  const void* o;  // (b, h, n, width), of any strides but unit in the last dimension
  Stride o_stride;
  const void* gate;  // (b, n, h * width), or null
  int64_t gate_batch, gate_token;
  HeadGroup group;  // out is (b, n, h, width), contiguous; grad is (b, n, h * width) with grad_stride.head = width
  Strips strips;

  // backward
  void* grad_o;
  Stride grad_o_stride;
  void* grad_gate;   // (b, n, h * width), contiguous, or null
  float* workspace;  // join_heads_workspace(p) floats
};

// Floats of the workspace of a backward.
int64_t split_heads_workspace(const SplitHeadsParams& p);
int64_t join_heads_workspace(const JoinHeadsParams& p);

// At least one token.
void launch_split_heads(const SplitHeadsParams& p, cudaStream_t stream);
void launch_split_heads_backward(const SplitHeadsParams& p, cudaStream_t stream);
void launch_join_heads(const JoinHeadsParams& p, cudaStream_t stream);
void launch_join_heads_backward(const JoinHeadsParams& p, cudaStream_t stream);

}  // namespace fastmax
