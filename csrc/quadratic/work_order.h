// Which rows of which head a persistent block works on, one after the other. Items are blocks of rows of a head.
//
// Heads come in groups whose keys and values (or queries and gradients) fit in L2 together. Within a group, items that see most come
// first, so that what is left for the end is short. Every second round of all blocks runs backwards: a block that had the longest item
// of a round gets the shortest one of the next.
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
  int row_blocks;  // of a head
  int heads;       // of all batch entries
  int heads_per_group;
  bool last_rows_first;  // those see most keys; of keys that see queries: the first ones

  static constexpr int64_t kBytesInL2 = int64_t{24} << 20;

  // stream_bytes: what the items of a head read beside their own rows.
  static WorkOrder of(int row_blocks, int64_t heads, int64_t stream_bytes, bool last_rows_first) {
    constexpr int kMostItems = INT_MAX / 2;  // the last round's numbers go beyond
    if (row_blocks * heads > kMostItems) throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(row_blocks * heads));
    const int64_t fitting = std::max<int64_t>(1, kBytesInL2 / std::max<int64_t>(1, stream_bytes));
    return {row_blocks, static_cast<int>(heads), static_cast<int>(std::min(heads, fitting)), last_rows_first};
  }
  constexpr __host__ __device__ int items() const { return row_blocks * heads; }
};

#ifdef __CUDACC__

// The items of this block.
//   for (WorkWalk walk(order); !walk.done(); walk.next()) ... walk.item()
class WorkWalk {
 public:
  explicit __device__ __forceinline__ WorkWalk(const WorkOrder& order) : order_(order) {}

  __device__ __forceinline__ bool done() const { return index() >= order_.items(); }
  __device__ __forceinline__ void next() { begin_ += static_cast<int>(gridDim.x), backwards_ = !backwards_; }
  __device__ __forceinline__ WorkItem item() const {
    const int group = index() / (order_.heads_per_group * order_.row_blocks), first_head = group * order_.heads_per_group;
    const int in_group = index() - first_head * order_.row_blocks, heads = min(order_.heads_per_group, order_.heads - first_head);
    const int rank = in_group / heads;
    return {order_.last_rows_first ? order_.row_blocks - 1 - rank : rank, first_head + in_group % heads};
  }

 private:
  const WorkOrder& order_;
  int begin_ = 0;  // of a round
  bool backwards_ = false;

  __device__ __forceinline__ int index() const {
    return begin_ + static_cast<int>(backwards_ ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
  }
};

#endif

}  // namespace fastmax
