// Host side of the fused backward (fused_bwd.h, fused_bwd_narrow.h): the calls that it runs, the order of its work tiles and
// its workspace.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "core/dispatch.h"
#include "core/params.h"
#include "quadratic/sm90/work_order.h"

namespace fastmax {

// Head dims with a fused backward. Other calls run two kernels.
using FusedBwdHeadDims = HeadDims<32, 64, 128>;

// Sizes of the tiles and of the partial sums of grad_q.
struct FusedBwdShape {
  int head_dim_qk;
  int parts;              // slices of columns of a tile's grad_q, one per warpgroup, stored in the layout of its accumulator
  int tiles_per_counter;  // consecutive tiles that share a counter (PartialGradQ::added)
  int keys = 128;         // keys per work tile
  int queries = 64;       // queries per tile

  // Tiles of narrow heads take so little time that a single thread cannot poll one counter per tile.
  static constexpr FusedBwdShape of(int head_dim_qk) {
    return head_dim_qk <= 64 ? FusedBwdShape{head_dim_qk, 1, 128 / head_dim_qk} : FusedBwdShape{head_dim_qk, 2, 1};
  }
  constexpr int part_cols() const { return head_dim_qk / parts; }
  constexpr int part_floats() const { return queries * part_cols(); }
  constexpr int tiles(const Problem& p) const { return (p.n + queries - 1) / queries; }  // per query head
  constexpr int counters(const Problem& p) const { return (tiles(p) + tiles_per_counter - 1) / tiles_per_counter * parts; }
  constexpr int blocks(const Problem& p) const { return (p.m + keys - 1) / keys; }  // per key/value head
  constexpr int64_t all_parts(const Problem& p) const { return int64_t{p.b} * p.h * tiles(p) * parts; }
};

// Whether the fused backward is faster than two kernels, judged by the sizes of the call.
inline bool fused_bwd_pays(const Problem& p) {
  if (!FusedBwdHeadDims::has(common_head_dim(p))) return false;
  const FusedBwdShape shape = FusedBwdShape::of(p.head_dim_qk);
  // The sums of grad_q are fp32 and padded to whole tiles. With fewer queries they would take more memory than q, o, grad_o and
  // grad_q.
  if (p.n < shape.queries) return false;
  // One kernel saves two of seven products per pair and has to round one row of sums per query. Measured, these balance at 512
  // keys per query.
  const int keys_of_a_query = p.causal ? p.m - (p.n - 1) / 2 : p.m;  // on average
  if (keys_of_a_query < 1024) return false;
  // Blocks that start together on the same head finish one tile after the other, because each waits for the one before. Without
  // a second round that costs a third of the time. With a causal mask, work shrinks from block to block and one round is
  // enough.
  const int rounds = p.causal ? 1 : 2;
  return int64_t{p.b} * p.hk * shape.blocks(p) >= int64_t{rounds} * p.sm_count;
}

// The order of the blocks of keys. Heads form groups; within a group come the first blocks of all heads, then the second
// blocks, and so on.
struct KeyBlockOrder {
  int blocks;  // per head
  int heads;   // over the whole batch
  int heads_per_group;

  // Bytes of Q, dO and the sums of grad_q of the heads that are processed at a time. All blocks of a head read these again, and
  // they must stay in L2: 50 MB in two halves that copy from each other. That allows 4 heads of 4096 tokens, or 8 with a causal
  // mask, where a block reads half of them. Blocks of the same head wait for each other, for longer if heads are few and short;
  // a limit in bytes keeps this share of the time the same for all lengths. (8, 16, 4096, 128) on an H200, ms of the backward
  // by heads at a time: causal 4 3.29, 8 2.89, 12 2.84, 16 3.0, 32 2.97, 64 3.17; not causal 4 5.15, 8 5.65, 12 6.05, 16 5.4,
  // 32 5.83, 64 7.98.
  static constexpr int64_t kBytesAtOnce = 16 << 20;

  static KeyBlockOrder of(const Problem& p) {
    constexpr int kMostWorkTiles = INT_MAX / 2;  // blocks that find no work tile left still increment the counter
    const int blocks = FusedBwdShape::of(p.head_dim_qk).blocks(p);
    const int64_t heads = int64_t{p.b} * p.hk;
    if (blocks * heads > kMostWorkTiles) {
      throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(blocks * heads));
    }
    const int64_t bytes_of_head = int64_t{p.h / p.hk} * p.n * (p.head_dim_qk * (2 + 4) + p.head_dim_v * 2);
    const int64_t at_once = std::max<int64_t>((p.causal ? 2 : 1) * kBytesAtOnce / bytes_of_head, 1);
    const int64_t groups = (heads + at_once - 1) / at_once;
    return {blocks, static_cast<int>(heads), static_cast<int>((heads + groups - 1) / groups)};
  }
  constexpr __host__ __device__ int work_tiles() const { return blocks * heads; }

  constexpr __host__ __device__ WorkTile work_tile(int number) const {
    const int group = number / (heads_per_group * blocks), first_head = group * heads_per_group;
    const int in_group = number - first_head * blocks, heads_left = heads - first_head;
    const int heads_here = heads_per_group < heads_left ? heads_per_group : heads_left;
    return {in_group / heads_here, first_head + in_group % heads_here};
  }
};

// Offsets in the workspace, after the part that two kernels have too: counters, sums of grad_q and, if Score::kScalesGradO, the
// scaled copy of grad_o (only if the part before has no copy of grad_o).
struct FusedBwdWorkspace {
  size_t counters, sums, grad_o, bytes;

  FusedBwdWorkspace(const Problem& p, size_t before, bool makes_grad_o) {
    const auto align = [](size_t offset) { return (offset + 255) / 256 * 256; };
    const FusedBwdShape shape = FusedBwdShape::of(p.head_dim_qk);
    const size_t heads = static_cast<size_t>(p.b) * p.h;
    counters = align(before);
    sums = align(counters + (1 + heads * shape.counters(p)) * sizeof(uint32_t));
    grad_o = align(sums + static_cast<size_t>(shape.all_parts(p)) * shape.part_floats() * sizeof(float));
    bytes = grad_o + (makes_grad_o && scales_by_columns(common_head_dim(p)) ? heads * p.n * p.dv * 2 : 0);
  }

  // Whether the score data of a query come in the short format Score::Column (row_score.h).
  static constexpr bool scales_by_columns(int head_dim) { return head_dim <= 64; }
};

// Whether grad_o divided by the sums of weights stays within the range of floats. Narrow heads round that quotient to 16 bits.
// Weights are as large as the coefficients of f, times a factor from scores and number of keys. The limits leave 10^20 and more
// for that factor.
inline bool sums_divide_grad_o(const Problem& p) {
  const float largest = std::max({std::abs(p.a0), std::abs(p.a1), std::abs(p.a2)});
  return !FusedBwdWorkspace::scales_by_columns(common_head_dim(p)) || (largest > 1e-12f && largest < 1e12f);
}

// Partial sums of grad_q. The counters start at 0.
struct PartialGradQ {
  uint32_t* taken;      // (1): number of work tiles taken
  uint32_t* added;      // (b, h, counters): blocks of keys that have added their sums to the tiles of this counter
  float* sums;          // (b, h, tiles, parts): each in the layout of a warpgroup's accumulators
  int tiles, counters;  // per head
};

}  // namespace fastmax
