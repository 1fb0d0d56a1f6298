// Softmax of rows, bound by memory.
//
// A group of lanes shares a row: part of a warp, a warp, or a block. The row is read in chunks of up to kWords 16-byte words
// per lane, which stay in registers until the next chunk replaces them. A row of one chunk (up to 128 KB) is therefore read
// from memory once. For longer rows, each further pass starts with the chunk in registers and goes in the opposite direction.
// It reads one chunk less, and reads first what was read last and is still in the L2 cache.
//
//   safe    maximum | sum of 2^((x - max) log2 e) | y     three passes, two reductions over the lanes
//   online  maximum and sum | y                           two passes, one reduction (Milakov & Gimelshein 2018, arXiv 1805.02867)

#include "softmax/softmax.h"

#include <algorithm>
#include <type_traits>

#include "core/dispatch.h"
#include "core/dtype.h"
#include "core/launch.h"
#include "core/word.h"

namespace fastmax {
namespace {

// ---- the launch table

// 16-byte words per lane and chunk: 32 of the 64 registers that a block of 1024 threads may use.
constexpr int kWords = 8;
constexpr int kMaxThreads = 1024;
// Threads that fit on a multiprocessor at 64 registers. With fewer threads in total, rows are spread over more lanes with fewer
// words.
constexpr int kThreadsPerSm = 1024;
// Two short rows share a warp. Half a warp reads 256 bytes, two cache lines, at a time. It has a lane for each element before
// and after the aligned words (Row::edge).
constexpr int kMinLanes = 16;
// Threads per block for such rows: four warps use a multiprocessor's four schedulers.
constexpr int kSmallRowThreads = 128;

struct Launch {
  int lanes;  // per row: half a warp or whole warps
  int rows;   // per block
  int words;  // per lane and chunk, up to kWords
  int64_t blocks;
  int threads() const { return lanes * rows; }
};

constexpr __host__ __device__ int divide_up(int x, int y) { return (x - 1) / y + 1; }

Launch choose_launch(const SoftmaxParams& p, int row_words) {
  Launch launch{};
  int lanes = row_words <= kMinLanes * kWords ? kMinLanes : std::min(kMaxThreads, divide_up(row_words, 32 * kWords) * 32);
  while (2 * lanes <= kMaxThreads && lanes < row_words && p.rows * lanes < int64_t{p.sm_count} * kThreadsPerSm) lanes *= 2;
  launch.lanes = lanes;
  launch.rows = lanes <= 32 ? kSmallRowThreads / lanes : 1;
  const int chunks = divide_up(row_words, lanes * kWords);
  launch.words = divide_up(row_words, lanes * chunks);  // equal: the chunk that is not read again should not be short
  launch.blocks = (p.rows - 1) / launch.rows + 1;
  return launch;
}

// ---- a row: whole 16-byte words at multiples of 16 bytes, and the few elements before and after them

template <class Element>
constexpr uint32_t kMinusInfinity = std::is_same_v<Element, float>    ? 0xff800000u
                                    : std::is_same_v<Element, __half> ? 0xfc00fc00u
                                                                      : 0xff80ff80u;  // in every element of a register

template <class Element>
struct Row {
  using Word = fastmax::Word<Element>;
  const Element* x;  // first element
  Element* y;
  int head, words, tail;  // elements before the words, words, elements after them
  bool same_alignment;    // whether x and y have the same alignment

  __device__ Row(const SoftmaxParams& p, int64_t row, bool exists) {
    x = static_cast<const Element*>(p.x) + row * p.row_stride;
    y = static_cast<Element*>(p.y) + row * p.width;
    const int width = exists ? p.width : 0;
    const int past = static_cast<int>(reinterpret_cast<uintptr_t>(x) % sizeof(Word));
    head = min(width, past == 0 ? 0 : static_cast<int>((sizeof(Word) - past) / sizeof(Element)));
    words = (width - head) / Word::kElements;
    tail = width - head - words * Word::kElements;
    same_alignment = reinterpret_cast<uintptr_t>(y) % sizeof(Word) == past;
  }

  // This lane's element outside the words, or -1. The first lanes have the elements before the words, the next ones those
  // after.
  __device__ __forceinline__ int edge(int lane) const {
    constexpr int kSide = kMinLanes / 2;
    static_assert(kSide >= Word::kElements - 1);
    if (lane < kSide) return lane < head ? lane : -1;
    return lane - kSide < tail ? head + words * Word::kElements + lane - kSide : -1;
  }

  // Loads a word; -inf past the end.
  __device__ __forceinline__ Word load(int word) const {
    constexpr uint32_t kFill = kMinusInfinity<Element>;
    uint4 bits = make_uint4(kFill, kFill, kFill, kFill);
    if (word < words) bits = reinterpret_cast<const uint4*>(x + head)[word];
    return {bits.x, bits.y, bits.z, bits.w};
  }

  __device__ __forceinline__ void store(int word, const Word& value) const {
    if (word >= words) return;
    if (same_alignment) {
      reinterpret_cast<uint4*>(y + head)[word] = make_uint4(value.r[0], value.r[1], value.r[2], value.r[3]);
      return;
    }
    Element* target = y + head + word * Word::kElements;
#pragma unroll
    for (int i = 0; i < Word::kElements; ++i) target[i] = reinterpret_cast<const Element*>(value.r)[i];
  }
};

// ---- arithmetic

// e^(x - m). x = m = -inf gives NaN, as in the formula.
__device__ __forceinline__ float exp_difference(float x, float m) { return ptx::exp2_approx((x - m) * 1.44269504088896341f); }

// The value to subtract. While only -inf was seen it is 0, so that such elements add e^(-inf - 0) = 0 to a sum.
__device__ __forceinline__ float reference(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

struct Maximum {
  __device__ __forceinline__ float operator()(float x, float y) const { return fmaxf(x, y); }
  static constexpr float kNeutral = -INFINITY;
};
struct Sum {
  __device__ __forceinline__ float operator()(float x, float y) const { return x + y; }
  static constexpr float kNeutral = 0.f;
};

// Reduces over `lanes` neighbours, a power of two up to a warp. All of them get the same bits.
template <class Operation>
__device__ __forceinline__ float reduce_lanes(float x, int lanes) {
  for (int bit = lanes / 2; bit > 0; bit /= 2) x = Operation()(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}

// Reduces over the first `warps` lanes of a warp.
template <class Operation>
__device__ __forceinline__ float reduce_warps(float x, int warps) {
  return reduce_lanes<Operation>(static_cast<int>(threadIdx.x % 32) < warps ? x : Operation::kNeutral, 32);
}

// Reduces over the lanes of a row. `partials` may be used by one call only.
template <class Operation>
__device__ __forceinline__ float reduce(float x, int lanes, float (&partials)[32]) {
  x = reduce_lanes<Operation>(x, min(lanes, 32));
  if (lanes <= 32) return x;
  if (threadIdx.x % 32 == 0) partials[threadIdx.x / 32] = x;
  __syncthreads();
  return reduce_warps<Operation>(partials[threadIdx.x % 32], lanes / 32);
}

// Computes the maximum over the lanes of a row, and the sum of their sums after rescaling each to that maximum: first within
// warps, then over warps.
__device__ __forceinline__ void reduce_online(float& maximum, float& sum, int lanes, float (&maxima)[32], float (&sums)[32]) {
  const auto rescaled = [](float sum, float maximum, float raised) { return sum * exp_difference(maximum, reference(raised)); };
  float raised = reduce_lanes<Maximum>(maximum, min(lanes, 32));
  sum = reduce_lanes<Sum>(rescaled(sum, maximum, raised), min(lanes, 32));
  maximum = raised;
  if (lanes <= 32) return;
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = maximum, sums[threadIdx.x / 32] = sum;
  __syncthreads();
  maximum = maxima[threadIdx.x % 32], sum = sums[threadIdx.x % 32];
  raised = reduce_warps<Maximum>(maximum, lanes / 32);
  sum = reduce_warps<Sum>(rescaled(sum, maximum, raised), lanes / 32);
  maximum = raised;
}

// ---- the kernel

template <class Element>
struct Chunk {
  Word<Element> words[kWords];

  // Word i of this lane has index first + i * stride in the row, for i < count. Past the end, loads return -inf and stores do
  // nothing.
  __device__ __forceinline__ void load(const Row<Element>& row, int first, int stride, int count) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i < count) words[i] = row.load(first + i * stride);
    }
  }

  template <class Function>
  __device__ __forceinline__ void visit(int count, const Function& function) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i >= count) continue;
#pragma unroll
      for (int k = 0; k < Word<Element>::kPairs; ++k) {
        const float2 x = words[i].pair(k);
        function(x.x), function(x.y);
      }
    }
  }

  __device__ __forceinline__ float maximum(int count) const {
    float maximum = -INFINITY;
    visit(count, [&](float x) { maximum = fmaxf(maximum, x); });
    return maximum;
  }

  __device__ __forceinline__ float sum(int count, float reference) const {
    float sum = 0.f;
    visit(count, [&](float x) { sum += exp_difference(x, reference); });
    return sum;
  }

  __device__ __forceinline__ void store(const Row<Element>& row, int first, int stride, int count, float maximum,
                                        float scale) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (i >= count) continue;
      Word<Element> result;
#pragma unroll
      for (int k = 0; k < Word<Element>::kPairs; ++k) {
        const float2 x = words[i].pair(k);
        result.set_pair(k, scale * exp_difference(x.x, maximum), scale * exp_difference(x.y, maximum));
      }
      row.store(first + i * stride, result);
    }
  }
};

template <class Element, bool kOnline>
__global__ void __launch_bounds__(kMaxThreads) softmax_kernel(const SoftmaxParams p, const Launch launch) {
  __shared__ float maxima[32], sums[32];  // by warp
  const int lanes = launch.lanes, lane = threadIdx.x % lanes, count = launch.words, chunk_words = lanes * count;
  const int64_t row_index = int64_t{blockIdx.x} * launch.rows + threadIdx.x / lanes;
  const Row<Element> row(p, row_index, row_index < p.rows);

  // Index of this lane's first word in the last chunk, and in the chunk in registers.
  const int last = lane + max(0, row.words - 1) / chunk_words * chunk_words;
  int first = lane;
  Chunk<Element> chunk;
  chunk.load(row, first, lanes, count);
  // Calls function for every chunk, from the one in registers to the other end of the row.
  const auto for_each_chunk = [&](const auto& function) {
    const int end = first == lane ? last : lane;
    function();
    while (first != end) {
      first += end == lane ? -chunk_words : chunk_words;
      chunk.load(row, first, lanes, count);
      function();
    }
  };

  const int edge_at = row.edge(lane);
  const float edge = edge_at >= 0 ? to_float(row.x[edge_at]) : -INFINITY;

  float maximum = edge, sum = 0.f;
  if constexpr (kOnline) {
    sum = exp_difference(edge, reference(edge));
    for_each_chunk([&] {
      const float raised = fmaxf(maximum, chunk.maximum(count));
      sum = sum * exp_difference(maximum, reference(raised)) + chunk.sum(count, reference(raised));
      maximum = raised;
    });
    reduce_online(maximum, sum, lanes, maxima, sums);
  } else {
    for_each_chunk([&] { maximum = fmaxf(maximum, chunk.maximum(count)); });
    maximum = reduce<Maximum>(maximum, lanes, maxima);
    sum = exp_difference(edge, maximum);
    for_each_chunk([&] { sum += chunk.sum(count, maximum); });
    sum = reduce<Sum>(sum, lanes, sums);
  }

  const float scale = 1.f / sum;
  for_each_chunk([&] { chunk.store(row, first, lanes, count, maximum, scale); });
  if (edge_at >= 0) row.y[edge_at] = from_float<Element>(scale * exp_difference(edge, maximum));
}

template <class Element>
void launch(const SoftmaxParams& p, cudaStream_t stream) {
  const Launch launch = choose_launch(p, std::max(1, p.width / Word<Element>::kElements));
  launch_kernel("softmax", p.online ? softmax_kernel<Element, true> : softmax_kernel<Element, false>, grid_1d(launch.blocks),
                launch.threads(), 0, stream, p, launch);
}

}  // namespace

void launch_softmax(const SoftmaxParams& p, cudaStream_t stream) {
  dispatch_math(p.math, [&](auto math) { launch<typename decltype(math)::type::Element>(p, stream); });
}

}  // namespace fastmax
