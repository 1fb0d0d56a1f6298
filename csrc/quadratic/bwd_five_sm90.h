// Backward over tiles of scores on Hopper in one kernel: five products where bwd_sm90.h has seven, since scores are made once. It owns
// keys and streams queries, as grad_k and grad_v do there; grad_q of a tile of queries is a sum over blocks of keys in fp32, in global
// memory, to which blocks add one after the other in the order of their keys, so that its bits are those of every run.
//
//   S = K Q^T, D = V dO^T   (64 keys of a consumer x 64 queries)   P, dS by the scores, in registers
//   dK += dS Q, dV += P dO   A from registers
//   dQ = dS^T K              (64 queries x 64 columns of a consumer), over the keys of both, whose dS goes through shared memory
//
// dQ of a tile is made one tile later, so that the consumers need not wait for each other and one multiplies while the other has
// scores. A writer (a thread) of each consumer adds it to what is in memory when the block of keys before this one has done so: blocks
// walk down over queries, at one speed, each a little behind the one before it.
//
// Items are taken from a counter, longest first and keys of a head in order: whoever waits waits for an item that was taken before,
// by a block that runs.
#pragma once

#include <algorithm>

#include "quadratic/bwd_sm90.h"

namespace fastmax {

template <int kHeadDim_>
struct QuadraticBwdFiveTile {
  static constexpr int kHeadDim = kHeadDim_;
  using Bwd = QuadraticBwdSm90Tile<DenseVisibility, kHeadDim, true>;
  static constexpr int kConsumers = Bwd::kConsumers, kRows = Bwd::kRows, kBlockRows = Bwd::kBlockRows, kStream = Bwd::kStream;
  static constexpr int kThreads = Bwd::kThreads;
  // Tiles of a step: as many as there are parts of grad_q, 64 queries x 64 columns, for all consumers.
  static constexpr int kPartCols = 64;
  static constexpr int kTilesPerStep = kConsumers * kPartCols / kHeadDim;
  static constexpr int kQueries = kTilesPerStep * kStream;
  static_assert(kTilesPerStep * kHeadDim == kConsumers * kPartCols, "a consumer has a part of grad_q");
  using RowTile = typename Bwd::RowTile;
  using StreamTile = typename Bwd::StreamTile;
  using DerivativeTile = SwizzledTile<kBlockRows, kQueries>;  // dS, a row per key

  static constexpr int kStages = kHeadDim <= 64 ? 4 : 2;
  static constexpr int kDerivatives = 2;  // tiles of dS
  static constexpr int kItems = 2;
  static constexpr int kPartFloats = kStream * kPartCols;  // of grad_q: a tile's panel
  static constexpr int kPartBytes = kPartFloats * static_cast<int>(sizeof(float));

  static constexpr int kStageBytes = Bwd::kStageBytes;
  static constexpr int kRowsAt = kStages * kStageBytes;
  static constexpr int kDerivativesAt = kRowsAt + kConsumers * 2 * RowTile::kBytes;
  static constexpr int kPartsAt = kDerivativesAt + kDerivatives * DerivativeTile::kBytes;
  static constexpr int kBarriers = kPartsAt + kConsumers * kPartBytes;
  static constexpr int kRowBarriers = kBarriers + Ring<kStages>::kBarrierBytes;
  static constexpr int kItemBarriers = kRowBarriers + kConsumers * Ring<1>::kBarrierBytes;
  static constexpr int kPartBarriers = kItemBarriers + Ring<kItems>::kBarrierBytes;
  static constexpr int kDerivativeBarriers = kPartBarriers + kConsumers * Ring<1>::kBarrierBytes;
  static constexpr int kItemsAt = kDerivativeBarriers + 8 * kDerivatives;
  static constexpr int kEnd = kItemsAt + 4 * kItems;
  static constexpr int kSharedBytes = kSwizzledTileAlignment + kEnd;
  static_assert(kSharedBytes <= shared_limit(90), "the tiles do not fit in shared memory");
};

// Blocks of keys, in the order in which they are taken: groups of heads; of a group, the first block of each head, then the second ...
struct KeyBlockOrder {
  int blocks;  // of a head
  int heads;   // of all batch entries
  int heads_per_group;

  // Groups of about as many heads each, at most heads_at_once: many make the blocks of a head start far enough from each other that none
  // waits for the one before it, few read what others of the head left in L2.
  static KeyBlockOrder of(int blocks, int64_t heads, int64_t heads_at_once) {
    constexpr int kMostItems = INT_MAX / 2;  // blocks that find none left count on
    if (blocks * heads > kMostItems) throw std::runtime_error("fastmax: too many blocks of rows: " + std::to_string(blocks * heads));
    const int64_t groups = (heads + heads_at_once - 1) / heads_at_once;
    return {blocks, static_cast<int>(heads), static_cast<int>((heads + groups - 1) / groups)};
  }
  constexpr __host__ __device__ int items() const { return blocks * heads; }

#ifdef __CUDACC__
  __device__ __forceinline__ WorkItem item(int number) const {
    const int group = number / (heads_per_group * blocks), first_head = group * heads_per_group;
    const int in_group = number - first_head * blocks, heads_here = min(heads_per_group, heads - first_head);
    return {in_group / heads_here, first_head + in_group % heads_here};
  }
#endif
};

// Counters that begin at 0: of items that were taken, and for every part of grad_q (tile of a query head, panel) of blocks that have
// added theirs.
struct PartialGradQ {
  uint32_t* taken;
  uint32_t* added;
  float* sums;  // parts, in the order of a consumer's accumulators
  int steps;    // of a head
};

template <class Score, class Math, int kHeadDim>
__global__ void __launch_bounds__(QuadraticBwdFiveTile<kHeadDim>::kThreads, 1)
    quadratic_bwd_five_sm90_kernel(const __grid_constant__ QuadraticBwdMaps maps, const BwdParams p, const KeptWords kept,
                                   const float4* row_scores, const int rows_per_head, const int group, const KeyBlockOrder order,
                                   const PartialGradQ partial) {
  using Tile = QuadraticBwdFiveTile<kHeadDim>;
  using RowTile = typename Tile::RowTile;
  using StreamTile = typename Tile::StreamTile;
  using DerivativeTile = typename Tile::DerivativeTile;
  extern __shared__ uint8_t shared[];
  const uint32_t base = (ptx::smem_address(shared) + kSwizzledTileAlignment - 1) & ~uint32_t{kSwizzledTileAlignment - 1};
  const Ring<Tile::kStages> ring(base + Tile::kBarriers);
  const Ring<Tile::kItems> item_ring(base + Tile::kItemBarriers);
  const int warp = warp_uniform(static_cast<int>(threadIdx.x) / kWarpSize), lane = lane_index();
  const int consumer = warp / 4;
  const auto row_ring = [&](int i) { return Ring<1>(base + Tile::kRowBarriers + i * Ring<1>::kBarrierBytes); };
  const auto part_ring = [&](int i) { return Ring<1>(base + Tile::kPartBarriers + i * Ring<1>::kBarrierBytes); };
  const auto row_tile = [&](int i) { return base + Tile::kRowsAt + i * 2 * RowTile::kBytes; };
  const auto derivatives_ready = [&](RingPosition at) { return base + Tile::kDerivativeBarriers + 8 * at.stage; };

  if (threadIdx.x == 0) {
    ring.init(4 * Tile::kConsumers);
    item_ring.init(4 * Tile::kConsumers + 1 + Tile::kConsumers);
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

  struct Item {
    int block, row, batch, head, first_head;
  };
  const auto place = [&](int number) {
    const WorkItem item = order.item(number);
    const int head = item.head % p.hk;
    return Item{item.row_block, item.row_block * Tile::kBlockRows, item.head / p.hk, head, head * group};
  };
  const DenseVisibility sees(p, 0);
  const auto tiles_of = [&](const Item& item) {
    return walk_over_queries<Tile::kQueries>(sees, item.row, min(item.row + Tile::kBlockRows, p.m) - 1);
  };
  const auto number_of_item = [&](RingPosition at) {
    item_ring.wait_until_full(at);
    return static_cast<int>(ptx::load_shared_u32(base + Tile::kItemsAt + 4 * at.stage));
  };
  // For threads that come alone.
  const auto next_number = [&](RingPosition& at) {
    const int number = number_of_item(at);
    ptx::mbarrier_arrive_if(item_ring.empty(at), true);
    at.template advance<Tile::kItems>();
    return number;
  };

  if (consumer == Tile::kConsumers) {
    ptx::fewer_registers<Tile::Bwd::kProducerRegisters>();
    if (warp == 4 * Tile::kConsumers && lane == 0) {  // takes items; Q and dO, with row scores
      RingPosition at, items;
      for (;;) {
        const int number = static_cast<int>(atomicAdd(partial.taken, 1));
        item_ring.wait_until_empty(items);
        ptx::store_shared_u32(base + Tile::kItemsAt + 4 * items.stage, number);
        ptx::mbarrier_arrive_if(item_ring.full(items), true);
        items.advance<Tile::kItems>();
        if (number >= order.items()) break;
        const Item item = place(number);
        const Range tiles = tiles_of(item).seen;
        for (int i = 0; i < group; ++i) {
          const int head = item.first_head + i;
          for (int tile = tiles.end * Tile::kTilesPerStep - 1; tile >= tiles.begin * Tile::kTilesPerStep; --tile) {
            const int token = tile * Tile::kStream;
            const uint32_t stage = base + at.stage * Tile::kStageBytes;
            ring.wait_until_empty(at);
            ring.expect(at, Tile::kStageBytes);
            StreamTile::load(stage, maps.a, ring.full(at), token, head, item.batch);
            StreamTile::load(stage + StreamTile::kBytes, maps.b, ring.full(at), token, head, item.batch);
            const int64_t of_head = (static_cast<int64_t>(item.batch) * p.h + head) * rows_per_head;
            ptx::bulk_load(stage + 2 * StreamTile::kBytes, row_scores + of_head + token, Tile::Bwd::kScoreBytes, ring.full(at));
            at.advance<Tile::kStages>();
          }
        }
      }
    } else if (warp == 4 * Tile::kConsumers + 1 && lane == 0) {  // K and V, as soon as a consumer has room for them
      RingPosition at, items;
      for (;; at.advance<1>()) {
        const int number = next_number(items);
        if (number >= order.items()) break;
        const Item item = place(number);
        for (int i = 0; i < Tile::kConsumers; ++i) {
          const Ring<1> buffer = row_ring(i);
          buffer.wait_until_empty(at);
          buffer.expect(at, 2 * RowTile::kBytes);
          RowTile::load(row_tile(i), maps.x, buffer.full(at), item.row + i * Tile::kRows, item.head, item.batch);
          RowTile::load(row_tile(i) + RowTile::kBytes, maps.y, buffer.full(at), item.row + i * Tile::kRows, item.head, item.batch);
        }
      }
    } else if (warp >= 4 * Tile::kConsumers + 2 && lane == 0) {  // adds a consumer's part of grad_q to what is in memory
      const int writes = warp - 4 * Tile::kConsumers - 2;
      const Ring<1> ready = part_ring(writes);
      const uint32_t staged = base + Tile::kPartsAt + writes * Tile::kPartBytes;
      RingPosition at, items;
      for (;;) {
        const int number = next_number(items);
        if (number >= order.items()) break;
        const Item item = place(number);
        const Range tiles = tiles_of(item).seen;
        for (int i = 0; i < group; ++i) {
          const int64_t of_head = (static_cast<int64_t>(item.batch) * p.h + item.first_head + i) * partial.steps;
          for (int step = tiles.end - 1; step >= tiles.begin; --step) {
            const int64_t part = (of_head + step) * Tile::kConsumers + writes;
            float* sums = partial.sums + part * Tile::kPartFloats;
            while (ptx::load_acquire(partial.added + part) != static_cast<uint32_t>(item.block)) {
            }
            ptx::fence_proxy_async_global();
            ready.wait_until_full(at);
            if (item.block == 0) {
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
            ptx::store_release(partial.added + part, item.block + 1);
          }
        }
      }
    }
  } else {
    ptx::more_registers<Tile::Bwd::kConsumerRegisters>();
    const int warp_in_group = warp % 4, t = lane % 4, thread = static_cast<int>(threadIdx.x) % 128;
    const uint32_t x_tile = row_tile(consumer);
    const uint32_t staged = base + Tile::kPartsAt + consumer * Tile::kPartBytes;
    RingPosition at, items, rows, part;  // of Q and dO, of items, of K and V, of this consumer's part of grad_q
    RingPosition derivatives;            // of dS
    for (;;) {
      const int number = warp_uniform(number_of_item(items));
      item_ring.release(items, lane);
      items.template advance<Tile::kItems>();
      if (number >= order.items()) break;
      const Item item = place(number);
      const TileRanges tiles = tiles_of(item);
      const int row = item.row + consumer * Tile::kRows;
      const int lane_row = row + warp_in_group * 16 + lane / 4;  // and the row 8 further
      // Keys that are not there, or dropped, have no weight: their block looks at single pairs.
      bool keeps[2] = {lane_row < p.m, lane_row + 8 < p.m};
      bool keeps_all = item.row + Tile::kBlockRows <= p.m;
      if (!kept.keeps_all()) {
        uint32_t words[4];
        kept.load(words, item.batch, item.block);
        keeps_all = keeps_all && (words[0] & words[1] & words[2] & words[3]) == 0xffffffffu;
#pragma unroll
        for (int half = 0; half < 2; ++half) keeps[half] = keeps[half] && kept.keeps(item.batch, lane_row + 8 * half);
      }
      const int first = warp_uniform(tiles.seen.begin), end = warp_uniform(tiles.seen.end);
      const int whole = warp_uniform(keeps_all ? min(tiles.whole.begin, end) : end);

      QuadraticBwdRows<Score, DenseVisibility, Math, kHeadDim, true> sums;
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
      NoTileFading fading;
      uint32_t visible[2][Tile::kStream / 32];
      const auto start_dq = [&] {  // of the step before this one
        const Operand<DerivativeTile> ds(derivatives_of(before(derivatives)));
        const Operand<RowTile> keys(row_tile(0));
        const int ds_panel = Tile::kTilesPerStep > 1 ? consumer : 0, key_panel = Tile::kTilesPerStep > 1 ? 0 : consumer;
        Wgmma<Math, Tile::kPartCols>::template ss_first<Major::kMN, Major::kMN>(dq, ds.mn_major(0, ds_panel), keys.mn_major(0, key_panel));
#pragma unroll
        for (int kk = 1; kk < Tile::kBlockRows / 16; ++kk) {
          const Operand<RowTile> of_consumer = keys.behind(kk / 4 * 2 * RowTile::kBytes);
          Wgmma<Math, Tile::kPartCols>::template ss<Major::kMN, Major::kMN>(dq, ds.mn_major(kk, ds_panel),
                                                                       of_consumer.mn_major(kk % 4, key_panel));
        }
        wgmma_commit();
      };
      // Until dS of the step before this one is there, of both consumers; then both have read the one before that, too.
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
        part.template advance<1>();
      };
      // dS of a tile of this step.
      const auto store_derivatives = [&](const uint32_t (&packed_ds)[Tile::kStream / 4], int i) {
        const int matrix = lane >> 3;
        const int in_tile = consumer * Tile::kRows + 16 * warp_in_group + (matrix & 1) * 8 + (lane & 7);
#pragma unroll
        for (int j = 0; j < Tile::kStream / 8; j += 2) {
          const uint32_t* x = packed_ds + 2 * j;
          ptx::stmatrix_x4(derivatives_of(derivatives) + DerivativeTile::chunk_offset(in_tile, Tile::kStream / 8 * i + j + (matrix >> 1)),
                           x[0], x[1], x[2], x[3]);
        }
        ptx::fence_proxy_async();
      };
      const auto tell_derivatives = [&] {
        __syncwarp();
        ptx::mbarrier_arrive_if(derivatives_ready(derivatives), lane == 0);
        derivatives.template advance<Tile::kDerivatives>();
      };
      const auto differentiate = [&](auto is_masked, int tile, RingPosition at) {
        constexpr bool kMasked = decltype(is_masked)::value;
        if constexpr (kMasked) {
          visible_queries(visible, sees, tile, lane_row, t);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (uint32_t& word : visible[half]) word = keeps[half] ? word : 0;
          }
        }
        sums.template differentiate<kMasked>(stage_of(at), visible, fading, tile * Tile::kStream, lane_row, p.causal_offset,
                                             /*streamed=*/nullptr);
      };
      const auto visit = [&](auto is_masked, int tile) {
        ring.wait_until_full(at);
        wgmma_fence();
        sums.start_scores(x_tile, stage_of(at));
        wgmma_wait<0>();
        keep(sums.s);
        keep(sums.d);
        differentiate(is_masked, tile, at);
      };
      // From P and dS of the i-th tile of a step to the sums. has_next: and to S and D of the next tile, with which `then` goes on, next to
      // the sums; where there is dQ beside these, registers hold no more. is_first: no step of the item was before, for dQ.
      const auto add_tile = [&](auto is_first, auto index, auto has_next, RingPosition next, const auto& then) {
        constexpr bool kHasNext = decltype(has_next)::value;
        constexpr bool kIsLast = decltype(index)::value == Tile::kTilesPerStep - 1, kDq = kIsLast && !decltype(is_first)::value;
        uint32_t packed_p[Tile::kStream / 4], packed_ds[Tile::kStream / 4];
        sums.pack(packed_p, packed_ds);
        keep(packed_p);
        keep(packed_ds);
        if constexpr (decltype(index)::value == 0) wait_for_derivatives();
        if constexpr (kDq) part_ring(consumer).wait_until_empty(part);
        if constexpr (kHasNext) ring.wait_until_full(next);
        wgmma_fence();
        if constexpr (kHasNext && !kDq) sums.start_scores(x_tile, stage_of(next));
        if constexpr (kDq) start_dq();
        sums.start_sums(packed_p, packed_ds, stage_of(at));
        store_derivatives(packed_ds, decltype(index)::value);
        if constexpr (kDq) {
          wgmma_wait<1>();
          keep(dq);
        }
        if constexpr (kIsLast) tell_derivatives();
        if constexpr (kDq) stage_dq();
        if constexpr (kHasNext && !kDq) {
          wgmma_wait<1>();
          keep(sums.s);
          keep(sums.d);
          then();
        }
        if constexpr (kHasNext && kDq) {
          wgmma_fence();
          sums.start_scores(x_tile, stage_of(next));
        }
        wgmma_wait<0>();
        sums.keep_sums();
        ring.release(at, lane);
        at.template advance<Tile::kStages>();
        if constexpr (kHasNext && kDq) {
          keep(sums.s);
          keep(sums.d);
          then();
        }
      };
      using True = std::true_type;
      using False = std::false_type;
      using Zero = std::integral_constant<int, 0>;
      using Last = std::integral_constant<int, Tile::kTilesPerStep - 1>;
      // Whole tiles come before partly visible ones, of each head.
      int step = end - 1;
      if constexpr (Tile::kTilesPerStep == 1) {
        const auto nothing = [] {};
        const auto take = [&](auto is_masked, auto is_first) {
          visit(is_masked, step);
          add_tile(is_first, Zero(), False(), at, nothing);
          --step;
        };
        if (step >= whole) {
          take(False(), True());
        } else {
          take(True(), True());
        }
        for (int head = 0; head < group; ++head) {
          while (step >= whole) take(False(), False());
          while (step >= first) take(True(), False());
          step = end - 1;
        }
      } else {
        const auto after = [](RingPosition at) {
          at.template advance<Tile::kStages>();
          return at;
        };
        // From the first tile of a step to the second, and from that to the first one of another step.
        const auto to_second = [&](auto is_masked) {
          const RingPosition next = after(at);
          add_tile(False(), Zero(), True(), next, [&] { differentiate(is_masked, 2 * step + 1, next); });
        };
        const auto to_first = [&](auto is_masked, auto is_first) {
          const RingPosition next = after(at);
          add_tile(is_first, Last(), True(), next, [&] { differentiate(is_masked, 2 * step, next); });
        };
        if (step >= whole) {
          visit(False(), 2 * step);
          to_second(False());
        } else {
          visit(True(), 2 * step);
          to_second(True());
        }
        if (group * (end - first) == 1) {
          add_tile(True(), Last(), False(), at, [] {});
        } else {
          int head = 0;
          const auto back = [&] {  // to the step before, or the last one of the next head
            if (--step < first) step = end - 1, ++head;
          };
          back();
          if (step >= whole) {
            to_first(False(), True());
            to_second(False());
          } else {
            to_first(True(), True());
            to_second(True());
          }
          for (back(); head < group;) {
            for (; head < group && step >= whole; back()) {
              to_first(False(), False());
              to_second(False());
            }
            for (; head < group && step < whole; back()) {
              to_first(True(), False());
              to_second(True());
            }
          }
          add_tile(False(), Last(), False(), at, [] {});
        }
      }
      wait_for_derivatives();
      part_ring(consumer).wait_until_empty(part);
      wgmma_fence();
      start_dq();
      wgmma_wait<0>();
      keep(dq);
      stage_dq();

      store_accumulator<Math, RowTile>(x_tile + RowTile::kBytes, 0, sums.dy, 1.f, 1.f, warp_in_group, lane);
      ptx::barrier_wait<128 * Tile::kConsumers>(1 + Tile::kConsumers);  // K, which both have read
      store_accumulator<Math, RowTile>(x_tile, 0, sums.dx, 1.f, 1.f, warp_in_group, lane);
      ptx::fence_proxy_async();
      ptx::barrier_wait<128>(1 + consumer);
      if (warp_in_group == 0 && lane == 0) {
        RowTile::store(x_tile, maps.dx, row, item.head, item.batch);
        RowTile::store(x_tile + RowTile::kBytes, maps.dy, row, item.head, item.batch);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
      }
      row_ring(consumer).release(rows, lane, warp_in_group == 0);
      rows.template advance<1>();
    }
    if (warp_in_group == 0 && lane == 0) ptx::bulk_wait<0>();
  }
}

// grad_q from its parts: a block each.
template <class Math, int kHeadDim>
__global__ void __launch_bounds__(128)
    quadratic_bwd_round_q_sm90_kernel(const __grid_constant__ CUtensorMap grad_q, const int heads, const int tokens,
                                      const PartialGradQ partial) {
  using Tile = QuadraticBwdFiveTile<kHeadDim>;
  using PartTile = SwizzledTile<Tile::kStream, Tile::kPartCols>;
  __shared__ __align__(kSwizzledTileAlignment) uint8_t shared[PartTile::kBytes];
  const uint32_t tile = ptx::smem_address(shared);
  const int64_t part = blockIdx.x;
  constexpr int kPanels = kHeadDim / Tile::kPartCols;
  const int parts_of_head = partial.steps * Tile::kConsumers, head = static_cast<int>(part / parts_of_head);
  const int in_head = static_cast<int>(part % parts_of_head), panel = in_head % kPanels, token = in_head / kPanels * Tile::kStream;
  if (token >= tokens) return;
  const float4* sums = reinterpret_cast<const float4*>(partial.sums + part * Tile::kPartFloats) + threadIdx.x;
  float dq[Tile::kPartFloats / 128];
#pragma unroll
  for (int i = 0; i < Tile::kPartFloats / 128; i += 4) {
    const float4 x = sums[i / 4 * 128];
    dq[i] = x.x, dq[i + 1] = x.y, dq[i + 2] = x.z, dq[i + 3] = x.w;
  }
  store_accumulator<Math, PartTile>(tile, 0, dq, 1.f, 1.f, static_cast<int>(threadIdx.x) / kWarpSize, lane_index());
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::tma_store(grad_q, tile, panel * Tile::kPartCols, token, head % heads, head / heads);
    ptx::bulk_commit();
    ptx::bulk_wait<0>();
  }
}

struct QuadraticBwdFiveWorkspace : QuadraticBwdSm90Workspace {
  int steps;
  int64_t parts;
  size_t counters, sums;

  explicit QuadraticBwdFiveWorkspace(const BwdParams& p) : QuadraticBwdSm90Workspace(p) {
    const auto align = [](size_t offset) { return (offset + 255) / 256 * 256; };
    const int queries = 2 * 64 * 64 / p.head_dim;  // of a step
    steps = (p.n + queries - 1) / queries;
    parts = int64_t{p.b} * p.h * steps * 2;
    counters = align(bytes);
    sums = align(counters + (1 + static_cast<size_t>(parts)) * sizeof(uint32_t));
    bytes = sums + static_cast<size_t>(parts) * 64 * 64 * sizeof(float);
  }
};

template <class Score>
struct LaunchQuadraticBwdFiveSm90 {
  template <class Math, int kHeadDim>
  static void run(const BwdParams& p, int heads_at_once, cudaStream_t stream) {
    using Element = typename Math::Element;
    using Tile = QuadraticBwdFiveTile<kHeadDim>;
    const QuadraticBwdFiveWorkspace at(p);
    char* workspace = static_cast<char*>(p.workspace);
    float4* row_scores = reinterpret_cast<float4*>(workspace);
    Element* grad_o_copy = at.copies_grad_o ? reinterpret_cast<Element*>(workspace + at.grad_o) : nullptr;
    launch_row_scores<Score, Element, kHeadDim>(p, row_scores_per_head(p), row_scores, grad_o_copy, stream);
    const KeptWords kept = fill_kept_words(p, workspace + at.kept, stream);
    uint32_t* counters = reinterpret_cast<uint32_t*>(workspace + at.counters);
    check_cuda(cudaMemsetAsync(counters, 0, at.sums - at.counters, stream), "cudaMemsetAsync");
    const PartialGradQ partial{counters, counters + 1, reinterpret_cast<float*>(workspace + at.sums), at.steps};

    const TokenTensor q{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math}, grad_q{p.grad_q, p.grad_q_stride, p.b, p.h, p.n, p.d, p.math};
    const TokenTensor k{p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math}, grad_k{p.grad_k, p.grad_k_stride, p.b, p.hk, p.m, p.d, p.math};
    const TokenTensor v{p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math}, grad_v{p.grad_v, p.grad_v_stride, p.b, p.hk, p.m, p.dv, p.math};
    TokenTensor grad_o{p.grad_o, p.grad_o_stride, p.b, p.h, p.n, p.dv, p.math};
    if (at.copies_grad_o) {
      grad_o.data = grad_o_copy;
      grad_o.stride = {int64_t{p.h} * p.n * p.dv, int64_t{p.n} * p.dv, p.dv};
    }
    const QuadraticBwdMaps maps{tensor_map(k, Tile::kRows),        tensor_map(v, Tile::kRows),      tensor_map(q, Tile::kStream),
                                tensor_map(grad_o, Tile::kStream), tensor_map(grad_k, Tile::kRows), tensor_map(grad_v, Tile::kRows)};
    const KeyBlockOrder order = KeyBlockOrder::of((p.m + Tile::kBlockRows - 1) / Tile::kBlockRows, int64_t{p.b} * p.hk, heads_at_once);
    launch_kernel("quadratic_bwd_five_sm90", quadratic_bwd_five_sm90_kernel<Score, Math, kHeadDim>,
                  grid_1d(std::min(order.items(), p.sm_count)), Tile::kThreads, Tile::kSharedBytes, stream, maps, p, kept, row_scores,
                  row_scores_per_head(p), p.h / p.hk, order, partial);
    launch_kernel("quadratic_bwd_round_q_sm90", quadratic_bwd_round_q_sm90_kernel<Math, kHeadDim>, grid_1d(at.parts), 128, 0, stream,
                  tensor_map(grad_q, Tile::kStream), p.h, p.n, partial);
  }
};

}  // namespace fastmax
