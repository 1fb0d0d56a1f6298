// Decays of the linear algorithm: a row y weighs 2^-|G_x - G_y| for a later row x, times the input gate of the one that is a key.
//
// A state before a chunk holds its rows with their decay until the chunk's beginning. A row of y is added with its decay until the end of
// its chunk (rows before the first chunk: until that one's beginning). The state decays from chunk to chunk. A row of x multiplies what it
// reads by the decay since its chunk's beginning. No factor is above 1, but for those of keys, which have their gates: at most
// 2^kLargestGate. So nothing overflows.
//
//   x rows          chunk 0        chunk 1        chunk 2
//   edges          0              1              2              3
//   row y in chunk 0     |- y's -->|-- carry(1) ->|-- x's -->|     row x in chunk 2
//
// Rows of x and y are tokens of one sequence: row r of y belongs to token r of the keys, in reversed order to the r-th last. With a lag
// (Problem::lag), queries have the G of a later token: they are the rows of x, in reversed order those of y. Edges have that of keys,
// without their gates.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "core/sequence.h"
#include "decay/decay.h"
#ifdef __CUDACC__
#include "core/ptx.h"
#endif

namespace fastmax {

// Decays of 64 virtual rows in the order of tokens, for kernels that copy rows by tiles. A row of x has the values of the last row of y
// that it sees.
inline constexpr int kDecayTile = 64;
struct DecayTile {
  float2 sums[kDecayTile];        // G as WalkSum has it, without gates, of rows of y; in tiles for x (Decay::x_tiles) of rows of x
  float until_end[kDecayTile];    // decay of a row of y until the tile's last row, with its gate; -0 where it is masked
  float since_chunk[kDecayTile];  // decay of the state from the chunk's beginning to a row of x, with its gate
  float gates[kDecayTile];        // log2 of the gates of the rows that are keys; without gates neither written nor read
};

// Sums by token (decay/decay.h), [state][token].
struct TokenSums {
  const float2* data;
  int stride;  // from state to state
};

struct Decay {
  TokenSums sums;  // G, of tokens of the keys; null: no decays
  // Of rows of x and of y: of queries G with their lag, of keys K, which is G less their gates; and both without gates.
  TokenSums x, y, ungated_x, ungated_y;
  int tokens;            // of the keys
  float largest;         // log2 of the largest gate; 0: there are none
  float nothing;         // where log2 of the factor of one pair is below it, those of all pairs that decay as much are 0
  bool y_is_gated;       // the rows of y are keys with gates
  bool own_pairs_count;  // AttentionParams
  int origin;            // virtual row where chunk 0 of the whole sequence begins
  const float* carries;  // [state][chunk]: decay of the state over a chunk (DecayFactor)
  int chunks;            // of the whole sequence
  int first_chunk;       // of the phase

  const DecayTile* tiles;  // [state][tile_count], of all virtual rows (linear_decay_tiles); null: not wanted
  const DecayTile* x_tiles;  // the same for rows of x; `tiles` without a lag
  int tile_count;
  int tile_bytes;   // of a tile, that are written and read
  bool bounds_alone;  // only bounds of packed sequences: every decay is 1 or 0

  __host__ __device__ explicit operator bool() const { return sums.data != nullptr; }
  __host__ __device__ bool is_gated() const { return largest > 0.f; }

#ifdef __CUDACC__
  // The address of the sums of a row of y; rows outside of the sequence have that of the nearest row.
  __device__ __forceinline__ const float2* address(const Sequence& s, int64_t state, int y_row) const {
    return address(s, y, state, y_row);
  }
  __device__ __forceinline__ float2 at_row(const Sequence& s, int64_t state, int y_row) const { return __ldg(address(s, state, y_row)); }
  // The same for a row of x; y_row: the last row of y that it sees.
  __device__ __forceinline__ float2 at_x_row(const Sequence& s, int64_t state, int y_row) const {
    return __ldg(address(s, x, state, y_row));
  }
  // Both without gates.
  __device__ __forceinline__ float2 ungated_at_row(const Sequence& s, int64_t state, int y_row) const {
    return __ldg(address(s, ungated_y, state, y_row));
  }
  __device__ __forceinline__ float2 ungated_at_x_row(const Sequence& s, int64_t state, int y_row) const {
    return __ldg(address(s, ungated_x, state, y_row));
  }
  // log2 of the decay between two rows, the later one first; without gates <= 0.
  __device__ __forceinline__ static float between(const Sequence& s, const float2& x, const float2& y) {
    return s.time == Time::kForward ? fastmax::decay(x, y) : fastmax::decay(y, x);
  }

  // The edge until which rows of a state have decayed once all rows before a virtual row are in it; and the edge at a chunk's beginning.
  template <class Chunks>
  __device__ __forceinline__ int edge_after(const Chunks& s, int virtual_row) const {
    return virtual_row <= origin ? 0 : (virtual_row - 1 - origin) / s.chunk + 1;
  }
  template <class Chunks>
  __device__ __forceinline__ int edge_at(const Chunks& s, int virtual_row) const {
    return (virtual_row - origin) / s.chunk;
  }

  template <class Chunks>
  __device__ __forceinline__ bool begins_chunk(const Chunks& s, int virtual_row) const {
    return virtual_row >= origin && (virtual_row - origin) % s.chunk == 0;
  }

  // G at an edge: that of the earlier of the two tokens beside it.
  template <class Chunks>
  __device__ __forceinline__ float2 at_edge(const Chunks& s, int64_t state, int edge) const {
    const int rows = min(max(s.y_row(origin + edge * s.chunk), 0), tokens);  // before the edge
    const int token = (s.time == Time::kForward ? rows : tokens - rows) - 1;
    return token < 0 ? make_float2(0.f, 0.f) : __ldg(sums.data + state * sums.stride + token);
  }

  // log2 of the decay of a state from one edge to a later one.
  template <class Chunks>
  __device__ __forceinline__ float passing(const Chunks& s, int64_t state, int from, int to) const {
    return between(s, at_edge(s, state, to), at_edge(s, state, from));
  }

 private:
  __device__ __forceinline__ const float2* address(const Sequence& s, const TokenSums& of, int64_t state, int y_row) const {
    const int token = s.time == Time::kForward ? y_row : tokens - 1 - y_row;
    return of.data + state * of.stride + min(max(token, 0), tokens - 1);
  }
#endif
};

#ifdef __CUDACC__
// G with the sign of the direction of time: the decay between two rows is a difference, whether rows are reversed or not.
struct WalkSum {
  float2 g;
  __device__ __forceinline__ static WalkSum of(const Sequence& s, float2 g) {
    const float sign = s.time == Time::kForward ? 1.f : -1.f;
    return {make_float2(sign * g.x, sign * g.y)};
  }
  // log2 of the decay since an earlier row; without gates <= 0.
  __device__ __forceinline__ float since(const WalkSum& row) const { return fastmax::decay(g, row.g); }
};

// Decays of a lane's rows of x, and of slabs of rows of y that they see. Called by whole warps.
template <class Problem>
struct DecayRows {
  const Problem& p;
  int64_t state;
  int row;  // of x, this lane's first

  __device__ __forceinline__ WalkSum in_walk(float2 g) const { return WalkSum::of(p, g); }
  // Rows row + 8 i.
  template <int kCount>
  __device__ __forceinline__ void load(WalkSum (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = in_walk(p.decay.at_x_row(p, state, p.y_row(p.seen_end(row + 8 * i))));
  }
  // A row of a slab per lane, from shared memory.
  template <int kRows>
  __device__ __forceinline__ WalkSum slab(uint32_t address) const {
    return in_walk(ptx::load_shared_f32x2(address + static_cast<int>(threadIdx.x % kRows) * 8));
  }

  // Decays from the beginning of the phase's `chunk` to the rows row + 8 i of it.
  template <int kCount>
  __device__ __forceinline__ void since_chunk(float (&factors)[kCount], int chunk) const {
    const WalkSum edge = in_walk(p.decay.at_edge(p, state, p.decay.first_chunk + chunk));
    WalkSum x[kCount];
    load(x);
#pragma unroll
    for (int i = 0; i < kCount; ++i) factors[i] = exp2f(x[i].since(edge));
  }
};

__device__ __forceinline__ WalkSum from_lane(const WalkSum& x, int lane) {
  return {make_float2(__shfl_sync(0xffffffffu, x.g.x, lane), __shfl_sync(0xffffffffu, x.g.y, lane))};
}

// Whether a slab of kRows rows is fully decayed for the rows of x behind it, of which `x` are this lane's.
template <int kRows>
__device__ __forceinline__ bool is_fully_decayed(const Decay& decay, const WalkSum& slab, const WalkSum& x) {
  return __shfl_sync(0xffffffffu, from_lane(x, 0).since(slab), kRows - 1) < decay.nothing;
}

// Calls f(may_be_zero, m, half, n, e, factor) for each element of an accumulator: row row + 16 m + 8 half of x, row 8 n + 2 t + e of a slab
// of y, and the decay between them. before: the slab is before all rows of x; the decay is then a product of a factor per row and one per
// column, with the last row of y between them, or where rows of y have gates the first row of x: factors of rows without gates are then
// at most 1. Else pairs that do not see each other have a factor within the range of others. Where may_be_zero (a std::bool_constant) is
// false, no factor is 0.
template <int kBlocks8, int kRows8, class F>
__device__ __forceinline__ void for_each_pair(const Decay& decay, const WalkSum (&x)[kRows8], const WalkSum& slab, bool before,
                                              const F& f) {
  const int lane_column = 2 * static_cast<int>(threadIdx.x % 4);
  const auto column_lane = [&](int i) { return lane_column + i / 2 * 8 + i % 2; };
  if (before) {
    const bool is_x = decay.y_is_gated;
    const WalkSum of_lane{make_float2(is_x ? x[0].g.x : slab.g.x, is_x ? x[0].g.y : slab.g.y)};
    const WalkSum between = from_lane(of_lane, is_x ? 0 : 8 * kBlocks8 - 1);
    const float column = ptx::exp2_approx(between.since(slab));
    float rows[kRows8];
    bool some_zero = column == 0.f;
#pragma unroll
    for (int j = 0; j < kRows8; ++j) {
      rows[j] = ptx::exp2_approx(x[j].since(between));
      some_zero = some_zero || rows[j] == 0.f;
    }
    const auto visit = [&](auto may_be_zero) {
#pragma unroll
      for (int i = 0; i < 2 * kBlocks8; ++i) {
        const float y = __shfl_sync(0xffffffffu, column, column_lane(i));
#pragma unroll
        for (int j = 0; j < kRows8; ++j) f(may_be_zero, j / 2, j % 2, i / 2, i % 2, rows[j] * y);
      }
    };
    if (__any_sync(0xffffffffu, some_zero)) visit(std::true_type{});
    else visit(std::false_type{});
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kBlocks8; ++i) {
      const WalkSum y = from_lane(slab, column_lane(i));
#pragma unroll
      for (int j = 0; j < kRows8; ++j) {
        f(std::true_type{}, j / 2, j % 2, i / 2, i % 2, ptx::exp2_approx(fminf(x[j].since(y), decay.largest)));
      }
    }
  }
}

// x times a decay; 0 where the decay is 0, even of NaN and infinities.
__device__ __forceinline__ float decayed(float x, float factor) { return factor == 0.f ? 0.f : x * factor; }

// Multiplies by 2^exponent. A factor near 1 is stored as its difference from 1 and applied as x + x * difference: the rounding error of a
// factor that is the same for thousands of chunks would add up. A factor of 0 gives 0, even of NaN and infinities.
struct DecayFactor {
  float code;  // <= 0: a factor near 1, minus 1; in (0, 1): the factor; kNothing: 0
  static constexpr float kNothing = 2.f;

  __device__ __forceinline__ static DecayFactor of(float exponent) {
    const float far = exp2f(exponent);
    return {exponent > -0.5f ? expm1f(exponent * 0.6931471805599453f) : far == 0.f ? kNothing : far};
  }
  __device__ __forceinline__ float operator()(float x) const {
    return code <= 0.f ? fmaf(x, code, x) : code == kNothing ? 0.f : x * code;
  }
  // The factor, rounded: for sums that are rounded to 16 bits at every chunk, a larger error.
  __device__ __forceinline__ float factor() const { return code <= 0.f ? 1.f + code : code == kNothing ? 0.f : code; }
  // Decays many sums in place: for_each(f) calls f for each. Inline assembly, so that branches leave the sums in their registers.
  template <class ForEach>
  __device__ __forceinline__ void apply(const ForEach& for_each) const {
    if (code <= 0.f) for_each([this](float& x) { asm volatile("fma.rn.f32 %0, %0, %1, %0;" : "+f"(x) : "f"(code)); });
    else if (code < 1.f) for_each([this](float& x) { asm volatile("mul.f32 %0, %0, %1;" : "+f"(x) : "f"(code)); });
    else for_each([](float& x) { asm volatile("mov.f32 %0, 0f00000000;" : "+f"(x)); });
  }
};
#endif

}  // namespace fastmax
