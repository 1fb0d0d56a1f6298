// What both kernels of the backward in one (fused_bwd.h, fused_bwd_narrow.h) do alike: they take blocks of keys from a counter,
// lay derivatives down for the product that is grad_q, and leave out what is not seen.
#pragma once

#include "core/sm90/pipeline.h"
#include "quadratic/sm90/bwd.h"
#include "quadratic/sm90/fused_bwd_plan.h"

namespace fastmax {

// A block of keys of a key/value head.
struct FusedBwdItem {
  int block, row, batch, head, first_head;  // row: its first key; first_head: of the query heads

  static __device__ __forceinline__ FusedBwdItem of(const Problem& p, const KeyBlockOrder& order, int number, int keys, int group) {
    const WorkItem item = order.item(number);
    const int head = item.head % p.hk;
    return {item.row_block, item.row_block * keys, item.head / p.hk, head, head * group};
  }
};

// Numbers of items, from the thread that takes them to all that work on them. From KeyBlockOrder::items() on there are no more.
template <int kItems>
struct FusedBwdItems {
  Ring<kItems> ring;
  uint32_t numbers;  // address of kItems of them

  // By one thread.
  __device__ __forceinline__ int take(uint32_t* taken, RingPosition& at) const {
    const int number = static_cast<int>(atomicAdd(taken, 1));
    ring.wait_until_empty(at);
    ptx::store_shared_u32(numbers + 4 * at.stage, number);
    ptx::mbarrier_arrive_if(ring.full(at), true);
    at.template advance<kItems>();
    return number;
  }
  // For warps, and for threads that come alone.
  __device__ __forceinline__ int next(RingPosition& at, int lane) const {
    const int number = warp_uniform(read(at));
    ring.release(at, lane);
    at.template advance<kItems>();
    return number;
  }
  __device__ __forceinline__ int next_alone(RingPosition& at) const {
    const int number = read(at);
    ptx::mbarrier_arrive_if(ring.empty(at), true);
    at.template advance<kItems>();
    return number;
  }

 private:
  __device__ __forceinline__ int read(RingPosition at) const {
    ring.wait_until_full(at);
    return static_cast<int>(ptx::load_shared_u32(numbers + 4 * at.stage));
  }
};

// dS of a warp's 16 keys, which are rows from first_row on of the tile.
template <class DerivativeTile, int kQueries>
__device__ __forceinline__ void store_derivatives(uint32_t tile, int first_row, const uint32_t (&packed_ds)[kQueries / 4], int lane) {
  const int matrix = lane >> 3, row = first_row + (matrix & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < kQueries / 8; j += 2) {
    const uint32_t* x = packed_ds + 2 * j;
    ptx::stmatrix_x4(tile + DerivativeTile::chunk_offset(row, j + (matrix >> 1)), x[0], x[1], x[2], x[3]);
  }
  ptx::fence_proxy_async();
}

// Queries of a tile that see key `row` of a lane, and the key 8 further; keeps: whether these are there, and not dropped.
template <int kWords>
__device__ __forceinline__ void visible_queries_of_kept(uint32_t (&visible)[2][kWords], const DenseVisibility& sees, int tile, int row,
                                                        int t, const bool (&keeps)[2]) {
  visible_queries(visible, sees, tile, row, t);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (uint32_t& word : visible[half]) word = keeps[half] ? word : 0;
  }
}

}  // namespace fastmax
