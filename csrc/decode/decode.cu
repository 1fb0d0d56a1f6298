// Recurrent decoding, bound by memory: the state streams through registers once.
//
// A block owns a slice of columns of the state of one (batch, key/value head) and processes all its rows. Every sum then stays
// within the block: no partial sums in memory, no second reduction, one order of summation. Each warp owns a range of rows. A
// lane computes the features of one row in 32 and passes them by shuffles to the lanes that hold that row's values.

#include "decode/decode.h"

#include <algorithm>

#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/launch.h"
#include "decode/features.h"

namespace fastmax {
namespace {

constexpr int kMaxWarps = 16;  // per block, which then occupies a multiprocessor alone
constexpr int kUnroll = 4;     // vectors that a lane has in flight: 32 KB of state per multiprocessor
// log2 of the vectors of a row per block. Least: 64 bytes, below which DRAM accesses are split; most: one per lane of a warp.
constexpr int kMinLog2Slice = 2, kMaxLog2Slice = 5;
static_assert(kUnroll * (32 >> kMinLog2Slice) <= 32, "a batch of loads covers at most the 32 rows of a chunk");

// Decay factor of the state. A NaN decay has no effect on a state without keys. The first element of k_sum counts keys; if it
// is NaN, the state stays NaN until a decay of -inf, even if the factor of a finite decay underflows.
__device__ __forceinline__ float factor_of_state(const DecodeParams& p, int batch, int kv_head) {
  if (p.log_decay == nullptr) return 1.f;
  const float decay = decay_of_token(p, batch, kv_head);
  const float keys = p.k_sum[(int64_t{batch} * p.hk + kv_head) * decode_rows(p.d, p.order)];
  if (isnan(decay) && keys == 0.f) return 1.f;
  return isnan(keys) && decay != -INFINITY ? keys : expf(decay);
}

// Work of a launch: query heads of each group from first_head on, and 2^log2_vectors vectors of every row per block.
struct Work {
  int group, first_head;
  int slices, log2_vectors;
  bool writes_k_sum;
};

// Rows of shared memory: k, v and the queries times scale. Each is loaded by one warp.
enum TokenRow { kKey, kValue, kQueries };

template <class Element>
__device__ __forceinline__ void load_rows(const DecodeParams& p, int batch, int kv_head, int first_head, int end,
                                          float (*rows)[kMaxDecodeHeadDim]) {
  for (int row = threadIdx.x / 32; row < end; row += blockDim.x / 32) {
    const TokenStride& stride = row == kKey ? p.k_stride : row == kValue ? p.v_stride : p.q_stride;
    const void* base = row == kKey ? p.k : row == kValue ? p.v : p.q;
    const int head = row < kQueries ? kv_head : first_head + row - kQueries, columns = row == kValue ? p.dv : p.d;
    const Element* x = static_cast<const Element*>(base) + batch * stride.batch + head * stride.head;
    const float factor = row < kQueries ? 1.f : p.scale;
#pragma unroll 4
    for (int i = threadIdx.x % 32; i < columns; i += 32) rows[row][i] = factor * to_float(x[i * stride.column]);
  }
}

// Loads the token's rows before `end`.
__device__ __forceinline__ void load_token(const DecodeParams& p, int batch, int kv_head, int first_head, int end,
                                           float (*rows)[kMaxDecodeHeadDim]) {
  switch (p.math) {
    case MathMode::kBF16: load_rows<__nv_bfloat16>(p, batch, kv_head, first_head, end, rows); break;
    case MathMode::kFP16: load_rows<__half>(p, batch, kv_head, first_head, end, rows); break;
    default: load_rows<float>(p, batch, kv_head, first_head, end, rows); break;
  }
}

// The fixed part of shared memory. All of it is dynamic, because only dynamic shared memory can exceed 48 KB.
template <int kHeads>
struct alignas(sizeof(float4)) FixedSmem {
  float token[kQueries + kHeads][kMaxDecodeHeadDim];
  float warp_denominators[kHeads][kMaxWarps];
};

// kHeads: query heads of a group per launch. The first launch also updates the state; further launches read the new state. The
// dtype of q, k, v and o affects few instructions. It is not a template parameter, which would triple the kernels to compile.
template <class Vector, int kHeads>
__global__ void __launch_bounds__(kMaxWarps * 32, 1) decode_kernel(const DecodeParams p, const Work work) {
  constexpr int kWidth = sizeof(Vector) / sizeof(float);
  extern __shared__ __align__(128) char shared[];
  auto& smem = *reinterpret_cast<FixedSmem<kHeads>*>(shared);
  auto& token = smem.token;
  auto& warp_denominators = smem.warp_denominators;
  float* warp_numerators = reinterpret_cast<float*>(&smem + 1);  // (kHeads, warps, columns of the slice)

  const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // uniform: loops over rows do not diverge
  const int state = blockIdx.x / work.slices, slice = blockIdx.x % work.slices;
  const int batch = state / p.hk, kv_head = state % p.hk;
  const int first_head = kv_head * work.group + work.first_head, heads = min(kHeads, work.group - work.first_head);
  const bool updates = work.first_head == 0;

  const int rows = decode_rows(p.d, p.order), warp_rows = (rows + warps - 1) / warps;
  const int row_begin = min(warp * warp_rows, rows), row_end = min(row_begin + warp_rows, rows);
  const int slice_vectors = 1 << work.log2_vectors, slice_columns = slice_vectors * kWidth;
  const int lane_row = lane >> work.log2_vectors, lane_column = (lane & (slice_vectors - 1)) * kWidth;
  const int rows_per_load = 32 >> work.log2_vectors, rows_per_batch = kUnroll * rows_per_load;
  const int column = slice * slice_columns + lane_column;
  const bool has_column = column < p.dv;

  // Vectors in flight are refilled one by one as they are used. The first ones load while k, q and v are fetched.
  const int64_t first_row = int64_t{state} * rows + row_begin;
  const float* source = p.kv_state + (first_row + lane_row) * p.dv + column;
  float* target = p.new_kv_state + (first_row + lane_row) * p.dv + column;
  const int step = rows_per_load * p.dv;
  int rows_left = has_column ? row_end - row_begin - lane_row : 0;  // rows left to store; rows_per_batch fewer are left to load
  Vector pending[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    pending[i] = i * rows_per_load < rows_left ? __ldcs(reinterpret_cast<const Vector*>(source)) : Vector{};
    source += step;
  }

  load_token(p, batch, kv_head, first_head, kQueries + heads, token);
  const bool joins = updates && joins_state(p, batch);
  const float factor = updates ? factor_of_state(p, batch, kv_head) : 1.f, own_weight = expf(gate_of_token(p, batch, kv_head));
  const bool decays = factor != 1.f;
  __syncthreads();

  const Vector value = joins && has_column ? *reinterpret_cast<const Vector*>(token[kValue] + column) : Vector{};
  Vector numerator[kHeads] = {};
  float denominator[kHeads] = {};
  for (int chunk = 0; chunk < row_end - row_begin; chunk += 32) {
    // This lane's row of the chunk: its feature of k, and f's coefficient times its feature of q for each query head.
    const int row = row_begin + chunk + lane;
    float feature = 0.f, weight[kHeads] = {};
    if (row < row_end) {
      float sum = p.k_sum[first_row + chunk + lane];
      if (decays) sum = decayed(sum, factor);
      const Feature columns(row, p.d);
      const float coefficient = columns.b < 0 ? p.a0 : columns.a < 0 ? p.a1 : columns.a == columns.b ? p.a2 : 2.f * p.a2;
      if (joins) feature = __fmul_rn(own_weight, columns.of(token[kKey]));
      sum = __fadd_rn(sum, feature);
      if (work.writes_k_sum && slice == 0) p.new_k_sum[first_row + chunk + lane] = sum;
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h < heads) weight[h] = coefficient * columns.of(token[kQueries + h]);
        denominator[h] = fmaf(weight[h], sum, denominator[h]);
      }
    }
#pragma unroll 1
    for (int row0 = 0; row0 < min(32, row_end - row_begin - chunk); row0 += rows_per_batch) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int owner = row0 + i * rows_per_load + lane_row;  // lane that holds this row's feature
        const Vector before = decays ? decayed(pending[i], factor) : pending[i];
        const Vector x = multiply_add(__shfl_sync(~0u, feature, owner), value, before);
        if (updates && rows_left > 0) __stcs(reinterpret_cast<Vector*>(target), x);
        pending[i] = rows_left > rows_per_batch ? __ldcs(reinterpret_cast<const Vector*>(source)) : Vector{};
        source += step, target += step, rows_left -= rows_per_load;
#pragma unroll
        for (int h = 0; h < kHeads; ++h) numerator[h] = multiply_add(__shfl_sync(~0u, weight[h], owner), x, numerator[h]);
      }
    }
  }

#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const Vector sum = sum_lanes(numerator[h], slice_vectors);
    if (lane < slice_vectors) *reinterpret_cast<Vector*>(warp_numerators + (h * warps + warp) * slice_columns + lane_column) = sum;
    const float total = sum_lanes(denominator[h], 1);
    if (lane == 0) warp_denominators[h][warp] = total;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < heads * slice_columns; i += blockDim.x) {
    const int h = i / slice_columns, c = i % slice_columns, o_column = slice * slice_columns + c;
    float sum = 0.f, z = 0.f;
    for (int w = 0; w < warps; ++w) sum += warp_numerators[(h * warps + w) * slice_columns + c], z += warp_denominators[h][w];
    const int64_t head = int64_t{batch} * p.h + first_head + h;
    if (o_column < p.dv) store(p.o, p.math, head * p.dv + o_column, z == 0.f ? 0.f : sum / z);
  }
}

// Updates k_sum = exp(log_decay) k_sum + exp(log_input_gate) features(k), one block per state. The sums have the same bits as in decode_kernel: if
// the compiler fused the product into the addition, it would not be rounded.
__global__ void __launch_bounds__(kMaxWarps * 32, 1) decode_k_sum_kernel(const DecodeParams p) {
  __shared__ float token[kKey + 1][kMaxDecodeHeadDim];
  const int batch = blockIdx.x / p.hk, kv_head = blockIdx.x % p.hk;
  const bool joins = joins_state(p, batch);
  const float factor = factor_of_state(p, batch, kv_head), own_weight = expf(gate_of_token(p, batch, kv_head));
  const bool decays = factor != 1.f;
  if (!joins && !decays) return;
  load_token(p, batch, kv_head, 0, kKey + 1, token);
  __syncthreads();
  const int rows = decode_rows(p.d, p.order);
  float* k_sum = p.new_k_sum + int64_t{blockIdx.x} * rows;
  for (int row = threadIdx.x; row < rows; row += blockDim.x) {
    const float before = decays ? decayed(k_sum[row], factor) : k_sum[row];
    k_sum[row] = __fadd_rn(before, joins ? __fmul_rn(own_weight, Feature(row, p.d).of(token[kKey])) : 0.f);
  }
}

struct Tiling {
  int log2_vectors, slices, warps;
};

// Chooses slices as wide as possible that give at least half of the multiprocessors a block: wide slices are read faster, and
// few blocks are better than a second wave. If there are more blocks than multiprocessors, smaller blocks overlap. Measured on
// an H200, d = 64: 96 states 34 us in 96 blocks, 39 us in 192; 160 states 60 us in blocks of 16 warps, 56 us in blocks of 8.
Tiling choose_tiling(const DecodeParams& p, int vectors) {
  const auto slices = [&](int log2) { return ((vectors - 1) >> log2) + 1; };
  const auto blocks = [&](int log2) { return int64_t{p.b} * p.hk * slices(log2); };
  int log2 = kMaxLog2Slice;
  while (log2 > kMinLog2Slice && ((1 << (log2 - 1)) >= vectors || 2 * blocks(log2) < p.sm_count)) --log2;
  const int chunks = (decode_rows(p.d, p.order) + 31) / 32;
  return {log2, slices(log2), std::min(chunks, blocks(log2) > p.sm_count ? kMaxWarps / 2 : kMaxWarps)};
}

template <class Vector, int kHeads>
void launch(DecodeParams p, cudaStream_t stream) {
  const Tiling tiling = choose_tiling(p, p.dv / static_cast<int>(sizeof(Vector) / sizeof(float)));
  const int64_t states = int64_t{p.b} * p.hk;
  const int smem_bytes = static_cast<int>(sizeof(FixedSmem<kHeads>)) +
                         (kHeads * tiling.warps * static_cast<int>(sizeof(Vector)) << tiling.log2_vectors);
  const int group = p.h / p.hk;
  // Every slice reads all of k_sum. With several slices none may overwrite it, and a kernel of its own updates it afterwards.
  const bool in_turn = p.new_k_sum == p.k_sum && tiling.slices > 1;
  for (int first_head = 0; first_head < group; first_head += kHeads) {
    const bool updates = first_head == 0;
    launch_kernel("decode", decode_kernel<Vector, kHeads>, grid_1d(states * tiling.slices), tiling.warps * 32, smem_bytes, stream,
                  p, Work{group, first_head, tiling.slices, tiling.log2_vectors, updates && !in_turn});
    if (updates && in_turn) launch_kernel("decode", decode_k_sum_kernel, grid_1d(states), kMaxWarps * 32, 0, stream, p);
    p.kv_state = p.new_kv_state, p.k_sum = p.new_k_sum;
  }
}

template <class Vector>
void launch(const DecodeParams& p, cudaStream_t stream) {
  const int group = p.h / p.hk;
  if (group == 1) return launch<Vector, 1>(p, stream);
  if (group <= 4) return launch<Vector, 4>(p, stream);
  launch<Vector, 8>(p, stream);
}

}  // namespace

void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  const auto aligned = [](const float* x) { return reinterpret_cast<uintptr_t>(x) % sizeof(float4) == 0; };
  if (p.dv % 4 == 0 && aligned(p.kv_state) && aligned(p.new_kv_state)) return launch<float4>(p, stream);
  launch<float>(p, stream);
}

}  // namespace fastmax
