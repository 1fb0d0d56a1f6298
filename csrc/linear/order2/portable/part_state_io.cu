// Conversion of a carried state of order 1 to and from the sums that the scan of parts continues from (part_state.cu). These have the
// layout of a snapshot (state_format.h), in fp32 and without coefficients, in every arithmetic mode.

#include "core/launch.h"
#include "linear/linear.h"
#include "linear/order2/state_format.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;

// part_floats() of a head dim that q, k and v share.
constexpr __device__ int64_t floats_of_part(int head_dim) { return 2 * state_words(head_dim, head_dim, 1) + (2 * head_dim + 4); }

// A number per thread. Columns that only the kernels have are loaded as zeros and not stored.
template <bool kLoads>
__global__ void __launch_bounds__(kThreads) linear_carried_part_kernel(const CarriedArgs a, const int head_dim, const int numbers) {
  const int blocks = (numbers + kThreads - 1) / kThreads, d = a.state.d, dv = a.state.dv;
  const int64_t state = static_cast<int64_t>(blockIdx.x) / blocks;
  const int index = static_cast<int>(blockIdx.x) % blocks * kThreads + static_cast<int>(threadIdx.x);
  if (index >= numbers) return;
  float* part = a.accumulators + state * floats_of_part(head_dim);
  const int64_t first_row = state * (1 + d);

  // Where the number lies: row and column of the values, or (column < 0) row of the weights.
  int row, column, at;
  const int sums = head_dim * head_dim;
  if (index < sums) {  // first order: pairs of octets, blocks of 16 values, quarters of 8 x 8, values, features
    const int pair = index / (16 * head_dim), block = index / 256 % (head_dim / 16), quarter = index / 64 % 4;
    row = 1 + 16 * pair + quarter % 2 * 8 + index % 8;
    column = 16 * block + quarter / 2 * 8 + index / 8 % 8;
    at = head_dim * head_dim + index;  // behind the second moment's place
  } else {  // sum w, sum e y, sum e
    const int i = index - sums;
    row = i < head_dim ? 0 : i < 2 * head_dim ? 1 + i - head_dim : 0;
    column = i < head_dim ? i : -1;
    at = 2 * static_cast<int>(state_words(head_dim, head_dim, 1)) + i;
  }
  const bool exists = row <= d && column < dv;
  const float factor = row == 0 ? a.factors.one : a.factors.first;
  if (kLoads) {
    const float* x = column < 0 ? a.state.k_sum + first_row + row : a.state.kv_state + (first_row + row) * dv + column;
    part[at] = exists ? *x * factor : 0.f;
  } else if (exists) {
    float* x = column < 0 ? a.state.new_k_sum + first_row + row : a.state.new_kv_state + (first_row + row) * dv + column;
    *x = part[at] * factor;
  }
}

template <bool kLoads>
void launch(const char* name, const CarriedArgs& a, int head_dim, cudaStream_t stream) {
  const int numbers = head_dim * head_dim + 2 * head_dim + 1, blocks = (numbers + kThreads - 1) / kThreads;
  launch_kernel(name, linear_carried_part_kernel<kLoads>, grid_1d(int64_t{a.states} * blocks), kThreads, 0, stream, a, head_dim, numbers);
}

}  // namespace

void linear_load_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream) {
  launch<true>("linear_load_part_state", a, head_dim, stream);
}
void linear_store_part_state(const CarriedArgs& a, int head_dim, cudaStream_t stream) {
  launch<false>("linear_store_part_state", a, head_dim, stream);
}

}  // namespace fastmax
