// What all pairs of a query share in a backward (Score::row), made once per query before the kernels that visit pairs.
#pragma once

#include "core/dtype.h"
#include "core/launch.h"
#include "core/params.h"
#include "core/score.h"
#include "quadratic/tile_config.h"

namespace fastmax {

// row_scores: (b, h, rows_per_head), zeros behind the last query. grad_o_copy: null, or where a contiguous grad_o (b, h, n, dv) with
// the noise in it goes.
template <class Score, class Element, int kHeadDim>
__global__ void __launch_bounds__(kRowScoreThreads)
    row_score_kernel(const BwdParams p, const int rows_per_head, float4* row_scores, Element* grad_o_copy) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
  constexpr int kLanes = row_score_lanes<Element, kHeadDim>();
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowScoreThreads + threadIdx.x) / kLanes;
  const int64_t heads = static_cast<int64_t>(p.b) * p.h;
  const int64_t row_head = row / rows_per_head, query = row % rows_per_head;
  const bool is_query = row_head < heads && query < p.n;
  const int64_t result = row_head * p.n + query;  // of (b, h, n)

  float delta = 0.f;
#pragma unroll
  for (int first_col = 0; first_col < kHeadDim; first_col += kLanes * kVector) {
    const int col = first_col + static_cast<int>(threadIdx.x) % kLanes * kVector;
    if (!is_query || col >= p.dv) break;
    const int64_t head = row_head % p.h, batch = row_head / p.h;
    const auto at = [&](const void* base, const Stride& s) {
      return static_cast<const Element*>(base) + batch * s.batch + head * s.head + query * s.token + col;
    };
    const Element* grad_o = at(p.grad_o, p.grad_o_stride);
    const Element* o = at(p.o, p.o_stride);
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      const float2 x = load_pair(grad_o + i), y = load_pair(o + i);
      delta = fmaf(x.x, y.x, fmaf(x.y, y.y, delta));
    }
    if (grad_o_copy != nullptr) {
      const Element* noise = p.noise == nullptr ? nullptr : at(p.noise, p.noise_stride);
#pragma unroll
      for (int i = 0; i < kVector; i += 2) {
        const float2 x = load_pair(grad_o + i), y = noise == nullptr ? make_float2(0.f, 0.f) : load_pair(noise + i);
        store_pair(grad_o_copy + result * p.dv + col + i, x.x * fmaf(p.dropout, y.x, 1.f), x.y * fmaf(p.dropout, y.y, 1.f));
      }
    }
  }
#pragma unroll
  for (int lane = kLanes / 2; lane > 0; lane /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, lane);
  if (row_head < heads && threadIdx.x % kLanes == 0) {
    if (is_query && p.grad_z != nullptr) delta -= Score::delta_of_z(p.z[result], p.grad_z + result);
    row_scores[row] = is_query ? Score(p).row(p.z[result], delta) : make_float4(0.f, 0.f, 0.f, 0.f);
  }
}

template <class Score, class Element, int kHeadDim>
void launch_row_scores(const BwdParams& p, int rows_per_head, float4* row_scores, Element* grad_o_copy, cudaStream_t stream) {
  constexpr int kRowsPerBlock = kRowScoreThreads / row_score_lanes<Element, kHeadDim>();
  const int64_t rows = int64_t{p.b} * p.h * rows_per_head;
  launch_kernel("row_score", row_score_kernel<Score, Element, kHeadDim>, grid_1d((rows + kRowsPerBlock - 1) / kRowsPerBlock),
                kRowScoreThreads, 0, stream, p, rows_per_head, row_scores, grad_o_copy);
}

}  // namespace fastmax
