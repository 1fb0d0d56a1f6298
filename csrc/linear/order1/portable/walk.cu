// Order 1: o, and grad_q. A block goes over a segment of x in steps. In a step, a warp's result is the sum over the rows before the step,
// from the state, and over the rows of the step, from their scores; then the rows of the step are added to the state.
//
// shards: FASTMAX_MATH

#include "linear/order1/tile.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(Linear1Tile<Math, kHeadDim>::kThreads, Linear1Tile<Math, kHeadDim>::kMinBlocks)
    linear1_walk_kernel(const Linear1WalkArgs a, const int stages) {
  using Tile = WalkTile<Math, kHeadDim>;
  using Layout = typename Tile::Layout;
  using Element = typename Math::Element;
  constexpr int kDepth = kHeadDim / 16, kBlocks8 = Tile::kColumns / 8;
  constexpr int kUnroll = kIs16Bit<Math> ? kDepth : 1;  // fp32 operands take twice the registers
  constexpr int kRing = Tile::kRing, kStageBytes = Tile::kStageBytes;
  extern __shared__ __align__(128) char shared[];
  char* sum_tile = shared + Tile::kSumTile;
  float* sum_w = reinterpret_cast<float*>(shared + Tile::kSums);
  float* sum_y = sum_w + kHeadDim;
  const uint32_t state_tile = ptx::smem_address(shared), ring = state_tile + kRing;
  const int g = lane_index() / 4, t = lane_index() % 4, warp_number = warp_index();
  const Linear1Warp<Math, kHeadDim> warp(warp_number);
  const uint32_t sum_keys = state_tile + Tile::kSumTile + lane_offset_b_nk_octet<Math, kHeadDim>();

  // Heads that share a state run side by side, and find their y and w in the L2 cache.
  const int x_heads = a.state_heads * a.x_group;
  const int head_index = blockIdx.x % (a.batch * x_heads), segment = blockIdx.x / (a.batch * x_heads);
  const int batch = head_index / x_heads, x_head = head_index % x_heads, kv_head = x_head / a.x_group;
  const int first_row = segment * a.segment;
  const int steps = (min(a.segment, a.nx - first_row) + Tile::kRows - 1) / Tile::kRows;
  const int y_shift = a.y_row(a.boundary);  // from a row of x to the row of y that it sees last
  const uint8_t* mask = mask_pointer(a.y_mask, batch);
  const bool normalise = a.z != nullptr;

  const Linear1Loader<Math, kHeadDim> loader;
  const Element* x_cursor = loader.cursor(a.x, batch, x_head);
  const Element* y_cursor = loader.cursor(a.y, batch, kv_head);
  const Element* w_cursor = loader.cursor(a.w, batch, kv_head);
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t x = ring + (step & (stages - 1)) * kStageBytes;
      const int row = first_row + step * Tile::kRows;
      loader.load(x, x_cursor, a.x.token, row, a.y_columns, loader.rows_inside(row, a.nx, nullptr, 0));
      if (a.causal) {
        const unsigned inside = loader.rows_inside(row + y_shift, a.ny, mask, a.y_mask.token);
        loader.load(x + Tile::kTileBytes, y_cursor, a.y.token, row + y_shift, a.y_columns, inside);
        loader.load(x + 2 * Tile::kTileBytes, w_cursor, a.w.token, row + y_shift, a.w_columns, inside);
      }
      if (a.x_scale.data != nullptr) load_row_scale<Tile::kRows>(x + 3 * Tile::kTileBytes, a.x_scale, head_index, row, a.nx);
    }
    ptx::cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < stages; ++i) load(i);

  // The state before the segment.
  const int part = a.part_before(segment);
  const float* before = part < 0 ? nullptr
                                 : a.prefixes + (int64_t{batch * a.state_heads + kv_head} * a.parts + part) *
                                                    linear1_state_floats(kHeadDim, kHeadDim);
  Linear1State<Math, kHeadDim> state(warp_number);
  state.begin_walk(before, shared, sum_w);
  for (int i = threadIdx.x; i < Tile::kSumTileBytes / 16; i += Tile::kThreads) reinterpret_cast<uint4*>(sum_tile)[i] = uint4{};
  __syncthreads();
  state.publish_sum_y(sum_tile, sum_y);
  float count = before == nullptr ? 0.f : before[kHeadDim * kHeadDim + 2 * kHeadDim];

#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int at = kRing + (step & (stages - 1)) * kStageBytes;
    const uint32_t x = state_tile + at, y = x + Tile::kTileBytes, w = y + Tile::kTileBytes;
    const int row = first_row + step * Tile::kRows;
    wait_for_stage(stages);
    __syncthreads();

    float constant[2] = {a.c0, a.c0};  // of rows g and g + 8
    if (a.x_scale.data != nullptr) {
      const float* scale = reinterpret_cast<const float*>(shared + at + 3 * Tile::kTileBytes) + warp.row + g;
      constant[0] = a.c1 * scale[0], constant[1] = a.c1 * scale[8];
    }

    // Its rows of x, which the state, the denominators and every slab of scores meet. fp32 operands, which take twice the registers,
    // are read each time.
    constexpr bool kKeepsRows = kIs16Bit<Math>;
    FragmentA<Math> kept[kKeepsRows ? kDepth : 1];
    if constexpr (kKeepsRows) {
#pragma unroll
      for (int k = 0; k < kDepth; ++k) warp.x.load(kept[k], x, 16 * k);
    }
    const auto load_weights = [&](WeightsA<Math>& rows, int k) {
      if constexpr (kKeepsRows) copy_fragment(rows, kept[k]);
      else warp.x.load_weights(rows, x, 16 * k);
    };
    const auto load_rows = [&](FragmentA<Math>& rows, int k) {
      if constexpr (kKeepsRows) copy_fragment(rows, kept[k]);
      else warp.x.load(rows, x, 16 * k);
    };

    float out[kBlocks8][4] = {};
    float z[2] = {};  // this lane's part of the denominators
#pragma unroll kUnroll
    for (int k = 0; k < kDepth; ++k) {
      WeightsA<Math> rows;
      load_weights(rows, k);
#pragma unroll
      for (int n = 0; n < kBlocks8; n += 2) warp.add_columns(out, n, rows, state_tile, 16 * k);
    }
#pragma unroll
    for (int n = 0; n < kBlocks8; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(sum_w + warp.column + 8 * n + 2 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = fmaf(a.c1, out[n][e], constant[e / 2] * (e % 2 == 0 ? sum.x : sum.y));
    }
    if (normalise) {
      constexpr int kAtOnce = kOctetFragments<Math, kHeadDim>;
      float product[4] = {};
#pragma unroll
      for (int k = 0; k < kDepth; k += kAtOnce) {
        FragmentB<Math> b[kAtOnce];
        load_b_nk_octet_at<Math, kHeadDim>(b, sum_keys, 16 * k);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          FragmentA<Math> rows;
          load_rows(rows, k + i);
          mma<Math>(product, rows, b[i]);
        }
      }
      z[0] = a.c1 * (product[0] + product[1]), z[1] = a.c1 * (product[2] + product[3]);
    }

    // The rows of the step.
    constexpr int kSlab = Tile::kSlab;
#pragma unroll 1
    for (int slab = 0; a.causal && slab <= warp.row; slab += kSlab) {
      float s[kSlab / 8][4] = {};
#pragma unroll kUnroll
      for (int k = 0; k < kDepth; ++k) {
        FragmentA<Math> rows;
        load_rows(rows, k);
#pragma unroll
        for (int n = 0; n < kSlab / 8; n += 2) warp.add_scores(s, n, rows, y + slab * Layout::kRowBytes, 16 * k);
      }
#pragma unroll
      for (int n = 0; n < kSlab / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = fmaf(a.c1, s[n][e], constant[e / 2]);
      }
      if (slab + kSlab > warp.row || (normalise && mask != nullptr)) {
#pragma unroll
        for (int n = 0; n < kSlab / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = slab + 8 * n + 2 * t + e, source = row + y_shift + key;
            const bool taken = mask == nullptr || (source < a.ny && mask[static_cast<int64_t>(source) * a.y_mask.token] != 0);
            if (!taken || key > warp.row + g) s[n][e] = 0.f;
            if (!taken || key > warp.row + g + 8) s[n][2 + e] = 0.f;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kSlab / 16; ++k) {
        WeightsA<Math> weights;
        weights_a_from_accumulator<Math>(weights, s[2 * k], s[2 * k + 1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) z[e / 2] += s[2 * k][e] + s[2 * k + 1][e];
#pragma unroll
        for (int n = 0; n < kBlocks8; n += 2) warp.add_columns(out, n, weights, w + slab * Layout::kRowBytes, 16 * k);
      }
    }

    const int out_row = row + warp.row + g;
    float factor[2] = {1.f, 1.f};
    if (normalise) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float row_sum = fmaf(a.c0, count, quad_sum(z[half]));
        factor[half] = row_sum == 0.f ? 0.f : 1.f / row_sum;
        if (t == 0 && warp.column == 0 && out_row + 8 * half < a.nx) {
          a.z[int64_t{head_index} * a.nx + out_row + 8 * half] = row_sum;
        }
      }
    }
    if (a.noise.data != nullptr) {
      multiply_noise<Math>(a.noise, a.half_out, a.dropout, batch, x_head, out_row, a.nx, warp.column, a.w_columns, out);
    }
    store_result<Math>(a.out, a.half_out, batch, x_head, out_row, a.nx, warp.column, a.w_columns, out, factor);

    const bool update = a.causal && step + 1 < steps;
    if (update) {
      state.clear_sums();
      state.add(y, w, nullptr);
    }
    const int step_count = __syncthreads_count(counts_row<Tile::kRows>(row + y_shift, a.ny, mask, a.y_mask.token));
    load(step + stages);
    if (update) {
      state.publish(shared);
      state.add_sums_to(sum_w, sum_y);
      state.publish_sum_y(sum_tile, sum_y);
      count += static_cast<float>(step_count);
    }
  }
}

struct LaunchWalk {
  template <class Math, int kHeadDim>
  static void run(const Linear1WalkArgs& a, cudaStream_t stream) {
    using Tile = WalkTile<Math, kHeadDim>;
    const int64_t blocks = int64_t{a.states()} * a.x_group * a.segments;
    launch_walk<Tile>("linear1_walk", linear1_walk_kernel<Math, kHeadDim>, blocks, a, stream);
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const Linear1WalkArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchWalk, FASTMAX_MATH, Linear1HeadDims>(head_dim, a, stream);
}

}  // namespace fastmax
