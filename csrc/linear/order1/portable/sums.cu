// Order 1: sums over parts of y, and their inclusive prefixes.
//
// shards: FASTMAX_MATH

#include "linear/order1/tile.h"

namespace fastmax {
namespace {

template <class Math, int kHeadDim>
__global__ void __launch_bounds__(SumTile<Math, kHeadDim>::kThreads, SumTile<Math, kHeadDim>::kMinBlocks)
    linear1_sums_kernel(const Linear1SumArgs a) {
  using Tile = SumTile<Math, kHeadDim>;
  using Element = typename Math::Element;
  extern __shared__ __align__(128) char shared[];
  const uint32_t ring = ptx::smem_address(shared);

  const int state_index = blockIdx.x % a.states(), part = blockIdx.x / a.states();
  const int batch = state_index / a.state_heads, first_head = state_index % a.state_heads * a.y_group;
  const int part_begin = a.part_begin(part);
  const int begin = max(part_begin, 0), end = min(part_begin + a.part, a.y_end());
  const int steps_of_head = end > begin ? (end - begin + Tile::kRows - 1) / Tile::kRows : 0, steps = steps_of_head * a.y_group;
  const uint8_t* mask = mask_pointer(a.y_mask, batch);

  const Linear1Loader<Math, kHeadDim> loader;
  const Element* y_cursor = loader.cursor(a.y, batch, first_head);
  const Element* w_cursor = loader.cursor(a.w, batch, first_head);
  // From the end of the part: what is read last, the beginning, is still in the L2 cache when the next kernel starts there.
  int next_row = a.y_row(begin) + (steps_of_head - 1) * Tile::kRows, next_head = 0;
  const auto load = [&](int step) {
    if (step < steps) {
      const uint32_t y = ring + step % Tile::kStages * Tile::kStageBytes, w = y + Tile::kTileBytes;
      const unsigned inside = loader.rows_inside(next_row, a.ny, mask, a.y_mask.token);
      loader.load(y, y_cursor + next_head * a.y.head, a.y.token, next_row, a.y_columns, inside);
      loader.load(w, w_cursor + next_head * a.w.head, a.w.token, next_row, a.w_columns, inside);
      if (a.y_scale.data != nullptr) {
        load_row_scale<Tile::kRows>(w + Tile::kTileBytes, a.y_scale, int64_t{state_index} * a.y_group + next_head, next_row, a.ny);
      }
      if (++next_head == a.y_group) next_head = 0, next_row -= Tile::kRows;
    }
    ptx::cp_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < Tile::kStages - 1; ++i) load(i);

  Linear1State<Math, kHeadDim> state(warp_index());
  state.load(nullptr);
  int count = 0;  // of rows; only the forward asks for it, and there y_group is 1
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    ptx::cp_async_wait<Tile::kStages - 2>();
    count += __syncthreads_count(counts_row<Tile::kRows>(a.y_row(begin) + step * Tile::kRows, a.ny, mask, a.y_mask.token));
    load(step + Tile::kStages - 1);
    const int at = step % Tile::kStages * Tile::kStageBytes;
    const auto* scale = reinterpret_cast<const float*>(shared + at + 2 * Tile::kTileBytes);
    state.add(ring + at, ring + at + Tile::kTileBytes, a.y_scale.data != nullptr ? scale : nullptr);
  }

  float* out = a.prefixes + (int64_t{state_index} * a.parts + part) * linear1_state_floats(kHeadDim, kHeadDim);
  state.store(out);
  float* sums = out + kHeadDim * kHeadDim;
  for (int i = threadIdx.x; i < 2 * kHeadDim + 4; i += Tile::kThreads) sums[i] = 0.f;
  __syncthreads();
  state.add_sums_to(sums, sums + kHeadDim);
  if (threadIdx.x == 0) sums[2 * kHeadDim] = static_cast<float>(count);
}

// Inclusive prefix over the parts of a state, in place; a thread per number, state_blocks blocks a state.
constexpr int kScanThreads = 256;
template <class Math>
__global__ void __launch_bounds__(kScanThreads) linear1_scan_kernel(float* states, const int parts, const int floats,
                                                                    const int state_blocks) {
  constexpr int kAhead = 16;  // loads in flight
  const int index = blockIdx.x % state_blocks * kScanThreads + threadIdx.x;
  if (index >= floats) return;
  float* at = states + int64_t{blockIdx.x / state_blocks} * parts * floats + index;
  float sum = 0.f;
  for (int first = 0; first < parts; first += kAhead) {
    float next[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) next[i] = first + i < parts ? at[int64_t{i} * floats] : 0.f;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      sum += next[i];
      if (first + i < parts) at[int64_t{i} * floats] = sum;
    }
    at += int64_t{kAhead} * floats;
  }
}

struct LaunchSums {
  template <class Math, int kHeadDim>
  static void run(const Linear1SumArgs& a, cudaStream_t stream) {
    using Tile = SumTile<Math, kHeadDim>;
    if (a.parts == 0) return;
    launch_kernel("linear1_sums", linear1_sums_kernel<Math, kHeadDim>, grid_1d(int64_t{a.states()} * a.parts), Tile::kThreads,
                  Tile::kSharedBytes, stream, a);
    linear1_scan<Math>(a, kHeadDim, stream);
  }
};

}  // namespace

template <>
void linear1_scan<FASTMAX_MATH>(const Linear1SumArgs& a, int head_dim, cudaStream_t stream) {
  if (a.parts == 1) return;
  const int floats = static_cast<int>(linear1_state_floats(head_dim, head_dim)), blocks = (floats + kScanThreads - 1) / kScanThreads;
  launch_kernel("linear1_scan", linear1_scan_kernel<FASTMAX_MATH>, grid_1d(int64_t{a.states()} * blocks), kScanThreads, 0, stream,
                a.prefixes, a.parts, floats, blocks);
}

template <>
void linear_pass<FASTMAX_MATH>(const Linear1SumArgs& a, int head_dim, cudaStream_t stream) {
  dispatch_linear<LaunchSums, FASTMAX_MATH, Linear1HeadDims>(head_dim, a, stream);
}

}  // namespace fastmax
