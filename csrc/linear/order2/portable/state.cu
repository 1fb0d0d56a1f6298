// States of the linear algorithm: sums over y rows of features(y) w^T, of e y y^T, and their first-order and constant terms,
// as exclusive prefixes at chunk boundaries ("snapshots").
//
// A warp has one 64-feature tile (and, for some warps, one extra octet pair) times kValues value columns in fp32 accumulators and adds y in
// steps of kTokens. At a boundary it stores the snapshot.
//
// shards: FASTMAX_MATH

#include <climits>
#include <type_traits>

#include "core/lanes.h"
#include "linear/dispatch.h"
#include "linear/order2/linear2.h"
#include "linear/order2/portable/state_share.h"
#include "linear/order2/row_walk.h"

namespace fastmax {
namespace {

// What of an extra the inner loop is compiled for: none; a leftover tile; plain columns of y or the constant one, with values from w or
// from e y.
enum class ExtraCode { kNone, kTile, kPlainW, kPlainY };

template <class F>
__device__ __forceinline__ void with_extra_code(Extra extra, const F& f) {
  switch (extra) {
    case Extra::kNone: return f(std::integral_constant<ExtraCode, ExtraCode::kNone>{});
    case Extra::kTile: return f(std::integral_constant<ExtraCode, ExtraCode::kTile>{});
    case Extra::kLinear:
    case Extra::kSumW: return f(std::integral_constant<ExtraCode, ExtraCode::kPlainW>{});
    case Extra::kMoment:
    case Extra::kSumY: return f(std::integral_constant<ExtraCode, ExtraCode::kPlainY>{});
  }
}

// A warp's accumulators and operands.
template <class Math, int kHeadDim>
struct StateWarp : WarpShare<Math, kHeadDim> {
  using Share = WarpShare<Math, kHeadDim>;
  using Tile = StateTile<Math, kHeadDim>;
  static constexpr int kBlocks16 = Tile::kValues / 16;
  static constexpr int kRegs = FragmentSize<Math>::kWeightsB;

  float acc[8][kBlocks16][4] = {};
  float extra_acc[2][kBlocks16][4] = {};
  float count = 0.f;  // this lane's part of sum e

  WeightsB<Math> f[Tile::kOctets];  // operands of the next products
  WeightsB<Math> base, scalar;      // what they are made of
  WeightsA<Math> values[Tile::kPipelined ? kBlocks16 : 1];
  WeightsB<Math> extra_f[2];

  __device__ __forceinline__ StateWarp(const StateArgs& a, int block) : Share(a.weights, block) {}

  // Operands of the extra octet pair for tokens [k, k + 16).
  template <ExtraCode kExtra>
  __device__ __forceinline__ void load_extra(uint32_t y, int k) {
    WeightsB<Math> column0, column1;
    load_weights_b_kn_octets<Math, kHeadDim>(column0, column1, y, this->extra_column0, this->extra_column1, k);
    if constexpr (kExtra == ExtraCode::kTile) {
#pragma unroll
      for (int i = 0; i < kRegs; ++i) {
        extra_f[0][i] = multiply_operand<Math>(column0[i], ptx::shuffle_octet(column1[i], this->extra_octet));
        extra_f[1][i] = multiply_operand<Math>(column0[i], ptx::shuffle_octet(column1[i], this->extra_octet + 1));
      }
    } else {
      const uint32_t constant = lane_index() < 4 ? kOperandOnes<Math> : 0u;  // one feature that is always one
      round_to_mode<Math>(column0);
      round_to_mode<Math>(column1);
#pragma unroll
      for (int i = 0; i < kRegs; ++i) {
        extra_f[0][i] = this->is_sum() ? constant : column0[i];
        extra_f[1][i] = this->is_sum() ? 0u : column1[i];
      }
    }
    if constexpr (kExtra == ExtraCode::kPlainY) {
      TokenScale<Math> scale;
      scale.load(y + Tile::kYBytes + Tile::kWBytes, k);
      scale.apply(extra_f[0]);
      scale.apply(extra_f[1]);
    }
  }

  // Pipelined: octets [kFirst, kEnd) of the tile into f, from base and scalar.
  template <int kFirst, int kEnd>
  __device__ __forceinline__ void make_octets() {
    static_for<kEnd - kFirst>([&](auto index) {
      constexpr int x = kFirst + decltype(index)::value;
#pragma unroll
      for (int i = 0; i < kRegs; ++i) f[x][i] = multiply_operand<Math>(base[i], ptx::shuffle_octet<x>(scalar[i]));
    });
  }
  __device__ __forceinline__ void load_factors(uint32_t y, int k) {
    load_weights_b_kn_octets<Math, kHeadDim>(base, scalar, y, 8 * this->base_block, 8 * this->star, k);
  }

  // fp32: octets [first, first + kOctets) into f, the scalars of a token by one load that all of its lanes share.
  __device__ __forceinline__ void load_tile_octets(uint32_t y, int first, int k) {
    using YLayout = TileLayout<typename Math::Element, kHeadDim>;
    const int t = lane_index() % 4;
    load_weights_b_kn_octet<Math, kHeadDim>(base, y, 8 * this->base_block, k);
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const int token = k + i / 2 * 8 + 2 * t + i % 2;
      uint32_t scalars[Tile::kOctets];
#pragma unroll
      for (int x = 0; x < Tile::kOctets; x += 2) {
        if (Tile::kOctets % 4 != 0) ptx::load_shared_u32x2(scalars + x, y + YLayout::offset(token, 8 * this->star + first + x));
        else if (x % 4 == 0) ptx::load_shared_u32x4(scalars + x, y + YLayout::offset(token, 8 * this->star + first + x));
      }
#pragma unroll
      for (int x = 0; x < Tile::kOctets; ++x) f[x][i] = multiply_operand<Math>(base[i], scalars[x]);
    }
  }
};

// Adds 16 rows, those of part `part` of `stage`, and copies a part of the stage after the next to where the one before was. In the
// last part, waits for the next stage. Pipelined, operands are read and made while the products before them run, in the last part
// those of the next stage.
template <ExtraCode kExtra, class Math, int kHeadDim, class Loader>
__device__ __forceinline__ void add_rows(StateWarp<Math, kHeadDim>& s, Loader& loader, uint32_t stage, int part, bool plain,
                                         bool last) {
  using Tile = StateTile<Math, kHeadDim>;
  constexpr int kBlocks16 = Tile::kValues / 16;
  const uint32_t y = stage, w = y + Tile::kYBytes, e = w + Tile::kWBytes;
  const int k = 16 * part;
  // Other warps may still be in the last rows of the stage before this one until they are all here: its last rows, and the e, are
  // overwritten only from here on.
  if (last) {
    ptx::cp_async_wait<0>();
    __syncthreads();
  }
  if (kExtra == ExtraCode::kPlainY && lane_index() < 16) s.count += ptx::load_shared_f32(e + (k + lane_index()) * 4);
  const auto add_extra = [&](int block, const WeightsA<Math>& values) {
    if constexpr (kExtra == ExtraCode::kPlainY) {
      WeightsA<Math> columns;
      load_weights_a_km<Math, kHeadDim>(columns, y, s.first_value + 16 * block, k);
      mma_weights<Math>(s.extra_acc[0][block], columns, s.extra_f[0]);
      mma_weights<Math>(s.extra_acc[1][block], columns, s.extra_f[1]);
    } else if constexpr (kExtra != ExtraCode::kNone) {
      mma_weights<Math>(s.extra_acc[0][block], values, s.extra_f[0]);
      mma_weights<Math>(s.extra_acc[1][block], values, s.extra_f[1]);
    }
  };

  if constexpr (Tile::kPipelined) {
    const uint32_t next_y = last ? stage_after<Tile>(stage, loader.ring) : y;
    const int next_k = last ? 0 : k + 16;
    constexpr int kMakers = kBlocks16 - 1;  // blocks during which operands are made
    static_for<kBlocks16>([&](auto block) {
      constexpr int i = decltype(block)::value;
      if constexpr (i == kMakers) s.load_factors(next_y, next_k);
#pragma unroll
      for (int x = 0; x < 4; ++x) mma_weights<Math>(s.acc[x][i], s.values[i], s.f[x]);
      if constexpr (i < kMakers) s.template make_octets<4 + 4 * i / kMakers, 4 + 4 * (i + 1) / kMakers>();
      if constexpr (i == 0) loader.copy_y(part, plain);
    });
    static_for<kBlocks16>([&](auto block) {
      constexpr int i = decltype(block)::value;
#pragma unroll
      for (int x = 4; x < 8; ++x) mma_weights<Math>(s.acc[x][i], s.values[i], s.f[x]);
      add_extra(i, s.values[i]);
      load_weights_a_km<Math, Tile::kValues>(s.values[i], next_y + Tile::kYBytes, 16 * i, next_k);
      if constexpr (i < kMakers) s.template make_octets<4 * i / kMakers, 4 * (i + 1) / kMakers>();
      if constexpr (i == 0) loader.copy_w(part, plain);
    });
    if constexpr (kExtra != ExtraCode::kNone) s.template load_extra<kExtra>(next_y, next_k);
  } else {
    loader.copy_y(part, plain);
    loader.copy_w(part, plain);
    static_for<8 / Tile::kOctets>([&](auto group) {
      constexpr int kFirst = decltype(group)::value * Tile::kOctets;
      s.load_tile_octets(y, kFirst, k);
      if constexpr (kFirst == 0 && kExtra != ExtraCode::kNone) s.template load_extra<kExtra>(y, k);
      static_for<kBlocks16>([&](auto block) {
        constexpr int i = decltype(block)::value;
        load_weights_a_km<Math, Tile::kValues>(s.values[0], w, 16 * i, k);
#pragma unroll
        for (int x = 0; x < Tile::kOctets; ++x) mma_weights<Math>(s.acc[kFirst + x][i], s.values[0], s.f[x]);
        if constexpr (kFirst == 0) add_extra(i, s.values[0]);
      });
    });
  }
}

template <ExtraCode kExtra, class Math, int kHeadDim, class Loader>
__device__ __forceinline__ void add_stage(StateWarp<Math, kHeadDim>& s, Loader& loader, uint32_t stage) {
  using Tile = StateTile<Math, kHeadDim>;
  constexpr int kLast = Tile::kTokens / 16 - 1;
  const bool plain = loader.plain();
  if constexpr (Tile::kPipelined) {  // the last part apart: a branch would split the products
#pragma unroll 1
    for (int part = 0; part < kLast; ++part) add_rows<kExtra>(s, loader, stage, part, plain, false);
    add_rows<kExtra>(s, loader, stage, kLast, plain, true);
  } else {
#pragma unroll 1
    for (int part = 0; part <= kLast; ++part) add_rows<kExtra>(s, loader, stage, part, plain, part == kLast);
  }
}

// A launch has the segments from first_segment on. A segment stores snapshots at the boundaries in [begin, end) and, if it is the last one,
// at its end. The first launch of several segments computes the first one, and sums the rows of the others except the last; these have a
// launch of their own (StateArgs in linear.h).
template <class Math, int kHeadDim>
__global__ void __launch_bounds__(StateTile<Math, kHeadDim>::kThreads, 1)
    linear_state_kernel(const StateArgs a, const int first_segment) {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kBlocks16 = Tile::kValues / 16;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);
  const int lane = lane_index(), g = lane / 4, t = lane % 4;

  // Where the accumulators go is worked out again where it is needed: the loop needs the registers.
  const auto block_again = [] { return static_cast<int>(ptx::keep_in_register(blockIdx.x)); };
  const auto segment_again = [&] { return first_segment + block_again() / (a.states() * Tile::kBlocks); };
  const auto work_again = [&] { return locate_segment(a, first_segment * a.states() + block_again() / Tile::kBlocks); };
  const auto sums_alone = [&] { return first_segment == 0 && block_again() >= a.states() * Tile::kBlocks; };

  const Work work = work_again();
  const int until_boundary = a.chunk_begin(a.first_snapshot(work.begin)) - work.begin;
  if (first_segment > 0 && until_boundary >= work.end - work.begin && segment_again() < a.segments - 1) return;  // no snapshot in it
  int until_snapshot = sums_alone() && !a.decay ? INT_MAX : until_boundary / Tile::kTokens * a.y_group;  // stages; or until the state decays

  StateWarp<Math, kHeadDim> s(a, blockIdx.x % Tile::kBlocks);
  RowWalk<Tile, Math, kHeadDim> loader(a, work, s.first_value, ring);
  loader.load_stage();
  loader.load_stage();

  const auto for_each_accumulator = [&](int slot, const auto& f) {
    const int blocks = a.states() * Tile::kBlocks;
    float* saved = a.accumulators + threadIdx.x +
                   (static_cast<int64_t>(slot) * blocks + block_again() % blocks) * Tile::kAccumulators * Tile::kThreads;
#pragma unroll
    for (int i = 0; i < kBlocks16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int x = 0; x < 8; ++x) f(s.acc[x][i][e], saved[accumulator_index(x, i, e) * Tile::kThreads]);
#pragma unroll
        for (int o = 0; o < 2; ++o) f(s.extra_acc[o][i][e], saved[accumulator_index(8 + o, i, e) * Tile::kThreads]);
      }
    }
    f(s.count, saved[(Tile::kAccumulators - 1) * Tile::kThreads]);
  };
  // Before the rows of the chunk that begins at a virtual row. Its decay was looked up one chunk earlier.
  const auto carry_of = [&](int row) {
    const int state = block_again() / Tile::kBlocks % a.states(), chunk = a.decay.edge_at(a, row);
    return chunk < a.decay.chunks ? __ldg(a.decay.carries + static_cast<int64_t>(state) * a.decay.chunks + chunk) : 0.f;
  };
  float next_carry = 0.f;
  const auto apply_decay = [&](int row) {
    const DecayFactor factor{next_carry};
    next_carry = carry_of(row + a.chunk);
    factor.apply([&](const auto& f) {
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
#pragma unroll
          for (int x = 0; x < 8; ++x) f(s.acc[x][i][e]);
          f(s.extra_acc[0][i][e]), f(s.extra_acc[1][i][e]);
        }
      }
      f(s.count);
    });
  };
  bool stores = !sums_alone();
  if (stores && work.begin > 0) {
    const int segment = segment_again();
    for_each_accumulator(segment == 0 ? 0 : 1 + segment, [](float& accumulator, const float& saved) { accumulator = saved; });
    // A later phase continues at a chunk whose snapshot is stored, but whose decay is not yet applied.
    if (a.decay && until_snapshot > 0 && a.decay.begins_chunk(a, work.begin)) until_snapshot = 0, stores = false;
  }
  if (a.decay) next_carry = carry_of(work.begin + until_snapshot / a.y_group * Tile::kTokens);

  const auto store_sums = [&](const WarpShare<Math, kHeadDim>& share, float* sums) {
    if (!share.is_sum()) return;
    float* dst = sums + (share.extra == Extra::kSumW ? Layout::kSumW : Layout::kSumY) + share.first_value;
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) {
        dst[16 * i + weights_a_km_row<Math>(g, 0)] = s.extra_acc[0][i][0];
        dst[16 * i + weights_a_km_row<Math>(g, 1)] = s.extra_acc[0][i][2];
      }
    }
    if (share.extra == Extra::kSumY && share.first_value == 0) {
      const float total = sum_of_lanes(s.count);
      if (lane == 0) sums[Layout::kSumOne] = total;
    }
  };

  const auto store_snapshot = [&](int c) {
    const int block = block_again();
    const WarpShare<Math, kHeadDim> share(a.weights, block % Tile::kBlocks);
    const int64_t slot = a.slot(block / Tile::kBlocks % a.states(), c);
    uint32_t* snapshot = static_cast<uint32_t*>(a.snapshots) + slot * Layout::words(2) * (Layout::kWordBytes / 4);
    constexpr int kPairStride = Layout::kPairBytes / 4, kBlockStride = Layout::kBlockWords * Layout::kWordBytes / 4;
    if (share.has_main) {
      const float weight = a.weights.pair * (share.star == share.base_block ? 1.f : 2.f);
      uint32_t* dst = snapshot + (Layout::kTilePair + 4 * share.tile) * kPairStride + share.first_value / 16 * kBlockStride;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < kBlocks16; ++i) {
          store_block<Math>(dst + j * kPairStride + i * kBlockStride, s.acc[2 * j][i], s.acc[2 * j + 1][i], weight);
        }
      }
    }
    if (share.extra != Extra::kNone && !share.is_sum()) {
      uint32_t* dst = snapshot + share.extra_pair * kPairStride + share.first_value / 16 * kBlockStride;
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) {
        store_block<Math>(dst + i * kBlockStride, s.extra_acc[0][i], s.extra_acc[1][i], share.extra_weight);
      }
    }
    store_sums(share, a.sums + slot * Layout::kSums);
  };

  ptx::cp_async_wait<1>();
  __syncthreads();
  if constexpr (Tile::kPipelined) {  // operands of the first products
    s.load_factors(ring, 0);
    s.template make_octets<0, 4>();
#pragma unroll
    for (int i = 0; i < kBlocks16; ++i) load_weights_a_km<Math, Tile::kValues>(s.values[i], ring + Tile::kYBytes, 16 * i, 0);
    with_extra_code(s.extra, [&](auto code) { s.template load_extra<decltype(code)::value>(ring, 0); });
  }

#pragma unroll 1
  while (loader.stages > -2) {  // two stages ahead
    if (until_snapshot-- == 0) {
      const int row = work_again().end - (loader.stages + 2) / a.y_group * Tile::kTokens;
      if (stores) store_snapshot(a.chunk_of(row));
      stores = !sums_alone();
      if (a.decay) apply_decay(row);
      until_snapshot = a.chunk / Tile::kTokens * a.y_group - 1;
    }
    const uint32_t stage = stage_after<Tile>(loader.stage, ring);  // two before the loader's, in a ring of three
    with_extra_code(s.extra, [&](auto code) { add_stage<decltype(code)::value>(s, loader, stage); });
    loader.finish();
  }
  const int segment = segment_again();
  const bool is_last = segment == a.segments - 1;
  if (is_last) store_snapshot(a.chunks - 1);
  if (is_last ? a.hands_on : first_segment == 0) {
    for_each_accumulator(is_last ? 0 : 1 + segment, [](float& accumulator, float& saved) { saved = accumulator; });
  }
}

struct LaunchState {
  template <class Math, int kHeadDim>
  static void run(const StateArgs& a, cudaStream_t stream) {
    if (a.end() == 0) return;  // nothing before the last chunk
    using Tile = StateTile<Math, kHeadDim>;
    const int64_t blocks = int64_t{a.states()} * Tile::kBlocks, slot_floats = blocks * Tile::kAccumulators * Tile::kThreads;
    const auto launch = [&](int first_segment, int segments) {
      launch_kernel("linear_state", linear_state_kernel<Math, kHeadDim>, grid_1d(segments * blocks), Tile::kThreads, Tile::kSharedBytes,
                    stream, a, first_segment);
    };
    if (a.segments == 1) return launch(0, 1);
    launch(0, a.segments - 1);
    linear_scan_segments(a, slot_floats, stream);
    launch(1, a.segments - 1);
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const StateArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchState, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
