// Attention over tiles of scores, never all of them at once: of Fastmax, and of softmax.
#pragma once

#include "core/algorithm.h"

namespace fastmax {

extern const Algorithm kQuadraticAlgorithm;
extern const Algorithm kFlashAlgorithm;

}  // namespace fastmax
