// The quadratic algorithm: attention over tiles of scores, of which the score matrix is never stored. One table for Fastmax,
// one for softmax, and one for Fastmax with an exact window.
#pragma once

#include "core/algorithm.h"

namespace fastmax {

extern const Algorithm kQuadraticAlgorithm;
extern const Algorithm kFlashAlgorithm;
// Fastmax with an exact window in one pass over local and global keys. z is the logarithm of the sums, as for softmax. The table
// has kernels of newer architectures only, so it may cover no direction of a call.
extern const Algorithm kExactWindowAlgorithm;

}  // namespace fastmax
