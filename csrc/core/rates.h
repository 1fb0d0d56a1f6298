// How fast kernels are, for algorithm="auto" (core/cost_model.h, which says how the numbers were fitted).
#pragma once

namespace fastmax {

// Time of a row of kernels (core/algorithm.h), forward + backward, in units of one query with one key in the portable quadratic kernels.
struct Rates {
  double pair;      // quadratic: a query with a key
  double feature;   // linear: a feature of a key in the state, and of a query that reads it
  double overhead;  // order 2: what does not grow with the features (the part within a chunk, snapshots, low occupancy at small head
                    // dims, launches), in features times head_dim
};

inline constexpr Rates kPortableRates{1.0, 0.925, 2.7e4};

inline const Rates& portable_rates(int /*head_dim*/) { return kPortableRates; }

}  // namespace fastmax
