// State pass of order 1 for calls that order1/ does not cover: head dims above kLinear1HeadDim, decays or a carried state. One kernel sums
// each part of y in fp32, a second one scans the parts.
//
// shards: FASTMAX_MATH

#include "core/lanes.h"
#include "linear/dispatch.h"
#include "linear/order2/row_walk.h"

namespace fastmax {
namespace {

__device__ __forceinline__ Work locate_part(const PartStateArgs& a, int state, int part) {
  const int begin = a.part_begin(part);
  return {state, max(begin, 0), begin + a.part};
}

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(PartTile<Math, kHeadDim>::kThreads, 1) linear_part_sums_kernel(const PartStateArgs a) {
  using Tile = PartTile<Math, kHeadDim>;
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

  RowWalk<Tile, Math, kHeadDim> loader(a, work, group_value, ring);
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

  float* part_sum = a.parts_sum + item * part_floats(kHeadDim, kHeadDim, 1);
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
  count = sum_of_lanes(count);
  if (threadIdx.x == 0 && group_value == 0) sums[Layout::kSumOne] = count;
}

// Exclusive prefix over parts of every first-order word, written as weighted snapshot words; one thread per word (or per sum),
// state_blocks blocks a state. kCarries: from the accumulators, which then have the sum of all.
template <class Math, int kHeadDim, bool kCarries>
__global__ void __launch_bounds__(256) linear_part_scan_kernel(const PartStateArgs a, const int scan_words, const int state_blocks) {
  using Layout = StateLayout<Math, kHeadDim>;
  constexpr int kFirstWord = Layout::kLinearPair * Layout::kPairWords;
  const int words = static_cast<int>(Layout::words(1));
  const int64_t stride = part_floats(kHeadDim, kHeadDim, 1);
  const int parts = a.parts(), lead = a.lead_parts();
  const int index = blockIdx.x % state_blocks * blockDim.x + threadIdx.x;
  const int64_t state = blockIdx.x / state_blocks;
  const float* src = a.parts_sum + state * parts * stride;
  // Worked out where it is needed: the loop needs the registers.
  const auto carried = [&] { return a.accumulators + static_cast<int64_t>(ptx::keep_in_register(blockIdx.x)) / state_blocks * stride; };
  constexpr int kAhead = 8;  // loads in flight
  // Of the sum of all parts before one.
  const auto apply_decay = [&](int part) {
    const int chunk = part - lead;
    return DecayFactor{chunk >= 0 ? a.decay.carries[state * a.decay.chunks + chunk] : 0.f};
  };

  if (index < scan_words) {
    const int word = kFirstWord + index;
    const float weight = a.weights.linear;
    float2 sum = kCarries ? *reinterpret_cast<const float2*>(carried() + 2 * word) : make_float2(0.f, 0.f);
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
          const int64_t at = a.slot(state, c) * words + word;
          if constexpr (kBf16State<Math>) {
            static_cast<uint32_t*>(a.snapshots)[at] = ptx::pack_bf16x2(sum.x * weight, sum.y * weight);
          } else {
            static_cast<float2*>(a.snapshots)[at] = make_float2(as_operand<Math>(sum.x * weight), as_operand<Math>(sum.y * weight));
          }
        }
        if (p0 + i < parts) {
          if (a.decay) {
            const DecayFactor factor = apply_decay(p0 + i);
            sum = make_float2(factor(sum.x), factor(sum.y));
          }
          sum.x += next[i].x, sum.y += next[i].y;
        }
      }
    }
    if (kCarries) *reinterpret_cast<float2*>(carried() + 2 * word) = sum;
  } else if (index < scan_words + Layout::kSumOne + 1) {
    const int i = index - scan_words;
    float sum = kCarries ? carried()[2 * words + i] : 0.f;
    for (int p = 0; p <= parts; ++p) {
      const int c = p - lead;
      if (c >= 0 && c < a.chunks && a.has_state(c)) a.sums[a.slot(state, c) * Layout::kSums + i] = sum;
      if (p < parts) sum = (a.decay ? apply_decay(p)(sum) : sum) + src[p * stride + 2 * words + i];
    }
    if (kCarries) carried()[2 * words + i] = sum;
  }
}

struct LaunchPartState {
  template <class Math, int kHeadDim>
  static void run(const PartStateArgs& a, cudaStream_t stream) {
    if (a.end() == 0) return;  // nothing before the last chunk
    using Layout = StateLayout<Math, kHeadDim>;
    using Tile = PartTile<Math, kHeadDim>;
    launch_kernel("linear_part_sums", linear_part_sums_kernel<Math, kHeadDim>,
                  grid_1d(int64_t{a.states()} * a.parts() * Tile::kGroups), Tile::kThreads, Tile::kSharedBytes, stream, a);
    const int words = static_cast<int>(Layout::words(1)) - Layout::kLinearPair * Layout::kPairWords;
    constexpr int kThreads = 256;
    const int blocks = (words + Layout::kSums + kThreads - 1) / kThreads;
    const auto scan = [&](auto kernel) {
      launch_kernel("linear_part_scan", kernel, grid_1d(int64_t{a.states()} * blocks), kThreads, 0, stream, a, words, blocks);
    };
    if (a.hands_on) scan(linear_part_scan_kernel<Math, kHeadDim, true>);
    else scan(linear_part_scan_kernel<Math, kHeadDim, false>);
  }
};

}  // namespace

template <>
void linear_pass<FASTMAX_MATH>(const PartStateArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchPartState, FASTMAX_MATH>(head_dim, a, stream);
}

}  // namespace fastmax
