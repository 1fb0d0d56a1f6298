// Speed of the Hopper kernels, for algorithm="auto" (core/cost_model.h describes how the numbers were fitted).
#pragma once

#include "core/dispatch.h"
#include "core/rates.h"

namespace fastmax {

inline constexpr Rates kSm90Rates{0.61, 0.665, 1.4e4};
inline constexpr Rates kSm90Rates96{0.49, kSm90Rates.feature, kSm90Rates.overhead};
inline constexpr Rates kSm90FusedRates{0.55, kSm90Rates.feature, kSm90Rates.overhead};

inline const Rates& sm90_rates(const Problem& p) { return common_head_dim(p) == 96 ? kSm90Rates96 : kSm90Rates; }

// For rows whose quadratic backward is fused.
inline const Rates& sm90_fused_rates(const Problem& p) { return common_head_dim(p) == 128 ? kSm90FusedRates : sm90_rates(p); }

}  // namespace fastmax
