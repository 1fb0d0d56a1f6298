// algorithm="auto": which algorithm is faster, in one place for both directions.
#pragma once

#include "params.h"

namespace fastmax {

enum class Algorithm { kQuadratic, kLinear };

// Work per (batch, head) of each algorithm in units of one head_dim-long multiply-add of a query with a key. Fitted to forward +
// backward on one H200, bf16, causal, h = hk (csrc/checks/check_kernels.py --crossover); where they cross, in tokens, measured / here:
//   order 2: head_dim 32: 2800 / 2800   64: 5500 / 5500   128: 20500 / 20200
//   order 1: head_dim 32:  900 /  800   64:  730 /  880   128:  1050 /  1030
inline Algorithm choose_algorithm(const Problem& p) {
  const double d = p.head_dim, n = p.n, m = p.m;
  const double quadratic = p.causal ? n * (m - 0.5 * n) : n * m;

  // The state takes every key once for each key/value head, and every query reads it. What does not grow with the features
  // (snapshots, the part within a chunk, low occupancy at small head dims) counts as so many features more.
  const double features = p.order == 2 ? d * (d + 1) / 2 + d + 1 : d + 1;
  const double overhead = p.order == 2 ? 6.2e5 / (d * d) : 300;
  constexpr double kRate = 1.2;  // speed of the quadratic kernels over that of the linear ones
  const double linear = kRate * (features + overhead) * 0.5 * (n + m * p.hk / p.h);
  return linear < quadratic ? Algorithm::kLinear : Algorithm::kQuadratic;
}

}  // namespace fastmax
