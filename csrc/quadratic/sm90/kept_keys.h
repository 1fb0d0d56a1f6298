// The key padding mask as the Hopper kernels read it: one bit per key, and for each batch entry the range from its first to its
// last unmasked key.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "core/params.h"
#include "core/visibility.h"

namespace fastmax {

// Bits of the mask in words of 32 keys, padded to whole blocks of 128 keys with zeros. Without a mask the pointers are null and
// all keys are unmasked.
struct KeptWords {
  static constexpr int kKeysPerBlock = 128;

  const uint4* words;   // (b, blocks)
  const Range* ranges;  // (b)
  int blocks;

#ifdef __CUDACC__
  __device__ __forceinline__ bool keeps_all() const { return words == nullptr; }

  // Loads the bits of a tile of 32 kWords keys; word i holds the keys from 32 i on. All ones without a mask.
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

  // Whether a key is unmasked. Keys beyond the last one are allowed.
  __device__ __forceinline__ bool keeps(int batch, int key) const {
    return keeps_all() || (key < kKeysPerBlock * blocks && (__ldg(words_of(batch) + key / 32) >> (key % 32) & 1u) != 0);
  }

  // The last unmasked key of a range, or the first one; -1 if there is none.
  template <bool kLast>
  __device__ __forceinline__ int find(int batch, Range keys) const {
    if (!keeps_all()) {
      const int2 kept = __ldg(reinterpret_cast<const int2*>(ranges + batch));
      keys = {max(keys.begin, kept.x), min(keys.end, kept.y)};
    }
    while (keys.begin < keys.end) {
      const int key = kLast ? keys.end - 1 : keys.begin, first = key / 32 * 32;  // of its word
      uint32_t word = kLast ? ~0u >> (31 - key % 32) : ~0u << (key % 32);
      if (!keeps_all()) word &= __ldg(words_of(batch) + key / 32);
      if (word != 0) {
        const int found = first + (kLast ? 31 - __clz(word) : __ffs(word) - 1);
        return keys.contains(found) ? found : -1;
      }
      if (kLast) keys.end = first;
      else keys.begin = first + 32;
    }
    return -1;
  }

  // Trims a range of tiles of kTile keys to the tiles from the first to the last one with an unmasked key.
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

// Bytes of the workspace that fill_kept_words fills; 0 without a mask.
size_t kept_words_bytes(const AttentionParams& p);
KeptWords fill_kept_words(const AttentionParams& p, void* workspace, cudaStream_t stream);

}  // namespace fastmax
