// A token of a layer with kept keys. A thread block has a key/value head, and its query heads one after the other.

#include "core/dtype.h"
#include "core/heads.h"
#include "core/lanes.h"
#include "core/launch.h"
#include "core/vector.h"
#include "kept/kept.h"

namespace fastmax {
namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr double kLeastDecay = -1000.0;  // whose exp is 0, in float64 too
constexpr int kMaxWidth = 256;           // of q, k and v
constexpr int kMaxElements = 8;          // of a word
constexpr int kFewLanes = 16;            // that have a row of 16 words or fewer
constexpr int kKeysAtOnce = 4, kValuesAtOnce = 8;  // rows whose loads a thread has in flight

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
  alignas(16) float query[kMaxWidth];
  alignas(16) float sums[kThreads * kMaxElements];  // of values: a thread adds up `kMaxElements` columns or fewer of some rows
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

// Writes the score of each key and its log factor to `weight`, -inf for hidden keys. Returns the largest of those of this thread.
// kLanes neighbouring threads have a row.
template <int kLanes, class Element, int kElements>
__device__ __forceinline__ float score_keys(const KeptStepParams& p, Shared& s, const Element* keys, int last) {
  constexpr int kRows = kThreads / kLanes;  // at a time
  const int lane = threadIdx.x % kLanes, words = p.d / kElements;
  float largest = -INFINITY;
  for (int begin = 0; begin < p.slots; begin += kKeysAtOnce * kRows) {
    const int first = begin + threadIdx.x / kLanes;
    bool visible[kKeysAtOnce];
    float score[kKeysAtOnce] = {};
#pragma unroll
    for (int r = 0; r < kKeysAtOnce; ++r) {
      const int j = first + r * kRows;
      visible[r] = j < p.slots && s.position[j] >= 0 && s.position[j] <= last;
    }
    for (int c = lane; c < words; c += kLanes) {
      Vector<Element, kElements> word[kKeysAtOnce] = {};
#pragma unroll
      for (int r = 0; r < kKeysAtOnce; ++r) {
        const auto* row = reinterpret_cast<const Vector<Element, kElements>*>(keys + int64_t{first + r * kRows} * p.d);
        if (visible[r]) word[r] = row[c];
      }
#pragma unroll
      for (int e = 0; e < kElements; ++e) {
        const float q = s.query[c * kElements + e];
#pragma unroll
        for (int r = 0; r < kKeysAtOnce; ++r) score[r] = fmaf(q, to_float(word[r].x[e]), score[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kKeysAtOnce; ++r) {
      const int j = first + r * kRows;
      const float sum = sum_of_lanes<kLanes>(score[r]);
      if (lane != 0 || j >= p.slots) continue;
      s.weight[j] = visible[r] ? sum + static_cast<float>(s.factor[j]) : -INFINITY;
      largest = fmaxf(largest, s.weight[j]);
    }
  }
  return largest;
}

// Writes sums of weighted rows of v to `sums`, a row of them for every `words` threads. Returns the number of rows.
template <class Element, int kElements>
__device__ __forceinline__ int add_values(const KeptStepParams& p, Shared& s, const Element* values) {
  const int words = p.dv / kElements, parts = kThreads / words, part = threadIdx.x / words, word = threadIdx.x % words;
  if (part >= parts) return parts;
  float total[kElements] = {};
  for (int first = part; first < p.slots; first += kValuesAtOnce * parts) {
    Vector<Element, kElements> row[kValuesAtOnce] = {};
    float weight[kValuesAtOnce];
#pragma unroll
    for (int r = 0; r < kValuesAtOnce; ++r) {
      const int j = first + r * parts;
      weight[r] = j < p.slots ? s.weight[j] : 0.f;
      // A free slot may hold anything.
      if (weight[r] != 0.f) row[r] = reinterpret_cast<const Vector<Element, kElements>*>(values + int64_t{j} * p.dv)[word];
    }
#pragma unroll
    for (int r = 0; r < kValuesAtOnce; ++r) {
#pragma unroll
      for (int e = 0; e < kElements; ++e) total[e] = fmaf(weight[r], to_float(row[r].x[e]), total[e]);
    }
  }
#pragma unroll
  for (int e = 0; e < kElements; ++e) s.sums[part * p.dv + word * kElements + e] = total[e];
  return parts;
}

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads, 1) kept_step_kernel(const KeptStepParams p) {
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

  const int group = p.h / p.hk;
  const int last = now - p.window;  // position of the last visible key
  for (int i = 0; i < group; ++i) {
    const int head = own * group + i;
    const Element* q = head_of<Element>(p.q, p.q_stride, batch, head);
    for (int c = thread; c < p.d; c += kThreads) s.query[c] = p.scale * to_float(q[c]);
    __syncthreads();  // also before the slot is read as hidden
    const bool is_short = p.d / kElements <= kFewLanes;
    float largest = is_short ? score_keys<kFewLanes, Element, kElements>(p, s, keys, last) : score_keys<32, Element, kElements>(p, s, keys, last);
    const float lse = *head_of<float>(p.other_lse, p.other_lse_stride, batch, head);
    largest = of_all_threads(fmaxf(largest, lse), [](float x, float y) { return fmaxf(x, y); }, s.floats);
    const float base = largest == -INFINITY ? 0.f : largest;
    float sum = 0.f;
    for (int j = thread; j < p.slots; j += kThreads) {
      s.weight[j] = expf(s.weight[j] - base);
      sum += s.weight[j];
    }
    sum = of_all_threads(sum, [](float x, float y) { return x + y; }, s.floats);
    const float of_other = expf(lse - base);
    sum += of_other;

    const int parts = add_values<Element, kElements>(p, s, values);
    __syncthreads();
    const Element* other = head_of<Element>(p.other, p.other_stride, batch, head);
    for (int c = thread; c < p.dv; c += kThreads) {
      float total = of_other == 0.f ? 0.f : of_other * to_float(other[c]);
      for (int j = 0; j < parts; ++j) total += s.sums[j * p.dv + c];
      const int64_t at = int64_t{batch} * p.h + head;
      static_cast<Element*>(p.o)[at * p.dv + c] = from_float<Element>(sum == 0.f ? 0.f : total / sum);
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
