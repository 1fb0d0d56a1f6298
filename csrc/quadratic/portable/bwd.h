// Backward over tiles of scores, without atomics, for both score policies (score.h).
//
// With x_ij = q_i . k_j, the normalised weight of a query is p(x): f(scale x) / z_i = w0 + w1 x + w2 x^2 for Fastmax, and
// exp(scale x - lse_i) for softmax. delta_i is grad_o_i . o_i minus z_i times the gradient of z_i (softmax: minus the gradient
// of lse_i).
//   p_ij = p(x_ij)     ds_ij = p'(x_ij) (grad_o_i . v_j - delta_i)
//   grad_v_j = sum_i p_ij grad_o_i     grad_k_j = sum_i ds_ij q_i     grad_q_i = sum_j ds_ij k_j
// Here grad_o includes the noise factor. There are three kernels: row scores (the data of p and delta for each query); grad_k
// and grad_v, by blocks that own keys and stream queries; grad_q, by blocks that own queries and stream keys. Scores are
// computed twice, with seven products instead of five, so that every sum has one owner and a fixed order.
//
// The owner's rows are the rows of every product, so p and ds go from accumulators to operands within a thread. With decay
// (decay.h), p and ds include the decay factor, and both kernels also sum p_ij (grad_o_i . v_j - delta_i) over the pairs of
// their rows.
#pragma once

#include "core/dispatch.h"
#include "core/launch.h"
#include "quadratic/portable/bwd_pair.h"
#include "quadratic/portable/bwd_single.h"
#include "quadratic/portable/decay.h"
#include "quadratic/portable/kernels.h"

namespace fastmax {

template <class Score, class Visibility>
struct LaunchQuadraticBwd {
  template <class Math, int kHeadDim>
  static void run(const BwdParams& p, cudaStream_t stream, const PairSums& sums = {}) {
    using Element = typename Math::Element;
    float4* row_scores = static_cast<float4*>(p.workspace);
    char* after_scores = static_cast<char*>(p.workspace) + quadratic_row_score_bytes(p);
    Element* noisy_grad_o = p.noise == nullptr ? nullptr : reinterpret_cast<Element*>(after_scores);
    const void* grad_o = p.noise == nullptr ? p.grad_o : noisy_grad_o;
    const Stride grad_o_stride =
        p.noise == nullptr ? p.grad_o_stride : Stride{int64_t{p.h} * p.n * p.dv, int64_t{p.n} * p.dv, p.dv};

    launch_row_scores<Score, Element, kHeadDim>(p, p.n, row_scores, noisy_grad_o, stream);

    if constexpr (kPairsForKv<Math, kHeadDim>) {
      run_kernel<QueryDecayScratch<QuadraticBwdKvPairTile<Math, kHeadDim>>>(
          "quadratic_bwd_kv_pair", quadratic_bwd_kv_pair_kernel<Score, Visibility, Math, kHeadDim>, p, p.m, p.hk, row_scores, grad_o,
          grad_o_stride, sums, stream);
    } else {
      run_kernel<QueryDecayScratch<QuadraticBwdKvTile<Math, kHeadDim>>>(
          "quadratic_bwd_kv", quadratic_bwd_kv_kernel<Score, Visibility, Math, kHeadDim>, p, p.m, p.hk, row_scores, grad_o,
          grad_o_stride, sums, stream);
    }
    if constexpr (kPairsForQ<Math, kHeadDim>) {
      run_kernel<KeyDecayScratch<QuadraticBwdQPairTile<Math, kHeadDim>>>(
          "quadratic_bwd_q_pair", quadratic_bwd_q_pair_kernel<Score, Visibility, Math, kHeadDim>, p, p.n, p.h, row_scores, grad_o,
          grad_o_stride, sums, stream);
    } else {
      run_kernel<KeyDecayScratch<QuadraticBwdQTile<Math, kHeadDim>>>(
          "quadratic_bwd_q", quadratic_bwd_q_kernel<Score, Visibility, Math, kHeadDim>, p, p.n, p.h, row_scores, grad_o, grad_o_stride,
          sums, stream);
    }
  }

  // Launches a kernel. tokens, heads: tokens and heads on the owner's side. Scratch: the kernel's DecayScratch.
  template <class Scratch, class Kernel>
  static void run_kernel(const char* name, Kernel kernel, const BwdParams& p, int tokens, int heads, const float4* row_scores,
                         const void* grad_o, const Stride& grad_o_stride, const PairSums& sums, cudaStream_t stream) {
    using Tile = typename Scratch::Tile;
    const int row_blocks = (tokens + Tile::kRows - 1) / Tile::kRows;
    launch_kernel(name, kernel, grid_1d(int64_t{row_blocks} * Tile::kColumnParts * p.b * heads), Tile::kThreads,
                  Tile::kSharedBytes + (Visibility::kMayDecay ? Scratch::bytes(p) : 0), stream, p, row_scores, grad_o,
                  grad_o_stride, sums, row_blocks);
  }
};

}  // namespace fastmax
