// The keys that each block of queries weighs by exp of their score, and the gradients of the keys.

#include "core/dtype.h"
#include "core/heads.h"
#include "core/launch.h"
#include "core/search.h"
#include "core/vector.h"
#include "kept/kept.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// Returns the key of a place of a block, or -1. head: of the flattened batch and heads.
__device__ __forceinline__ int key_at(const PlacesParams& p, int head, int block, int place) {
  int64_t key = -1;
  if (place < p.kept) {
    key = p.kept_keys[(int64_t{head} * p.blocks + block) * p.kept + place];
  } else {
    const int64_t* recent = p.recent + head / p.hk * p.recent_batch + int64_t{block} * 3;
    const int i = place - p.kept;
    if (i >= recent[1] && i < recent[2]) key = recent[0] + i;
  }
  return key >= 0 && key < p.m ? static_cast<int>(key) : -1;  // in bounds whatever the caller passes
}

// Returns the head of a block in tensors with a batch entry for each block.
__device__ __forceinline__ int64_t head_of_block(const PlacesParams& p, int head, int block) {
  return (int64_t{head / p.hk} * p.blocks + block) * p.hk + head % p.hk;
}

// Replaces each of `count` values by the least one from it on. The threads share `least`, of kThreads.
__device__ __forceinline__ void least_from_each_on(double* values, int count, double* least) {
  const int per_thread = (count + kThreads - 1) / kThreads, thread = static_cast<int>(threadIdx.x);
  const int begin = thread * per_thread, end = min(count, begin + per_thread);
  double own = INFINITY;
  for (int i = end - 1; i >= begin; --i) own = values[i] = fmin(own, values[i]);
  least[thread] = own;
  __syncthreads();
  for (int distance = 1; distance < kThreads; distance *= 2) {
    const double other = thread + distance < kThreads ? least[thread + distance] : INFINITY;
    __syncthreads();
    least[thread] = fmin(least[thread], other);
    __syncthreads();
  }
  const double later = thread + 1 < kThreads ? least[thread + 1] : INFINITY;
  for (int i = begin; i < end; ++i) values[i] = fmin(values[i], later);
  __syncthreads();
}

template <class Element, int kElements>
__device__ __forceinline__ void copy_rows(const Element* from, int64_t stride, int width, const int* keys, int places, Element* to) {
  using Words = Vector<Element, kElements>;
  constexpr int kInFlight = 4;
  const int words = width / kElements, count = places * words;
  for (int begin = threadIdx.x; begin < count; begin += kInFlight * kThreads) {
    Words rows[kInFlight];
#pragma unroll
    for (int c = 0; c < kInFlight; ++c) {
      const int i = begin + c * kThreads, key = i < count ? keys[i / words] : -1;
      rows[c] = key < 0 ? Words{} : *reinterpret_cast<const Words*>(from + key * stride + i % words * kElements);
    }
#pragma unroll
    for (int c = 0; c < kInFlight; ++c) {
      const int i = begin + c * kThreads;
      if (i < count) reinterpret_cast<Words*>(to)[i] = rows[c];
    }
  }
}

template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads, 4) gather_kernel(const GatherParams p) {
  extern __shared__ __align__(128) char shared[];
  const int places = p.kept + p.block;
  double* factor = reinterpret_cast<double*>(shared);
  double* least = factor + places;
  double* scan = least + places;
  int* keys = reinterpret_cast<int*>(scan + kThreads);
  const int head = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks, batch = head / p.hk, own = head % p.hk;
  const int64_t out = head_of_block(p, head, block) * places;

  const double* log_factor = head_of<double>(p.log_factor, p.log_factor_stride, batch, own);
  for (int i = threadIdx.x; i < places; i += kThreads) {
    const int key = keys[i] = key_at(p, head, block, i);
    double x = key < 0 ? 0.0 : log_factor[key * p.log_factor_stride.token];
    if (!isfinite(x)) x = NAN;  // which must not reach earlier places
    factor[i] = x;
    least[i] = key < 0 || isnan(x) ? INFINITY : x;
    if (own == 0) p.has_key[(int64_t{batch} * p.blocks + block) * places + i] = key >= 0;
  }
  __syncthreads();
  if (p.log_decay != nullptr) least_from_each_on(least, places, scan);
  for (int i = threadIdx.x; i < places; i += kThreads) {
    if (p.log_decay == nullptr) {
      p.gate[out + i] = static_cast<float>(factor[i]);
      continue;
    }
    p.gate[out + i] = keys[i] < 0 ? 0.f : static_cast<float>(factor[i] - least[i]);
    const double decay = i == 0 ? 0.0 : least[i - 1] - least[i];  // NaN or -inf where no key follows
    p.log_decay[out + i] = decay > -INFINITY ? static_cast<float>(decay) : 0.f;
    const int query = i - p.kept;
    if (query >= 0) p.least[head_of_block(p, head, block) * p.block + query] = least[i] == INFINITY ? 0.0 : least[i];
  }
  const auto copy = [&](const void* from, const Stride& stride, int width, void* to) {
    const Element* rows = head_of<Element>(from, stride, batch, own);
    copy_rows<Element, kElements>(rows, stride.token, width, keys, places, static_cast<Element*>(to) + out * width);
  };
  copy(p.k, p.k_stride, p.d, p.keys);
  copy(p.v, p.v_stride, p.dv, p.values);
}

// The place of each key among the kept keys of the next block, or -1: (b * hk, blocks, places).
__global__ void __launch_bounds__(kThreads) next_places_kernel(const PlacesParams p, int* __restrict__ next) {
  extern __shared__ __align__(128) char shared[];
  int* list = reinterpret_cast<int*>(shared);
  const int places = p.kept + p.block, head = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks;
  const bool is_last = block + 1 == p.blocks;
  for (int i = threadIdx.x; i < p.kept && !is_last; i += kThreads) list[i] = key_at(p, head, block + 1, i);
  __syncthreads();
  for (int i = threadIdx.x; i < places; i += kThreads) {
    const int key = is_last ? -1 : key_at(p, head, block, i);
    const int place = key < 0 ? p.kept : first_where(p.kept, [&](int j) { return list[j] >= key; });
    next[int64_t{blockIdx.x} * places + i] = place < p.kept && list[place] == key ? place : -1;
  }
}

// The places of a key in consecutive blocks, from its first place on. A key that a block keeps or has among its recent keys is in the next
// block's list or in no later one.
struct Chain {
  const int* next;  // of the head, from block 0 on
  int places, block, place;

  // Goes on to the next block; returns whether it has the key.
  __device__ __forceinline__ bool advance() {
    place = next[int64_t{block} * places + place];
    ++block;
    return place >= 0;
  }
};

// Returns the sum of the gradients of a few columns over the places of a key, in the order of the blocks.
//
// grad: of the head in block 0, from the first of the columns on; `block_stride` from block to block, `row` from place to place.
template <int kElements, class Element>
__device__ __forceinline__ Vector<float, kElements> sum_of(Chain at, const Element* grad, int64_t block_stride, int row) {
  using Words = Vector<Element, kElements>;
  const auto load = [&] { return *reinterpret_cast<const Words*>(grad + at.block * block_stride + int64_t{at.place} * row); };
  Vector<float, kElements> total{};
  const auto add = [&](const Words& words) {
#pragma unroll
    for (int c = 0; c < kElements; ++c) total.x[c] += to_float(words.x[c]);
  };
  Words words = load();
  while (at.advance()) {  // waits for the next place alone: a row is added when the one after it is on its way
    const Words later = load();
    add(words);
    words = later;
  }
  add(words);
  return total;
}

// Each thread block writes the sums of the keys whose first place is in one block of queries: the recent keys, and in the first block the
// kept ones too.
template <class Element, int kElements>
__global__ void __launch_bounds__(kThreads) gather_backward_kernel(const GatherBackwardParams p, const int* __restrict__ next) {
  const int places = p.kept + p.block, head = blockIdx.x / p.blocks, block = blockIdx.x % p.blocks, batch = head / p.hk, own = head % p.hk;
  const int begin = block == 0 ? 0 : p.kept, count = places - begin;
  const int64_t first = head_of_block(p, head, 0) * places, of_block = int64_t{p.hk} * places;
  const int* next_of_head = next + int64_t{head} * p.blocks * places;
  const auto start = [&](int i) { return Chain{next_of_head, places, block, begin + i}; };

  const auto write_rows = [&](const void* grad, int width, void* out, const Stride& stride) {
    const int words = width / kElements;
    Element* rows = head_of<Element>(out, stride, batch, own);
    for (int i = threadIdx.x; i < count * words; i += kThreads) {
      const int key = key_at(p, head, block, begin + i / words), column = i % words * kElements;
      if (key < 0) continue;
      const Element* columns = static_cast<const Element*>(grad) + first * width + column;
      const auto sum = sum_of<kElements>(start(i / words), columns, of_block * width, width);
      Vector<Element, kElements> total;
#pragma unroll
      for (int c = 0; c < kElements; ++c) total.x[c] = from_float<Element>(sum.x[c]);
      *reinterpret_cast<Vector<Element, kElements>*>(rows + key * stride.token + column) = total;
    }
  };
  write_rows(p.grad_keys, p.d, p.grad_k, p.grad_k_stride);
  write_rows(p.grad_values, p.dv, p.grad_v, p.grad_v_stride);

  double* of_factors = head_of<double>(p.grad_log_factor, p.grad_log_factor_stride, batch, own);
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int key = key_at(p, head, block, begin + i);
    if (key >= 0) of_factors[key * p.grad_log_factor_stride.token] = sum_of<1>(start(i), p.grad_gate + first, of_block, 1).x[0];
  }
}

int64_t number_of_blocks(const PlacesParams& p) { return int64_t{p.b} * p.hk * p.blocks; }

}  // namespace

void launch_gather(const GatherParams& p, cudaStream_t stream) {
  const size_t places = p.kept + p.block, bytes = places * (2 * sizeof(double) + sizeof(int)) + kThreads * sizeof(double);
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    const auto kernel = gather_kernel<decltype(element), elements()>;
    launch_kernel("gather_kept", kernel, grid_1d(number_of_blocks(p)), kThreads, static_cast<int>(bytes), stream, p);
  });
}

size_t gather_backward_workspace_bytes(const GatherBackwardParams& p) {
  return static_cast<size_t>(number_of_blocks(p)) * (p.kept + p.block) * sizeof(int);
}

void launch_gather_backward(const GatherBackwardParams& p, void* workspace, cudaStream_t stream) {
  int* next = static_cast<int*>(workspace);
  const PlacesParams& places = p;
  launch_kernel("next_places", next_places_kernel, grid_1d(number_of_blocks(p)), kThreads, static_cast<int>(p.kept * sizeof(int)), stream, places,
                next);
  dispatch_words(p.math, p.aligned, [&](auto element, auto elements) {
    const auto kernel = gather_backward_kernel<decltype(element), elements()>;
    launch_kernel("gather_kept_backward", kernel, grid_1d(number_of_blocks(p)), kThreads, 0, stream, p, next);
  });
}

}  // namespace fastmax
