// The backward in one kernel (fused_bwd.h, fused_bwd_narrow.h) on the host: which calls it is for, the order of its blocks,
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

// Head dims that have it. Other calls have two kernels.
using FusedBwdHeadDims = HeadDims<32, 64, 128>;

struct FusedBwdShape {
  int head_dim;
  int parts;              // that grad_q of a tile comes in, from a warpgroup each, in the order of its accumulator
  int tiles_per_counter;  // a counter says which blocks have added to so many tiles
  int keys = 128;         // of a block
  int queries = 64;       // of a tile

  // Tiles of narrow heads are so short that one thread could not ask for each of them by itself.
  static constexpr FusedBwdShape of(int head_dim) {
    return head_dim <= 64 ? FusedBwdShape{head_dim, 1, 128 / head_dim} : FusedBwdShape{head_dim, 2, 1};
  }
  constexpr int part_cols() const { return head_dim / parts; }
  constexpr int part_floats() const { return queries * part_cols(); }
  constexpr int tiles(const Problem& p) const { return (p.n + queries - 1) / queries; }  // of a query head
  constexpr int counters(const Problem& p) const { return (tiles(p) + tiles_per_counter - 1) / tiles_per_counter * parts; }
  constexpr int blocks(const Problem& p) const { return (p.m + keys - 1) / keys; }  // of a key/value head
  constexpr int64_t all_parts(const Problem& p) const { return int64_t{p.b} * p.h * tiles(p) * parts; }
};

// Whether one kernel is better than two, by counts.
inline bool fused_bwd_pays(const Problem& p) {
  if (FusedBwdHeadDims::at_least(p.head_dim) != p.head_dim) return false;
  const FusedBwdShape shape = FusedBwdShape::of(p.head_dim);
  // Sums of grad_q are fp32 and whole tiles: of fewer queries they would be more memory than q, o, grad_o and grad_q.
  if (p.n < shape.queries) return false;
  // A pair saves two products of seven, and a query has a row of sums to round: as much, measured, at 512 keys a query.
  const int keys_of_a_query = p.causal ? p.m - (p.n - 1) / 2 : p.m;  // on average
  if (keys_of_a_query < 1024) return false;
  // Blocks of a head that start together end one tile after the other, as each waits for the one before: without a second
  // round that is a third of the time. Causal ones have less to do from block to block.
  const int rounds = p.causal ? 1 : 2;
  return int64_t{p.b} * p.hk * shape.blocks(p) >= int64_t{rounds} * p.sm_count;
}

// Blocks of keys in the order in which they are taken: groups of heads; of these the first block of each, then the second ...
struct KeyBlockOrder {
  int blocks;  // of a head
  int heads;   // of all batch entries
  int heads_per_group;

  // What all blocks of a head go over again, Q, dO and the sums of grad_q, stays in L2, which has 50 MB, in two halves that
  // copy from each other: 4 heads of 4096 tokens, or 8 causal ones, of which a block reads half. Blocks of a head that run side
  // by side wait for each other, the more the fewer heads there are and the shorter these are: a number of bytes makes that the
  // same part of the time for all lengths. (8, 16, 4096, 128) on an H200, ms of the backward by heads at once: causal 4 3.29,
  // 8 2.89, 12 2.84, 16 3.0, 32 2.97, 64 3.17; not causal 4 5.15, 8 5.65, 12 6.05, 16 5.4, 32 5.83, 64 7.98.
  static constexpr int64_t kBytesAtOnce = 16 << 20;

  static KeyBlockOrder of(const Problem& p) {
    constexpr int kMostItems = INT_MAX / 2;  // blocks that find none left count on
    const int blocks = FusedBwdShape::of(p.head_dim).blocks(p);
    const int64_t heads = int64_t{p.b} * p.hk;
    if (blocks * heads > kMostItems) {
      throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(blocks * heads));
    }
    const int64_t bytes_of_head = int64_t{p.h / p.hk} * p.n * p.head_dim * (2 + 2 + 4);
    const int64_t at_once = std::max<int64_t>((p.causal ? 2 : 1) * kBytesAtOnce / bytes_of_head, 1);
    const int64_t groups = (heads + at_once - 1) / at_once;
    return {blocks, static_cast<int>(heads), static_cast<int>((heads + groups - 1) / groups)};
  }
  constexpr __host__ __device__ int items() const { return blocks * heads; }

  constexpr __host__ __device__ WorkItem item(int number) const {
    const int group = number / (heads_per_group * blocks), first_head = group * heads_per_group;
    const int in_group = number - first_head * blocks, heads_left = heads - first_head;
    const int heads_here = heads_per_group < heads_left ? heads_per_group : heads_left;
    return {in_group / heads_here, first_head + in_group % heads_here};
  }
};

// In the workspace, behind what two kernels have there: counters, sums of grad_q, and where queries' weights are not divided by
// their sums (Score::kScalesGradO) grad_o that is, unless two kernels have a copy of it as well.
struct FusedBwdWorkspace {
  size_t counters, sums, grad_o, bytes;

  FusedBwdWorkspace(const Problem& p, size_t before, bool makes_grad_o) {
    const auto align = [](size_t offset) { return (offset + 255) / 256 * 256; };
    const FusedBwdShape shape = FusedBwdShape::of(p.head_dim);
    const size_t heads = static_cast<size_t>(p.b) * p.h;
    counters = align(before);
    sums = align(counters + (1 + heads * shape.counters(p)) * sizeof(uint32_t));
    grad_o = align(sums + static_cast<size_t>(shape.all_parts(p)) * shape.part_floats() * sizeof(float));
    bytes = grad_o + (makes_grad_o && scales_by_columns(p.head_dim) ? heads * p.n * p.dv * 2 : 0);
  }

  // Narrow heads read as little of a query as they can beside its tile: row_score.h.
  static constexpr bool scales_by_columns(int head_dim) { return head_dim <= 64; }
};

// Whether grad_o divided by sums of weights, which is rounded to 16 bits at narrow heads, stays within the range of floats: weights are
// as large as the coefficients of f, times what scores and keys make of them, for which there is room of 10^20 and more.
inline bool sums_divide_grad_o(const Problem& p) {
  const float largest = std::max({std::abs(p.a0), std::abs(p.a1), std::abs(p.a2)});
  return !FusedBwdWorkspace::scales_by_columns(p.head_dim) || (largest > 1e-12f && largest < 1e12f);
}

// Counters that begin at 0: of items that were taken, and for every part of grad_q of tiles_per_counter tiles of blocks that have
// added theirs.
struct PartialGradQ {
  uint32_t* taken;
  uint32_t* added;
  float* sums;          // parts, in the order of a warpgroup's accumulators
  int tiles, counters;  // of a head
};

}  // namespace fastmax
