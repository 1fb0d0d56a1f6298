// Kept keys of a layer: which keys each block of queries keeps, and the keys that it weighs by exp of their score.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "core/params.h"

namespace fastmax {

inline constexpr int kMaxKept = 2048;        // keys that a block keeps
inline constexpr int kMaxCandidates = 4096;  // keys that a block adds to those that may be kept

struct Stride4 {
  int64_t batch, head, block, place;
};

// Which keys each block keeps: the `count` ones of the largest rank among those that it and the blocks before it add.
struct ChoiceParams {
  int b, hk, blocks;
  int candidates;  // that each block adds
  int count;

  const double* rank;     // (b, hk, blocks, candidates): -inf is no key, NaN counts as inf
  const int64_t* index;   // likewise: the key. Of equal ranks, those of later blocks are kept, and within a block the first ones
  Stride4 rank_stride, index_stride;
  const int64_t* earlier;  // (blocks): number of earlier blocks of the same sequence
  int64_t earlier_stride;
  int64_t* kept;  // (b, hk, blocks, count) contiguous: ascending; where there are fewer keys, the first are -1
};

size_t choice_workspace_bytes(const ChoiceParams& p);
void launch_choice(const ChoiceParams& p, void* workspace, cudaStream_t stream);

// The places of a block: `kept` keys, then `block` recent ones, which are consecutive.
struct PlacesParams {
  int b, hk, blocks;
  int kept, block;
  int m;  // keys
  // (b, hk, blocks, kept) contiguous: ascending, -1 for none. Blocks without queries, whose gradients are 0, may have a key twice.
  const int64_t* kept_keys;
  // (b, blocks, 3) contiguous in its last two dimensions: x, begin and end. Place kept + i has the key x + i for begin <= i < end.
  const int64_t* recent;
  int64_t recent_batch;  // stride

  int d, dv;
  MathMode math;  // of keys and values
  bool aligned;   // whether rows are whole 16-byte words at multiples of 16 bytes
};

struct GatherParams : PlacesParams {
  const void* k;             // (b, hk, m, d)
  const void* v;             // (b, hk, m, dv)
  const double* log_factor;  // (b, hk, m)
  Stride k_stride, v_stride, log_factor_stride;  // unit stride in the last dimension of k and v

  // Contiguous, with a batch entry for each block: (b * blocks, hk, kept + block, ...). Where a place has no key, rows and gates are 0.
  void* keys;
  void* values;
  float* gate;  // log_factor less D_i; without decays, log_factor
  // D_(i-1) - D_i, where D_i is the least log_factor of place i and all later ones; 0 if i = 0 or no key follows. Null without decays
  float* log_decay;
  double* least;  // (b * blocks, hk, block): D of the last places, 0 where no key follows. Null without decays
  bool* has_key;  // (b * blocks, kept + block), which is the same in all heads
};

void launch_gather(const GatherParams& p, cudaStream_t stream);

// The gradients of k, v and log_factor are sums over all places of a key, in fp32 and in the order of the blocks.
struct GatherBackwardParams : PlacesParams {
  const void* grad_keys;  // contiguous, as the results
  const void* grad_values;
  const float* grad_gate;
  // Of zeros: keys without a place are not written.
  void* grad_k;
  void* grad_v;
  double* grad_log_factor;
  Stride grad_k_stride, grad_v_stride, grad_log_factor_stride;
};

size_t gather_backward_workspace_bytes(const GatherBackwardParams& p);
void launch_gather_backward(const GatherBackwardParams& p, void* workspace, cudaStream_t stream);

// One token of a layer with a state: adds its decay to the log factors of the slots and its key to a free slot, attends to the keys
// beyond the exact window by exp of their score, merges that into attention to other keys, and frees the slots of the keys that the
// next block does not keep.
struct KeptStepParams {
  int b, h, hk;
  int slots;  // of a state
  int d, dv;
  int kept, window, block;
  float scale;
  MathMode math;
  bool aligned;  // whether rows of the slots are whole 16-byte words at multiples of 16 bytes

  const void *q, *k, *v;             // (b, h, d), (b, hk, d), (b, hk, dv), unit stride in the last dimension
  Stride q_stride, k_stride, v_stride;
  const float* log_input_gate;       // (b, hk)
  const float* log_decay;            // (b, hk), or null
  Stride log_input_gate_stride, log_decay_stride;
  const int64_t* token_positions;    // (b) contiguous
  const int64_t* token_count;        // (b) contiguous: 1, or 0 for padding, which leaves the keys as they are. Null: all 1
  const void* other;                 // (b, h, dv), unit stride in the last dimension: the output for other keys
  const float* other_lse;            // (b, h): the log of the sum of their weights, -inf if there is none
  Stride other_stride, other_lse_stride;

  // Contiguous, overwritten: (b, hk, slots, ...)
  void* keys;
  void* values;
  double* log_factors;
  int64_t* positions;  // of each key; -1: the slot is free

  void* o;  // (b, h, dv) contiguous, for all keys; 0 where there is none
};

inline constexpr int kMaxSlots = 4096;
void launch_kept_step(const KeptStepParams& p, cudaStream_t stream);

}  // namespace fastmax
