// How a walk fades: what is left of a row y when a later row x looks at it, 2^-|G_x - G_y|.
//
// A state before a chunk holds its rows as they are left at the chunk's beginning. A row of y joins it with what is left of it at the end
// of its own chunk (rows before the first chunk: at that one's beginning), the state fades from chunk to chunk, and a row of x fades
// what it reads from the beginning of its chunk on. No factor is above 1, so that nothing overflows.
//
//   x rows          chunk 0        chunk 1        chunk 2
//   edges          0              1              2              3
//   row y in chunk 0     |- y's -->|-- carry(1) ->|-- x's -->|     row x in chunk 2
//
// Rows of x and y are tokens of one sequence: row r of y belongs to token r of the keys, or in a walk back in time to the r-th last.
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

// How 64 virtual rows fade, for kernels that take rows by tiles, in the order of tokens. A row of x has that of the last row of y that
// it sees.
inline constexpr int kDecayTile = 64;
struct DecayTile {
  float2 sums[kDecayTile];        // G as WalkSum has it
  float until_end[kDecayTile];    // what is left of a row of y at the tile's last row in the walk; -0 where it takes no part
  float since_chunk[kDecayTile];  // what is left of the state before the chunk, for a row of x
};

struct Decay {
  const float2* sums;  // G, [state][token of the keys] (decay/decay.h); null: nothing fades
  int tokens;
  int origin;            // virtual row where chunk 0 of the whole sequence begins
  const float* carries;  // [state][chunk], of linear_carry
  int chunks;            // of the whole sequence
  int first_chunk;       // of the phase

  const DecayTile* tiles;  // [state][tile_count], of all virtual rows (linear_decay_tiles); null: not wanted
  int tile_count;
  bool bounds_alone;  // there are no decays: of a row everything is left or nothing

  __host__ __device__ explicit operator bool() const { return sums != nullptr; }

#ifdef __CUDACC__
  // Of the token of a row of y; rows outside of the sequence are as the nearest.
  __device__ __forceinline__ const float2* address(const Sequence& s, int64_t state, int y_row) const {
    const int token = s.time == Time::kForward ? y_row : tokens - 1 - y_row;
    return sums + state * tokens + min(max(token, 0), tokens - 1);
  }
  __device__ __forceinline__ float2 at_row(const Sequence& s, int64_t state, int y_row) const { return __ldg(address(s, state, y_row)); }
  // Between two rows, the later one in the walk first; <= 0.
  __device__ __forceinline__ static float between(const Sequence& s, const float2& x, const float2& y) {
    return s.time == Time::kForward ? fastmax::decay(x, y) : fastmax::decay(y, x);
  }

  // Where the state refers to once all rows before a virtual row are in it, and the edge at which a chunk of the whole sequence begins.
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

  // G between the tokens on both sides of an edge: that of the earlier one in time.
  template <class Chunks>
  __device__ __forceinline__ float2 at_edge(const Chunks& s, int64_t state, int edge) const {
    const int rows = min(max(s.y_row(origin + edge * s.chunk), 0), tokens);  // before the edge
    const int token = (s.time == Time::kForward ? rows : tokens - rows) - 1;
    return token < 0 ? make_float2(0.f, 0.f) : __ldg(sums + state * tokens + token);
  }

  // log2 of what is left of a state when it has come from one edge to a later one.
  template <class Chunks>
  __device__ __forceinline__ float passing(const Chunks& s, int64_t state, int from, int to) const {
    return between(s, at_edge(s, state, to), at_edge(s, state, from));
  }
#endif
};

#ifdef __CUDACC__
// G of a row in the order of the walk: what is between two rows is the difference, whichever way the walk goes.
struct WalkSum {
  float2 g;
  __device__ __forceinline__ static WalkSum of(const Sequence& s, float2 g) {
    const float sign = s.time == Time::kForward ? 1.f : -1.f;
    return {make_float2(sign * g.x, sign * g.y)};
  }
  // log2 of the factor from a row on to a later one, <= 0.
  __device__ __forceinline__ float since(const WalkSum& row) const { return fastmax::decay(g, row.g); }
};

// The rows of x of a lane, and slabs of rows of y that they look at, as they fade. Called by whole warps.
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
    for (int i = 0; i < kCount; ++i) x[i] = in_walk(p.decay.at_row(p, state, p.y_row(p.seen_end(row + 8 * i))));
  }
  // A row of a slab per lane, from shared memory.
  template <int kRows>
  __device__ __forceinline__ WalkSum slab(uint32_t address) const {
    return in_walk(ptx::load_shared_f32x2(address + static_cast<int>(threadIdx.x % kRows) * 8));
  }

  // Of what the rows row + 8 i read from the state before their chunk, the phase's `chunk`.
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

// Whether nothing is left of a slab of kRows rows before the rows of x, of which `x` are this lane's.
template <int kRows>
__device__ __forceinline__ bool is_fully_decayed(const WalkSum& slab, const WalkSum& x) {
  constexpr float kZero = -150.f;  // 2^that is 0
  return __shfl_sync(0xffffffffu, from_lane(x, 0).since(slab), kRows - 1) < kZero;
}

// Calls f(may_be_zero, m, half, n, e, factor) for what an accumulator of rows row + 16 m + 8 half holds of row 8 n + 2 t + e of a slab of
// y. before: the slab is before all rows of x; the factor is then one of a row and one of a column. Else the factor of pairs that see
// nothing of each other is 1. Where may_be_zero (a std::bool_constant) is false, sequences that begin anew are not between any of them.
template <int kBlocks8, int kRows8, class F>
__device__ __forceinline__ void for_each_pair(const WalkSum (&x)[kRows8], const WalkSum& slab, bool before, const F& f) {
  const int lane_column = 2 * static_cast<int>(threadIdx.x % 4);
  const auto column_lane = [&](int i) { return lane_column + i / 2 * 8 + i % 2; };
  if (before) {
    const WalkSum last = from_lane(slab, 8 * kBlocks8 - 1);
    const float column = ptx::exp2_approx(last.since(slab));
    float rows[kRows8];
    bool some_zero = column == 0.f;
#pragma unroll
    for (int j = 0; j < kRows8; ++j) {
      rows[j] = ptx::exp2_approx(x[j].since(last));
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
      for (int j = 0; j < kRows8; ++j) f(std::true_type{}, j / 2, j % 2, i / 2, i % 2, ptx::exp2_approx(fminf(x[j].since(y), 0.f)));
    }
  }
}

// Nothing is left where the factor is 0, of what is no number either.
__device__ __forceinline__ float decayed(float x, float factor) { return factor == 0.f ? 0.f : x * factor; }

// x times 2^exponent. Where the factor is near 1, what it lacks is taken from x: a factor that is the same for thousands of chunks would
// leave its rounding in all of them. Nothing is left of anything where it is 0, as of what is no number.
struct DecayFactor {
  float code;  // <= 0: what a factor near 1 lacks; in (0, 1): the factor; kNothing: 0
  static constexpr float kNothing = 2.f;

  __device__ __forceinline__ static DecayFactor of(float exponent) {
    const float far = exp2f(exponent);
    return {exponent > -0.5f ? expm1f(exponent * 0.6931471805599453f) : far == 0.f ? kNothing : far};
  }
  __device__ __forceinline__ float operator()(float x) const {
    return code <= 0.f ? fmaf(x, code, x) : code == kNothing ? 0.f : x * code;
  }
  // Rounded: for sums that are rounded to 16 bits at every chunk, which is more.
  __device__ __forceinline__ float factor() const { return code <= 0.f ? 1.f + code : code == kNothing ? 0.f : code; }
  // Calls for_each(f), which calls f for every one of many sums, with what fades a sum in place: inline, so that branches leave the sums
  // in the registers where they are.
  template <class ForEach>
  __device__ __forceinline__ void apply(const ForEach& for_each) const {
    if (code <= 0.f) for_each([this](float& x) { asm volatile("fma.rn.f32 %0, %0, %1, %0;" : "+f"(x) : "f"(code)); });
    else if (code < 1.f) for_each([this](float& x) { asm volatile("mul.f32 %0, %0, %1;" : "+f"(x) : "f"(code)); });
    else for_each([](float& x) { asm volatile("mov.f32 %0, 0f00000000;" : "+f"(x)); });
  }
};
#endif

}  // namespace fastmax
