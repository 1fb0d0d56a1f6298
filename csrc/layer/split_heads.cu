// Heads of q, k and v from the tokens of a projection: convolution, RMS norm and rotary positions in one pass, bound by memory.
// A warp keeps the last tokens in registers while it walks, so each token is read once, besides width - 1 before each strip and,
// in the backward, width - 1 after it.
//
// shards: FASTMAX_MATH=Bf16,Fp16,Fp32

#include <type_traits>

#include "core/launch.h"
#include "layer/split_heads.h"
#include "layer/walk.h"

namespace fastmax {
namespace {

constexpr int kElements = 8;  // columns of a lane in the forward
constexpr int kThreads = 128;
template <class Element, int kWidth>
constexpr int kForwardBlocks = kWidth > 4 ? 2 : kWidth > 2 || sizeof(Element) == 4 ? 3 : 4;  // of a multiprocessor

// kWidth: width of the convolution, 1 without one; kMaxConvolution: any up to this.
template <int kWidth>
__device__ __forceinline__ int width_of(const SplitHeadsParams& p) {
  return kWidth < kMaxConvolution ? kWidth : p.width;
}

// Number of tokens before token t in its sequence; beyond kMaxConvolution it does not matter.
__device__ __forceinline__ int place_of(const SplitHeadsParams& p, int t) {
  if (p.places == nullptr) return INT_MAX;
  if (!p.wide_places) return static_cast<const int32_t*>(p.places)[t];
  const int64_t place = static_cast<const int64_t*>(p.places)[t];
  return place < INT_MAX ? static_cast<int>(place) : INT_MAX;
}

// Tokens of the input, of one lane.
template <class Element>
struct Tokens {
  const Element *x, *recent;  // null: zeros
  int64_t x_token, recent_token;
  int n, before;  // tokens, and tokens of recent

  __device__ __forceinline__ Tokens(const SplitHeadsParams& p, const Place& at, int channel)
      : x(static_cast<const Element*>(p.x) + at.batch * p.x_batch + channel),
        recent(p.recent == nullptr ? nullptr : static_cast<const Element*>(p.recent) + at.batch * p.recent_batch + channel),
        x_token(p.x_token),
        recent_token(p.recent_token),
        n(p.n),
        before(p.width - 1) {}

  // Returns where token t is, from -before on, or null if it is zeros.
  __device__ __forceinline__ const Element* find(int t) const {
    if (t >= 0) return t < n ? x + t * x_token : nullptr;
    return recent == nullptr || t < -before ? nullptr : recent + (before + t) * recent_token;
  }
};

// Rotation of the first p.rotated columns of a head, of which a lane has kElements.
template <int kElements, bool kGeneral>
struct Turn {
  const float *cos, *sin;  // of the lane's first column in token 0
  int rotated, column, partner;
  bool is_aligned;  // all columns of a lane have their partners in one other lane
  float* buffer;  // of the warp, 32 kElements floats; where the partners are in several lanes

  __device__ __forceinline__ Turn(const SplitHeadsParams& p, const Place& at, float* buffer)
      : cos(p.cos + at.batch * p.rotation_batch + at.column),
        sin(p.sin + at.batch * p.rotation_batch + at.column),
        rotated(p.rotated),
        column(at.column),
        is_aligned(!kGeneral || p.rotated % (2 * kElements) == 0),
        buffer(buffer) {
    const int half = rotated / 2, lane = threadIdx.x % 32;
    partner = column >= rotated ? lane : column < half ? lane + half / kElements : lane - half / kElements;
  }

  __device__ __forceinline__ void load(const float* row, int t, float (&x)[kElements], float otherwise) const {
    const float* source = row + int64_t{t} * rotated;
    if (!kGeneral || is_aligned) {
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        float4 four = make_float4(otherwise, otherwise, otherwise, otherwise);
        if (column < rotated) four = *reinterpret_cast<const float4*>(source + i);
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] = otherwise;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (column + i < rotated) x[i] = source[i];
      }
    }
  }

  // Replaces each rotated column by its partner; other columns become zero. All lanes of the warp take part.
  __device__ __forceinline__ void exchange(float (&x)[kElements]) const {
    if (!kGeneral || is_aligned) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const float other = __shfl_sync(~0u, x[i], partner);
        x[i] = column < rotated ? other : 0.f;
      }
    } else {
      const int half = rotated / 2, lane = threadIdx.x % 32, row = lane * kElements - column;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kElements; ++i) buffer[lane * kElements + i] = x[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int own = column + i;
        x[i] = own < rotated ? buffer[row + (own < half ? own + half : own - half)] : 0.f;
      }
    }
  }

  __device__ __forceinline__ void forward(int t, float (&x)[kElements]) const {
    float factor[kElements], other[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) other[i] = x[i];
    exchange(other);
    load(sin, t, factor, 0.f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) other[i] *= factor[i];
    load(cos, t, factor, 1.f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) x[i] = fmaf(x[i], factor[i], other[i]);
  }

  __device__ __forceinline__ void backward(int t, float (&grad)[kElements]) const {
    float factor[kElements], other[kElements];
    load(sin, t, factor, 0.f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) other[i] = grad[i] * factor[i];
    exchange(other);
    load(cos, t, factor, 1.f);
#pragma unroll
    for (int i = 0; i < kElements; ++i) grad[i] = fmaf(grad[i], factor[i], other[i]);
  }
};

// kGeneral: there may be places, and rotated channels whose halves are not made of whole lanes.
template <class Element, int kWidth, bool kGeneral>
__global__ void __launch_bounds__(kThreads, kForwardBlocks<Element, kWidth>)
    split_heads_kernel(const __grid_constant__ SplitHeadsParams p) {
  constexpr int kStages = sizeof(Element) == 2 ? 8 : 4;
  __shared__ Ring<Element, kElements, 1, kStages, kThreads> ring;
  __shared__ float partners[kThreads / 32][32 * kElements];
  const Place at = place_of_lane<kElements, kThreads>(p.groups, 3, p.strips, p.n);
  if (at.is_idle) return;
  const HeadGroup& group = p.groups[at.group];
  const int channel = at.exists ? group.first_channel + at.head * group.width + at.column : 0, width = width_of<kWidth>(p);
  const bool is_normalized = group.norm.data != nullptr, is_rotated = at.group < 2 && p.rotated > 0;
  const HeadMean mean(at.lanes, group.width);
  const Tokens<Element> tokens(p, at, channel);
  const Turn<kElements, kGeneral> turn(p, at, partners[threadIdx.x / 32]);

  const Element* next = tokens.x + at.begin * p.x_token;  // of the token that is copied next
  const auto copy = [&](int t) {
    if (t < at.end) ring.copy(t - at.begin, 0, next, at.exists);
    ptx::cp_async_commit();
    next += p.x_token;
  };
  for (int t = 0; t < kStages - 1; ++t) copy(at.begin + t);

  float weight[kWidth][kElements], window[kWidth][kElements], gain[kElements];
#pragma unroll
  for (int s = 0; s < kWidth; ++s) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t index = int64_t{channel + i} * width + width - 1 - s;
      weight[s][i] = kWidth == 1 ? 1.f : at.exists && s < width ? load_weight<Element>(p.convolution, index) : 0.f;
      window[s][i] = 0.f;
    }
  }
#pragma unroll
  for (int s = 0; s + 1 < kWidth; ++s) {  // the token s + 1 before the first one
    const Element* source = at.exists && s + 1 < width ? tokens.find(at.begin - 1 - s) : nullptr;
    if (source == nullptr) continue;
    Slice<Element, kElements> slice;
    slice.load(source);
    slice.unpack(window[s]);
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) gain[i] = is_normalized && at.exists ? load_weight<Element>(group.norm, at.column + i) : 1.f;

  const int64_t row = int64_t{group.heads} * group.width;  // elements of a token
  Element* out = static_cast<Element*>(group.out) + (int64_t{at.batch} * p.n + at.begin) * row + at.head * group.width + at.column;
#pragma unroll kWidth <= 4 ? 4 : 1
  for (int t = at.begin; t < at.end; ++t, out += row) {
    ptx::cp_async_wait<kStages - 2>();
#pragma unroll
    for (int s = kWidth - 1; s > 0; --s) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) window[s][i] = window[s - 1][i];
    }
    ring.read(t - at.begin, 0, window[0]);
    copy(t + kStages - 1);
    const int place = kGeneral ? place_of(p, t) : INT_MAX;
    float u[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) u[i] = window[0][i] * weight[0][i];
#pragma unroll
    for (int s = 1; s < kWidth; ++s) {
      if (s >= width || (kGeneral && s > place)) continue;
#pragma unroll
      for (int i = 0; i < kElements; ++i) u[i] = fmaf(window[s][i], weight[s][i], u[i]);
    }
    if (is_normalized) {
      float sum[1] = {0.f};
#pragma unroll
      for (int i = 0; i < kElements; ++i) sum[0] = fmaf(u[i], u[i], sum[0]);
      mean.of(sum);
      const float scale = rsqrtf(sum[0] + group.eps);
#pragma unroll
      for (int i = 0; i < kElements; ++i) u[i] *= scale * gain[i];
    }
    if (is_rotated) turn.forward(t, u);
    if (at.exists) Slice<Element, kElements>::store(out, u);
  }
}

// Places in the workspace: sums of each strip for the gradients of the convolution, (width, channels), which come first, and of the
// norms, by unit.
struct Workspace {
  int64_t norms[2], end;

  __host__ __device__ explicit Workspace(const SplitHeadsParams& p) {
    const int64_t strips = int64_t{p.b} * p.strips.per_sequence;
    end = p.convolution.data == nullptr ? 0 : strips * p.width * p.channels;
    for (int i = 0; i < 2; ++i) {
      norms[i] = end;
      if (p.groups[i].norm.data != nullptr) end += strips * p.groups[i].units * p.groups[i].width;
    }
  }
};

// With z the convolution, r = 1 / rms(z) and y = r gain z, the gradient of z is r (h - z r^2 mean(h . z)) for h = gain grad y.
// Token t - s of x has weight s in token t, so its gradient is complete when the walk is width - 1 tokens further.
// kElements: columns of a lane.
template <class Element, int kWidth, bool kGeneral, int kElements, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    split_heads_backward_kernel(const __grid_constant__ SplitHeadsParams p) {
  constexpr bool kIsWide = kWidth == kMaxConvolution;  // not all fits into registers
  constexpr int kAhead = 7;                            // tokens
  constexpr int kStages = kIsWide ? 16 : 8;            // in which a wide window lies, too
  static_assert(kStages >= kAhead + (kIsWide ? kWidth : 1));
  __shared__ Ring<Element, kElements, 1, kStages, kThreads> x_ring;
  __shared__ Ring<Element, kElements, 1, 8, kThreads> grad_ring;
  __shared__ float partners[kThreads / 32][32 * kElements];
  __shared__ float wide_weight[kIsWide ? kWidth * kElements : 1][kThreads], wide_gain[kIsWide ? kElements : 1][kThreads],
      wide_partial[kIsWide ? (kWidth - 1) * kElements : 1][kThreads];
  const Place at = place_of_lane<kElements, kThreads>(p.groups, 3, p.strips, p.n);
  if (at.is_idle) return;
  const HeadGroup& group = p.groups[at.group];
  const int channel = at.exists ? group.first_channel + at.head * group.width + at.column : 0, width = width_of<kWidth>(p);
  const bool is_normalized = group.norm.data != nullptr, is_rotated = at.group < 2 && p.rotated > 0;
  const bool has_grad = at.exists && group.grad != nullptr;
  const HeadMean mean(at.lanes, group.width);
  const Tokens<Element> tokens(p, at, channel);
  const Turn<kElements, kGeneral> turn(p, at, partners[threadIdx.x / 32]);
  // Where nothing is read, a valid address.
  const Element* grad_rows = static_cast<const Element*>(group.grad == nullptr ? p.x : group.grad);
  if (has_grad) grad_rows += at.batch * group.grad_stride.batch + at.head * group.grad_stride.head + at.column;
  const int last = min(at.end + width - 1, p.n);  // token after the last one whose gradient the strip needs

  // Slots are counted from the first token that a wide window has before the strip.
  const int base = at.begin - (kIsWide ? kWidth - 1 : 0);
  if constexpr (kIsWide) {
    for (int t = base; t < at.begin; ++t) {
      const Element* source = at.exists ? tokens.find(t) : nullptr;
      x_ring.copy(t - base, 0, source == nullptr ? tokens.x : source, source != nullptr);
      ptx::cp_async_commit();
    }
  }
  const Element *next_x = tokens.x + at.begin * p.x_token, *next_grad = grad_rows + at.begin * group.grad_stride.token;
  const auto copy = [&](int t) {
    if (t < last) {
      x_ring.copy(t - base, 0, next_x, at.exists);
      grad_ring.copy(t - base, 0, next_grad, has_grad);
    }
    ptx::cp_async_commit();
    next_x += p.x_token, next_grad += group.grad_stride.token;
  };
  for (int t = at.begin; t < at.begin + kAhead; ++t) copy(t);

  constexpr int kHeld = kIsWide ? 1 : kWidth;  // weights and tokens of the window in registers
  float weights[kHeld][kElements], window[kHeld][kElements], gains[kElements];
#pragma unroll
  for (int s = 0; s < kWidth; ++s) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const int64_t index = int64_t{channel + i} * width + width - 1 - s;
      const float value = kWidth == 1 ? 1.f : at.exists && s < width ? load_weight<Element>(p.convolution, index) : 0.f;
      if constexpr (kIsWide) wide_weight[s * kElements + i][threadIdx.x] = value;
      else weights[s][i] = value, window[s][i] = 0.f;
    }
  }
  if constexpr (!kIsWide) {
#pragma unroll
    for (int s = 0; s + 1 < kWidth; ++s) {
      const Element* source = at.exists ? tokens.find(at.begin - 1 - s) : nullptr;
      if (source == nullptr) continue;
      Slice<Element, kElements> slice;
      slice.load(source);
      slice.unpack(window[s]);
    }
  }
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    const float value = is_normalized && at.exists ? load_weight<Element>(group.norm, at.column + i) : 1.f;
    if constexpr (kIsWide) wide_gain[i][threadIdx.x] = value;
    else gains[i] = value;
  }
  const auto gain = [&](int i) {
    if constexpr (kIsWide) return wide_gain[i][threadIdx.x];
    else return gains[i];
  };
  const auto weight = [&](int s, int i) {
    if constexpr (kIsWide) return wide_weight[s * kElements + i][threadIdx.x];
    else return weights[s][i];
  };

  // partial(s): the gradient of the token s + 1 before the present one, as far as it is known.
  float partials[kHeld > 1 ? kHeld - 1 : 1][kElements] = {}, of_weights[kWidth][kElements] = {}, of_gain[kElements] = {};
  const auto partial = [&](int s, int i) -> float& {
    if constexpr (kIsWide) return wide_partial[s * kElements + i][threadIdx.x];
    else return partials[s][i];
  };
  if constexpr (kIsWide) {
#pragma unroll
    for (int s = 0; s + 1 < kWidth; ++s) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) partial(s, i) = 0.f;
    }
  }
  // Of the token whose gradient the next step completes, width - 1 before the first one at first.
  Element* out = static_cast<Element*>(p.grad_x) + (int64_t{at.batch} * p.n + at.begin - (width - 1)) * p.channels + channel;
  Element* out_recent = p.grad_recent == nullptr || at.begin > 0
                            ? nullptr
                            : static_cast<Element*>(p.grad_recent) + int64_t{at.batch} * (width - 1) * p.channels + channel;
  // One token of the walk. kInside: it is of the strip, and so is the token whose gradient it completes.
  const auto step = [&](int t, auto inside) {
    constexpr bool kInside = decltype(inside)::value;
    ptx::cp_async_wait<kAhead - 1>();
    float x[kElements], u[kElements], grad[kElements];
    x_ring.read(t - base, 0, x);
    grad_ring.read(t - base, 0, grad);
    copy(t + kAhead);
    if constexpr (!kIsWide) {
#pragma unroll
      for (int s = kWidth - 1; s > 0; --s) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) window[s][i] = window[s - 1][i];
      }
#pragma unroll
      for (int i = 0; i < kElements; ++i) window[0][i] = x[i];
    }
    const int place = kGeneral && t < p.n ? place_of(p, t) : INT_MAX;
    const auto for_window = [&](const auto& function) {  // calls function(s, x) for the tokens of the sequence in the window
#pragma unroll
      for (int s = 0; s < kWidth; ++s) {
        if constexpr (kIsWide) {
          if (s >= width || (kGeneral && s > place)) continue;
          float earlier[kElements];
          x_ring.read(t - base - s, 0, earlier);
          function(s, earlier);
        } else {
          if (kGeneral && s > place) continue;
          function(s, window[s]);
        }
      }
    };
    if (!kInside && t >= p.n) {  // there is no such token; gradients of earlier ones are still to be stored
#pragma unroll
      for (int i = 0; i < kElements; ++i) u[i] = 0.f;
    } else {
      if (is_rotated) turn.backward(t, grad);
      if (is_normalized) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) u[i] = 0.f;
        for_window([&](int s, const float(&earlier)[kElements]) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) u[i] = fmaf(earlier[i], weight(s, i), u[i]);
        });
        float sums[2] = {0.f, 0.f};
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          sums[0] = fmaf(u[i], u[i], sums[0]);
          sums[1] = fmaf(grad[i] * gain(i), u[i], sums[1]);
        }
        mean.of(sums);
        const float scale = rsqrtf(sums[0] + group.eps), along = scale * scale * sums[1];
#pragma unroll
        for (int i = 0; i < kElements; ++i) {
          if (kInside || t < at.end) of_gain[i] = fmaf(grad[i], u[i] * scale, of_gain[i]);
          u[i] = scale * fmaf(-along, u[i], grad[i] * gain(i));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kElements; ++i) u[i] = grad[i];
      }
    }
    // u is now the gradient of the convolution at t.
    if (kWidth > 1 && (kInside || t < at.end)) {
      for_window([&](int s, const float(&earlier)[kElements]) {
#pragma unroll
        for (int i = 0; i < kElements; ++i) of_weights[s][i] = fmaf(u[i], earlier[i], of_weights[s][i]);
      });
    }
    float done[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) done[i] = u[i] * weight(0, i);
#pragma unroll
    for (int s = 1; s < kWidth; ++s) {
      if (kIsWide && s >= width) break;
      const bool reaches = !kGeneral || s <= place;
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        float& earlier = partial(s - 1, i);
        const float sum = reaches ? fmaf(u[i], weight(s, i), earlier) : earlier;
        earlier = done[i], done[i] = sum;
      }
    }
    const int token = t - (width - 1);  // whose gradient is done
    if (at.exists && (kInside || token >= at.begin)) {
      Slice<Element, kElements>::store(out, done);
    } else if (!kInside && at.exists && out_recent != nullptr) {  // width - 1 tokens before the first
      Slice<Element, kElements>::store(out_recent + int64_t{token - at.begin + width - 1} * p.channels, done);
    }
    out += p.channels;
  };
  int t = at.begin;
#pragma unroll 1
  for (; t < min(at.begin + width - 1, at.end); ++t) step(t, std::false_type());
#pragma unroll kWidth <= 4 ? 4 : 1
  for (; t < at.end; ++t) step(t, std::true_type());
#pragma unroll 1
  for (; t < at.end + width - 1; ++t) step(t, std::false_type());

  const Workspace workspace(p);
  if (kWidth > 1 && at.exists) {
#pragma unroll
    for (int s = 0; s < kWidth; ++s) {
      if (kIsWide && s >= width) break;
      store_sums(p.workspace + (at.strip * width + s) * p.channels + channel, of_weights[s]);
    }
  }
  if (is_normalized) {
    sum_over_heads(of_gain, at.lanes);
    if (static_cast<int>(threadIdx.x % 32) < at.lanes && at.column < group.width) {
      store_sums(p.workspace + (at.group == 0 ? workspace.norms[0] : workspace.norms[1]) + (at.strip * group.units + at.unit) * group.width + at.column, of_gain);
    }
  }
}

unsigned blocks(const SplitHeadsParams& p, int threads) {
  const int warps = threads / 32;
  return grid_1d((p.strips.warps + warps - 1) / warps);
}

// Calls function(std::bool_constant<kGeneral>()).
template <class Function>
void with_general(const SplitHeadsParams& p, const Function& function) {
  p.places == nullptr && p.rotated % (2 * kElements) == 0 ? function(std::false_type()) : function(std::true_type());
}

}  // namespace

template <class Math>
void SplitHeads<Math>::forward(SplitHeadsParams p, cudaStream_t stream) {
  using Element = typename Math::Element;
  const auto launch = [&](auto width, auto general) {
    const int warps = p.sm_count * kForwardBlocks<Element, width> * kThreads / 32;
    divide(p.groups, 3, p.strips, p.b, p.n, kElements, warps, p.width + 3);
    launch_kernel("split_heads", split_heads_kernel<Element, width, general>, blocks(p, kThreads), kThreads, 0, stream, p);
  };
  with_general(p, [&](auto general) {
    switch (p.width) {
      case 1: return launch(std::integral_constant<int, 1>(), general);
      case 2: return launch(std::integral_constant<int, 2>(), general);
      case 3: return launch(std::integral_constant<int, 3>(), general);
      case 4: return launch(std::integral_constant<int, 4>(), general);
      default: return launch(std::integral_constant<int, kMaxConvolution>(), std::true_type());
    }
  });
}

template <class Math>
int64_t SplitHeads<Math>::backward(SplitHeadsParams p, cudaStream_t stream, bool measure) {
  using Element = typename Math::Element;
  int64_t floats = 0;
  const auto launch = [&](auto kernel, int elements, int threads, int blocks_per_sm) {
    divide(p.groups, 3, p.strips, p.b, p.n, elements, p.sm_count * blocks_per_sm * threads / 32, 2 * p.width + 3);
    const Workspace workspace(p);
    floats = workspace.end;
    if (measure) return;
    launch_kernel("split_heads_backward", kernel, blocks(p, threads), threads, 0, stream, p);
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
  constexpr int kBlocks = sizeof(Element) == 2 ? 4 : 3;
  with_general(p, [&](auto general) {
    if (p.width > 4 || (widest > 128 && p.width > 1 && p.width < 4)) {
      return launch(split_heads_backward_kernel<Element, kMaxConvolution, true, 8, 32, 1>, 8, 32, 6);
    }
    if (widest > 128 && p.width == 1) return launch(split_heads_backward_kernel<Element, 1, true, 8, 64, 4>, 8, 64, 4);
    if (widest > 128) return launch(split_heads_backward_kernel<Element, 4, true, 8, 64, 4>, 8, 64, 4);
    switch (p.width) {
      case 1: return launch(split_heads_backward_kernel<Element, 1, general, 4, 128, kBlocks>, 4, 128, kBlocks);
      case 2: return launch(split_heads_backward_kernel<Element, 2, general, 4, 128, kBlocks>, 4, 128, kBlocks);
      case 3: return launch(split_heads_backward_kernel<Element, 3, general, 4, 128, 3>, 4, 128, 3);
      default: return launch(split_heads_backward_kernel<Element, 4, general, 4, 128, 3>, 4, 128, 3);
    }
  });
  return floats;
}

template struct SplitHeads<FASTMAX_MATH>;

}  // namespace fastmax
