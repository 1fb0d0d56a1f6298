// Shared by the backward kernels: positions of blocks of keys, loads of streamed stages, and finishing functions for
// store_rows.
#pragma once

#include "core/fragments.h"
#include "core/heads.h"
#include "core/ptx.h"
#include "core/score.h"
#include "quadratic/portable/tile_config.h"
#include "quadratic/row_score.h"

namespace fastmax {

// Position of a block of keys.
struct KvPosition {
  int block_row, batch, kv_head;
};
template <int kRows>
__device__ __forceinline__ KvPosition kv_position(const BwdParams& p, unsigned block, int row_blocks) {
  const unsigned head = block / row_blocks;
  return {static_cast<int>(block % row_blocks) * kRows, static_cast<int>(head / p.hk), static_cast<int>(head % p.hk)};
}

// Loads the tiles of a stage. Blocks of keys stream q, grad_o and row scores; blocks of queries stream k and v.
template <class Tile, class Element, int kHeadDim>
using StreamLoader = TileLoader<Element, Tile::kStream, kHeadDim, Tile::kThreads>;

// The queries of one head, streamed by a block of keys.
template <class Element>
struct QueryStream {
  const Element* q;
  const Element* grad_o;
  int64_t grad_o_token;
  const float4* row_scores;

  __device__ __forceinline__ QueryStream(const BwdParams& p, const float4* all_row_scores, const void* grad_o_base,
                                         const Stride& grad_o_stride, int batch, int kv_head, int head_in_group) {
    const int head = kv_head * (p.h / p.hk) + head_in_group;
    q = head_of<Element>(p.q, p.q_stride, batch, head);
    grad_o = head_of<Element>(grad_o_base, grad_o_stride, batch, head);
    grad_o_token = grad_o_stride.token;
    row_scores = all_row_scores + (batch * int64_t{p.h} + head) * p.n;
  }

  template <class Tile, class Loader>
  __device__ __forceinline__ void load(const Loader& loader, uint32_t ring, int tile, const BwdParams& p) const {
    const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
    const int begin = tile * Tile::kStream;
    loader.load(stage, q, p.q_stride.token, begin, p.n, p.d);
    loader.load(stage + Tile::kTileBytes, grad_o, grad_o_token, begin, p.n, p.dv);
    if (Tile::kStream == Tile::kThreads || threadIdx.x < Tile::kStream) {
      const int query = begin + static_cast<int>(threadIdx.x);  // zeros beyond the last query
      ptx::cp_async_16(stage + 2 * Tile::kTileBytes + threadIdx.x * 16, row_scores + query, query < p.n ? 16 : 0);
    }
    ptx::cp_async_commit();
  }
};

// Loads a stage of k and v.
template <class Tile, class Loader, class Element>
__device__ __forceinline__ void load_key_stage(const Loader& loader, uint32_t ring, int tile, const BwdParams& p, const Element* k,
                                               const Element* v) {
  const uint32_t stage = ring + tile % Tile::kStages * Tile::kStageBytes;
  const int begin = tile * Tile::kStream;
  loader.load(stage, k, p.k_stride.token, begin, p.m, p.d);
  loader.load(stage + Tile::kTileBytes, v, p.v_stride.token, begin, p.m, p.dv);
  ptx::cp_async_commit();
}

// Finishing functions for store_rows. A masked key has no weight in any row, and its gradients are zeros.
struct PaddedKeysAreZero {
  const uint8_t* attention_mask;
  int64_t batch_stride;
  int batch;

  __device__ __forceinline__ auto operator()(int, int, int key) const {
    const bool zero = attention_mask != nullptr && attention_mask[batch * batch_stride + key] == 0;
    return [zero](int, float2 x) { return zero ? make_float2(0.f, 0.f) : x; };
  }
};
struct StoreAsIs {
  __device__ __forceinline__ auto operator()(int, int, int) const {
    return [](int, float2 x) { return x; };
  }
};

}  // namespace fastmax
