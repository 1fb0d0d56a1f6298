// An exact window in the output and gradient kernels: weights of the intra-chunk tiles that have local pairs (ReadArgs::window,
// GradArgs::window).
//
// In a forward, sums of a row, those of its denominator included, are relative to 2^reference. Keys before these tiles are global and have
// been summed with a reference of 0. Local keys raise it where their scores are large: no weight overflows. In a backward, weights are
// relative to those sums, which g and e include (PrepareArgs::shift).
#pragma once

#include "core/score.h"
#include "linear/order2/sm90/hopper_walk.h"

namespace fastmax {

// Whether local keys may be anywhere in a tile, or are everywhere.
enum class LocalPairs { kSome, kAll };
template <LocalPairs kPairs>
using OfLocalPairs = std::integral_constant<LocalPairs, kPairs>;

// The rows `row` and row + 8 of a tile of x, with 16 columns of a tile of y: 8 j + 2 t and the next, counted from 2 t.
struct WindowTile {
  int last[2];          // the last column that is not behind the row
  uint32_t seen[2][2];  // bit 8 j + i of 64 for each row, in words of 32: of columns that the row sees

  // rows_between: from the tile's first row to that of x.
  __device__ __forceinline__ WindowTile(int rows_between, int row, int t)
      : last{rows_between + row - 2 * t, rows_between + row + 8 - 2 * t} {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) seen[r][h] = lowest(last[r] + 1 - 32 * h);
    }
  }

  // Hides columns of which a mask of 64 bits, the same in all lanes, has none.
  __device__ __forceinline__ void hide_others(uint32_t low, uint32_t high, int t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) seen[r][0] &= low >> 2 * t, seen[r][1] &= high >> 2 * t;
  }
  // Hides the columns before `first`, counted from the tile's first, from a row.
  __device__ __forceinline__ void hide_before(int r, int first, int t) {
#pragma unroll
    for (int h = 0; h < 2; ++h) seen[r][h] &= ~lowest(first - 2 * t - 32 * h);
  }

  // i: as of accumulators (wgmma.h).
  __device__ __forceinline__ bool is_seen(int j, int i) const { return (seen[i / 2][j / 4] >> (8 * (j % 4) + i % 2) & 1u) != 0; }
  // Of columns that are not behind the row.
  __device__ __forceinline__ bool is_local(int window, int j, int i) const { return 8 * j + i % 2 > last[i / 2] - window; }
  // By a warp: whether its rows see all columns.
  __device__ __forceinline__ bool is_whole() const {
    constexpr uint32_t kColumns = 0x03030303u;
    return __all_sync(0xffffffffu, (seen[0][0] & seen[0][1] & seen[1][0] & seen[1][1] & kColumns) == kColumns);
  }

 private:
  __device__ __forceinline__ static uint32_t lowest(int bits) {
    return bits >= 32 ? ~0u : (1u << max(bits, 0)) - 1u;
  }
};

// log2 of the decays between a lane's rows of x and the columns of a tile of y, 8 j + 2 t and the next; and of the gates of global keys,
// which are rows of x where rows are reversed (kBack), else columns. Without gates (kGated) these are 0.
template <bool kBack, bool kGated>
struct WindowDecay {
  uint32_t y_sums, y_gates;
  WalkSum x[2];
  float x_gates[2] = {0.f, 0.f};
  float4 sums = {};  // of the columns asked for last
  float2 gates = {};

  __device__ __forceinline__ WindowDecay(const SharedDecayTile& x_tile, const SharedDecayTile& y_tile, int row, int t)
      : y_sums(y_tile.address + 16 * t), y_gates(y_tile.address + 8 * t), x{x_tile.sum(row), x_tile.sum(row + 8)} {
    if (kBack && kGated) x_gates[0] = x_tile.gate(row), x_gates[1] = x_tile.gate(row + 8);
  }
  // Both are asked for i from 0 to 3 of each j.
  __device__ __forceinline__ float of(int j, int i) {
    if (i == 0) sums = SharedDecayTile{y_sums}.sums(8 * j);
    return x[i / 2].since({i % 2 == 0 ? make_float2(sums.x, sums.y) : make_float2(sums.z, sums.w)});
  }
  __device__ __forceinline__ float gate(int j, int i) {
    if (kBack || !kGated) return x_gates[i / 2];
    if (i == 0) gates = SharedDecayTile{y_gates}.gates(8 * j);
    return i % 2 == 0 ? gates.x : gates.y;
  }
};
struct NoWindowDecay {
  __device__ __forceinline__ NoWindowDecay(const SharedDecayTile&, const SharedDecayTile&, int, int) {}
  __device__ __forceinline__ static float of(int, int) { return 0.f; }
  __device__ __forceinline__ static float gate(int, int) { return 0.f; }
};

// A row's weights are relative to 2^reference.
struct WindowRows {
  float reference[2];

  // has_global: whether the row's weights so far, of global keys, count. Else it begins anew.
  __device__ __forceinline__ void begin(int r, bool has_global) { reference[r] = has_global ? 0.f : ExactWindowScore::kNoReference; }
  __device__ __forceinline__ bool is_empty(int r) const { return reference[r] < 0.5f * ExactWindowScore::kNoReference; }

  // Converts scores to weights, which are added to this lane's part of the denominators. The row's earlier sums are to be multiplied by
  // `shrink`, the denominators are here.
  template <LocalPairs kPairs, bool kMasked, class Decay>
  __device__ __forceinline__ void weigh(const ReadArgs& a, const WindowTile& tile, Decay& decay, float (&s)[32], float (&sums)[2],
                                        float (&shrink)[2]) {
    constexpr bool kHasDecay = !std::is_same_v<Decay, NoWindowDecay>;
    constexpr bool kAll = kPairs == LocalPairs::kAll;
    const auto is_seen = [&](int j, int i) { return !kMasked || tile.is_seen(j, i); };
    const auto is_local = [&](int j, int i) { return kAll || tile.is_local(a.window, j, i); };
    // y of a pair: its weight is 2^y, of global keys f 2^y. With decays, where all keys are local, s becomes y.
    float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        float y;  // without decays, over local_scale, which is positive
        if constexpr (kHasDecay) {
          const float e = decay.of(j, i);
          float of_global = e;
          if constexpr (!kAll) of_global += decay.gate(j, i);
          y = is_local(j, i) ? fmaf(a.local_scale, x, e) : of_global;
        } else {
          y = is_local(j, i) ? x : 0.f;
        }
        y = is_seen(j, i) ? y : -INFINITY;
        if constexpr (kAll) x = y;
        largest[i / 2] = fmaxf(largest[i / 2], y);
      }
    }
    raise(kHasDecay ? 1.f : a.local_scale, largest, sums, shrink);
    PolynomialScore::DecayedRow global[2];  // f, without decays relative to the reference
    if constexpr (!kAll) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = kHasDecay ? 1.f : ptx::exp2_approx(-reference[r]);
        global[r] = {a.c0 * scale, a.c1 * scale, a.c2 * scale};
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = s[4 * j + i];
        const int r = i / 2;
        if constexpr (kAll) {
          x = ptx::exp2_approx(kHasDecay ? x - reference[r] : fmaf(a.local_scale, x, -reference[r]));
        } else {
          const bool local = is_local(j, i);
          const float f = global[r].at(x, 1.f);
          float weight;
          if constexpr (kHasDecay) {
            const float e = decay.of(j, i) - reference[r], of_global = e + decay.gate(j, i);
            weight = (local ? 1.f : f) * ptx::exp2_approx(local ? fmaf(a.local_scale, x, e) : of_global);
          } else {
            weight = local ? ptx::exp2_approx(fmaf(a.local_scale, x, -reference[r])) : f;
          }
          x = is_seen(j, i) ? weight : 0.f;
        }
        sums[r] += x;
      }
    }
  }

 private:
  // Raises references that y exceeds by more than a little, which is rare once a row has some weight.
  __device__ __forceinline__ void raise(float scale, const float (&largest)[2], float (&sums)[2], float (&shrink)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float y = scale * quad_max(largest[r]), raised = y > reference[r] + SoftmaxScore::kSlack ? y : reference[r];
      shrink[r] = ptx::exp2_approx(reference[r] - raised);
      reference[r] = raised;
      sums[r] *= shrink[r];
    }
  }
};

// ---- gradients

// Which of the 64 rows of y from `y_row` on are there and attended, in words of 32. By a warp.
template <class Args>
__device__ __forceinline__ void attended_rows(const Args& a, int batch, int y_row, uint32_t (&rows)[2]) {
  const uint8_t* mask = mask_pointer(a.y_mask, batch);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = y_row + 32 * h + lane_index();
    const bool is_there = row >= 0 && row < a.ny;
    rows[h] = __ballot_sync(0xffffffffu, is_there && (mask == nullptr || mask[static_cast<int64_t>(row) * a.y_mask.token] != 0));
  }
}
// The same from a tile of their decays, in the order of tokens.
template <class Tile>
__device__ __forceinline__ void attended_rows(const Tile& decays, uint32_t (&rows)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) rows[h] = __ballot_sync(0xffffffffu, decays.is_taken(32 * h + lane_index()));
}

// How far a lane's rows `row` and row + 8 of a tile of x are behind the columns 8 j + 2 t + i of a tile of y, of which some are hidden.
// Reversed rows (kBack) lie in memory in the order of tokens: later rows come first.
template <bool kBack>
struct WindowDistances {
  int nearest[2], furthest[2];  // columns, counted from 2 t, at a distance of 0 and of the last local row
  uint32_t columns[2];          // that are not hidden: bit 8 j + i of 64, in words of 32

  // rows_between: from the tile of y to that of x. attended: of the tile of y.
  __device__ __forceinline__ WindowDistances(int rows_between, int window, int row, int t, const uint32_t (&attended)[2])
      : columns{attended[0] >> 2 * t, attended[1] >> 2 * t} {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      nearest[r] = (kBack ? row + 8 * r - rows_between : row + 8 * r + rows_between) - 2 * t;
      furthest[r] = nearest[r] + (kBack ? window - 1 : 1 - window);
    }
  }

  __device__ __forceinline__ bool is_seen(int j, int r, int i) const {
    return (kBack ? 8 * j + i >= nearest[r] : 8 * j + i <= nearest[r]) && (kBack || (columns[j / 4] >> (8 * (j % 4) + i) & 1u) != 0);
  }
  __device__ __forceinline__ bool is_local(int j, int r, int i) const {
    return kBack ? 8 * j + i <= furthest[r] : 8 * j + i >= furthest[r];
  }
  __device__ __forceinline__ bool is_own_token(int j, int r, int i) const { return 8 * j + i == nearest[r]; }
};

// What a pair adds to a gradient, to grad_v and to the sums of pairs.
struct WindowPair {
  float slope, weight, flow;

  // centred: x2.y2 + e. exponent: log2 of the decay. gate: that of the global key's. shift: of the query.
  __device__ __forceinline__ static WindowPair local(const GradArgs& a, float score, float centred, float exponent, float shift) {
    const float weight = ptx::exp2_approx(fmaf(a.local_scale, score, exponent - shift)), flow = weight * centred;
    return {a.local_slope * flow, weight, flow};
  }
  __device__ __forceinline__ static WindowPair any(const GradArgs& a, bool is_local, float score, float centred, float exponent,
                                                   float gate, float shift) {
    const float power = ptx::exp2_approx(is_local ? fmaf(a.local_scale, score, exponent - shift) : exponent + gate);
    const float slope = is_local ? a.local_slope : fmaf(score, a.g1, a.g0);
    const float f = is_local ? 1.f : fmaf(score, fmaf(score, 0.5f * a.g1, a.g0), a.c0);
    centred *= power;
    return {slope * centred, f * power, f * centred};
  }
};

}  // namespace fastmax
