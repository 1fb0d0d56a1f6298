#include "quadratic/algorithm.h"

#include "core/dispatch.h"
#include "quadratic/bounds.h"
#include "quadratic/quadratic_sm80.h"

namespace fastmax {
namespace {

bool covers_all(const AttentionParams&, Direction) { return true; }
bool with_bounds(const AttentionParams& p, Direction) { return has_bounds(p); }
size_t no_workspace(const FwdParams&) { return 0; }
size_t packed_fwd_workspace_bytes(const FwdParams& p) { return bound_table_bytes(p, Direction::kForward); }
size_t packed_bwd_workspace_bytes(const BwdParams& p) {
  return quadratic_bwd_workspace_bytes(p) + bound_table_bytes(p, Direction::kBackward);
}

constexpr Kernels kQuadratic[] = {
    {"quadratic_packed_sm80", with_bounds, packed_fwd_workspace_bytes, packed_bwd_workspace_bytes,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_packed_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { quadratic_packed_bwd<typename decltype(math)::type>(p, stream); });
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
    {"flash_packed_sm80", with_bounds, packed_fwd_workspace_bytes, packed_bwd_workspace_bytes,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_packed_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_packed_bwd<typename decltype(math)::type>(p, stream); });
     }},
    {"flash_window_sm80", [](const AttentionParams& p, Direction) { return p.window; }, no_workspace, quadratic_bwd_workspace_bytes,
     [](const FwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_window_fwd<typename decltype(math)::type>(p, stream); });
     },
     [](const BwdParams& p, cudaStream_t stream) {
       dispatch_math(p.math, [&](auto math) { flash_window_bwd<typename decltype(math)::type>(p, stream); });
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
