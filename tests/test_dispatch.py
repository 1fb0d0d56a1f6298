"""csrc/core on the host: which algorithm computes a call. The probe is compiled from the headers and the tables of
algorithms."""

import subprocess

from common import compile_probe

PROBE = """
#include <cstdio>

#include "core/cost_model.h"
#include "core/device.h"
#include "core/dispatch.h"
#include "linear/algorithm.cpp"
#include "quadratic/algorithm.cpp"

namespace fastmax {  // in place of the kernels
size_t linear1_fwd_workspace_bytes(const FwdParams&, const Linear1Walks&) { return 1; }
size_t linear1_bwd_workspace_bytes(const BwdParams&, const Linear1Walks&) { return 2; }
size_t linear2_fwd_workspace_bytes(const FwdParams&, const StatePasses&) { return 3; }
size_t linear2_bwd_workspace_bytes(const BwdParams&, const StatePasses&) { return 4; }
size_t linear2_fwd_saved_bytes(const FwdParams&, const StatePasses&) { return 5; }
size_t linear2_bwd_saved_bytes(const BwdParams&, const StatePasses&) { return 6; }
const StatePasses kStatePassesSm80{};
const Linear1Walks kLinear1WalksSm80{};
void launch_linear1_fwd(const FwdParams&, const Linear1Walks&, cudaStream_t) { std::puts("linear1 fwd"); }
void launch_linear1_bwd(const BwdParams&, const Linear1Walks&, cudaStream_t) { std::puts("linear1 bwd"); }
void launch_linear2_fwd(const FwdParams&, const StatePasses&, cudaStream_t) { std::puts("linear2 fwd"); }
void launch_linear2_bwd(const BwdParams&, const StatePasses&, cudaStream_t) { std::puts("linear2 bwd"); }

struct Bf16 { static constexpr const char* kName = "bf16"; };
struct Fp16 { static constexpr const char* kName = "fp16"; };
struct Tf32 { static constexpr const char* kName = "tf32"; };
struct Fp32 { static constexpr const char* kName = "fp32"; };
struct PolynomialScore { static constexpr const char* kName = "quadratic"; };
struct SoftmaxScore { static constexpr const char* kName = "flash"; };
struct DenseVisibility { static constexpr const char* kName = ""; };
struct TableVisibility { static constexpr const char* kName = "_bounded"; };
template <class Score, class Visibility, class Math>
void quadratic_fwd(const FwdParams&, cudaStream_t) {
  std::printf("%s%s_fwd %s\\n", Score::kName, Visibility::kName, Math::kName);
}
template <class Score, class Visibility, class Math>
void quadratic_bwd(const BwdParams&, cudaStream_t) {
  std::printf("%s%s_bwd %s\\n", Score::kName, Visibility::kName, Math::kName);
}
#define FASTMAX_STAND_IN(Score, Visibility, Math)                                         \\
  template void quadratic_fwd<Score, Visibility, Math>(const FwdParams&, cudaStream_t);   \\
  template void quadratic_bwd<Score, Visibility, Math>(const BwdParams&, cudaStream_t);
#define FASTMAX_STAND_INS(Score, Visibility)                                              \\
  FASTMAX_STAND_IN(Score, Visibility, Bf16) FASTMAX_STAND_IN(Score, Visibility, Fp16)     \\
  FASTMAX_STAND_IN(Score, Visibility, Tf32) FASTMAX_STAND_IN(Score, Visibility, Fp32)
FASTMAX_STAND_INS(PolynomialScore, DenseVisibility)
FASTMAX_STAND_INS(PolynomialScore, TableVisibility)
FASTMAX_STAND_INS(SoftmaxScore, DenseVisibility)
FASTMAX_STAND_INS(SoftmaxScore, TableVisibility)
template <class Math>
void linear_prepare(const PrepareArgs&, cudaStream_t) {}
size_t bound_table_bytes(const AttentionParams&, Direction direction) { return direction == Direction::kForward ? 5 : 6; }
size_t decay_sum_bytes(const AttentionParams&) { return 7; }
size_t pair_sum_bytes(const BwdParams&) { return 8; }
size_t decay_gradient_bytes(const BwdParams&) { return 9; }
PairSums pair_sums(const BwdParams&, void*) { return {}; }
void fill_bound_tables(AttentionParams&, float, void*, Direction, cudaStream_t) {}
void fill_decay_sums(AttentionParams&, Resets, void*, cudaStream_t) {}
void fill_decay_gradient(const BwdParams&, const PairSums&, void*, cudaStream_t) {}
}  // namespace fastmax

using namespace fastmax;

void run(const Algorithm& algorithm, const FwdParams& fwd, const BwdParams& bwd) {
  const Kernels& forward = select(algorithm, fwd, Direction::kForward);
  const Kernels& backward = select(algorithm, bwd, Direction::kBackward);
  std::printf("%s %s %s %zu %zu\\n", algorithm.name, forward.name, backward.name, forward.fwd_workspace_bytes(fwd),
              backward.bwd_workspace_bytes(bwd));
  forward.fwd(fwd, nullptr);
  backward.bwd(bwd, nullptr);
}

// A newer architecture: the forward without a mask.
bool covers_some(const AttentionParams& p, Direction direction) {
  return p.sm_arch >= 90 && direction == Direction::kForward && p.attention_mask == nullptr;
}
bool covers_none(const AttentionParams&, Direction) { return false; }
constexpr Kernels kTwo[] = {{"new", covers_some}, {"old", [](const AttentionParams&, Direction) { return true; }}};
constexpr Kernels kNone[] = {{"none", covers_none}};
constexpr Algorithm kTwoRows("two", quadratic_cost, kTwo), kNoRow("empty", quadratic_cost, kNone);

int main() {
  FwdParams fwd{};
  BwdParams bwd{};
  const auto set = [&](auto member, auto value) { fwd.*member = value, bwd.*member = value; };
  set(&Problem::b, 1), set(&Problem::h, 2), set(&Problem::n, 8), set(&Problem::dv, 32);
  for (const int order : {1, 2}) {
    for (const int head_dim : {128, 256}) {
      set(&Problem::order, order), set(&Problem::head_dim_qk, head_dim), set(&Problem::head_dim_v, head_dim);
      std::printf("order %d, head_dim %d: ", order, head_dim);
      run(kLinearAlgorithm, fwd, bwd);
    }
  }
  for (const MathMode math : {MathMode::kBF16, MathMode::kFP16, MathMode::kTF32, MathMode::kFP32}) {
    set(&Problem::math, math);
    run(kQuadraticAlgorithm, fwd, bwd);
    run(kFlashAlgorithm, fwd, bwd);
  }

  const int32_t bound = 0;
  for (const bool window : {true, false}) {
    set(&Problem::window, window);
    run(kFlashAlgorithm, fwd, bwd);
    for (const auto member : {&AttentionParams::k_start, &AttentionParams::k_end}) {
      set(member, KeyBounds{&bound, {}});
      run(kQuadraticAlgorithm, fwd, bwd);
      run(kFlashAlgorithm, fwd, bwd);
      set(member, KeyBounds{});
    }
  }
  const float decay = -1.f;
  float gradient = 0.f;
  set(&AttentionParams::log_decay, &decay);
  run(kQuadraticAlgorithm, fwd, bwd);
  set(&Problem::order, 1), set(&Problem::head_dim_qk, 64), set(&Problem::head_dim_v, 64);
  run(kLinearAlgorithm, fwd, bwd);
  AttentionParams few = fwd;
  few.d = few.dv = 64;
  few.b = 2048, few.h = few.hk = 1, few.n = few.m = 600, few.causal = true;
  std::printf("first order, 600 tokens, decay: linear %d\\n", linear_is_faster(few));
  few.log_decay = nullptr;
  std::printf("first order, 600 tokens: linear %d\\n", linear_is_faster(few));
  bwd.grad_log_decay = &gradient;
  run(kFlashAlgorithm, fwd, bwd);
  set(&AttentionParams::log_decay, nullptr), bwd.grad_log_decay = nullptr;

  const uint8_t mask = 1;
  for (const int arch : {80, 90}) {
    for (const uint8_t* pointer : {static_cast<const uint8_t*>(nullptr), &mask}) {
      fwd.sm_arch = arch, fwd.attention_mask = pointer;
      std::printf("sm_%d%s: %s %s\\n", arch, pointer == nullptr ? "" : " mask", select(kTwoRows, fwd, Direction::kForward).name,
                  select(kTwoRows, fwd, Direction::kBackward).name);
    }
  }
  try {
    select(kNoRow, fwd, Direction::kForward);
  } catch (const std::logic_error& error) {
    std::puts(error.what());
  }

  using Dims = HeadDims<16, 32, 96>;
  static_assert(Dims::at_least(1) == 16 && Dims::at_least(16) == 16 && Dims::at_least(17) == 32 && Dims::at_least(97) == 0);
  for (const int d : {1, 16, 33, 96}) dispatch_head_dim(Dims(), d, [&](auto dim) { std::printf("%d as %d\\n", d, int{dim}); });
  try {
    dispatch_head_dim(Dims(), 97, [](auto) { std::puts("reached"); });
  } catch (const std::logic_error& error) {
    std::puts(error.what());
  }
  few.head_dim_qk = 64, few.head_dim_v = 128;
  try {
    common_head_dim(few);
  } catch (const std::logic_error& error) {
    std::puts(error.what());
  }
  for (const int arch : {80, 86, 87, 89, 90, 100, 103, 120, 121}) std::printf("%d: %d KB\\n", arch, shared_limit(arch) / 1024);
}
"""

EXPECTED = """\
order 1, head_dim 128: linear linear1_sm80 linear1_sm80 1 2
linear1 fwd
linear1 bwd
order 1, head_dim 256: linear linear2_sm80 linear2_sm80 3 4
linear2 fwd
linear2 bwd
order 2, head_dim 128: linear linear2_sm80 linear2_sm80 3 4
linear2 fwd
linear2 bwd
order 2, head_dim 256: linear linear2_sm80 linear2_sm80 3 4
linear2 fwd
linear2 bwd
""" + "".join(
    f"{name} {name}_sm80 {name}_sm80 0 256\n{name}_fwd {mode}\n{name}_bwd {mode}\n"
    for mode in ("bf16", "fp16", "tf32", "fp32")
    for name in ("quadratic", "flash")
) + "".join(
    f"{algorithm} {name}_sm80 {name}_sm80 {workspaces}\n{name}_fwd fp32\n{name}_bwd fp32\n"
    for algorithm, name, workspaces in (
        ("flash", "flash_bounded", "256 512"),  # a window
        *(("quadratic", "quadratic_bounded", "256 512"), ("flash", "flash_bounded", "256 512")) * 2,
        ("flash", "flash", "0 256"),
        *(("quadratic", "quadratic_bounded", "256 512"), ("flash", "flash_bounded", "256 512")) * 2,
        ("quadratic", "quadratic_bounded", "512 768"),  # decay
    )
) + """\
linear linear2_sm80 linear2_sm80 3 4
linear2 fwd
linear2 bwd
first order, 600 tokens, decay: linear 0
first order, 600 tokens: linear 1
flash flash_bounded_sm80 flash_bounded_sm80 512 1033
flash_bounded_fwd fp32
flash_bounded_bwd fp32
sm_80: old old
sm_80 mask: old old
sm_90: new old
sm_90 mask: old old
fastmax: no kernels of the algorithm empty cover this call
1 as 16
16 as 16
33 as 96
96 as 96
fastmax: no kernel for head_dim 97; compiled: 16 32 96
fastmax: no kernel for head_dim_qk 64 with head_dim_v 128
80: 163 KB
86: 99 KB
87: 163 KB
89: 99 KB
90: 227 KB
100: 227 KB
103: 227 KB
120: 99 KB
121: 99 KB
"""  # fmt: skip


def test_who_computes_a_call():
    probe = compile_probe(PROBE)
    assert subprocess.run([probe], check=True, capture_output=True, text=True).stdout == EXPECTED
