// The cost model: whether the linear algorithm is faster, for algorithm="auto", and which head dim of kernels (value_blocks.h).
#pragma once

#include <algorithm>
#include <limits>

#include "core/costs.h"
#include "core/dispatch.h"
#include "decode/decode.h"
#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {

// Rates (core/rates.h, core/sm90/rates.h) were fitted on one H200: bf16, causal, h = hk, equal widths. With n = m the
// algorithms are equally fast at 2 feature / pair (features + overhead) tokens. Measured / by the model:
//                                    head_dim 32    64            128             256
//   order 2: portable                2550 / 2600    4570 / 4750   15900 / 15900   - / 61500
//            sm_90                   2320 / 2200    5130 / 5150   18400 / 20500
//   order 1: portable                < 256 / 150    < 256 / 210   260 / 330       - / 1800
//            sm_90                   < 256 / 250      263 / 250     283 / 390
// Measured by python -m benchmarks.run crossover (benchmarks/results/crossover.csv: sm_90). The rates of sm_90 come from a line
// through the times of the quadratic kernels at n = 1024 and 4096, and from the times of the linear kernels at 65536. (head_dim
// 128: at 4096 only, with the same time apart from pairs.) At head_dim 96 the linear kernels are portable, and the quadratic
// ones gain more: 19200 / 19000. kSm90Rates is for two kernels in the quadratic backward. The fused backward takes 13.6 ms for
// 16384 tokens of head_dim 128, two kernels 15.2. Narrower heads share the rates of two kernels: there the fused backward takes
// 0.83 (32) and 0.9 (64) of the time of forward + backward, and the linear kernels take 0.86 and 0.92 of the time that was
// fitted.

// Cost of the linear algorithm's additional dependent launches, forward + backward, at any size; in pairs times columns. Order
// 1 and 16 heads on one H200, ms of quadratic / linear at head_dim 32, 64 and 128: 1024 tokens .045/-, .057/-, .081/.092; 2048
// .087/.068, .107/.067, .159/.109.
inline constexpr double kLaunches = 4.5e8;

// Where a call runs in value blocks (core/value_blocks.h), its gradients of q and k are sums over the blocks. Cost of adding an element to
// one: three 16-bit numbers at the copy rate of one H200.
inline constexpr double kSum = 29;
// Cost of copying a value of a state to blocks and of one from them: 12 accesses of 4 bytes, a third of them in the forward.
inline constexpr double kStateValue = 225;
// Blocks read q and k again, which the model does not count. They must promise this part of the time of one run.
inline constexpr double kWorthBlocks = 0.85;

// How a call runs on the kernels of an algorithm, which have one head dim for q and k and for v and o.
struct Fit {
  int head_dim;  // of the kernels; 0: none cover the call
  double cost;
};

// Compares one run, with a head dim that holds the columns of v, with runs of narrower kernels, one for each block of columns.
inline Fit fit(const Algorithm& algorithm, const AttentionParams& p, Direction direction, bool has_state = false) {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  const double heads = static_cast<double>(p.b) * p.h, launches = kLaunches / heads;
  const double states = static_cast<double>(p.hk) / p.h;  // for one query head
  const double sums = kSum * p.d * (p.n + p.m * states);
  const double copies = has_state ? kStateValue * decode_rows(p.d, p.order) * p.dv * states : 0.;
  const int widest = NativeHeadDims::at_least(std::max(p.d, p.dv));
  Fit best{0, kNever};
  const auto at_least = [](int columns) { return NativeHeadDims::at_least(columns); };
  for (int head_dim = at_least(p.d); head_dim != 0 && head_dim <= widest; head_dim = at_least(head_dim + 1)) {
    AttentionParams run = p;
    run.head_dim_qk = run.head_dim_v = head_dim, run.dv = std::min(p.dv, head_dim);
    const Kernels* kernels = find(algorithm, run, direction);
    if (kernels == nullptr) continue;
    const int more = (p.dv - 1) / head_dim;
    const double cost = (more + 1) * algorithm.cost(run, kernels->rates(run)) + more * (launches + sums) + (more > 0 ? copies : 0.);
    if (cost < (more == 0 ? best.cost / kWorthBlocks : best.cost)) best = {head_dim, cost};
  }
  return best;
}

// Compares the kernels that would compute the gradients, which take most of the time.
inline bool linear_is_faster(const AttentionParams& p) {
  const double launches = kLaunches / (static_cast<double>(p.b) * p.h);
  return fit(kLinearAlgorithm, p, Direction::kBackward).cost + launches < fit(kQuadraticAlgorithm, p, Direction::kBackward).cost;
}

}  // namespace fastmax
