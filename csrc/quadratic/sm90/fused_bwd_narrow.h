// Fused backward over tiles of scores on Hopper, for narrow heads: the sums and the order of fused_bwd.h. The CUDA cores
// compute the scores of a tile once for all gradients. At head dim 32 this takes longer than the products.
//
//   S = K Q^T, D = V dO^T    (64 keys of a consumer x 64 queries)   P, dS from the scores, in registers
//   dK += dS Q, dV += P dO   A from registers
//   dQ = dS^T K              (64 queries), over the keys of all consumers, by a warpgroup that receives dS through a ring
//
// Consumers wait neither for each other nor for memory. Two writers (a thread each) take turns at adding dQ to the sums in
// memory, per group of tiles that share a counter. While one waits for the previous block of keys and for its own sums to
// arrive, the other adds.
//
// The score data of the queries are as short as possible (Score::Column). Every warp reads all of them, and 16 bytes per query
// would take shared memory as long as the operands of all products.
#pragma once

#include "quadratic/sm90/fused_bwd_common.h"

namespace fastmax {

template <class Score, int kHeadDim_>
struct FusedBwdNarrowTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr FusedBwdShape kShape = FusedBwdShape::of(kHeadDim);
  static constexpr int kPartFloats = kShape.part_floats(), kPartCols = kShape.part_cols();
  static_assert(kShape.parts == 1, "a warpgroup makes all of grad_q");
  static constexpr bool kScoresByColumn = true;
  using Bwd = QuadraticBwdSm90Tile<PolynomialScore, DenseVisibility, kHeadDim, true>;
  static constexpr int kRows = Bwd::kRows, kStream = Bwd::kStream;
  static constexpr int kConsumers = kShape.keys / kRows;
  static constexpr int kKeys = kConsumers * kRows;
  static constexpr int kWriters = 2;  // take turns
  static_assert(kKeys == kShape.keys && kStream == kShape.queries, "the plan is for other tiles");
  using RowTile = typename Bwd::RowTile;
  using StreamTile = typename Bwd::StreamTile;
  using DerivativeTile = SwizzledTile<kKeys, kStream>;  // dS, one row per key

  // Whether S and D of the next tile overlap with both sums of the current one, as in bwd.h, if registers allow.
  static constexpr bool kPipelined = kHeadDim <= 32;
  static constexpr int kGradQRegisters = kHeadDim <= 32 ? 48 : 72, kProducerRegisters = kHeadDim <= 32 ? 48 : 40;
  static constexpr int kConsumerRegisters = kHeadDim <= 32 ? 208 : 200;
  static constexpr int kThreads = (kConsumers + 2) * 128;
  static_assert(kConsumers * kConsumerRegisters + kGradQRegisters + kProducerRegisters <=
                    (kConsumers + 2) * ptx::registers_at_launch(kThreads),
                "consumers would wait for registers that nobody gives up");

  static constexpr int kStages = kHeadDim <= 32 ? 6 : 4;
  static constexpr int kRowBuffers = 2;
  static constexpr int kDerivatives = kHeadDim <= 32 ? 4 : 3;  // number of tiles of dS
  static constexpr int kPartBuffers = kHeadDim <= 32 ? 4 : 1;  // dQ buffers per writer
  static constexpr int kWorkTiles = 2;
  static constexpr int kColumnBytes = kStream * static_cast<int>(sizeof(typename Score::Column));
  static constexpr int kPartBytes = kPartFloats * static_cast<int>(sizeof(float));

  static constexpr int kStageBytes =
      2 * StreamTile::kBytes + (kColumnBytes + kSwizzledTileAlignment - 1) / kSwizzledTileAlignment * kSwizzledTileAlignment;
  static constexpr int kRowBytes = kConsumers * 2 * RowTile::kBytes;  // K and V of a work tile
  static constexpr int kRowsAt = kStages * kStageBytes;
  static constexpr int kDerivativesAt = kRowsAt + kRowBuffers * kRowBytes;
  static constexpr int kPartsAt = kDerivativesAt + kDerivatives * DerivativeTile::kBytes;
  static constexpr int kBarriers = kPartsAt + kWriters * kPartBuffers * kPartBytes;
  static constexpr int kRowBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kDerivativeBarriers = kRowBarriers + Ring<kRowBuffers>::kBarrierBytes;
  static constexpr int kPartBarriers = kDerivativeBarriers + Ring<kDerivatives>::kBarrierBytes;
  static constexpr int kWorkTileBarriers = kPartBarriers + kWriters * Ring<kPartBuffers>::kBarrierBytes;
  static constexpr int kWorkTilesAt = kWorkTileBarriers + Ring<kWorkTiles>::kBarrierBytes;
  static constexpr int kEnd = kWorkTilesAt + 4 * kWorkTiles;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kEnd;
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit in shared memory");
};

// Load the score data of two neighbouring queries.
__device__ __forceinline__ void load_columns(float (&columns)[2], uint32_t address) {
  const float2 x = ptx::load_shared_f32x2(address);
  columns[0] = x.x, columns[1] = x.y;
}
__device__ __forceinline__ void load_columns(float2 (&columns)[2], uint32_t address) {
  const float4 x = ptx::load_shared_f32x4(address);
  columns[0] = make_float2(x.x, x.y), columns[1] = make_float2(x.z, x.w);
}

// columns: (b, h, rows_per_head).
template <class Score, class Math, int kHeadDim>
__global__ void __launch_bounds__(FusedBwdNarrowTile<Score, kHeadDim>::kThreads, 1)
    quadratic_fused_bwd_narrow_sm90_kernel(const __grid_constant__ QuadraticBwdMaps maps, const BwdParams p, const KeptWords kept,
                                           const typename Score::Column* columns, const int rows_per_head, const int group,
                                           const KeyBlockOrder order, const PartialGradQ partial) {
  using Tile = FusedBwdNarrowTile<Score, kHeadDim>;
  using RowTile = typename Tile::RowTile;
  using StreamTile = typename Tile::StreamTile;
  using DerivativeTile = typename Tile::DerivativeTile;
  using Element = typename Math::Element;
  constexpr int kTilesPerCounter = Tile::kShape.tiles_per_counter;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const Ring<Tile::kStages> ring(base + Tile::kBarriers);
  const Ring<Tile::kRowBuffers> row_ring(base + Tile::kRowBarriers);
  const Ring<Tile::kDerivatives> derivative_ring(base + Tile::kDerivativeBarriers);
  const FusedBwdQueue<Tile::kWorkTiles> queue{Ring<Tile::kWorkTiles>(base + Tile::kWorkTileBarriers), base + Tile::kWorkTilesAt};
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize), lane = lane_index();
  const int consumer = warp / 4;
  const auto row_tile = [&](int i, RingPosition at) {
    return base + Tile::kRowsAt + at.stage * Tile::kRowBytes + i * 2 * RowTile::kBytes;
  };
  const auto derivatives_of = [&](RingPosition at) { return base + Tile::kDerivativesAt + at.stage * DerivativeTile::kBytes; };
  const auto part_ring = [&](int writer) {
    return Ring<Tile::kPartBuffers>(base + Tile::kPartBarriers + writer * Ring<Tile::kPartBuffers>::kBarrierBytes);
  };
  const auto part_of = [&](int writer, RingPosition at) {
    return base + Tile::kPartsAt + (writer * Tile::kPartBuffers + at.stage) * Tile::kPartBytes;
  };

  if (threadIdx.x == 0) {
    ring.init(4 * Tile::kConsumers);
    row_ring.init(4 * (Tile::kConsumers + 1));
    derivative_ring.init(4, 4 * Tile::kConsumers);
    for (int i = 0; i < Tile::kWriters; ++i) part_ring(i).init(1, 4);
    queue.ring.init(4 * (Tile::kConsumers + 1) + 1 + Tile::kWriters);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const auto work_tile_at = [&](int number) { return FusedBwdWorkTile::of(p, order, number, Tile::kKeys, group); };
  const DenseVisibility sees(p, 0);
  // Tiles of queries that see the `count` keys from `row` on.
  const auto tiles_of = [&](int row, int count) {
    return query_tile_ranges<Tile::kStream>(sees, row, min(row + count, p.m) - 1);
  };

  if (consumer == Tile::kConsumers + 1) {
    ptx::fewer_registers<Tile::kProducerRegisters>();
    const int role = warp - 4 * (Tile::kConsumers + 1);
    if (role == 0 && lane == 0) {  // takes work tiles; producer of Q and dO, with score data
      RingPosition at, work_tiles;
      for (;;) {
        const int number = queue.take(partial.taken, work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        const Range tiles = tiles_of(work_tile.row, Tile::kKeys).seen;
        for (int i = 0; i < group; ++i) {
          const int head = work_tile.first_head + i;
          for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
            const int token = tile * Tile::kStream;
            const uint32_t stage = base + at.stage * Tile::kStageBytes;
            ring.wait_until_empty(at);
            ring.expect(at, 2 * StreamTile::kBytes + Tile::kColumnBytes);
            StreamTile::load(stage, maps.a, ring.full(at), token, head, work_tile.batch);
            StreamTile::load(stage + StreamTile::kBytes, maps.b, ring.full(at), token, head, work_tile.batch);
            const int64_t of_head = (static_cast<int64_t>(work_tile.batch) * p.h + head) * rows_per_head;
            ptx::bulk_load(stage + 2 * StreamTile::kBytes, columns + of_head + token, Tile::kColumnBytes, ring.full(at));
            at.template advance<Tile::kStages>();
          }
        }
      }
    } else if (role == 1 && lane == 0) {  // producer of K and V, one work tile ahead
      RingPosition at, work_tiles;
      for (;; at.template advance<Tile::kRowBuffers>()) {
        const int number = queue.next_alone(work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        row_ring.wait_until_empty(at);
        row_ring.expect(at, Tile::kRowBytes);
        for (int i = 0; i < Tile::kConsumers; ++i) {
          const uint32_t tile = row_tile(i, at);
          const int row = work_tile.row + i * Tile::kRows;
          RowTile::load(tile, maps.x, row_ring.full(at), row, work_tile.head, work_tile.batch);
          RowTile::load(tile + RowTile::kBytes, maps.y, row_ring.full(at), row, work_tile.head, work_tile.batch);
        }
      }
    } else if (role >= 2 && lane == 0) {  // a writer
      // Adds the parts of a counter concurrently if each has a buffer. Reading a part takes as long as adding it, so releasing
      // buffers earlier would gain nothing.
      constexpr bool kSideBySide = Tile::kPartBuffers >= kTilesPerCounter;
      const int writer = role - 2;
      const Ring<Tile::kPartBuffers> ready = part_ring(writer);
      int turn = 0;
      RingPosition at, work_tiles;
      for (;;) {
        const int number = queue.next_alone(work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        const Range tiles = tiles_of(work_tile.row, Tile::kKeys).seen;
        for (int i = 0; i < group; ++i) {
          const int64_t head = static_cast<int64_t>(work_tile.batch) * p.h + work_tile.first_head + i;
          for (int tile = tiles.end - 1; tile >= tiles.begin; turn ^= 1) {
            const int counter = tile / kTilesPerCounter, last = max(counter * kTilesPerCounter, tiles.begin);
            if (turn != writer) {
              tile = last - 1;
              continue;
            }
            uint32_t* added = partial.added + head * partial.counters + counter;
            ptx::wait_acquire(added, work_tile.block);
            ptx::fence_proxy_async_global();
            [[maybe_unused]] int in_flight = tile - last + 1;
            for (; tile >= last; --tile) {
              float* sums = partial.sums + (head * partial.tiles + tile) * Tile::kPartFloats;
              ready.wait_until_full(at);
              if (work_tile.block == 0) {
                ptx::bulk_store(sums, part_of(writer, at), Tile::kPartBytes);
              } else {
                ptx::bulk_add_f32(sums, part_of(writer, at), Tile::kPartBytes);
              }
              ptx::bulk_commit();
              if constexpr (!kSideBySide) {
                ptx::bulk_wait_read<0>();
                ptx::mbarrier_arrive_if(ready.empty(at), true);
              }
              at.template advance<Tile::kPartBuffers>();
            }
            ptx::bulk_wait<0>();
            if constexpr (kSideBySide) {
              for (; in_flight > 0; --in_flight) {
                const RingPosition oldest{(at.stage + Tile::kPartBuffers - in_flight) % Tile::kPartBuffers};
                ptx::mbarrier_arrive_if(ready.empty(oldest), true);
              }
            }
            ptx::fence_proxy_async_global();
            ptx::store_release(added, work_tile.block + 1);
          }
        }
      }
    }
  } else if (consumer == Tile::kConsumers) {  // computes dQ
    ptx::fewer_registers<Tile::kGradQRegisters>();
    const int thread = static_cast<int>(threadIdx.x) % 128;
    RingPosition work_tiles, rows, derivatives, part, next_part;  // part, next_part: of the current and of the other writer
    int writer = 0;
    for (;;) {
      const int number = queue.next(work_tiles, lane);
      if (number >= order.work_tiles()) break;
      const FusedBwdWorkTile work_tile = work_tile_at(number);
      const Range tiles = tiles_of(work_tile.row, Tile::kKeys).seen;
      const int first = warp_uniform(tiles.begin), end = warp_uniform(tiles.end), count = group * (end - first);
      row_ring.wait_until_full(rows);
      for (int i = 0, tile = end - 1; i < count; ++i) {
        float dq[Tile::kPartFloats / 128];
        derivative_ring.wait_until_full(derivatives);
        wgmma_fence();
        const Operand<DerivativeTile> ds(derivatives_of(derivatives));
        const Operand<RowTile> keys(row_tile(0, rows));
        using Product = Wgmma<Math, Tile::kPartCols>;
        Product::template ss_first<Major::kMN, Major::kMN>(dq, ds.mn_major(0), keys.mn_major(0));
#pragma unroll
        for (int kk = 1; kk < Tile::kKeys / 16; ++kk) {
          const Operand<RowTile> of_consumer = keys.behind(kk / (Tile::kRows / 16) * 2 * RowTile::kBytes);
          Product::template ss<Major::kMN, Major::kMN>(dq, ds.mn_major(kk), of_consumer.mn_major(kk % (Tile::kRows / 16)));
        }
        wgmma_commit();
        wgmma_wait<0>();
        keep(dq);
        derivative_ring.release(derivatives, lane);
        derivatives.template advance<Tile::kDerivatives>();
        const Ring<Tile::kPartBuffers> ready = part_ring(writer);
        ready.wait_until_empty(part);
        const uint32_t staged = part_of(writer, part) + thread * 16;
#pragma unroll
        for (int j = 0; j < Tile::kPartFloats / 128; j += 4) {
          ptx::store_shared_f32x4(staged + j / 4 * 128 * 16, make_float4(dq[j], dq[j + 1], dq[j + 2], dq[j + 3]));
        }
        ptx::fence_proxy_async();
        ready.publish(part, lane);
        part.template advance<Tile::kPartBuffers>();
        if (tile == first || tile % kTilesPerCounter == 0) {
          const RingPosition other = next_part;
          next_part = part, part = other, writer ^= 1;
        }
        tile = tile == first ? end - 1 : tile - 1;
      }
      row_ring.release(rows, lane);
      rows.template advance<Tile::kRowBuffers>();
    }
  } else {
    ptx::more_registers<Tile::kConsumerRegisters>();
    const int warp_in_group = warp % 4, t = lane % 4;
    const Score score(p);
    RingPosition at, work_tiles, rows, derivatives;
    for (;;) {
      const int number = queue.next(work_tiles, lane);
      if (number >= order.work_tiles()) break;
      const FusedBwdWorkTile work_tile = work_tile_at(number);
      const int row = work_tile.row + consumer * Tile::kRows;         // first row of the warpgroup
      const int lane_row = row + warp_in_group * 16 + lane / 4;  // and lane_row + 8
      // Keys that are masked or do not exist have no weight. A warpgroup with such keys masks single pairs.
      bool keeps[2] = {lane_row < p.m, lane_row + 8 < p.m};
      bool keeps_all = row + Tile::kRows <= p.m;
      if (!kept.keeps_all()) {
        if (keeps_all) {
          uint32_t words[2];
          kept.load(words, work_tile.batch, row / Tile::kRows);
          keeps_all = (words[0] & words[1]) == 0xffffffffu;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) keeps[half] = keeps[half] && kept.keeps(work_tile.batch, lane_row + 8 * half);
      }
      // Tiles of the block. The warpgroup itself may see fewer, and adds zeros for the others.
      const Range tiles = tiles_of(work_tile.row, Tile::kKeys).seen;
      const int first = warp_uniform(tiles.begin), end = warp_uniform(tiles.end);
      const int whole = warp_uniform(keeps_all ? min(tiles_of(row, Tile::kRows).whole.begin, end) : end);

      QuadraticBwdRows<Score, DenseVisibility, Math, kHeadDim, true> sums;
      sums.reset();
      sums.keep_sums();
      row_ring.wait_until_full(rows);
      const uint32_t x_tile = row_tile(consumer, rows);
      sums.load_operands(x_tile, warp_in_group, lane);

      const auto stage_of = [&](RingPosition at) { return base + at.stage * Tile::kStageBytes; };
      // Score data of the queries of this lane. The first kAhead columns are loaded before S and D are complete, the others
      // during the conversion. If all were loaded at once, the compiler would compute P and dS after the sums that they should
      // overlap with.
      constexpr int kAhead = 2;
      typename Score::Column queries[Tile::kStream / 8][2];
      const auto load_queries = [&](RingPosition at, int j) {
        load_columns(queries[j], stage_of(at) + 2 * StreamTile::kBytes + (8 * j + 2 * t) * static_cast<int>(sizeof(queries[j][0])));
      };
      const auto load_first_queries = [&](RingPosition at) {
#pragma unroll
        for (int j = 0; j < kAhead; ++j) load_queries(at, j);
      };
      // Converts S and D of a tile, which is in the stage, to P and dS.
      const auto differentiate = [&](auto is_masked, int tile, RingPosition at) {
        constexpr bool kMasked = decltype(is_masked)::value;
        uint32_t visible[2][Tile::kStream / 32];
        if constexpr (kMasked) visible_queries_of_kept(visible, sees, tile, lane_row, t, keeps);
#pragma unroll
        for (int j = 0; j < Tile::kStream / 8; ++j) {
          if (j + kAhead < Tile::kStream / 8) load_queries(at, j + kAhead);
#pragma unroll
          for (int i = 4 * j; i < 4 * j + 4; ++i) {
            const bool counts = !kMasked || is_visible(visible, i);
            const WeightAndDerivative pair = score.weight_and_derivative(queries[j][i % 2], sums.s[i], sums.d[i]);
            sums.s[i] = counts ? pair.p : 0.f;
            sums.d[i] = counts ? pair.ds : 0.f;
          }
        }
      };
      const auto publish_derivatives = [&](const uint32_t (&packed_ds)[Tile::kStream / 4]) {
        const int first_row = consumer * Tile::kRows + 16 * warp_in_group;
        store_derivatives<DerivativeTile, Tile::kStream>(derivatives_of(derivatives), first_row, packed_ds, lane);
        derivative_ring.publish(derivatives, lane);
        derivatives.template advance<Tile::kDerivatives>();
      };
      int tile = end - 1;
      // Without overlap: `visit` computes P and dS of the current stage, and add_tile adds it to the sums.
      const auto visit = [&](auto is_masked) {
        ring.wait_until_full(at);
        wgmma_fence();
        sums.start_scores(x_tile, stage_of(at));
        load_first_queries(at);
        wgmma_wait<0>();
        keep(sums.s);
        keep(sums.d);
        differentiate(is_masked, tile, at);
        --tile;
      };
      const auto add_tile = [&] {
        uint32_t packed_p[Tile::kStream / 4], packed_ds[Tile::kStream / 4];
        sums.pack(packed_p, packed_ds);
        keep(packed_p);
        keep(packed_ds);
        derivative_ring.wait_until_empty(derivatives);
        wgmma_fence();
        sums.start_sums(packed_p, packed_ds, stage_of(at));
        publish_derivatives(packed_ds);
        wgmma_wait<0>();
        sums.keep_sums();
        ring.release(at, lane);
        at.template advance<Tile::kStages>();
      };
      // Whole tiles come before partly visible ones, for each head.
      const auto for_each_tile = [&](const auto& step) {
        for (int head = 0; head < group; ++head) {
          while (tile >= whole) step(std::false_type());
          while (tile >= first) step(std::true_type());
          tile = end - 1;
        }
      };
      if constexpr (Tile::kPipelined) {
        // Starts with P and dS of the current tile and ends with those of the next.
        const auto step = [&](auto is_masked) {
          RingPosition next = at;
          next.template advance<Tile::kStages>();
          ring.wait_until_full(next);
          uint32_t packed_p[Tile::kStream / 4], packed_ds[Tile::kStream / 4];
          sums.pack(packed_p, packed_ds);
          keep(packed_p);
          keep(packed_ds);
          derivative_ring.wait_until_empty(derivatives);
          wgmma_fence();
          sums.start_scores(x_tile, stage_of(next));
          sums.start_sums(packed_p, packed_ds, stage_of(at));
          publish_derivatives(packed_ds);
          load_first_queries(next);
          wgmma_wait<1>();
          keep(sums.s);
          keep(sums.d);
          differentiate(is_masked, tile, next);
          wgmma_wait<0>();
          sums.keep_sums();
          ring.release(at, lane);
          at = next;
          --tile;
        };
        if (tile >= whole) {
          visit(std::false_type());
        } else {
          visit(std::true_type());
        }
        for_each_tile(step);
        add_tile();
      } else {
        for_each_tile([&](auto is_masked) {
          visit(is_masked);
          add_tile();
        });
      }
      row_ring.release(rows, lane);
      rows.template advance<Tile::kRowBuffers>();

      const auto store = [&](void* tensor, const Stride& stride, int cols, const float (&sum)[kHeadDim / 2]) {
        store_accumulator_rows<Math>(head_of<Element>(tensor, stride, work_tile.batch, work_tile.head), stride.token, lane_row, p.m, cols, sum, 1.f,
                                     1.f);
      };
      store(p.grad_v, p.grad_v_stride, p.dv, sums.dy);
      store(p.grad_k, p.grad_k_stride, p.d, sums.dx);
    }
  }
}

}  // namespace fastmax
