// The order in which persistent blocks process work tiles. A work tile is a block of rows of one head.
//
// Blocks take units of work tiles in rounds. Every second round runs in reverse order: the block that had the longest unit of
// one round gets the shortest unit of the next.
//
// With a causal mask the work tiles of a head take 1, 2, 3, .. units of time. Most heads are processed two at a time, and a
// unit is a pair of work tiles: the longest with the shortest, the second longest with the second shortest, and so on. All
// units then take equally long, whichever round is the last, and the few heads that are read at a time stay in L2. The last
// heads, enough for several rounds, are processed together as single work tiles, longest first, so that the blocks finish at
// about the same time. If all work tiles take equally long, heads are processed one after the other.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastmax {

struct WorkTile {
  int row_block;
  int head;  // index over batch * heads
};

struct WorkOrder {
  int row_blocks;        // per head
  int heads;             // over the whole batch
  bool triangular;       // whether work tiles take longer from row block to row block (causal)
  int paired_heads;      // number of leading heads that are processed in pairs, even
  bool last_rows_first;  // whether the last rows take longest (queries); else the first rows do (keys)

  static constexpr int kRoundsAtEnd = 5;  // rounds of single work tiles

  // blocks: number of blocks that run at a time.
  static WorkOrder of(int row_blocks, int64_t heads, int blocks, bool triangular, bool last_rows_first) {
    constexpr int kMostWorkTiles = INT_MAX / 2;  // unit() exceeds the count in the last round
    const int64_t work_tiles = row_blocks * heads;
    if (work_tiles > kMostWorkTiles) throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(work_tiles));
    const int64_t at_end = (kRoundsAtEnd * blocks + row_blocks - 1) / row_blocks;
    const int64_t paired = triangular ? std::max<int64_t>(heads - at_end, 0) / 2 * 2 : 0;
    return {row_blocks, static_cast<int>(heads), triangular, static_cast<int>(paired), last_rows_first};
  }
  constexpr __host__ __device__ int work_tiles() const { return row_blocks * heads; }
  constexpr __host__ __device__ int pairs() const { return row_blocks * (paired_heads / 2); }
  constexpr __host__ __device__ int units() const { return work_tiles() - pairs(); }
};

#ifdef __CUDACC__

// Iterates over the work tiles of this block.
//    for (WorkTileLoop loop(order); !loop.done(); loop.next()) ... loop.work_tile()
class WorkTileLoop {
 public:
  explicit __device__ __forceinline__ WorkTileLoop(const WorkOrder& order) : order_(order) {}

  __device__ __forceinline__ bool done() const { return unit() >= order_.units(); }
  __device__ __forceinline__ void next() { step_ += unit() < order_.pairs() ? 1 : 2; }
  __device__ __forceinline__ WorkTile work_tile() const {
    const int pairs = order_.pairs();
    if (unit() < pairs) {
      const int rank = unit() % order_.row_blocks, first_head = unit() / order_.row_blocks * 2;
      if ((step_ & 1) == 0) return work_tile_at(rank / 2, first_head + rank % 2);
      return work_tile_at(order_.row_blocks - 1 - rank / 2, first_head + 1 - rank % 2);
    }
    const int single = unit() - pairs, heads = order_.heads - order_.paired_heads;
    if (!order_.triangular) return work_tile_at(single % order_.row_blocks, single / order_.row_blocks);
    return work_tile_at(single / heads, order_.paired_heads + single % heads);
  }

 private:
  const WorkOrder& order_;
  int step_ = 0;  // two steps per round: the first and the second work tile of a pair

  __device__ __forceinline__ int unit() const {
    const int round = step_ >> 1, blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    return round * blocks + ((round & 1) != 0 ? blocks - 1 - block : block);
  }
  // rank: position in the order from longest to shortest work tile of the head.
  __device__ __forceinline__ WorkTile work_tile_at(int rank, int head) const {
    return {order_.last_rows_first ? order_.row_blocks - 1 - rank : rank, head};
  }
};

#endif

}  // namespace fastmax
