// The key padding mask as the Hopper kernels read it: a bit for each key, and the range that the kept keys of a batch entry lie in.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/params.h"
#include "core/visibility.h"

namespace fastmax {

// Words of 32 keys each, of whole blocks of 128; keys behind the last one are not kept. Null without a mask.
struct KeptWords {
  static constexpr int kKeysPerBlock = 128;

  const uint4* words;   // (b, blocks)
  const Range* ranges;  // (b)
  int blocks;

#ifdef __CUDACC__
  __device__ __forceinline__ bool keeps_all() const { return words == nullptr; }

  // Of the keys of a tile of 32 kWords; word i: the 32 keys from 32 i on. All without a mask.
  template <int kWords>
  __device__ __forceinline__ void load(uint32_t (&of_tile)[kWords], int batch, int tile) const {
    static_assert(kWords == 2 || kWords == 4, "a tile is a block of kept words, or half of one");
#pragma unroll
    for (int i = 0; i < kWords; ++i) of_tile[i] = 0xffffffffu;
    if (keeps_all()) return;
    const uint32_t* at = words_of(batch) + tile * kWords;
    if constexpr (kWords == 4) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(at));
      of_tile[0] = x.x, of_tile[1] = x.y, of_tile[2] = x.z, of_tile[3] = x.w;
    } else {
      const uint2 x = __ldg(reinterpret_cast<const uint2*>(at));
      of_tile[0] = x.x, of_tile[1] = x.y;
    }
  }

  // Also of a key behind the last one.
  __device__ __forceinline__ bool keeps(int batch, int key) const {
    return keeps_all() || (key < kKeysPerBlock * blocks && (__ldg(words_of(batch) + key / 32) >> (key % 32) & 1u) != 0);
  }

  // Those of these tiles of kTile keys between the first and the last one that hold kept keys.
  template <int kTile>
  __device__ __forceinline__ Range trim(int batch, Range tiles) const {
    if (keeps_all()) return tiles;
    const int2 kept = __ldg(reinterpret_cast<const int2*>(ranges + batch));
    const Range with = tiles_with<kTile>({kept.x, kept.y});
    return {max(tiles.begin, with.begin), min(tiles.end, with.end)};
  }

 private:
  __device__ __forceinline__ const uint32_t* words_of(int batch) const {
    return reinterpret_cast<const uint32_t*>(words + static_cast<int64_t>(batch) * blocks);
  }
#endif
};

// 0 without a mask.
size_t kept_words_bytes(const AttentionParams& p);
KeptWords fill_kept_words(const AttentionParams& p, void* workspace, cudaStream_t stream);

}  // namespace fastmax
