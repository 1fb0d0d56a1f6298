// States of the linear algorithm: sums over y rows of features(y) w^T, of e y y^T, and their first-order and constant terms,
// as exclusive prefixes at chunk boundaries ("snapshots").
//
// Order 2: a warp keeps one 64-feature tile (and, for some warps, one extra octet pair) times kValues value columns in fp32
// accumulators and walks y in steps of kTokens: at a boundary it writes the snapshot, then goes on adding.
// Order 1 (head dims above kLinear1HeadDim): every part of y is summed on its own in fp32 and a second kernel scans the parts.

#include <climits>
#include <type_traits>

#include "linear/dispatch.h"
#include "linear/order2/features.h"

namespace fastmax {
namespace {

// Accumulators per thread: (8 + 2) octets x kValues / 16 x 4, at most 160; the rest of 255 registers holds operands.
template <class Math, int kHeadDim>
struct StateTile {
  static constexpr int kWarps = 8;
  static constexpr int kThreads = kWarps * kWarpSize;
  static_assert(kThreads == kStateThreads, "the layout of accumulators in memory");
  static constexpr int kValues = state_values(kHeadDim, kSplitOperands<Math>);
  static constexpr int kValueGroups = kHeadDim / kValues;
  static constexpr int kBlocks = state_blocks(kHeadDim, kSplitOperands<Math>);
  static constexpr int kAccumulators = state_accumulators(kHeadDim, kSplitOperands<Math>);
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

  static constexpr int kTokens = kIs16Bit<Math> ? (kHeadDim <= 64 ? 128 : kHeadDim <= 128 ? 64 : 32) : kHeadDim <= 128 ? 32 : 16;
  static_assert(kBoundary % kTokens == 0, "chunks begin at stages");
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kYBytes = kTokens * kHeadDim * kElementBytes;
  static constexpr int kWBytes = kTokens * kValues * kElementBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;  // y, w, e
  static constexpr int kStages = 3;  // in use, next, and being loaded
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "stages do not fit in shared memory");
  // Octets whose operands are held at once. Pipelined: half of them are in use while the other half is made.
  static constexpr int kOctets = kSplitOperands<Math> ? 2 : 8;
  static constexpr bool kPipelined = kIs16Bit<Math>;
};

enum class Extra { kNone, kTile, kLinear, kMoment, kSumW, kSumY };
// What of that the inner loop is compiled for: none; a leftover tile; plain columns of y or the constant one, with values from w or
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

// What a block adds up.
struct Work {
  int state;
  int begin, end;  // virtual y rows
};

// A segment of a state's walk. What is left for the last ones may be fewer rows, or none.
__device__ __forceinline__ Work locate_segment(const StateArgs& a, int index) {
  const int begin = min(a.begin + index / a.states() * a.segment_rows, a.end());
  return {index % a.states(), begin, min(begin + a.segment_rows, a.end())};
}

__device__ __forceinline__ Work locate_part(const StateArgs& a, int state, int part) {
  const int begin = a.boundary + (part - a.lead_parts()) * a.part;
  return {state, max(begin, 0), begin + a.part};
}

// Copies a [token][column] tensor 16 rows at a time, without branches and with few instructions, so that the compiler can put them
// between the products of the state kernel.
template <class Element, int kCols, int kThreads>
struct RowsLoader {
  using Layout = TileLayout<Element, kCols>;
  static constexpr int kSegment = Layout::kChunks & -Layout::kChunks;  // chunks of a row that neighbouring threads copy
  static constexpr int kSegments = Layout::kChunks / kSegment;
  static constexpr int kPassRows = kThreads / kSegment < 16 ? kThreads / kSegment : 16;
  static_assert(16 % kPassRows == 0, "passes cover 16 rows");

  const Element* source;  // of this thread's first chunk
  int rows;               // left, from that chunk's on; none where the tensor does not have its columns
  int columns;            // left, likewise
  uint32_t offset;        // of that chunk in a tile

  // The first row to copy, how many there are, and their columns.
  __device__ __forceinline__ RowsLoader(const Element* src, int64_t token_stride, int rows_left, int cols) {
    const int chunk = static_cast<int>(threadIdx.x) % kSegment, row = static_cast<int>(threadIdx.x) / kSegment;
    source = src + row * token_stride + chunk * Layout::kChunkElements;
    columns = cols - chunk * Layout::kChunkElements;
    rows = kSegments == 1 && columns <= 0 ? INT_MIN / 2 : rows_left - row;
    offset = Layout::chunk_offset(row, chunk);
  }

  __device__ __forceinline__ void advance(int64_t elements, int count) { source += elements, rows -= count; }

  // The next 16 rows, those that do not exist as zeros.
  __device__ __forceinline__ void copy(uint32_t tile, int64_t token_stride, bool enabled) {
#pragma unroll
    for (int pass = 0; pass < 16; pass += kPassRows) {
      const uint32_t dst = kPassRows % 8 == 0
                               ? tile + offset + pass * Layout::kRowBytes
                               : tile + Layout::chunk_offset(static_cast<int>(threadIdx.x) / kSegment + pass, threadIdx.x % kSegment);
#pragma unroll
      for (int segment = 0; segment < kSegments; ++segment) {
        const int shift = segment * kSegment;
        const bool inside = pass < rows && (kSegments == 1 || shift * Layout::kChunkElements < columns);
        if (enabled && (kThreads == kPassRows * kSegment || threadIdx.x < kPassRows * kSegment)) {
          ptx::cp_async_16(Layout::move_right(dst, shift), source + pass * token_stride + shift * Layout::kChunkElements, inside ? 16 : 0);
        }
      }
    }
    advance(16 * token_stride, 16);
  }
};

template <class Tile>
__device__ __forceinline__ uint32_t stage_after(uint32_t stage, uint32_t ring) {
  return stage == ring + (Tile::kStages - 1) * Tile::kStageBytes ? ring : stage + Tile::kStageBytes;
}

// A block's way through its rows of y and w: stages of kTokens rows, every y head of the group in turn.
template <class Tile, class Math, int kHeadDim>
struct StageLoader {
  using Element = typename Math::Element;

  const StateArgs& a;
  uint32_t ring, stage;  // where the next stage goes
  int first_value;
  int y_head;  // of the next stage, (batch, y head) flattened
  int row;     // its first
  int stages;  // left to load
  RowsLoader<Element, kHeadDim, Tile::kThreads> y;
  RowsLoader<Element, Tile::kValues, Tile::kThreads> w;

  __device__ __forceinline__ StageLoader(const StateArgs& a, const Work& work, int first_value, uint32_t ring)
      : a(a),
        ring(ring),
        stage(ring),
        first_value(first_value),
        y_head(work.state * a.y_group),
        row(work.begin - a.pad),
        stages((work.end - work.begin) / Tile::kTokens * a.y_group),
        y(y_rows() + row * a.y.token, a.y.token, a.ny - row, a.d),
        w(w_rows() + row * a.w.token, a.w.token, a.ny - row, a.dv - first_value) {}

  __device__ __forceinline__ int batch() const { return y_head / (a.state_heads * a.y_group); }
  __device__ __forceinline__ int batch_head() const { return y_head % (a.state_heads * a.y_group); }
  __device__ __forceinline__ const Element* y_rows() const { return head_pointer<Element>(a.y, batch(), batch_head()); }
  __device__ __forceinline__ const Element* w_rows() const { return head_pointer<Element>(a.w, batch(), batch_head()) + first_value; }

  // Whether no row of the next stage is masked or lies before the tensor's first. Where it does not hold, finish() copies.
  __device__ __forceinline__ bool plain() const { return row >= 0 && a.mask.data == nullptr; }

  // Rows [16 part, 16 part + 16) of the next stage, parts in order, if it is plain.
  __device__ __forceinline__ void copy_y(int part, bool plain) {
    y.copy(stage + part * TileLayout<Element, kHeadDim>::bytes(16), a.y.token, plain);
  }
  __device__ __forceinline__ void copy_w(int part, bool plain) {
    w.copy(stage + Tile::kYBytes + part * TileLayout<Element, Tile::kValues>::bytes(16), a.w.token, plain);
  }

  // Ends the stage: what the parts left out, and the rows' e.
  __device__ __forceinline__ void finish() {
    const uint8_t* mask = a.mask.data == nullptr ? nullptr : mask_pointer(a.mask, batch());
    if (!plain()) {
      load_masked_tile_async<Element, Tile::kTokens, kHeadDim>(stage, y_rows(), a.y.token, row, a.ny, a.d, mask, a.mask.token);
      load_masked_tile_async<Element, Tile::kTokens, Tile::kValues>(stage + Tile::kYBytes, w_rows(), a.w.token, row, a.ny,
                                                                    a.dv - first_value, mask, a.mask.token);
    }
    if (threadIdx.x < Tile::kTokens) {
      const int source = row + static_cast<int>(threadIdx.x);
      const uint32_t dst = stage + Tile::kYBytes + Tile::kWBytes + threadIdx.x * 4;
      const bool inside = source >= 0 && source < a.ny;
      if (a.y_scale.data != nullptr) {
        const float* e = a.y_scale.data + y_head * a.y_scale.head;
        ptx::cp_async_small<4>(dst, inside ? e + static_cast<int64_t>(source) * a.y_scale.token : e, inside ? 4 : 0);
      } else {
        const bool taken = inside && (mask == nullptr || mask[static_cast<int64_t>(source) * a.mask.token] != 0);
        ptx::store_shared_f32(dst, taken ? 1.f : 0.f);
      }
    }
    ptx::cp_async_commit();
    --stages;
    stage = stage_after<Tile>(stage, ring);
    if (a.y_group == 1) {
      row += Tile::kTokens;
    } else if (++y_head % a.y_group != 0) {  // the same rows of the next head
      y.advance(a.y.head - Tile::kTokens * a.y.token, -Tile::kTokens);
      w.advance(a.w.head - Tile::kTokens * a.w.token, -Tile::kTokens);
    } else {
      y_head -= a.y_group, row += Tile::kTokens;
      y.advance((1 - a.y_group) * a.y.head, 0);
      w.advance((1 - a.y_group) * a.w.head, 0);
    }
  }

  __device__ __forceinline__ void load_stage() {
#pragma unroll 1
    for (int part = 0; part < Tile::kTokens / 16; ++part) {
      copy_y(part, plain());
      copy_w(part, plain());
    }
    finish();
  }
};

// The e of tokens [k, k + 16), as operands that multiply fragments of y.
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
  // A or B: registers are tokens in order.
  template <int kCount>
  __device__ __forceinline__ void apply(uint32_t (&fragment)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const uint32_t e = r[i / (kCount / kRegs)];
      if constexpr (kIs16Bit<Math>) fragment[i] = multiply_bf16x2(fragment[i], e);
      else fragment[i] = __float_as_uint(as_operand<Math>(__uint_as_float(fragment[i]) * __uint_as_float(e)));
    }
  }
};

// Word of a 16 x 16 state block that holds this lane's two features of an octet, of the value in row g or g + 8 (half 1).
template <class Math>
__device__ __forceinline__ int accumulator_word(int octet, int half) {
  const int g = lane_index() / 4, t = lane_index() % 4, value = weights_a_km_row<Math>(g, half);
  return (octet + value / 8 * 2) * 32 + value % 8 * 4 + t;
}

// Accumulators of one octet pair for values [16 i, 16 i + 16), into block i of a snapshot or of a part.
template <class Math>
__device__ __forceinline__ void store_block(uint32_t* dst, const float (&even)[4], const float (&odd)[4], float weight) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* c = m % 2 ? odd : even;
    const float lo = c[m / 2 * 2] * weight, hi = c[m / 2 * 2 + 1] * weight;
    const int word = accumulator_word<Math>(m % 2, m / 2);
    if constexpr (kBf16State<Math>) {
      dst[word] = ptx::pack_bf16x2(lo, hi);
    } else {
      reinterpret_cast<float2*>(dst)[word] = make_float2(as_operand<Math>(lo), as_operand<Math>(hi));
    }
  }
}

template <class Math>
__device__ __forceinline__ void store_part_block(float2* dst, const float (&even)[4], const float (&odd)[4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* c = m % 2 ? odd : even;
    dst[accumulator_word<Math>(m % 2, m / 2)] = make_float2(c[m / 2 * 2], c[m / 2 * 2 + 1]);
  }
}

// A warp's share of a state: a tile and at most one extra octet pair.
template <class Math, int kHeadDim>
struct WarpShare {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;

  int first_value;
  bool has_main;
  int tile = 0, star = 0, base_block = 0;
  Extra extra = Extra::kNone;
  int extra_column0 = 0, extra_column1 = 0, extra_octet = 0, extra_pair = 0;  // columns of the octets that it loads
  float extra_weight = 0.f;

  __device__ __forceinline__ WarpShare(const StateArgs& a, int block) {
    first_value = block % Tile::kValueGroups * Tile::kValues;
    const int unit = threadIdx.x / kWarpSize * Tile::kGroupBlocks + block / Tile::kValueGroups;
    has_main = Tile::kMainTiles == Tile::kUnits || unit < Tile::kMainTiles;
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
};

// Its accumulators and operands.
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

  __device__ __forceinline__ StateWarp(const StateArgs& a, int block) : Share(a, block) {}

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

// totals: sum the rows of every segment but the last. Else: walk every segment, with snapshots at the boundaries in [begin, end) and
// at the last one, the end of the last segment.
template <class Math, int kHeadDim>
__global__ void __launch_bounds__(StateTile<Math, kHeadDim>::kThreads, 1) linear_state_kernel(const StateArgs a, const bool totals) {
  using Tile = StateTile<Math, kHeadDim>;
  using Layout = StateLayout<Math, kHeadDim>;
  using Element = typename Math::Element;
  constexpr int kBlocks16 = Tile::kValues / 16;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);
  const int lane = lane_index(), g = lane / 4, t = lane % 4;

  // Where the accumulators go is worked out again where it is needed: the loop needs the registers.
  const auto block_again = [] { return static_cast<int>(ptx::keep_in_register(blockIdx.x)); };
  const auto segment_again = [&] { return block_again() / (a.states() * Tile::kBlocks); };

  const Work work = locate_segment(a, blockIdx.x / Tile::kBlocks);
  int chunk = a.boundary > 0 ? 0 : 1;  // the first whose boundary is not before the segment, and not at the first row of all
  if (work.begin > a.boundary) chunk = (work.begin - a.boundary + a.chunk - 1) / a.chunk;
  const int until_boundary = a.boundary + chunk * a.chunk - work.begin;
  if (!totals && until_boundary >= work.end - work.begin && segment_again() < a.segments - 1) return;  // no snapshot in it
  int until_snapshot = totals ? INT_MAX : until_boundary / Tile::kTokens * a.y_group;  // stages

  StateWarp<Math, kHeadDim> s(a, blockIdx.x % Tile::kBlocks);
  StageLoader<Tile, Math, kHeadDim> loader(a, work, s.first_value, ring);
  loader.load_stage();
  loader.load_stage();

  const auto for_each_accumulator = [&](int slot, const auto& f) {
    const int blocks = a.states() * Tile::kBlocks;
    float* saved = a.accumulators + threadIdx.x +
                   (static_cast<int64_t>(slot) * blocks + block_again() % blocks) * Tile::kAccumulators * Tile::kThreads;
    int index = 0;
    const auto visit = [&](float& accumulator) { f(accumulator, saved[index++ * Tile::kThreads]); };
#pragma unroll
    for (int i = 0; i < kBlocks16; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int x = 0; x < 8; ++x) visit(s.acc[x][i][e]);
        visit(s.extra_acc[0][i][e]);
        visit(s.extra_acc[1][i][e]);
      }
    }
    visit(s.count);
  };
  if (!totals && work.begin > 0) {
    for_each_accumulator(a.segments == 1 ? 0 : 1 + segment_again(), [](float& accumulator, const float& saved) { accumulator = saved; });
  }

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
      float total = s.count;
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) total += __shfl_xor_sync(0xffffffffu, total, lanes);
      if (lane == 0) sums[Layout::kSumOne] = total;
    }
  };

  const auto store_snapshot = [&](int c) {
    const int block = block_again();
    const WarpShare<Math, kHeadDim> share(a, block % Tile::kBlocks);
    const int64_t slot = static_cast<int64_t>(block / Tile::kBlocks % a.states()) * a.chunks + c;
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
      const int row = locate_segment(a, block_again() / Tile::kBlocks).end - (loader.stages + 2) / a.y_group * Tile::kTokens;
      store_snapshot((row - a.boundary) / a.chunk);
      until_snapshot = a.chunk / Tile::kTokens * a.y_group - 1;
    }
    const uint32_t stage = stage_after<Tile>(loader.stage, ring);  // two before the loader's, in a ring of three
    with_extra_code(s.extra, [&](auto code) { add_stage<decltype(code)::value>(s, loader, stage); });
    loader.finish();
  }
  const int segment = segment_again();
  const bool is_last = segment == a.segments - 1;  // of which no totals are wanted
  if (is_last) store_snapshot(a.chunks - 1);
  if (totals || (is_last && a.hands_on)) {
    for_each_accumulator(is_last ? 0 : 1 + segment, [](float& accumulator, float& saved) { saved = accumulator; });
  }
}

// From the totals of segments to what each starts from: the earlier walk's accumulators and all totals before it.
__global__ void __launch_bounds__(256) linear_segments_kernel(const StateArgs a, const int64_t slot_floats) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= slot_floats) return;
  float sum = a.begin > 0 ? a.accumulators[index] : 0.f;
  float* slots = a.accumulators + slot_floats + index;
  constexpr int kAhead = 8;  // loads in flight
  for (int first = 0; first < a.segments; first += kAhead) {
    float totals[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) totals[i] = first + i < a.segments - 1 ? slots[(first + i) * slot_floats] : 0.f;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < a.segments) slots[(first + i) * slot_floats] = sum;
      sum += totals[i];
    }
  }
}

// Order 1 where the state is too wide for linear1*: a warp owns 16 value columns times all first-order features, a block 128.
template <class Math, int kHeadDim>
struct Order1Tile {
  static_assert(kHeadDim > kLinear1HeadDim, "narrower ones never come here");
  static constexpr int kValues = 128;
  static constexpr int kGroups = kHeadDim / kValues;
  static constexpr int kWarps = kValues / 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kTokens = kIs16Bit<Math> ? 32 : 16;
  static constexpr int kElementBytes = static_cast<int>(sizeof(typename Math::Element));
  static constexpr int kYBytes = kTokens * kHeadDim * kElementBytes, kWBytes = kTokens * kValues * kElementBytes;
  static constexpr int kStageBytes = kYBytes + kWBytes + kTokens * 4;
  static constexpr int kStages = 3;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(kSharedBytes <= kMaxSharedBytes, "stages do not fit in shared memory");
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
  const int item = blockIdx.x / Tile::kGroups, part = item % a.parts();
  const Work work = locate_part(a, item / a.parts(), part);
  const int group_value = blockIdx.x % Tile::kGroups * Tile::kValues, warp_value = threadIdx.x / kWarpSize * 16;
  const int first_value = group_value + warp_value;

  float acc[2 * kPairs][4] = {};
  float sum_w[4] = {}, sum_y[4] = {};
  float count = 0.f;
  WeightsB<Math> ones;
#pragma unroll
  for (int i = 0; i < FragmentSize<Math>::kWeightsB; ++i) ones[i] = g == 0 ? kOperandOnes<Math> : 0u;

  StageLoader<Tile, Math, kHeadDim> loader(a, work, group_value, ring);
  const int stages = loader.stages;
  for (int i = 0; i < Tile::kStages - 1; ++i) loader.load_stage();

  for (int step = 0; step < stages; ++step) {
    ptx::cp_async_wait<Tile::kStages - 2>();
    __syncthreads();
    loader.load_stage();
    const uint32_t y = ring + step % Tile::kStages * Tile::kStageBytes, w = y + Tile::kYBytes, e = w + Tile::kWBytes;
#pragma unroll 1
    for (int k = 0; k < Tile::kTokens; k += 16) {
      WeightsA<Math> values, columns;
      load_weights_a_km<Math, Tile::kValues>(values, w, warp_value, k);
      load_weights_a_km<Math, kHeadDim>(columns, y, first_value, k);
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
        load_weights_b_kn_octets<Math, kHeadDim>(f0, f1, y, 16 * j, 16 * j + 8, k);
        round_to_mode<Math>(f0);
        round_to_mode<Math>(f1);
        mma_weights<Math>(acc[2 * j], values, f0);
        mma_weights<Math>(acc[2 * j + 1], values, f1);
      }
    }
  }

  float* part_sum = a.parts_sum + item * part_floats(kHeadDim, 1);
  float2* words = reinterpret_cast<float2*>(part_sum) + Layout::kLinearPair * Layout::kPairWords + first_value / 16 * Layout::kBlockWords;
#pragma unroll
  for (int j = 0; j < kPairs; ++j) store_part_block<Math>(words + j * Layout::kPairWords, acc[2 * j], acc[2 * j + 1]);
  float* sums = part_sum + 2 * Layout::words(1);
  if (t == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int value = first_value + weights_a_km_row<Math>(g, half);
      sums[Layout::kSumW + value] = sum_w[2 * half], sums[Layout::kSumY + value] = sum_y[2 * half];
    }
  }
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) count += __shfl_xor_sync(0xffffffffu, count, lanes);
  if (threadIdx.x == 0 && group_value == 0) sums[Layout::kSumOne] = count;
}

// Order 1: exclusive prefix over parts of every first-order word, written as weighted snapshot words; one thread per word (or per sum),
// state_blocks blocks a state.
template <class Math, int kHeadDim>
__global__ void __launch_bounds__(256) linear_scan_kernel(const StateArgs a, const int scan_words, const int state_blocks) {
  using Layout = StateLayout<Math, kHeadDim>;
  constexpr int kFirstWord = Layout::kLinearPair * Layout::kPairWords;
  const int words = static_cast<int>(Layout::words(1));
  const int64_t stride = part_floats(kHeadDim, 1);
  const int parts = a.parts(), lead = a.lead_parts();
  const int index = blockIdx.x % state_blocks * blockDim.x + threadIdx.x;
  const int64_t state = blockIdx.x / state_blocks;
  const float* src = a.parts_sum + state * parts * stride;
  constexpr int kAhead = 8;  // loads in flight

  if (index < scan_words) {
    const int word = kFirstWord + index;
    const float weight = a.weights.linear;
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
    if (a.end() == 0) return;  // nothing before the last chunk
    if (a.order == 2) {
      walk<Math, kHeadDim>(a, stream);
    } else if constexpr (kHeadDim > kLinear1HeadDim) {
      sum_and_scan<Math, kHeadDim>(a, stream);
    }
  }

 private:
  template <class Math, int kHeadDim>
  static void walk(const StateArgs& a, cudaStream_t stream) {
    using Tile = StateTile<Math, kHeadDim>;
    constexpr int kThreads = 256;
    const int64_t blocks = int64_t{a.states()} * Tile::kBlocks, slot_floats = blocks * Tile::kAccumulators * Tile::kThreads;
    const auto launch = [&](int segments, bool totals) {
      launch_kernel("linear_state", linear_state_kernel<Math, kHeadDim>, grid_1d(segments * blocks), Tile::kThreads, Tile::kSharedBytes,
                    stream, a, totals);
    };
    if (a.segments > 1) {
      launch(a.segments - 1, true);
      launch_kernel("linear_segments", linear_segments_kernel, grid_1d((slot_floats + kThreads - 1) / kThreads), kThreads, 0, stream, a,
                    slot_floats);
    }
    launch(a.segments, false);
  }

  template <class Math, int kHeadDim>
  static void sum_and_scan(const StateArgs& a, cudaStream_t stream) {
    using Layout = StateLayout<Math, kHeadDim>;
    using Tile = Order1Tile<Math, kHeadDim>;
    launch_kernel("linear_state_order1", linear_state_order1_kernel<Math, kHeadDim>,
                  grid_1d(int64_t{a.states()} * a.parts() * Tile::kGroups), Tile::kThreads, Tile::kSharedBytes, stream, a);
    const int words = static_cast<int>(Layout::words(1)) - Layout::kLinearPair * Layout::kPairWords;
    constexpr int kThreads = 256;
    const int blocks = (words + Layout::kSums + kThreads - 1) / kThreads;
    launch_kernel("linear_scan", linear_scan_kernel<Math, kHeadDim>, grid_1d(int64_t{a.states()} * blocks), kThreads, 0, stream, a,
                  words, blocks);
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
void linear_pass<FASTMAX_MATH>(const StateArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchState, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
