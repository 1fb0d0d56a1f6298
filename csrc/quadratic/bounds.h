// Tables of the keys that queries see, made from bounds, causality and windows on the device before the kernels that walk by them
// (TableVisibility in core/visibility.h).
#pragma once

#include <cuda_runtime.h>

#include "core/algorithm.h"
#include "core/params.h"

namespace fastmax {

size_t bound_table_bytes(const AttentionParams& p, Direction direction);

// Fills the tables and says where they are. table: bound_table_bytes, 8-byte aligned. The forward has no table of queries.
// gone: where p.decay_sums say that all pairs of a block of queries and a block of keys fade by more than 2^gone, they do not see each
// other, so that no tile of them is visited.
void fill_bound_tables(AttentionParams& p, float gone, void* table, Direction direction, cudaStream_t stream);

}  // namespace fastmax
