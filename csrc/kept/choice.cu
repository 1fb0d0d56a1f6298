// The choice is a prefix scan over the blocks. After round r, the list of a block has the `count` keys of the largest rank of up to 2^r
// blocks. A list is sorted, and lists of two ranges of blocks are merged.

#include "core/launch.h"
#include "core/search.h"
#include "kept/kept.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// Lists of all blocks: `count` keys, the most important first.
struct Lists {
  double* cost;  // -rank; inf: there is no key
  int* key;
};

int next_power_of_two(int x) {
  int power = 32;
  while (power < x) power *= 2;
  return power;
}

// Sorts a power of two of elements that the threads of a block share. before(i, j): whether element i belongs before element j.
template <class Before, class Swap>
__device__ __forceinline__ void bitonic_sort(int size, Before before, Swap swap) {
  for (int run = 2; run <= size; run *= 2) {
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncthreads();
      for (int i = threadIdx.x; i < size / 2; i += kThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const bool ascends = (low & run) == 0;
        if (ascends ? before(high, low) : before(low, high)) swap(low, high);
      }
    }
  }
  __syncthreads();
}

template <class T>
__device__ __forceinline__ void exchange(T& x, T& y) {
  const T z = x;
  x = y;
  y = z;
}

// The list of the keys that a block adds.
__global__ void __launch_bounds__(kThreads) sort_candidates_kernel(const ChoiceParams p, const Lists lists, const int size) {
  extern __shared__ __align__(128) char shared[];
  double* cost = reinterpret_cast<double*>(shared);
  int* order = reinterpret_cast<int*>(cost + size);
  const int block = blockIdx.x % p.blocks, head = blockIdx.x / p.blocks;
  const auto at = [&](const Stride4& s) { return head / p.hk * s.batch + head % p.hk * s.head + block * s.block; };
  const double* rank = p.rank + at(p.rank_stride);
  const int64_t* index = p.index + at(p.index_stride);
  for (int i = threadIdx.x; i < size; i += kThreads) {
    const double x = i < p.candidates ? rank[i * p.rank_stride.place] : -INFINITY;
    cost[i] = isnan(x) ? -INFINITY : -x;
    order[i] = i;
  }
  bitonic_sort(
      size, [&](int i, int j) { return cost[i] < cost[j] || (cost[i] == cost[j] && order[i] < order[j]); },
      [&](int i, int j) { exchange(cost[i], cost[j]), exchange(order[i], order[j]); });
  const int64_t begin = int64_t{blockIdx.x} * p.count;
  for (int i = threadIdx.x; i < p.count; i += kThreads) {
    const bool exists = i < size && order[i] < p.candidates;
    lists.cost[begin + i] = exists ? cost[i] : INFINITY;
    lists.key[begin + i] = exists ? static_cast<int>(index[order[i] * p.index_stride.place]) : -1;
  }
}

// Merges the list of each block with that of the block `reach` before it, if both are of one sequence. Of equal costs, those of the
// later block come first.
__global__ void __launch_bounds__(kThreads) merge_lists_kernel(const ChoiceParams p, const Lists from, const Lists to, const int reach) {
  extern __shared__ __align__(128) char shared[];
  double* later = reinterpret_cast<double*>(shared);
  double* before = later + p.count;
  const int block = blockIdx.x % p.blocks;
  const int64_t own = int64_t{blockIdx.x} * p.count, other = own - int64_t{reach} * p.count;
  const bool merges = block >= reach && p.earlier[block * p.earlier_stride] >= reach;
  for (int i = threadIdx.x; i < p.count; i += kThreads) {
    later[i] = from.cost[own + i];
    before[i] = merges ? from.cost[other + i] : INFINITY;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < p.count; i += kThreads) {
    const int place = i + first_where(p.count, [&](int j) { return before[j] >= later[i]; });
    if (place < p.count) to.cost[own + place] = later[i], to.key[own + place] = from.key[own + i];
    if (!merges) continue;
    const int place_before = i + first_where(p.count, [&](int j) { return later[j] > before[i]; });
    if (place_before < p.count) to.cost[own + place_before] = before[i], to.key[own + place_before] = from.key[other + i];
  }
}

// The keys of each list in ascending order, -1 for none.
__global__ void __launch_bounds__(kThreads) sort_kept_kernel(const ChoiceParams p, const Lists lists, const int size) {
  extern __shared__ __align__(128) char shared[];
  int* key = reinterpret_cast<int*>(shared);
  const int64_t begin = int64_t{blockIdx.x} * p.count;
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += kThreads) {
    key[i] = i >= p.count ? INT_MAX : lists.cost[begin + i] == INFINITY ? -1 : lists.key[begin + i];
  }
  bitonic_sort(size, [&](int i, int j) { return key[i] < key[j]; }, [&](int i, int j) { exchange(key[i], key[j]); });
  for (int i = threadIdx.x; i < p.count; i += kThreads) p.kept[begin + i] = key[i];
}

int64_t number_of_lists(const ChoiceParams& p) { return int64_t{p.b} * p.hk * p.blocks; }

}  // namespace

size_t choice_workspace_bytes(const ChoiceParams& p) {
  return static_cast<size_t>(number_of_lists(p)) * p.count * 2 * (sizeof(double) + sizeof(int));
}

void launch_choice(const ChoiceParams& p, void* workspace, cudaStream_t stream) {
  const int64_t elements = number_of_lists(p) * p.count;
  double* costs = static_cast<double*>(workspace);
  int* keys = reinterpret_cast<int*>(costs + 2 * elements);
  Lists now{costs, keys}, next{costs + elements, keys + elements};
  const unsigned grid = grid_1d(number_of_lists(p));
  const int of_candidates = next_power_of_two(p.candidates), of_kept = next_power_of_two(p.count);
  const auto bytes = [](int elements, size_t of_each) { return static_cast<int>(elements * of_each); };
  launch_kernel("sort_candidates", sort_candidates_kernel, grid, kThreads, bytes(of_candidates, sizeof(double) + sizeof(int)), stream, p, now,
                of_candidates);
  for (int reach = 1; reach < p.blocks; reach *= 2) {
    launch_kernel("merge_lists", merge_lists_kernel, grid, kThreads, bytes(2 * p.count, sizeof(double)), stream, p, now, next, reach);
    const Lists last = now;
    now = next, next = last;
  }
  launch_kernel("sort_kept", sort_kept_kernel, grid, kThreads, bytes(of_kept, sizeof(int)), stream, p, now, of_kept);
}

}  // namespace fastmax
