// Launches by arithmetic mode.

#include "core/dispatch.h"
#include "layer/join_heads.h"
#include "layer/split_heads.h"

namespace fastmax {
namespace {

// Calls function(Type<Math>()). There is no product of matrices, so TF32 has no kernels of its own.
template <class Function>
decltype(auto) dispatch(MathMode math, const Function& function) {
  switch (math) {
    case MathMode::kBF16: return function(Type<Bf16>());
    case MathMode::kFP16: return function(Type<Fp16>());
    default: return function(Type<Fp32>());
  }
}

}  // namespace

void launch_split_heads(const SplitHeadsParams& p, cudaStream_t stream) {
  dispatch(p.math, [&](auto math) { SplitHeads<typename decltype(math)::type>::forward(p, stream); });
}

int64_t split_heads_workspace(const SplitHeadsParams& p) {
  return dispatch(p.math, [&](auto math) { return SplitHeads<typename decltype(math)::type>::backward(p, nullptr, true); });
}

void launch_split_heads_backward(const SplitHeadsParams& p, cudaStream_t stream) {
  dispatch(p.math, [&](auto math) { return SplitHeads<typename decltype(math)::type>::backward(p, stream, false); });
}

void launch_join_heads(const JoinHeadsParams& p, cudaStream_t stream) {
  dispatch(p.math, [&](auto math) { JoinHeads<typename decltype(math)::type>::forward(p, stream); });
}

int64_t join_heads_workspace(const JoinHeadsParams& p) {
  return dispatch(p.math, [&](auto math) { return JoinHeads<typename decltype(math)::type>::backward(p, nullptr, true); });
}

void launch_join_heads_backward(const JoinHeadsParams& p, cudaStream_t stream) {
  dispatch(p.math, [&](auto math) { return JoinHeads<typename decltype(math)::type>::backward(p, stream, false); });
}

}  // namespace fastmax
