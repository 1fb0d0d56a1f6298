// The linear algorithm's passes: what they read and write, and where a state lives in memory.
//
// Every pass works on "x" rows that look at the "y" rows before them:
//   forward   x = q, y = k, values w = v          o    = sum f(x.y) w / z
//   grad_q    x = q (with g), y = k (with v)      grad = sum scale f'(x.y) (g.v + e) y
//   grad_v    x = k, y = q, values w = g          as the forward, on reversed rows
//   grad_k    x = k (with v), y = q (with g)      as grad_q, on reversed rows
// Reversed rows: a walk back in time (core/sequence.h, which also says what a boundary and virtual rows are).
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "core/params.h"
#include "core/sequence.h"
#include "linear/algorithm.h"
#include "linear/decay.h"

namespace fastmax {

// A (batch, head, token, column) tensor in elements.
struct View {
  const void* data;
  int64_t batch, head, token;
};

// Per-token numbers of a batch entry or of a head.
struct RowMask {
  const uint8_t* data;  // null: every row takes part
  int64_t batch;
  int token;
};
struct RowScale {
  const float* data;  // null: all ones
  int64_t head;       // of (batch, head) flattened
  int token;
};

// How many rows of a batch entry take part, up to each one and with it. In the order of tokens.
struct RowCounts {
  const int32_t* data;  // null: every row takes part
  int64_t batch;
};

struct RowOutput {
  float* data;  // null: not wanted
  int64_t head;
  int token;
};

// Rows of a y head that take part in a state, in a walk that fades.
struct AttendedRows {
  const uint8_t* data;   // null: the mask says it, or zeros in the rows' place
  int64_t head;
  int token;
  const uint8_t* whole;  // [y head][groups]: DecayArgs
  int groups;
};

struct LinearProblem : ChunkedSequence {
  Decay decay;
  int batch;
  int state_heads;  // states per batch entry: key/value heads
  int x_group;      // x heads per state
  int y_group;      // y heads summed into one state
  int d, dv;        // columns in memory of x/y and of the values
  int part;         // order 1: y rows that are summed on their own; chunk where there are several chunks
  int order;
  int sm_arch;

  __host__ __device__ int states() const { return batch * state_heads; }
  // Virtual rows of y in groups of kBoundary; and where the token of y row 0 lies among them, where they lie in the order of tokens.
  int groups() const { return (std::max(y_end(), end()) + kBoundary - 1) / kBoundary; }
  int first_token_at() const { return time == Time::kForward ? pad : groups() * kBoundary - ny - pad; }
  // The same groups of all rows, those of x too, which blocks of kernels take by up to 256.
  int groups_of_all() const { return std::max(groups(), (boundary + round_up(nx, 256)) / kBoundary); }
  // Order 1: lead parts before the boundary, then one per chunk but the last.
  __host__ __device__ int lead_parts() const { return (boundary + part - 1) / part; }
  __host__ __device__ int parts() const { return lead_parts() + chunks - 1; }
  __host__ __device__ int part_begin(int i) const { return boundary + (i - lead_parts()) * part; }
};

// Weights that the snapshots carry: pairs (twice that off the diagonal), first order, second moment of y.
struct StateWeights {
  float pair, linear, moment;
};

// Order 2 walks y from virtual row `begin` to the last boundary. Where one walk per state would leave multiprocessors idle, it is cut
// into segments that run side by side: one launch walks the first, and writes its snapshots, while it sums the rows of all others but
// the last; a scan makes of the sums what each segment starts from; a second launch walks all but the first.
struct StateArgs : LinearProblem {
  View y, w;
  View zeroed_y, zeroed_w;  // DecayTilesArgs, for groups of rows that `kept` says are not whole; else without data
  RowMask mask;
  AttendedRows attended;
  RowScale y_scale;    // e of the y rows, in the moments sum e y y^T, sum e y, sum e
  RowScale y_factors;  // DecayTilesArgs; else without data
  StateWeights weights;
  void* snapshots;   // [state][chunk][StateLayout::kWords]
  float* sums;       // [state][chunk][StateLayout::kSums]
  int begin;         // not 0: goes on from the accumulators of an earlier walk
  int segments;
  int segment_rows;  // of every segment but the last, which may have none
  // [slot][state][block][state_accumulators()][thread]: slot 0 is what walks hand on, slot 1 + i is of segment i. Null: one segment,
  // nothing handed on. Order 1: [state][part_floats()], a carried state.
  float* accumulators;
  bool hands_on;     // the last segment's accumulators, to a later walk
  float* parts_sum;  // order 1: [state][part][part_floats()]
};

// The same for order 1, from parts of y that are each summed on its own.
struct PartStateArgs : StateArgs {};

// o = sum f(x.y) w (/ z)
struct ReadArgs : LinearProblem {
  View x, y, w;
  RowMask y_mask, x_mask;  // masked x rows are written as zeros
  RowCounts y_counts;      // of y_mask, where masked rows of y are zeros already (StatePasses::takes_zeros)
  const void* snapshots;
  const void* added;       // [state], a snapshot each that is added to all of its state; null: nothing is
  const float* sums;
  float c0, c1, c2;        // f = c0 + x.y (c1 + c2 x.y)
  View out;
  bool half_out;           // out (and noise) are fp16 while the inputs were widened to fp32
  float* z;                // null: no division; else [batch][x head][z_head]
  int64_t z_head;
  bool adds;               // to what is in out; where there is no division
  RowOutput local_lse;      // FwdParams
  KeyBounds k_start;     // in a walk that fades: a query whose first key comes after its own token sees nothing
  View noise;
  float dropout;
};

// grad = sum (g0 + g1 x.y) (x2.y2 + e) y
struct GradArgs : LinearProblem {
  View x, x2, y, y2;
  RowMask y_mask, x_mask;
  RowScale x_scale, y_scale;  // e, of the x rows or of the y rows: exactly one has data
  const void* snapshots;
  const void* added;       // as in ReadArgs
  const float* sums;
  float g0, g1;
  View out;
  bool half_out;
  bool adds;               // to what is in out
  float c0;                // f = c0 + x.y (g0 + g1 / 2 x.y)
  RowOutput pair_sums;     // sum f(x.y) (x2.y2 + e) but of a row with its own token; in a walk that fades
};

// w and e (null: ones) of every row as a state takes them, times what is left of the row at the end of its chunk; which rows there
// are; and what is left of states. Rows of which nothing is left, or which are masked, are dropped.
struct DecayArgs : LinearProblem {
  View y, w;
  RowMask mask;
  RowScale e;
  void* decayed_w;   // [batch][y head][ny][dv], but of dropped rows
  float* decayed_e;  // [batch][y head], heads e_head apart, of every virtual row at the token of its y row; 0 where there is no row
  int64_t e_head;
  uint8_t* attended;  // [batch][y head][ny]
  uint8_t* whole;  // [batch][y head][groups], of kBoundary virtual rows: whether none of them is dropped
  float* carries;  // [state][chunk]: what is left at a chunk's end of the state before it (DecayFactor)
};

// The same for kernels that fade rows themselves and take them by tiles, which they cannot leave out of a tile.
struct DecayTilesArgs : LinearProblem {
  View y, w;
  RowMask mask;
  RowScale e;
  DecayTile* tiles;  // Decay
  // What states take; null: only the tiles are wanted.
  float* factors;   // [state], e_head apart: what is left of every virtual row of y at its chunk's end; 0 where there is no row
  float* decayed_e;   // [batch][y head], likewise, times e; may be `factors` where there is no e
  int64_t e_head;
  void *zeroed_y, *zeroed_w;  // [batch][y head][ny][d or dv], of groups that are not whole: with zeros in the place of dropped rows
  uint8_t* whole;  // [batch][y head][groups]
  float* carries;  // [state][chunk]
};

// A number for each kind of row of a state: 1, k_a, k_a k_a, and k_a k_b of different columns.
struct StateFactors {
  float one, first, square, product;
};

// Rows of y that the walk over them did not count: all of a batch entry, or those of which there are counts.
struct UncountedRows {
  int rows;
  RowCounts counts;

  __host__ __device__ int of(int batch) const {
    return rows == 0 || counts.data == nullptr ? rows : counts.data[batch * counts.batch + rows - 1];
  }
};

// A carried state and slot 0 of StateArgs::accumulators, which holds the same sums: what is loaded, or stored, is multiplied.
struct CarriedArgs {
  CarriedState state;
  int states, state_heads;
  float* accumulators;
  StateFactors factors;
  UncountedRows uncounted;  // join the sum of ones when it is stored
};

// Snapshots, and sums, of a walk that began with nothing, which take in what was before its first row.
struct AddArgs : LinearProblem {
  const void* state;  // [state], a snapshot each; null: the sums alone take it in
  const float* state_sums;
  void* snapshots;    // [state][chunk]
  float* sums;
  int64_t snapshot_bytes;
  int64_t sum_floats;
};

// g = grad_o (1 + dropout noise) / z, e = -(grad_o . o) / z + grad_z; both 0 where z is
struct PrepareArgs {
  int batch, heads, n, dv;
  View grad_o, o, noise;
  float dropout;
  const float* z;
  const float* grad_z;  // [batch][head][n], or null
  void* g;              // [batch][head][n][dv]
  float* e;             // [batch][head], heads e_head apart
  int64_t e_head;
};

// Rows of k and v with zeros in the place of those that take no part, and how many do.
struct ZeroArgs {
  int batch, heads, tokens, d, dv;
  View k, v;
  RowMask mask;
  void *zeroed_k, *zeroed_v;  // [batch][head][token][d or dv]
  int32_t* counts;            // [batch][token]
};

// One pass; its arguments, from here or from order1/linear1.h, say which.
template <class Math, class Args>
void linear_pass(const Args& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_prepare(const PrepareArgs& a, cudaStream_t stream);
template <class Math>
void linear_decay(const DecayArgs& a, cudaStream_t stream);
// bf16
void linear_zero_masked(const ZeroArgs& a, cudaStream_t stream);
void linear_decay_tiles(const DecayTilesArgs& a, cudaStream_t stream);
// Carried state -> accumulators, and accumulators -> new carried state
template <class Math>
void linear_load_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_store_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
// The same for order 1.
void linear_load_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
void linear_store_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_add_state(const AddArgs& a, cudaStream_t stream);
// (batch, head, token, column) -> contiguous fp32
template <class Math>
void linear_widen(const View& src, float* dst, int batch, int heads, int tokens, int columns, cudaStream_t stream);

}  // namespace fastmax
