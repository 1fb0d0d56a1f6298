// Per-query values that all pairs of a query share in a backward (Score::row or Score::column). A kernel computes them before
// the kernels over pairs.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "core/params.h"
#include "core/score.h"

namespace fastmax {

// Threads per block of row_score_kernel.
inline constexpr int kRowScoreThreads = 256;

// Threads per row: a power of two, at most a warp. Each takes 16 bytes of the row at a time.
template <class Element, int kHeadDim>
__host__ __device__ constexpr int row_score_lanes() {
  int lanes = 2;
  while (lanes < kWarpSize && lanes * 16 < kHeadDim * static_cast<int>(sizeof(Element))) lanes *= 2;
  return lanes;
}

// Rounds to Element and back.
template <class Element>
__device__ __forceinline__ float2 rounded(float2 x) {
  alignas(sizeof(float2)) Element pair[2];
  store_pair(pair, x.x, x.y);
  return load_pair(pair);
}

template <class Score, bool kByColumn>
using RowScore = std::conditional_t<kByColumn, typename Score::Column, float4>;

// row_scores: (b, h, rows_per_head), zeros beyond the last query. grad_o_copy: null, or the contiguous result (b, h, n, dv) of
// grad_o times the noise factor; by column also times Score::grad_o_scale if Score::kScalesGradO.
template <class Score, class Element, int kHeadDim, bool kByColumn>
__global__ void __launch_bounds__(kRowScoreThreads)
    row_score_kernel(const BwdParams p, const int rows_per_head, RowScore<Score, kByColumn>* row_scores, Element* grad_o_copy) {
  constexpr bool kScales = kByColumn && Score::kScalesGradO;
  constexpr int kVector = 16 / static_cast<int>(sizeof(Element));
  constexpr int kLanes = row_score_lanes<Element, kHeadDim>();
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kRowScoreThreads + threadIdx.x) / kLanes;
  const int64_t heads = static_cast<int64_t>(p.b) * p.h;
  const int64_t row_head = row / rows_per_head, query = row % rows_per_head;
  const bool is_query = row_head < heads && query < p.n;
  const int64_t result = row_head * p.n + query;  // of (b, h, n)

  float grad_o_scale = 1.f;
  if constexpr (kScales) grad_o_scale = is_query ? Score::grad_o_scale(p.z[result]) : 0.f;
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
      const float2 y = load_pair(o + i);
      float2 x = load_pair(grad_o + i);
      if constexpr (kScales) {
        x.x *= grad_o_scale, x.y *= grad_o_scale;
        if (p.noise == nullptr) x = rounded<Element>(x);  // as products read it, for rows that see few keys
      }
      delta = fmaf(x.x, y.x, fmaf(x.y, y.y, delta));
    }
    if (grad_o_copy != nullptr) {
      const Element* noise = p.noise == nullptr ? nullptr : at(p.noise, p.noise_stride);
#pragma unroll
      for (int i = 0; i < kVector; i += 2) {
        const float2 x = load_pair(grad_o + i), y = noise == nullptr ? make_float2(0.f, 0.f) : load_pair(noise + i);
        const float scale_x = kScales ? grad_o_scale : 1.f;
        store_pair(grad_o_copy + result * p.dv + col + i, x.x * scale_x * fmaf(p.dropout, y.x, 1.f),
                   x.y * scale_x * fmaf(p.dropout, y.y, 1.f));
      }
    }
  }
  delta = sum_of_lanes<kLanes>(delta);
  if (row_head < heads && threadIdx.x % kLanes == 0) {
    if (is_query && p.grad_z != nullptr) {
      const float of_z = Score::delta_of_z(p.z[result], p.grad_z + result);
      delta -= kScales ? of_z * grad_o_scale : of_z;
    }
    RowScore<Score, kByColumn> row_score{};
    if constexpr (kByColumn) {
      if (is_query) row_score = Score(p).column(p.z[result], delta);
    } else {
      if (is_query) row_score = Score(p).row(p.z[result], delta);
    }
    row_scores[row] = row_score;
  }
}

template <class Score, class Element, int kHeadDim, bool kByColumn = false>
void launch_row_scores(const BwdParams& p, int rows_per_head, RowScore<Score, kByColumn>* row_scores, Element* grad_o_copy,
                       cudaStream_t stream) {
  constexpr int kRowsPerBlock = kRowScoreThreads / row_score_lanes<Element, kHeadDim>();
  const int64_t rows = int64_t{p.b} * p.h * rows_per_head;
  launch_kernel("row_score", row_score_kernel<Score, Element, kHeadDim, kByColumn>, grid_1d((rows + kRowsPerBlock - 1) / kRowsPerBlock),
                kRowScoreThreads, 0, stream, p, rows_per_head, row_scores, grad_o_copy);
}

}  // namespace fastmax
