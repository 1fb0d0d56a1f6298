// One step of decoding with a buffer: new tokens are buffered and added to the state together.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "decode/decode.h"

namespace fastmax {

// Slots are processed in tiles, whose partial sums are combined in shared memory.
constexpr int kMaxBufferedPlaces = 16384;

// Local and buffered tokens of a state. `step` describes the sums and the new token; its new_kv_state and new_k_sum are
// kv_state and k_sum themselves.
struct BufferedParams {
  DecodeParams step;
  int exact_window;     // W: tokens of the exact window
  int flush_interval;   // T: tokens that are buffered before a flush
  void* local_keys;     // (b, hk, W + T, d) contiguous, oldest first
  void* local_values;   // (b, hk, W + T, dv) contiguous
  uint8_t* local_mask;  // (b, hk, W + T) contiguous, 0 = the token is masked
  float* local_decays;  // (b, hk, W + T) contiguous: log_decay of the tokens, including -inf
  float* local_gates;   // (b, hk, W + T) contiguous: log_input_gate of the tokens, in its range; may be null
  int* buffered;        // (b, hk) contiguous, 0 to T: tokens beyond the W; slots after them are not read
  float* lse;           // (b, h) contiguous, overwritten: log of the sum of weights, -inf if it is 0
  void* workspace;
};

size_t buffered_workspace_bytes(const BufferedParams& p);

// Performs a step. If T tokens are buffered, it first adds the T oldest tokens to the sums, with decay, and moves the last W
// tokens to the front. The new token goes to the slot after the last one. o weighs the last W tokens, including the new one, by
// exp(s), and the tokens before them and the sums by f(s).
void launch_buffered(const BufferedParams& p, cudaStream_t stream);

}  // namespace fastmax
