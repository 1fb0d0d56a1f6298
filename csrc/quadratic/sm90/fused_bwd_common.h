// Shared by the two fused backward kernels (fused_bwd.h, fused_bwd_narrow.h): the queue of work tiles, the store of dS for the
// product that gives grad_q, and the mask of visible pairs.
#pragma once

#include "core/sm90/pipeline.h"
#include "quadratic/sm90/bwd.h"
#include "quadratic/sm90/fused_bwd_plan.h"

namespace fastmax {

// A work tile: a block of keys of one key/value head.
struct FusedBwdWorkTile {
  int block, row, batch, head, first_head;  // row: first key of the block; first_head: first query head of the group

  static __device__ __forceinline__ FusedBwdWorkTile of(const Problem& p, const KeyBlockOrder& order, int number, int keys, int group) {
    const WorkTile work_tile = order.work_tile(number);
    const int head = work_tile.head % p.hk;
    return {work_tile.row_block, work_tile.row_block * keys, work_tile.head / p.hk, head, head * group};
  }
};

// Hands indices of work tiles from the thread that takes them to all threads that process them. An index of
// KeyBlockOrder::work_tiles() or more means that none is left.
template <int kWorkTiles>
struct FusedBwdQueue {
  Ring<kWorkTiles> ring;
  uint32_t indices;  // shared-memory address of kWorkTiles indices

  // Takes the next work tile and publishes its index. Called by one thread.
  __device__ __forceinline__ int take(uint32_t* taken, RingPosition& at) const {
    const int number = static_cast<int>(atomicAdd(taken, 1));
    ring.wait_until_empty(at);
    ptx::store_shared_u32(indices + 4 * at.stage, number);
    ptx::mbarrier_arrive_if(ring.full(at), true);
    at.template advance<kWorkTiles>();
    return number;
  }
  // Return the next index: `next` for whole warps, `next_alone` for single threads.
  __device__ __forceinline__ int next(RingPosition& at, int lane) const {
    const int number = warp_uniform(read(at));
    ring.release(at, lane);
    at.template advance<kWorkTiles>();
    return number;
  }
  __device__ __forceinline__ int next_alone(RingPosition& at) const {
    const int number = read(at);
    ptx::mbarrier_arrive_if(ring.empty(at), true);
    at.template advance<kWorkTiles>();
    return number;
  }

 private:
  __device__ __forceinline__ int read(RingPosition at) const {
    ring.wait_until_full(at);
    return static_cast<int>(ptx::load_shared_u32(indices + 4 * at.stage));
  }
};

// Stores dS of the 16 keys of a warp as rows of the tile, from first_row on.
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

// Marks the queries of a tile that see the key `row` of this lane and the key row + 8. keeps: whether these two keys exist and
// are unmasked.
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
