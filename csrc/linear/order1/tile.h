// Shared by the kernels of order 1: shapes, the state in accumulators and in shared memory, loads of a step.
#pragma once

#include "linear/order1/linear1.h"
#include "linear/dispatch.h"
#include "linear/order2/features.h"

namespace fastmax {

// Through a shuffle, so that the compiler knows that branches on it do not diverge.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kWarpSize, 0); }

__device__ __forceinline__ void copy_fragment(uint32_t (&to)[4], const uint32_t (&from)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// A fragments of a tile's rows, and of its columns. The 16-bit modes keep the address as this lane's offset, moved by constants: the
// compiler would otherwise keep one register for every fragment of a step.
template <class Math, int kHeadDim>
struct RowFragments {
  using Layout = TileLayout<typename Math::Element, kHeadDim>;
  uint32_t at;

  __device__ __forceinline__ explicit RowFragments(int row)
      : at(kIs16Bit<Math> ? Layout::chunk_offset(row + lane_index() % 16, lane_index() / 16) : row) {}

  // For mma_weights, and for mma.
  __device__ __forceinline__ void load_weights(WeightsA<Math>& a, uint32_t tile, int k) const {
    if constexpr (kIs16Bit<Math>) ptx::ldmatrix_x4(a, Layout::move_right(tile + at, k / Layout::kChunkElements));
    else load_weights_a_mk<Math, kHeadDim>(a, tile, at, k);
  }
  __device__ __forceinline__ void load(FragmentA<Math>& a, uint32_t tile, int k) const {
    if constexpr (kIs16Bit<Math>) ptx::ldmatrix_x4(a, Layout::move_right(tile + at, k / Layout::kChunkElements));
    else load_a_mk<Math, kHeadDim>(a, tile, at, k);
  }
};
template <class Math, int kHeadDim>
struct ColumnFragments {
  using Layout = TileLayout<typename Math::Element, kHeadDim>;
  uint32_t at;

  __device__ __forceinline__ explicit ColumnFragments(int column)
      : at(kIs16Bit<Math> ? Layout::chunk_offset(lane_index() % 8 + lane_index() / 16 * 8, column / 8 + lane_index() / 8 % 2) : column) {}

  // Columns `right` (0 or 16) from the column on, summed indices [k, k + 16).
  __device__ __forceinline__ void load(WeightsA<Math>& a, uint32_t tile, int right, int k) const {
    if constexpr (kIs16Bit<Math>) {
      ptx::ldmatrix_x4_trans(a, Layout::move_right(tile + at, right / Layout::kChunkElements) + k * Layout::kRowBytes);
    } else {
      // Rows in plain order: load_weights_a_km has them in that of weights_a_km_row.
      const int g = lane_index() / 4, t = lane_index() % 4;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = ptx::load_shared_u32(tile + Layout::offset(k + i / 4 * 8 + 2 * t + i / 2 % 2, at + right + g + i % 2 * 8));
      }
      round_to_mode<Math>(a);
    }
  }
};
// This lane's offset for load_weights_b_kn_pair_at, from a column on.
template <class Math, int kHeadDim>
__device__ __forceinline__ uint32_t trans_offset(int column) {
  using Layout = TileLayout<typename Math::Element, kHeadDim>;
  return Layout::move_right(lane_offset_b_kn<Math, kHeadDim>(), column / Layout::kChunkElements);
}

// A warp's 16 rows of x and columns of the result. Later rows see more rows of the step: column
// groups alternate in direction, so that the schedulers of a multiprocessor get about the same work.
template <class Math, int kHeadDim>
struct Linear1Warp {
  int row, column;                 // its first ones
  RowFragments<Math, kHeadDim> x;  // of its rows
  uint32_t columns, keys;          // this lane's offsets for load_weights_b_kn_pair_at, of its columns, and for load_b_nk_pair_at

  __device__ __forceinline__ explicit Linear1Warp(int warp)
      : row(first_row(warp)),
        column(warp / Tile::kRowGroups * Tile::kColumns),
        x(row),
        columns(trans_offset<Math, kHeadDim>(column)),
        keys(lane_offset_b_nk<Math, kHeadDim>()) {}

  // Blocks n and n + 1 of sums += a times its columns [8 n, 8 n + 16) of rows [k, k + 16) of a tile.
  template <int kBlocks8>
  __device__ __forceinline__ void add_columns(float (&sums)[kBlocks8][4], int n, const WeightsA<Math>& a, uint32_t tile,
                                              int k) const {
    WeightsB<Math> b0, b1;
    load_weights_b_kn_pair_at<Math, kHeadDim>(b0, b1, tile + columns, 8 * n, k);
    mma_weights<Math>(sums[n], a, b0);
    mma_weights<Math>(sums[n + 1], a, b1);
  }
  // Blocks n and n + 1 of scores += a times columns [k, k + 16) of rows [8 n, 8 n + 16) of a tile.
  template <int kBlocks8>
  __device__ __forceinline__ void add_scores(float (&scores)[kBlocks8][4], int n, const FragmentA<Math>& a, uint32_t tile,
                                             int k) const {
    FragmentB<Math> b0, b1;
    load_b_nk_pair_at<Math, kHeadDim>(b0, b1, tile + keys, k, 8 * n);
    mma_pair<Math>(scores[n], scores[n + 1], a, b0, b1);
  }

 private:
  using Tile = Linear1Tile<Math, kHeadDim>;
  static __device__ __forceinline__ int first_row(int warp) {
    constexpr int kGroups = Tile::kRowGroups;
    const int group = warp % kGroups, column_group = warp / kGroups;
    return 16 * (column_group % 2 == 0 ? group : kGroups - 1 - group);
  }
};

// B fragment whose column 0 holds 16 row weights as operands and column 1 what rounding them left over: the product's columns 0 and
// 1, which one lane of four holds, add up to the weighted sum of A's columns.
template <class Math>
__device__ __forceinline__ void weights_column(WeightsB<Math>& b, const float* weights) {
  const int lane = lane_index(), g = lane / 4, t = lane % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float2 x = *reinterpret_cast<const float2*>(weights + 8 * i + 2 * t);
    if constexpr (kIs16Bit<Math>) {
      const uint32_t high = ptx::pack_bf16x2(x.x, x.y);
      const uint32_t low = ptx::pack_bf16x2(x.x - low_bf16(high), x.y - high_bf16(high));
      b[i] = g == 0 ? high : g == 1 ? low : 0u;
    } else {
      const float2 high = make_float2(as_operand<Math>(x.x), as_operand<Math>(x.y));
      b[2 * i] = __float_as_uint(g == 0 ? high.x : g == 1 ? x.x - high.x : 0.f);
      b[2 * i + 1] = __float_as_uint(g == 0 ? high.y : g == 1 ? x.y - high.y : 0.f);
    }
  }
}

// Stages of a ring: the next step is loaded during a step where the device has shared memory for two.
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 2) ptx::cp_async_wait<1>();
  else ptx::cp_async_wait<0>();
}
template <class Tile, class Args>
void launch_walk(const char* name, void (*kernel)(Args, int), int64_t blocks, const Args& a, cudaStream_t stream) {
  static_assert(Tile::kRing + Tile::kStageBytes <= kMaxSharedBytes, "a walk with one stage does not fit in shared memory");
  const int stages = Tile::kRing + 2 * Tile::kStageBytes <= shared_limit(a.sm_arch) ? 2 : 1;
  launch_kernel(name, kernel, grid_1d(blocks), Tile::kThreads, Tile::kRing + stages * Tile::kStageBytes, stream, a, stages);
}

// The state of one block, spread over its warps, two to a row of the matrix. Of every row of warps one adds up that part of sum y; two
// of the others add up sum w.
template <class Math, int kHeadDim>
struct Linear1State {
  using Tile = Linear1Tile<Math, kHeadDim>;
  static constexpr int kM = Tile::kStateM, kN = Tile::kStateN;

  float acc[kM][kN][4];
  float sums[2][4];  // sum y of row tiles 0 and 1; or sum w of the even and of the odd blocks n, in row n of the product
  int row, column;   // of this warp's corner
  bool sums_y, sums_w;
  ColumnFragments<Math, kHeadDim> y_columns;
  uint32_t w_columns;

  static constexpr __device__ int right(int n) { return n / 2 * 32 + n % 2 * 8; }  // of the corner, block n

  __device__ __forceinline__ explicit Linear1State(int warp)
      : row(16 * kM * (warp / 2)),
        column(16 * (warp % 2)),
        sums_y(warp % 2 == warp / 2 % 2),
        sums_w(warp % 2 == 1 - warp / 2),
        y_columns(row),
        w_columns(trans_offset<Math, kHeadDim>(column)) {
    clear_sums();
  }

  __device__ __forceinline__ void clear_sums() {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[0][i] = sums[1][i] = 0.f;
  }

  // Calls f(accumulators as float4, index), the index counting in the order of memory.
  template <class F>
  __device__ __forceinline__ void for_each(F&& f) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) f(acc[m][n], (m * kN + n) * Tile::kThreads + static_cast<int>(threadIdx.x));
    }
  }
  __device__ __forceinline__ void load(const float* src) {
    for_each([&](float(&x)[4], int index) {
      const float4 v = src == nullptr ? float4{} : reinterpret_cast<const float4*>(src)[index];
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    });
  }
  __device__ __forceinline__ void store(float* dst) {
    for_each([&](float(&x)[4], int index) { reinterpret_cast<float4*>(dst)[index] = make_float4(x[0], x[1], x[2], x[3]); });
  }

  // Takes the state before a segment, null for none, and publishes it, with its sum w and sum y as vectors.
  __device__ __forceinline__ void begin_walk(const float* before, char* tile, float* vectors) {
    load(before);
    publish(tile);
    for (int i = threadIdx.x; i < 2 * kHeadDim; i += Tile::kThreads) vectors[i] = before == nullptr ? 0.f : before[kHeadDim * kHeadDim + i];
  }

  // Adds the rows of a step. weights: of the rows in sum y, or null: all one.
  __device__ __forceinline__ void add(uint32_t y, uint32_t w, const float* weights) {
    constexpr int kUnroll = kIs16Bit<Math> && kHeadDim < 128 ? 2 : 1;  // no more than registers allow
    const int g = lane_index() / 4;
#pragma unroll kUnroll
    for (int k = 0; k < Tile::kRows; k += 16) {
      WeightsA<Math> a[kM];
#pragma unroll
      for (int m = 0; m < kM; ++m) y_columns.load(a[m], y, 16 * m, k);
      if (sums_y) {
        WeightsB<Math> b;
        if (weights != nullptr) {
          weights_column<Math>(b, weights + k);
        } else {
#pragma unroll
          for (int i = 0; i < FragmentSize<Math>::kWeightsB; ++i) b[i] = g == 0 ? kOperandOnes<Math> : 0u;
        }
#pragma unroll
        for (int m = 0; m < kM; ++m) mma_weights<Math>(sums[m], a[m], b);
      }
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        WeightsB<Math> b0, b1;
        load_weights_b_kn_pair_at<Math, kHeadDim>(b0, b1, w + w_columns, right(n), k);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_weights<Math>(acc[m][n], a[m], b0);
          mma_weights<Math>(acc[m][n + 1], a[m], b1);
        }
        if (sums_w) {
          WeightsA<Math> row0, row1;  // ones in row n, and in row n + 1
#pragma unroll
          for (int i = 0; i < FragmentSize<Math>::kWeightsA; ++i) {
            row0[i] = i % 2 == 0 && g == n ? kOperandOnes<Math> : 0u;
            row1[i] = i % 2 == 0 && g == n + 1 ? kOperandOnes<Math> : 0u;
          }
          mma_weights<Math>(sums[0], row0, b0);
          mma_weights<Math>(sums[1], row1, b1);
        }
      }
    }
  }

  // Adds the vectors to sum_w and sum_y, in shared or global memory. Every number belongs to one lane.
  __device__ __forceinline__ void add_sums_to(float* sum_w, float* sum_y) const {
    const int lane = lane_index(), g = lane / 4, t = lane % 4;
    if (sums_y && t == 0) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        sum_y[row + 16 * m + g] += sums[m][0] + sums[m][1];
        sum_y[row + 16 * m + 8 + g] += sums[m][2] + sums[m][3];
      }
    }
    if (sums_w && g < kN) {
      float2* sum = reinterpret_cast<float2*>(sum_w + column + right(g) + 2 * t);
      *sum = make_float2(sum->x + (g % 2 == 0 ? sums[0][0] : sums[1][0]), sum->y + (g % 2 == 0 ? sums[0][1] : sums[1][1]));
    }
  }

  // sum_y, which the same lanes brought up to date, as two rows of an [8][head_dim] tile of operands: rounded, and what rounding left over.
  __device__ __forceinline__ void publish_sum_y(char* tile, const float* sum_y) const {
    using Element = typename Math::Element;
    using Layout = typename Tile::Layout;
    if (!sums_y || lane_index() % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int at = row + 8 * i + lane_index() / 4;
      const float x = sum_y[at];
      const Element high = from_float<Element>(kIs16Bit<Math> ? x : as_operand<Math>(x));
      *reinterpret_cast<Element*>(tile + Layout::offset(0, at)) = high;
      *reinterpret_cast<Element*>(tile + Layout::offset(1, at)) = from_float<Element>(x - to_float(high));
    }
  }

  // The state as a [column of y][column of w] tile of operands.
  __device__ __forceinline__ void publish(char* tile) const {
    using Element = typename Math::Element;
    using Layout = typename Tile::Layout;
    const int lane = lane_index();
    const uint32_t corner = Layout::offset(row + lane / 4, column + 2 * (lane % 4));
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      char* block = tile + Layout::move_right(corner, right(n) / Layout::kChunkElements);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          store_pair(reinterpret_cast<Element*>(block + (16 * m + 8 * half) * Layout::kRowBytes), acc[m][n][2 * half],
                     acc[m][n][2 * half + 1]);
        }
      }
    }
  }
};

// Global -> shared for tiles of a step, 16 bytes per thread and pass. A cursor points at what a thread copies first of row 0 of a
// head, so that a step costs an addition of uniform numbers per tensor and pass. It may lie outside: zero-filled bytes are not read.
template <class Math, int kHeadDim>
struct Linear1Loader {
  using Tile = Linear1Tile<Math, kHeadDim>;
  using Element = typename Math::Element;
  using Layout = typename Tile::Layout;
  static constexpr int kPassRows = Tile::kThreads / Layout::kChunks, kPasses = Tile::kRows / kPassRows;
  static_assert(Tile::kThreads % Layout::kChunks == 0 && kPassRows % 8 == 0 && Tile::kRows % kPassRows == 0,
                "the swizzle repeats from pass to pass");

  int row, column;
  uint32_t offset;

  __device__ __forceinline__ Linear1Loader() {
    row = static_cast<int>(threadIdx.x) / Layout::kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % Layout::kChunks;
    column = chunk * Layout::kChunkElements;
    offset = Layout::chunk_offset(row, chunk);
  }

  __device__ __forceinline__ const Element* cursor(const View& v, int batch, int head) const {
    return head_pointer<Element>(v, batch, head) + row * v.token + column;
  }

  // Bit i: pass i copies a row in [0, rows) that is not masked. The other rows are zero-filled.
  __device__ __forceinline__ unsigned rows_inside(int row_begin, int rows, const uint8_t* mask, int mask_stride) const {
    unsigned inside = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int at = row_begin + row + pass * kPassRows;
      if (static_cast<unsigned>(at) < static_cast<unsigned>(rows)) inside |= 1u << pass;
    }
    if (mask != nullptr) {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int at = row_begin + row + pass * kPassRows;
        if ((inside >> pass & 1u) && mask[static_cast<int64_t>(at) * mask_stride] == 0) inside &= ~(1u << pass);
      }
    }
    return inside;
  }

  __device__ __forceinline__ void load(uint32_t tile, const Element* cursor, int64_t token_stride, int row_begin, int columns,
                                       unsigned inside) const {
    const Element* address = cursor + row_begin * token_stride;
    if (column >= columns) inside = 0;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      ptx::cp_async_16(tile + offset + pass * kPassRows * Layout::kRowBytes, address, inside >> pass & 1u ? 16 : 0);
      address += kPassRows * token_stride;
    }
  }
};

// 4 x 4 transpose among the lanes of a quad: word i of lane t becomes word t of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&w)[4]) {
  const int t = lane_index() % 4;
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (t & distance) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int low = distance == 1 ? 2 * i : i, high = low + distance;
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? w[low] : w[high], distance);
      w[low] = upper ? other : w[low];
      w[high] = upper ? w[high] : other;
    }
  }
}

// Rows row (of this lane's quad) and row + 8 of a result times 1 + dropout noise.
template <class Math, int kBlocks8>
__device__ __forceinline__ void multiply_noise(const View& noise, bool half_noise, float dropout, int batch, int head, int row, int row_end,
                                               int first_column, int columns, float (&acc)[kBlocks8][4]) {
#pragma unroll
  for (int i = 0; i < 2 * kBlocks8; ++i) {
    const int noise_row = row + i % 2 * 8, column = first_column + i / 2 * 8 + 2 * (lane_index() % 4);
    if (noise_row >= row_end || column >= columns) continue;
    const float2 r = load_row_pair<typename Math::Element>(noise, half_noise, batch, head, noise_row, column);
    acc[i / 2][i % 2 * 2] *= fmaf(dropout, r.x, 1.f);
    acc[i / 2][i % 2 * 2 + 1] *= fmaf(dropout, r.y, 1.f);
  }
}

// Rows row (of this lane's quad) and row + 8 of a result, times a factor each. bf16: 16 bytes per lane.
template <class Math, int kBlocks8>
__device__ __forceinline__ void store_result(const View& out, bool half_out, int batch, int head, int row, int row_end, int first_column,
                                             int columns, const float (&acc)[kBlocks8][4], const float (&factor)[2]) {
  using Element = typename Math::Element;
  const int t = lane_index() % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int out_row = row + 8 * half;
    if constexpr (kIs16Bit<Math>) {
      static_assert(kBlocks8 % 4 == 0, "four blocks of columns are exchanged in a quad");
      Element* dst = const_cast<Element*>(head_pointer<Element>(out, batch, head)) + out_row * out.token + first_column + 8 * t;
#pragma unroll
      for (int n = 0; n < kBlocks8; n += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          words[i] = ptx::pack_bf16x2(acc[n + i][2 * half] * factor[half], acc[n + i][2 * half + 1] * factor[half]);
        }
        transpose_quad(words);
        if (static_cast<unsigned>(out_row) < static_cast<unsigned>(row_end) && first_column + 8 * (n + t) < columns) {
          *reinterpret_cast<uint4*>(dst + 8 * n) = make_uint4(words[0], words[1], words[2], words[3]);
        }
      }
    } else {
#pragma unroll
      for (int n = 0; n < kBlocks8; ++n) {
        const int column = first_column + 8 * n + 2 * t;
        if (out_row < row_end && column < columns) {
          store_row_pair<Element>(out, half_out, batch, head, out_row, column, acc[n][2 * half] * factor[half],
                                  acc[n][2 * half + 1] * factor[half]);
        }
      }
    }
  }
}

// e of the rows of a step; zero outside [0, rows).
template <int kRows>
__device__ __forceinline__ void load_row_scale(uint32_t dst, const RowScale& scale, int64_t head, int row_begin, int rows) {
  const int row = row_begin + static_cast<int>(threadIdx.x);
  const bool inside = static_cast<unsigned>(row) < static_cast<unsigned>(rows);
  if (threadIdx.x < kRows) {
    ptx::cp_async_small<4>(dst + threadIdx.x * 4, scale.data + head * scale.head + (inside ? row * scale.token : 0), inside ? 4 : 0);
  }
}

// Whether this thread's row of a step is an attended row of y.
template <int kRows>
__device__ __forceinline__ bool counts_row(int row_begin, int rows, const uint8_t* mask, int mask_stride) {
  const int row = row_begin + static_cast<int>(threadIdx.x);
  if (threadIdx.x >= kRows || static_cast<unsigned>(row) >= static_cast<unsigned>(rows)) return false;
  return mask == nullptr || mask[static_cast<int64_t>(row) * mask_stride] != 0;
}

}  // namespace fastmax
