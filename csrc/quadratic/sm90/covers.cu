// Which calls the Hopper kernels of the quadratic algorithm run.

#include "core/sm90/tensor_map.h"
#include "quadratic/bounds.h"
#include "quadratic/sm90/fused_bwd_plan.h"
#include "quadratic/sm90/kernels.h"

namespace fastmax {

namespace {

bool covers(const AttentionParams& p) {
  if (p.sm_arch != 90 || !QuadraticSm90HeadDims::has(common_head_dim(p))) return false;
  const TokenTensor operands[] = {{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math},
                                  {p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math},
                                  {p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math}};
  for (const TokenTensor& operand : operands) {
    if (!has_tensor_map(operand)) return false;
  }
  return driver_makes_tensor_maps();
}

bool covers_quadratic(const AttentionParams& p) { return p.math == MathMode::kBF16 && covers(p); }
bool covers_flash(const AttentionParams& p, Direction direction) {
  return (p.math == MathMode::kBF16 || (p.math == MathMode::kFP16 && direction == Direction::kForward)) && covers(p);
}
bool covers_fused(const AttentionParams& p, Direction direction) {
  return direction == Direction::kBackward && fused_bwd_pays(p);
}
bool has_bounds_alone(const AttentionParams& p) { return is_bounded(p) && !p.has_decay(); }

}  // namespace

bool covers_quadratic_sm90(const AttentionParams& p, Direction) { return !is_bounded(p) && covers_quadratic(p); }
bool covers_quadratic_fused_sm90(const AttentionParams& p, Direction direction) {
  return covers_fused(p, direction) && sums_divide_grad_o(p) && covers_quadratic_sm90(p, direction);
}
bool covers_quadratic_bounded_sm90(const AttentionParams& p, Direction) { return has_bounds_alone(p) && covers_quadratic(p); }
bool covers_quadratic_decay_sm90(const AttentionParams& p, Direction) { return p.has_decay() && covers_quadratic(p); }

bool covers_exact_window_sm90(const AttentionParams& p, Direction) { return !p.has_decay() && covers_quadratic(p); }
bool covers_exact_window_decay_sm90(const AttentionParams& p, Direction) {
  return p.has_decay() && covers_quadratic(p);
}

bool covers_flash_window_sm90(const AttentionParams& p, Direction direction) { return has_window_alone(p) && covers_flash(p, direction); }
bool covers_flash_sm90(const AttentionParams& p, Direction direction) { return !is_bounded(p) && covers_flash(p, direction); }
bool covers_flash_fused_sm90(const AttentionParams& p, Direction direction) {
  return covers_fused(p, direction) && covers_flash_sm90(p, direction);
}
bool covers_flash_bounded_sm90(const AttentionParams& p, Direction direction) {
  return has_bounds_alone(p) && covers_flash(p, direction);
}
bool covers_flash_decay_sm90(const AttentionParams& p, Direction direction) {
  return p.has_decay() && covers_flash(p, direction);
}

}  // namespace fastmax
