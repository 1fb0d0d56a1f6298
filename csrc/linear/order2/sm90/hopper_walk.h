// Shared by the Hopper kernels of order 2: tiles of rows in memory, work tiles of blocks, decays of tiles.
//
// Rows come in tiles of 64. A tile is copied in the order of tokens. Reversed rows go over the tiles from the last tokens to the first, and
// within a tile the later rows come first. Rows before the first token or behind the last one arrive as zeros and are not written.
#pragma once

#include <cstddef>
#include <type_traits>

#include "core/sm90/tensor_map.h"
#include "core/sm90/tiles.h"
#include "linear/linear.h"
#include "linear/order2/sm90/snapshot.h"
#ifdef __CUDACC__
#include "linear/order2/features.h"
#include "linear/ptx.h"
#endif

namespace fastmax {

template <int kHeadDim>
using RowTileSm90 = SwizzledTile<kTileRows, kHeadDim>;

inline constexpr int kScaleBytes = kTileRows * 4;  // e of a tile's rows

// The work tiles (items) of a launch: `rows` rows of x of one head in one chunk. Work tiles with the most intra-chunk rows come first, all
// heads side by side. Computed by the launcher: kernel arguments take no registers.
struct ItemsOfRows {
  int rows, pieces, heads, count;

  ItemsOfRows(const LinearProblem& p, int rows)
      : rows(rows), pieces((p.nx + rows - 1) / rows), heads(p.states() * p.x_group), count(pieces * heads) {}

#ifdef __CUDACC__
  struct Item {
    int x_head_index;  // (batch, x head) flattened
    int batch, x_head, state_head;
    int row, chunk;
    int first_own;  // tiles of the chunk before this work tile
    int own_tiles;  // intra-chunk tiles that its rows see
    int64_t slot;   // of the chunk's snapshot
  };
  __device__ __forceinline__ Item at(const LinearProblem& p, int index) const {
    const int x_heads = p.state_heads * p.x_group;
    Item item;
    item.x_head_index = index % heads;
    item.batch = item.x_head_index / x_heads, item.x_head = item.x_head_index % x_heads;
    item.state_head = item.x_head / p.x_group;
    item.row = (pieces - 1 - index / heads) * rows;
    item.chunk = item.row / p.chunk;
    item.first_own = (item.row - item.chunk * p.chunk) / kTileRows;
    const int own_end = min(p.seen_end(min(item.row + rows, p.nx)), p.y_end());
    item.own_tiles = p.causal ? (max(own_end - p.chunk_begin(item.chunk), 0) + kTileRows - 1) / kTileRows : 0;
    item.slot = p.slot(item.batch * p.state_heads + item.state_head, item.chunk);
    return item;
  }
#endif
};

// The same where states lag (core/sequence.h): more intra-chunk tiles.
struct LaggingItemsOfRows : ItemsOfRows {
  using ItemsOfRows::ItemsOfRows;

#ifdef __CUDACC__
  __device__ __forceinline__ Item at(const LinearProblem& p, int index) const {
    Item item = ItemsOfRows::at(p, index);
    item.first_own += p.lag / kTileRows;
    const int own_end = min(p.seen_end(min(item.row + rows, p.nx)) + p.lag, p.y_end());
    item.own_tiles = (max(own_end - p.chunk_begin(item.chunk), 0) + kTileRows - 1) / kTileRows;
    return item;
  }
#endif
};
template <bool kLags>
using ItemsOf = std::conditional_t<kLags, LaggingItemsOfRows, ItemsOfRows>;

#ifdef __CUDACC__
// The first address for tiles in dynamic shared memory.
__device__ __forceinline__ uint32_t first_tile(const void* shared) {
  return (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) / kSwizzledTileAlignment * kSwizzledTileAlignment;
}

// The first token of the tile of rows [row, row + 64) of x or y, `rows` of them in all.
__device__ __forceinline__ int tile_token(const Sequence& s, int rows, int row) {
  return s.time == Time::kForward ? row : rows - row - kTileRows;
}

// Words of a block of columns of x, of rows `row` and row + 8, for products within the block (snapshot.h): this lane's columns 2t and the
// next, and those of the next two lanes.
template <class RowTile>
struct BlockColumns {
  uint32_t words[2][3];

  __device__ __forceinline__ void load(uint32_t x_tile, int row, int block, int t) {
    const uint32_t address = x_tile + RowTile::chunk_offset(row, block);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int i = 0; i < 3; ++i) words[r][i] = ptx::load_shared_u32(address + (t + i) % 4 * 4 + 8 * r * RowTile::kRowBytes);
    }
  }
  // Features of a diagonal tile: this lane's columns times those at a distance from them.
  __device__ __forceinline__ uint32_t product(int r, int distance) const {
    const uint32_t first = words[r][distance / 2];
    return ptx::multiply_bf16x2(words[r][0], distance % 2 == 0 ? first : ptx::pair_of_inner(first, words[r][distance / 2 + 1]));
  }
};

// The same for the opposite columns of all blocks: of each octet, two columns of one of its two blocks, and those that are opposite.
template <class RowTile>
struct OppositeColumns {
  static constexpr int kOctets = RowTile::kPanelCols / 16;
  uint32_t words[2][kOctets][2];

  __device__ __forceinline__ void load(uint32_t x_tile, int row, int t) {
#pragma unroll
    for (int octet = 0; octet < kOctets; ++octet) {
      const uint32_t address = x_tile + RowTile::chunk_offset(row, 2 * octet + t / 2);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          words[r][octet][i] = ptx::load_shared_u32(address + (t + 2 * i) % 4 * 4 + 8 * r * RowTile::kRowBytes);
        }
      }
    }
  }
  __device__ __forceinline__ uint32_t product(int r, int octet) const {
    return ptx::multiply_bf16x2(words[r][octet][0], words[r][octet][1]);
  }
};

// Decays of a call: none; to 0 at the bounds of packed sequences; of all rows; the same with the sums of pairs for their gradient.
enum class DecayKind { kNone, kBounds, kDecays, kDecaysAndSums };

// Decays of the 64 rows of y from a virtual row on, and of the rows of x that see them as their last ones.
__device__ __forceinline__ const DecayTile* decay_tile(const LinearProblem& p, int64_t state, int virtual_row) {
  static_assert(kTileRows == kDecayTile, "the same tiles");
  return p.decay.tiles + state * p.decay.tile_count + virtual_row / kDecayTile;
}
__device__ __forceinline__ const DecayTile* x_decay_tile(const LinearProblem& p, int64_t state, int virtual_row) {
  return p.decay.x_tiles + state * p.decay.tile_count + virtual_row / kDecayTile;
}
// Decays of a tile of y that begins at a token.
__device__ __forceinline__ const DecayTile* decay_tile_at(const LinearProblem& p, int64_t state, int token) {
  return decay_tile(p, state, p.pad + (p.time == Time::kForward ? token : p.ny - kTileRows - token));
}

// Reads a DecayTile in shared memory or in global memory.
struct SharedDecayTile {
  static constexpr bool kLoadsEarly = false;
  uint32_t address;

  __device__ __forceinline__ WalkSum sum(int row) const { return {ptx::load_shared_f32x2(address + offsetof(DecayTile, sums) + 8 * row)}; }
  __device__ __forceinline__ float4 sums(int row) const { return ptx::load_shared_f32x4(address + offsetof(DecayTile, sums) + 8 * row); }
  __device__ __forceinline__ float2 until_end(int row) const {
    return ptx::load_shared_f32x2(address + offsetof(DecayTile, until_end) + 4 * row);
  }
  __device__ __forceinline__ bool is_taken(int row) const {
    return __float_as_int(ptx::load_shared_f32(address + offsetof(DecayTile, until_end) + 4 * row)) >= 0;
  }
  __device__ __forceinline__ float since_chunk(int row) const {
    return ptx::load_shared_f32(address + offsetof(DecayTile, since_chunk) + 4 * row);
  }
  __device__ __forceinline__ float gate(int row) const { return ptx::load_shared_f32(address + offsetof(DecayTile, gates) + 4 * row); }
  __device__ __forceinline__ float2 gates(int row) const {
    return ptx::load_shared_f32x2(address + offsetof(DecayTile, gates) + 4 * row);
  }
};
struct GlobalDecayTile {
  static constexpr bool kLoadsEarly = true;
  const DecayTile* tile;

  __device__ __forceinline__ WalkSum sum(int row) const { return {__ldg(tile->sums + row)}; }
  __device__ __forceinline__ float4 sums(int row) const { return __ldg(reinterpret_cast<const float4*>(tile->sums + row)); }
  __device__ __forceinline__ float2 until_end(int row) const { return __ldg(reinterpret_cast<const float2*>(tile->until_end + row)); }
  __device__ __forceinline__ bool is_taken(int row) const { return __float_as_int(__ldg(tile->until_end + row)) >= 0; }
  __device__ __forceinline__ float since_chunk(int row) const { return __ldg(tile->since_chunk + row); }
  __device__ __forceinline__ float gate(int row) const { return __ldg(tile->gates + row); }
  __device__ __forceinline__ float2 gates(int row) const { return __ldg(reinterpret_cast<const float2*>(tile->gates + row)); }
};

// G of a row of x, or K where it is a key.
template <bool kBack, DecayKind kDecayKind, class Tile>
__device__ __forceinline__ WalkSum gated_sum(const Decay& decay, const Tile& x, int row) {
  WalkSum sum = x.sum(row);
  if constexpr (kBack && kDecayKind != DecayKind::kBounds) {
    if (decay.is_gated()) sum.g.y += x.gate(row);
  }
  return sum;
}

// A tile's first and last row in the order of the pass.
template <bool kBack>
inline constexpr int kFirstOfTile = kBack ? kTileRows - 1 : 0;
template <bool kBack>
inline constexpr int kLastOfTile = kTileRows - 1 - kFirstOfTile<kBack>;

// Whether a tile that ends at `end` is fully decayed for a tile of x whose first row is `x`, both without gates: times the largest gate
// such factors are below the smallest sum that counts (PolynomialScore::kSmallestSum).
__device__ __forceinline__ bool is_fully_decayed(const WalkSum& x, const WalkSum& end) { return x.since(end) < -150.f; }

// Whether a tile decays so much that factors of its rows, with their gates, would be out of range (PairFactors::kRowsAndColumns).
template <bool kBack, class Tile>
__device__ __forceinline__ bool is_far(const Tile& y) {
  return !(y.sum(kLastOfTile<kBack>).since(y.sum(kFirstOfTile<kBack>)) > -64.f);
}
// Whether all decays between a tile of y and one of x, and within them, are 1. Only without gates.
template <bool kBack, class XTile, class YTile>
__device__ __forceinline__ bool is_whole(const XTile& x, const YTile& y) {
  return x.sum(kLastOfTile<kBack>).since(y.sum(kFirstOfTile<kBack>)) == 0.f;
}

// Decays of a lane's pairs: its rows of x with rows 8 j + 2 t and the next of a tile of y.
//   kOne              1
//   kRowsAndColumns   a factor per row of x times one per row of y, with the tile's end between them. Rows of x within the tile are before
//                     its end: their factors may be above 1, and are in range where no pair of the tile decays by more than 2^-64 (is_far)
//   kPairs            a factor per pair
enum class PairFactors { kOne, kRowsAndColumns, kPairs };

template <bool kBack, DecayKind kDecayKind, PairFactors kFactors, class Tile>
struct PairDecay {
  static constexpr bool kMayHaveGates = kDecayKind != DecayKind::kBounds;
  static constexpr bool kOfRows = kFactors == PairFactors::kRowsAndColumns, kOfPairs = kFactors == PairFactors::kPairs;
  static constexpr bool kLoadsEarly = Tile::kLoadsEarly && kOfRows;
  const Decay& decay;
  Tile y;
  WalkSum x[2];
  float left[2];
  float2 loaded[kLoadsEarly ? 8 : 1];

  // x0, x1: of the lane's rows of x (gated_sum).
  __device__ __forceinline__ PairDecay(const Decay& decay, const Tile& y, const WalkSum& x0, const WalkSum& x1)
      : decay(decay), y(y), x{x0, x1} {
    if constexpr (kOfRows) {
      const WalkSum end = y.sum(kLastOfTile<kBack>);
      left[0] = ptx::exp2_approx(x0.since(end)), left[1] = ptx::exp2_approx(x1.since(end));
    }
    if constexpr (kLoadsEarly) {
#pragma unroll
      for (int j = 0; j < 8; ++j) loaded[j] = y.until_end(8 * j + 2 * (threadIdx.x % 4));
    }
  }

  // Calls f(j, factors), factors[r][i].
  template <class F>
  __device__ __forceinline__ void for_each_block(const F& f) const {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float factors[2][2] = {{1.f, 1.f}, {1.f, 1.f}};
      if constexpr (kOfRows || kOfPairs) {
        float2 until;
        if constexpr (kLoadsEarly) until = loaded[j];
        else until = y.until_end(8 * j + 2 * t);
        float4 sums;
        if constexpr (kOfPairs) {
          sums = y.sums(8 * j + 2 * t);
          if (!kBack && kMayHaveGates && decay.is_gated()) {
            const float2 gates = y.gates(8 * j + 2 * t);
            sums.y -= gates.x, sums.w -= gates.y;
          }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          if constexpr (kOfRows) {
            factors[r][0] = left[r] * until.x, factors[r][1] = left[r] * until.y;
          } else {
            factors[r][0] = of_pair(x[r], make_float2(sums.x, sums.y), until.x);
            factors[r][1] = of_pair(x[r], make_float2(sums.z, sums.w), until.y);
          }
        }
      }
      f(j, factors);
    }
  }

 private:
  __device__ __forceinline__ float of_pair(const WalkSum& x, const float2& y, float until_end) const {
    return __float_as_int(until_end) < 0 ? 0.f : ptx::exp2_approx(fminf(x.since({y}), kMayHaveGates ? decay.largest : 0.f));
  }
};
template <PairFactors kFactors>
using OfPairFactors = std::integral_constant<PairFactors, kFactors>;

// Sources of a work tile's stages: first the tiles of its snapshot, then the intra-chunk tiles of y and of its values.
struct ItemSource {
  int state_stages = 0, own_stages = 0;  // intra-chunk tiles for every head of y; 0 where there is no such work tile
  int token = 0, y_head = 0, batch = 0;  // of the first intra-chunk tile
  const char* snapshot = nullptr;

  template <class Args, class Items>
  __device__ __forceinline__ ItemSource(const Args& p, const Items& items, int index, const void* snapshots, int snapshot_stages,
                                        int64_t snapshot_bytes) {
    if (index >= items.count) return;
    const ItemsOfRows::Item item = items.at(p, index);
    state_stages = p.has_state(item.chunk) ? snapshot_stages : 0, own_stages = item.own_tiles * p.y_group;
    token = tile_token(p, p.ny, p.y_row(p.chunk_begin(item.chunk)));
    y_head = item.state_head * p.y_group, batch = item.batch;
    snapshot = static_cast<const char*>(snapshots) + item.slot * snapshot_bytes;
  }
  __device__ __forceinline__ int64_t state(const LinearProblem& p) const { return int64_t{batch} * p.state_heads + y_head / p.y_group; }
};

// Prefetches the sums of a work tile's snapshot into the L2 cache: the state pass wrote them long ago. By one thread.
template <int kSums>
__device__ __forceinline__ void prefetch_sums(const LinearProblem& p, const float* sums, const ItemsOfRows::Item& item) {
  static_assert(kSums % 4 == 0, "a prefetch takes multiples of 16 bytes");
  if (p.has_state(item.chunk)) ptx::bulk_prefetch(sums + item.slot * kSums, kSums * 4);
}

// Sources of the next work tiles of a warp, in shared memory: warps that issue loads and compute are short of registers.
struct SourceQueue {
  static constexpr int kItems = 8;  // loads are at most so many work tiles ahead of products, as each has one stage at least
  static constexpr int kItemBytes = 32, kBytes = kItems * kItemBytes;
  uint32_t address;

  // With __syncwarp() before others read it.
  __device__ __forceinline__ void put(int item, const ItemSource& x) const {
    const uint32_t at = of(item);
    ptx::store_shared_u32(at, x.state_stages + x.own_stages), ptx::store_shared_u32(at + 4, x.state_stages);
    ptx::store_shared_u32(at + 8, x.token), ptx::store_shared_u32(at + 12, x.y_head), ptx::store_shared_u32(at + 16, x.batch);
    const uint64_t snapshot = reinterpret_cast<uint64_t>(x.snapshot);
    ptx::store_shared_u32(at + 24, static_cast<uint32_t>(snapshot)), ptx::store_shared_u32(at + 28, static_cast<uint32_t>(snapshot >> 32));
  }
  __device__ __forceinline__ int stages(int item) const { return word(item, 0); }  // 0: there is no such work tile
  __device__ __forceinline__ int state_stages(int item) const { return word(item, 1); }
  __device__ __forceinline__ int token(int item) const { return word(item, 2); }
  __device__ __forceinline__ int y_head(int item) const { return word(item, 3); }
  __device__ __forceinline__ int batch(int item) const { return word(item, 4); }
  __device__ __forceinline__ const char* snapshot(int item) const {
    uint32_t halves[2];
    ptx::load_shared_u32x2(halves, of(item) + 24);
    return reinterpret_cast<const char*>(static_cast<uint64_t>(halves[1]) << 32 | halves[0]);
  }

 private:
  __device__ __forceinline__ uint32_t of(int item) const { return address + item % kItems * kItemBytes; }
  __device__ __forceinline__ int word(int item, int i) const { return static_cast<int>(ptx::load_shared_u32(of(item) + 4 * i)); }
};

// The e of a tile of y: of reversed rows (PreparedInputs), or decayed (DecayArgs). Rows further before the first token are zeros, whatever
// their e is.
__device__ __forceinline__ const float* tile_scales(const RowScale& e, int tokens, int64_t head, int token) {
  return e.data + head * e.head + max(token, tokens - static_cast<int>(e.head));
}

// Stores a tile of results to a tensor, or adds it. By one thread.
template <class Tile>
__device__ __forceinline__ void store_tile(uint32_t tile, const CUtensorMap& map, int token, int head, int batch, bool adds) {
  if (adds) Tile::add(tile, map, token, head, batch);
  else Tile::store(tile, map, token, head, batch);
}

// The same to the rows of a head from `token` on, by the threads of a warpgroup. The copy engine writes no tile that begins before the
// first token.
template <int kHeadDim>
__device__ __forceinline__ void store_rows(uint32_t tile, const View& out, int batch, int head, int token, int tokens, int columns,
                                           bool adds) {
  constexpr int kChunks = kHeadDim / 8;
  auto* rows = reinterpret_cast<__nv_bfloat16*>(const_cast<void*>(out.data)) + batch * out.batch + head * out.head;
  for (int i = threadIdx.x % 128; i < kTileRows * kChunks; i += 128) {
    const int row = i / kChunks, chunk = i % kChunks;
    if (token + row < 0 || token + row >= tokens || 8 * chunk >= columns) continue;
    uint32_t x[4];
    ptx::load_shared_u32x4(x, tile + RowTileSm90<kHeadDim>::chunk_offset(row, chunk));
    uint4* result = reinterpret_cast<uint4*>(rows + (token + row) * out.token + 8 * chunk);
    if (adds) {
      const uint4 before = *result;
      x[0] = add_bf16x2(before.x, x[0]), x[1] = add_bf16x2(before.y, x[1]);
      x[2] = add_bf16x2(before.z, x[2]), x[3] = add_bf16x2(before.w, x[3]);
    }
    *result = make_uint4(x[0], x[1], x[2], x[3]);
  }
  ptx::fence_proxy_async();  // before the copy engine fills the tile again (pipeline.h)
}
#endif

// The tensor map of rows, for TMA.
template <int kHeadDim>
CUtensorMap rows_map(const View& x, const LinearProblem& p, int heads, int tokens, int columns) {
  return tensor_map({x.data, {x.batch, x.head, x.token}, p.batch, heads, tokens, columns, MathMode::kBF16}, kTileRows,
                    panel_cols(kHeadDim));
}

}  // namespace fastmax
