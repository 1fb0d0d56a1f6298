// The operands of a block of x rows as one stream of shared-memory stages: the octet pairs of the snapshot before its chunk (second moment
// of y, first order, tiles), then the intra-chunk rows of y and their values.
#pragma once

#include "linear/order2/features.h"

namespace fastmax {

// A block's x rows: `rows` of one x head from `row` on, all in one chunk. Blocks with the most intra-chunk rows come first.
struct RowBlock {
  int x_head_index;  // (batch, x head) flattened
  int batch, x_head, kv_head;
  int row, rows, chunk;
  int64_t slot;  // of the chunk's snapshot

  __device__ __forceinline__ RowBlock(const LinearProblem& p, int rows, int row_blocks) : rows(rows) {
    const int x_heads = p.state_heads * p.x_group;
    x_head_index = static_cast<int>(blockIdx.x) / row_blocks;
    batch = x_head_index / x_heads, x_head = x_head_index % x_heads, kv_head = x_head / p.x_group;
    row = (row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks) * rows;
    chunk = row / p.chunk;
    slot = p.slot(static_cast<int64_t>(batch) * p.state_heads + kv_head, chunk);
  }
};

// Blocks n and n + 1 of the sums of every row tile += its rows a times b0 and b1.
template <class Math, int kRowTiles, int kBlocks8>
__device__ __forceinline__ void mma_row_tiles(float (&sums)[kRowTiles][kBlocks8][4], int n, const WeightsA<Math> (&a)[kRowTiles],
                                              const WeightsB<Math>& b0, const WeightsB<Math>& b1) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    mma_weights<Math>(sums[m][n], a[m], b0);
    mma_weights<Math>(sums[m][n + 1], a[m], b1);
  }
}

// kThreads: of a block; some have fewer. kHasDecay: whether the pass has decays. kAdds: a state is added to the snapshot, stage by stage;
// every thread adds to what it copied itself, before the barrier that publishes it. Only without decays and in blocks of kThreads.
template <class Math, int kHeadDim, int kStages, int kThreads, bool kHasDecay, bool kAdds = false>
struct RowStream {
  using Layout = StateLayout<Math, kHeadDim>;
  using Stage = StreamStage<Math, kHeadDim>;
  using Element = typename Math::Element;
  static constexpr int kTilePairs = 4 * Stars<kHeadDim>::kTiles;
  static constexpr int kTileStages = (kTilePairs + Stage::kPairs - 1) / Stage::kPairs;

  const LinearProblem& p;
  const View &y, &values;
  const RowMask& mask;
  const RowScale& scale;
  const RowBlock& at;
  const char* snapshot;
  const char* added = nullptr;  // the state that is added to the snapshot
  uint32_t ring;
  uint32_t added_ring = 0;         // a stage less than the ring
  int first_pair;                  // of the snapshot's plain pairs, those before the tiles
  int state_stages, total_stages;  // of the snapshot, and with the intra-chunk ones
  int stage = 0;                   // the next one

  // moment: whether the second moment of y is wanted.
  __device__ __forceinline__ RowStream(const LinearProblem& p, const View& y, const View& values, const RowMask& mask,
                                       const RowScale& scale, const void* snapshots, const RowBlock& at, bool moment, uint32_t ring)
      : p(p), y(y), values(values), mask(mask), scale(scale), at(at), ring(ring) {
    snapshot = static_cast<const char*>(snapshots) + at.slot * Layout::words(p.order) * Layout::kWordBytes;
    first_pair = moment ? Layout::kMomentPair : Layout::kLinearPair;
    state_stages = p.has_state(at.chunk) ? plain_stages() + (p.order == 2 ? kTileStages : 0) : 0;
    const int own_end = min(p.seen_end(at.row + at.rows), p.y_end());
    const int keys = p.causal ? max(own_end - own_begin(), 0) : 0;
    total_stages = state_stages + (keys + Stage::kKeys - 1) / Stage::kKeys * p.y_group;
  }

  // Before begin(). states: [state], a snapshot each.
  __device__ __forceinline__ void add(const void* states, uint32_t ring_of_added) {
    const int64_t state = static_cast<int64_t>(at.batch) * p.state_heads + at.kv_head;
    added = static_cast<const char*>(states) + state * Layout::words(p.order) * Layout::kWordBytes;
    added_ring = ring_of_added;
  }
  __device__ __forceinline__ uint32_t added_stage(int index) const { return added_ring + index % (kStages - 1) * Stage::kStateBytes; }

  // Octet pairs of a stage of the snapshot.
  __device__ __forceinline__ int stage_pair(int index) const {
    const int tile_stage = index - plain_stages();
    return tile_stage < 0 ? first_pair + index * Stage::kPairs : Layout::kTilePair + tile_stage * Stage::kPairs;
  }
  __device__ __forceinline__ int stage_state_bytes(int index, int pair) const {
    const int end = index < plain_stages() ? Layout::kTilePair : state_pairs(kHeadDim, 2);
    return min(Stage::kPairs, end - pair) * Layout::kPairBytes;
  }

  // Adds kCount pieces of 16 bytes, as this thread copied them; all loads first, as nothing else hides how long they take.
  template <int kCount>
  __device__ __forceinline__ static void add_pieces(uint32_t to, uint32_t from) {
    constexpr int kStep = kThreads * 16;
    uint32_t x[kCount][4], y[kCount][4];
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::load_shared_u32x4(x[i], to + i * kStep), ptx::load_shared_u32x4(y[i], from + i * kStep);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[i][e] = add_bf16x2(x[i][e], y[i][e]);
      ptx::store_shared_u32x4(to + i * kStep, x[i]);
    }
  }
  // Adds the state to stage `index`, whose copies by this thread have arrived; nothing to stages behind the snapshot.
  __device__ __forceinline__ void add_to_stage(int index) const {
    if constexpr (kAdds) {
      if (index >= state_stages) return;
      const uint32_t to = ring + index % kStages * Stage::kBytes + threadIdx.x * 16, from = added_stage(index) + threadIdx.x * 16;
      const int bytes = stage_state_bytes(index, stage_pair(index));
      for (int i = 0; i < bytes; i += kThreads * 16) add_pieces<1>(to + i, from + i);
    }
  }
  __device__ __forceinline__ void add_to_tiles(int index) const {
    if constexpr (kAdds) {
      static_assert(kCopyAmongProducts && kCopies % 4 == 0, "whole stages, by all threads");
      const uint32_t to = ring + index % kStages * Stage::kBytes + threadIdx.x * 16, from = added_stage(index) + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < kCopies; i += 4) add_pieces<4>(to + i * kThreads * 16, from + i * kThreads * 16);
    }
  }

  // The virtual row of the chunk's first y row.
  __device__ __forceinline__ int own_begin() const { return p.chunk_begin(at.chunk); }
  __device__ __forceinline__ int plain_pairs() const { return Layout::kTilePair - first_pair; }
  __device__ __forceinline__ int moment_pairs() const { return Layout::kLinearPair - first_pair; }
  __device__ __forceinline__ int plain_stages() const { return (plain_pairs() + Stage::kPairs - 1) / Stage::kPairs; }

  // The first row of an intra-chunk stage, counted from the chunk's first; the y heads of a group take turns.
  __device__ __forceinline__ int k_start(int key_stage) const {
    return (p.y_group == 1 ? key_stage : key_stage / p.y_group) * Stage::kKeys;
  }
  __device__ __forceinline__ int key_stages() const { return total_stages - state_stages; }

  __device__ __forceinline__ void load(int index) const {
    const uint32_t dst = ring + index % kStages * Stage::kBytes;
    if (index < state_stages) {
      const int pair = stage_pair(index), bytes = stage_state_bytes(index, pair);
      load_bytes_async(dst, snapshot + int64_t{pair} * Layout::kPairBytes, bytes);
      if constexpr (kAdds) load_bytes_async(added_stage(index), added + int64_t{pair} * Layout::kPairBytes, bytes);
    } else if (index < total_stages) {
      const int key_stage = index - state_stages;
      const int key = k_start(key_stage);
      const int y_head = at.kv_head * p.y_group + key_stage - key / Stage::kKeys * p.y_group;
      const int row = p.y_row(own_begin() + key);
      const Element* y_rows = head_pointer<Element>(y, at.batch, y_head);
      const Element* value_rows = head_pointer<Element>(values, at.batch, y_head);
      if (mask.data == nullptr && blockDim.x == kThreads) {
        const TileLoader<Element, Stage::kKeys, kHeadDim, kThreads> loader(ptx::keep_in_register(threadIdx.x));  // not in registers between stages
        loader.load(dst, y_rows, y.token, row, p.ny, p.d);
        loader.load(dst + Stage::kValueOffset, value_rows, values.token, row, p.ny, p.dv);
      } else {
        const uint8_t* row_mask = mask_pointer(mask, at.batch);
        load_masked_tile_async<Element, Stage::kKeys, kHeadDim>(dst, y_rows, y.token, row, p.ny, p.d, row_mask, mask.token);
        load_masked_tile_async<Element, Stage::kKeys, kHeadDim>(dst + Stage::kValueOffset, value_rows, values.token, row, p.ny, p.dv,
                                                                row_mask, mask.token);
      }
      if (scale.data != nullptr && threadIdx.x < Stage::kKeys) {
        const float* e = scale.data + (static_cast<int64_t>(at.batch) * p.state_heads * p.y_group + y_head) * scale.head;
        const int source = row + static_cast<int>(threadIdx.x);
        const bool inside = source < p.ny;
        ptx::cp_async_small<4>(dst + Stage::kScaleOffset + threadIdx.x * 4,
                               inside ? e + static_cast<int64_t>(source) * scale.token : e, inside ? 4 : 0);
      }
      if (kHasDecay && threadIdx.x < Stage::kKeys) {
        const int64_t state = static_cast<int64_t>(at.batch) * p.state_heads + at.kv_head;
        ptx::cp_async_small<8>(dst + Stage::kDecayOffset + threadIdx.x * 8,
                               p.decay.address(p, state, row + static_cast<int>(threadIdx.x)), 8);
      }
    }
    ptx::cp_async_commit();
  }

  // Starts the stream; copies begun before this are complete at the first stage, or here if there is none.
  __device__ __forceinline__ void begin() {
    for (int i = 0; i < kStages - 1; ++i) load(i);
    if (total_stages == 0) {
      ptx::cp_async_wait<0>();
      __syncthreads();
    }
  }

  // The address of the next stage; the one before it is given up.
  __device__ __forceinline__ uint32_t next() {
    ptx::cp_async_wait<kStages - 2>();
    add_to_stage(stage);
    __syncthreads();
    load(stage + kStages - 1);
    return ring + stage++ % kStages * Stage::kBytes;
  }

  // The same for tiles, in three calls, so that nothing but the barrier stands before their products: next_tiles(), then
  // copy_tiles() among the products, with `begins` where they are a stage's first, and after the last tile end_tiles(). Only where
  // a stage is one or two tiles: with more or less the copies cost as much as they hide, and next_tiles() makes them.
  static constexpr int kCopies = Stage::kPairs * Stage::kPairBytes / (16 * kThreads);
  static constexpr bool kCopyAmongProducts = (Stage::kPairs == 4 || Stage::kPairs == 8) && kCopies <= 8;
  __device__ __forceinline__ bool copies_among_products() const { return kCopyAmongProducts && blockDim.x == kThreads; }

  __device__ __forceinline__ uint32_t next_tiles() {
    // One group a stage, since waits count groups: the copies since the last call; or load()'s, and an empty one past the last stage.
    if (kCopyAmongProducts) ptx::cp_async_commit();
    ptx::cp_async_wait<kStages - 2>();
    add_to_tiles(stage);
    __syncthreads();
    if (!copies_among_products()) {
      if (stage + kStages - 1 < state_stages) load(stage + kStages - 1);
      else if (!kCopyAmongProducts) ptx::cp_async_commit();
    }
    return ring + stage++ % kStages * Stage::kBytes;
  }

  __device__ __forceinline__ void copy_tiles(bool begins) const {
    if constexpr (kCopyAmongProducts) {
      static_assert(kTilePairs % Stage::kPairs == 0 && Stage::kPairs * Stage::kPairBytes % (16 * kThreads) == 0,
                    "stages are whole, and a whole number of copies");
      const int index = stage + kStages - 2, pair = Layout::kTilePair + (index - plain_stages()) * Stage::kPairs;
      const bool enabled = begins && index < state_stages && copies_among_products();
      const auto copy = [&](uint32_t dst, const char* from) {
        const char* src = from + int64_t{pair} * Layout::kPairBytes + threadIdx.x * 16;
        dst += threadIdx.x * 16;
#pragma unroll
        for (int i = 0; i < kCopies; ++i) {
          if (enabled) ptx::cp_async_16(dst + i * kThreads * 16, src + i * kThreads * 16, 16);
        }
      };
      copy(ring + index % kStages * Stage::kBytes, snapshot);
      if constexpr (kAdds) copy(added_stage(index), added);
    }
  }

  __device__ __forceinline__ void end_tiles() const {
    for (int i = 0; i < kStages - 1; ++i) load(state_stages + i);
  }
};

}  // namespace fastmax
