// Speed of kernels, for algorithm="auto" (core/cost_model.h describes how the numbers were fitted).
#pragma once

namespace fastmax {

struct Problem;  // params.h

// Time of a row of kernels (core/algorithm.h), forward + backward. The unit is one query with one key in the portable quadratic
// kernels.
struct Rates {
  double pair;      // quadratic: a query with a key
  double feature;   // linear: adding a feature of a key to the state, and reading it for a query
  // order 2: cost that does not grow with the features, in features times columns of values: intra-chunk part, snapshots, low
  // occupancy at small head dims, launches
  double overhead;
};

inline constexpr Rates kPortableRates{1.0, 0.925, 2.7e4};

inline const Rates& portable_rates(const Problem&) { return kPortableRates; }

}  // namespace fastmax
