// One token of generation from a state that gathers new tokens and takes them into its sums together.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "decode/decode.h"

namespace fastmax {

// Places are handled in tiles, whose partial sums are combined in shared memory.
constexpr int kMaxBufferedPlaces = 16384;

// `step` is of the state's sums and of the token that comes; its new_values and new_weights are values and weights themselves.
struct BufferedParams {
  DecodeParams step;
  int exact_window;  // W
  int flush_interval;    // T
  void* local_keys;     // (b, hk, W + T, d) contiguous, oldest first
  void* local_values;   // (b, hk, W + T, dv) contiguous
  uint8_t* local_mask;  // (b, hk, W + T) contiguous, zero = the token does not take part
  float* local_decays;  // (b, hk, W + T) contiguous: logarithms, -inf too, of what the token found
  int* buffered;       // (b, hk) contiguous, 0 to T: tokens beyond the W; what lies behind them is not looked at
  void* workspace;
};

size_t buffered_workspace_bytes(const BufferedParams& p);

// Where T tokens are buffered, the oldest T fade and join the sums, and the last W move to the front. Then the token takes the place
// behind the last. o: the last W tokens, this one among them, weighed by exp(s), those before them and the sums by f(s).
void launch_buffered(const BufferedParams& p, cudaStream_t stream);

}  // namespace fastmax
