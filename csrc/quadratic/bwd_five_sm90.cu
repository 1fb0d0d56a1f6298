// Fastmax by the quadratic algorithm on Hopper: the backward in five products.

#include "quadratic/bwd_five_sm90.h"

#include <cstdlib>

namespace fastmax {

// For the trial: 1 takes five products.
bool takes_five_products(const BwdParams& p) {
  const char* value = std::getenv("FASTMAX_FIVE");
  return p.head_dim == 128 && value != nullptr && value[0] != '0';
}

size_t quadratic_bwd_five_sm90_workspace_bytes(const BwdParams& p) { return QuadraticBwdFiveWorkspace(p).bytes; }

void quadratic_bwd_five_sm90(const BwdParams& p, cudaStream_t stream) {
  LaunchQuadraticBwdFiveSm90<PolynomialScore>::run<Bf16, 128>(p, stream);
}

}  // namespace fastmax
