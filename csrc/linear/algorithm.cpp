#include "linear/algorithm.h"

#include <iterator>

#include "core/costs.h"
#include "linear/launch.h"
#include "linear/order1/linear1.h"
#include "linear/order2/linear2.h"
#ifdef FASTMAX_HAS_SM90
#include "core/sm90/rates.h"
#include "linear/order1/sm90/kernels.h"
#include "linear/order2/sm90/kernels.h"
#endif

namespace fastmax {
namespace {

constexpr Kernels kLinear[] = {
#ifdef FASTMAX_HAS_SM90
    {"linear2_sm90", linear2_sm90_covers, sm90_rates,
     [](const FwdParams& p) { return linear2_fwd_workspace_bytes(p, kStatePassesSm90); },
     [](const BwdParams& p) { return linear2_bwd_workspace_bytes(p, kStatePassesSm90); },
     [](const FwdParams& p, cudaStream_t stream) { launch_linear2_fwd(p, kStatePassesSm90, stream); },
     [](const BwdParams& p, cudaStream_t stream) { launch_linear2_bwd(p, kStatePassesSm90, stream); },
     [](const FwdParams& p) { return linear2_fwd_saved_bytes(p, kStatePassesSm90); },
     [](const BwdParams& p) { return linear2_bwd_saved_bytes(p, kStatePassesSm90); }, /*joins_parts=*/true},
    {"linear1_sm90", linear1_sm90_covers, sm90_rates,
     [](const FwdParams& p) { return linear1_fwd_workspace_bytes(p, kLinear1WalksSm90); },
     [](const BwdParams& p) { return linear1_bwd_workspace_bytes(p, kLinear1WalksSm90); },
     [](const FwdParams& p, cudaStream_t stream) { launch_linear1_fwd(p, kLinear1WalksSm90, stream); },
     [](const BwdParams& p, cudaStream_t stream) { launch_linear1_bwd(p, kLinear1WalksSm90, stream); }},
#endif
    {"linear1_sm80", [](const AttentionParams& p, Direction) { return uses_linear1(p) && !has_decay(p); }, portable_rates,
     [](const FwdParams& p) { return linear1_fwd_workspace_bytes(p, kLinear1WalksSm80); },
     [](const BwdParams& p) { return linear1_bwd_workspace_bytes(p, kLinear1WalksSm80); },
     [](const FwdParams& p, cudaStream_t stream) { launch_linear1_fwd(p, kLinear1WalksSm80, stream); },
     [](const BwdParams& p, cudaStream_t stream) { launch_linear1_bwd(p, kLinear1WalksSm80, stream); }},
    {"linear2_sm80", [](const AttentionParams&, Direction) { return true; }, portable_rates,
     [](const FwdParams& p) { return linear2_fwd_workspace_bytes(p, kStatePassesSm80); },
     [](const BwdParams& p) { return linear2_bwd_workspace_bytes(p, kStatePassesSm80); },
     [](const FwdParams& p, cudaStream_t stream) { launch_linear2_fwd(p, kStatePassesSm80, stream); },
     [](const BwdParams& p, cudaStream_t stream) { launch_linear2_bwd(p, kStatePassesSm80, stream); },
     [](const FwdParams& p) { return linear2_fwd_saved_bytes(p, kStatePassesSm80); },
     [](const BwdParams& p) { return linear2_bwd_saved_bytes(p, kStatePassesSm80); }},
};

// Rows of this table know FwdParams::state and BwdParams::state: those of order 2, which compute order 1 too.
constexpr Kernels kFromState[] = {
#ifdef FASTMAX_HAS_SM90
    kLinear[0],
#endif
    kLinear[std::size(kLinear) - 1],
};

#ifdef FASTMAX_HAS_SM90
constexpr Kernels kOfShortened[] = {kLinear[1]};
constexpr Kernels kExactWindow[] = {
    {"linear2_window_sm90", linear2_window_sm90_covers, sm90_rates,
     [](const FwdParams& p) { return linear2_fwd_workspace_bytes(p, kStatePassesSm90); },
     [](const BwdParams& p) { return linear2_bwd_workspace_bytes(p, kStatePassesSm90); },
     [](const FwdParams& p, cudaStream_t stream) { launch_linear2_fwd(p, kStatePassesSm90, stream); },
     [](const BwdParams& p, cudaStream_t stream) { launch_linear2_bwd(p, kStatePassesSm90, stream); }},
};
#endif

}  // namespace

void launch_gradients_of_sums(const BwdParams& p, void* g, float* e, cudaStream_t stream) {
  PreparedInputs::prepare(p, contiguous(g, p.h, p.n, p.dv), e, p.n, stream);
}

constexpr Algorithm kLinearAlgorithm("linear", linear_cost, kLinear);
constexpr Algorithm kLinearFromState("linear from a state", linear2_cost, kFromState);
#ifdef FASTMAX_HAS_SM90
constexpr Algorithm kLinearOfShortened("linear of shortened rows", linear_cost, kOfShortened);
constexpr Algorithm kLinearExactWindow("linear exact window", linear2_cost, kExactWindow);
#else
constexpr Algorithm kLinearOfShortened("linear of shortened rows");
constexpr Algorithm kLinearExactWindow("linear exact window");
#endif

}  // namespace fastmax
