// Reading states: out_r = [sum over earlier chunks from the snapshot] + [sum over the rows of the own chunk, quadratically].
// The forward with x = q; grad_v with x = k on reversed rows.
//
// A block owns kRows rows of x. Everything that they multiply passes through one shared-memory ring: the snapshot (second
// moment, first order, tiles), then pairs of y and w tiles.

#include "linear_dispatch.h"
#include "linear_features.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim, int kOrder>
struct ReadTile {
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr bool kFull = Math::kMode == MathMode::kFP32;  // split operands take twice the registers
  static constexpr int kWarps = kOrder == 2 && (k16 || kHeadDim <= 64) ? 8 : 4;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kRowTiles = (kOrder == 2 || kHeadDim <= 64) && (k16 || (kHeadDim <= 32 && !kFull)) ? 2 : 1;
  static constexpr int kMinBlocks = kOrder == 2 ? 1 : 3;
  static constexpr bool kEarlyFactors = kHeadDim < 128;  // registers for the next tile's factors
  static constexpr int kRows = kWarps * kRowTiles * 16;
  static constexpr int kTilesPerStage = kHeadDim == 32 ? (k16 ? 4 : 2) : kHeadDim == 64 && k16 ? 2 : 1;
  static constexpr int kPairsPerStage = 4 * kTilesPerStage;
  static constexpr int kStageBytes = kTilesPerStage * Layout::kTileBytes;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kKeys = kStageBytes / (2 * kRowBytes) < 64 ? kStageBytes / (2 * kRowBytes) : 64;
  static constexpr int kSlab = kFull || kHeadDim == 128 || kOrder == 1 ? 16 : 32;  // keys whose scores are held at once
  static_assert(kKeys % kSlab == 0 && kBoundary % kKeys == 0, "stages hold whole slabs");
  static constexpr int kXBytes = kRows * kRowBytes;
  static constexpr int kStages = kXBytes + 3 * kStageBytes <= 99 * 1024 ? 3 : 2;
  static constexpr int kSharedBytes = kXBytes + kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024, "x and the ring do not fit in shared memory");
};

template <class Math, int kHeadDim, int kOrder>
__global__ void __launch_bounds__(ReadTile<Math, kHeadDim, kOrder>::kThreads, ReadTile<Math, kHeadDim, kOrder>::kMinBlocks)
    linear_read_kernel(const ReadArgs a, const int row_blocks) {
  using Tile = ReadTile<Math, kHeadDim, kOrder>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles, kDepth = kHeadDim / 16;
  extern __shared__ __align__(128) char shared[];
  const uint32_t x_tile = ptx::smem_address(shared), ring = x_tile + Tile::kXBytes;
  const int lane = lane_index(), g = lane / 4, t = lane % 4;

  // The blocks with the most keys in their own chunk first.
  const int row_block = row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks;
  const int x_head_index = blockIdx.x / row_blocks;
  const int x_heads = a.state_heads * a.x_group;
  const int batch = x_head_index / x_heads, x_head = x_head_index % x_heads, kv_head = x_head / a.x_group;
  const int block_row = row_block * Tile::kRows, chunk = block_row / a.chunk;
  const int warp_row = threadIdx.x / kWarpSize * kRowTiles * 16;  // within the block
  const int64_t slot = (static_cast<int64_t>(batch) * a.state_heads + kv_head) * a.chunks + chunk;
  const bool has_state = a.has_state(chunk), normalise = a.z != nullptr;
  const bool tiles = kOrder == 2 && a.order == 2;

  // The stream: stages of the snapshot, then of y rows.
  const int first_pair = normalise && tiles ? Layout::kMomentPair : Layout::kLinearPair;
  const int plain_pairs = Layout::kTilePair - first_pair;
  const int plain_stages = has_state ? (plain_pairs + Tile::kPairsPerStage - 1) / Tile::kPairsPerStage : 0;
  const int tile_stages =
      has_state && tiles ? (Stars<kHeadDim>::kTiles + Tile::kTilesPerStage - 1) / Tile::kTilesPerStage : 0;
  const int own_begin = a.boundary + chunk * a.chunk;
  const int own_end = min(a.boundary + block_row + Tile::kRows, a.ny + a.pad);
  const int key_blocks = a.causal && own_end > own_begin ? (own_end - own_begin + Tile::kKeys - 1) / Tile::kKeys : 0;
  const int stages = plain_stages + tile_stages + key_blocks * a.y_group;

  const uint8_t* y_mask = mask_pointer(a.y_mask, batch);
  const char* snapshot = static_cast<const char*>(a.snapshots) + slot * Layout::words(a.order) * Layout::kWordBytes;
  const auto load = [&](int stage) {
    if (stage < stages) {
      const uint32_t dst = ring + stage % Tile::kStages * Tile::kStageBytes;
      if (stage < plain_stages) {
        const int pair = stage * Tile::kPairsPerStage;
        load_bytes_async(dst, snapshot + int64_t{first_pair + pair} * Layout::kPairBytes,
                         min(Tile::kPairsPerStage, plain_pairs - pair) * Layout::kPairBytes);
      } else if (stage < plain_stages + tile_stages) {
        const int tile = (stage - plain_stages) * Tile::kTilesPerStage;
        load_bytes_async(dst, snapshot + int64_t{Layout::kTilePair + 4 * tile} * Layout::kPairBytes,
                         min(Tile::kTilesPerStage, Stars<kHeadDim>::kTiles - tile) * Layout::kTileBytes);
      } else {
        const int index = stage - plain_stages - tile_stages;
        const int y_head = kv_head * a.y_group + index % a.y_group;
        const int row = own_begin + index / a.y_group * Tile::kKeys - a.pad;
        load_masked_tile_async<Element, Tile::kKeys, kHeadDim>(dst, head_pointer<Element>(a.y, batch, y_head), a.y.token, row, a.ny,
                                                               a.d, y_mask, a.y_mask.token);
        load_masked_tile_async<Element, Tile::kKeys, kHeadDim>(dst + Tile::kKeys * Tile::kRowBytes,
                                                               head_pointer<Element>(a.w, batch, y_head), a.w.token, row, a.ny, a.dv,
                                                               y_mask, a.y_mask.token);
      }
    }
    ptx::cp_async_commit();
  };
  load_masked_tile_async<Element, Tile::kRows, kHeadDim>(x_tile, head_pointer<Element>(a.x, batch, x_head), a.x.token, block_row,
                                                         a.nx, a.d, nullptr, 0);
  for (int i = 0; i < Tile::kStages - 1; ++i) load(i);

  int stage = 0;
  const auto next_stage = [&] {
    ptx::cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    load(stage + Tile::kStages - 1);
    return ring + stage++ % Tile::kStages * Tile::kStageBytes;
  };
  if (stages == 0) {
    ptx::cp_async_wait<0>();
    __syncthreads();
  }

  float acc[kRowTiles][2 * kDepth][4] = {};
  float z[kRowTiles][2] = {};  // this lane's part of the denominators
  const float* sums = a.sums + slot * Layout::kSums;

  // z += x . v for the products v = acc, which are cleared.
  const auto fold_into_denominator = [&] {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        RowBase<Math, kHeadDim> base;
        base.load(x_tile, warp_row + 16 * m, c);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          z[m][e / 2] = fmaf(base.value(e / 2, e % 2), acc[m][c][e], z[m][e / 2]);
          acc[m][c][e] = 0.f;
        }
      }
    }
  };
  // acc += scale * (sums of this lane's columns)
  const auto add_sums = [&](const float* columns, float scale) {
#pragma unroll
    for (int c = 0; c < 2 * kDepth; ++c) {
      const float2 sum = *reinterpret_cast<const float2*>(columns + 8 * c + 2 * t);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        acc[m][c][0] = fmaf(scale, sum.x, acc[m][c][0]), acc[m][c][1] = fmaf(scale, sum.y, acc[m][c][1]);
        acc[m][c][2] = fmaf(scale, sum.x, acc[m][c][2]), acc[m][c][3] = fmaf(scale, sum.y, acc[m][c][3]);
      }
    }
  };

  // Second moment: the earlier chunks' denominator is x . (moment x + c1 sum y) + c0 count. Then the first order.
  if (has_state) {
    const int moments = Layout::kLinearPair - first_pair;
    int pair = 0;
    for (int s = 0; s < plain_stages; ++s) {
      const uint32_t stage_pairs = next_stage();
#pragma unroll 1
      for (int i = 0; i < Tile::kPairsPerStage && pair < plain_pairs; ++i, ++pair) {
        if (pair == moments && normalise) {
          add_sums(sums + Layout::kSumY, a.c1);
          fold_into_denominator();
        }
        const int k = (pair < moments ? pair : pair - moments) * 16;
        WeightsA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_rows<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, k);
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_feature<Math>(b0, b1, stage_pairs + i * Layout::kPairBytes + c * Layout::kBlockWords * Layout::kWordBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(acc[m][2 * c], x[m], b0);
            mma_weights<Math>(acc[m][2 * c + 1], x[m], b1);
          }
        }
      }
    }
    add_sums(sums + Layout::kSumW, a.c0);
  }

  // Second-order tiles, star by star.
  if (kOrder == 2 && tile_stages > 0) {
    RowOctet<Math, kHeadDim> scalar[kRowTiles];
    RowBase<Math, kHeadDim> base[kRowTiles];
    int star = 0, offset = 0;
    const auto load_factors = [&] {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (offset == 0) scalar[m].load(x_tile, warp_row + 16 * m, star);
        base[m].load(x_tile, warp_row + 16 * m, Stars<kHeadDim>::wrap(star + offset));
      }
    };
    if (Tile::kEarlyFactors) load_factors();
    uint32_t tile_address = 0;
#pragma unroll 1
    for (int tile = 0; tile < Stars<kHeadDim>::kTiles; ++tile) {
      if (!Tile::kEarlyFactors) load_factors();
      WeightsA<Math> f[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) features<Math, kHeadDim>(f[m], scalar[m], base[m], 0);
      tile_address = tile % Tile::kTilesPerStage == 0 ? next_stage() : tile_address + Layout::kTileBytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > 0) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) features<Math, kHeadDim>(f[m], scalar[m], base[m], 2 * j);
        }
        if (j == 3) {  // the next tile's factors, while the last products run
          if (++offset == Stars<kHeadDim>::length(star)) offset = 0, star = Stars<kHeadDim>::wrap(star + 1);
          if (Tile::kEarlyFactors) load_factors();
        }
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_feature<Math>(b0, b1, tile_address + j * Layout::kPairBytes + c * Layout::kBlockWords * Layout::kWordBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(acc[m][2 * c], f[m], b0);
            mma_weights<Math>(acc[m][2 * c + 1], f[m], b1);
          }
        }
      }
    }
  }

  // The own chunk.
  const int chunk_row = block_row - chunk * a.chunk + warp_row;
#pragma unroll 1
  for (int index = 0; index < key_blocks * a.y_group; ++index) {
    const uint32_t y = next_stage(), w = y + Tile::kKeys * Tile::kRowBytes;
    const int first_key = index / a.y_group * Tile::kKeys;
#pragma unroll 1
    for (int slab = 0; slab < Tile::kKeys; slab += Tile::kSlab) {
      const int key = first_key + slab;  // within the chunk
      if (key > chunk_row + 16 * kRowTiles - 1) break;
      float s[kRowTiles][Tile::kSlab / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < kDepth; ++kk) {
        FragmentA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_a<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * kk);
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 16; ++n) {
          FragmentB<Math> b0, b1;
          load_b_pair<Math, kHeadDim>(b0, b1, y, slab + 16 * n, 16 * kk);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma<Math>(s[m][2 * n], x[m], b0);
            mma<Math>(s[m][2 * n + 1], x[m], b1);
          }
        }
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][n][e] = fmaf(s[m][n][e], fmaf(a.c2, s[m][n][e], a.c1), a.c0);
        }
      }
      const int source = own_begin - a.pad + key;
      if (key + Tile::kSlab - 1 > chunk_row || source + Tile::kSlab > a.ny || y_mask != nullptr) {
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int column = 8 * n + 2 * t + e;
            bool taken = source + column < a.ny;
            if (taken && y_mask != nullptr) taken = y_mask[static_cast<int64_t>(source + column) * a.y_mask.token] != 0;
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              const int row = chunk_row + 16 * m + g;
              if (!taken || key + column > row) s[m][n][e] = 0.f;
              if (!taken || key + column > row + 8) s[m][n][2 + e] = 0.f;
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < Tile::kSlab / 16; ++k) {
        WeightsA<Math> weights[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          a_from_accumulator<Math>(weights[m], s[m][2 * k], s[m][2 * k + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) z[m][e / 2] += s[m][2 * k][e] + s[m][2 * k + 1][e];
        }
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_b_trans_pair<Math, kHeadDim>(b0, b1, w, 16 * c, slab + 16 * k);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(acc[m][2 * c], weights[m], b0);
            mma_weights<Math>(acc[m][2 * c + 1], weights[m], b1);
          }
        }
      }
    }
  }

  const float count = has_state ? a.c0 * sums[Layout::kSumOne] : 0.f;
  const uint8_t* x_mask = mask_pointer(a.x_mask, batch);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + warp_row + 16 * m + 8 * half + g;
      float factor = 1.f;
      if (normalise) {
        const float row_sum = quad_sum(z[m][half]) + count;
        factor = row_sum == 0.f ? 0.f : 1.f / row_sum;
        if (t == 0 && row < a.nx) a.z[x_head_index * a.z_head + row] = row_sum;
      }
      if (row >= a.nx) continue;
      if (x_mask != nullptr && x_mask[static_cast<int64_t>(row) * a.x_mask.token] == 0) factor = 0.f;
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        const int column = 8 * c + 2 * t;
        if (column >= a.dv) break;
        float x = acc[m][c][2 * half] * factor, y = acc[m][c][2 * half + 1] * factor;
        if (a.noise.data != nullptr) {
          const float2 r = load_row_pair<Element>(a.noise, a.half_out, batch, x_head, row, column);
          x *= fmaf(a.dropout, r.x, 1.f), y *= fmaf(a.dropout, r.y, 1.f);
        }
        store_row_pair<Element>(a.out, a.half_out, batch, x_head, row, column, x, y);
      }
    }
  }
}

struct LaunchRead {
  template <class Math, int kHeadDim>
  static void run(const ReadArgs& a, cudaStream_t stream) {
    if constexpr (kHasOrder1Kernel<Math>) {
      if (a.order == 1) return launch<Math, kHeadDim, 1>(a, stream);
    }
    launch<Math, kHeadDim, 2>(a, stream);
  }

  template <class Math, int kHeadDim, int kOrder>
  static void launch(const ReadArgs& a, cudaStream_t stream) {
    using Tile = ReadTile<Math, kHeadDim, kOrder>;
    static_assert((kOrder == 1 ? 128 : 256) % Tile::kRows == 0, "a block's rows lie in one chunk");
    const int row_blocks = (a.nx + Tile::kRows - 1) / Tile::kRows;
    launch_kernel("linear_read", linear_read_kernel<Math, kHeadDim, kOrder>,
                  grid_1d(int64_t{row_blocks} * a.states() * a.x_group), Tile::kThreads, Tile::kSharedBytes, stream, a, row_blocks);
  }
};

}  // namespace

template <>
void linear_read<FASTMAX_MATH>(const ReadArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchRead, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
