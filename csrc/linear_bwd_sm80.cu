// Gradients of the linear algorithm that need the derivative of f: grad_q with x = q, x2 = g, y = k, y2 = v, and on reversed
// rows grad_k with x = k, x2 = v, y = q, y2 = g:
//   grad_r = sum over earlier chunks from the snapshot + sum over the own chunk of (g0 + g1 x.y) (x2.y2 + e) y
//
// The contribution of a tile T (64 features x values): W = x2 T^T on the tensor cores, then the product rule on
// sum_xg x[8s+x] x[8b+g] W[8x+g], in fp32 on the CUDA cores:
//   grad[8b+g] += sum_x x[8s+x] W[8x+g],  grad[8s+x] += sum_g x[8b+g] W[8x+g]
// which is right for diagonal tiles too. Block columns come in an order known only at run time, so the gradient is kept in
// shared memory, a float4 per lane and block that no other lane touches.

#include "linear_dispatch.h"
#include "linear_features.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim, int kOrder>
struct GradTile {
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  static constexpr bool k16 = kIs16Bit<Math>;
  static constexpr bool kFull = Math::kMode == MathMode::kFP32;  // split operands take twice the registers
  static constexpr int kRowTiles = kOrder == 2 && k16 && kHeadDim <= 64 ? 2 : 1;
  static constexpr int kWarpRows = kRowTiles * 16;
  static constexpr int kTilesPerStage = kHeadDim == 32 ? (k16 ? 4 : 2) : kHeadDim == 64 && k16 ? 2 : 1;
  static constexpr int kPairsPerStage = 4 * kTilesPerStage;
  static constexpr int kTileStageBytes = kTilesPerStage * Layout::kTileBytes;
  static constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Element));
  static constexpr int kKeys = kTileStageBytes / (2 * kRowBytes) < 64 ? kTileStageBytes / (2 * kRowBytes) : 64;
  static constexpr int kSlab = kFull ? 16 : 32;
  static_assert(kKeys % kSlab == 0 && kBoundary % kKeys == 0, "stages hold whole slabs");
  static constexpr int kStageBytes = kTileStageBytes + 4 * kKeys;  // and the e of the keys
  static constexpr int kStages = 2;
  static constexpr int kRowSharedBytes = kRowBytes + 4 * kHeadDim;  // x and the gradient
  // More rows share the ring's traffic; two small blocks hide each other's barriers.
  static constexpr int kMaxWarps = (kHeadDim <= 64) == (kOrder == 2) ? 4 : 8;
  static constexpr int kMinBlocks = kOrder == 1 ? 2 : 1;

  static constexpr int shared_bytes(int warps) { return warps * kWarpRows * kRowSharedBytes + kStages * kStageBytes; }
  static_assert(shared_bytes(2) <= 99 * 1024, "two warps do not fit on the smallest devices");
};

template <class Math, int kHeadDim, int kOrder>
__global__ void __launch_bounds__(GradTile<Math, kHeadDim, kOrder>::kMaxWarps* kWarpSize, GradTile<Math, kHeadDim, kOrder>::kMinBlocks)
    linear_grad_kernel(const GradArgs a, const int row_blocks) {
  using Tile = GradTile<Math, kHeadDim, kOrder>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles, kDepth = kHeadDim / 16, kBlocks = kHeadDim / 8;
  constexpr int kBlockBytes = Layout::kBlockWords * Layout::kWordBytes;
  extern __shared__ __align__(128) char shared[];
  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarpSize;
  const int rows = blockDim.x / kWarpSize * Tile::kWarpRows;
  const uint32_t ring = ptx::smem_address(shared), x_tile = ring + Tile::kStages * Tile::kStageBytes;
  const uint32_t warp_grad = x_tile + rows * Tile::kRowBytes + warp * Tile::kWarpRows * kHeadDim * 4 + lane * 16;
  const auto grad_address = [&](int m, int block) { return warp_grad + (m * kBlocks + block) * 512; };

  const int row_block = row_blocks - 1 - static_cast<int>(blockIdx.x) % row_blocks;
  const int x_head_index = blockIdx.x / row_blocks;
  const int x_heads = a.state_heads * a.x_group;
  const int batch = x_head_index / x_heads, x_head = x_head_index % x_heads, kv_head = x_head / a.x_group;
  const int block_row = row_block * rows, chunk = block_row / a.chunk;
  const int warp_row = warp * Tile::kWarpRows;
  const int64_t slot = (static_cast<int64_t>(batch) * a.state_heads + kv_head) * a.chunks + chunk;
  const bool has_state = a.has_state(chunk), tiles = kOrder == 2 && a.order == 2;

  const int first_pair = tiles ? Layout::kMomentPair : Layout::kLinearPair;
  const int plain_pairs = Layout::kTilePair - first_pair;
  const int plain_stages = has_state ? (plain_pairs + Tile::kPairsPerStage - 1) / Tile::kPairsPerStage : 0;
  const int tile_stages =
      has_state && tiles ? (Stars<kHeadDim>::kTiles + Tile::kTilesPerStage - 1) / Tile::kTilesPerStage : 0;
  const int own_begin = a.boundary + chunk * a.chunk;
  const int own_end = min(a.boundary + block_row + rows, a.ny + a.pad);
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
                                                               head_pointer<Element>(a.y2, batch, y_head), a.y2.token, row, a.ny,
                                                               a.dv, y_mask, a.y_mask.token);
        if (a.y_scale.data != nullptr && threadIdx.x < Tile::kKeys) {
          const float* e = a.y_scale.data + (static_cast<int64_t>(batch) * a.state_heads * a.y_group + y_head) * a.y_scale.head;
          const int source = row + static_cast<int>(threadIdx.x);
          const bool inside = source < a.ny;
          ptx::cp_async_small<4>(dst + Tile::kTileStageBytes + threadIdx.x * 4,
                                 inside ? e + static_cast<int64_t>(source) * a.y_scale.token : e, inside ? 4 : 0);
        }
      }
    }
    ptx::cp_async_commit();
  };
  {
    const Element* x = head_pointer<Element>(a.x, batch, x_head);
    for (int row = 0; row < rows; row += 32) {
      load_masked_tile_async<Element, 32, kHeadDim>(x_tile + row * Tile::kRowBytes, x, a.x.token, block_row + row, a.nx, a.d, nullptr, 0);
    }
  }
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

  WeightsA<Math> x2[kRowTiles][kDepth];
  float e[kRowTiles][2] = {};  // of this lane's rows
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const int row = block_row + warp_row + 16 * m;
#pragma unroll
    for (int c = 0; c < kDepth; ++c) {
      load_rows_global<Math>(x2[m][c], head_pointer<Element>(a.x2, batch, x_head), a.x2.token, row, a.nx, 16 * c, a.dv);
    }
    if (a.x_scale.data != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half + g;
        if (r < a.nx) e[m][half] = a.x_scale.data[x_head_index * a.x_scale.head + static_cast<int64_t>(r) * a.x_scale.token];
      }
    }
  }

  float acc[kRowTiles][2 * kDepth][4] = {};
  if (has_state) {
    // e (moment x + g0 sum y): in grad_k, e is inside the sums.
    int pair = 0;
    const int moments = Layout::kLinearPair - first_pair;
    const auto finish_moments = [&] {
      const float* sums = a.sums + slot * Layout::kSums + Layout::kSumY;
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const float e0 = a.x_scale.data != nullptr ? e[m][0] : 1.f, e1 = a.x_scale.data != nullptr ? e[m][1] : 1.f;
#pragma unroll
        for (int c = 0; c < 2 * kDepth; ++c) {
          const float2 sum = *reinterpret_cast<const float2*>(sums + 8 * c + 2 * t);
          ptx::store_shared_f32x4(grad_address(m, c),
                                  make_float4(e0 * fmaf(a.g0, sum.x, acc[m][c][0]), e0 * fmaf(a.g0, sum.y, acc[m][c][1]),
                                              e1 * fmaf(a.g0, sum.x, acc[m][c][2]), e1 * fmaf(a.g0, sum.y, acc[m][c][3])));
        }
      }
    };
    for (int s = 0; s < plain_stages; ++s) {
      const uint32_t stage_pairs = next_stage();
#pragma unroll 1
      for (int i = 0; i < Tile::kPairsPerStage && pair < plain_pairs; ++i, ++pair) {
        const uint32_t block = stage_pairs + i * Layout::kPairBytes;
        if (pair < moments) {
          WeightsA<Math> x[kRowTiles];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) load_rows<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * pair);
#pragma unroll
          for (int c = 0; c < kDepth; ++c) {
            WeightsB<Math> b0, b1;
            load_state_by_feature<Math>(b0, b1, block + c * kBlockBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              mma_weights<Math>(acc[m][2 * c], x[m], b0);
              mma_weights<Math>(acc[m][2 * c + 1], x[m], b1);
            }
          }
          continue;
        }
        if (pair == moments) finish_moments();
        // First order: x2 T^T for 16 columns of the gradient.
        float w[kRowTiles][2][4] = {};
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_value<Math>(b0, b1, block + c * kBlockBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(w[m][0], x2[m][c], b0);
            mma_weights<Math>(w[m][1], x2[m][c], b1);
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const uint32_t address = grad_address(m, 2 * (pair - moments) + half);
            const float4 old = ptx::load_shared_f32x4(address);
            ptx::store_shared_f32x4(address, make_float4(old.x + w[m][half][0], old.y + w[m][half][1], old.z + w[m][half][2],
                                                         old.w + w[m][half][3]));
          }
        }
      }
    }
  }

  if (kOrder == 2 && tile_stages > 0) {
    // Half a tile (four octets) at a time: the next half's W is on the tensor cores while this one's goes through the product
    // rule.
    RowOctet<Math, kHeadDim> scalar[kRowTiles];
    RowBase<Math, kHeadDim> base[kRowTiles];
    float4 leaf[kRowTiles];           // gradient of the base block's columns
    float star_sum[kRowTiles][2][8];  // this lane's part of the gradient of the star's columns
    float w[2][kRowTiles][4][4];
    int star = 0, offset = 0, base_block = 0;
    const auto load_factors = [&] {
      base_block = Stars<kHeadDim>::wrap(star + offset);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        if (offset == 0) {
          scalar[m].load(x_tile, warp_row + 16 * m, star);
#pragma unroll
          for (int x = 0; x < 8; ++x) star_sum[m][0][x] = star_sum[m][1][x] = 0.f;
        }
        base[m].load(x_tile, warp_row + 16 * m, base_block);
        leaf[m] = ptx::load_shared_f32x4(grad_address(m, base_block));
      }
    };
    const auto multiply = [&](float(&dst)[kRowTiles][4][4], uint32_t half_tile) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int k = 0; k < 4; ++k) dst[m][i][k] = 0.f;
        }
      }
#pragma unroll
      for (int c = 0; c < kDepth; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          WeightsB<Math> b0, b1;
          load_state_by_value<Math>(b0, b1, half_tile + j * Layout::kPairBytes + c * kBlockBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(dst[m][2 * j], x2[m][c], b0);
            mma_weights<Math>(dst[m][2 * j + 1], x2[m][c], b1);
          }
        }
      }
    };
    const auto product_rule = [&](const float(&from)[kRowTiles][4][4], const int half) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int x = 4 * half + i;
          const float s0 = scalar[m].value(0, x), s1 = scalar[m].value(1, x);
          leaf[m].x = fmaf(s0, from[m][i][0], leaf[m].x), leaf[m].y = fmaf(s0, from[m][i][1], leaf[m].y);
          leaf[m].z = fmaf(s1, from[m][i][2], leaf[m].z), leaf[m].w = fmaf(s1, from[m][i][3], leaf[m].w);
          star_sum[m][0][x] = fmaf(base[m].value(0, 1), from[m][i][1], fmaf(base[m].value(0, 0), from[m][i][0], star_sum[m][0][x]));
          star_sum[m][1][x] = fmaf(base[m].value(1, 1), from[m][i][3], fmaf(base[m].value(1, 0), from[m][i][2], star_sum[m][1][x]));
        }
      }
    };

    uint32_t tile_address = next_stage();
    load_factors();
    multiply(w[0], tile_address);
#pragma unroll 1
    for (int tile = 0; tile < Stars<kHeadDim>::kTiles; ++tile) {
      multiply(w[1], tile_address + 2 * Layout::kPairBytes);
      product_rule(w[0], 0);
      if (tile + 1 < Stars<kHeadDim>::kTiles) {
        tile_address = (tile + 1) % Tile::kTilesPerStage == 0 ? next_stage() : tile_address + Layout::kTileBytes;
        multiply(w[0], tile_address);
      }
      product_rule(w[1], 1);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) ptx::store_shared_f32x4(grad_address(m, base_block), leaf[m]);

      if (++offset == Stars<kHeadDim>::length(star)) {
        // Sum over the quad so that lane t keeps columns 2t and 2t + 1.
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          float own[2][2];
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float low = star_sum[m][half][i], high = star_sum[m][half][i + 4];
              v[i] = (t & 2 ? high : low) + __shfl_xor_sync(0xffffffffu, t & 2 ? low : high, 2);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              own[half][i] = (t & 1 ? v[i + 2] : v[i]) + __shfl_xor_sync(0xffffffffu, t & 1 ? v[i] : v[i + 2], 1);
            }
          }
          const uint32_t address = grad_address(m, star);
          const float4 old = ptx::load_shared_f32x4(address);
          ptx::store_shared_f32x4(address,
                                  make_float4(old.x + own[0][0], old.y + own[0][1], old.z + own[1][0], old.w + own[1][1]));
        }
        offset = 0, star = Stars<kHeadDim>::wrap(star + 1);
      }
      load_factors();
    }
  }

  // The own chunk, on top of the earlier ones.
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int c = 0; c < 2 * kDepth; ++c) {
      const float4 v = has_state ? ptx::load_shared_f32x4(grad_address(m, c)) : make_float4(0.f, 0.f, 0.f, 0.f);
      acc[m][c][0] = v.x, acc[m][c][1] = v.y, acc[m][c][2] = v.z, acc[m][c][3] = v.w;
    }
  }
  const int chunk_row = block_row - chunk * a.chunk + warp_row;
#pragma unroll 1
  for (int index = 0; index < key_blocks * a.y_group; ++index) {
    const uint32_t y = next_stage(), y2 = y + Tile::kKeys * Tile::kRowBytes, y_e = y + Tile::kTileStageBytes;
    const int first_key = index / a.y_group * Tile::kKeys;
#pragma unroll 1
    for (int slab = 0; slab < Tile::kKeys; slab += Tile::kSlab) {
      const int key = first_key + slab;
      if (key > chunk_row + Tile::kWarpRows - 1) break;
      float s[kRowTiles][Tile::kSlab / 8][4] = {}, u[kRowTiles][Tile::kSlab / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < kDepth; ++kk) {
        FragmentA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_a<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * kk);
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 16; ++n) {
          FragmentB<Math> k0, k1;
          load_b_pair<Math, kHeadDim>(k0, k1, y, slab + 16 * n, 16 * kk);
          WeightsB<Math> v0, v1;
          load_row_columns<Math, kHeadDim>(v0, v1, y2, slab + 16 * n, 16 * kk);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma<Math>(s[m][2 * n], x[m], k0);
            mma<Math>(s[m][2 * n + 1], x[m], k1);
            mma_weights<Math>(u[m][2 * n], x2[m][kk], v0);
            mma_weights<Math>(u[m][2 * n + 1], x2[m][kk], v1);
          }
        }
      }
      const bool diagonal = key + Tile::kSlab - 1 > chunk_row;
#pragma unroll
      for (int n = 0; n < Tile::kSlab / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int column = 8 * n + 2 * t + i;
          const float column_e = a.y_scale.data != nullptr ? ptx::load_shared_f32(y_e + (slab + column) * 4) : 0.f;
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float& value = s[m][n][2 * half + i];
              value = fmaf(a.g1, value, a.g0) * (u[m][n][2 * half + i] + e[m][half] + column_e);
              if (diagonal && key + column > chunk_row + 16 * m + 8 * half + g) value = 0.f;
            }
          }
        }
      }
#pragma unroll
      for (int k = 0; k < Tile::kSlab / 16; ++k) {
        WeightsA<Math> weights[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) a_from_accumulator<Math>(weights[m], s[m][2 * k], s[m][2 * k + 1]);
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_b_trans_pair<Math, kHeadDim>(b0, b1, y, 16 * c, slab + 16 * k);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(acc[m][2 * c], weights[m], b0);
            mma_weights<Math>(acc[m][2 * c + 1], weights[m], b1);
          }
        }
      }
    }
  }

  const uint8_t* x_mask = mask_pointer(a.x_mask, batch);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block_row + warp_row + 16 * m + 8 * half + g;
      if (row >= a.nx) continue;
      const float keep = x_mask != nullptr && x_mask[static_cast<int64_t>(row) * a.x_mask.token] == 0 ? 0.f : 1.f;
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        const int column = 8 * c + 2 * t;
        if (column >= a.d) break;
        store_row_pair<Element>(a.out, a.half_out, batch, x_head, row, column, acc[m][c][2 * half] * keep,
                                acc[m][c][2 * half + 1] * keep);
      }
    }
  }
}

struct LaunchGrad {
  template <class Math, int kHeadDim>
  static void run(const GradArgs& a, cudaStream_t stream) {
    if constexpr (kHasOrder1Kernel<Math>) {
      if (a.order == 1) return launch<Math, kHeadDim, 1>(a, stream);
    }
    launch<Math, kHeadDim, 2>(a, stream);
  }

  template <class Math, int kHeadDim, int kOrder>
  static void launch(const GradArgs& a, cudaStream_t stream) {
    using Tile = GradTile<Math, kHeadDim, kOrder>;
    const int limit = shared_limit(a.sm_arch);
    int warps = Tile::kMaxWarps;
    while (Tile::shared_bytes(warps) > limit) warps /= 2;
    const int rows = warps * Tile::kWarpRows;
    static_assert(128 % (Tile::kMaxWarps * Tile::kWarpRows) == 0, "a block's rows lie in one chunk");
    const int row_blocks = (a.nx + rows - 1) / rows;
    launch_kernel("linear_grad", linear_grad_kernel<Math, kHeadDim, kOrder>, grid_1d(int64_t{row_blocks} * a.states() * a.x_group),
                  warps * kWarpSize, Tile::shared_bytes(warps), stream, a, row_blocks);
  }
};

// A row per kPrepareLanes lanes, 16 bytes per load. g is rounded before e is taken from it: where o is close to v the two cancel
// in g.v + e.
constexpr int kPrepareLanes = 8;

template <class In, class G>
__global__ void __launch_bounds__(256) linear_prepare_kernel(const PrepareArgs a, const int64_t rows) {
  constexpr int kVector = 16 / static_cast<int>(sizeof(In));
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kPrepareLanes;
  const int lane = threadIdx.x % kPrepareLanes;
  float e = 0.f;
  if (row < rows) {
    const int head_index = static_cast<int>(row / a.n), i = static_cast<int>(row % a.n);
    const int batch = head_index / a.heads, head = head_index % a.heads;
    const float z = a.z[row], inverse = z == 0.f ? 0.f : 1.f / z;
    const auto load = [&](In(&dst)[kVector], const View& v, int c) {
      *reinterpret_cast<uint4*>(dst) = *reinterpret_cast<const uint4*>(head_pointer<In>(v, batch, head) + i * v.token + c);
    };
    for (int c = kVector * lane; c < a.dv; c += kVector * kPrepareLanes) {
      alignas(16) In grad[kVector], o[kVector], noise[kVector];
      load(grad, a.grad_o, c);
      load(o, a.o, c);
      if (a.noise.data != nullptr) load(noise, a.noise, c);
      alignas(16) G g[kVector];
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const float scaled = to_float(grad[j]) * inverse;
        const float exact = a.noise.data != nullptr ? scaled * fmaf(a.dropout, to_float(noise[j]), 1.f) : scaled;
        g[j] = from_float<G>(exact);
        const float product = scaled * to_float(o[j]);
        e -= exact == 0.f ? product : product * (to_float(g[j]) / exact);
      }
#pragma unroll
      for (int j = 0; j < static_cast<int>(sizeof(g)) / 16; ++j) {
        reinterpret_cast<uint4*>(static_cast<G*>(a.g) + row * a.dv + c)[j] = reinterpret_cast<const uint4*>(g)[j];
      }
    }
  }
#pragma unroll
  for (int lanes = kPrepareLanes / 2; lanes > 0; lanes /= 2) e += __shfl_xor_sync(0xffffffffu, e, lanes);
  if (row < rows && lane == 0) a.e[row] = e;
}

}  // namespace

template <>
void linear_grad<FASTMAX_MATH>(const GradArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchGrad, FASTMAX_MATH>(head_dim, a, stream);
}

template <>
void linear_prepare<FASTMAX_MATH>(const PrepareArgs& a, cudaStream_t stream) {
  using In = FASTMAX_MATH::Element;
  using G = std::conditional_t<kIs16Bit<FASTMAX_MATH> && !kBf16State<FASTMAX_MATH>, float, In>;
  const int64_t rows = int64_t{a.batch} * a.heads * a.n;
  constexpr int kThreads = 256, kRows = kThreads / kPrepareLanes;
  launch_kernel("linear_prepare", linear_prepare_kernel<In, G>, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream, a, rows);
}

}  // namespace fastmax
