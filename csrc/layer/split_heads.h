// The kernels of split_heads by arithmetic mode, compiled in shards of split_heads.cu.
#pragma once

#include "layer/layer.h"

namespace fastmax {

template <class Math>
struct SplitHeads {
  static void forward(SplitHeadsParams p, cudaStream_t stream);
  // Returns the floats of its workspace. measure: does nothing else.
  static int64_t backward(SplitHeadsParams p, cudaStream_t stream, bool measure);
};

}  // namespace fastmax
