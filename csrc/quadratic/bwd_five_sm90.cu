// Fastmax by the quadratic algorithm on Hopper: the backward in five products.

#include "quadratic/bwd_five_sm90.h"

#include <cstdlib>

namespace fastmax {

// For the trial: 1 takes five products.
bool takes_five_products(const BwdParams& p) {
  const char* value = std::getenv("FASTMAX_FIVE");  // heads that are worked on together, or 1: as many as is thought right
  return QuadraticBwdFiveSm90HeadDims::at_least(p.head_dim) == p.head_dim && value != nullptr && value[0] != '0';
}

int heads_at_once_of_trial() {
  const int value = std::atoi(std::getenv("FASTMAX_FIVE"));
  return value > 1 ? value : 16;
}

size_t quadratic_bwd_five_sm90_workspace_bytes(const BwdParams& p) { return QuadraticBwdFiveWorkspace(p).bytes; }

void quadratic_bwd_five_sm90(const BwdParams& p, cudaStream_t stream) {
  using Launch = LaunchQuadraticBwdFiveSm90<PolynomialScore>;
  dispatch_head_dim(QuadraticBwdFiveSm90HeadDims(), p.head_dim,
                    [&](auto head_dim) { Launch::run<Bf16, head_dim>(p, heads_at_once_of_trial(), stream); });
}

}  // namespace fastmax
