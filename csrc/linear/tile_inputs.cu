// Inputs of kernels that copy whole tiles (TMA): copies with zeros in masked rows, and the decays of tiles.

#include "core/launch.h"
#include "linear/order2/features.h"

namespace fastmax {
namespace {

// A row per 8 lanes, 16 bytes a load.
constexpr int kLanes = 8;

__global__ void __launch_bounds__(256) linear_zero_masked_kernel(const ZeroArgs a, const int64_t rows) {
  const int64_t row = (blockIdx.x * int64_t{blockDim.x} + threadIdx.x) / kLanes;
  if (row >= rows) return;
  const int head_index = static_cast<int>(row / a.tokens), token = static_cast<int>(row % a.tokens);
  const int batch = head_index / a.heads, head = head_index % a.heads;
  const bool taken = mask_pointer(a.mask, batch)[static_cast<int64_t>(token) * a.mask.token] != 0;
  const auto copy = [&](const View& from, void* to, int columns) {
    const auto* source = head_pointer<__nv_bfloat16>(from, batch, head) + token * from.token;
    auto* target = static_cast<__nv_bfloat16*>(to) + row * columns;
    for (int c = threadIdx.x % kLanes * 8; c < columns; c += kLanes * 8) {
      *reinterpret_cast<uint4*>(target + c) = taken ? *reinterpret_cast<const uint4*>(source + c) : uint4{};
    }
  };
  copy(a.k, a.zeroed_k, a.d);
  copy(a.v, a.zeroed_v, a.dv);
}

// A block per batch entry: each thread counts the rows of a piece, then those before it.
__global__ void __launch_bounds__(1024) linear_count_rows_kernel(const ZeroArgs a) {
  __shared__ int sums[1024];
  const uint8_t* mask = mask_pointer(a.mask, blockIdx.x);
  int32_t* counts = a.counts + static_cast<int64_t>(blockIdx.x) * a.tokens;
  const int piece = (a.tokens + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  const int begin = min(static_cast<int>(threadIdx.x) * piece, a.tokens), end = min(begin + piece, a.tokens);
  int sum = 0;
  for (int i = begin; i < end; ++i) sum += mask[static_cast<int64_t>(i) * a.mask.token] != 0;
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int step = 1; step < static_cast<int>(blockDim.x); step *= 2) {
    const int before = threadIdx.x >= step ? sums[threadIdx.x - step] : 0;
    __syncthreads();
    sums[threadIdx.x] += before;
    __syncthreads();
  }
  int count = sums[threadIdx.x] - sum;
  for (int i = begin; i < end; ++i) counts[i] = count += mask[static_cast<int64_t>(i) * a.mask.token] != 0;
}

// Copies the rows of a group that the copies have, from the token `first` on, with zeros in place of those that are not kept. By the
// kBoundary threads of a block.
__device__ __forceinline__ void copy_group(const Sequence& s, int group, int batch, int head, const bool (&keeps)[kBoundary],
                                           const View& from, const View& to, int first, int columns) {
  const auto* source = head_pointer<__nv_bfloat16>(from, batch, head);
  auto* target = const_cast<__nv_bfloat16*>(head_pointer<__nv_bfloat16>(to, batch, head));
  const int vectors = columns / 8, copies = static_cast<int>(to.head / to.token);
#pragma unroll 4
  for (int i = threadIdx.x; i < kBoundary * vectors; i += kBoundary) {
    const int row = s.y_row(group * kBoundary + i / vectors), column = i % vectors * 8;
    const int64_t token = s.time == Time::kForward ? row : s.ny - 1 - row;
    if (token < first || token >= first + copies) continue;
    uint4 x{};
    if (keeps[i / vectors]) x = *reinterpret_cast<const uint4*>(source + token * from.token + column);
    *reinterpret_cast<uint4*>(target + (token - first) * to.token + column) = x;
  }
}

// A block has the kBoundary virtual rows of a group, a row per thread.
__global__ void __launch_bounds__(kBoundary) linear_decay_tiles_kernel(const DecayTilesArgs a, const int groups, const int all_groups) {
  const int thread = threadIdx.x, head_index = blockIdx.x / all_groups, group = blockIdx.x % all_groups;
  const int heads = a.state_heads * a.y_group, batch = head_index / heads, head = head_index % heads;
  const int64_t state = head_index / a.y_group;
  const int row = group * kBoundary + thread, y_row = a.y_row(row);
  const int token = a.time == Time::kForward ? y_row : a.ny - 1 - y_row;  // in memory
  const uint8_t* mask = mask_pointer(a.mask, batch);
  const bool is_there = y_row >= 0 && y_row < a.ny;
  const bool taken = is_there && (mask == nullptr || mask[static_cast<int64_t>(token) * a.mask.token] != 0);
  const float2 sum = a.decay.ungated_at_row(a, state, y_row), own_sum = a.decay.at_row(a, state, y_row);
  const WalkSum own = WalkSum::of(a, own_sum);
  const auto of_edge = [&](int edge) { return WalkSum::of(a, a.decay.at_edge(a, state, edge)); };
  if (head_index % a.y_group == 0) {
    const WalkSum end = WalkSum::of(a, a.decay.ungated_at_row(a, state, a.y_row(row / kDecayTile * kDecayTile + kDecayTile - 1)));
    DecayTile& tile = a.tiles[state * a.decay.tile_count + row / kDecayTile];
    const int in_tile = a.time == Time::kForward ? row % kDecayTile : kDecayTile - 1 - row % kDecayTile;
    tile.sums[in_tile] = WalkSum::of(a, sum).g;
    tile.until_end[in_tile] = taken ? exp2f(end.since(own)) : -0.f;
    DecayTile& x_tile = a.x_tiles[state * a.decay.tile_count + row / kDecayTile];
    const float2 x_sum = a.decay.ungated_at_x_row(a, state, y_row), own_x_sum = a.decay.at_x_row(a, state, y_row);
    const WalkSum of_x = WalkSum::of(a, own_x_sum);
    if (a.x_tiles != a.tiles) x_tile.sums[in_tile] = WalkSum::of(a, x_sum).g;
    if (a.decay.is_gated()) {
      if (a.decay.y_is_gated) tile.gates[in_tile] = decay(sum, own_sum);
      else x_tile.gates[in_tile] = decay(x_sum, own_x_sum);
    }
    const int first_of_x = a.decay.origin + a.lag;  // what row 0 of x sees last
    x_tile.since_chunk[in_tile] = row < first_of_x ? 0.f : exp2f(of_x.since(of_edge(a.decay.edge_at(a, row - a.lag))));
  }
  if (a.factors == nullptr) return;

  const int64_t index = blockIdx.x * int64_t{kBoundary} + thread;
  if (index < int64_t{a.states()} * a.chunks) {
    const int chunk = static_cast<int>(index % a.chunks);
    a.carries[index] = DecayFactor::of(a.decay.passing(a, index / a.chunks, chunk, chunk + 1)).code;
  }
  if (group >= groups) return;
  const float factor = taken ? exp2f(of_edge(a.decay.edge_after(a, row + 1)).since(own)) : 0.f;
  const bool drops = is_there && factor == 0.f;
  if (head_index % a.y_group == 0) a.factors[state * a.e_head + token] = factor;
  if (a.e.data != nullptr) {
    const float e = factor == 0.f ? 0.f : a.e.data[head_index * a.e.head + static_cast<int64_t>(token) * a.e.token];
    a.decayed_e[head_index * a.e_head + token] = e * factor;
  }
  const bool some_drop = __syncthreads_or(drops);
  if (thread == 0) a.whole[static_cast<int64_t>(head_index) * groups + group] = !some_drop;
  if (!some_drop || a.zeroed_y.data == nullptr || group * kBoundary >= a.end()) return;

  __shared__ bool keeps[kBoundary];
  keeps[thread] = factor != 0.f;
  __syncthreads();
  copy_group(a, group, batch, head, keeps, a.y, a.zeroed_y, a.first_zeroed, a.d);
  copy_group(a, group, batch, head, keeps, a.w, a.zeroed_w, a.first_zeroed, a.dv);
}

// The same copies, of the groups of a state pass. groups: as many as it adds.
__global__ void __launch_bounds__(kBoundary) linear_zero_dropped_kernel(const StateArgs a, const int groups) {
  const int thread = threadIdx.x, head_index = blockIdx.x / groups, group = a.begin / kBoundary + blockIdx.x % groups;
  if (a.attended.whole[static_cast<int64_t>(head_index) * a.attended.groups + group] != 0) return;
  const int heads = a.state_heads * a.y_group, batch = head_index / heads, head = head_index % heads;
  const int row = a.y_row(group * kBoundary + thread), token = a.time == Time::kForward ? row : a.ny - 1 - row;
  __shared__ bool keeps[kBoundary];
  keeps[thread] = a.y_factors.data[head_index / a.y_group * a.y_factors.head + token] != 0.f;
  __syncthreads();
  copy_group(a, group, batch, head, keeps, a.y, a.zeroed_y, a.first_zeroed, a.d);
  copy_group(a, group, batch, head, keeps, a.w, a.zeroed_w, a.first_zeroed, a.dv);
}

}  // namespace

void linear_decay_tiles(const DecayTilesArgs& a, cudaStream_t stream) {
  launch_kernel("linear_decay_tiles", linear_decay_tiles_kernel, grid_1d(int64_t{a.states()} * a.y_group * a.groups_of_all()), kBoundary, 0,
                stream, a, a.groups(), a.groups_of_all());
}

void linear_zero_dropped(const StateArgs& a, cudaStream_t stream) {
  const int groups = (a.end() - a.begin) / kBoundary;
  if (groups == 0) return;
  launch_kernel("linear_zero_dropped", linear_zero_dropped_kernel, grid_1d(int64_t{a.states()} * a.y_group * groups), kBoundary, 0, stream,
                a, groups);
}

void linear_zero_masked(const ZeroArgs& a, cudaStream_t stream) {
  const int64_t rows = int64_t{a.batch} * a.heads * a.tokens;
  constexpr int kThreads = 256, kRows = kThreads / kLanes;
  launch_kernel("linear_zero_masked", linear_zero_masked_kernel, grid_1d((rows + kRows - 1) / kRows), kThreads, 0, stream, a, rows);
  launch_kernel("linear_count_rows", linear_count_rows_kernel, grid_1d(a.batch), 1024, 0, stream, a);
}

}  // namespace fastmax
