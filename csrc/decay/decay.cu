#include "decay/decay.h"

#include "core/lanes.h"
#include "core/launch.h"
#include "decode/decode.h"

namespace fastmax {
namespace {

// Sums over the tokens of a head, in tiles. One launch computes the totals of tiles, and another adds the totals of the tiles
// before. Everything is summed in float64 in a fixed order.
constexpr int kThreads = 256;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;

int tiles_of(const Problem& p) { return (p.decay_tokens() + kTile - 1) / kTile; }
template <int kCount>
size_t total_bytes(const Problem& p) {
  return (static_cast<size_t>(p.b) * p.hk * tiles_of(p) * kCount * sizeof(double) + 255) / 256 * 256;
}

// Values of a token that are summed independently.
template <class T, int kCount>
struct TokenValues {
  T x[kCount];
};

// log_decay in units of log 2, and resets.
struct DecayOf {
  static constexpr int kCount = 1;
  const AttentionParams& p;
  int first_reset;  // first token that may be a reset; p.m: none. Tokens beyond the keys are none

  __device__ __forceinline__ TokenValues<float, kCount> operator()(int batch, int kv_head, int token) const {
    float x = 0.f;
    if (p.log_decay != nullptr) {
      const Stride& s = p.log_decay_stride;
      const float decay = p.log_decay[batch * s.batch + kv_head * s.head + token * s.token];
      x = isnan(decay) ? 0.f : fmaxf(decay * 1.4426950408889634f, kReset);  // NaN: see launch_nan_rows
    }
    if (token >= first_reset && token < p.m) {
      // The query at this token sees nothing before it, or the first query, which comes later, sees nothing before it.
      const Stride& s = p.k_start.stride;
      const int32_t* first = p.k_start.data + batch * s.batch + kv_head * s.head;
      const int query = token - p.causal_offset;
      if (first[0] == token || (query >= 0 && first[query * s.token] == token)) x = kReset;
    }
    return {x};
  }
};

// The difference between the gradient of a token and that of the next one, and the magnitude of the sums that it comes from.
// Tokens are indexed from the last.
struct FlowOf {
  static constexpr int kCount = 2;
  const BwdParams& p;
  const PairSums& sums;

  __device__ __forceinline__ TokenValues<float, kCount> operator()(int batch, int kv_head, int from_end) const {
    const int token = p.decay_tokens() - 1 - from_end, query = token - p.lag - p.causal_offset, group = p.h / p.hk;
    const int64_t state = static_cast<int64_t>(batch) * p.hk + kv_head;
    const float of_key = token < p.m ? sums.by_key[state * p.m + token] : 0.f;
    TokenValues<float, kCount> flow{-of_key, fabsf(of_key)};
    for (int i = 0; query >= 0 && i < group; ++i) {
      const float of_query = sums.by_query[(state * group + i) * p.n + query];
      flow.x[0] += of_query, flow.x[1] += fabsf(of_query);
    }
    return flow;
  }
};

// Sums of all pairs of a head with its final state and with its initial state. Blocks that share a state each compute a part of
// both.
constexpr int kStateParts = 32;
struct StatePairs {
  const double* parts;  // (heads, count, 2); null: no states
  int count;

  __device__ __forceinline__ TokenValues<double, 2> of_head(int head) const {
    TokenValues<double, 2> sum{};
    if (parts == nullptr) return sum;
    const double* part = parts + int64_t{head} * 2 * count;
#pragma unroll 4
    for (int i = 0; i < count; ++i, part += 2) sum.x[0] += part[0], sum.x[1] += part[1];
    return sum;
  }
};

// Returns the sum over all threads before this one; total: the sum over the block.
__device__ __forceinline__ double block_scan(double x, double& total) {
  __shared__ double warps[kThreads / 32];
  const double inclusive = scan_lanes(x, [](double a, double b) { return a + b; });
  __syncthreads();  // the previous call may still read `warps`
  if (threadIdx.x % 32 == 31) warps[threadIdx.x / 32] = inclusive;
  __syncthreads();
  double before = 0.;
  total = 0.;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) {
    if (i < static_cast<int>(threadIdx.x) / 32) before += warps[i];
    total += warps[i];
  }
  return before + (inclusive - x);
}

// Loads the values of this thread's tokens in a tile, and returns their sum.
template <class ValueOf>
__device__ __forceinline__ TokenValues<double, ValueOf::kCount> load_tile(const Problem& p, const ValueOf& value_of, int head, int tile,
                                                                      TokenValues<float, ValueOf::kCount> (&x)[kPerThread]) {
  TokenValues<double, ValueOf::kCount> sum{};
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = tile * kTile + static_cast<int>(threadIdx.x) * kPerThread + i;
    x[i] = token < p.decay_tokens() ? value_of(head / p.hk, head % p.hk, token) : TokenValues<float, ValueOf::kCount>{};
#pragma unroll
    for (int j = 0; j < ValueOf::kCount; ++j) sum.x[j] += x[i].x[j];
  }
  return sum;
}

// totals: (heads, tiles, kCount)
template <class ValueOf>
__device__ __forceinline__ void tile_totals(const Problem& p, const ValueOf& value_of, double* totals, int tiles) {
  TokenValues<float, ValueOf::kCount> x[kPerThread];
  const auto sum = load_tile(p, value_of, blockIdx.x / tiles, blockIdx.x % tiles, x);
#pragma unroll
  for (int j = 0; j < ValueOf::kCount; ++j) {
    double total;
    block_scan(sum.x[j], total);
    if (threadIdx.x == 0) totals[int64_t{blockIdx.x} * ValueOf::kCount + j] = total;
  }
}

// Calls store(head, token, inclusive sums up to the token, sums over all tokens).
template <class ValueOf, class StoreSums>
__device__ __forceinline__ void tile_sums(const Problem& p, const ValueOf& value_of, const double* totals, int tiles,
                                          const StoreSums& store) {
  constexpr int kCount = ValueOf::kCount;
  const int head = blockIdx.x / tiles, tile = blockIdx.x % tiles;
  TokenValues<float, kCount> x[kPerThread];
  TokenValues<double, kCount> sum = load_tile(p, value_of, head, tile, x), all;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    double before = 0., behind = 0., of_tile;
    if (tiles > 1) {
      for (int i = threadIdx.x; i < tiles; i += kThreads) {
        if (i != tile) (i < tile ? before : behind) += totals[(static_cast<int64_t>(head) * tiles + i) * kCount + j];
      }
      block_scan(before, before), block_scan(behind, behind);
    }
    sum.x[j] = before + block_scan(sum.x[j], of_tile);
    all.x[j] = before + of_tile + behind;
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int token = tile * kTile + static_cast<int>(threadIdx.x) * kPerThread + i;
#pragma unroll
    for (int j = 0; j < kCount; ++j) sum.x[j] += x[i].x[j];
    if (token < p.decay_tokens()) store(head, token, sum, all);
  }
}

__global__ void __launch_bounds__(kThreads) decay_totals_kernel(const AttentionParams p, const int first_reset, double* totals, const int tiles) {
  tile_totals(p, DecayOf{p, first_reset}, totals, tiles);
}

__global__ void __launch_bounds__(kThreads) decay_sums_kernel(const AttentionParams p, const int first_reset, const double* totals,
                                                              const int tiles, float2* sums) {
  tile_sums(p, DecayOf{p, first_reset}, totals, tiles, [&](int head, int token, const auto& sum, const auto&) {
    const float whole = static_cast<float>(sum.x[0]);
    sums[static_cast<int64_t>(head) * p.decay_tokens() + token] = make_float2(whole, static_cast<float>(sum.x[0] - whole));
  });
}

// G less the gate of each key.
__global__ void __launch_bounds__(kThreads) gated_sums_kernel(const AttentionParams p, float2* key_sums, const int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int key = static_cast<int>(index % p.m), head = static_cast<int>(index / p.m);
  const Stride& s = p.log_input_gate_stride;
  const float gate = p.log_input_gate[head / p.hk * s.batch + head % p.hk * s.head + key * s.token];
  const float2 sum = p.decay_sums[int64_t{head} * p.decay_tokens() + key];
  const float in_log2 = fminf(fmaxf(gate, kLeastGate), kMostGate) * 1.4426950408889634f;
  const float2 whole = exact_sum(sum.x, isnan(gate) ? 0.f : -in_log2);
  key_sums[index] = make_float2(whole.x, whole.y + sum.y);
}

// Gates beyond the range have no gradient.
__global__ void __launch_bounds__(kThreads) gate_gradient_kernel(const BwdParams p, const float* by_key, const int64_t count) {
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= count) return;
  const int key = static_cast<int>(index % p.m), head = static_cast<int>(index / p.m);
  const Stride& s = p.log_input_gate_stride;
  const float gate = p.log_input_gate[head / p.hk * s.batch + head % p.hk * s.head + key * s.token];
  const float before = p.adds ? p.grad_log_input_gate[index] : 0.f;
  p.grad_log_input_gate[index] = before + (gate < kLeastGate || gate > kMostGate ? 0.f : by_key[index]);
}

unsigned blocks_of_keys(const Problem& p) { return grid_1d((int64_t{p.b} * p.hk * p.m + kThreads - 1) / kThreads); }

__global__ void __launch_bounds__(kThreads) decay_gradient_totals_kernel(const BwdParams p, const PairSums sums, double* totals, const int tiles) {
  tile_totals(p, FlowOf{p, sums}, totals, tiles);
}

// parts: StatePairs. Elements with zero gradient are skipped, whatever their value.
__global__ void __launch_bounds__(kThreads) decay_state_pairs_kernel(const CarriedGradients state, const int rows, double* parts) {
  const int64_t head = blockIdx.x / kStateParts;
  const auto add = [&](double& sum, const float* x, const float* gradient, int64_t count) {
    x += head * count, gradient += head * count;
    for (int64_t i = blockIdx.x % kStateParts * kThreads + threadIdx.x; i < count; i += kStateParts * kThreads) {
      const float y = gradient[i];
      sum += y == 0.f ? 0. : static_cast<double>(x[i]) * y;
    }
  };
  const int64_t numbers = int64_t{rows} * state.dv;
  double sums[2] = {}, totals[2];
  add(sums[0], state.new_kv_state, state.grad_new_kv_state, numbers);
  add(sums[0], state.new_k_sum, state.grad_new_k_sum, rows);
  add(sums[1], state.kv_state, state.grad_kv_state, numbers);
  add(sums[1], state.k_sum, state.grad_k_sum, rows);
  block_scan(sums[0], totals[0]), block_scan(sums[1], totals[1]);
  if (threadIdx.x < 2) parts[2 * int64_t{blockIdx.x} + threadIdx.x] = totals[threadIdx.x];
}

__global__ void __launch_bounds__(kThreads) decay_gradient_kernel(const BwdParams p, const PairSums sums, const StatePairs states,
                                                                  const double* totals, const int tiles) {
  const auto [of_query, of_key] = states.of_head(blockIdx.x / tiles).x;
  tile_sums(p, FlowOf{p, sums}, totals, tiles, [&](int head, int from_end, const auto& flow, const auto& tokens) {
    // By query and by key, the sum of all pairs is the same. The rounding error of the difference is subtracted in proportion
    // to the magnitudes that it came from.
    const double all = tokens.x[0] + (of_query - of_key), size = tokens.x[1] + (fabs(of_query) + fabs(of_key));
    const double rounding = size == 0. || !isfinite(all) ? 0. : all * ((flow.x[1] + fabs(of_query)) / size);
    float& gradient = p.grad_log_decay[static_cast<int64_t>(head + 1) * p.decay_tokens() - 1 - from_end];
    gradient = static_cast<float>(flow.x[0] + of_query - rounding) + (p.adds ? gradient : 0.f);
  });
}

size_t state_pair_bytes(const BwdParams& p) {
  return p.state.kv_state == nullptr || p.pairs_of_states != nullptr ? 0 : static_cast<size_t>(p.b) * p.hk * kStateParts * 2 * sizeof(double);
}

size_t sum_bytes(const Problem& p, int tokens) { return (static_cast<size_t>(p.b) * p.hk * tokens * sizeof(float2) + 255) / 256 * 256; }

}  // namespace

size_t decay_sum_bytes(const AttentionParams& p) {
  const size_t of_keys = p.log_input_gate == nullptr ? 0 : sum_bytes(p, p.m);
  return total_bytes<DecayOf::kCount>(p) + sum_bytes(p, p.decay_tokens()) + of_keys;
}

void fill_decay_sums(AttentionParams& p, Resets resets, void* workspace, cudaStream_t stream) {
  double* totals = static_cast<double*>(workspace);
  float2* sums = reinterpret_cast<float2*>(static_cast<char*>(workspace) + total_bytes<DecayOf::kCount>(p));
  const int tiles = tiles_of(p);
  const unsigned grid = grid_1d(int64_t{p.b} * p.hk * tiles);
  const int first_reset =
      resets == Resets::kNone || p.k_start.data == nullptr ? p.m : resets == Resets::kAtFirstKeysAndFirstToken ? 0 : 1;
  if (tiles > 1) launch_kernel("decay_totals", decay_totals_kernel, grid, kThreads, 0, stream, p, first_reset, totals, tiles);
  launch_kernel("decay_sums", decay_sums_kernel, grid, kThreads, 0, stream, p, first_reset, totals, tiles, sums);
  p.decay_sums = p.key_sums = sums, p.key_sum_tokens = p.decay_tokens();
  if (p.log_input_gate == nullptr) return;
  float2* key_sums = reinterpret_cast<float2*>(reinterpret_cast<char*>(sums) + sum_bytes(p, p.decay_tokens()));
  launch_kernel("gated_sums", gated_sums_kernel, blocks_of_keys(p), kThreads, 0, stream, p, key_sums, int64_t{p.b} * p.hk * p.m);
  p.key_sums = key_sums, p.key_sum_tokens = p.m;
}

static bool sums_global_keys(const BwdParams& p) { return p.exact_window > 0 && p.grad_log_input_gate != nullptr; }

size_t pair_sum_bytes(const BwdParams& p) {
  const size_t of_keys = static_cast<size_t>(p.b) * p.hk * p.m;
  return (static_cast<size_t>(p.b) * p.h * p.n + of_keys * (sums_global_keys(p) ? 2 : 1)) * sizeof(float);
}

PairSums pair_sums(const BwdParams& p, void* workspace) {
  float *by_query = static_cast<float*>(workspace), *by_key = by_query + static_cast<int64_t>(p.b) * p.h * p.n;
  return {by_query, by_key, sums_global_keys(p) ? by_key + int64_t{p.b} * p.hk * p.m : nullptr};
}

size_t decay_gradient_bytes(const BwdParams& p) { return total_bytes<FlowOf::kCount>(p) + state_pair_bytes(p); }

void fill_decay_gradient(const BwdParams& p, const PairSums& sums, void* workspace, cudaStream_t stream) {
  if (p.grad_log_input_gate != nullptr) {
    const float* by_key = sums.by_global_key != nullptr ? sums.by_global_key : sums.by_key;
    launch_kernel("gate_gradient", gate_gradient_kernel, blocks_of_keys(p), kThreads, 0, stream, p, by_key, int64_t{p.b} * p.hk * p.m);
  }
  if (p.grad_log_decay == nullptr) return;
  double* totals = static_cast<double*>(workspace);
  const int tiles = tiles_of(p);
  const unsigned grid = grid_1d(int64_t{p.b} * p.hk * tiles);
  StatePairs states{p.pairs_of_states, 1};
  if (p.state.kv_state != nullptr && p.pairs_of_states == nullptr) {
    double* parts = reinterpret_cast<double*>(static_cast<char*>(workspace) + total_bytes<FlowOf::kCount>(p));
    launch_kernel("decay_state_pairs", decay_state_pairs_kernel, grid_1d(int64_t{p.b} * p.hk * kStateParts), kThreads, 0, stream, p.state,
                  decode_rows(p.state.d, p.order), parts);
    states = {parts, kStateParts};
  }
  if (tiles > 1) launch_kernel("decay_gradient_totals", decay_gradient_totals_kernel, grid, kThreads, 0, stream, p, sums, totals, tiles);
  launch_kernel("decay_gradient", decay_gradient_kernel, grid, kThreads, 0, stream, p, sums, states, totals, tiles);
}

}  // namespace fastmax
