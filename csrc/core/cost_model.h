// algorithm="auto": which algorithm is faster, in one place for both directions.
#pragma once

#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {

// Rates (core/rates.h, core/sm90/rates.h) were fitted on one H200, bf16, causal, h = hk. With n = m the algorithms cross at
// 2 feature / pair (features + overhead) tokens; measured, and here:
//                                    head_dim 32    64            128             256
//   order 2: portable                2550 / 2600    4570 / 4750   15900 / 15900   - / 61500
//            sm_90                   2320 / 2200    5130 / 5150   18400 / 20500
//   order 1: portable                < 256 / 150    < 256 / 210   260 / 330       - / 1800
//            sm_90                   < 256 / 250      263 / 250     283 / 390
// By python -m benchmarks.run crossover (benchmarks/results/crossover.csv: sm_90). Rates of sm_90: a line through the times of the
// quadratic kernels at n = 1024 and 4096 (head_dim 128: at 4096, with as much beside its pairs) and the linear ones' at 65536. At head_dim
// 96 the linear ones are portable, and the quadratic ones gain more: 19200 / 19000. kSm90Rates is with two kernels in the quadratic
// backward; with one, 16384 tokens of head_dim 128 take 13.6 ms where those take 15.2. At narrower heads that one counts as two: it
// takes 0.83 (32) and 0.9 (64) of the time of forward + backward, and the linear kernels have come to 0.86 and 0.92 of theirs since.

// More launches, each behind the other, forward + backward: what the linear algorithm takes longer at any size, in pairs times head_dim.
// Order 1 and 16 heads on one H200, ms, quadratic and linear, at head_dim 32, 64 and 128: 1024 tokens .045/-, .057/-, .081/.092;
// 2048 .087/.068, .107/.067, .159/.109.
inline constexpr double kLaunches = 4.5e8;

// By the kernels that would compute the gradients, which are most of the time.
inline bool linear_is_faster(const AttentionParams& p) {
  const Rates& quadratic_rates = select(kQuadraticAlgorithm, p, Direction::kBackward).rates(p.head_dim);
  const Rates& linear_rates = select(kLinearAlgorithm, p, Direction::kBackward).rates(p.head_dim);
  const double d = p.head_dim, n = p.n, m = p.m;
  const double quadratic = quadratic_rates.pair * (p.causal ? n * (m - 0.5 * n) : n * m);

  // The state takes every key once for each key/value head, and every query reads it. The kernels of order 1 alone know nothing that
  // fades, nor sequences that begin anew.
  const double features = p.order == 2 ? d * (d + 1) / 2 + d + 1 : d + 1;
  const double overhead = p.order == 2 ? linear_rates.overhead / d : uses_linear1(p) && !has_decay(p) ? 50 : 700;
  const double linear = linear_rates.feature * (features + overhead) * 0.5 * (n + m * p.hk / p.h);
  return linear + kLaunches / (d * p.b * p.h) < quadratic;
}

}  // namespace fastmax
