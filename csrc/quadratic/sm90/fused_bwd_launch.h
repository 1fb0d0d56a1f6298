// Launches the fused backward: row scores and counters before the kernel, rounding of the sums of grad_q after it.
#pragma once

#include <algorithm>

#include "quadratic/sm90/fused_bwd.h"
#include "quadratic/sm90/fused_bwd_narrow.h"

namespace fastmax {

// Tile of rounded grad_q.
template <class Tile>
using GradQTile = SwizzledTile<Tile::kStream, Tile::kPartCols>;

// Rounds the sums of grad_q, one block per part of a tile.
template <class Tile, class Math>
__global__ void __launch_bounds__(128)
    quadratic_round_grad_q_sm90_kernel(const __grid_constant__ CUtensorMap grad_q, const int heads,
                                       const PartialGradQ partial) {
  constexpr int kParts = Tile::kShape.parts;
  extern __shared__ uint8_t shared[];
  const uint32_t staged = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const int64_t part = blockIdx.x;
  const int part_in_tile = static_cast<int>(part % kParts), tile = static_cast<int>(part / kParts % partial.tiles);
  const int head = static_cast<int>(part / kParts / partial.tiles);
  const float4* sums = reinterpret_cast<const float4*>(partial.sums + part * Tile::kPartFloats) + threadIdx.x;
  float dq[Tile::kPartFloats / 128];
#pragma unroll
  for (int i = 0; i < Tile::kPartFloats / 128; i += 4) {
    const float4 x = sums[i / 4 * 128];
    dq[i] = x.x, dq[i + 1] = x.y, dq[i + 2] = x.z, dq[i + 3] = x.w;
  }
  store_accumulator<Math, GradQTile<Tile>>(staged, 0, dq, 1.f, 1.f, static_cast<int>(threadIdx.x) / kWarpSize, lane_index());
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(grad_q, staged, part_in_tile * Tile::kPartCols, tile * Tile::kStream, head % heads, head / heads);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

template <class Score>
FusedBwdWorkspace fused_bwd_workspace(const BwdParams& p, const QuadraticBwdSm90Workspace& before) {
  return FusedBwdWorkspace(p, before.bytes, Score::kScalesGradO && !before.copies_grad_o);
}

template <class Score>
size_t fused_bwd_workspace_bytes(const BwdParams& p) {
  return fused_bwd_workspace<Score>(p, QuadraticBwdSm90Workspace(p)).bytes;
}

template <class Score, class Math, class Tile, class Kernel>
void run_fused_bwd(const BwdParams& p, const Kernel& kernel, cudaStream_t stream) {
  using Element = typename Math::Element;
  const QuadraticBwdSm90Workspace at(p);
  const FusedBwdWorkspace fused = fused_bwd_workspace<Score>(p, at);
  char* workspace = static_cast<char*>(p.workspace);
  auto* row_scores = reinterpret_cast<RowScore<Score, Tile::kScoresByColumn>*>(workspace);
  constexpr bool kScales = Tile::kScoresByColumn && Score::kScalesGradO;
  static_assert(Tile::kScoresByColumn == FusedBwdWorkspace::scales_by_columns(Tile::kHeadDim), "the plan has room for another kernel");
  Element* grad_o_copy = at.copies_grad_o ? reinterpret_cast<Element*>(workspace + at.grad_o)
                         : kScales        ? reinterpret_cast<Element*>(workspace + fused.grad_o)
                                          : nullptr;
  launch_row_scores<Score, Element, Tile::kHeadDim, Tile::kScoresByColumn>(p, row_scores_per_head(p), row_scores, grad_o_copy, stream);
  const KeptWords kept = fill_kept_words(p, workspace + at.kept, stream);
  uint32_t* counters = reinterpret_cast<uint32_t*>(workspace + fused.counters);
  check_cuda(cudaMemsetAsync(counters, 0, fused.sums - fused.counters, stream), "cudaMemsetAsync");
  const PartialGradQ partial{counters, counters + 1, reinterpret_cast<float*>(workspace + fused.sums), Tile::kShape.tiles(p),
                             Tile::kShape.counters(p)};

  const TokenTensor q{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math}, k{p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math};
  const TokenTensor v{p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math};
  const TokenTensor grad_q{p.grad_q, p.grad_q_stride, p.b, p.h, p.n, p.d, p.math};
  const TokenTensor grad_k{p.grad_k, p.grad_k_stride, p.b, p.hk, p.m, p.d, p.math};
  const TokenTensor grad_v{p.grad_v, p.grad_v_stride, p.b, p.hk, p.m, p.dv, p.math};
  TokenTensor grad_o{p.grad_o, p.grad_o_stride, p.b, p.h, p.n, p.dv, p.math};
  if (grad_o_copy != nullptr) {
    grad_o.data = grad_o_copy;
    grad_o.stride = {int64_t{p.h} * p.n * p.dv, int64_t{p.n} * p.dv, p.dv};
  }
  const auto map = [](const TokenTensor& x, int tokens) { return tensor_map(x, tokens, panel_cols(Tile::kHeadDim)); };
  const QuadraticBwdMaps maps{map(k, Tile::kRows),        map(v, Tile::kRows),      map(q, Tile::kStream),
                              map(grad_o, Tile::kStream), map(grad_k, Tile::kRows), map(grad_v, Tile::kRows)};
  const KeyBlockOrder order = KeyBlockOrder::of(p);
  launch_kernel("quadratic_fused_bwd_sm90", kernel, grid_1d(std::min(order.work_tiles(), p.sm_count)), Tile::kThreads, Tile::kSharedBytes,
                stream, maps, p, kept, row_scores, row_scores_per_head(p), p.h / p.hk, order, partial);
  launch_kernel("quadratic_round_grad_q_sm90", quadratic_round_grad_q_sm90_kernel<Tile, Math>, grid_1d(Tile::kShape.all_parts(p)), 128,
                kSwizzledTileAlignment + GradQTile<Tile>::kBytes, stream, map(grad_q, Tile::kStream), p.h, partial);
}

template <class Score, class Math>
void launch_fused_bwd(const BwdParams& p, cudaStream_t stream) {
  dispatch_head_dim(FusedBwdHeadDims(), common_head_dim(p), [&](auto head_dim) {
    constexpr int kHeadDim = decltype(head_dim)::value;
    if constexpr (FusedBwdWorkspace::scales_by_columns(kHeadDim)) {
      run_fused_bwd<Score, Math, FusedBwdNarrowTile<Score, kHeadDim>>(p, quadratic_fused_bwd_narrow_sm90_kernel<Score, Math, kHeadDim>,
                                                                     stream);
    } else {
      run_fused_bwd<Score, Math, FusedBwdTile>(p, quadratic_fused_bwd_sm90_kernel<Score, Math>, stream);
    }
  });
}

}  // namespace fastmax
