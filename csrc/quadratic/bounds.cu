#include "quadratic/bounds.h"

#include "core/launch.h"
#include "core/visibility.h"
#include "decay/decay.h"

namespace fastmax {
namespace {

__host__ __device__ __forceinline__ int bound_of(const KeyBounds& bounds, int batch, int kv_head, int query) {
  return bounds.data[batch * bounds.stride.batch + kv_head * bounds.stride.head + query * bounds.stride.token];
}

// The keys that a query sees. Kernels derive addresses from the tables, so bounds of any value are clamped to [0, m].
__host__ __device__ __forceinline__ Range keys_of(const AttentionParams& p, int batch, int kv_head, int query) {
  // For windows outside the keys the end may be negative and lie before the begin.
  const int position = query + p.causal_offset;
  Range keys{max(0, position - p.left), min(position + p.right + 1, p.m)};
  if (p.k_start.data != nullptr) keys.begin = max(keys.begin, min(bound_of(p.k_start, batch, kv_head, query), p.m));
  if (p.k_end.data != nullptr) keys.end = min(keys.end, max(bound_of(p.k_end, batch, kv_head, query), 0));
  return keys;
}

// The first query whose keys end after `key` (kEnds), or begin after it (else); n if there is none.
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
  if (p.k_start.data == nullptr && p.k_end.data == nullptr) return WindowVisibility(p, 0).queries_of(key);
  return {first_query_behind<true>(p, batch, kv_head, key), first_query_behind<false>(p, batch, kv_head, key)};
}

// Which blocks of queries and keys are fully decayed to each other. No tile of the kernels is larger than a block, so a tile is
// skipped as a whole or not at all.
class DecayedBlocks {
 public:
  __device__ DecayedBlocks(const AttentionParams& p, int head, float fully_decayed)
      : p(p),
        sums(p.decay_sums + static_cast<int64_t>(head) * p.decay_tokens()),
        fully_decayed(fully_decayed - (p.log_input_gate == nullptr ? 0.f : kLargestGate)) {}

  // The first key that is not fully decayed for the queries of this block.
  __device__ int k_start(int query) const {
    const int block = query / kBlock;
    return kBlock * first_where(position(block * kBlock) / kBlock, [&](int key_block) { return is_left(block, key_block); });
  }
  // The first query for which the keys of this block are fully decayed.
  __device__ int end_query(int key) const {
    const int block = key / kBlock;
    return kBlock * first_where((p.n + kBlock - 1) / kBlock, [&](int query_block) { return !is_left(query_block, block); });
  }

 private:
  static constexpr int kBlock = 128;
  const AttentionParams& p;
  const float2* sums;
  float fully_decayed;

  __device__ int position(int query) const { return max(0, query + p.causal_offset); }
  // The pair of the first query and the last key decays least.
  __device__ bool is_left(int query_block, int key_block) const {
    return decay(sums[position(query_block * kBlock) + p.lag], sums[min(key_block * kBlock + kBlock, p.m) - 1]) >= fully_decayed;
  }
  // The first index below `end` from which on `holds` is true; `end` if there is none.
  template <class Holds>
  __device__ static int first_where(int end, const Holds& holds) {
    int begin = 0;
    while (begin < end) {
      const int middle = begin + (end - begin) / 2;
      if (holds(middle)) end = middle;
      else begin = middle + 1;
    }
    return begin;
  }
};

// One thread per query, then one thread per key.
__global__ void __launch_bounds__(256) bound_table_kernel(const AttentionParams p, const float fully_decayed, Range* __restrict__ keys,
                                                          Range* __restrict__ queries, const int64_t rows) {
  int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= rows) return;
  const int64_t query_rows = static_cast<int64_t>(p.b) * p.hk * p.n;
  const bool of_query = index < query_rows;
  if (!of_query) index -= query_rows;
  const int tokens = of_query ? p.n : p.m;
  const int head = static_cast<int>(index / tokens), token = static_cast<int>(index % tokens);
  const int batch = head / p.hk, kv_head = head % p.hk;
  Range seen = of_query ? keys_of(p, batch, kv_head, token) : queries_of(p, batch, kv_head, token);
  if (p.decay_sums != nullptr) {
    // Local keys of an exact window stay visible: their scores may exceed the decay.
    const DecayedBlocks blocks(p, head, fully_decayed);
    if (of_query) {
      const int first_local = p.exact_window > 0 ? token + p.causal_offset - p.exact_window + 1 : p.m;
      seen.begin = max(seen.begin, min(blocks.k_start(token), first_local));
    } else {
      const int end_local = p.exact_window > 0 ? token - p.causal_offset + p.exact_window : 0;
      seen.end = min(seen.end, max(blocks.end_query(token), end_local));
    }
  }
  (of_query ? keys : queries)[index] = seen;
}

}  // namespace

size_t bound_table_bytes(const AttentionParams& p, Direction direction) {
  const int64_t tokens = direction == Direction::kForward ? p.n : int64_t{p.n} + p.m;
  return static_cast<size_t>(p.b * int64_t{p.hk} * tokens) * sizeof(Range);
}

void fill_bound_tables(AttentionParams& p, float fully_decayed, void* table, Direction direction, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(p.b) * p.hk;
  const bool forward = direction == Direction::kForward;
  Range* keys = static_cast<Range*>(table);
  Range* queries = forward ? nullptr : keys + heads * p.n;
  const int64_t rows = heads * (forward ? p.n : int64_t{p.n} + p.m);
  constexpr int kThreads = 256;
  launch_kernel("bound_table", bound_table_kernel, grid_1d((rows + kThreads - 1) / kThreads), kThreads, 0, stream, p, fully_decayed, keys,
                queries, rows);
  p.key_table = keys, p.query_table = queries;
}

}  // namespace fastmax
