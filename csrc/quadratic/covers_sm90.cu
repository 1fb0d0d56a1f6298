// Which calls the Hopper kernels of the quadratic algorithm run.

#include "core/sm90/tensor_map.h"
#include "quadratic/bounded.h"
#include "quadratic/kept_keys_sm90.h"
#include "quadratic/quadratic_sm90.h"

namespace fastmax {

bool covers_quadratic_sm90(const AttentionParams& p, Direction) {
  if (p.sm_arch != 90 || p.math != MathMode::kBF16 || is_bounded(p)) return false;
  if (p.head_dim != 64 && p.head_dim != 128) return false;
  const TokenTensor operands[] = {{p.q, p.q_stride, p.b, p.h, p.n, p.d, p.math},
                                  {p.k, p.k_stride, p.b, p.hk, p.m, p.d, p.math},
                                  {p.v, p.v_stride, p.b, p.hk, p.m, p.dv, p.math}};
  for (const TokenTensor& operand : operands) {
    if (!has_tensor_map(operand)) return false;
  }
  return driver_makes_tensor_maps();
}

size_t quadratic_fwd_sm90_workspace_bytes(const FwdParams& p) { return kept_words_bytes(p); }

}  // namespace fastmax
