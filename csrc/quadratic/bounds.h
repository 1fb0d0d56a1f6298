// Calls with bounds of keys, a window or decay, and the tables of visible keys and queries that their kernels read
// (TableVisibility in core/visibility.h). The tables are computed on the device.
#pragma once

#include <cuda_runtime.h>

#include "core/algorithm.h"
#include "core/params.h"

namespace fastmax {

inline bool is_bounded(const AttentionParams& p) {
  return p.window || p.exact_window > 0 || p.k_start.data != nullptr || p.k_end.data != nullptr || p.has_decay();
}

// Whether the only bounds are a window and a causal mask. Such calls need no tables.
inline bool has_window_alone(const AttentionParams& p) {
  return p.window && p.k_start.data == nullptr && p.k_end.data == nullptr && !p.has_decay();
}

size_t bound_table_bytes(const AttentionParams& p, Direction direction);

// Fills p.key_table and, in the backward, p.query_table. table: bound_table_bytes, 8-byte aligned. fully_decayed: log2 of a
// factor. If p.decay_sums is set, a block of queries and a block of keys do not see each other if all pairs of these queries with keys up to
// the end of the block have factors below 2^fully_decayed, with gates below that times the smallest gate; the kernels then skip their tiles.
void fill_bound_tables(AttentionParams& p, float fully_decayed, void* table, Direction direction, cudaStream_t stream);

}  // namespace fastmax
