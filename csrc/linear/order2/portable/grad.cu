// Gradients of the linear algorithm that need the derivative of f: grad_q with x = q, x2 = g, y = k, y2 = v, and on reversed
// rows grad_k with x = k, x2 = v, y = q, y2 = g:
//   grad_r = inter-chunk part, from the snapshot, + intra-chunk sum of (g0 + g1 x.y) (x2.y2 + e) y
//
// The contribution of a tile T (64 features x values): W = x2 T^T on the tensor cores, then the product rule on
// sum_xg x[8s+x] x[8b+g] W[8x+g], in fp32 on the CUDA cores:
//   grad[8b+g] += sum_x x[8s+x] W[8x+g],  grad[8s+x] += sum_g x[8b+g] W[8x+g]
// which is right for diagonal tiles too. With decays, the kernel also sums p = f(x.y) (x2.y2 + e) over the pairs of a row, for the gradient
// of log_decay. The inter-chunk part of that sum is the term of order 0, plus x . (gradient of order 1), plus half of
// x . (gradient of order 2).
//
// Block columns come in an order known only at run time, so the gradient is kept in
// shared memory, a float4 per lane and block that no other lane touches.
//
// shards: FASTMAX_MATH

#include "linear/dispatch.h"
#include "linear/order2/portable/stream.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim, bool kHasDecay, bool kAdds>
__global__ void __launch_bounds__(GradTile<Math, kHeadDim>::kMaxWarps* kWarpSize, 1) linear_grad_kernel(const GradArgs a, const int row_blocks) {
  using Tile = GradTile<Math, kHeadDim>;
  using Stage = typename Tile::Stage;
  using Stream = RowStream<Math, kHeadDim, Tile::kStages, Tile::kMaxWarps * kWarpSize, kHasDecay, kAdds>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles, kDepth = kHeadDim / 16, kBlocks = kHeadDim / 8;
  constexpr int kBlockBytes = Layout::kBlockWords * Layout::kWordBytes;
  extern __shared__ __align__(128) char shared[];
  const int lane = lane_index(), g = lane / 4, t = lane % 4, warp = threadIdx.x / kWarpSize;
  const int rows = blockDim.x / kWarpSize * Tile::kWarpRows;
  const uint32_t ring = ptx::smem_address(shared), x_tile = ring + Tile::kRingBytes;
  const uint32_t warp_grad = x_tile + rows * Stage::kRowBytes + warp * Tile::kWarpRows * kHeadDim * 4 + lane * 16;
  const auto grad_address = [&](int m, int block) { return warp_grad + (m * kBlocks + block) * 512; };

  const RowBlock at(a, rows, row_blocks);
  const int warp_row = warp * Tile::kWarpRows;
  const bool has_state = a.has_state(at.chunk), tiles = a.order == 2;
  Stream stream(a, a.y, a.y2, a.y_mask, a.y_scale, a.snapshots, at, tiles, ring);
  for (int row = 0; row < rows; row += 16) {
    load_masked_tile_async<Element, 16, kHeadDim>(x_tile + row * Stage::kRowBytes, head_pointer<Element>(a.x, at.batch, at.x_head),
                                                  a.x.token, at.row + row, a.nx, a.d, nullptr, 0);
  }
  if constexpr (kAdds) stream.add(a.added, ring + Tile::kAddedAt);
  stream.begin();

  WeightsA<Math> x2[kRowTiles][Tile::kKeepX2 ? kDepth : 1];
  const auto x2_slot = [](int c) { return Tile::kKeepX2 ? c : 0; };
  const auto load_x2 = [&](int m, int c) {
    load_weights_a_mk_global<Math>(x2[m][x2_slot(c)], head_pointer<Element>(a.x2, at.batch, at.x_head), a.x2.token,
                           at.row + warp_row + 16 * m, a.nx, 16 * c, a.dv);
  };
  constexpr int kUnrollX2 = Tile::kKeepX2 ? kDepth : 1;
  float e[kRowTiles][2] = {};  // of this lane's rows
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
    const int row = at.row + warp_row + 16 * m;
    if constexpr (Tile::kKeepX2) {
#pragma unroll
      for (int c = 0; c < kDepth; ++c) load_x2(m, c);
    }
    if (a.x_scale.data != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half + g;
        if (r < a.nx) e[m][half] = a.x_scale.data[at.x_head_index * a.x_scale.head + static_cast<int64_t>(r) * a.x_scale.token];
      }
    }
  }

  const auto state_again = [&] { return static_cast<int64_t>(at.x_head_index / a.x_group); };
  const auto decay_again = [&] {
    return DecayRows<GradArgs>{a, state_again(), static_cast<int>(ptx::keep_in_register(at.row)) + warp_row + g};
  };
  // Sums of the pairs of rows wait in shared memory: loops need the registers.
  const bool wants_pairs = kHasDecay && a.pair_sums.data != nullptr;
  const uint32_t warp_pairs = ring + Tile::kRingBytes + rows * Tile::kRowBytes + warp_row * 4;
  const auto pairs_address = [&](int m, int half) { return warp_pairs + (16 * m + 8 * half + g) * 4; };
  // Adds this lane's part.
  const auto add_pairs = [&](const float (&part)[kRowTiles][2], bool first) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(part[m][half]) + (first ? 0.f : ptx::load_shared_f32(pairs_address(m, half)));
        __syncwarp();
        if (t == 0) ptx::store_shared_f32(pairs_address(m, half), sum);
        __syncwarp();
      }
    }
  };
  // x . v of a block of columns of the gradient
  const auto dot_x = [&](int m, int block, float (&sum)[2], const float4& v) {
    RowBase<Math, kHeadDim> x;
    x.load(x_tile, warp_row + 16 * m, block);
    sum[0] = fmaf(x.value(0, 0), v.x, fmaf(x.value(0, 1), v.y, sum[0]));
    sum[1] = fmaf(x.value(1, 0), v.z, fmaf(x.value(1, 1), v.w, sum[1]));
  };

  float acc[kRowTiles][2 * kDepth][4] = {};
  if (has_state) {
    // e (moment x + g0 sum y): in grad_k, e is inside the sums.
    int pair = 0;
    const int moments = stream.moment_pairs();
    const auto finish_moments = [&] {
      const float* sums = a.sums + at.slot * Layout::kSums + Layout::kSumY;
      if (wants_pairs) {  // of the moments' gradient: taken from the sums of both orders below
        float pairs[kRowTiles][2] = {};
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const float e0 = a.x_scale.data != nullptr ? e[m][0] : 1.f, e1 = a.x_scale.data != nullptr ? e[m][1] : 1.f;
#pragma unroll
          for (int c = 0; c < 2 * kDepth; ++c) {
            dot_x(m, c, pairs[m], make_float4(acc[m][c][0], acc[m][c][1], acc[m][c][2], acc[m][c][3]));
          }
          pairs[m][0] *= -0.5f * e0, pairs[m][1] *= -0.5f * e1;
        }
        add_pairs(pairs, true);
      }
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
    for (int i = 0; i < stream.plain_stages(); ++i) {
      const uint32_t stage = stream.next();
#pragma unroll 1
      for (int j = 0; j < Stage::kPairs && pair < stream.plain_pairs(); ++j, ++pair) {
        const uint32_t block = stage + j * Layout::kPairBytes;
        if (pair < moments) {
          WeightsA<Math> x[kRowTiles];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) load_weights_a_mk<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * pair);
#pragma unroll
          for (int c = 0; c < kDepth; ++c) {
            WeightsB<Math> b0, b1;
            load_state_by_feature<Math>(b0, b1, block + c * kBlockBytes);
            mma_row_tiles<Math>(acc, 2 * c, x, b0, b1);
          }
          continue;
        }
        if (pair == moments) finish_moments();
        // First order: x2 T^T for 16 columns of the gradient.
        float w[kRowTiles][2][4] = {};
#pragma unroll kUnrollX2
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_value<Math>(b0, b1, block + c * kBlockBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (!Tile::kKeepX2) load_x2(m, c);
            mma_weights<Math>(w[m][0], x2[m][x2_slot(c)], b0);
            mma_weights<Math>(w[m][1], x2[m][x2_slot(c)], b1);
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

  // Half of x . (the gradient so far).
  const auto add_half_of_gradient = [&](float (&pairs)[kRowTiles][2]) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) dot_x(m, c, pairs[m], ptx::load_shared_f32x4(grad_address(m, c)));
      pairs[m][0] *= 0.5f, pairs[m][1] *= 0.5f;
    }
  };
  if (has_state && wants_pairs) {
    // With order 0: c0 (x2 . sum w + e).
    float pairs[kRowTiles][2] = {};
    add_half_of_gradient(pairs);
    const float* sums = a.sums + at.slot * Layout::kSums;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row + warp_row + 16 * m + 8 * half + g;
        float order0 = t == 0 ? sums[Layout::kSumOne] * (a.x_scale.data != nullptr ? e[m][half] : 1.f) : 0.f;
        constexpr int kAhead = kDepth < 8 ? kDepth : 8;  // loads in flight
#pragma unroll 1
        for (int first = 0; first < 2 * kDepth; first += kAhead) {
          float2 x2[kAhead];
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int column = 8 * (first + i) + 2 * t;
            x2[i] = row < a.nx && column < a.dv ? load_row_pair<Element>(a.x2, false, at.batch, at.x_head, row, column) : float2{};
          }
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const float2 sum = *reinterpret_cast<const float2*>(sums + Layout::kSumW + 8 * (first + i) + 2 * t);
            order0 = fmaf(x2[i].x, sum.x, fmaf(x2[i].y, sum.y, order0));
          }
        }
        pairs[m][half] = fmaf(a.c0, order0, pairs[m][half]);
      }
    }
    add_pairs(pairs, false);
  }

  if (tiles && has_state) {
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
#pragma unroll kUnrollX2
      for (int c = 0; c < kDepth; ++c) {
        if constexpr (!Tile::kKeepX2) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) load_x2(m, c);
        }
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          WeightsB<Math> b0, b1;
          load_state_by_value<Math>(b0, b1, half_tile + j * Layout::kPairBytes + c * kBlockBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma_weights<Math>(dst[m][2 * j], x2[m][x2_slot(c)], b0);
            mma_weights<Math>(dst[m][2 * j + 1], x2[m][x2_slot(c)], b1);
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

    // The address of a half tile, halves in order.
    uint32_t pairs = 0;
    const auto begins = [](int half) { return 2 * half % Stage::kPairs == 0; };  // a stage
    const auto next_half = [&](int half) {
      pairs = begins(half) ? stream.next_tiles() : pairs + 2 * Layout::kPairBytes;
      return pairs;
    };
    constexpr int kHalves = 2 * Stars<kHeadDim>::kTiles;
    load_factors();
    multiply(w[0], next_half(0));
    stream.copy_tiles(true);
#pragma unroll 1
    for (int half = 0; half < kHalves; half += 2) {
      multiply(w[1], next_half(half + 1));
      stream.copy_tiles(begins(half + 1));
      product_rule(w[0], 0);
      if (half + 2 < kHalves) multiply(w[0], next_half(half + 2));
      stream.copy_tiles(begins(half + 2));
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
    stream.end_tiles();
  }

  // Decays the inter-chunk part.
  if (kHasDecay && has_state) {
    float pairs[kRowTiles][2] = {};
    if (wants_pairs) {
      add_half_of_gradient(pairs);
      add_pairs(pairs, false);
    }
    float factors[2 * kRowTiles];
    decay_again().since_chunk(factors, at.chunk);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const float f0 = factors[2 * m], f1 = factors[2 * m + 1];
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        const float4 v = ptx::load_shared_f32x4(grad_address(m, c));
        ptx::store_shared_f32x4(grad_address(m, c), make_float4(decayed(v.x, f0), decayed(v.y, f0), decayed(v.z, f1), decayed(v.w, f1)));
      }
      if (wants_pairs && t == 0) {
        ptx::store_shared_f32(pairs_address(m, 0), decayed(ptx::load_shared_f32(pairs_address(m, 0)), f0));
        ptx::store_shared_f32(pairs_address(m, 1), decayed(ptx::load_shared_f32(pairs_address(m, 1)), f1));
      }
    }
    __syncwarp();
  }

  // Adds the intra-chunk part.
  float own_pairs[kRowTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int c = 0; c < 2 * kDepth; ++c) {
      if constexpr (Tile::kSumsInShared) {
        if (!has_state) ptx::store_shared_f32x4(grad_address(m, c), make_float4(0.f, 0.f, 0.f, 0.f));
      } else {
        const float4 v = has_state ? ptx::load_shared_f32x4(grad_address(m, c)) : make_float4(0.f, 0.f, 0.f, 0.f);
        acc[m][c][0] = v.x, acc[m][c][1] = v.y, acc[m][c][2] = v.z, acc[m][c][3] = v.w;
      }
    }
  }
  const int chunk_row = at.row - at.chunk * a.chunk + warp_row;
  WalkSum x_sums[kHasDecay ? 2 * kRowTiles : 1];
  if constexpr (kHasDecay) decay_again().load(x_sums);
#pragma unroll 1
  for (int index = 0; index < stream.key_stages(); ++index) {
    const uint32_t y = stream.next(), y2 = y + Stage::kValueOffset, y_e = y + Stage::kScaleOffset;
    const int k_start = stream.k_start(index);
#pragma unroll 1
    for (int slab = 0; slab < Stage::kKeys; slab += Tile::kSlab) {
      const int key = k_start + slab;
      if (key > chunk_row + Tile::kWarpRows - 1) break;
      const int source = a.y_row(stream.own_begin()) + key;
      WalkSum y_sums{};
      if constexpr (kHasDecay) {
        y_sums = decay_again().template slab<Tile::kSlab>(y + Stage::kDecayOffset + slab * 8);
        if (key + Tile::kSlab <= chunk_row && is_fully_decayed<Tile::kSlab>(a.decay, y_sums, x_sums[0])) continue;
      }
      float s[kRowTiles][Tile::kSlab / 8][4] = {}, u[kRowTiles][Tile::kSlab / 8][4] = {};
#pragma unroll kUnrollX2
      for (int kk = 0; kk < kDepth; ++kk) {
        FragmentA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          load_a_mk<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * kk);
          if constexpr (!Tile::kKeepX2) load_x2(m, kk);
        }
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 16; ++n) {
          FragmentB<Math> k0, k1;
          load_b_nk_pair<Math, kHeadDim>(k0, k1, y, slab + 16 * n, 16 * kk);
          WeightsB<Math> v0, v1;
          load_weights_b_nk_pair<Math, kHeadDim>(v0, v1, y2, slab + 16 * n, 16 * kk);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma<Math>(s[m][2 * n], x[m], k0);
            mma<Math>(s[m][2 * n + 1], x[m], k1);
            mma_weights<Math>(u[m][2 * n], x2[m][x2_slot(kk)], v0);
            mma_weights<Math>(u[m][2 * n + 1], x2[m][x2_slot(kk)], v1);
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
              const float x = value, centred = u[m][n][2 * half + i] + e[m][half] + column_e;
              value = fmaf(a.g1, x, a.g0) * centred;
              if (diagonal && key + column > chunk_row + 16 * m + 8 * half + g) value = 0.f;
              if (wants_pairs) u[m][n][2 * half + i] = fmaf(fmaf(0.5f * a.g1, x, a.g0), x, a.c0) * centred;
            }
          }
        }
      }
      if constexpr (kHasDecay) {
        // Masked keys count among no pairs: the kernel of the queries alone has a mask here.
        if (const uint8_t* y_mask = mask_pointer(a.y_mask, at.batch); y_mask != nullptr) {
          const int token = source + lane % Tile::kSlab;
          const unsigned taken =
              __ballot_sync(0xffffffffu, token < a.ny && y_mask[static_cast<int64_t>(token) * a.y_mask.token] != 0);
#pragma unroll
          for (int n = 0; n < Tile::kSlab / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
#pragma unroll
              for (int m = 0; m < kRowTiles; ++m) u[m][n][e] = taken >> (8 * n + 2 * t + e % 2) & 1u ? u[m][n][e] : 0.f;
            }
          }
        }
        const bool before = key + Tile::kSlab <= chunk_row;
        const int own_pair = a.decay.own_pairs_count ? 1 : 0;  // a row's pair with its own token may have a factor too
        for_each_pair<Tile::kSlab / 8>(
            a.decay, x_sums, y_sums, before, [&](auto may_be_zero, int m, int half, int n, int i, float factor) {
              float &x = s[m][n][2 * half + i], &pair = u[m][n][2 * half + i];
              const int column = 8 * n + 2 * t + i;
              if constexpr (decltype(may_be_zero)::value) {
                x = decayed(x, factor);
                const bool counts = before || key + column < chunk_row + 16 * m + 8 * half + g + own_pair;
                own_pairs[m][half] += counts ? decayed(pair, factor) : 0.f;
              } else {
                x *= factor;
                own_pairs[m][half] = fmaf(pair, factor, own_pairs[m][half]);
              }
            });
      }
      WeightsA<Math> weights[Tile::kSlab / 16][kRowTiles];
      const auto add_columns = [&](float(&sum0)[4], float(&sum1)[4], int m, int k, const WeightsB<Math>& b0, const WeightsB<Math>& b1) {
        mma_weights<Math>(sum0, weights[k][m], b0);
        mma_weights<Math>(sum1, weights[k][m], b1);
      };
#pragma unroll
      for (int k = 0; k < Tile::kSlab / 16; ++k) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) weights_a_from_accumulator<Math>(weights[k][m], s[m][2 * k], s[m][2 * k + 1]);
        if constexpr (!Tile::kSumsInShared) {
#pragma unroll
          for (int c = 0; c < kDepth; ++c) {
            WeightsB<Math> b0, b1;
            load_weights_b_kn_pair<Math, kHeadDim>(b0, b1, y, 16 * c, slab + 16 * k);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) add_columns(acc[m][2 * c], acc[m][2 * c + 1], m, k, b0, b1);
          }
        }
      }
      if constexpr (Tile::kSumsInShared) {
#pragma unroll 2
        for (int c = 0; c < kDepth; ++c) {
          float sum[kRowTiles][2][4];
#pragma unroll
          for (int i = 0; i < 2 * kRowTiles; ++i) {
            const float4 v = ptx::load_shared_f32x4(grad_address(i / 2, 2 * c + i % 2));
            float(&to)[4] = sum[i / 2][i % 2];
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
          }
#pragma unroll
          for (int k = 0; k < Tile::kSlab / 16; ++k) {
            WeightsB<Math> b0, b1;
            load_weights_b_kn_pair<Math, kHeadDim>(b0, b1, y, 16 * c, slab + 16 * k);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) add_columns(sum[m][0], sum[m][1], m, k, b0, b1);
          }
#pragma unroll
          for (int i = 0; i < 2 * kRowTiles; ++i) {
            const float(&v)[4] = sum[i / 2][i % 2];
            ptx::store_shared_f32x4(grad_address(i / 2, 2 * c + i % 2), make_float4(v[0], v[1], v[2], v[3]));
          }
        }
      }
    }
  }

  const uint8_t* x_mask = mask_pointer(a.x_mask, at.batch);
  if (wants_pairs) {
    add_pairs(own_pairs, !has_state);
    const int row = at.row + warp_row + lane;
    if (lane < Tile::kWarpRows && row < a.nx) {
      const bool kept = x_mask == nullptr || x_mask[static_cast<int64_t>(row) * a.x_mask.token] != 0;
      a.pair_sums.data[at.x_head_index * a.pair_sums.head + static_cast<int64_t>(row) * a.pair_sums.token] =
          kept ? ptx::load_shared_f32(warp_pairs + lane * 4) : 0.f;
    }
  }
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + warp_row + 16 * m + 8 * half + g;
      if (row >= a.nx) continue;
      const float keep = x_mask != nullptr && x_mask[static_cast<int64_t>(row) * a.x_mask.token] == 0 ? 0.f : 1.f;
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        const int column = 8 * c + 2 * t;
        if (column >= a.d) break;
        float x = acc[m][c][2 * half], y = acc[m][c][2 * half + 1];
        if constexpr (Tile::kSumsInShared) {
          const float4 v = ptx::load_shared_f32x4(grad_address(m, c));
          x = half ? v.z : v.x, y = half ? v.w : v.y;
        }
        store_row_pair<Element>(a.out, a.half_out, at.batch, at.x_head, row, column, x * keep, y * keep);
      }
    }
  }
}

struct LaunchGrad {
  template <class Math, int kHeadDim>
  static void run(const GradArgs& a, cudaStream_t stream) {
    using Tile = GradTile<Math, kHeadDim>;
    const int limit = shared_limit(a.sm_arch);
    int warps = Tile::kMaxWarps;
    while (Tile::shared_bytes(warps) > limit) warps /= 2;
    const int rows = warps * Tile::kWarpRows;
    static_assert(256 % (Tile::kMaxWarps * Tile::kWarpRows) == 0, "a block's rows lie in one chunk");
    const int row_blocks = (a.nx + rows - 1) / rows;
    const auto launch = [&](const char* name, auto kernel, int shared_bytes) {
      launch_kernel(name, kernel, grid_1d(int64_t{row_blocks} * a.states() * a.x_group), warps * kWarpSize, shared_bytes, stream, a,
                    row_blocks);
    };
    if (a.added != nullptr) {
      if constexpr (Tile::kAdds) launch("linear_grad_adding", linear_grad_kernel<Math, kHeadDim, false, true>, Tile::kAddingBytes);
      else throw std::logic_error("fastmax: linear_grad adds no states here");
    } else if (a.decay) {
      launch("linear_grad_decay", linear_grad_kernel<Math, kHeadDim, true, false>, Tile::shared_bytes(warps));
    } else {
      launch("linear_grad", linear_grad_kernel<Math, kHeadDim, false, false>, Tile::shared_bytes(warps));
    }
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const GradArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchGrad, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
