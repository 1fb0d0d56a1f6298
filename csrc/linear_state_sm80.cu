// States of the linear algorithm: sums over y rows of features(y) w^T, of e y y^T, and their first-order and constant terms,
// as exclusive prefixes at chunk boundaries ("snapshots").
//
// Order 2: a warp keeps one 64-feature tile (and, for some warps, one extra octet pair) times kValues value columns in fp32
// accumulators and walks y in steps of kTokens: at a boundary it writes the snapshot, then goes on adding. No scan is needed.
// Where that leaves multiprocessors idle, every part of y is summed on its own in fp32 and a second kernel scans the parts.
// Order 1: the state is small, so parts and scan always.

#include <type_traits>

#include "linear_dispatch.h"
#include "linear_features.h"

namespace fastmax {
namespace {

// Accumulators per thread: (8 + 2) octets x kValues / 16 x 4, at most 160; the rest of 255 registers holds operands.
template <class Math, int kHeadDim>
struct StateTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kThreads == kStateThreads, "the carry's layout");
  static constexpr bool kFull = Math::kMode == MathMode::kFP32;
  static constexpr int kValues = state_values(kHeadDim, kFull);
  static constexpr int kValueGroups = kHeadDim / kValues;
  static constexpr int kBlocks = state_blocks(kHeadDim, kFull);
  static constexpr int kCarry = state_carry(kHeadDim, kFull);
  static constexpr int kGroupBlocks = kBlocks / kValueGroups;
  static_assert(kBlocks % kValueGroups == 0, "every value group takes as many blocks");
  // Within a value group: a tile per warp, and the tiles left over cut into four octet pairs, one per warp, as are the
  // second moment, the first order and the sums.
  static constexpr int kTiles = Stars<kHeadDim>::kTiles;
  static constexpr int kUnits = kGroupBlocks * kWarps;
  static constexpr int kMainTiles = kTiles < kUnits ? kTiles : kUnits;
  static constexpr int kLeftover = kTiles - kMainTiles;
  static constexpr int kPlainPairs = kHeadDim / 16;
  static_assert(4 * kLeftover + 2 * kPlainPairs + 2 <= kUnits, "an octet pair is left without a warp");

  static constexpr int kTokens = kIs16Bit<Math> ? (kHeadDim <= 64 ? 128 : 64) : 32;
  static_assert(kBoundary % kTokens == 0, "chunks begin at stages");
  static constexpr int kSteps = kTokens / 16;
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kYBytes = kTokens * kHeadDim * kElementBytes;
  static constexpr int kWBytes = kTokens * kValues * kElementBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;  // y, w, e
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024, "stages do not fit in shared memory");
  // Octets whose operands are held at once; pipelined: twice, those in use and the next.
  static constexpr int kOctets = kIs16Bit<Math> ? 8 : Math::kMode == MathMode::kTF32 ? 4 : 2;
  static constexpr bool kPipelined = kIs16Bit<Math>;
};

enum class Extra { kNone, kTile, kLinear, kMoment, kSumW, kSumY };

struct Work {
  int state, part;      // part < 0: walk all
  int begin, end;       // virtual y rows
};

// What a block adds up. Without parts, the whole walk up to the last boundary.
__device__ __forceinline__ Work locate_work(const StateArgs& a, int index) {
  Work w;
  if (a.parts_sum == nullptr) {
    w.state = index, w.part = -1;
    w.begin = a.begin, w.end = a.boundary + (a.chunks - 1) * a.chunk;
  } else {
    const int parts = a.parts();
    w.state = index / parts, w.part = index % parts;
    const int begin = a.boundary + (w.part - a.lead_parts()) * a.part;
    w.begin = max(begin, 0), w.end = begin + a.part;
  }
  return w;
}

// One stage: kTokens rows of y and w from virtual row `row` on, and their e.
template <class Tile, class Element, int kHeadDim, int kValues>
__device__ __forceinline__ void load_stage(const StateArgs& a, uint32_t stage, int batch, int y_head, int row, int first_value) {
  const uint8_t* mask = mask_pointer(a.mask, batch);
  const int begin = row - a.pad;
  load_masked_tile_async<Element, Tile::kTokens, kHeadDim>(stage, head_pointer<Element>(a.y, batch, y_head), a.y.token, begin, a.ny,
                                                           a.d, mask, a.mask.token);
  load_masked_tile_async<Element, Tile::kTokens, kValues>(stage + Tile::kYBytes,
                                                          head_pointer<Element>(a.w, batch, y_head) + first_value, a.w.token, begin,
                                                          a.ny, a.dv - first_value, mask, a.mask.token);
  if (threadIdx.x < Tile::kTokens) {
    const int source = begin + static_cast<int>(threadIdx.x);
    const uint32_t dst = stage + Tile::kYBytes + Tile::kWBytes + threadIdx.x * 4;
    const bool inside = source >= 0 && source < a.ny;
    if (a.y_scale.data != nullptr) {
      const float* e = a.y_scale.data + (static_cast<int64_t>(batch) * a.state_heads * a.y_group + y_head) * a.y_scale.head;
      ptx::cp_async_small<4>(dst, inside ? e + static_cast<int64_t>(source) * a.y_scale.token : e, inside ? 4 : 0);
    } else {
      const bool taken = inside && (mask == nullptr || mask[static_cast<int64_t>(source) * a.mask.token] != 0);
      ptx::store_shared_f32(dst, taken ? 1.f : 0.f);
    }
  }
}

// The e of tokens [k, k + 16), as operands that multiply A fragments of y columns.
template <class Math>
struct TokenScale {
  static constexpr int kRegs = kIs16Bit<Math> ? 2 : 4;
  uint32_t r[kRegs];

  __device__ __forceinline__ void load(uint32_t e, int k) {
    const int t = lane_index() % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float lo = ptx::load_shared_f32(e + (k + 8 * half + 2 * t) * 4);
      const float hi = ptx::load_shared_f32(e + (k + 8 * half + 2 * t + 1) * 4);
      if constexpr (kIs16Bit<Math>) r[half] = ptx::pack_bf16x2(lo, hi);
      else r[2 * half] = __float_as_uint(lo), r[2 * half + 1] = __float_as_uint(hi);
    }
  }
  __device__ __forceinline__ void apply(WeightsA<Math>& a) const {
#pragma unroll
    for (int i = 0; i < FragmentSize<Math>::kWeightsA; ++i) a[i] = multiply_operand<Math>(a[i], r[i / 2]);
  }
};

// Accumulators of one octet pair for values [16 i, 16 i + 16), into block i of a snapshot or of a part.
template <class Math>
__device__ __forceinline__ void store_block(uint32_t* dst, const float (&even)[4], const float (&odd)[4], float weight) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* c = m % 2 ? odd : even;
    const float lo = c[m / 2 * 2] * weight, hi = c[m / 2 * 2 + 1] * weight;
    if constexpr (kBf16State<Math>) {
      dst[m * 32 + lane] = ptx::pack_bf16x2(lo, hi);
    } else {
      reinterpret_cast<float2*>(dst)[m * 32 + lane] = make_float2(as_operand<Math>(lo), as_operand<Math>(hi));
    }
  }
}

__device__ __forceinline__ void store_part_block(float2* dst, const float (&even)[4], const float (&odd)[4]) {
  const int lane = lane_index();
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* c = m % 2 ? odd : even;
    dst[m * 32 + lane] = make_float2(c[m / 2 * 2], c[m / 2 * 2 + 1]);
  }
}

// A warp's share of a state and its operands.
template <class Math, int kHeadDim>
struct StateWarp {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;
  static constexpr int kBlocks16 = Tile::kValues / 16;
  static constexpr int kRegs = FragmentSize<Math>::kWeightsB;

  float acc[8][kBlocks16][4] = {};
  float extra_acc[2][kBlocks16][4] = {};
  float count = 0.f;  // this lane's part of sum e

  int first_value;
  bool has_main = false;
  int tile = 0, star = 0, base_block = 0;
  Extra extra = Extra::kNone;
  int extra_column0 = 0, extra_column1 = 0, extra_octet = 0, extra_pair = 0;  // columns of the octets that it loads
  float extra_weight = 0.f;

  WeightsB<Math> f[Tile::kOctets];  // operands of the next products
  WeightsB<Math> extra_f[2];

  __device__ __forceinline__ explicit StateWarp(const StateArgs& a, int block) {
    first_value = block % Tile::kValueGroups * Tile::kValues;
    const int unit = threadIdx.x / kWarpSize * Tile::kGroupBlocks + block / Tile::kValueGroups;
    has_main = unit < Tile::kMainTiles;
    if (has_main) tile = unit;
    Stars<kHeadDim>::locate(tile, star, base_block);

    int i = unit;
    const auto take = [&](int count) {
      const bool mine = i >= 0 && i < count;
      if (!mine) i -= count;
      return mine;
    };
    if (take(4 * Tile::kLeftover)) {
      const int leftover = Tile::kMainTiles + i / 4;
      int s, b;
      Stars<kHeadDim>::locate(leftover, s, b);
      extra = Extra::kTile;
      extra_column0 = 8 * b, extra_column1 = 8 * s;
      extra_octet = i % 4 * 2;
      extra_pair = Layout::kTilePair + leftover * 4 + i % 4;
      extra_weight = a.weights.pair * (s == b ? 1.f : 2.f);
    } else if (take(Tile::kPlainPairs)) {
      extra = Extra::kLinear;
      extra_column0 = 16 * i, extra_column1 = 16 * i + 8;
      extra_pair = Layout::kLinearPair + i;
      extra_weight = a.weights.linear;
    } else if (take(Tile::kPlainPairs)) {
      extra = Extra::kMoment;
      extra_column0 = 16 * i, extra_column1 = 16 * i + 8;
      extra_pair = Layout::kMomentPair + i;
      extra_weight = a.weights.moment;
    } else if (take(1)) {
      extra = Extra::kSumW;
    } else if (take(1)) {
      extra = Extra::kSumY;
    }
  }

  __device__ __forceinline__ bool is_sum() const { return extra == Extra::kSumW || extra == Extra::kSumY; }
  __device__ __forceinline__ bool extra_from_y() const { return extra == Extra::kMoment || extra == Extra::kSumY; }

  // Operands of the extra octet pair for tokens [k, k + 16).
  __device__ __forceinline__ void load_extra(uint32_t y, int k) {
    WeightsB<Math> base, scalar;
    load_octets<Math, kHeadDim>(base, scalar, y, extra_column0, extra_column1, k);
    const uint32_t one = kIs16Bit<Math> ? 0x3f803f80u : __float_as_uint(1.f);
    const bool is_tile = extra == Extra::kTile, first_column = lane_index() < 4;
#pragma unroll
    for (int i = 0; i < kRegs; ++i) {
      const uint32_t even = multiply_operand<Math>(base[i], ptx::shuffle_octet(scalar[i], extra_octet));
      const uint32_t odd = multiply_operand<Math>(base[i], ptx::shuffle_octet(scalar[i], extra_octet + 1));
      extra_f[0][i] = is_tile ? even : base[i];
      extra_f[1][i] = is_tile ? odd : scalar[i];
      if (is_sum()) extra_f[0][i] = first_column ? one : 0u, extra_f[1][i] = 0u;  // one feature that is always one
    }
    round_to_mode<Math>(extra_f[0]);
    round_to_mode<Math>(extra_f[1]);
  }

  template <int kFirst>
  static __device__ __forceinline__ void make_octet(WeightsB<Math>& r, const WeightsB<Math>& base, const WeightsB<Math>& scalar) {
#pragma unroll
    for (int i = 0; i < kRegs; ++i) r[i] = multiply_operand<Math>(base[i], ptx::shuffle_octet<kFirst>(scalar[i]));
  }
};

// Adds a stage. Pipelined, the operands of the next group of octets are made while the products of this one run: at the end
// those of the next stage, which `advance` makes visible. kExtraSource: 0 no extra octet pair, 1 its values are w's, 2 they are e y's.
template <int kExtraSource, class Math, int kHeadDim, class Advance>
__device__ __forceinline__ void add_stage(StateWarp<Math, kHeadDim>& s, const StateArgs& a, uint32_t stage, const Advance& advance) {
  using Tile = StateTile<Math, kHeadDim>;
  constexpr int kGroups = 8 / Tile::kOctets;
  const uint32_t y = stage, w = y + Tile::kYBytes, e = w + Tile::kWBytes;
  // fp32 fragments take many addresses, which unrolled steps would keep in registers.
  constexpr int kUnroll = Tile::kPipelined ? 4 : 1;
#pragma unroll kUnroll
  for (int step = 0; step < Tile::kSteps; ++step) {
    const int k = 16 * step;
    uint32_t next_y = y;
    if (step == Tile::kSteps - 1) next_y = advance();
    const int next_k = step == Tile::kSteps - 1 ? 0 : k + 16;
    WeightsB<Math> base, scalar;
    if (kExtraSource == 2 && s.extra == Extra::kSumY && lane_index() < 16) s.count += ptx::load_shared_f32(e + (k + lane_index()) * 4);
    TokenScale<Math> scale;
    if (kExtraSource == 2) scale.load(e, k);
    static_for<kGroups>([&](auto group) {
      constexpr int kGroup = decltype(group)::value, kNextFirst = (kGroup + 1) % kGroups * Tile::kOctets;
      constexpr bool kLast = kGroup == kGroups - 1;
      WeightsB<Math> next[Tile::kOctets];
      if constexpr (Tile::kPipelined) {
        load_octets<Math, kHeadDim>(base, scalar, kLast ? next_y : y, 8 * s.base_block, 8 * s.star, kLast ? next_k : k);
      } else {
        load_octets<Math, kHeadDim>(base, scalar, y, 8 * s.base_block, 8 * s.star, k);
        static_for<Tile::kOctets>([&](auto x) {
          StateWarp<Math, kHeadDim>::template make_octet<kGroup * Tile::kOctets + decltype(x)::value>(s.f[decltype(x)::value], base,
                                                                                                      scalar);
        });
        if constexpr (kGroup == 0 && kExtraSource > 0) s.load_extra(y, k);
      }
      static_for<Tile::kValues / 16>([&](auto block) {
        constexpr int i = decltype(block)::value;
        WeightsA<Math> values;
        load_columns<Math, Tile::kValues>(values, w, 16 * i, k);
#pragma unroll
        for (int x = 0; x < Tile::kOctets; ++x) mma_weights<Math>(s.acc[kGroup * Tile::kOctets + x][i], values, s.f[x]);
        if constexpr (kGroup == 0 && kExtraSource > 0) {
          if constexpr (kExtraSource == 2) {
            load_columns<Math, kHeadDim>(values, y, s.first_value + 16 * i, k);
            if (a.y_scale.data != nullptr) scale.apply(values);
          }
          mma_weights<Math>(s.extra_acc[0][i], values, s.extra_f[0]);
          mma_weights<Math>(s.extra_acc[1][i], values, s.extra_f[1]);
        }
        constexpr int kFrom = Tile::kOctets * i / (Tile::kValues / 16), kTo = Tile::kOctets * (i + 1) / (Tile::kValues / 16);
        if constexpr (Tile::kPipelined) {
          static_for<kTo - kFrom>([&](auto j) {
            constexpr int x = kFrom + decltype(j)::value;
            StateWarp<Math, kHeadDim>::template make_octet<kNextFirst + x>(next[x], base, scalar);
          });
        }
      });
      if constexpr (Tile::kPipelined) {
        if constexpr (kLast && kExtraSource > 0) s.load_extra(next_y, next_k);
#pragma unroll
        for (int x = 0; x < Tile::kOctets; ++x) {
#pragma unroll
          for (int i = 0; i < FragmentSize<Math>::kWeightsB; ++i) s.f[x][i] = next[x][i];
        }
      }
    });
  }
}

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(StateTile<Math, kHeadDim>::kThreads, 1) linear_state_kernel(const StateArgs a) {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kBlocks16 = Tile::kValues / 16;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);
  const int lane = lane_index(), g = lane / 4, t = lane % 4;

  const Work work = locate_work(a, blockIdx.x / Tile::kBlocks);
  const int batch = work.state / a.state_heads, kv_head = work.state % a.state_heads;
  StateWarp<Math, kHeadDim> s(a, blockIdx.x % Tile::kBlocks);

  const int steps = (work.end - work.begin) / Tile::kTokens * a.y_group;
  const auto load = [&](int step) {
    if (step < steps) {
      load_stage<Tile, Element, kHeadDim, Tile::kValues>(a, ring + step % Tile::kStages * Tile::kStageBytes, batch,
                                                         kv_head * a.y_group + step % a.y_group,
                                                         work.begin + step / a.y_group * Tile::kTokens, s.first_value);
    }
    ptx::cp_async_commit();
  };
  load(0);
  load(1);

  // This thread's column of the carry.
  float* carry = a.carry == nullptr ? nullptr
                                    : a.carry + static_cast<int64_t>(blockIdx.x) * Tile::kCarry * Tile::kThreads + threadIdx.x;
  const auto for_each_accumulator = [&](const auto& f) {
    int index = 0;
#pragma unroll
    for (int i = 0; i < kBlocks16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int x = 0; x < 8; ++x) f(s.acc[x][i][e], index++);
        f(s.extra_acc[0][i][e], index++);
        f(s.extra_acc[1][i][e], index++);
      }
    }
    f(s.count, index);
  };
  if (carry != nullptr && a.begin > 0) {
    for_each_accumulator([&](float& value, int index) { value = carry[index * Tile::kThreads]; });
  }

  const auto store_sums = [&](float* sums) {
    if (!s.is_sum()) return;
    float* dst = sums + (s.extra == Extra::kSumW ? Layout::kSumW : Layout::kSumY) + s.first_value;
    if (t == 0) {
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) dst[16 * i + g] = s.extra_acc[0][i][0], dst[16 * i + 8 + g] = s.extra_acc[0][i][2];
    }
    if (s.extra == Extra::kSumY && s.first_value == 0) {
      float total = s.count;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
      if (lane == 0) sums[Layout::kSumOne] = total;
    }
  };

  const auto store_snapshot = [&](int c) {
    const int64_t slot = static_cast<int64_t>(work.state) * a.chunks + c;
    uint32_t* snapshot = static_cast<uint32_t*>(a.snapshots) + slot * Layout::words(2) * (Layout::kWordBytes / 4);
    constexpr int kPairStride = Layout::kPairBytes / 4, kBlockStride = Layout::kBlockWords * Layout::kWordBytes / 4;
    if (s.has_main) {
      const float weight = a.weights.pair * (s.star == s.base_block ? 1.f : 2.f);
      uint32_t* dst = snapshot + (Layout::kTilePair + 4 * s.tile) * kPairStride + s.first_value / 16 * kBlockStride;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < kBlocks16; ++i) {
          store_block<Math>(dst + j * kPairStride + i * kBlockStride, s.acc[2 * j][i], s.acc[2 * j + 1][i], weight);
        }
      }
    }
    if (s.extra != Extra::kNone && !s.is_sum()) {
      uint32_t* dst = snapshot + s.extra_pair * kPairStride + s.first_value / 16 * kBlockStride;
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) {
        store_block<Math>(dst + i * kBlockStride, s.extra_acc[0][i], s.extra_acc[1][i], s.extra_weight);
      }
    }
    store_sums(a.sums + slot * Layout::kSums);
  };

  const auto store_part = [&] {
    const int64_t slot = static_cast<int64_t>(work.state) * a.parts() + work.part;
    float* part = a.parts_sum + slot * part_floats(kHeadDim, 2);
    float2* words = reinterpret_cast<float2*>(part);
    if (s.has_main) {
      float2* dst = words + (Layout::kTilePair + 4 * s.tile) * Layout::kPairWords + s.first_value / 16 * Layout::kBlockWords;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < kBlocks16; ++i) {
          store_part_block(dst + j * Layout::kPairWords + i * Layout::kBlockWords, s.acc[2 * j][i], s.acc[2 * j + 1][i]);
        }
      }
    }
    if (s.extra != Extra::kNone && !s.is_sum()) {
      float2* dst = words + s.extra_pair * Layout::kPairWords + s.first_value / 16 * Layout::kBlockWords;
#pragma unroll
      for (int i = 0; i < kBlocks16; ++i) store_part_block(dst + i * Layout::kBlockWords, s.extra_acc[0][i], s.extra_acc[1][i]);
    }
    store_sums(part + 2 * Layout::words(2));
  };

  ptx::cp_async_wait<1>();
  __syncthreads();
  if constexpr (Tile::kPipelined) {  // operands of the first products
    WeightsB<Math> base, scalar;
    load_octets<Math, kHeadDim>(base, scalar, ring, 8 * s.base_block, 8 * s.star, 0);
    static_for<Tile::kOctets>([&](auto x) {
      StateWarp<Math, kHeadDim>::template make_octet<decltype(x)::value>(s.f[decltype(x)::value], base, scalar);
    });
    s.load_extra(ring, 0);
  }

  int next_chunk = a.boundary > 0 ? 0 : 1;
  int next_snapshot = (a.boundary + next_chunk * a.chunk - work.begin) / Tile::kTokens * a.y_group;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    if (work.part < 0 && step == next_snapshot) {
      store_snapshot(next_chunk++);
      next_snapshot += a.chunk / Tile::kTokens * a.y_group;
    }
    // The next stage has landed, and the one before this is free.
    const auto advance = [&] {
      ptx::cp_async_wait<0>();
      __syncthreads();
      load(step + 2);
      return ring + (step + 1) % Tile::kStages * Tile::kStageBytes;
    };
    const uint32_t stage = ring + step % Tile::kStages * Tile::kStageBytes;
    if (s.extra == Extra::kNone) {
      add_stage<0>(s, a, stage, advance);
    } else if (!s.extra_from_y()) {
      add_stage<1>(s, a, stage, advance);
    } else {
      add_stage<2>(s, a, stage, advance);
    }
  }
  if (work.part >= 0) {
    store_part();
  } else {
    store_snapshot(a.chunks - 1);
    if (carry != nullptr) for_each_accumulator([&](float& value, int index) { carry[index * Tile::kThreads] = value; });
  }
}

// Order 1: a warp owns 16 value columns times all first-order features.
template <class Math, int kHeadDim>
struct Order1Tile {
  static constexpr int kWarps = kHeadDim / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kTokens = kIs16Bit<Math> ? 64 : 32;
  static constexpr int kYBytes = kTokens * kHeadDim * static_cast<int>(sizeof(typename Math::Element)), kWBytes = kYBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024, "stages do not fit in shared memory");
  static_assert(kThreads >= kTokens, "one thread per row loads its e");
};

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(Order1Tile<Math, kHeadDim>::kThreads) linear_state_order1_kernel(const StateArgs a) {
  using Tile = Order1Tile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kPairs = kHeadDim / 16;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
  const Work work = locate_work(a, blockIdx.x);
  const int batch = work.state / a.state_heads, kv_head = work.state % a.state_heads;
  const int block = threadIdx.x / kWarpSize, first_value = 16 * block;

  float acc[2 * kPairs][4] = {};
  float sum_w[4] = {}, sum_y[4] = {};
  float count = 0.f;
  WeightsB<Math> ones;
#pragma unroll
  for (int i = 0; i < FragmentSize<Math>::kWeightsB; ++i) {
    ones[i] = g == 0 ? (kIs16Bit<Math> ? 0x3f803f80u : __float_as_uint(1.f)) : 0u;
  }

  const int steps = (work.end - work.begin) / Tile::kTokens * a.y_group;
  const auto load = [&](int step) {
    if (step < steps) {
      load_stage<Tile, Element, kHeadDim, kHeadDim>(a, ring + step % Tile::kStages * Tile::kStageBytes, batch,
                                                    kv_head * a.y_group + step % a.y_group,
                                                    work.begin + step / a.y_group * Tile::kTokens, 0);
    }
    ptx::cp_async_commit();
  };
  for (int i = 0; i < Tile::kStages - 1; ++i) load(i);

  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    load(step + Tile::kStages - 1);
    const uint32_t y = ring + step % Tile::kStages * Tile::kStageBytes, w = y + Tile::kYBytes, e = w + Tile::kWBytes;
#pragma unroll 1
    for (int k = 0; k < Tile::kTokens; k += 16) {
      WeightsA<Math> values, columns;
      load_columns<Math, kHeadDim>(values, w, first_value, k);
      load_columns<Math, kHeadDim>(columns, y, first_value, k);
      if (a.y_scale.data != nullptr) {
        TokenScale<Math> scale;
        scale.load(e, k);
        scale.apply(columns);
      }
      mma_weights<Math>(sum_w, values, ones);
      mma_weights<Math>(sum_y, columns, ones);
      if (lane < 16) count += ptx::load_shared_f32(e + (k + lane) * 4);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        WeightsB<Math> f0, f1;
        load_octets<Math, kHeadDim>(f0, f1, y, 16 * j, 16 * j + 8, k);
        round_to_mode<Math>(f0);
        round_to_mode<Math>(f1);
        mma_weights<Math>(acc[2 * j], values, f0);
        mma_weights<Math>(acc[2 * j + 1], values, f1);
      }
    }
  }

  float* part = a.parts_sum + (static_cast<int64_t>(work.state) * a.parts() + work.part) * part_floats(kHeadDim, 1);
  float2* words = reinterpret_cast<float2*>(part) + Layout::kLinearPair * Layout::kPairWords + block * Layout::kBlockWords;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) store_part_block(words + j * Layout::kPairWords, acc[2 * j], acc[2 * j + 1]);
  float* sums = part + 2 * Layout::words(1);
  if (t == 0) {
    sums[Layout::kSumW + first_value + g] = sum_w[0], sums[Layout::kSumW + first_value + 8 + g] = sum_w[2];
    sums[Layout::kSumY + first_value + g] = sum_y[0], sums[Layout::kSumY + first_value + 8 + g] = sum_y[2];
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) count += __shfl_xor_sync(0xffffffffu, count, lanes);
  if (threadIdx.x == 0) sums[Layout::kSumOne] = count;
}

// Exclusive prefix over parts of every word, written as weighted snapshot words; one thread per word (or per sum).
template <class Math, int kHeadDim>
__global__ void __launch_bounds__(256) linear_scan_kernel(const StateArgs a, const int first_word, const int scan_words) {
  using Layout = StateLayout<Math, kHeadDim>;
  const int words = static_cast<int>(Layout::words(a.order));
  const int64_t stride = part_floats(kHeadDim, a.order);
  const int parts = a.parts(), lead = a.lead_parts();
  const int index = blockIdx.x * blockDim.x + threadIdx.x;
  const int64_t state = blockIdx.y;
  const float* src = a.parts_sum + state * parts * stride;
  constexpr int kAhead = 8;  // loads in flight

  if (index < scan_words) {
    const int word = first_word + index;
    const int pair = word / Layout::kPairWords;
    float weight = pair >= Layout::kLinearPair ? a.weights.linear : a.weights.moment;
    if (pair >= Layout::kTilePair) {
      int s, b;
      Stars<kHeadDim>::locate((pair - Layout::kTilePair) / 4, s, b);
      weight = a.weights.pair * (s == b ? 1.f : 2.f);
    }
    float2 sum = make_float2(0.f, 0.f);
    for (int p0 = 0; p0 <= parts; p0 += kAhead) {
      float2 next[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (p0 + i < parts) next[i] = *reinterpret_cast<const float2*>(src + (p0 + i) * stride + 2 * word);
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int c = p0 + i - lead;
        if (c >= 0 && c < a.chunks && a.has_state(c)) {
          const int64_t at = (state * a.chunks + c) * words + word;
          if constexpr (kBf16State<Math>) {
            static_cast<uint32_t*>(a.snapshots)[at] = ptx::pack_bf16x2(sum.x * weight, sum.y * weight);
          } else {
            static_cast<float2*>(a.snapshots)[at] = make_float2(as_operand<Math>(sum.x * weight), as_operand<Math>(sum.y * weight));
          }
        }
        if (p0 + i < parts) sum.x += next[i].x, sum.y += next[i].y;
      }
    }
  } else if (index < scan_words + Layout::kSumOne + 1) {
    const int i = index - scan_words;
    float sum = 0.f;
    for (int p = 0; p <= parts; ++p) {
      const int c = p - lead;
      if (c >= 0 && c < a.chunks && a.has_state(c)) a.sums[(state * a.chunks + c) * Layout::kSums + i] = sum;
      if (p < parts) sum += src[p * stride + 2 * words + i];
    }
  }
}

struct LaunchState {
  template <class Math, int kHeadDim>
  static void run(const StateArgs& a, cudaStream_t stream) {
    using Layout = StateLayout<Math, kHeadDim>;
    const int64_t work = a.parts_sum == nullptr ? a.states() : int64_t{a.states()} * a.parts();
    if (a.boundary + int64_t{a.chunks - 1} * a.chunk == 0) return;  // nothing before the last chunk
    if (a.order == 2) {
      using Tile = StateTile<Math, kHeadDim>;
      launch_kernel("linear_state", linear_state_kernel<Math, kHeadDim>, grid_1d(work * Tile::kBlocks), Tile::kThreads,
                    Tile::kSharedBytes, stream, a);
    } else {
      using Tile = Order1Tile<Math, kHeadDim>;
      launch_kernel("linear_state_order1", linear_state_order1_kernel<Math, kHeadDim>, grid_1d(work), Tile::kThreads,
                    Tile::kSharedBytes, stream, a);
    }
    if (a.parts_sum != nullptr) {
      const int first = a.order == 2 ? 0 : Layout::kLinearPair * Layout::kPairWords;
      const int count = static_cast<int>(Layout::words(a.order)) - first;
      const int threads = 256;
      const dim3 grid((count + Layout::kSums + threads - 1) / threads, a.states());
      launch_kernel("linear_scan", linear_scan_kernel<Math, kHeadDim>, grid, threads, 0, stream, a, first, count);
    }
  }
};

// A row per 16 lanes.
template <class Element>
__global__ void __launch_bounds__(256) linear_widen_kernel(const View src, float* __restrict__ dst, const int heads, const int tokens,
                                                           const int columns, const int64_t rows) {
  constexpr int kLanes = 16;
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const int head_index = static_cast<int>(row / tokens), i = static_cast<int>(row % tokens);
  for (int c = threadIdx.x % kLanes * 2; c < columns; c += 2 * kLanes) {
    const float2 x = load_row_pair<Element>(src, false, head_index / heads, head_index % heads, i, c);
    store_pair(dst + row * columns + c, x.x, x.y);
  }
}

}  // namespace

template <>
void linear_widen<FASTMAX_MATH>(const View& src, float* dst, int batch, int heads, int tokens, int columns, cudaStream_t stream) {
  const int64_t rows = int64_t{batch} * heads * tokens;
  constexpr int kThreads = 256, kRows = kThreads / 16;
  launch_kernel("linear_widen", linear_widen_kernel<FASTMAX_MATH::Element>, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream,
                src, dst, heads, tokens, columns, rows);
}

template <>
void linear_state<FASTMAX_MATH>(const StateArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchState, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
