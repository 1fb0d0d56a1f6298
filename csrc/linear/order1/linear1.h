// The linear algorithm of order 1, f(s) = c0 + c1 x.y: passes in which x rows see the y rows before them, with the notation of
// linear/linear.h (x, y, values w) and of core/sequence.h.
//
//   forward    x = q, y = k, w = v        o      = sum f(x.y) w / z
//   grad_q     x = g, y = v, w = k        grad_q = sum c1 (x.y + e_x) w, the forward's sum with a constant per x row
//   grad_k, v  x = k and v, y = q, w = g  grad_v = sum f(k.q) g, grad_k = sum c1 (v.g + e_y) q, from one state
//
// The state is the matrix sum y w^T, with the vectors sum w and sum (e) y. A block has the state in its accumulators and goes over a
// segment of x: it computes results of a few rows, then adds the rows of y that they see to the state. The states before segments come
// from sums over parts of y. So y and w are read twice, and once where a single segment per state fills the device.
//
// Hopper's kernels can shorten rows of q and k to the length `lim` (normalize="token", AttentionParams::lim): a longer row x counts as
// F x with F = lim / |x|. No shortened row is written to memory. The factors of k are given, F of q is found where its rows are x.
#pragma once

#include "core/algorithm.h"
#include "core/device.h"
#include "linear/linear.h"

namespace fastmax {

struct Linear1Problem : Sequence {
  int batch;
  int state_heads;           // states per batch entry: key/value heads
  int x_group, y_group;      // x heads per state, y heads summed into one state
  int y_columns, w_columns;  // columns in memory of y (and of the x that meets it), and of w
  int sm_arch;
  int segment, segments;     // x rows of a group of blocks, and the number of segments
  int group;                 // blocks that share the tiles of a segment
  int part;                  // y rows of a partial sum; causal: a divisor of the segment
  int lead_parts, parts;     // parts before the boundary, and all: causal, also those of every segment but the last

  __host__ __device__ int states() const { return batch * state_heads; }
  __host__ __device__ int part_begin(int i) const { return boundary + (i - lead_parts) * part; }
  // The part whose inclusive prefix is the state before a segment; negative where no rows are before it.
  __host__ __device__ int part_before(int segment_index) const { return lead_parts - 1 + (causal ? segment_index * (segment / part) : 0); }
};

// Floats of a state: the matrix in the order of the accumulators, sum w, sum y, and the number of rows. As many for grad_q, where y = v.
constexpr __host__ __device__ int64_t linear1_state_floats(int head_dim_qk, int head_dim_v) {
  return int64_t{head_dim_qk} * head_dim_v + head_dim_qk + head_dim_v + 4;
}

// Sums over parts, then their inclusive prefixes in place: a state pass of order 1.
struct Linear1SumArgs : Linear1Problem {
  View y, w;
  RowMask y_mask;
  // Scales of the rows in sum y (e), in sum w and in the matrix (1 / z where w is grad_o: Linear1Walks::divides); null: 1.
  RowScale y_scale, w_scale, matrix_scale;
  float* prefixes;   // [state][part][linear1_state_floats()]
};

// out = sum (c0 + c1 x.y) w (/ z); with x_scale, sum c1 (x.y + e_x) w.
struct Linear1WalkArgs : Linear1Problem {
  View x, y, w;
  RowMask y_mask;
  RowScale x_scale;
  RowScale y_scale, w_scale;  // the factors of k, which is y or w, where lim > 0
  float lim;                  // to which rows of q and k are shortened; 0: they are as they are
  const float* prefixes;
  float c0, c1;
  View out;
  bool half_out;  // out (and noise) are fp16 while the inputs were widened to fp32
  float* z;       // null: no division; else [batch][x head][nx]
  View noise;
  float dropout;

  // Where x is grad_o (Linear1Walks::divides): out is divided by z, and e and 1 / z of its rows are stored, heads e_head apart.
  View o;
  const float *given_z, *grad_z;  // [batch][x head][nx]; grad_z may be null
  float *e, *inverse_z;
  int64_t e_head;
  // With lim > 0: q, of which out is the gradient, and F / z of its rows; e is then F e.
  View q;
  float* shortened_z;
};

// grad_w = sum (c0 + c1 x.y) w, grad_y = sum c1 (x2.w + e_y) y
struct Linear1PairWalkArgs : Linear1Problem {
  View x, x2, y, w;
  RowMask x_mask;  // masked x rows are written as zeros
  RowScale y_scale, w_scale, matrix_scale;  // as of Linear1SumArgs
  float lim;                                // as of Linear1WalkArgs
  const float* prefixes;
  float c0, c1;
  View grad_w, grad_y;
  bool half_out;
};

// Blocks of a pass that share a multiprocessor: for these the launcher cuts segments and, with 227 KB of shared memory, the kernels limit
// registers. With less, shared memory decides.
constexpr int linear1_blocks(int head_dim, bool is_bf16, int sm_arch) {
  if (shared_limit(sm_arch) < shared_limit(90)) return is_bf16 && head_dim <= (sm_arch == 80 ? 64 : 32) ? 2 : 1;
  if (!is_bf16) return head_dim <= 64 ? 2 : 1;
  return head_dim <= 64 ? 3 : head_dim <= 96 ? 2 : 1;
}
// The same for sums over parts.
constexpr int linear1_sum_blocks(int head_dim, bool is_bf16) { return !is_bf16 ? 1 : head_dim <= 64 ? 4 : 2; }

// An architecture's kernels.
struct Linear1Walks {
  int (*blocks)(const Problem& p);  // blocks of passes, and of sums, that fill the device
  int (*group)(const Problem& p, int64_t walks);
  int (*sum_blocks)(const Problem& p);
  void (*sum)(const Problem& p, const Linear1SumArgs& a, cudaStream_t stream);
  void (*walk)(const Problem& p, const Linear1WalkArgs& a, cudaStream_t stream);
  void (*pair_walk)(const Problem& p, const Linear1PairWalkArgs& a, cudaStream_t stream);
  // Whether the passes can read grad_o, o and z in place of g and e. Null: no.
  bool (*divides)(const BwdParams& p);
};
extern const Linear1Walks kLinear1WalksSm80;  // for every architecture

// Inclusive prefixes of the states of parts, in place.
template <class Math>
void linear1_scan(const Linear1SumArgs& a, int head_dim, cudaStream_t stream);

void launch_linear1_fwd(const FwdParams& p, const Linear1Walks& walks, cudaStream_t stream);
void launch_linear1_bwd(const BwdParams& p, const Linear1Walks& walks, cudaStream_t stream);
size_t linear1_fwd_workspace_bytes(const FwdParams& p, const Linear1Walks& walks);
size_t linear1_bwd_workspace_bytes(const BwdParams& p, const Linear1Walks& walks);

}  // namespace fastmax
