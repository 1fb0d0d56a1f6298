// Heads of q, k and v from the tokens of a projection: convolution, RMS norm and rotary positions in one pass, bound by memory.
// A warp keeps the last tokens in registers while it walks, so each token is read once, besides width - 1 before each strip
// and, in the backward, width - 1 after it. It takes a batch of tokens at once, whose sums over a head are in flight together,
// while the next ones arrive in shared memory.
//
// shards: FASTMAX_MATH=Bf16,Fp16,Fp32

#include <algorithm>
#include <type_traits>

#include "core/launch.h"
#include "layer/split_heads.h"
#include "layer/split_parts.h"
#include "layer/wide_backward.h"

namespace fastmax {
namespace {

constexpr int kSlots = 3;  // batches of tokens in shared memory: the present one and two that arrive

// Forward: columns of a lane, threads, and blocks of a multiprocessor.
constexpr int kElements = 8;
constexpr int kThreads = 64;
template <int kWidth>
constexpr int kForwardBlocks = kWidth > kNarrow ? 4 : 6;

// Tokens that a warp takes at once: as many as registers can hold, 64 bytes of each lane in the forward and 32 in the backward,
// and half as many in the general kernels.
template <class Element, bool kGeneral>
constexpr int kForwardBatch = (kGeneral ? 32 : 64) / (kElements * static_cast<int>(sizeof(Element)));
template <class Element, bool kGeneral, int kElements>
constexpr int kBackwardBatch = std::max(1, (kGeneral ? 16 : 32) / (kElements * static_cast<int>(sizeof(Element))));

template <int kBatch, bool kGeneral>
using FactorsOf = Factors<kBatch, kSlots, kGeneral ? 2 : 4>;

__device__ __forceinline__ int next_slot(int slot) { return slot + 1 < kSlots ? slot + 1 : 0; }
__device__ __forceinline__ int last_slot(int slot) { return slot > 0 ? slot - 1 : kSlots - 1; }

// kGeneral: there may be places, a convolution narrower than kWidth, and columns that turn whose halves are not whole lanes.
template <class Element, int kWidth, bool kGeneral>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<kWidth>)
    split_heads_kernel(const __grid_constant__ SplitHeadsParams p) {
  constexpr int kBatch = kForwardBatch<Element, kGeneral>, kBefore = kWidth - 1;
  extern __shared__ __align__(16) float shared[];
  __shared__ Ring<Element, kElements, 1, kSlots * kBatch, kThreads> ring;
  __shared__ float partners[kGeneral ? kThreads / 32 : 1][32 * kElements];
  const Place at = place_of_lane<kElements, kThreads>(p.groups, 3, p.strips, p.n);
  if (at.is_idle) return;
  const HeadGroup& group = p.groups[at.group];
  const int channel = at.exists ? group.first_channel + at.head * group.width + at.column : 0;
  const int width = width_of<kWidth, !kGeneral>(p);
  const bool is_normalized = group.norm.data != nullptr, is_rotated = at.group < 2 && p.rotated > 0;
  const HeadMean mean(at.lanes, group.width);
  const Tokens<Element> tokens(p, at, channel);
  const Turn<kElements, !kGeneral> turn(p, at, partners[kGeneral ? threadIdx.x / 32 : 0]);
  FactorsOf<kBatch, kGeneral> factors(p, at, shared);

  const uint32_t address = ring.address();
  const Element* next = tokens.x + at.begin * p.x_token;  // of the token that is copied next
  const auto copy = [&](int t, int slot) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j, next += p.x_token) {
      if (t + j < at.end) ring.copy(address, slot * kBatch + j, 0, next, at.exists);
    }
    if (is_rotated) factors.copy(slot, at.end - t);
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i + 1 < kSlots; ++i) copy(at.begin + i * kBatch, i);

  float weight[kWidth][kElements], before[kBefore > 0 ? kBefore : 1][kElements], gain[kElements];
  if constexpr (kBefore > 0) tokens.load_before(at.begin, at.exists, before);
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int s = 0; s < kWidth; ++s) {
      weight[s][i] = kWidth == 1 ? 1.f : at.exists && s < width ? weight_of<Element>(p, width, channel, s, i) : 0.f;
    }
  }
  load_gain<Element>(group, at, gain);

  const int64_t row = int64_t{group.heads} * group.width;  // elements of a token
  Element* out = static_cast<Element*>(group.out) + (int64_t{at.batch} * p.n + at.begin) * row;
  out += at.head * group.width + at.column;
  int slot = 0;
#pragma unroll 1
  for (int t = at.begin; t < at.end; t += kBatch, slot = next_slot(slot)) {
    ptx::cp_async_wait<kSlots - 2>();
    __syncwarp();
    copy(t + (kSlots - 1) * kBatch, last_slot(slot));
    float u[kBatch][kElements];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      float x[kElements];
      ring.read(address, slot * kBatch + j, 0, x);
      const int place = kGeneral && kBefore > 0 ? place_of(p, t + j) : INT_MAX;
#pragma unroll
      for (int i = 0; i < kElements; ++i) u[j][i] = x[i] * weight[0][i];
#pragma unroll
      for (int s = 1; s < kWidth; ++s) {
        if (kGeneral && (s >= width || s > place)) continue;
#pragma unroll
        for (int i = 0; i < kElements; ++i) u[j][i] = fmaf(before[s - 1][i], weight[s][i], u[j][i]);
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
#pragma unroll
        for (int s = kBefore - 1; s > 0; --s) before[s][i] = before[s - 1][i];
        if (kBefore > 0) before[0][i] = x[i];
      }
    }
    if (is_normalized) {
      float sums[kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) sums[j] = fmaf(u[j][i], u[j][i], sums[j]);
      }
      mean.of(sums);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float scale = rsqrtf(sums[j] + group.eps);
#pragma unroll
        for (int i = 0; i < kElements; ++i) u[j][i] *= scale * gain[i];
      }
    }
    if (is_rotated) turn.forward(factors.cos_of(slot), factors.sin_of(slot), u);
#pragma unroll
    for (int j = 0; j < kBatch; ++j, out += row) {
      if (at.exists && t + j < at.end) Slice<Element, kElements>::store(out, u[j]);
    }
  }
}

// With z the convolution, r = 1 / rms(z) and y = r gain z, the gradient of z is r (h - z r^2 mean(h . z)) for h = gain grad y.
// Token t - s of x has weight s in token t, so its gradient is complete when the walk is width - 1 tokens further.
// kElements: columns of a lane.
template <class Element, int kWidth, bool kGeneral, int kElements, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    split_heads_backward_kernel(const __grid_constant__ SplitHeadsParams p) {
  constexpr int kBatch = kBackwardBatch<Element, kGeneral, kElements>, kBefore = kWidth - 1;
  extern __shared__ __align__(16) float shared[];
  __shared__ Ring<Element, kElements, 2, kSlots * kBatch, kThreads> ring;
  __shared__ float partners[kGeneral ? kThreads / 32 : 1][32 * kElements];
  const Place at = place_of_lane<kElements, kThreads>(p.groups, 3, p.strips, p.n);
  if (at.is_idle) return;
  const HeadGroup& group = p.groups[at.group];
  const int channel = at.exists ? group.first_channel + at.head * group.width + at.column : 0;
  const int width = width_of<kWidth, !kGeneral>(p);
  const bool is_normalized = group.norm.data != nullptr, is_rotated = at.group < 2 && p.rotated > 0;
  const bool has_grad = at.exists && group.grad != nullptr;
  const HeadMean mean(at.lanes, group.width);
  const Tokens<Element> tokens(p, at, channel);
  const Turn<kElements, !kGeneral> turn(p, at, partners[kGeneral ? threadIdx.x / 32 : 0]);
  FactorsOf<kBatch, kGeneral> factors(p, at, shared);
  const int last = min(at.end + width - 1, p.n);  // token after the last one whose gradient the strip needs

  const uint32_t address = ring.address();
  const int64_t grad_token = group.grad_stride.token;
  const Element *next_x = tokens.x + at.begin * p.x_token, *next_grad = grad_of_lane<Element>(p, at) + at.begin * grad_token;
  const auto copy = [&](int t, int slot) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j, next_x += p.x_token, next_grad += grad_token) {
      if (t + j >= last) continue;
      ring.copy(address, slot * kBatch + j, 0, next_x, at.exists);
      ring.copy(address, slot * kBatch + j, 1, next_grad, has_grad);
    }
    if (is_rotated) factors.copy(slot, last - t);
    ptx::cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i + 1 < kSlots; ++i) copy(at.begin + i * kBatch, i);

  // x[kBefore + j]: token j of the batch; the tokens before the batch come first.
  float weight[kWidth][kElements], gain[kElements], x[kBefore + kBatch][kElements];
  if constexpr (kBefore > 0) {
    float before[kBefore][kElements];
    tokens.load_before(at.begin, at.exists, before);
#pragma unroll
    for (int s = 0; s < kBefore; ++s) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[kBefore - 1 - s][i] = before[s][i];
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
#pragma unroll
    for (int s = 0; s < kWidth; ++s) {
      weight[s][i] = kWidth == 1 ? 1.f : at.exists && s < width ? weight_of<Element>(p, width, channel, s, i) : 0.f;
    }
  }
  load_gain<Element>(group, at, gain);

  // partial[s]: the gradient of the token s + 1 before the present one, as far as it is known.
  float partial[kBefore > 0 ? kBefore : 1][kElements] = {}, of_weight[kWidth][kElements] = {}, of_gain[kElements] = {};
  // Of the token whose gradient the next one completes, width - 1 before the first one at first.
  Element* out = static_cast<Element*>(p.grad_x) + (int64_t{at.batch} * p.n + at.begin - (width - 1)) * p.channels + channel;
  // A batch of the walk. kInside: its tokens are of the strip, and so are those whose gradients it completes.
  const auto walk = [&](int t, int slot, auto inside) {
    constexpr bool kInside = decltype(inside)::value;
    int place[kBatch];
    float u[kBatch][kElements];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      ring.read(address, slot * kBatch + j, 0, x[kBefore + j]);
      ring.read(address, slot * kBatch + j, 1, u[j]);
      place[j] = kGeneral && kBefore > 0 ? place_of(p, t + j) : INT_MAX;
    }
    const auto is_in_window = [&](int j, int s) { return !kGeneral || (s < width && s <= place[j]); };
    if (is_rotated) turn.backward(factors.cos_of(slot), factors.sin_of(slot), u);
    if (is_normalized) {
      float z[kBatch][kElements], sums[2 * kBatch] = {};
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) z[j][i] = x[kBefore + j][i] * weight[0][i];
#pragma unroll
        for (int s = 1; s < kWidth; ++s) {
          if (!is_in_window(j, s)) continue;
#pragma unroll
          for (int i = 0; i < kElements; ++i) z[j][i] = fmaf(x[kBefore + j - s][i], weight[s][i], z[j][i]);
        }
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          sums[2 * j] = fmaf(z[j][i], z[j][i], sums[2 * j]);
          sums[2 * j + 1] = fmaf(u[j][i] * gain[i], z[j][i], sums[2 * j + 1]);
        }
      }
      mean.of(sums);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float scale = rsqrtf(sums[2 * j] + group.eps), along = -scale * scale * scale * sums[2 * j + 1];
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float scaled = scale * u[j][i];
          if (kInside || t + j < at.end) of_gain[i] = fmaf(scaled, z[j][i], of_gain[i]);
          u[j][i] = fmaf(along, z[j][i], scaled * gain[i]);
        }
      }
    }
    // u is now the gradient of the convolution.
#pragma unroll
    for (int j = 0; j < kBatch; ++j, out += p.channels) {
      if (!kInside && t + j >= p.n) {  // there is no such token; gradients of earlier ones are still to be stored
#pragma unroll
        for (int i = 0; i < kElements; ++i) u[j][i] = 0.f;
      }
      if (kWidth > 1 && (kInside || t + j < at.end)) {
#pragma unroll
        for (int s = 0; s < kWidth; ++s) {
          if (s > 0 && !is_in_window(j, s)) continue;
#pragma unroll
          for (int i = 0; i < kElements; ++i) of_weight[s][i] = fmaf(u[j][i], x[kBefore + j - s][i], of_weight[s][i]);
        }
      }
      float done[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i) done[i] = u[j][i] * weight[0][i];
#pragma unroll
      for (int s = 1; s < kWidth; ++s) {
        if (kGeneral && s >= width) break;
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float sum = is_in_window(j, s) ? fmaf(u[j][i], weight[s][i], partial[s - 1][i]) : partial[s - 1][i];
          partial[s - 1][i] = done[i], done[i] = sum;
        }
      }
      const int token = t + j - (width - 1);  // whose gradient is done
      if (at.exists && (kInside || (token >= at.begin && token < at.end))) {
        Slice<Element, kElements>::store(out, done);
      } else if (!kInside && token < at.begin) {
        Element* recent = grad_of_recent<Element>(p, at, channel, token);
        if (recent != nullptr) Slice<Element, kElements>::store(recent, done);
      }
    }
#pragma unroll
    for (int s = 0; s < kBefore; ++s) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[s][i] = x[kBatch + s][i];
    }
  };
  int slot = 0;
#pragma unroll 1
  for (int t = at.begin; t - (width - 1) < at.end; t += kBatch, slot = next_slot(slot)) {
    ptx::cp_async_wait<kSlots - 2>();
    __syncwarp();
    copy(t + (kSlots - 1) * kBatch, last_slot(slot));
    if (t - at.begin >= width - 1 && t + kBatch <= at.end) walk(t, slot, std::true_type());
    else walk(t, slot, std::false_type());
  }

  if (kWidth > 1) Workspace::store_convolution(p, at, channel, width, of_weight);
  if (is_normalized) Workspace::store_norm(p, at, of_gain);
}

unsigned blocks(const SplitHeadsParams& p, int threads) {
  const int warps = threads / 32;
  return grid_1d((p.strips.warps + warps - 1) / warps);
}

// Calls function(kernel width, general) with the constants of a kernel that covers the convolution.
template <class Function>
void with_instance(const SplitHeadsParams& p, const Function& function) {
  using std::false_type, std::true_type;
  using One = std::integral_constant<int, 1>;
  using Narrow = std::integral_constant<int, kNarrow>;
  const bool is_aligned = p.rotated % (2 * kElements) == 0;
  if (p.width == 1) return is_aligned ? function(One(), false_type()) : function(One(), true_type());
  if (p.width > kNarrow) return function(std::integral_constant<int, kMaxConvolution>(), true_type());
  if (p.width == kNarrow && is_aligned && p.places == nullptr) return function(Narrow(), false_type());
  function(Narrow(), true_type());
}

}  // namespace

template <class Math>
void SplitHeads<Math>::forward(SplitHeadsParams p, cudaStream_t stream) {
  using Element = typename Math::Element;
  with_instance(p, [&](auto width, auto general) {
    constexpr int kWarps = kThreads / 32;
    divide(p.groups, 3, p.strips, p.b, p.n, kElements, p.sm_count * kForwardBlocks<width> * kWarps, p.width + 3);
    const int shared = FactorsOf<kForwardBatch<Element, general>, general>::bytes(p.rotated, kWarps);
    launch_kernel("split_heads", split_heads_kernel<Element, width, general>, blocks(p, kThreads), kThreads, shared, stream, p);
  });
}

template <class Math>
int64_t SplitHeads<Math>::backward(SplitHeadsParams p, cudaStream_t stream, bool measure) {
  using Element = typename Math::Element;
  int64_t floats = 0;
  const auto launch = [&](auto kernel, int elements, int threads, int blocks_per_sm, int shared) {
    divide(p.groups, 3, p.strips, p.b, p.n, elements, p.sm_count * blocks_per_sm * threads / 32, 2 * p.width + 3);
    const Workspace workspace(p);
    floats = workspace.end;
    if (measure) return;
    launch_kernel("split_heads_backward", kernel, blocks(p, threads), threads, shared, stream, p);
    const int64_t strips = int64_t{p.b} * p.strips.per_sequence;
    ColumnSums sums[3] = {};
    sums[0] = {p.workspace, strips, p.width * p.channels, p.width, p.grad_convolution, p.convolution.is_float};
    for (int i = 0; i < 2; ++i) {
      const HeadGroup& group = p.groups[i];
      sums[1 + i] = {p.workspace + workspace.norms[i], strips * group.units, group.width, 1, group.grad_norm, group.norm.is_float};
    }
    launch_column_sums(sums, 3, p.math, stream);
  };
  const int widest = p.groups[0].width > p.groups[2].width ? p.groups[0].width : p.groups[2].width;
  with_instance(p, [&](auto width, auto general) {
    if constexpr (width > kNarrow) {
      launch(wide_backward_kernel<Element>, kWideElements, kWideThreads, kWideBlocks, 0);
    } else if (widest > 32 * 4) {  // more columns than the lanes of a warp hold by four
      constexpr int kThreads = 64, kBlocks = 4;
      launch(split_heads_backward_kernel<Element, width, general, 8, kThreads, kBlocks>, 8, kThreads, kBlocks,
             FactorsOf<kBackwardBatch<Element, general, 8>, general>::bytes(p.rotated, kThreads / 32));
    } else {
      constexpr int kThreads = 128, kBlocks = width == 1 && sizeof(Element) == 2 ? 4 : 3;
      launch(split_heads_backward_kernel<Element, width, general, 4, kThreads, kBlocks>, 4, kThreads, kBlocks,
             FactorsOf<kBackwardBatch<Element, general, 4>, general>::bytes(p.rotated, kThreads / 32));
    }
  });
  return floats;
}

template struct SplitHeads<FASTMAX_MATH>;

}  // namespace fastmax
