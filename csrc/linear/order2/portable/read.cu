// Output kernel: out_r = inter-chunk part, from the snapshot, + intra-chunk part, over pairs of rows.
// The forward with x = q; grad_v with x = k on reversed rows.
//
// A block owns kRows rows of x. Everything that they multiply passes through one shared-memory ring: the snapshot (second
// moment, first order, tiles), then pairs of y and w tiles.
//
// shards: FASTMAX_MATH

#include "core/score.h"
#include "linear/dispatch.h"
#include "linear/order2/portable/stream.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim, bool kHasDecay, bool kAdds>
__global__ void __launch_bounds__(ReadTile<Math, kHeadDim>::kThreads, ReadTile<Math, kHeadDim>::kTwoBlocks ? 2 : 1)
    linear_read_kernel(const ReadArgs a, const int row_blocks) {
  using Tile = ReadTile<Math, kHeadDim>;
  using Stage = typename Tile::Stage;
  using Stream = RowStream<Math, kHeadDim, Tile::kStages, Tile::kThreads, kHasDecay, kAdds>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kRowTiles = Tile::kRowTiles, kDepth = kHeadDim / 16;
  constexpr int kBlockBytes = Layout::kBlockWords * Layout::kWordBytes;
  extern __shared__ __align__(128) char shared[];
  const uint32_t x_tile = ptx::smem_address(shared);
  const int lane = lane_index(), g = lane / 4, t = lane % 4;

  const RowBlock at(a, Tile::kRows, row_blocks);
  const int warp_row = threadIdx.x / kWarpSize * kRowTiles * 16;  // within the block
  const bool has_state = a.has_state(at.chunk), normalise = a.z != nullptr;
  const bool tiles = a.order == 2;
  const RowScale no_scale{};
  Stream stream(a, a.y, a.w, a.y_mask, no_scale, a.snapshots, at, normalise && tiles, x_tile + Tile::kXBytes);
  load_masked_tile_async<Element, Tile::kRows, kHeadDim>(x_tile, head_pointer<Element>(a.x, at.batch, at.x_head), a.x.token, at.row,
                                                         a.nx, a.d, nullptr, 0);
  if constexpr (kAdds) stream.add(a.added, x_tile + Tile::kSharedBytes);
  stream.begin();

  float acc[kRowTiles][2 * kDepth][4] = {};
  float z[kRowTiles][2] = {};  // this lane's part of the denominators
  const float* sums = a.sums + at.slot * Layout::kSums;

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

  // Second moment: the inter-chunk denominator is x . (moment x + c1 sum y) + c0 count. Then the first order.
  if (has_state) {
    const int moments = stream.moment_pairs();
    int pair = 0;
    for (int i = 0; i < stream.plain_stages(); ++i) {
      const uint32_t stage = stream.next();
#pragma unroll 1
      for (int j = 0; j < Stage::kPairs && pair < stream.plain_pairs(); ++j, ++pair) {
        if (pair == moments && normalise) {
          add_sums(sums + Layout::kSumY, a.c1);
          fold_into_denominator();
        }
        const int k = (pair < moments ? pair : pair - moments) * 16;
        WeightsA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_weights_a_mk<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, k);
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_feature<Math>(b0, b1, stage + j * Layout::kPairBytes + c * kBlockBytes);
          mma_row_tiles<Math>(acc, 2 * c, x, b0, b1);
        }
      }
    }
    add_sums(sums + Layout::kSumW, a.c0);
  }

  // Second-order tiles, star by star.
  if (tiles && has_state) {
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
    uint32_t pairs = 0;  // of this tile
#pragma unroll 1
    for (int tile = 0; tile < Stars<kHeadDim>::kTiles; ++tile) {
      if (!Tile::kEarlyFactors) load_factors();
      WeightsA<Math> f[kRowTiles];
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) features<Math, kHeadDim>(f[m], scalar[m], base[m], 0);
      const bool begins = tile * 4 % Stage::kPairs == 0;
      pairs = begins ? stream.next_tiles() : pairs + Layout::kTileBytes;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j > 0) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) features<Math, kHeadDim>(f[m], scalar[m], base[m], 2 * j);
          if (j % Stage::kPairs == 0) pairs = stream.next_tiles();
        }
        if (j == 3) {  // the next tile's factors, while the last products run
          if (++offset == Stars<kHeadDim>::length(star)) offset = 0, star = Stars<kHeadDim>::wrap(star + 1);
          if (Tile::kEarlyFactors) load_factors();
        }
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_state_by_feature<Math>(b0, b1, pairs + j % Stage::kPairs * Layout::kPairBytes + c * kBlockBytes);
          mma_row_tiles<Math>(acc, 2 * c, f, b0, b1);
        }
        if (j % Stage::kPairs == 0) stream.copy_tiles(j > 0 || begins);
      }
    }
    stream.end_tiles();
  }

  const int64_t state = static_cast<int64_t>(at.batch) * a.state_heads + at.kv_head;
  const DecayRows<ReadArgs> decay{a, state, at.row + warp_row + g};
  float count = has_state ? a.c0 * sums[Layout::kSumOne] : 0.f;
  if (kHasDecay && has_state) {
    float factors[2 * kRowTiles];
    decay.since_chunk(factors, at.chunk);
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = factors[2 * m + half];
        if (t == 0) z[m][half] += count;
        z[m][half] = decayed(z[m][half], factor);
#pragma unroll
        for (int c = 0; c < 2 * kDepth; ++c) {
          acc[m][c][2 * half] = decayed(acc[m][c][2 * half], factor), acc[m][c][2 * half + 1] = decayed(acc[m][c][2 * half + 1], factor);
        }
      }
    }
    count = 0.f;
  }

  // Intra-chunk.
  const int chunk_row = at.row - at.chunk * a.chunk + warp_row;
  const uint8_t* y_mask = mask_pointer(a.y_mask, at.batch);
  WalkSum x_sums[kHasDecay ? 2 * kRowTiles : 1];
  if constexpr (kHasDecay) decay.load(x_sums);
#pragma unroll 1
  for (int index = 0; index < stream.key_stages(); ++index) {
    const uint32_t y = stream.next(), w = y + Stage::kValueOffset;
    const int k_start = stream.k_start(index);
#pragma unroll 1
    for (int slab = 0; slab < Stage::kKeys; slab += Tile::kSlab) {
      const int key = k_start + slab;  // within the chunk
      if (key > chunk_row + 16 * kRowTiles - 1) break;
      const int source = a.y_row(stream.own_begin()) + key;
      WalkSum y_sums{};
      if constexpr (kHasDecay) {
        y_sums = decay.template slab<Tile::kSlab>(y + Stage::kDecayOffset + slab * 8);
        if (key + Tile::kSlab <= chunk_row && is_fully_decayed<Tile::kSlab>(a.decay, y_sums, x_sums[0])) continue;
      }
      float s[kRowTiles][Tile::kSlab / 8][4] = {};
#pragma unroll
      for (int kk = 0; kk < kDepth; ++kk) {
        FragmentA<Math> x[kRowTiles];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) load_a_mk<Math, kHeadDim>(x[m], x_tile, warp_row + 16 * m, 16 * kk);
#pragma unroll
        for (int n = 0; n < Tile::kSlab / 16; ++n) {
          FragmentB<Math> b0, b1;
          load_b_nk_pair<Math, kHeadDim>(b0, b1, y, slab + 16 * n, 16 * kk);
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
      if constexpr (kHasDecay) {
        for_each_pair<Tile::kSlab / 8>(a.decay, x_sums, y_sums, key + Tile::kSlab <= chunk_row,
                                       [&](auto may_be_zero, int m, int half, int n, int e, float factor) {
                                         float& x = s[m][n][2 * half + e];
                                         x = decltype(may_be_zero)::value ? decayed(x, factor) : x * factor;
                                       });
      }
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
          weights_a_from_accumulator<Math>(weights[m], s[m][2 * k], s[m][2 * k + 1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) z[m][e / 2] += s[m][2 * k][e] + s[m][2 * k + 1][e];
        }
#pragma unroll
        for (int c = 0; c < kDepth; ++c) {
          WeightsB<Math> b0, b1;
          load_weights_b_kn_pair<Math, kHeadDim>(b0, b1, w, 16 * c, slab + 16 * k);
          mma_row_tiles<Math>(acc, 2 * c, weights, b0, b1);
        }
      }
    }
  }

  const uint8_t* x_mask = mask_pointer(a.x_mask, at.batch);
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = at.row + warp_row + 16 * m + 8 * half + g;
      float factor = 1.f;
      if (normalise) {
        float row_sum = quad_sum(z[m][half]) + count;
        if constexpr (kHasDecay) {
          const KeyBounds& first = a.k_start;
          const bool is_blind = first.data != nullptr && row < a.nx &&
                                first.data[at.batch * first.stride.batch + at.kv_head * first.stride.head + row * first.stride.token] >
                                    a.y_row(a.seen_end(row));
          if (is_blind || fabsf(row_sum) < PolynomialScore::kSmallestSum) row_sum = 0.f;
        }
        factor = row_sum == 0.f ? 0.f : 1.f / row_sum;
        if (t == 0 && row < a.nx) a.z[at.x_head_index * a.z_head + row] = row_sum;
      }
      if (row >= a.nx) continue;
      if (x_mask != nullptr && x_mask[static_cast<int64_t>(row) * a.x_mask.token] == 0) factor = 0.f;
#pragma unroll
      for (int c = 0; c < 2 * kDepth; ++c) {
        const int column = 8 * c + 2 * t;
        if (column >= a.dv) break;
        float x = acc[m][c][2 * half], y = acc[m][c][2 * half + 1];
        x = kHasDecay ? decayed(x, factor) : x * factor, y = kHasDecay ? decayed(y, factor) : y * factor;
        if (a.noise.data != nullptr) {
          const float2 r = load_row_pair<Element>(a.noise, a.half_out, at.batch, at.x_head, row, column);
          x *= fmaf(a.dropout, r.x, 1.f), y *= fmaf(a.dropout, r.y, 1.f);
        }
        store_row_pair<Element>(a.out, a.half_out, at.batch, at.x_head, row, column, x, y);
      }
    }
  }
}

struct LaunchRead {
  template <class Math, int kHeadDim>
  static void run(const ReadArgs& a, cudaStream_t stream) {
    using Tile = ReadTile<Math, kHeadDim>;
    static_assert(256 % Tile::kRows == 0, "a block's rows lie in one chunk");
    const int row_blocks = (a.nx + Tile::kRows - 1) / Tile::kRows;
    const auto launch = [&](const char* name, auto kernel, int shared_bytes) {
      launch_kernel(name, kernel, grid_1d(int64_t{row_blocks} * a.states() * a.x_group), Tile::kThreads, shared_bytes, stream, a, row_blocks);
    };
    if (a.added != nullptr) {
      if constexpr (Tile::kAdds) launch("linear_read_adding", linear_read_kernel<Math, kHeadDim, false, true>, Tile::kAddingBytes);
      else throw std::logic_error("fastmax: linear_read adds no states here");
    } else if (a.decay) {
      launch("linear_read_decay", linear_read_kernel<Math, kHeadDim, true, false>, Tile::kSharedBytes);
    } else {
      launch("linear_read", linear_read_kernel<Math, kHeadDim, false, false>, Tile::kSharedBytes);
    }
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const ReadArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchRead, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
