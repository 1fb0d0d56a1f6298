// algorithm="auto": which algorithm is faster, in one place for both directions.
#pragma once

#include "core/params.h"
#include "linear/algorithm.h"

namespace fastmax {

// Work per (batch, head) of each algorithm in units of one head_dim-long multiply-add of a query with a key. Fitted to forward +
// backward on one H200, bf16, causal, h = hk (python -m benchmarks.run crossover; benchmarks/results/crossover.csv has what was
// measured). With n = m the algorithms cross at 1.85 (features + overhead) tokens, measured / here:
//   order 2: head_dim 32: 2550 / 2600   64: 4570 / 4750   128: 15900 / 15900   256: - / 61500
//   order 1: head_dim 32: < 256 / 150   64: < 256 / 210   128:   260 / 330     256: - / 1800
//
// fades: keys fade, or sequences begin anew, which the kernels of order 1 alone do not know.
inline bool linear_is_faster(const Problem& p, bool fades) {
  const double d = p.head_dim, n = p.n, m = p.m;
  const double quadratic = p.causal ? n * (m - 0.5 * n) : n * m;

  // The state takes every key once for each key/value head, and every query reads it. What does not grow with the features (the part
  // within a chunk, snapshots, low occupancy at small head dims, launches) counts as so many features more.
  const double features = p.order == 2 ? d * (d + 1) / 2 + d + 1 : d + 1;
  const double overhead = p.order == 2 ? 2.7e4 / d : uses_linear1(p) && !fades ? 50 : 700;
  constexpr double kRate = 0.925;  // speed of the quadratic kernels over that of the linear ones
  const double linear = kRate * (features + overhead) * 0.5 * (n + m * p.hk / p.h);
  return linear < quadratic;
}

}  // namespace fastmax
