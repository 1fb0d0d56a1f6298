// Recurrent decoding, bound by memory: the state (features x (dv + 1) floats per key/value head) streams through registers once.
//
// A block owns some state rows of one (batch, key/value head): it adds this token's term to each, writes it back, and
// accumulates weight * row for every query head of the group. Blocks of a head leave partial sums in a workspace; a second
// kernel adds them in a fixed order and divides.

#include "decode.h"
#include "dispatch.h"
#include "dtype.h"
#include "launch.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxRows = 512;  // state rows per block
constexpr int kUnroll = 4;     // float4 of state in flight per thread

// Rows per block: enough blocks to fill the device several times over, enough rows to amortise the partial sums.
int rows_per_block(const DecodeParams& p) {
  const int64_t rows = decode_rows(p.d, p.order) * p.b * p.hk;
  const int64_t wanted = rows / (int64_t{p.sm_count} * 16) + 1;
  return static_cast<int>(wanted < 64 ? 64 : wanted > kMaxRows ? kMaxRows : wanted);
}

int row_blocks(const DecodeParams& p) {
  const int per_block = rows_per_block(p);
  return static_cast<int>((decode_rows(p.d, p.order) + per_block - 1) / per_block);
}

// Columns of the second-order row r (counted from the first of them): a is the largest with first(a) <= r.
__device__ __forceinline__ void pair_of_row(int r, int d, int& a, int& b) {
  const auto first = [d](int i) { return i * d - i * (i - 1) / 2; };
  const float n = 2.f * d + 1.f;
  a = static_cast<int>((n - sqrtf(n * n - 8.f * r)) * 0.5f);
  a = max(0, min(a, d - 1));
  while (a > 0 && first(a) > r) --a;
  while (a + 1 < d && first(a + 1) <= r) ++a;
  b = a + r - first(a);
}

// kHeads: query heads of the group that one pass over the rows serves; the first pass also updates the state.
template <class Element, int kHeads>
__global__ void __launch_bounds__(kThreads, kHeads == 1 ? 4 : 2)
    decode_update_kernel(const DecodeParams p, const int rows_per_block, const int blocks) {
  __shared__ float k[kMaxHeadDim], q[kHeads][kMaxHeadDim];
  __shared__ float feature[kMaxRows], weight[kHeads][kMaxRows];
  __shared__ float4 v[(kMaxHeadDim + 4) / 4];
  __shared__ float4 sums[kHeads][kThreads];
  const int group = p.h / p.hk, columns = decode_columns(p.dv), vectors = columns / 4;
  const int head_index = blockIdx.x / blocks, block = blockIdx.x % blocks;
  const int batch = head_index / p.hk, kv_head = head_index % p.hk;
  const int64_t state_rows = decode_rows(p.d, p.order);
  const int row_begin = block * rows_per_block;
  const int rows = static_cast<int>(min(state_rows - row_begin, int64_t{rows_per_block}));

  // A row is read by `vectors` neighbouring threads; the threads left over idle.
  const int rows_at_once = kThreads / vectors;
  const int my_row = threadIdx.x / vectors, my_vector = threadIdx.x % vectors;
  const int first_row = my_row < rows_at_once ? my_row : rows;
  float4* state = reinterpret_cast<float4*>(p.state) + (head_index * state_rows + row_begin) * vectors + my_vector;
  for (int first_head = 0; first_head < group; first_head += kHeads) {
    const int heads = min(kHeads, group - first_head);
    if (first_head == 0) {
      const Element* k_in = static_cast<const Element*>(p.k) + batch * p.k_batch + kv_head * p.k_head;
      const Element* v_in = static_cast<const Element*>(p.v) + batch * p.v_batch + kv_head * p.v_head;
      for (int i = threadIdx.x; i < p.d; i += kThreads) k[i] = to_float(k_in[i]);
      for (int i = threadIdx.x; i < columns; i += kThreads) {
        reinterpret_cast<float*>(v)[i] = i < p.dv ? to_float(v_in[i]) : i == p.dv ? 1.f : 0.f;
      }
    }
    for (int i = threadIdx.x; i < heads * p.d; i += kThreads) {
      const int head = kv_head * group + first_head + i / p.d;
      q[i / p.d][i % p.d] = to_float(static_cast<const Element*>(p.q)[batch * p.q_batch + head * p.q_head + i % p.d]);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += kThreads) {
      const int row = row_begin + i;
      if (row == 0) {
        feature[i] = 1.f;
        for (int h = 0; h < heads; ++h) weight[h][i] = p.a0;
      } else if (row <= p.d) {
        feature[i] = k[row - 1];
        for (int h = 0; h < heads; ++h) weight[h][i] = p.a1 * p.scale * q[h][row - 1];
      } else {
        int a, b;
        pair_of_row(row - 1 - p.d, p.d, a, b);
        feature[i] = k[a] * k[b];
        const float factor = p.a2 * p.scale * p.scale * (a == b ? 1.f : 2.f);
        for (int h = 0; h < heads; ++h) weight[h][i] = factor * q[h][a] * q[h][b];
      }
    }
    __syncthreads();

    float4 acc[kHeads] = {};
    const float4 value = v[my_vector];
    for (int row0 = first_row; row0 < rows; row0 += kUnroll * rows_at_once) {
      float4 s[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int row = row0 + i * rows_at_once;
        if (row < rows) s[i] = __ldcs(state + row * vectors);
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        const int row = row0 + i * rows_at_once;
        if (row >= rows) break;
        if (first_head == 0) {
          const float f = feature[row];
          s[i].x = fmaf(f, value.x, s[i].x), s[i].y = fmaf(f, value.y, s[i].y);
          s[i].z = fmaf(f, value.z, s[i].z), s[i].w = fmaf(f, value.w, s[i].w);
          __stcs(state + row * vectors, s[i]);
        }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h >= heads) break;
          const float w = weight[h][row];
          acc[h].x = fmaf(w, s[i].x, acc[h].x), acc[h].y = fmaf(w, s[i].y, acc[h].y);
          acc[h].z = fmaf(w, s[i].z, acc[h].z), acc[h].w = fmaf(w, s[i].w, acc[h].w);
        }
      }
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) sums[h][threadIdx.x] = acc[h];
    __syncthreads();
    for (int i = threadIdx.x; i < heads * vectors; i += kThreads) {
      const int h = i / vectors, vector = i % vectors;
      float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
      for (int row = 0; row < rows_at_once; ++row) {
        const float4 x = sums[h][row * vectors + vector];
        total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
      }
      const int64_t head = int64_t{batch} * p.h + kv_head * group + first_head + h;
      reinterpret_cast<float4*>(p.partial)[(head * blocks + block) * vectors + vector] = total;
    }
    __syncthreads();  // shared memory is free for the next heads
  }
}

template <class Element>
__global__ void __launch_bounds__(kMaxHeadDim + 32) decode_finish_kernel(const DecodeParams p, const int blocks) {
  __shared__ float denominator;
  const int columns = decode_columns(p.dv), column = threadIdx.x;
  const int64_t head = blockIdx.x;
  float total = 0.f;
  if (column <= p.dv) {
    for (int i = 0; i < blocks; ++i) total += p.partial[(head * blocks + i) * columns + column];
  }
  if (column == p.dv) denominator = total;
  __syncthreads();
  if (column < p.dv) {
    Element* o = static_cast<Element*>(p.o) + head / p.h * p.o_batch + head % p.h * p.o_head;
    o[column] = from_float<Element>(denominator == 0.f ? 0.f : total / denominator);
  }
}

template <class Element>
void decode(const DecodeParams& p, cudaStream_t stream) {
  const int blocks = row_blocks(p);
  const auto update = p.h == p.hk ? decode_update_kernel<Element, 1> : decode_update_kernel<Element, 4>;
  launch_kernel("decode_update", update, grid_1d(int64_t{p.b} * p.hk * blocks), kThreads, 0, stream, p, rows_per_block(p), blocks);
  launch_kernel("decode_finish", decode_finish_kernel<Element>, grid_1d(int64_t{p.b} * p.h), (p.dv + 1 + 31) / 32 * 32, 0, stream, p,
                blocks);
}

}  // namespace

size_t decode_workspace_bytes(const DecodeParams& p) {
  return static_cast<size_t>(p.b) * p.h * row_blocks(p) * decode_columns(p.dv) * sizeof(float);
}

void launch_decode(const DecodeParams& p, cudaStream_t stream) {
  if (p.d > kMaxHeadDim || p.dv > kMaxHeadDim) throw std::runtime_error("fastmax: decode takes head dims up to 256");
  switch (p.math) {
    case MathMode::kBF16: return decode<__nv_bfloat16>(p, stream);
    case MathMode::kFP16: return decode<__half>(p, stream);
    default: return decode<float>(p, stream);
  }
}

}  // namespace fastmax
