// Calls with bounds of keys, a window or decays, and the tables of visible keys that their kernels read (TableVisibility in
// core/visibility.h). The tables are made on the device from bounds, causality and windows.
#pragma once

#include <cuda_runtime.h>

#include "core/algorithm.h"
#include "core/params.h"

namespace fastmax {

inline bool is_bounded(const AttentionParams& p) {
  return p.window || p.k_start.data != nullptr || p.k_end.data != nullptr || p.log_decay != nullptr;
}

// Bounds that are no more than a causal one and a window, which take no tables.
inline bool has_window_alone(const AttentionParams& p) {
  return p.window && p.k_start.data == nullptr && p.k_end.data == nullptr && p.log_decay == nullptr;
}

size_t bound_table_bytes(const AttentionParams& p, Direction direction);

// Fills the tables and says where they are. table: bound_table_bytes, 8-byte aligned. The forward has no table of queries.
// gone: where p.decay_sums say that all pairs of a block of queries and a block of keys fade by more than 2^gone, they do not see each
// other, so that no tile of them is visited.
void fill_bound_tables(AttentionParams& p, float fully_decayed, void* table, Direction direction, cudaStream_t stream);

}  // namespace fastmax
