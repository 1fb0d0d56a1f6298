// Arguments of the linear algorithm's passes. In each pass every row of x sees the rows of y before it:
//   forward   x = q, y = k, values w = v          o    = sum f(x.y) w / z
//   grad_q    x = q (with g), y = k (with v)      grad = sum scale f'(x.y) (g.v + e) y
//   grad_v    x = k, y = q, values w = g          as the forward, on reversed rows
//   grad_k    x = k (with v), y = q (with g)      as grad_q, on reversed rows
//
// x is cut into chunks. State passes (StateArgs) add rows of y to a state and store a snapshot of it before every chunk. Output passes
// (ReadArgs, GradArgs) give each row of x an inter-chunk part, from the snapshot before its chunk, and an intra-chunk part, from the
// rows of y in its chunk. core/sequence.h defines reversed rows, virtual rows and the boundary.
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

// A byte per row of a batch entry: nonzero where the row is attended.
struct RowMask {
  const uint8_t* data;  // null: every row is
  int64_t batch;
  int token;
};
// A factor per row of a head.
struct RowScale {
  const float* data;  // null: all ones
  int64_t head;       // of (batch, head) flattened
  int token;
};

// Per row of a batch entry, in the order of tokens: how many rows up to and with it are attended.
struct RowCounts {
  const int32_t* data;  // null: all rows are
  int64_t batch;
};

// A result per row of a head.
struct RowOutput {
  float* data;  // null: not wanted
  int64_t head;
  int token;
};

// Rows of a y head that a state pass with decays adds: attended rows that are not fully decayed at the end of their chunk.
struct AttendedRows {
  const uint8_t* data;   // null: the mask says it, or zeros replace the other rows
  int64_t head;
  int token;
  const uint8_t* whole;  // [y head][groups]: whether all rows of a group are added (DecayArgs)
  int groups;
};

// Sizes of a pass, or of a phase of it (order2/plan.h).
struct LinearProblem : ChunkedSequence {
  Decay decay;
  int batch;
  int state_heads;  // states per batch entry: key/value heads
  int x_group;      // x heads per state
  int y_group;      // y heads summed into one state
  int d, dv;        // columns in memory of x and y, and of the values
  int part;         // order 1: y rows of a partial sum; the chunk where there are several chunks
  int order;
  int sm_arch;

  __host__ __device__ int states() const { return batch * state_heads; }
  // Groups of kBoundary virtual rows of y; and the place of y row 0's token among all virtual rows in the order of tokens.
  int groups() const { return (std::max(y_end(), end()) + kBoundary - 1) / kBoundary; }
  int first_token_at() const { return time == Time::kForward ? pad : groups() * kBoundary - ny - pad; }
  // Groups that cover what the rows of x see last too, of which blocks of kernels have up to 256.
  int groups_of_all() const {
    const int missing = round_up(nx, 256) - nx;
    return std::max(groups(), (std::max(y_end(), boundary + lag + nx) + missing + kBoundary - 1) / kBoundary);
  }
  // Order 1: parts before the boundary (lead parts), then one per chunk but the last.
  __host__ __device__ int lead_parts() const { return (boundary + part - 1) / part; }
  __host__ __device__ int parts() const { return lead_parts() + chunks - 1; }
  __host__ __device__ int part_begin(int i) const { return boundary + (i - lead_parts()) * part; }
};

// With an exact window: how many rows states lag behind the rows of x (core/sequence.h), a multiple of the tiles' rows. No row is local to
// one that reads it in a state.
inline __host__ __device__ int state_lag(int window) { return (window + 62) / 64 * 64; }

// Coefficients that snapshots include: of pairs of columns (twice that off the diagonal), of first order, of the second moment of y.
struct StateWeights {
  float pair, linear, moment;
};

// A state pass: adds features(y) w^T to the states and stores a snapshot at the beginning of every chunk. Order 2 goes from virtual row
// `begin` to the last boundary. Where a block per share of a state would leave multiprocessors idle, the rows are cut into segments that
// run side by side. The first launch does the first segment, with its snapshots, and sums the rows of the others except the last. A scan
// turns the sums into the state before each segment. The second launch does all segments except the first.
struct StateArgs : LinearProblem {
  View y, w;
  // Copies for groups that are not whole (`attended`), with zeros for dropped rows (DecayTilesArgs), of rows [begin, end()), which begin
  // with the token first_zeroed; else without data.
  View zeroed_y, zeroed_w;
  int first_zeroed;
  RowMask mask;
  AttendedRows attended;
  RowScale y_scale;    // e of the y rows, for sum e y y^T, sum e y and sum e
  RowScale y_factors;  // decays of the y rows (DecayTilesArgs::factors); else without data
  StateWeights weights;
  void* snapshots;   // [state][chunk][StateLayout::kWords]
  float* sums;       // [state][chunk][StateLayout::kSums]: sum w, sum e y, sum e
  int begin;         // not 0: continues from the accumulators of an earlier pass
  int segments;
  int segment_rows;  // of every segment but the last, which may have none
  // [slot][state][block][state_accumulators()][thread]: slot 0 passes a state from one state pass to the next, slot 1 + i belongs to
  // segment i. Null: one segment and no earlier or later pass. Order 1: [state][part_floats()], a carried state.
  float* accumulators;
  bool hands_on;     // stores the accumulators after the last row for a later pass
  float* parts_sum;  // order 1: [state][part][part_floats()]
};

// A state pass of order 1: sums over parts of y, then a scan of the parts.
struct PartStateArgs : StateArgs {};

// An output pass: out = sum f(x.y) w, in the forward over z.
struct ReadArgs : LinearProblem {
  View x, y, w;
  RowMask y_mask, x_mask;  // masked x rows are written as zeros
  RowCounts y_counts;      // of y_mask, for kernels whose y and w have zeros in masked rows (StatePasses::takes_zeros)
  const void* snapshots;
  const void* added;       // [state]: a snapshot that is added to all snapshots of its state; null: none
  const float* sums;
  float c0, c1, c2;        // f = c0 + x.y (c1 + c2 x.y)
  View out;
  bool half_out;           // out and noise are fp16, the other tensors fp32 copies of fp16
  float* z;                // [batch][x head], heads z_head apart; null: no division
  int64_t z_head;
  bool adds;               // adds to out; only without division
  RowOutput local_lse;      // FwdParams
  KeyBounds k_start;       // with decays: a query whose k_start is after its own token sees nothing
  View noise;
  float dropout;
  // An exact window, for the kernels of kLinearExactWindow (linear/algorithm.h): local rows of y, those less than `window` before a row
  // of x, have the weight 2^(local_scale x.y) in place of f, times their decay. z is the logarithm of the sum of weights. 0: none.
  int window;
  float local_scale;
  RowScale y_shift;  // without division: of the y rows, which local weights are relative to (PrepareArgs)
};

// A gradient pass: out = sum (g0 + g1 x.y) (x2.y2 + e) y.
struct GradArgs : LinearProblem {
  View x, x2, y, y2;
  RowMask y_mask, x_mask;
  RowScale x_scale, y_scale;  // e of the x rows or of the y rows: exactly one has data
  const void* snapshots;
  const void* added;       // as in ReadArgs
  const float* sums;
  float g0, g1;
  View out;
  bool half_out;
  bool adds;               // adds to out
  float c0;                // f = c0 + x.y (g0 + g1 / 2 x.y)
  RowOutput pair_sums;     // with decays: sum f(x.y) (x2.y2 + e), of a row and its own token where they count (Decay)
  RowOutput global_pair_sums;  // the same over pairs with global keys alone: with an exact window and gates, of keys
  // An exact window, as in ReadArgs. Local pairs have local_slope 2^(local_scale x.y - shift) in place of the derivative of f, with the
  // shift of their query (PrepareArgs): of the x rows or of the y rows, as e.
  int window;
  float local_scale, local_slope;
  RowScale x_shift, y_shift;
};

// Preparation of a state pass with decays. Multiplies w and e (null: ones) of every row by the row's decay until the end of its chunk,
// and computes the decays of states over a chunk. Masked and fully decayed rows are dropped.
struct DecayArgs : LinearProblem {
  View y, w;
  RowMask mask;
  RowScale e;
  void* decayed_w;   // [batch][y head][ny][dv]; dropped rows are not written
  float* decayed_e;  // [batch][y head], heads e_head apart: of every virtual row, at the token of its y row; 0 where there is no row
  int64_t e_head;
  uint8_t* attended;  // [batch][y head][ny]
  uint8_t* whole;  // [batch][y head][groups], of kBoundary virtual rows: whether none of them is dropped
  float* carries;  // [state][chunk]: decay of the state over a chunk (DecayFactor)
};

// The same for kernels that copy whole tiles and apply the decays of rows themselves. They cannot leave a row out of a tile, so dropped
// rows are zeros.
struct DecayTilesArgs : LinearProblem {
  View y, w;
  RowMask mask;
  RowScale e;
  DecayTile *tiles, *x_tiles;  // Decay
  // For the state pass; null: only the tiles are wanted.
  float* factors;   // [state], e_head apart: decay of every virtual row of y until its chunk's end; 0 where there is no row
  float* decayed_e;   // [batch][y head], e_head apart: the same times e; may be `factors` where there is no e
  int64_t e_head;
  // Written: copies of the groups before end() that are not whole, with zeros for dropped rows. Without data: linear_zero_dropped does it.
  View zeroed_y, zeroed_w;
  int first_zeroed;  // StateArgs
  uint8_t* whole;  // [batch][y head][groups]
  float* carries;  // [state][chunk]
};

// A factor for each kind of row of a state: 1, k_a, k_a k_a, and k_a k_b of different columns.
struct StateFactors {
  float one, first, square, product;
};

// Rows of y that are missing in the state pass's sum of ones: all of a batch entry, or as many as `counts` says.
struct UncountedRows {
  int rows;
  RowCounts counts;

  __host__ __device__ int of(int batch) const {
    return rows == 0 || counts.data == nullptr ? rows : counts.data[batch * counts.batch + rows - 1];
  }
};

// Conversion between a carried state and slot 0 of StateArgs::accumulators, which hold the same sums.
struct CarriedArgs {
  CarriedState state;
  int states, state_heads;
  float* accumulators;
  StateFactors factors;     // multiply what is loaded or stored
  UncountedRows uncounted;  // added to the sum of ones when it is stored
};

// Adds a carried state to saved snapshots and sums, which a state pass from a state of zeros stored.
struct AddArgs : LinearProblem {
  const void* state;  // [state]: the carried state as a snapshot; null: readers add it (ReadArgs::added), only sums change
  const float* state_sums;
  void* snapshots;    // [state][chunk]
  float* sums;
  int64_t snapshot_bytes;
  int64_t sum_floats;
};

// Gradients of the numerator and the denominator: g = grad_o (1 + dropout noise) / z and e = -(grad_o . o) / z + grad_z, 0 where z is 0.
struct PrepareArgs {
  int batch, heads, n, dv;
  View grad_o, o, noise;
  float dropout;
  const float* z;
  const float* grad_z;  // [batch][head][n], or null
  View g;               // written
  float* e;             // [batch][head], heads e_head apart
  int64_t e_head;
  // With an exact window, like e; else null. z is then the logarithm of the sum, and g and e are relative to 2^exponent, which is the
  // sum where that is between kLeastExponent and kLargestExponent. It is kLargestExponent where the sum is larger, and global keys have
  // no weight, or smaller, and they are fully decayed: g and e then come to nothing in their products with f. Weights of local keys are
  // exact, relative to 2^shift: the sum over 2^exponent.
  float* shift;
  bool is_gated;  // global keys weigh up to 2^kLargestGate as much: kLargestGatedExponent is in the place of kLargestExponent
  static constexpr float kLeastExponent = -100.f, kLargestExponent = 80.f, kLargestGatedExponent = 100.f;
};

// Copies of k and v with zeros in masked rows, and counts of the other rows (RowCounts).
struct ZeroArgs {
  int batch, heads, tokens, d, dv;
  View k, v;
  RowMask mask;
  void *zeroed_k, *zeroed_v;  // [batch][head][token][d or dv]
  int32_t* counts;            // [batch][token]
};

// Launches the portable kernel of the pass that the type of its arguments names (here or in order1/linear1.h).
template <class Math, class Args>
void linear_pass(const Args& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_prepare(const PrepareArgs& a, cudaStream_t stream);
template <class Math>
void linear_decay(const DecayArgs& a, cudaStream_t stream);
// For bf16:
void linear_zero_masked(const ZeroArgs& a, cudaStream_t stream);
void linear_decay_tiles(const DecayTilesArgs& a, cudaStream_t stream);
void linear_zero_dropped(const StateArgs& a, cudaStream_t stream);  // writes zeroed_y and zeroed_w, of the rows that the state pass adds
// Carried state -> accumulators, and accumulators -> new carried state
template <class Math>
void linear_load_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_store_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
// For order 1:
void linear_load_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
void linear_store_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream);
template <class Math>
void linear_add_state(const AddArgs& a, cudaStream_t stream);
// (batch, head, token, column) -> contiguous fp32
template <class Math>
void linear_widen(const View& src, float* dst, int batch, int heads, int tokens, int columns, cudaStream_t stream);

}  // namespace fastmax
