// One variant of the quadratic Hopper kernels as a small library (build.py): Fastmax, causal or not, contiguous bf16 of HD columns or
// fewer.
#include <cstdio>
#include <exception>

#include "quadratic/bwd_sm90.h"
#include "quadratic/fwd_sm90.h"

using namespace fastmax;

namespace {

template <class Params>
Params params(int b, int h, int hk, int n, int m, int d, float scale, int causal) {
  Params p{};
  p.b = b, p.h = h, p.hk = hk, p.n = n, p.m = m, p.d = d, p.dv = d, p.head_dim = HD;
  p.math = MathMode::kBF16;
  p.scale = scale, p.a0 = 1.f, p.a1 = 1.f, p.a2 = 0.5f, p.order = 2;
  p.causal = causal != 0, p.causal_offset = m - n;
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

EXPORTED int fwd(const void* q, const void* k, const void* v, void* o, float* z, int b, int h, int hk, int n, int m, int d, float scale,
                 int causal, cudaStream_t stream) {
  return report([&] {
    auto p = params<FwdParams>(b, h, hk, n, m, d, scale, causal);
    p.q = q, p.k = k, p.v = v, p.o = o, p.z = z;
    p.q_stride = p.o_stride = contiguous(h, n, d), p.k_stride = p.v_stride = contiguous(hk, m, d);
    LaunchQuadraticFwdSm90<PolynomialScore, DenseVisibility>::run(p, stream);
  });
}

EXPORTED int64_t bwd_bytes(int b, int h, int n, int) {  // row scores, and room to align what else there is none of
  return static_cast<int64_t>(b) * h * ((n + 127) / 128 * 128) * 16 + 4096;
}

EXPORTED int bwd(const void* q, const void* k, const void* v, const void* o, const void* grad_o, const float* z, void* grad_q,
                 void* grad_k, void* grad_v, void* workspace, int b, int h, int hk, int n, int m, int d, float scale, int causal,
                 cudaStream_t stream) {
  return report([&] {
    auto p = params<BwdParams>(b, h, hk, n, m, d, scale, causal);
    p.q = q, p.k = k, p.v = v, p.o = o, p.grad_o = grad_o, p.z = z;
    p.grad_q = grad_q, p.grad_k = grad_k, p.grad_v = grad_v, p.workspace = workspace;
    p.q_stride = p.o_stride = p.grad_o_stride = p.grad_q_stride = contiguous(h, n, d);
    p.k_stride = p.v_stride = p.grad_k_stride = p.grad_v_stride = contiguous(hk, m, d);
    LaunchQuadraticBwdSm90<PolynomialScore, DenseVisibility>::run<Bf16, HD>(p, stream);
  });
}
