// Factors of rotary positions. Angles and their sines are float64: float32 has too few digits for the angle of position 10^6.

#include "layer/rotary.h"

#include "core/launch.h"

namespace fastmax {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 32;  // of a block
static_assert(kThreads >= kMaxRotaryAngles);

__global__ void __launch_bounds__(kThreads) rotary_factors_kernel(const __grid_constant__ RotaryParams p) {
  __shared__ double frequencies[kMaxRotaryAngles];
  const int thread = threadIdx.x;
  if (thread < p.half) frequencies[thread] = pow(p.base, thread / -static_cast<double>(p.half));
  __syncthreads();
  const int64_t first = int64_t{blockIdx.x} * kTokens;
  const int tokens = static_cast<int>(min(int64_t{kTokens}, p.tokens - first));
  for (int i = thread; i < tokens * p.half; i += kThreads) {
    const int f = i % p.half;
    const int64_t token = first + i / p.half, at = token * 2 * p.half + f;
    const int64_t position =
        p.wide_positions ? static_cast<const int64_t*>(p.positions)[token] : static_cast<const int32_t*>(p.positions)[token];
    double sine, cosine;
    sincos(static_cast<double>(position) * frequencies[f], &sine, &cosine);
    p.cos[at] = p.cos[at + p.half] = static_cast<float>(cosine);
    p.sin[at] = -static_cast<float>(sine), p.sin[at + p.half] = static_cast<float>(sine);
  }
}

}  // namespace

void launch_rotary_factors(const RotaryParams& p, cudaStream_t stream) {
  const unsigned blocks = grid_1d((p.tokens + kTokens - 1) / kTokens);
  launch_kernel("rotary_factors", rotary_factors_kernel, blocks, kThreads, 0, stream, p);
}

}  // namespace fastmax
