// The output of a layer from the heads of attention: RMS norm of each head, times silu of a gate. Bound by memory.
//
// shards: FASTMAX_MATH=Bf16,Fp16,Fp32

#include "core/launch.h"
#include "layer/join_heads.h"
#include "layer/walk.h"

namespace fastmax {
namespace {

constexpr int kElements = 8;  // columns of a lane
constexpr int kThreads = 128;
template <class Element>
constexpr int kBlocks = sizeof(Element) == 2 ? 4 : 3;  // of a multiprocessor

// 1 / (1 + exp(-x)) of a gate, to the precision of its dtype.
template <class Element>
__device__ __forceinline__ float sigmoid(float x) {
  constexpr float kLog2e = 1.4426950408889634f;
  if constexpr (sizeof(Element) == 2) return ptx::rcp_approx(1.f + ptx::exp2_approx(-kLog2e * x));
  else return 1.f / (1.f + expf(-x));
}

// What both directions know of a lane. Without columns it has valid addresses that it does not read.
template <class Element>
struct Lane {
  const Place at;
  const bool is_normalized, is_gated;
  const HeadMean mean;
  const Element *o, *gate;  // token 0; gate is null if there is none
  const int64_t o_token, gate_token;

  __device__ __forceinline__ explicit Lane(const JoinHeadsParams& p)
      : at(place_of_lane<kElements, kThreads>(&p.group, 1, p.strips, p.n)),
        is_normalized(p.group.norm.data != nullptr),
        is_gated(p.gate != nullptr),
        mean(at.lanes, p.group.width),
        o(static_cast<const Element*>(p.o)),
        gate(static_cast<const Element*>(p.gate)),
        o_token(p.o_stride.token),
        gate_token(p.gate_token) {
    if (!at.exists) return;
    o += at.batch * p.o_stride.batch + at.head * p.o_stride.head + at.column;
    if (is_gated) gate += at.batch * p.gate_batch + at.head * p.group.width + at.column;
  }

  // Copies o and the gate of token t, which are the first two tensors of a ring.
  template <class Ring>
  __device__ __forceinline__ void copy(uint32_t address, int slot, int t) const {
    Ring::copy(address, slot, 0, o + t * o_token, at.exists);
    if (is_gated) Ring::copy(address, slot, 1, gate + t * gate_token, at.exists);
  }
};

template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks<Element>) join_heads_kernel(const __grid_constant__ JoinHeadsParams p) {
  constexpr int kStages = sizeof(Element) == 2 ? 8 : 4;
  using Rows = Ring<Element, kElements, 2, kStages, kThreads>;
  __shared__ Rows ring;
  const Lane<Element> lane(p);
  const Place& at = lane.at;
  if (at.is_idle) return;
  const uint32_t address = ring.address();
  const auto slot = [&](int t) { return (t - at.begin) & (kStages - 1); };
  const auto copy = [&](int t) {
    if (t < at.end) lane.template copy<Rows>(address, slot(t), t);
    ptx::cp_async_commit();
  };
  for (int t = 0; t < kStages - 1; ++t) copy(at.begin + t);

  float gain[kElements];
  load_gain<Element>(p.group, at, gain);
  const int width = p.group.width;
  const int64_t row = int64_t{p.group.heads} * width;  // elements of a token
  Element* out = static_cast<Element*>(p.group.out) + (int64_t{at.batch} * p.n + at.begin) * row + at.head * width + at.column;
#pragma unroll 2
  for (int t = at.begin; t < at.end; ++t, out += row) {
    ptx::cp_async_wait<kStages - 2>();
    float o[kElements], gate[kElements];
    ring.read(address, slot(t), 0, o);
    if (lane.is_gated) ring.read(address, slot(t), 1, gate);
    copy(t + kStages - 1);
    if (lane.is_normalized) {
      float sum[1] = {0.f};
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[0] = fmaf(o[i], o[i], sum[0]);
      lane.mean.of(sum);
      const float scale = rsqrtf(sum[0] + p.group.eps);
#pragma unroll
      for (int i = 0; i < kElements; ++i) o[i] *= scale * gain[i];
    }
    if (lane.is_gated) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) o[i] *= gate[i] * sigmoid<Element>(gate[i]);
    }
    if (at.exists) Slice<Element, kElements>::store(out, o);
  }
}

// With r = 1 / rms(o) and y = r gain o silu(gate), the gradient of o is r (h - o r^2 mean(h . o)) for h = gain silu(gate) grad y.
template <class Element>
__global__ void __launch_bounds__(kThreads, kBlocks<Element>) join_heads_backward_kernel(const __grid_constant__ JoinHeadsParams p) {
  constexpr int kStages = sizeof(Element) == 2 ? 4 : 2;
  using Rows = Ring<Element, kElements, 3, kStages, kThreads>;
  __shared__ Rows ring;
  const Lane<Element> lane(p);
  const Place& at = lane.at;
  if (at.is_idle) return;
  const Stride& grad_stride = p.group.grad_stride;
  const Element* grad_rows = static_cast<const Element*>(p.group.grad);
  if (at.exists) grad_rows += at.batch * grad_stride.batch + at.head * grad_stride.head + at.column;
  const uint32_t address = ring.address();
  const auto slot = [&](int t) { return (t - at.begin) & (kStages - 1); };
  const auto copy = [&](int t) {
    if (t < at.end) {
      lane.template copy<Rows>(address, slot(t), t);
      ring.copy(address, slot(t), 2, grad_rows + t * grad_stride.token, at.exists);
    }
    ptx::cp_async_commit();
  };
  for (int t = 0; t < kStages - 1; ++t) copy(at.begin + t);

  float gain[kElements], of_gain[kElements] = {};
  load_gain<Element>(p.group, at, gain);
  const int width = p.group.width;
  const int64_t row = int64_t{p.group.heads} * width;
  Element* of_o = static_cast<Element*>(p.grad_o) + at.batch * p.grad_o_stride.batch + at.head * p.grad_o_stride.head + at.column;
  Element* of_gate = static_cast<Element*>(p.grad_gate) + int64_t{at.batch} * p.n * row + at.head * width + at.column;
#pragma unroll 2
  for (int t = at.begin; t < at.end; ++t) {
    ptx::cp_async_wait<kStages - 2>();
    float o[kElements], grad[kElements], gate[kElements];
    ring.read(address, slot(t), 0, o);
    if (lane.is_gated) ring.read(address, slot(t), 1, gate);
    ring.read(address, slot(t), 2, grad);
    copy(t + kStages - 1);
    float share[kElements];  // sigmoid of the gate
    if (lane.is_gated) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) share[i] = sigmoid<Element>(gate[i]);
    }
    if (lane.is_normalized) {
      // The product with grad y needs the gate, but not the scale.
      float sums[2] = {0.f, 0.f};
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float silu = lane.is_gated ? gate[i] * share[i] : 1.f;
        sums[0] = fmaf(o[i], o[i], sums[0]);
        sums[1] = fmaf(grad[i] * silu * gain[i], o[i], sums[1]);
      }
      lane.mean.of(sums);
      const float scale = rsqrtf(sums[0] + p.group.eps);
      const float along = scale * scale * sums[1];
      float of_rows[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float silu = lane.is_gated ? gate[i] * share[i] : 1.f;
        const float normalized = scale * o[i], of_normalized = grad[i] * silu;
        of_gain[i] = fmaf(of_normalized, normalized, of_gain[i]);
        of_rows[i] = scale * fmaf(-along, o[i], of_normalized * gain[i]);
        // silu' = sigmoid (1 + x (1 - sigmoid))
        if (lane.is_gated) gate[i] = grad[i] * normalized * gain[i] * share[i] * fmaf(gate[i], 1.f - share[i], 1.f);
      }
      if (at.exists) Slice<Element, kElements>::store(of_o + t * p.grad_o_stride.token, of_rows);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (!lane.is_gated) continue;
        const float silu = gate[i] * share[i];
        gate[i] = grad[i] * o[i] * share[i] * fmaf(gate[i], 1.f - share[i], 1.f);
        grad[i] *= silu;
      }
      if (at.exists) Slice<Element, kElements>::store(of_o + t * p.grad_o_stride.token, grad);
    }
    if (lane.is_gated && at.exists) Slice<Element, kElements>::store(of_gate + t * row, gate);
  }
  if (lane.is_normalized) {
    sum_over_heads(of_gain, at.lanes);
    if (static_cast<int>(threadIdx.x % 32) < at.lanes && at.column < width) {
      store_sums(p.workspace + (at.strip(p.strips) * p.group.units + at.unit) * width + at.column, of_gain);
    }
  }
}

template <class Element>
unsigned grid(JoinHeadsParams& p) {
  constexpr int kWarps = kThreads / 32;
  divide(&p.group, 1, p.strips, p.b, p.n, kElements, p.sm_count * kBlocks<Element> * kWarps, 4);
  return grid_1d((p.strips.warps + kWarps - 1) / kWarps);
}

}  // namespace

template <class Math>
void JoinHeads<Math>::forward(JoinHeadsParams p, cudaStream_t stream) {
  using Element = typename Math::Element;
  const unsigned blocks = grid<Element>(p);
  launch_kernel("join_heads", join_heads_kernel<Element>, blocks, kThreads, 0, stream, p);
}

template <class Math>
int64_t JoinHeads<Math>::backward(JoinHeadsParams p, cudaStream_t stream, bool measure) {
  using Element = typename Math::Element;
  const unsigned blocks = grid<Element>(p);
  const int64_t rows = int64_t{p.b} * p.strips.per_sequence * p.group.units;
  if (measure) return p.group.norm.data == nullptr ? 0 : rows * p.group.width;
  launch_kernel("join_heads_backward", join_heads_backward_kernel<Element>, blocks, kThreads, 0, stream, p);
  const ColumnSums sums{p.workspace, rows, p.group.width, 1, p.group.grad_norm, p.group.norm.is_float};
  launch_column_sums(&sums, 1, p.math, stream);
  return 0;
}

template struct JoinHeads<FASTMAX_MATH>;

}  // namespace fastmax
