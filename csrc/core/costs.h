// The costs of the algorithms in pairs times columns of the kernels (core/cost_model.h), for one query head.
#pragma once

#include "core/algorithm.h"
#include "linear/algorithm.h"

namespace fastmax {

// A pair has as many products over the columns of q and k as over those of v and o.
inline double quadratic_cost(const AttentionParams& p, const Rates& rates) {
  const double n = p.n, m = p.m;
  return rates.pair * (p.causal ? n * (m - 0.5 * n) : n * m) * 0.5 * (p.head_dim_qk + p.head_dim_v);
}

// Each key is added to the state of its key/value head once, and each query reads the state. overhead: in features.
inline double state_cost(const AttentionParams& p, const Rates& rates, double overhead) {
  const double d = p.head_dim_qk, features = p.order == 2 ? d * (d + 1) / 2 + d + 1 : d + 1;
  return rates.feature * (features + overhead) * p.head_dim_v * 0.5 * (p.n + static_cast<double>(p.m) * p.hk / p.h);
}

// By the kernels of order 2 (linear/order2/), which compute order 1 too.
inline double linear2_cost(const AttentionParams& p, const Rates& rates) {
  return state_cost(p, rates, p.order == 2 ? rates.overhead / p.head_dim_v : 700);
}

// By those of order 1 where they run: they support neither decay nor packed sequences, and have a smaller overhead.
inline double linear_cost(const AttentionParams& p, const Rates& rates) {
  return p.order == 1 && uses_linear1(p) && !has_decay(p) ? state_cost(p, rates, 50) : linear2_cost(p, rates);
}

}  // namespace fastmax
