// Queries that fastmax/ops/extension.py sends to the library through ctypes.

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "bindings/debug.h"
#include "core/cost_model.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "core/sequence.h"
#include "linear/algorithm.h"
#include "quadratic/algorithm.h"

namespace fastmax {
namespace {

std::string build_info() {
  std::string info = "architectures " FASTMAX_ARCHS "; bf16, fp16, tf32, fp32; head dims up to" + NativeHeadDims::list() + "; CUDA " +
                     std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10) + "; kernels";
  for (const Algorithm* algorithm : {&kQuadraticAlgorithm, &kLinearAlgorithm, &kFlashAlgorithm}) {
    for (const Kernels& kernels : *algorithm) info += std::string(" ") + kernels.name;
  }
  return info;
}

// See fastmax_shortens_rows.
int shortens_rows(int device_index, int b, int h, int hk, int n, int m, int d, int dv) {
  const Device& device = get_device(device_index);
  AttentionParams p{};
  p.b = b, p.h = h, p.hk = hk, p.n = n, p.m = m;
  p.d = round_up(d, 8), p.dv = round_up(dv, 8);  // as they are copied
  p.head_dim_qk = p.head_dim_v = NativeHeadDims::at_least(std::max(d, dv));
  p.math = MathMode::kBF16, p.order = 1, p.causal = true, p.causal_offset = m - n;
  p.sm_arch = device.arch, p.sm_count = device.sm_count;
  const auto dense = [](int heads, int tokens, int columns) {
    return Stride{int64_t{heads} * tokens * columns, int64_t{tokens} * columns, columns};
  };
  p.q_stride = dense(h, n, p.d), p.k_stride = dense(hk, m, p.d), p.v_stride = dense(hk, m, p.dv);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    if (fit(kLinearOfShortened, p, direction).head_dim == 0) return 0;
  }
  return linear_is_faster(p) ? 2 : 1;
}

}  // namespace
}  // namespace fastmax

#define FASTMAX_EXPORT extern "C" __attribute__((visibility("default")))

// Version of the schemas that the bindings implement; SCHEMA_VERSION in fastmax/ops/extension.py must match.
FASTMAX_EXPORT int fastmax_schema_version() { return 29; }

// Why kernels cannot run on a device, a sentence without a full stop; null if they can.
FASTMAX_EXPORT const char* fastmax_device_problem(int index) {
  const std::string& problem = fastmax::get_device(index).problem;
  return problem.empty() ? nullptr : problem.c_str();
}

FASTMAX_EXPORT const char* fastmax_build_info() {
  static const std::string info = fastmax::build_info();
  return info.c_str();
}

FASTMAX_EXPORT void fastmax_set_debugging(int on) { fastmax::debugging() = on != 0; }

// Whether kernels scale the rows of q and k during attention (normalized_forward), for bf16 of these sizes, none of them 0: 0 no, 1 yes,
// 2 yes, and algorithm="auto" would take the linear algorithm.
FASTMAX_EXPORT int fastmax_shortens_rows(int device, int b, int h, int hk, int n, int m, int d, int dv) {
  return fastmax::shortens_rows(device, b, h, hk, n, m, d, dv);
}
