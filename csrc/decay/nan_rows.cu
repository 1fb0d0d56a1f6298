#include "core/dtype.h"
#include "core/launch.h"
#include "decay/decay.h"
#include "decode/decode.h"

namespace fastmax {
namespace {

// A block reads a tile of tokens, and exits unless one of them is NaN. Otherwise it processes the queries from the first NaN on up to the
// next tile that has one. Of all NaN decays, the last one before a query has the most keys before it; of all keys with a NaN gate, the
// query sees the last one if it sees any. A NaN state counts as a NaN decay at the first token.
constexpr int kThreads = 256;
constexpr int kPerThread = 8;
constexpr int kTile = kThreads * kPerThread;

// kGates: gates, which are NaN at the first token whose query may see their key with them: behind an exact window. Else decays.
template <bool kGates>
struct Head {
  const FwdParams& p;
  int batch, kv_head, lag, tokens;
  const float* data;
  int64_t stride;

  __device__ Head(const FwdParams& p, int head)
      : p(p), batch(head / p.hk), kv_head(head % p.hk), lag(kGates ? 0 : p.lag), tokens(kGates ? p.m : p.decay_tokens()) {
    const Stride& s = kGates ? p.log_input_gate_stride : p.log_decay_stride;
    data = (kGates ? p.log_input_gate : p.log_decay) + batch * s.batch + kv_head * s.head;
    stride = s.token;
  }

  __device__ bool is_masked(int key) const {
    return p.attention_mask != nullptr && p.attention_mask[batch * p.mask_batch_stride + key] == 0;
  }
  __device__ bool is_nan(int token) const {
    if (token >= tokens) return false;
    if (!kGates) return isnan(data[token * stride]);
    const int key = token - p.exact_window;
    return key >= 0 && isnan(data[key * stride]) && !is_masked(key);
  }

  // Index of this head's initial state, and rows per state.
  __device__ int64_t state() const { return int64_t{batch} * p.hk + kv_head; }
  __device__ int rows() const { return decode_rows(p.state.d, p.order); }

  // First element of the state's k_sum, the decayed count of its keys; 0 without a state. NaN counts as not 0.
  __device__ float keys_of_state() const {
    return !kGates && p.state.kv_state != nullptr && !p.from_zero_state ? p.state.k_sum[state() * rows()] : 0.f;
  }

  // The last unmasked key before token `nan`, -1, which stands for the initial state, if there is none; the key of a NaN gate.
  __device__ int key_before(int nan) const {
    if (kGates) return nan - p.exact_window;
    int key = nan - 1;
    while (key >= 0 && is_masked(key)) --key;
    return key;
  }

  // The query whose decays end at a token, for gates that at the token; negative if there is none.
  __device__ int query_at(int token) const { return token - lag - p.causal_offset; }

  // Whether the query whose decays end at `token` sees a key before a NaN decay; key: the last of them (key_before).
  __device__ bool sees_key_before(int key, int token) const {
    const int query = query_at(token);
    token -= lag;  // of the query
    if (key > token) key = key_before(token + 1);
    if (key < 0 && keys_of_state() == 0.f) return false;
    if (p.window && key < token - p.left) return false;
    const Stride& s = p.k_start.stride;
    return p.k_start.data == nullptr || key >= p.k_start.data[batch * s.batch + kv_head * s.head + query * s.token];
  }

  __device__ void fill_query(int query) const {
    const int group = p.h / p.hk;
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      p.z[(int64_t{batch} * p.h + head) * p.n + query] = nanf("");
      if (p.local_lse != nullptr) p.local_lse[(int64_t{batch} * p.h + head) * p.local_lse_head + query] = nanf("");
      const int64_t row = batch * p.o_stride.batch + head * p.o_stride.head + query * p.o_stride.token;
      for (int c = 0; c < p.dv; ++c) {
        switch (p.math) {
          case MathMode::kBF16: static_cast<__nv_bfloat16*>(p.o)[row + c] = from_float<__nv_bfloat16>(nanf("")); break;
          case MathMode::kFP16: static_cast<__half*>(p.o)[row + c] = from_float<__half>(nanf("")); break;
          default: static_cast<float*>(p.o)[row + c] = nanf("");
        }
      }
    }
  }

  // Called by all threads.
  __device__ void fill_new_state() const {
    const int64_t values = int64_t{rows()} * p.state.dv;
    for (int64_t i = threadIdx.x; i < values; i += kThreads) p.state.new_kv_state[state() * values + i] = nanf("");
    for (int i = threadIdx.x; i < rows(); i += kThreads) p.state.new_k_sum[state() * rows() + i] = nanf("");
  }
};

template <bool kGates>
__device__ void fill_rows_after_nan(const Head<kGates>& x, int begin) {
  __shared__ bool is_nan[kThreads];
  __shared__ int last_of_chunk;
  const FwdParams& p = x.p;
  const int lane = threadIdx.x;
  int last = begin == 0 && isnan(x.keys_of_state()) ? 0 : -1;  // last NaN decay of the tile before the chunk
  int key_of_last = last < 0 ? -1 : x.key_before(last);
  for (int first = begin; first < x.tokens; first += kThreads) {
    const int token = first + lane;
    const bool in_tile = first < begin + kTile, mine = x.is_nan(token);
    is_nan[lane] = mine;
    __syncthreads();
    int at = lane;
    while (at >= 0 && !is_nan[at]) --at;
    const int nan = at < 0 ? last : in_tile ? first + at : -1;  // beyond this tile, a NaN starts another block's part
    const int key = nan < 0 ? -1 : nan == last ? key_of_last : x.key_before(nan);
    bool ends_in_nan = false;
    const int query = x.query_at(token);
    if (token < x.tokens && query >= 0 && nan >= 0 && x.sees_key_before(key, token)) {
      if (p.o != nullptr) x.fill_query(query);
      ends_in_nan = token == p.m - 1 && p.state.new_kv_state != nullptr;
    }
    if (lane == kThreads - 1) last_of_chunk = nan;
    if (__syncthreads_or(ends_in_nan)) x.fill_new_state();
    if (__syncthreads_or(mine) && !in_tile) return;
    if (in_tile && last_of_chunk != last) {
      last = last_of_chunk;
      key_of_last = x.key_before(last);
    }
    __syncthreads();  // before is_nan and last_of_chunk change
  }
}

template <bool kGates>
__global__ void __launch_bounds__(kThreads) nan_rows_kernel(const FwdParams p, const int tiles) {
  const Head<kGates> head(p, blockIdx.x / tiles);
  const int begin = blockIdx.x % tiles * kTile;
  bool found = begin == 0 && isnan(head.keys_of_state());
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) found |= head.is_nan(begin + i * kThreads + static_cast<int>(threadIdx.x));
  if (__syncthreads_or(found)) fill_rows_after_nan(head, begin);
}

}  // namespace

void launch_nan_rows(const FwdParams& p, cudaStream_t stream) {
  const auto launch = [&](const char* name, auto kernel, int tokens) {
    const int tiles = (tokens + kTile - 1) / kTile;
    launch_kernel(name, kernel, grid_1d(int64_t{p.b} * p.hk * tiles), kThreads, 0, stream, p, tiles);
  };
  if (p.log_decay != nullptr) launch("nan_rows", nan_rows_kernel<false>, p.decay_tokens());
  if (p.log_input_gate != nullptr) launch("nan_gate_rows", nan_rows_kernel<true>, p.m);
}

}  // namespace fastmax
