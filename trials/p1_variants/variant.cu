// One variant of the Hopper kernels of order 1 as a small library (build.py): causal, as many keys as queries, contiguous bf16.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "linear/linear.h"
#include "linear/order1/linear1.h"

using namespace fastmax;

namespace {

template <class Params>
Params params(int b, int h, int n, int d) {
  Params p{};
  p.b = b, p.h = p.hk = h, p.n = p.m = n, p.d = p.dv = p.head_dim = d;
  p.math = MathMode::kBF16;
  p.scale = 0.02f, p.a0 = 1.f, p.a1 = 1.f, p.a2 = 0.5f, p.order = 1;
  p.causal = true;
  p.sm_arch = 90, p.sm_count = 132;
  return p;
}

Stride contiguous(int heads, int tokens, int columns) {
  Stride stride{};
  stride.batch = static_cast<int64_t>(heads) * tokens * columns, stride.head = static_cast<int64_t>(tokens) * columns;
  stride.token = columns;
  return stride;
}

template <class Function>
int report(const Function& function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED int64_t workspace_bytes(int b, int h, int n, int d) {
  const size_t fwd = linear1_fwd_workspace_bytes(params<FwdParams>(b, h, n, d), kLinear1WalksSm90);
  auto p = params<BwdParams>(b, h, n, d);
  p.q_stride = p.k_stride = p.v_stride = p.o_stride = p.grad_o_stride = contiguous(h, n, d);
  const size_t bwd = linear1_bwd_workspace_bytes(p, kLinear1WalksSm90);
  return static_cast<int64_t>(fwd > bwd ? fwd : bwd);
}

EXPORTED int fwd(const void* q, const void* k, const void* v, void* o, float* z, void* workspace, int b, int h, int n, int d,
                 cudaStream_t stream) {
  return report([&] {
    auto p = params<FwdParams>(b, h, n, d);
    p.q = q, p.k = k, p.v = v, p.o = o, p.z = z, p.workspace = workspace;
    p.q_stride = p.k_stride = p.v_stride = p.o_stride = contiguous(h, n, d);
    launch_linear1_fwd(p, kLinear1WalksSm90, stream);
  });
}

EXPORTED int bwd(const void* q, const void* k, const void* v, const void* o, const void* grad_o, const float* z, void* grad_q,
                 void* grad_k, void* grad_v, void* workspace, int b, int h, int n, int d, cudaStream_t stream) {
  return report([&] {
    auto p = params<BwdParams>(b, h, n, d);
    p.q = q, p.k = k, p.v = v, p.o = o, p.grad_o = grad_o, p.z = z;
    p.grad_q = grad_q, p.grad_k = grad_k, p.grad_v = grad_v, p.workspace = workspace;
    p.q_stride = p.k_stride = p.v_stride = p.o_stride = p.grad_o_stride = contiguous(h, n, d);
    p.grad_q_stride = p.grad_k_stride = p.grad_v_stride = contiguous(h, n, d);
    launch_linear1_bwd(p, kLinear1WalksSm90, stream);
  });
}
