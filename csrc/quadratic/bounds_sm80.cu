#include "quadratic/bounds.h"

#include "core/launch.h"
#include "core/visibility.h"

namespace fastmax {
namespace {

__device__ __forceinline__ int bound_of(const KeyBounds& bounds, int batch, int kv_head, int query) {
  return bounds.data[batch * bounds.stride.batch + kv_head * bounds.stride.head + query * bounds.stride.token];
}

__device__ __forceinline__ Range keys_of(const AttentionParams& p, int batch, int kv_head, int query) {
  Range keys = WindowVisibility(p, batch, kv_head).keys_of(query);
  if (p.first_key.data != nullptr) keys.begin = max(keys.begin, min(bound_of(p.first_key, batch, kv_head, query), p.m));
  if (p.end_key.data != nullptr) keys.end = min(keys.end, bound_of(p.end_key, batch, kv_head, query));
  return keys;
}

// How many queries of a head there are before the first one for which `behind` is true.
template <class Predicate>
__device__ __forceinline__ int queries_before(int n, const Predicate& behind) {
  int begin = 0, end = n;
  while (begin < end) {
    const int middle = begin + (end - begin) / 2;
    if (behind(middle)) end = middle;
    else begin = middle + 1;
  }
  return begin;
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
    queries[index] = {queries_before(p.n, [&](int query) { return keys_of(p, batch, kv_head, query).end > token; }),
                      queries_before(p.n, [&](int query) { return keys_of(p, batch, kv_head, query).begin > token; })};
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
