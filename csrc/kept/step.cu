// A token of a layer with kept keys. A thread block has a key/value head, and its query heads one after the other.

#include "core/dtype.h"
#include "core/heads.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "core/vector.h"
#include "kept/kept.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr double kLeastDecay = -1000.0;  // whose exp is 0, in float64 too
constexpr int kMaxWidth = kThreads;      // of q, k and v

// Returns combine(...) of x of all threads. The threads share `warps`, which the next call may overwrite.
template <class T, class Combine>
__device__ __forceinline__ T of_all_threads(T x, Combine combine, T* warps) {
  x = reduce_lanes(x, combine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  x = warps[0];
  for (int i = 1; i < kWarps; ++i) x = combine(x, warps[i]);
  return x;
}

// What the threads of a block share. factor and position are those of the slots, with the token's decay.
struct Shared {
  double factor[kMaxSlots];
  int position[kMaxSlots];
  float weight[kMaxSlots];
  float query[kMaxWidth];
  float part[kThreads];
  float floats[kWarps];
  int ints[kWarps];
};

// Returns whether a key is kept rather than another: by the larger factor, where NaN is the largest, or the later position.
__device__ __forceinline__ bool outranks(double factor, int position, double other_factor, int other_position) {
  const bool is_nan = isnan(factor), other_is_nan = isnan(other_factor);
  if (is_nan != other_is_nan) return is_nan;
  if (!is_nan && factor != other_factor) return factor > other_factor;
  return position > other_position;
}

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads, 2) kept_step_kernel(const KeptStepParams p) {
  extern __shared__ __align__(128) char shared[];
  Shared& s = *reinterpret_cast<Shared*>(shared);
  const int batch = blockIdx.x / p.hk, own = blockIdx.x % p.hk, thread = static_cast<int>(threadIdx.x);
  const int64_t first_slot = int64_t{blockIdx.x} * p.slots;
  Element* keys = static_cast<Element*>(p.keys) + first_slot * p.d;
  Element* values = static_cast<Element*>(p.values) + first_slot * p.dv;
  double* log_factors = p.log_factors + first_slot;
  int64_t* positions = p.positions + first_slot;
  const int now = static_cast<int>(p.token_positions[batch]);
  const int count = p.token_count == nullptr ? 1 : static_cast<int>(p.token_count[batch]);

  double decay = 0.0;
  if (p.log_decay != nullptr) decay = *head_of<float>(p.log_decay, p.log_decay_stride, batch, own);
  if (decay < kLeastDecay) decay = kLeastDecay;
  int least = INT_MAX;  // position
  for (int i = thread; i < p.slots; i += kThreads) {
    s.factor[i] = log_factors[i] + decay;
    s.position[i] = static_cast<int>(positions[i]);
    if (p.log_decay != nullptr) log_factors[i] = s.factor[i];
    least = min(least, s.position[i]);
  }
  const auto smaller = [](int x, int y) { return min(x, y); };
  least = of_all_threads(least, smaller, s.ints);
  int slot = INT_MAX;  // the first one with this position: a free one
  for (int i = thread; i < p.slots; i += kThreads) {
    if (s.position[i] == least) slot = min(slot, i);
  }
  slot = of_all_threads(slot, smaller, s.ints);
  // This key is within the window, and no candidate: the rest of this step does not see it.
  if (count > 0) {
    const Element* k = head_of<Element>(p.k, p.k_stride, batch, own);
    const Element* v = head_of<Element>(p.v, p.v_stride, batch, own);
    for (int c = thread; c < p.d; c += kThreads) keys[int64_t{slot} * p.d + c] = k[c];
    for (int c = thread; c < p.dv; c += kThreads) values[int64_t{slot} * p.dv + c] = v[c];
    if (thread == 0) {
      log_factors[slot] = *head_of<float>(p.log_input_gate, p.log_input_gate_stride, batch, own);
      positions[slot] = now;
      s.position[slot] = -1;
    }
  }

  const int group = p.h / p.hk, columns = p.dv, parts = kThreads / columns, part = thread / columns, column = thread % columns;
  const int last = now - p.window;  // position of the last visible key
  for (int i = 0; i < group; ++i) {
    const int head = own * group + i;
    const Element* q = head_of<Element>(p.q, p.q_stride, batch, head);
    for (int c = thread; c < p.d; c += kThreads) s.query[c] = p.scale * to_float(q[c]);
    __syncthreads();  // also before the slot is read as hidden
    float largest = -INFINITY;
    for (int j = thread; j < p.slots; j += kThreads) {
      float score = -INFINITY;
      if (s.position[j] >= 0 && s.position[j] <= last) {
        score = 0.f;
        const auto* row = reinterpret_cast<const Vector<Element, kElements>*>(keys + int64_t{j} * p.d);
#pragma unroll 2
        for (int c = 0; c < p.d / kElements; ++c) {
          const Vector<Element, kElements> words = row[c];
#pragma unroll
          for (int e = 0; e < kElements; ++e) score = fmaf(s.query[c * kElements + e], to_float(words.x[e]), score);
        }
        score += static_cast<float>(s.factor[j]);
      }
      s.weight[j] = score;
      largest = fmaxf(largest, score);
    }
    largest = of_all_threads(largest, [](float x, float y) { return fmaxf(x, y); }, s.floats);
    const float base = largest == -INFINITY ? 0.f : largest;
    float sum = 0.f;
    for (int j = thread; j < p.slots; j += kThreads) {
      s.weight[j] = expf(s.weight[j] - base);
      sum += s.weight[j];
    }
    sum = of_all_threads(sum, [](float x, float y) { return x + y; }, s.floats);

    float total = 0.f;
    if (part < parts) {
      for (int j = part; j < p.slots; j += parts) {
        if (s.weight[j] != 0.f) total = fmaf(s.weight[j], to_float(values[int64_t{j} * p.dv + column]), total);
      }
    }
    s.part[thread] = total;
    __syncthreads();
    if (part == 0) {
      for (int j = 1; j < parts; ++j) total += s.part[j * columns + column];
      const int64_t at = int64_t{batch} * p.h + head;
      static_cast<Element*>(p.o)[at * p.dv + column] = from_float<Element>(sum == 0.f ? 0.f : total / sum);
      if (column == 0) p.lse[at] = base + logf(sum);
    }
  }

  const int stop = now + count, first = stop - stop % p.block - p.window;  // keys before `first` must be chosen to be kept
  int candidates = 0;
  for (int i = thread; i < p.slots; i += kThreads) candidates += s.position[i] >= 0 && s.position[i] < first;
  candidates = of_all_threads(candidates, [](int x, int y) { return x + y; }, s.ints);
  if (candidates <= p.kept) return;
  for (int i = thread; i < p.slots; i += kThreads) {
    if (s.position[i] < 0 || s.position[i] >= first) continue;
    int before = 0;
    for (int j = 0; j < p.slots; ++j) {
      before += s.position[j] >= 0 && s.position[j] < first && outranks(s.factor[j], s.position[j], s.factor[i], s.position[i]);
    }
    if (before >= p.kept) positions[i] = -1;
  }
}

}  // namespace

void launch_kept_step(const KeptStepParams& p, cudaStream_t stream) {
  const unsigned grid = grid_1d(int64_t{p.b} * p.hk);
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    launch_kernel("kept_step", kept_step_kernel<decltype(element), elements()>, grid, kThreads, sizeof(Shared), stream, p);
  });
}

}  // namespace fastmax
