// Fused backward over tiles of scores on Hopper, for head dim 128: one kernel with five products where bwd.h has seven, because
// scores are computed once. Blocks own keys and stream queries, as for grad_k and grad_v there. grad_q of a tile of queries is
// a sum over blocks of keys, in fp32 in global memory. The blocks add to it one after the other in the order of their keys, so
// that its bits are the same in every run.
//
//   S = K Q^T, D = V dO^T    (64 keys of a consumer x 64 queries)   P, dS from the scores, in registers
//   dK += dS Q, dV += P dO   A from registers
//   dQ = dS^T K              (64 queries x 64 columns of a consumer), over the keys of both; dS goes through shared memory
//
// dQ of a tile is computed one tile later. Consumers then do not wait for each other, and one multiplies while the other
// computes scores. Each consumer has a writer (a thread), which adds dQ to the sum in memory after the previous block of keys
// has added its own. Blocks process queries downwards at the same speed, each a little behind the block before it.
//
// Waits for other blocks always end. Indices of work tiles come from a counter. A block processes the work tiles that it took
// in order of their index, and waits only for the previous work tile of the same head, which has a lower index. The block that
// took that one is already running, and the lowest unfinished work tile waits for none. This holds for any number of blocks
// that the device runs at a time and whatever else it runs. The counters are in the workspace of the call and are set to 0 on
// its stream before the kernel; in a CUDA graph a node does so.
#pragma once

#include "quadratic/sm90/fused_bwd_common.h"

namespace fastmax {

struct FusedBwdTile {
  static constexpr int kHeadDim = 128;
  static constexpr FusedBwdShape kShape = FusedBwdShape::of(kHeadDim);
  static constexpr int kParts = kShape.parts, kPartCols = kShape.part_cols(), kPartFloats = kShape.part_floats();
  static constexpr bool kScoresByColumn = false;
  using Bwd = QuadraticBwdSm90Tile<PolynomialScore, DenseVisibility, kHeadDim, true>;
  static constexpr int kConsumers = Bwd::kConsumers, kRows = Bwd::kRows, kBlockRows = Bwd::kBlockRows, kStream = Bwd::kStream;
  static constexpr int kThreads = Bwd::kThreads;
  static_assert(kBlockRows == kShape.keys && kStream == kShape.queries && kConsumers == kParts && kShape.tiles_per_counter == 1,
                "the plan is for other tiles");
  using RowTile = Bwd::RowTile;
  using StreamTile = Bwd::StreamTile;
  using DerivativeTile = SwizzledTile<kBlockRows, kStream>;  // dS, one row per key

  static constexpr int kStages = 2;
  static constexpr int kDerivatives = 2;  // number of tiles of dS
  static constexpr int kWorkTiles = 2;
  static constexpr int kPartBytes = kPartFloats * static_cast<int>(sizeof(float));

  static constexpr int kStageBytes = Bwd::kStageBytes;
  static constexpr int kRowsAt = kStages * kStageBytes;
  static constexpr int kDerivativesAt = kRowsAt + kConsumers * 2 * RowTile::kBytes;
  static constexpr int kPartsAt = kDerivativesAt + kDerivatives * DerivativeTile::kBytes;
  static constexpr int kBarriers = kPartsAt + kConsumers * kPartBytes;
  static constexpr int kRowBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kWorkTileBarriers = kRowBarriers + kConsumers * Ring<1>::kBarrierBytes;
  static constexpr int kPartBarriers = kWorkTileBarriers + Ring<kWorkTiles>::kBarrierBytes;
  static constexpr int kDerivativeBarriers = kPartBarriers + kConsumers * Ring<1>::kBarrierBytes;
  static constexpr int kWorkTilesAt = kDerivativeBarriers + 8 * kDerivatives;
  static constexpr int kEnd = kWorkTilesAt + 4 * kWorkTiles;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kEnd;
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit in shared memory");
};

template <class Score, class Math>
__global__ void __launch_bounds__(FusedBwdTile::kThreads, 1)
    quadratic_fused_bwd_sm90_kernel(const __grid_constant__ QuadraticBwdMaps maps, const BwdParams p, const KeptWords kept,
                                   const float4* row_scores, const int rows_per_head, const int group, const KeyBlockOrder order,
                                   const PartialGradQ partial) {
  using Tile = FusedBwdTile;
  using RowTile = Tile::RowTile;
  using StreamTile = Tile::StreamTile;
  using DerivativeTile = Tile::DerivativeTile;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const Ring<Tile::kStages> ring(base + Tile::kBarriers);
  const FusedBwdQueue<Tile::kWorkTiles> queue{Ring<Tile::kWorkTiles>(base + Tile::kWorkTileBarriers), base + Tile::kWorkTilesAt};
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize), lane = lane_index();
  const int consumer = warp / 4;
  const auto row_ring = [&](int i) { return Ring<1>(base + Tile::kRowBarriers + i * Ring<1>::kBarrierBytes); };
  const auto part_ring = [&](int i) { return Ring<1>(base + Tile::kPartBarriers + i * Ring<1>::kBarrierBytes); };
  const auto row_tile = [&](int i) { return base + Tile::kRowsAt + i * 2 * RowTile::kBytes; };
  const auto derivatives_ready = [&](RingPosition at) { return base + Tile::kDerivativeBarriers + 8 * at.stage; };

  if (threadIdx.x == 0) {
    ring.init(4 * Tile::kConsumers);
    queue.ring.init(4 * Tile::kConsumers + 1 + Tile::kConsumers);
    for (int i = 0; i < Tile::kConsumers; ++i) {
      row_ring(i).init(1);
      ptx::mbarrier_init(part_ring(i).full({}), 4);
      ptx::mbarrier_init(part_ring(i).empty({}), 1);
    }
    for (int i = 0; i < Tile::kDerivatives; ++i) {
      ptx::mbarrier_init(base + Tile::kDerivativeBarriers + 8 * i, 4 * Tile::kConsumers);
    }
    ptx::fence_mbarrier_init();
  }
  __syncthreads();

  const auto work_tile_at = [&](int number) { return FusedBwdWorkTile::of(p, order, number, Tile::kBlockRows, group); };
  const DenseVisibility sees(p, 0);
  const auto tiles_of = [&](const FusedBwdWorkTile& work_tile) {
    return query_tile_ranges<Tile::kStream>(sees, work_tile.row, min(work_tile.row + Tile::kBlockRows, p.m) - 1);
  };

  if (consumer == Tile::kConsumers) {
    ptx::fewer_registers<Tile::Bwd::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) {  // takes work tiles; producer of Q and dO, with row scores
      RingPosition at, work_tiles;
      for (;;) {
        const int number = queue.take(partial.taken, work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        const Range tiles = tiles_of(work_tile).seen;
        for (int i = 0; i < group; ++i) {
          const int head = work_tile.first_head + i;
          for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
            const int token = tile * Tile::kStream;
            const uint32_t stage = base + at.stage * Tile::kStageBytes;
            ring.wait_until_empty(at);
            ring.expect(at, Tile::kStageBytes);
            StreamTile::load(stage, maps.a, ring.full(at), token, head, work_tile.batch);
            StreamTile::load(stage + StreamTile::kBytes, maps.b, ring.full(at), token, head, work_tile.batch);
            const int64_t of_head = (static_cast<int64_t>(work_tile.batch) * p.h + head) * rows_per_head;
            ptx::bulk_load(stage + 2 * StreamTile::kBytes, row_scores + of_head + token, Tile::Bwd::kScoreBytes, ring.full(at));
            at.advance<Tile::kStages>();
          }
        }
      }
    } else if (warp == 4 * Tile::kConsumers + 1 && lane == 0) {  // producer of K and V, once a consumer has a free buffer
      RingPosition at, work_tiles;
      for (;; at.advance<1>()) {
        const int number = queue.next_alone(work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        for (int i = 0; i < Tile::kConsumers; ++i) {
          const Ring<1> buffer = row_ring(i);
          buffer.wait_until_empty(at);
          buffer.expect(at, 2 * RowTile::kBytes);
          const int row = work_tile.row + i * Tile::kRows;
          RowTile::load(row_tile(i), maps.x, buffer.full(at), row, work_tile.head, work_tile.batch);
          RowTile::load(row_tile(i) + RowTile::kBytes, maps.y, buffer.full(at), row, work_tile.head, work_tile.batch);
        }
      }
    } else if (warp >= 4 * Tile::kConsumers + 2 && lane == 0) {  // writer of a consumer's part of grad_q
      const int writes = warp - 4 * Tile::kConsumers - 2;
      const Ring<1> ready = part_ring(writes);
      const uint32_t staged = base + Tile::kPartsAt + writes * Tile::kPartBytes;
      RingPosition at, work_tiles;
      for (;;) {
        const int number = queue.next_alone(work_tiles);
        if (number >= order.work_tiles()) break;
        const FusedBwdWorkTile work_tile = work_tile_at(number);
        const Range tiles = tiles_of(work_tile).seen;
        for (int i = 0; i < group; ++i) {
          const int64_t of_head = (static_cast<int64_t>(work_tile.batch) * p.h + work_tile.first_head + i) * partial.tiles;
          for (int tile = tiles.end - 1; tile >= tiles.begin; --tile) {
            const int64_t part = (of_head + tile) * Tile::kConsumers + writes;
            float* sums = partial.sums + part * Tile::kPartFloats;
            ptx::wait_acquire(partial.added + part, work_tile.block);
            ptx::fence_proxy_async_global();
            ready.wait_until_full(at);
            if (work_tile.block == 0) {
              ptx::bulk_store(sums, staged, Tile::kPartBytes);
            } else {
              ptx::bulk_add_f32(sums, staged, Tile::kPartBytes);
            }
            ptx::bulk_commit();
            ptx::bulk_wait_read<0>();
            ptx::mbarrier_arrive_if(ready.empty(at), true);
            at.advance<1>();
            ptx::bulk_wait<0>();
            ptx::fence_proxy_async_global();
            ptx::store_release(partial.added + part, work_tile.block + 1);
          }
        }
      }
    }
  } else {
    ptx::more_registers<Tile::Bwd::kConsumerRegisters>();
    const int warp_in_group = warp % 4, t = lane % 4, thread = static_cast<int>(threadIdx.x) % 128;
    const uint32_t x_tile = row_tile(consumer);
    const uint32_t staged = base + Tile::kPartsAt + consumer * Tile::kPartBytes;
    RingPosition at, work_tiles, rows, part;  // positions: Q and dO, work tiles, K and V, this consumer's part of grad_q
    RingPosition derivatives;            // position: dS
    for (;;) {
      const int number = queue.next(work_tiles, lane);
      if (number >= order.work_tiles()) break;
      const FusedBwdWorkTile work_tile = work_tile_at(number);
      const TileRanges tiles = tiles_of(work_tile);
      const int row = work_tile.row + consumer * Tile::kRows;
      const int lane_row = row + warp_in_group * 16 + lane / 4;  // and lane_row + 8
      // Keys that are masked or do not exist have no weight. A block with such keys masks single pairs.
      bool keeps[2] = {lane_row < p.m, lane_row + 8 < p.m};
      bool keeps_all = work_tile.row + Tile::kBlockRows <= p.m;
      if (!kept.keeps_all()) {
        uint32_t words[4];
        kept.load(words, work_tile.batch, work_tile.block);
        keeps_all = keeps_all && (words[0] & words[1] & words[2] & words[3]) == 0xffffffffu;
#pragma unroll
        for (int half = 0; half < 2; ++half) keeps[half] = keeps[half] && kept.keeps(work_tile.batch, lane_row + 8 * half);
      }
      const int first = warp_uniform(tiles.seen.begin), end = warp_uniform(tiles.seen.end);
      const int whole = warp_uniform(keeps_all ? min(tiles.whole.begin, end) : end);

      QuadraticBwdRows<Score, DenseVisibility, Math, Tile::kHeadDim, true> sums;
      sums.reset();
      sums.keep_sums();
      float dq[Tile::kPartFloats / 128];
      for (int i = 0; i < Tile::kConsumers; ++i) row_ring(i).wait_until_full(rows);
      sums.load_operands(x_tile, warp_in_group, lane);

      const auto stage_of = [&](RingPosition at) { return base + at.stage * Tile::kStageBytes; };
      const auto before = [](RingPosition at) {
        return RingPosition{at.stage ^ 1, at.parity ^ static_cast<uint32_t>(at.stage == 0)};
      };
      const auto derivatives_of = [&](RingPosition at) { return base + Tile::kDerivativesAt + at.stage * DerivativeTile::kBytes; };
      NoTileDecay decay;
      uint32_t visible[2][Tile::kStream / 32];
      const auto start_dq = [&] {  // for the previous tile
        const Operand<DerivativeTile> ds(derivatives_of(before(derivatives)));
        const Operand<RowTile> keys(row_tile(0));
        Wgmma<Math, Tile::kPartCols>::template ss_first<Major::kMN, Major::kMN>(dq, ds.mn_major(0, 0), keys.mn_major(0, consumer));
#pragma unroll
        for (int kk = 1; kk < Tile::kBlockRows / 16; ++kk) {
          const Operand<RowTile> of_consumer = keys.behind(kk / 4 * 2 * RowTile::kBytes);
          Wgmma<Math, Tile::kPartCols>::template ss<Major::kMN, Major::kMN>(dq, ds.mn_major(kk, 0),
                                                                       of_consumer.mn_major(kk % 4, consumer));
        }
        wgmma_commit();
      };
      // Waits until both consumers have stored dS of the previous tile. Both have then read dS of the tile before it, too.
      const auto wait_for_derivatives = [&] {
        ptx::mbarrier_wait(derivatives_ready(before(derivatives)), before(derivatives).parity);
      };
      const auto stage_dq = [&] {
#pragma unroll
        for (int i = 0; i < Tile::kPartFloats / 128; i += 4) {
          ptx::store_shared_f32x4(staged + (i / 4 * 128 + thread) * 16, make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]));
        }
        ptx::fence_proxy_async();
        __syncwarp();
        ptx::mbarrier_arrive_if(part_ring(consumer).full(part), lane == 0);
        part.advance<1>();
      };
      const auto stage_derivatives = [&](const uint32_t (&packed_ds)[Tile::kStream / 4]) {
        const int first_row = consumer * Tile::kRows + 16 * warp_in_group;
        store_derivatives<DerivativeTile, Tile::kStream>(derivatives_of(derivatives), first_row, packed_ds, lane);
      };
      const auto publish_derivatives = [&] {
        __syncwarp();
        ptx::mbarrier_arrive_if(derivatives_ready(derivatives), lane == 0);
        derivatives.advance<Tile::kDerivatives>();
      };
      int tile = end - 1;
      // Processes a tile, and computes dQ of the previous one, except at the first tile of a work tile.
      const auto visit = [&](auto is_masked, auto is_first) {
        constexpr bool kMasked = decltype(is_masked)::value, kDq = !decltype(is_first)::value;
        constexpr TileKind kKind = kMasked ? TileKind::kMixed : TileKind::kWhole;
        ring.wait_until_full(at);
        wgmma_fence();
        sums.start_scores(x_tile, stage_of(at));
        wgmma_wait<0>();
        keep(sums.s);
        keep(sums.d);
        if constexpr (kMasked) visible_queries_of_kept(visible, sees, tile, lane_row, t, keeps);
        sums.template differentiate<kKind>(stage_of(at), visible, decay, tile * Tile::kStream, lane_row, p, /*streamed=*/nullptr);
        uint32_t packed_p[Tile::kStream / 4], packed_ds[Tile::kStream / 4];
        sums.pack(packed_p, packed_ds);
        keep(packed_p);
        keep(packed_ds);
        wait_for_derivatives();
        if constexpr (kDq) part_ring(consumer).wait_until_empty(part);
        wgmma_fence();
        if constexpr (kDq) start_dq();
        sums.start_sums(packed_p, packed_ds, stage_of(at));
        stage_derivatives(packed_ds);
        if constexpr (kDq) {
          wgmma_wait<1>();
          keep(dq);
        }
        publish_derivatives();
        if constexpr (kDq) stage_dq();
        wgmma_wait<0>();
        sums.keep_sums();
        ring.release(at, lane);
        at.advance<Tile::kStages>();
        --tile;
      };
      using True = std::true_type;
      using False = std::false_type;
      // Whole tiles come before partly visible ones, for each head.
      if (tile >= whole) {
        visit(False(), True());
      } else {
        visit(True(), True());
      }
      for (int head = 0; head < group; ++head) {
        while (tile >= whole) visit(False(), False());
        while (tile >= first) visit(True(), False());
        tile = end - 1;
      }
      wait_for_derivatives();
      part_ring(consumer).wait_until_empty(part);
      wgmma_fence();
      start_dq();
      wgmma_wait<0>();
      keep(dq);
      stage_dq();

      store_accumulator<Math, RowTile>(x_tile + RowTile::kBytes, 0, sums.dy, 1.f, 1.f, warp_in_group, lane);
      ptx::barrier_wait<128 * Tile::kConsumers>(1 + Tile::kConsumers);  // both consumers have read K
      store_accumulator<Math, RowTile>(x_tile, 0, sums.dx, 1.f, 1.f, warp_in_group, lane);
      ptx::fence_proxy_async();
      ptx::barrier_wait<128>(1 + consumer);
      if (warp_in_group == 0 && lane == 0) {
        RowTile::store(x_tile, maps.dx, row, work_tile.head, work_tile.batch);
        RowTile::store(x_tile + RowTile::kBytes, maps.dy, row, work_tile.head, work_tile.batch);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      row_ring(consumer).release(rows, lane, warp_in_group == 0);
      rows.advance<1>();
    }
    if (warp_in_group == 0 && lane == 0) ptx::bulk_wait<0>();
  }
}

}  // namespace fastmax
