#include "quadratic/algorithm.h"

#include "core/dispatch.h"
#include "quadratic/bounded.h"
#include "quadratic/quadratic_sm80.h"
#ifdef FASTMAX_HAS_SM90
#include "quadratic/quadratic_sm90.h"
#endif

namespace fastmax {
namespace {

bool covers_all(const AttentionParams&, Direction) { return true; }
bool covers_bounded(const AttentionParams& p, Direction) { return is_bounded(p); }
size_t no_workspace(const FwdParams&) { return 0; }

constexpr Kernels kQuadratic[] = {
#ifdef FASTMAX_HAS_SM90
    {"quadratic_fused_sm90", covers_quadratic_fused_sm90, /*fwd_workspace_bytes=*/nullptr, quadratic_fused_bwd_sm90_workspace_bytes,
     /*fwd=*/nullptr, quadratic_fused_bwd_sm90},
    {"quadratic_sm90", covers_quadratic_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     quadratic_fwd_sm90, quadratic_bwd_sm90},
    {"quadratic_bounded_sm90", covers_quadratic_bounded_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     quadratic_bounded_fwd_sm90, quadratic_bounded_bwd_sm90},
    {"quadratic_fading_sm90", covers_quadratic_fading_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     quadratic_fading_fwd_sm90, quadratic_fading_bwd_sm90},
#endif
    {"quadratic_bounded_sm80", covers_bounded, bounded_workspace_bytes<FwdParams>, bounded_workspace_bytes<BwdParams>,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_bounded_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_bounded_bwd<typename decltype(math)::type>(p, stream); });
     }},
    {"quadratic_sm80", covers_all, no_workspace, quadratic_bwd_workspace_bytes,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_bwd<typename decltype(math)::type>(p, stream); });
     }},
};

constexpr Kernels kFlash[] = {
#ifdef FASTMAX_HAS_SM90
    {"flash_fused_sm90", covers_flash_fused_sm90, /*fwd_workspace_bytes=*/nullptr, flash_fused_bwd_sm90_workspace_bytes,
     /*fwd=*/nullptr, flash_fused_bwd_sm90},
    {"flash_sm90", covers_flash_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes, flash_fwd_sm90,
     flash_bwd_sm90},
    {"flash_window_sm90", covers_flash_window_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     flash_window_fwd_sm90, flash_window_bwd_sm90},
    {"flash_bounded_sm90", covers_flash_bounded_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     flash_bounded_fwd_sm90, flash_bounded_bwd_sm90},
    {"flash_fading_sm90", covers_flash_fading_sm90, quadratic_fwd_sm90_workspace_bytes, quadratic_bwd_sm90_workspace_bytes,
     flash_fading_fwd_sm90, flash_fading_bwd_sm90},
#endif
    {"flash_bounded_sm80", covers_bounded, bounded_workspace_bytes<FwdParams>, bounded_workspace_bytes<BwdParams>,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_bounded_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_bounded_bwd<typename decltype(math)::type>(p, stream); });
     }},
    {"flash_sm80", covers_all, no_workspace, quadratic_bwd_workspace_bytes,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_bwd<typename decltype(math)::type>(p, stream); });
     }},
};

}  // namespace

constexpr Algorithm kQuadraticAlgorithm("quadratic", kQuadratic);
constexpr Algorithm kFlashAlgorithm("flash", kFlash);

}  // namespace fastmax
