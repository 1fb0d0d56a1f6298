#include "quadratic/algorithm.h"

#include "core/costs.h"
#include "core/dispatch.h"
#include "quadratic/bounds.h"
#include "quadratic/portable/bounded.h"
#include "quadratic/portable/kernels.h"
#ifdef FASTMAX_HAS_SM90
#include "core/sm90/rates.h"
#include "quadratic/sm90/kernels.h"
#endif

namespace fastmax {
namespace {

bool covers_all(const AttentionParams&, Direction) { return true; }
bool covers_bounded(const AttentionParams& p, Direction) { return is_bounded(p); }
size_t no_workspace(const FwdParams&) { return 0; }

template <class Score, class Visibility>
void portable_fwd(const FwdParams& p, cudaStream_t stream) {
  dispatch_math(p.math, [&](auto math) { quadratic_fwd<Score, Visibility, typename decltype(math)::type>(p, stream); });
}
template <class Score, class Visibility>
void portable_bwd(const BwdParams& p, cudaStream_t stream) {
  dispatch_math(p.math, [&](auto math) { quadratic_bwd<Score, Visibility, typename decltype(math)::type>(p, stream); });
}

#ifdef FASTMAX_HAS_SM90
template <class Score, class Visibility>
constexpr Kernels kernels_sm90(const char* name, bool (*covers)(const AttentionParams& p, Direction direction)) {
  return {name, covers, sm90_rates, quadratic_fwd_sm90_workspace_bytes<Score, Visibility>,
          quadratic_bwd_sm90_workspace_bytes<Score, Visibility>, quadratic_fwd_sm90<Score, Visibility>,
          quadratic_bwd_sm90<Score, Visibility>};
}
#endif

constexpr Kernels kQuadratic[] = {
#ifdef FASTMAX_HAS_SM90
    {"quadratic_fused_sm90", covers_quadratic_fused_sm90, sm90_fused_rates, /*fwd_workspace_bytes=*/nullptr,
     quadratic_fused_bwd_sm90_workspace_bytes<PolynomialScore>, /*fwd=*/nullptr, quadratic_fused_bwd_sm90<PolynomialScore>},
    kernels_sm90<PolynomialScore, DenseVisibility>("quadratic_sm90", covers_quadratic_sm90),
    kernels_sm90<PolynomialScore, TableVisibility>("quadratic_bounded_sm90", covers_quadratic_bounded_sm90),
    kernels_sm90<PolynomialScore, DecayVisibility>("quadratic_decay_sm90", covers_quadratic_decay_sm90),
#endif
    {"quadratic_bounded_sm80", covers_bounded, portable_rates, bounded_workspace_bytes<FwdParams>,
     bounded_workspace_bytes<BwdParams>, portable_fwd<PolynomialScore, TableVisibility>, portable_bwd<PolynomialScore, TableVisibility>},
    {"quadratic_sm80", covers_all, portable_rates, no_workspace, quadratic_bwd_workspace_bytes,
     portable_fwd<PolynomialScore, DenseVisibility>, portable_bwd<PolynomialScore, DenseVisibility>},
};

constexpr Kernels kFlash[] = {
#ifdef FASTMAX_HAS_SM90
    {"flash_fused_sm90", covers_flash_fused_sm90, sm90_fused_rates, /*fwd_workspace_bytes=*/nullptr,
     quadratic_fused_bwd_sm90_workspace_bytes<SoftmaxScore>, /*fwd=*/nullptr, quadratic_fused_bwd_sm90<SoftmaxScore>},
    kernels_sm90<SoftmaxScore, DenseVisibility>("flash_sm90", covers_flash_sm90),
    kernels_sm90<SoftmaxScore, WindowVisibility>("flash_window_sm90", covers_flash_window_sm90),
    kernels_sm90<SoftmaxScore, TableVisibility>("flash_bounded_sm90", covers_flash_bounded_sm90),
    kernels_sm90<SoftmaxScore, DecayVisibility>("flash_decay_sm90", covers_flash_decay_sm90),
#endif
    {"flash_bounded_sm80", covers_bounded, portable_rates, bounded_workspace_bytes<FwdParams>,
     bounded_workspace_bytes<BwdParams>, portable_fwd<SoftmaxScore, TableVisibility>, portable_bwd<SoftmaxScore, TableVisibility>},
    {"flash_sm80", covers_all, portable_rates, no_workspace, quadratic_bwd_workspace_bytes,
     portable_fwd<SoftmaxScore, DenseVisibility>, portable_bwd<SoftmaxScore, DenseVisibility>},
};

#ifdef FASTMAX_HAS_SM90
constexpr Kernels kExactWindow[] = {
    kernels_sm90<ExactWindowScore, TableVisibility>("exact_window_sm90", covers_exact_window_sm90),
    kernels_sm90<ExactWindowScore, DecayVisibility>("exact_window_decay_sm90", covers_exact_window_decay_sm90),
};
#endif

}  // namespace

constexpr Algorithm kQuadraticAlgorithm("quadratic", quadratic_cost, kQuadratic);
constexpr Algorithm kFlashAlgorithm("flash", quadratic_cost, kFlash);
#ifdef FASTMAX_HAS_SM90
constexpr Algorithm kExactWindowAlgorithm("exact_window", quadratic_cost, kExactWindow);
#else
constexpr Algorithm kExactWindowAlgorithm("exact_window");
#endif

}  // namespace fastmax
