// The quadratic algorithm: attention over tiles of scores, of which the score matrix is never stored. One table for Fastmax,
// one for softmax.
#pragma once

#include "core/algorithm.h"

namespace fastmax {

extern const Algorithm kQuadraticAlgorithm;
extern const Algorithm kFlashAlgorithm;

}  // namespace fastmax
