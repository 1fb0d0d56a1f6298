// The backward of split_heads for convolutions wider than kNarrow. Not all fits into registers: the tokens of the window stay in
// the shared memory in which they arrived, and weights and unfinished gradients lie there, too. A warp takes one token at a
// time.
#pragma once

#include "layer/split_parts.h"

namespace fastmax {

inline constexpr int kWideElements = 8;  // columns of a lane
inline constexpr int kWideThreads = 32;
inline constexpr int kWideBlocks = 6;  // of a multiprocessor

template <class Element>
__global__ void __launch_bounds__(kWideThreads) wide_backward_kernel(const __grid_constant__ SplitHeadsParams p) {
  constexpr int kElements = kWideElements, kThreads = kWideThreads, kWidth = kMaxConvolution;
  constexpr int kAhead = 7, kStages = 16;  // tokens
  static_assert(kStages >= kAhead + kWidth);
  __shared__ Ring<Element, kElements, 1, kStages, kThreads> x_ring;
  __shared__ Ring<Element, kElements, 1, 8, kThreads> grad_ring;
  __shared__ float partners[32 * kElements];
  __shared__ float weights[kWidth][kElements][kThreads], gains[kElements][kThreads], partials[kWidth - 1][kElements][kThreads];
  const Place at = place_of_lane<kElements, kThreads>(p.groups, 3, p.strips, p.n);
  if (at.is_idle) return;
  const HeadGroup& group = p.groups[at.group];
  const int channel = at.exists ? group.first_channel + at.head * group.width + at.column : 0;
  const int width = p.width, lane = threadIdx.x;
  const bool is_normalized = group.norm.data != nullptr, is_rotated = at.group < 2 && p.rotated > 0;
  const bool has_grad = at.exists && group.grad != nullptr;
  const HeadMean mean(at.lanes, group.width);
  const Tokens<Element> tokens(p, at, channel);
  const Turn<kElements, false> turn(p, at, partners);
  const int last = min(at.end + width - 1, p.n);  // token after the last one whose gradient the strip needs

  // Slots are counted from the first token that a window has before the strip.
  const int base = at.begin - (kWidth - 1);
  const auto x_slot = [&](int t) { return (t - base) & (kStages - 1); };
  const auto grad_slot = [&](int t) { return (t - base) & 7; };
  const uint32_t x_address = x_ring.address(), grad_address = grad_ring.address();
  for (int t = base; t < at.begin; ++t) {
    const Element* source = at.exists ? tokens.find(t) : nullptr;
    x_ring.copy(x_address, x_slot(t), 0, source == nullptr ? tokens.x : source, source != nullptr);
    ptx::cp_async_commit();
  }
  const int64_t grad_token = group.grad_stride.token;
  const Element *next_x = tokens.x + at.begin * p.x_token, *next_grad = grad_of_lane<Element>(p, at) + at.begin * grad_token;
  const auto copy = [&](int t) {
    if (t < last) {
      x_ring.copy(x_address, x_slot(t), 0, next_x, at.exists);
      grad_ring.copy(grad_address, grad_slot(t), 0, next_grad, has_grad);
    }
    ptx::cp_async_commit();
    next_x += p.x_token, next_grad += grad_token;
  };
  for (int t = at.begin; t < at.begin + kAhead; ++t) copy(t);

#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    for (int s = 0; s < kWidth; ++s) {
      weights[s][i][lane] = at.exists && s < width ? weight_of<Element>(p, width, channel, s, i) : 0.f;
    }
    for (int s = 0; s + 1 < kWidth; ++s) partials[s][i][lane] = 0.f;
    gains[i][lane] = is_normalized && at.exists ? load_weight<Element>(group.norm, at.column + i) : 1.f;
  }
  // partials[s]: the gradient of the token s + 1 before the present one, as far as it is known.
  float of_weights[kWidth][kElements] = {}, of_gain[kElements] = {};
  // Of the token whose gradient the next step completes, width - 1 before the first one at first.
  Element* out = static_cast<Element*>(p.grad_x) + (int64_t{at.batch} * p.n + at.begin - (width - 1)) * p.channels + channel;
#pragma unroll 1
  for (int t = at.begin; t < at.end + width - 1; ++t, out += p.channels) {
    ptx::cp_async_wait<kAhead - 1>();
    float u[1][kElements];
    grad_ring.read(grad_address, grad_slot(t), 0, u[0]);
    copy(t + kAhead);
    const int place = place_of(p, t);
    const auto for_window = [&](const auto& function) {  // calls function(s, x) for the tokens of the sequence in the window
#pragma unroll
      for (int s = 0; s < kWidth; ++s) {
        if (s >= width || s > place) continue;
        float x[kElements];
        x_ring.read(x_address, x_slot(t - s), 0, x);
        function(s, x);
      }
    };
    if (t >= p.n) {  // there is no such token; gradients of earlier ones are still to be stored
#pragma unroll
      for (int i = 0; i < kElements; ++i) u[0][i] = 0.f;
    } else {
      if (is_rotated) {
        const int64_t row = at.batch * p.rotation_batch + int64_t{t} * p.rotated;
        turn.backward(p.cos + row, p.sin + row, u);
      }
      if (is_normalized) {
        float z[kElements] = {}, sums[2] = {};
        for_window([&](int s, const float(&x)[kElements]) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) z[i] = fmaf(x[i], weights[s][i][lane], z[i]);
        });
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          sums[0] = fmaf(z[i], z[i], sums[0]);
          sums[1] = fmaf(u[0][i] * gains[i][lane], z[i], sums[1]);
        }
        mean.of(sums);
        const float scale = rsqrtf(sums[0] + group.eps), along = -scale * scale * scale * sums[1];
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          const float scaled = scale * u[0][i];
          if (t < at.end) of_gain[i] = fmaf(scaled, z[i], of_gain[i]);
          u[0][i] = fmaf(along, z[i], scaled * gains[i][lane]);
        }
      }
    }
    // u is now the gradient of the convolution at t.
    if (t < at.end) {
      for_window([&](int s, const float(&x)[kElements]) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) of_weights[s][i] = fmaf(u[0][i], x[i], of_weights[s][i]);
      });
    }
    float done[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) done[i] = u[0][i] * weights[0][i][lane];
#pragma unroll
    for (int s = 1; s < kWidth; ++s) {
      if (s >= width) break;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        float& partial = partials[s - 1][i][lane];
        const float sum = s <= place ? fmaf(u[0][i], weights[s][i][lane], partial) : partial;
        partial = done[i], done[i] = sum;
      }
    }
    const int token = t - (width - 1);  // whose gradient is done
    if (token < at.begin) {
      Element* recent = grad_of_recent<Element>(p, at, channel, token);
      if (recent != nullptr) Slice<Element, kElements>::store(recent, done);
    } else if (at.exists) {
      Slice<Element, kElements>::store(out, done);
    }
  }

  Workspace::store_convolution(p, at, channel, width, of_weights);
  if (is_normalized) Workspace::store_norm(p, at, of_gain);
}

}  // namespace fastmax
