#include "quadratic/bounds.h"

#include "core/lanes.h"
#include "core/launch.h"
#include "core/search.h"
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

// Of calls with gates, in units of log 2 (decay/decay.h). of_keys (heads, blocks of keys): the smallest K up to the end of a block, which is
// that of the key that weighs most. least (heads): the smallest gate of a head, at most 0; a query's own key may weigh so little, and keys
// are negligible beside it only if they weigh less.
struct GateBounds {
  float2* of_keys;  // null: there are no gates
  float* least;
};

// Which blocks of queries and keys are fully decayed to each other. No tile of the kernels is larger than a block, so a tile is
// skipped as a whole or not at all.
class DecayedBlocks {
 public:
  static constexpr int kBlock = 128;

  __device__ DecayedBlocks(const AttentionParams& p, int head, float fully_decayed, const GateBounds& gates)
      : p(p),
        sums(p.decay_sums + static_cast<int64_t>(head) * p.decay_tokens()),
        of_keys(gates.of_keys == nullptr ? nullptr : gates.of_keys + static_cast<int64_t>(head) * count(p.m)),
        fully_decayed(fully_decayed + (gates.of_keys == nullptr ? 0.f : gates.least[head])) {}

  static __host__ __device__ int count(int tokens) { return (tokens + kBlock - 1) / kBlock; }

  // The first key that is not fully decayed for the queries of this block.
  __device__ int k_start(int query) const {
    const int block = query / kBlock;
    return kBlock * first_where(position(block * kBlock) / kBlock, [&](int key_block) { return is_left(block, key_block); });
  }
  // The first query for which the keys of this block are fully decayed.
  __device__ int end_query(int key) const {
    const int block = key / kBlock;
    return kBlock * first_where(count(p.n), [&](int query_block) { return !is_left(query_block, block); });
  }

 private:
  const AttentionParams& p;
  const float2 *sums, *of_keys;
  float fully_decayed;

  __device__ int position(int query) const { return max(0, query + p.causal_offset); }
  // The pair of the first query and the last key decays least, without gates. With gates it is some pair of the first query.
  __device__ bool is_left(int query_block, int key_block) const {
    const float2 key = of_keys == nullptr ? sums[min(key_block * kBlock + kBlock, p.m) - 1] : of_keys[key_block];
    return decay(sums[position(query_block * kBlock) + p.lag], key) >= fully_decayed;
  }
};

// One thread block per head, one warp per block of keys.
constexpr int kBoundThreads = 256;
__global__ void __launch_bounds__(kBoundThreads) gate_bounds_kernel(const AttentionParams p, const GateBounds bounds) {
  constexpr int kWarps = kBoundThreads / 32, kBlock = DecayedBlocks::kBlock;
  __shared__ float2 of_warps[kWarps];
  __shared__ float least_of_warps[kWarps];
  const auto smaller = [](const float2& a, const float2& b) { return b.x < a.x || (b.x == a.x && b.y < a.y) ? b : a; };
  const int64_t head = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, blocks = DecayedBlocks::count(p.m);
  const float2 *sums = p.decay_sums + head * p.decay_tokens(), *key_sums = p.key_sums + head * p.key_sum_tokens;
  float2 smallest = make_float2(INFINITY, 0.f);
  float least = 0.f;
  for (int first = 0; first < blocks; first += kWarps) {
    const int block = first + warp;
    float2 own = make_float2(INFINITY, 0.f);
    for (int key = block * kBlock + lane; key < min(block * kBlock + kBlock, p.m); key += 32) {
      own = smaller(own, key_sums[key]);
      least = fminf(least, decay(sums[key], key_sums[key]));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      own = smaller(own, make_float2(__shfl_xor_sync(0xffffffffu, own.x, distance), __shfl_xor_sync(0xffffffffu, own.y, distance)));
    }
    if (lane == 0) of_warps[warp] = own;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      smallest = smaller(smallest, of_warps[i]);
      if (i == warp && lane == 0 && block < blocks) bounds.of_keys[head * blocks + block] = smallest;
    }
    __syncthreads();
  }
  least = min_of_lanes(least);
  if (lane == 0) least_of_warps[warp] = least;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kWarps; ++i) least = fminf(least, least_of_warps[i]);
    bounds.least[head] = least;
  }
}

// One thread per query, then one thread per key.
__global__ void __launch_bounds__(256) bound_table_kernel(const AttentionParams p, const float fully_decayed,
                                                          const GateBounds gates, Range* __restrict__ keys,
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
    const DecayedBlocks blocks(p, head, fully_decayed, gates);
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

int64_t rows_of_tables(const AttentionParams& p, Direction direction) {
  return int64_t{p.b} * p.hk * (direction == Direction::kForward ? p.n : int64_t{p.n} + p.m);
}

}  // namespace

size_t bound_table_bytes(const AttentionParams& p, Direction direction) {
  const size_t of_head = p.log_input_gate == nullptr ? 0 : DecayedBlocks::count(p.m) * sizeof(float2) + sizeof(float);
  return static_cast<size_t>(rows_of_tables(p, direction)) * sizeof(Range) + static_cast<size_t>(p.b) * p.hk * of_head;
}

void fill_bound_tables(AttentionParams& p, float fully_decayed, void* table, Direction direction, cudaStream_t stream) {
  const int64_t heads = static_cast<int64_t>(p.b) * p.hk, rows = rows_of_tables(p, direction);
  Range* keys = static_cast<Range*>(table);
  Range* queries = direction == Direction::kForward ? nullptr : keys + heads * p.n;
  GateBounds gates{};
  if (p.decay_sums != nullptr && p.log_input_gate != nullptr && fully_decayed > -INFINITY) {
    gates.of_keys = reinterpret_cast<float2*>(keys + rows);
    gates.least = reinterpret_cast<float*>(gates.of_keys + heads * DecayedBlocks::count(p.m));
    launch_kernel("gate_bounds", gate_bounds_kernel, grid_1d(heads), kBoundThreads, 0, stream, p, gates);
  }
  constexpr int kThreads = 256;
  launch_kernel("bound_table", bound_table_kernel, grid_1d((rows + kThreads - 1) / kThreads), kThreads, 0, stream, p, fully_decayed,
                gates, keys, queries, rows);
  p.key_table = keys, p.query_table = queries;
}

}  // namespace fastmax
