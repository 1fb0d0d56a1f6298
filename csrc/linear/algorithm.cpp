#include "linear/algorithm.h"

#include "linear/order1/linear1.h"
#include "linear/order2/linear2.h"

namespace fastmax {
namespace {

constexpr Kernels kLinear[] = {
    {"linear1_sm80", [](const AttentionParams& p, Direction) { return uses_linear1(p); }, linear1_fwd_workspace_bytes,
     linear1_bwd_workspace_bytes, launch_linear1_fwd, launch_linear1_bwd},
    {"linear2_sm80", [](const AttentionParams&, Direction) { return true; }, linear2_fwd_workspace_bytes,
     linear2_bwd_workspace_bytes, launch_linear2_fwd, launch_linear2_bwd},
};

}  // namespace

constexpr Algorithm kLinearAlgorithm("linear", kLinear);

}  // namespace fastmax
