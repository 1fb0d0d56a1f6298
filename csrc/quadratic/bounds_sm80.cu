#include "quadratic/bounds.h"

#include "core/launch.h"
#include "core/visibility.h"

namespace fastmax {
namespace {

__host__ __device__ __forceinline__ int bound_of(const KeyBounds& bounds, int batch, int kv_head, int query) {
  return bounds.data[batch * bounds.stride.batch + kv_head * bounds.stride.head + query * bounds.stride.token];
}

__host__ __device__ __forceinline__ Range keys_of(const AttentionParams& p, int batch, int kv_head, int query) {
  // Where a window is outside of the keys, its end may be before its begin, and negative.
  const int position = query + p.causal_offset;
  Range keys{max(0, position - p.left), min(position + p.right + 1, p.m)};
  if (p.first_key.data != nullptr) keys.begin = max(keys.begin, min(bound_of(p.first_key, batch, kv_head, query), p.m));
  if (p.end_key.data != nullptr) keys.end = min(keys.end, bound_of(p.end_key, batch, kv_head, query));
  return keys;
}

// The first query whose keys end behind `key` (kEnds), or begin behind it; n where there is none.
template <bool kEnds>
__host__ __device__ __forceinline__ int first_query_behind(const AttentionParams& p, int batch, int kv_head, int key) {
  int begin = 0, end = p.n;
  while (begin < end) {
    const int query = begin + (end - begin) / 2;
    const Range keys = keys_of(p, batch, kv_head, query);
    if ((kEnds ? keys.end : keys.begin) > key) end = query;
    else begin = query + 1;
  }
  return begin;
}

__host__ __device__ __forceinline__ Range queries_of(const AttentionParams& p, int batch, int kv_head, int key) {
  return {first_query_behind<true>(p, batch, kv_head, key), first_query_behind<false>(p, batch, kv_head, key)};
}

// A thread per query, then one per key.
__global__ void __launch_bounds__(256) bound_table_kernel(const AttentionParams p, Range* __restrict__ keys, Range* __restrict__ queries,
                                                          const int64_t rows) {
  int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= rows) return;
  const int64_t query_rows = static_cast<int64_t>(p.b) * p.hk * p.n;
  const bool of_query = index < query_rows;
  if (!of_query) index -= query_rows;
  const int tokens = of_query ? p.n : p.m;
  const int head = static_cast<int>(index / tokens), token = static_cast<int>(index % tokens);
  const int batch = head / p.hk, kv_head = head % p.hk;
  if (of_query) {
    keys[index] = keys_of(p, batch, kv_head, token);
  } else {
    queries[index] = queries_of(p, batch, kv_head, token);
  }
}

}  // namespace

size_t bound_table_bytes(const AttentionParams& p, Direction direction) {
  const int64_t tokens = direction == Direction::kForward ? p.n : int64_t{p.n} + p.m;
  return static_cast<size_t>(p.b * int64_t{p.hk} * tokens) * sizeof(Range);
}

void fill_bound_tables(AttentionParams& p, void* table, Direction direction, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(p.b) * p.hk;
  const bool forward = direction == Direction::kForward;
  Range* keys = static_cast<Range*>(table);
  Range* queries = forward ? nullptr : keys + heads * p.n;
  const int64_t rows = heads * (forward ? p.n : int64_t{p.n} + p.m);
  constexpr int kThreads = 256;
  launch_kernel("bound_table", bound_table_kernel, grid_1d((rows + kThreads - 1) / kThreads), kThreads, 0, stream, p, keys, queries, rows);
  p.key_table = keys, p.query_table = queries;
}

}  // namespace fastmax
