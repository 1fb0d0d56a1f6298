// Order 1: grad_v and grad_k in one pass, from one state sum q g^T read in both orientations: see walk.cu for the steps.
// With grouped query heads a step adds up the heads one after the other. Row r of x sees the rows of y up to r: reversed sequences end
// together, so the boundary is zero.
//
// shards: FASTMAX_MATH

#include "linear/order1/tile.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(Linear1Tile<Math, kHeadDim>::kThreads, Linear1Tile<Math, kHeadDim>::kMinBlocks)
    linear1_pair_walk_kernel(const Linear1PairWalkArgs a, const int stages) {
  using Tile = PairWalkTile<Math, kHeadDim>;
  using Layout = typename Tile::Layout;
  using Element = typename Math::Element;
  constexpr int kDepth = kHeadDim / 16, kBlocks8 = Tile::kColumns / 8;
  constexpr int kUnroll = kIs16Bit<Math> ? 2 : 1;  // of loops over the depth: no more than registers allow
  constexpr int kRing = Tile::kRing, kStageBytes = Tile::kStageBytes;
  extern __shared__ __align__(128) char shared[];
  float* sum_w = reinterpret_cast<float*>(shared + Tile::kSums);
  float* sum_y = sum_w + kHeadDim;
  const uint32_t state_tile = ptx::smem_address(shared), ring = state_tile + kRing;
  const int g = lane_index() / 4, t = lane_index() % 4, warp_number = warp_index();
  const Linear1Warp<Math, kHeadDim> warp(warp_number);

  const int state_index = blockIdx.x % a.states(), segment = blockIdx.x / a.states();
  const int batch = state_index / a.state_heads, kv_head = state_index % a.state_heads;
  const int first_row = segment * a.segment;
  const int y_group = a.causal ? a.y_group : 1;  // not causal: the state has it all
  const int steps = (min(a.segment, a.nx - first_row) + Tile::kRows - 1) / Tile::kRows * y_group;

  const Linear1Loader<Math, kHeadDim> loader;
  const Element* x_cursor = loader.cursor(a.x, batch, kv_head);
  const Element* x2_cursor = loader.cursor(a.x2, batch, kv_head);
  const Element* y_cursor = loader.cursor(a.y, batch, kv_head * a.y_group);
  const Element* w_cursor = loader.cursor(a.w, batch, kv_head * a.y_group);
  int next_row = first_row, next_head = 0;
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t x = ring + (step & (stages - 1)) * kStageBytes;
      const unsigned x_inside = loader.rows_inside(next_row, a.nx, nullptr, 0);
      loader.load(x, x_cursor, a.x.token, next_row, a.y_columns, x_inside);
      loader.load(x + Tile::kTileBytes, x2_cursor, a.x2.token, next_row, a.w_columns, x_inside);
      if (a.causal) {
        const unsigned inside = loader.rows_inside(next_row, a.ny, nullptr, 0);
        loader.load(x + 2 * Tile::kTileBytes, y_cursor + next_head * a.y.head, a.y.token, next_row, a.y_columns, inside);
        loader.load(x + 3 * Tile::kTileBytes, w_cursor + next_head * a.w.head, a.w.token, next_row, a.w_columns, inside);
        load_row_scale<Tile::kRows>(x + 4 * Tile::kTileBytes, a.y_scale, int64_t{state_index} * a.y_group + next_head, next_row, a.ny);
      }
      if (++next_head == y_group) next_head = 0, next_row += Tile::kRows;
    }
    ptx::cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < stages; ++i) load(i);

  // The state before the segment.
  const int part = a.part_before(segment);
  const float* before =
      part < 0 ? nullptr : a.prefixes + (int64_t{state_index} * a.parts + part) * linear1_state_floats(kHeadDim, kHeadDim);
  Linear1State<Math, kHeadDim> state(warp_number);
  state.begin_walk(before, shared, sum_w);

  float grad_w[kBlocks8][4], grad_y[kBlocks8][4];
  int row = first_row, head = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int at = kRing + (step & (stages - 1)) * kStageBytes;
    const uint32_t x = state_tile + at, x2 = x + Tile::kTileBytes, y = x2 + Tile::kTileBytes, w = y + Tile::kTileBytes;
    const float* scale = reinterpret_cast<const float*>(shared + at + 4 * Tile::kTileBytes);
    const bool first_head = head == 0, last_head = head == y_group - 1;
    wait_for_stage(stages);
    __syncthreads();

    if (first_head) {
#pragma unroll
      for (int n = 0; n < kBlocks8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) grad_w[n][e] = grad_y[n][e] = 0.f;
      }
#pragma unroll 1
      for (int k = 0; k < kDepth; ++k) {
        WeightsA<Math> rows;
        FragmentA<Math> rows2;
        warp.x.load_weights(rows, x, 16 * k);
        warp.x.load(rows2, x2, 16 * k);
#pragma unroll
        for (int n = 0; n < kBlocks8; n += 2) {
          warp.add_columns(grad_w, n, rows, state_tile, 16 * k);
          FragmentB<Math> t0, t1;
          load_b_nk_pair_at<Math, kHeadDim>(t0, t1, state_tile + warp.keys + warp.column * Layout::kRowBytes, 16 * k, 8 * n);
          mma<Math>(grad_y[n], rows2, t0);
          mma<Math>(grad_y[n + 1], rows2, t1);
        }
      }
#pragma unroll
      for (int n = 0; n < kBlocks8; ++n) {
        const int column = warp.column + 8 * n + 2 * t;
        const float2 w_sum = *reinterpret_cast<const float2*>(sum_w + column), y_sum = *reinterpret_cast<const float2*>(sum_y + column);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          grad_w[n][e] = fmaf(a.c1, grad_w[n][e], a.c0 * (e % 2 == 0 ? w_sum.x : w_sum.y));
          grad_y[n][e] = a.c1 * (grad_y[n][e] + (e % 2 == 0 ? y_sum.x : y_sum.y));
        }
      }
    }

    // The rows of the step.
    constexpr int kSlab = Tile::kSlab;
#pragma unroll 1
    for (int slab = 0; a.causal && slab <= warp.row; slab += kSlab) {
      float s[kSlab / 8][4] = {}, u[kSlab / 8][4] = {};
#pragma unroll kUnroll
      for (int k = 0; k < kDepth; ++k) {
        FragmentA<Math> rows, rows2;
        warp.x.load(rows, x, 16 * k);
        warp.x.load(rows2, x2, 16 * k);
#pragma unroll
        for (int n = 0; n < kSlab / 8; n += 2) {
          warp.add_scores(s, n, rows, y + slab * Layout::kRowBytes, 16 * k);
          warp.add_scores(u, n, rows2, w + slab * Layout::kRowBytes, 16 * k);
        }
      }
#pragma unroll
      for (int n = 0; n < kSlab / 8; ++n) {
        const float2 constant = *reinterpret_cast<const float2*>(scale + slab + 8 * n + 2 * t);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[n][e] = fmaf(a.c1, s[n][e], a.c0);
          u[n][e] = a.c1 * (u[n][e] + (e % 2 == 0 ? constant.x : constant.y));
          if (slab + 8 * n + 2 * t + e % 2 > warp.row + e / 2 * 8 + g) s[n][e] = u[n][e] = 0.f;
        }
      }
#pragma unroll
      for (int k = 0; k < kSlab / 16; ++k) {
        WeightsA<Math> weights, weights2;
        weights_a_from_accumulator<Math>(weights, s[2 * k], s[2 * k + 1]);
        weights_a_from_accumulator<Math>(weights2, u[2 * k], u[2 * k + 1]);
#pragma unroll
        for (int n = 0; n < kBlocks8; n += 2) {
          warp.add_columns(grad_w, n, weights, w + slab * Layout::kRowBytes, 16 * k);
          warp.add_columns(grad_y, n, weights2, y + slab * Layout::kRowBytes, 16 * k);
        }
      }
    }

    if (last_head) {
      const uint8_t* x_mask = mask_pointer(a.x_mask, batch);
      const int out_row = row + warp.row + g;
      if (x_mask != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int mask_row = min(out_row + 8 * half, a.nx - 1);
          if (x_mask[static_cast<int64_t>(mask_row) * a.x_mask.token] != 0) continue;
#pragma unroll
          for (int n = 0; n < kBlocks8; ++n) {
            grad_w[n][2 * half] = grad_w[n][2 * half + 1] = 0.f;
            grad_y[n][2 * half] = grad_y[n][2 * half + 1] = 0.f;
          }
        }
      }
      constexpr float kOnes[2] = {1.f, 1.f};
      store_result<Math>(a.grad_w, a.half_out, batch, kv_head, out_row, a.nx, warp.column, a.w_columns, grad_w, kOnes);
      store_result<Math>(a.grad_y, a.half_out, batch, kv_head, out_row, a.nx, warp.column, a.y_columns, grad_y, kOnes);
    }

    const bool update = a.causal && step + y_group < steps;
    if (update) {
      if (first_head) state.clear_sums();
      state.add(y, w, scale);
    }
    __syncthreads();
    load(step + stages);
    if (update && last_head) {
      state.publish(shared);
      state.add_sums_to(sum_w, sum_y);
    }
    if (++head == y_group) head = 0, row += Tile::kRows;
  }
}

struct LaunchPairWalk {
  template <class Math, int kHeadDim>
  static void run(const Linear1PairWalkArgs& a, cudaStream_t stream) {
    using Tile = PairWalkTile<Math, kHeadDim>;
    const int64_t blocks = int64_t{a.states()} * a.segments;
    launch_walk<Tile>("linear1_pair_walk", linear1_pair_walk_kernel<Math, kHeadDim>, blocks, a, stream);
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const Linear1PairWalkArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchPairWalk, FASTMAX_MATH, Linear1HeadDims>(head_dim, a, stream);
}

}  // namespace fastmax
