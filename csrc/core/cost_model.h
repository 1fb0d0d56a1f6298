// The cost model of algorithm="auto": whether the linear algorithm is faster, for both directions.
#pragma once

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

// Compares the kernels that would compute the gradients, which take most of the time.
inline bool linear_is_faster(const AttentionParams& p) {
  const Rates& quadratic_rates = select(kQuadraticAlgorithm, p, Direction::kBackward).rates(p);
  const Rates& linear_rates = select(kLinearAlgorithm, p, Direction::kBackward).rates(p);
  const double d = p.head_dim_qk, dv = p.head_dim_v, n = p.n, m = p.m;
  // In pairs times columns: a pair has as many products over d columns as over dv, and every feature has dv values.
  const double quadratic = quadratic_rates.pair * (p.causal ? n * (m - 0.5 * n) : n * m) * 0.5 * (d + dv);

  // Each key is added to the state of its key/value head once, and each query reads the state. The kernels of order 1 alone
  // support neither decay nor packed sequences, and have a smaller overhead.
  const double features = p.order == 2 ? d * (d + 1) / 2 + d + 1 : d + 1;
  const double overhead = p.order == 2 ? linear_rates.overhead / dv : uses_linear1(p) && !has_decay(p) ? 50 : 700;
  const double linear = linear_rates.feature * (features + overhead) * dv * 0.5 * (n + m * p.hk / p.h);
  return linear + kLaunches / (static_cast<double>(p.b) * p.h) < quadratic;
}

}  // namespace fastmax
