// The kernels of join_heads by arithmetic mode, compiled in shards of join_heads.cu.
#pragma once

#include "layer/layer.h"

namespace fastmax {

template <class Math>
struct JoinHeads {
  static void forward(JoinHeadsParams p, cudaStream_t stream);
  // Returns the floats of its workspace. measure: does nothing else.
  static int64_t backward(JoinHeadsParams p, cudaStream_t stream, bool measure);
};

}  // namespace fastmax
