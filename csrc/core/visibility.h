// Visible tokens of a block of rows, for every kernel. Rows of queries see keys (forward, grad_q); rows of keys are seen by
// queries (grad_k, grad_v).
//
// A row sees a range of tokens, and neither bound decreases from row to row. So the first and the last row of a block decide
// for all rows between them:
//
//     tokens      0 1 2 3 4 5 6 7 8 9
//     first row   . x x x x x . . . .         some row sees  [first.begin, last.end)
//      ..         . . x x x x x . . .         every row sees [last.begin, first.end)
//     last row    . . . x x x x x . .
//
// A tile of tokens is empty, partly visible or wholly visible. A kernel processes the tiles in `seen`, and masks single pairs
// only outside `whole`. This works for any type with keys_of and queries_of whose bounds never decrease, such as those below.
//
// kBoundsBothSides: whether keys may begin after the first one, and queries end before the last. kMayDecay: whether the kernels
// look for decay (quadratic/portable/decay.h). kHasTables: whether AttentionParams::key_table and query_table are read.
#pragma once

#include "core/params.h"
#include "core/tiles.h"

namespace fastmax {

// [begin, end) of tokens or tiles; empty if end <= begin.
struct Range {
  int begin, end;

  constexpr __host__ __device__ bool contains(int i) const { return i >= begin && i < end; }
};

// Tiles that contain some of these tokens, and tiles that contain nothing else. For an empty range, tiles_with may return the
// tile in which it lies.
template <int kTile>
constexpr __host__ __device__ Range tiles_with(Range tokens) {
  return {tokens.begin / kTile, (tokens.end + kTile - 1) / kTile};
}
template <int kTile>
constexpr __host__ __device__ Range tiles_within(Range tokens) {
  return {(tokens.begin + kTile - 1) / kTile, tokens.end / kTile};
}

// Tiles that rows see. The tiles of `seen` that are not in `whole` are partly visible.
struct TileRanges {
  Range seen, whole;
};

// Keys that queries first .. last see, and their tiles.
template <class Visibility>
constexpr __host__ __device__ Range keys_seen(const Visibility& sees, int first, int last) {
  return {sees.keys_of(first).begin, sees.keys_of(last).end};
}
template <int kTile, class Visibility>
constexpr __host__ __device__ TileRanges key_tiles(const Visibility& sees, int first, int last) {
  return {tiles_with<kTile>(keys_seen(sees, first, last)),
          tiles_within<kTile>({sees.keys_of(last).begin, sees.keys_of(first).end})};
}

// Tiles of queries that see keys first .. last. Queries beyond the last one are zeros and add nothing, so the last tile may be
// whole. Keys beyond the last one would have a weight.
template <int kTile, class Visibility>
constexpr __host__ __device__ TileRanges query_tiles(const Visibility& sees, int first, int last) {
  const Range of_first = sees.queries_of(first), of_last = sees.queries_of(last);
  Range whole = tiles_within<kTile>({of_last.begin, of_first.end});
  if (of_first.end == sees.n) whole.end = tiles_with<kTile>(of_first).end;
  return {tiles_with<kTile>({of_first.begin, of_last.end}), whole};
}

// n queries and m keys. Query i sees all keys or, if causal, the keys up to i + offset. With offset = m - n both sequences end
// together.
struct DenseVisibility {
  static constexpr bool kBoundsBothSides = false, kMayDecay = false, kHasTables = false;
  int n, m, offset;
  bool causal;

  constexpr __host__ __device__ DenseVisibility(int n, int m, int offset, bool causal) : n(n), m(m), offset(offset), causal(causal) {}
  constexpr __host__ __device__ DenseVisibility(const Problem& p, int /*state*/)
      : DenseVisibility(p.n, p.m, p.causal_offset, p.causal) {}

  // For any query, including those beyond the last one. If a query comes before all keys, its range is empty and the end may be
  // negative.
  constexpr __host__ __device__ Range keys_of(int query) const {
    const int diagonal = query + offset + 1;
    return {0, causal && diagonal < m ? diagonal : m};
  }
  constexpr __host__ __device__ Range queries_of(int key) const {
    const int diagonal = key - offset;
    return {causal && diagonal > 0 ? diagonal : 0, n};
  }

  // Whether a query sees a key, in two forms. In each, the range belongs to the row's token, so that a loop over streamed
  // tokens does not recompute it.
  constexpr __host__ __device__ bool query_sees(int query, int key) const { return key < keys_of(query).end; }
  constexpr __host__ __device__ bool key_is_seen(int key, int query) const { return query >= queries_of(key).begin; }
};

// A window without other bounds: query i sees keys i + offset - left .. i + offset + right.
struct WindowVisibility {
  static constexpr bool kBoundsBothSides = true, kMayDecay = false, kHasTables = false;
  int n, m, offset, left, right;

  constexpr __host__ __device__ WindowVisibility(int n, int m, int offset, int left, int right)
      : n(n), m(m), offset(offset), left(left), right(right) {}
  constexpr __host__ __device__ WindowVisibility(const Problem& p, int /*state*/)
      : WindowVisibility(p.n, p.m, p.causal_offset, p.left, p.right) {}

  // For windows outside the keys the end may be negative and lie before the begin.
  constexpr __host__ __device__ Range keys_of(int query) const {
    const int position = query + offset, begin = position - left, end = position + right + 1;
    return {begin > 0 ? begin : 0, end < m ? end : m};
  }
  constexpr __host__ __device__ Range queries_of(int key) const {
    const int position = key - offset;
    return {query_at(position - right), query_at(position + left + 1)};
  }

 private:
  constexpr __host__ __device__ int query_at(int position) const { return position < 0 ? 0 : position < n ? position : n; }
};

// Ranges from tables: packed sequences, windows, resets and full decay. With valid bounds of keys the ranges never decrease.
// With other values they may, and kernels must end all the same. In every table, ranges of keys begin in [0, m] and end by m,
// and ranges of queries lie in [0, n].
struct TableVisibility {
  static constexpr bool kBoundsBothSides = true, kMayDecay = true, kHasTables = true;
  const AttentionParams& p;
  int state, n;  // state: key/value head over the whole batch

  __host__ __device__ TableVisibility(const AttentionParams& p, int state) : p(p), state(state), n(p.n) {}

  // Tokens beyond the last one have its range. The forward has no table of queries.
  __host__ __device__ Range keys_of(int query) const { return load(p.key_table, p.n, query); }
  __host__ __device__ Range queries_of(int key) const { return load(p.query_table, p.m, key); }

  __host__ __device__ bool query_sees(int query, int key) const { return keys_of(query).contains(key); }
  __host__ __device__ bool key_is_seen(int key, int query) const { return queries_of(key).contains(query); }

 private:
  __host__ __device__ Range load(const Range* table, int tokens, int token) const {
    const Range* range = table + static_cast<int64_t>(state) * tokens + (token < tokens ? token : tokens - 1);
#ifdef __CUDA_ARCH__
    const int2 x = __ldg(reinterpret_cast<const int2*>(range));
    return {x.x, x.y};
#else
    return *range;
#endif
  }
};

#ifdef __CUDACC__

// The visibility of a key/value head. Rebuilt for each tile, so that a loop holds the head's index but no pointers in
// registers.
template <class Visibility>
__device__ __forceinline__ Visibility visibility_of(const AttentionParams& p, int state) {
  return Visibility(p, Visibility::kMayDecay ? static_cast<int>(ptx::keep_in_register(state)) : 0);
}

// How many keys of a tile the padding mask keeps.
enum class Kept { kNone, kSome, kAll };

// Keys that the padding mask keeps in the batch entry of this block. The blocks of a batch entry are contiguous. The entry is
// computed when a mask is read, so that loops hold no register for it. Without a mask all keys are kept. Params: FwdParams or
// BwdParams.
template <class Params>
struct KeptKeys {
  const Params& p;
  unsigned blocks_per_batch;

  __device__ __forceinline__ KeptKeys(const Params& p, unsigned blocks_per_batch) : p(p), blocks_per_batch(blocks_per_batch) {}

  __device__ __forceinline__ bool keeps_all() const { return p.attention_mask == nullptr; }
  __device__ __forceinline__ const uint8_t* mask() const {
    return p.attention_mask + blockIdx.x / ptx::keep_in_register(blocks_per_batch) * p.mask_batch_stride;
  }

  // How many of the keys [begin, begin + kKeys) are kept. Keys beyond the last one are not. Called by whole warps.
  template <int kKeys>
  __device__ __forceinline__ Kept tile(int begin) const {
    if (keeps_all()) return Kept::kAll;
    const uint8_t* mask = this->mask();
    bool some = false, all = true;
#pragma unroll
    for (int i = 0; i < kKeys; i += kWarpSize) {
      const int key = begin + i + lane_index() % (kKeys < kWarpSize ? kKeys : kWarpSize);
      const bool kept = key < p.m && mask[key] != 0;
      some = some || kept, all = all && kept;
    }
    return __all_sync(0xffffffffu, all) ? Kept::kAll : __any_sync(0xffffffffu, some) ? Kept::kSome : Kept::kNone;
  }

  // A bit for each of the 16 keys from `begin` on, set if it is kept; higher bits are undefined. Called by whole warps.
  __device__ __forceinline__ uint32_t slab(int begin) const {
    if (keeps_all()) return 0xffffffffu;
    const int key = begin + lane_index() % 16;
    return __ballot_sync(0xffffffffu, key < p.m && mask()[key] != 0);
  }

  // Trims a range of keys to the first and the last one that is kept: most masks drop keys at the ends. Called by all kThreads
  // threads of a block. scratch: 8 bytes of shared memory, free again on return.
  template <int kThreads>
  __device__ __forceinline__ Range trim(Range keys, int* scratch) const {
    if (keeps_all() || keys.end <= keys.begin) return keys;
    const uint8_t* mask = this->mask();
    if (threadIdx.x == 0) scratch[0] = keys.end, scratch[1] = keys.begin;
    __syncthreads();
    Range kept{keys.end, keys.begin};
#pragma unroll 8
    for (int key = keys.begin + static_cast<int>(threadIdx.x); key < keys.end; key += kThreads) {
      if (mask[key] != 0) kept = {min(kept.begin, key), key + 1};
    }
    kept = {__reduce_min_sync(0xffffffffu, kept.begin), __reduce_max_sync(0xffffffffu, kept.end)};
    if (lane_index() == 0) atomicMin(scratch, kept.begin), atomicMax(scratch + 1, kept.end);
    __syncthreads();
    kept = {scratch[0], scratch[1]};
    __syncthreads();
    return kept;
  }
};

#endif

}  // namespace fastmax
