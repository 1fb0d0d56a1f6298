// What the backward's kernels share: where a block of keys is, and what is stored of a finished sum.
#pragma once

#include "score.h"
#include "tile_ops.h"

namespace fastmax {

struct KvPosition {
  int block_row, batch, kv_head;
};
template <int kRows>
__device__ __forceinline__ KvPosition kv_position(const BwdParams& p, unsigned block, int row_blocks) {
  const unsigned head = block / row_blocks;
  return {static_cast<int>(block % row_blocks) * kRows, static_cast<int>(head / p.hk), static_cast<int>(head % p.hk)};
}

// For store_rows. A padded key has no weight in any row.
struct PaddedKeysAreZero {
  const uint8_t* key_padding_mask;
  int64_t batch_stride;
  int batch;

  __device__ __forceinline__ auto operator()(int, int, int key) const {
    const bool zero = key_padding_mask != nullptr && key_padding_mask[batch * batch_stride + key] == 0;
    return [zero](int, float2 x) { return zero ? make_float2(0.f, 0.f) : x; };
  }
};
struct StoreAsIs {
  __device__ __forceinline__ auto operator()(int, int, int) const {
    return [](int, float2 x) { return x; };
  }
};

}  // namespace fastmax
