// What the kernels of split_heads are made of: tokens of the input, factors of the rotation, the rotation, sums of strips.
#pragma once

#include "layer/walk.h"

namespace fastmax {

inline constexpr int kNarrow = 4;  // the widest convolution whose weights, tokens and sums fit into registers in a backward

// kWidth: width of the convolution. kIsExact: it is that wide; otherwise up to that.
template <int kWidth, bool kIsExact>
__device__ __forceinline__ int width_of(const SplitHeadsParams& p) {
  return kIsExact ? kWidth : p.width;
}

// Number of tokens before token t in its sequence; beyond kMaxConvolution it does not matter.
__device__ __forceinline__ int place_of(const SplitHeadsParams& p, int t) {
  if (p.places == nullptr || t >= p.n) return INT_MAX;
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

  // Loads the tokens before token t, the last one first.
  template <int kCount, int kElements>
  __device__ __forceinline__ void load_before(int t, bool exists, float (&x)[kCount][kElements]) const {
#pragma unroll
    for (int s = 0; s < kCount; ++s) {
      const Element* source = exists && s < before ? find(t - 1 - s) : nullptr;
      Slice<Element, kElements> slice{};
      if (source != nullptr) slice.load(source);
      slice.unpack(x[s]);
    }
  }
};

// The weight of the token s before the present one, for channel i of a lane that has them from `channel` on.
template <class Element>
__device__ __forceinline__ float weight_of(const SplitHeadsParams& p, int width, int channel, int s, int i) {
  return load_weight<Element>(p.convolution, int64_t{channel + i} * width + width - 1 - s);
}

// Returns where a lane has its gradient of token 0. Where nothing is read, a valid address.
template <class Element>
__device__ __forceinline__ const Element* grad_of_lane(const SplitHeadsParams& p, const Place& at) {
  const HeadGroup& group = p.groups[at.group];
  if (group.grad == nullptr || !at.exists) return static_cast<const Element*>(p.x);
  const Stride& stride = group.grad_stride;
  return static_cast<const Element*>(group.grad) + at.batch * stride.batch + at.head * stride.head + at.column;
}

// Returns where a lane stores the gradient of token t of p.recent, which is before the first token, or null if there is none.
template <class Element>
__device__ __forceinline__ Element* grad_of_recent(const SplitHeadsParams& p, const Place& at, int channel, int t) {
  if (p.grad_recent == nullptr || at.begin > 0 || !at.exists) return nullptr;
  const int before = p.width - 1;
  return static_cast<Element*>(p.grad_recent) + (int64_t{at.batch} * before + before + t) * p.channels + channel;
}

// cos and sin of kBatch tokens in a row, which a warp copies to its part of dynamic shared memory. All lanes read them, so
// barriers of the warp are due between a copy and its use, and before the slot is copied to again.
// kPiece: floats of a copy; the number of columns that turn is a multiple.
template <int kBatch, int kSlots, int kPiece>
struct Factors {
  const float* shared;
  const float *cos, *sin;
  int rotated;
  // Where the lane copies from, in cos and sin, and to.
  int64_t next;
  uint32_t address;

  static int bytes(int rotated, int warps) { return warps * kSlots * 2 * kBatch * rotated * static_cast<int>(sizeof(float)); }

  __device__ __forceinline__ Factors(const SplitHeadsParams& p, const Place& at, const float* block)
      : shared(block + threadIdx.x / 32 * (kSlots * 2 * kBatch * p.rotated)),
        cos(p.cos),
        sin(p.sin),
        rotated(p.rotated),
        next(at.batch * p.rotation_batch + int64_t{at.begin} * p.rotated + first()),
        address(ptx::keep_in_register(ptx::smem_address(shared) + first() * sizeof(float))) {}

  // Copies the factors of the next tokens, as many as there are.
  __device__ __forceinline__ void copy(int slot, int tokens) {
    const int floats = min(tokens, kBatch) * rotated - first();
    const uint32_t target = address + slot * 2 * kBatch * rotated * sizeof(float);
#pragma unroll 1
    for (int i = 0; i < floats; i += 32 * kPiece) {
      copy_piece(target + i * sizeof(float), cos + next + i);
      copy_piece(target + (kBatch * rotated + i) * sizeof(float), sin + next + i);
    }
    next += kBatch * rotated;
  }
  __device__ __forceinline__ const float* cos_of(int slot) const { return shared + slot * 2 * kBatch * rotated; }
  __device__ __forceinline__ const float* sin_of(int slot) const { return cos_of(slot) + kBatch * rotated; }

 private:
  static __device__ __forceinline__ int first() { return threadIdx.x % 32 * kPiece; }
  static __device__ __forceinline__ void copy_piece(uint32_t target, const float* source) {
    if constexpr (kPiece == 4) ptx::cp_async_16(target, source, 16);
    else ptx::cp_async_small<4 * kPiece>(target, source, 4 * kPiece);
  }
};

// Rotation of the first p.rotated columns of a head, of which a lane has kElements. cos and sin are those of the first token,
// and p.rotated floats per token.
// kAligned: all columns of a lane have their partners in one other lane.
template <int kElements, bool kAligned>
struct Turn {
  int rotated, column, partner;
  bool turns, is_aligned;
  float* buffer;  // of the warp, 32 kElements floats; where the partners are in several lanes

  __device__ __forceinline__ Turn(const SplitHeadsParams& p, const Place& at, float* buffer)
      : rotated(p.rotated),
        column(at.column),
        turns(at.column < p.rotated),
        is_aligned(kAligned || p.rotated % (2 * kElements) == 0),
        buffer(buffer) {
    const int half = rotated / 2, lane = threadIdx.x % 32;
    partner = !turns ? lane : column < half ? lane + half / kElements : lane - half / kElements;
  }

  template <int kTokens>
  __device__ __forceinline__ void forward(const float* cos, const float* sin, float (&x)[kTokens][kElements]) const {
    float other[kTokens][kElements];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) other[j][i] = x[j][i];
      exchange(other[j]);
    }
    if (!turns) return;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float factor[kElements];
      load(sin + j * rotated, factor);
#pragma unroll
      for (int i = 0; i < kElements; ++i) other[j][i] *= factor[i];
      load(cos + j * rotated, factor);
      add(x[j], factor, other[j]);
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void backward(const float* cos, const float* sin, float (&grad)[kTokens][kElements]) const {
    float other[kTokens][kElements];
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float factor[kElements];
      load(sin + j * rotated, factor);
#pragma unroll
      for (int i = 0; i < kElements; ++i) other[j][i] = grad[j][i] * factor[i];
    }
#pragma unroll
    for (int j = 0; j < kTokens; ++j) exchange(other[j]);
    if (!turns) return;
#pragma unroll
    for (int j = 0; j < kTokens; ++j) {
      float factor[kElements];
      load(cos + j * rotated, factor);
      add(grad[j], factor, other[j]);
    }
  }

 private:
  // Loads the factors of a token. Those of columns that do not turn are not used.
  __device__ __forceinline__ void load(const float* row, float (&factor)[kElements]) const {
    if (is_aligned) {
      row += turns ? column : 0;
#pragma unroll
      for (int i = 0; i < kElements; i += 4) {
        const float4 four = *reinterpret_cast<const float4*>(row + i);
        factor[i] = four.x, factor[i + 1] = four.y, factor[i + 2] = four.z, factor[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) factor[i] = row[column + i < rotated ? column + i : 0];
    }
  }

  // Replaces each column that turns by its partner. All lanes of the warp take part.
  __device__ __forceinline__ void exchange(float (&x)[kElements]) const {
    if (is_aligned) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) x[i] = __shfl_sync(~0u, x[i], partner);
    } else {
      const int half = rotated / 2, lane = threadIdx.x % 32, row = lane * kElements - column;
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kElements; ++i) buffer[lane * kElements + i] = x[i];
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        const int own = column + i;
        if (own < rotated) x[i] = buffer[row + (own < half ? own + half : own - half)];
      }
    }
  }

  __device__ __forceinline__ void add(float (&x)[kElements], const float (&factor)[kElements],
                                      const float (&other)[kElements]) const {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (is_aligned || column + i < rotated) x[i] = fmaf(x[i], factor[i], other[i]);
    }
  }
};

// Places in the workspace: sums of each strip for the gradients of the convolution, (width, channels), which come first, and of
// the norms, by unit.
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

  // Stores the sums of a lane for the convolution. sums: of the token itself, of the one before, and so on.
  template <int kWidth, int kElements>
  static __device__ __forceinline__ void store_convolution(const SplitHeadsParams& p, const Place& at, int channel, int width,
                                                           const float (&sums)[kWidth][kElements]) {
    if (!at.exists) return;
    const int64_t strip = at.strip(p.strips);
#pragma unroll
    for (int s = 0; s < kWidth; ++s) {
      if (s < width) store_sums(p.workspace + (strip * width + s) * p.channels + channel, sums[s]);
    }
  }

  // Adds the sums of the heads of a warp, and stores them. All lanes take part.
  template <int kElements>
  static __device__ __forceinline__ void store_norm(const SplitHeadsParams& p, const Place& at, float (&sums)[kElements]) {
    const HeadGroup& group = p.groups[at.group];
    const Workspace workspace(p);
    sum_over_heads(sums, at.lanes);
    if (static_cast<int>(threadIdx.x % 32) >= at.lanes || at.column >= group.width) return;
    const int64_t first = at.group == 0 ? workspace.norms[0] : workspace.norms[1];
    store_sums(p.workspace + first + (at.strip(p.strips) * group.units + at.unit) * group.width + at.column, sums);
  }
};

}  // namespace fastmax
