// Second-order features on tensor-core fragments; loads and stores of the states that they build (state_format.h).
//
// Columns are taken in blocks of eight. A tile is a pair of blocks (s, b), s giving the scalar and b the base: octet x of it
// holds the eight features y[8s + x] y[8b + 0..7]. Off-diagonal tiles count twice. Star s owns the tiles (s, s), (s, s + 1),
// ..., (s, s + blocks/2 - 1), indices modulo blocks, and for s < blocks/2 also (s, s + blocks/2): every pair once.
//
// Operands are the WeightsA / WeightsB fragments of core/fragments.h: k16 steps, summed indices 2t and 2t+1 next to each other in
// every mode.
#pragma once

#include <type_traits>

#include "core/fragments.h"
#include "linear/linear.h"
#include "linear/ptx.h"
#include "linear/tile_config.h"

namespace fastmax {

template <int kHeadDim>
struct Stars {
  static constexpr int kBlocks = kHeadDim / 8;
  static constexpr int kTiles = state_tiles(kHeadDim);

  // Modulo blocks, of a number below twice that.
  static __device__ __forceinline__ int wrap(int block) { return block >= kBlocks ? block - kBlocks : block; }
  static __host__ __device__ __forceinline__ int length(int s) { return s < kBlocks / 2 ? kBlocks / 2 + 1 : kBlocks / 2; }

  // Star and base block of a tile.
  static __device__ __forceinline__ void locate(int tile, int& s, int& b) {
    constexpr int kLong = kBlocks / 2 + 1;
    constexpr int kLongTiles = kBlocks / 2 * kLong;
    int offset;
    if (tile < kLongTiles) {
      s = tile / kLong, offset = tile % kLong;
    } else {
      s = kBlocks / 2 + (tile - kLongTiles) / (kLong - 1), offset = (tile - kLongTiles) % (kLong - 1);
    }
    b = (s + offset) % kBlocks;
  }
};

// One, as an operand register.
template <class Math>
inline constexpr uint32_t kOperandOnes = kIs16Bit<Math> ? 0x3f803f80u : 0x3f800000u;

// Calls f(integral_constant<0>), ..., f(integral_constant<kCount - 1>).
template <int kCount, int kIndex = 0, class F>
__device__ __forceinline__ void static_for(F&& f) {
  if constexpr (kIndex < kCount) {
    f(std::integral_constant<int, kIndex>{});
    static_for<kCount, kIndex + 1>(f);
  }
}

__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 r = __hmul2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ uint32_t add_bf16x2(uint32_t a, uint32_t b) {
  const __nv_bfloat162 r = __hadd2(*reinterpret_cast<const __nv_bfloat162*>(&a), *reinterpret_cast<const __nv_bfloat162*>(&b));
  return *reinterpret_cast<const uint32_t*>(&r);
}
__device__ __forceinline__ float low_bf16(uint32_t x) { return __uint_as_float(x << 16); }
__device__ __forceinline__ float high_bf16(uint32_t x) { return __uint_as_float(x & 0xffff0000u); }
// A form that the compiler folds into the multiplication's operand selector.
__device__ __forceinline__ uint32_t duplicate_half(uint32_t x, int half) {
  const __nv_bfloat162 pair = *reinterpret_cast<const __nv_bfloat162*>(&x);
  const __nv_bfloat162 r = half ? __high2bfloat162(pair) : __low2bfloat162(pair);
  return *reinterpret_cast<const uint32_t*>(&r);
}

// What the fp32 modes keep in a snapshot: rounded once, so that readers take it as it is.
template <class Math>
__device__ __forceinline__ float as_operand(float x) {
  return Math::kMode == MathMode::kTF32 ? __uint_as_float(ptx::to_tf32(x)) : x;
}

// A product of two operands, as an operand. tf32: rounded to nearest by half a unit added to the bits that mma.sync ignores. That
// loses a NaN, which is still in the first-order terms, and no infinity.
template <class Math>
__device__ __forceinline__ uint32_t multiply_operand(uint32_t a, uint32_t b) {
  if constexpr (kBf16State<Math>) {
    return multiply_bf16x2(a, b);
  } else {
    const uint32_t r = __float_as_uint(__uint_as_float(a) * __uint_as_float(b));
    return Math::kMode == MathMode::kTF32 ? r + 0x1000u : r;
  }
}

// Summed index = feature: columns (values) 0..7 and 8..15 of a 16 x 16 state block, features of both octets.
template <class Math>
__device__ __forceinline__ void load_state_by_feature(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t block) {
  const int lane = lane_index();
  if constexpr (kBf16State<Math>) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, block + lane * 16);
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      ptx::load_shared_u32x2(b0 + i, block + i * 128 + lane * 8);
      ptx::load_shared_u32x2(b1 + i, block + 512 + i * 128 + lane * 8);
    }
  }
}

// Summed index = value: columns (features) of octet 0 and of octet 1.
template <class Math>
__device__ __forceinline__ void load_state_by_value(WeightsB<Math>& b0, WeightsB<Math>& b1, uint32_t block) {
  const int lane = lane_index();
  if constexpr (kBf16State<Math>) {
    // Matrices in the order 0, 2, 1, 3: a fragment is then two neighbouring registers, as mma wants them.
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, block + lane % 8 * 16 + lane / 8 % 2 * 256 + lane / 16 * 128);
    b0[0] = r[0], b0[1] = r[1], b1[0] = r[2], b1[1] = r[3];
  } else {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t offset = i / 2 * 512 + (2 * t + i % 2) * 32 + g * 4;
      b0[i] = ptx::load_shared_u32(block + offset);
      b1[i] = ptx::load_shared_u32(block + 256 + offset);
    }
  }
}

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

// One octet per lane row pair of x: columns 8s .. 8s+7 of rows row + g and row + g + 8, as scalars of features.
template <class Math, int kCols>
struct RowOctet {
  static constexpr int kRegs = kIs16Bit<Math> ? 4 : 8;
  uint32_t r[2][kRegs];

  __device__ __forceinline__ void load(uint32_t tile, int row, int block) {
    using Layout = TileLayout<typename Math::Element, kCols>;
    const int g = lane_index() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kRegs; i += 4) {
        ptx::load_shared_u32x4(r[half] + i, tile + Layout::chunk_offset(row + g + 8 * half, (block * kRegs + i) / 4));
      }
    }
  }
  // The scalar as the operand that multiplies a base register.
  __device__ __forceinline__ uint32_t operand(int half, int x) const {
    if constexpr (kIs16Bit<Math>) return duplicate_half(r[half][x / 2], x % 2);
    else return r[half][x];
  }
  __device__ __forceinline__ float value(int half, int x) const {
    if constexpr (kIs16Bit<Math>) return x % 2 ? high_bf16(r[half][x / 2]) : low_bf16(r[half][x / 2]);
    else return __uint_as_float(r[half][x]);
  }
};

// Columns 8b + 2t and 8b + 2t + 1 of rows row + g and row + g + 8: the base of features.
template <class Math, int kCols>
struct RowBase {
  static constexpr int kRegs = kIs16Bit<Math> ? 1 : 2;
  uint32_t r[2][kRegs];

  __device__ __forceinline__ void load(uint32_t tile, int row, int block) {
    using Layout = TileLayout<typename Math::Element, kCols>;
    const int lane = lane_index();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t address = tile + Layout::offset(row + lane / 4 + 8 * half, 8 * block + 2 * (lane % 4));
#pragma unroll
      for (int i = 0; i < kRegs; ++i) r[half][i] = ptx::load_shared_u32(address + 4 * i);
    }
  }
  __device__ __forceinline__ float value(int half, int i) const {
    if constexpr (kIs16Bit<Math>) return i ? high_bf16(r[half][0]) : low_bf16(r[half][0]);
    else return __uint_as_float(r[half][i]);
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

// A fragment of octets x and x + 1 of a tile.
template <class Math, int kCols>
__device__ __forceinline__ void features(WeightsA<Math>& a, const RowOctet<Math, kCols>& scalar, const RowBase<Math, kCols>& base,
                                         int x) {
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t s = scalar.operand(half, x + octet);
      if constexpr (kIs16Bit<Math>) {
        a[2 * octet + half] = multiply_operand<Math>(base.r[half][0], s);
      } else {
        a[4 * octet + half] = multiply_operand<Math>(base.r[half][0], s);
        a[4 * octet + 2 + half] = multiply_operand<Math>(base.r[half][1], s);
      }
    }
  }
}

template <class Element>
__device__ __forceinline__ const Element* head_pointer(const View& v, int batch, int head) {
  return static_cast<const Element*>(v.data) + batch * v.batch + head * v.head;
}
__device__ __forceinline__ const uint8_t* mask_pointer(const RowMask& m, int batch) {
  return m.data == nullptr ? nullptr : m.data + batch * m.batch;
}

// Two neighbouring columns of an output row, or of its noise: elements as the inputs', or fp16 where those were widened.
template <class Element>
__device__ __forceinline__ void store_row_pair(const View& v, bool half, int batch, int head, int row, int column, float x, float y) {
  const int64_t offset = batch * v.batch + head * v.head + row * v.token + column;
  if (std::is_same_v<Element, float> && half) {
    store_pair(static_cast<__half*>(const_cast<void*>(v.data)) + offset, x, y);
  } else {
    store_pair(static_cast<Element*>(const_cast<void*>(v.data)) + offset, x, y);
  }
}
template <class Element>
__device__ __forceinline__ float2 load_row_pair(const View& v, bool half, int batch, int head, int row, int column) {
  const int64_t offset = batch * v.batch + head * v.head + row * v.token + column;
  if (std::is_same_v<Element, float> && half) return load_pair(static_cast<const __half*>(v.data) + offset);
  return load_pair(static_cast<const Element*>(v.data) + offset);
}

}  // namespace fastmax
