// Which rows of which head a persistent block works on, one after the other. Items are blocks of rows of a head. Blocks take units of
// them in rounds, every second one backwards: a block that had the longest unit of a round gets the shortest one of the next.
//
// Causal items of a head take 1, 2, .. so long. Most heads come two at a time, and a unit is a pair of items, the longest with the
// shortest, the second with the second but one, ..: units are equally long, wherever a round ends, and few heads are read at a time,
// which L2 holds. The last heads, enough for several rounds, come together, longest items first, so that what is left for the end is
// short. Where items are equally long, heads come one by one.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fastmax {

struct WorkItem {
  int row_block;
  int head;  // of batch * heads
};

struct WorkOrder {
  int row_blocks;        // of a head
  int heads;             // of all batch entries
  bool triangular;       // rows see more from block to block
  int paired_heads;      // the first ones, an even number
  bool last_rows_first;  // those see most keys; of keys that see queries: the first ones

  static constexpr int kRoundsAtEnd = 5;  // of single items

  // blocks: that run at a time.
  static WorkOrder of(int row_blocks, int64_t heads, int blocks, bool triangular, bool last_rows_first) {
    constexpr int kMostItems = INT_MAX / 2;  // the last round's numbers go beyond
    const int64_t items = row_blocks * heads;
    if (items > kMostItems) throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(items));
    const int64_t at_end = (kRoundsAtEnd * blocks + row_blocks - 1) / row_blocks;
    const int64_t paired = triangular ? std::max<int64_t>(heads - at_end, 0) / 2 * 2 : 0;
    return {row_blocks, static_cast<int>(heads), triangular, static_cast<int>(paired), last_rows_first};
  }
  constexpr __host__ __device__ int items() const { return row_blocks * heads; }
  constexpr __host__ __device__ int pairs() const { return row_blocks * (paired_heads / 2); }
  constexpr __host__ __device__ int units() const { return items() - pairs(); }
};

#ifdef __CUDACC__

// The items of this block.
//   for (WorkWalk walk(order); !walk.done(); walk.next()) ... walk.item()
class WorkWalk {
 public:
  explicit __device__ __forceinline__ WorkWalk(const WorkOrder& order) : order_(order) {}

  __device__ __forceinline__ bool done() const { return unit() >= order_.units(); }
  __device__ __forceinline__ void next() { step_ += unit() < order_.pairs() ? 1 : 2; }
  __device__ __forceinline__ WorkItem item() const {
    const int pairs = order_.pairs();
    if (unit() < pairs) {
      const int rank = unit() % order_.row_blocks, first_head = unit() / order_.row_blocks * 2;
      if ((step_ & 1) == 0) return item_at(rank / 2, first_head + rank % 2);
      return item_at(order_.row_blocks - 1 - rank / 2, first_head + 1 - rank % 2);
    }
    const int single = unit() - pairs, heads = order_.heads - order_.paired_heads;
    if (!order_.triangular) return item_at(single % order_.row_blocks, single / order_.row_blocks);
    return item_at(single / heads, order_.paired_heads + single % heads);
  }

 private:
  const WorkOrder& order_;
  int step_ = 0;  // two a round: the first and the second item of a pair

  __device__ __forceinline__ int unit() const {
    const int round = step_ >> 1, blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
    return round * blocks + ((round & 1) != 0 ? blocks - 1 - block : block);
  }
  // rank: by length.
  __device__ __forceinline__ WorkItem item_at(int rank, int head) const {
    return {order_.last_rows_first ? order_.row_blocks - 1 - rank : rank, head};
  }
};

#endif

}  // namespace fastmax
