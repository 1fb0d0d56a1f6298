// The portable kernels of the quadratic algorithm and of softmax attention. Each shard of their sources (csrc/build.py)
// specializes a function for one score, visibility and arithmetic mode.
#pragma once

#include <cuda_runtime.h>

#include "core/dispatch.h"
#include "core/params.h"

namespace fastmax {

using QuadraticHeadDims = HeadDims<32, 64, 96, 128, 256>;

// Declared in core/score.h and core/visibility.h. TableVisibility: calls with bounds of keys, windows and decay.
struct PolynomialScore;
struct SoftmaxScore;
struct DenseVisibility;
struct TableVisibility;

template <class Score, class Visibility, class Math>
void quadratic_fwd(const FwdParams& p, cudaStream_t stream);
template <class Score, class Visibility, class Math>
void quadratic_bwd(const BwdParams& p, cudaStream_t stream);

// Bytes of the row scores, float4 (b, h, n). The workspace adds, with noise, grad_o (1 + dropout noise), contiguous (b, h, n,
// dv).
inline size_t quadratic_row_score_bytes(const BwdParams& p) {
  return (static_cast<size_t>(p.b) * p.h * p.n * sizeof(float4) + 255) / 256 * 256;
}
inline size_t quadratic_bwd_workspace_bytes(const BwdParams& p) {
  return quadratic_row_score_bytes(p) + (p.noise == nullptr ? 0 : static_cast<size_t>(p.b) * p.h * p.n * p.dv * tensor_element_bytes(p));
}

}  // namespace fastmax
