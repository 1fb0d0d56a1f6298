// The scan over segments between the two launches of a state pass.

#include "core/launch.h"
#include "linear/order2/linear2.h"
#include "linear/order2/row_walk.h"

namespace fastmax {
namespace {

__global__ void __launch_bounds__(256) linear_segments_kernel(const StateArgs a, const int64_t slot_floats) {
  const int64_t index = blockIdx.x * int64_t{blockDim.x} + threadIdx.x;
  if (index >= slot_floats) return;
  const int state = static_cast<int>(index / (slot_floats / a.states()));
  // Decays a sum by the rows of a segment.
  const auto apply_decay = [&](float sum, int segment) {
    const Work work = locate_segment(a, segment * a.states());
    return DecayFactor::of(a.decay.passing(a, state, a.decay.edge_after(a, work.begin), a.decay.edge_after(a, work.end)))(sum);
  };
  float* slots = a.accumulators + slot_floats + index;
  float sum = slots[0];
  constexpr int kAhead = 8;  // loads in flight
  for (int first = 1; first < a.segments; first += kAhead) {
    float totals[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) totals[i] = first + i < a.segments - 1 ? slots[(first + i) * slot_floats] : 0.f;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i < a.segments) slots[(first + i) * slot_floats] = sum;
      if (a.decay && first + i < a.segments) sum = apply_decay(sum, first + i);
      sum += totals[i];
    }
  }
}

}  // namespace

void linear_scan_segments(const StateArgs& a, int64_t slot_floats, cudaStream_t stream) {
  constexpr int kThreads = 256;
  launch_kernel("linear_segments", linear_segments_kernel, grid_1d((slot_floats + kThreads - 1) / kThreads), kThreads, 0, stream, a,
                slot_floats);
}

}  // namespace fastmax
