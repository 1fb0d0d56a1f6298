"""csrc/core/cost_model.h: the number of tokens from which algorithm="auto" is the linear one, by architecture."""

import subprocess
from typing import NamedTuple

import pytest
from common import compile_probe

PROBE = """
#include <cstdio>
#include "core/cost_model.h"
#include "core/sm90/rates.h"

namespace fastmax {
bool is_hopper(const AttentionParams& p) {
  return p.sm_arch == 90 && p.math == MathMode::kBF16 && common_head_dim(p) <= 128 && p.q_stride.head != 0;
}
bool has_one_kernel(const AttentionParams& p) {
  return is_hopper(p) && common_head_dim(p) != 96 && p.n > 2048 && p.log_decay == nullptr;
}
bool is_order1(const AttentionParams& p) {
  return p.order == 1 && is_hopper(p) && HeadDims<64, 128>::has(common_head_dim(p)) && p.causal && p.log_decay == nullptr;
}
bool covers_all(const AttentionParams&, Direction) { return true; }
constexpr Kernels kQuadratic[] = {
    {"quadratic_fused_sm90", [](const AttentionParams& p, Direction) { return has_one_kernel(p); }, sm90_fused_rates},
    {"quadratic_sm90", [](const AttentionParams& p, Direction) { return is_hopper(p); }, sm90_rates},
    {"quadratic_sm80", covers_all, portable_rates},
};
constexpr Kernels kLinear[] = {
    {"linear2_sm90",
     [](const AttentionParams& p, Direction) { return p.order == 2 && is_hopper(p) && common_head_dim(p) != 96; }, sm90_rates},
    {"linear1_sm90", [](const AttentionParams& p, Direction) { return is_order1(p); }, sm90_rates},
    {"linear2_sm80", covers_all, portable_rates},
};
constexpr Algorithm kQuadraticAlgorithm("quadratic", quadratic_cost, kQuadratic);
constexpr Algorithm kLinearAlgorithm("linear", linear_cost, kLinear);
}  // namespace fastmax
using namespace fastmax;

int main(int count, char**) {
  AttentionParams p{};
  p.hk = 1;
  const float decay = -1.f;
  int math, causal, decays, expanded, group;
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d", &p.sm_arch, &p.d, &p.order, &math, &causal, &decays, &expanded, &group,
                    &p.b, &p.dv) == 10) {
    if (p.dv == 0) p.dv = p.d;
    p.math = static_cast<MathMode>(math), p.causal = causal, p.log_decay = decays ? &decay : nullptr;
    p.q_stride.head = expanded ? 0 : 64, p.h = group;
    int n = 1;
    if (count > 1) {
      for (n = 1024; n <= 65536; n *= 8) {
        p.n = p.m = n;
        for (const Algorithm* algorithm : {&kQuadraticAlgorithm, &kLinearAlgorithm}) {
          std::printf("%d ", fit(*algorithm, p, Direction::kBackward).head_dim);
        }
      }
      std::puts("");
      continue;
    }
    while (p.n = p.m = n, !linear_is_faster(p)) ++n;
    std::printf("%d\\n", n);
  }
}
"""
BF16, FP16 = 0, 1


class Call(NamedTuple):
    """The arguments of a call in the order in which the probe reads them.

    decays: 1 with decays. expanded: 1 with a stride that tensor maps do not support. group: query heads per key/value head;
    each of `batch` has one key/value head. value_dim: 0 stands for head_dim.
    """

    sm_arch: int
    head_dim: int
    order: int = 2
    math: int = BF16
    causal: int = 1
    decays: int = 0
    expanded: int = 0
    group: int = 1
    batch: int = 2048
    value_dim: int = 0


@pytest.fixture(scope="module")
def crossing():
    """Returns the smallest n for which a call takes the linear algorithm."""
    probe = compile_probe(PROBE)

    def run(call):
        line = " ".join(map(str, call))
        return int(subprocess.run([probe], input=line, check=True, capture_output=True, text=True).stdout)

    return run


@pytest.fixture(scope="module")
def head_dims():
    """Returns the head dims of the kernels that run a call, quadratic and linear, at 1024, 8192 and 65536 tokens."""
    probe = compile_probe(PROBE)

    def run(call):
        line = " ".join(map(str, call))
        printed = subprocess.run([probe, "fit"], input=line, check=True, capture_output=True, text=True).stdout.split()
        return [(int(quadratic), int(linear)) for quadratic, linear in zip(printed[::2], printed[1::2], strict=True)]

    return run


MEASURED = {  # between n of which one algorithm and the other was measured to be faster
    Call(80, 32): (2048, 4096),
    Call(80, 64): (4096, 8192),
    Call(80, 128): (8192, 32768),
    Call(80, 64, order=1): (1, 256),
    Call(80, 128, order=1): (256, 512),
    Call(90, 64): (4096, 8192),
    Call(90, 128): (16384, 32768),
}


@pytest.mark.parametrize("call", MEASURED)
def test_choices_are_as_measured(crossing, call):
    quadratic, linear = MEASURED[call]
    assert quadratic < crossing(call) <= linear


@pytest.mark.parametrize(
    "call",
    [
        Call(90, 256),
        Call(90, 64, math=FP16),
        Call(90, 128, expanded=1),
        Call(100, 64),
        Call(120, 128),
    ],
)
def test_what_the_hopper_kernels_leave_is_chosen_as_everywhere(crossing, call):
    assert crossing(call) == crossing(call._replace(sm_arch=80))


def test_rates_are_of_the_kernels_that_run(crossing):
    portable, hopper = crossing(Call(80, 128)), crossing(Call(90, 128))
    assert hopper > 1.1 * portable, "the quadratic kernels gained more"
    assert all(crossing(Call(90, d, decays=1)) == crossing(Call(90, d)) for d in (32, 64, 96)), "p = 2"
    assert crossing(Call(90, 128, decays=1)) < 0.95 * crossing(Call(90, 128)), "no backward in one kernel"
    assert crossing(Call(90, 32, order=1)) > 1.4 * crossing(Call(80, 32, order=1)), "linear kernels of order 1 are portable"
    assert crossing(Call(90, 64, order=1)) < 1.3 * crossing(Call(80, 64, order=1)), "they are not"
    assert crossing(Call(90, 96)) > 1.5 * crossing(Call(80, 96)), "linear kernels are portable"
    assert crossing(Call(90, 64, group=4)) < crossing(Call(90, 64)), "a state serves a group"
    assert crossing(Call(90, 64, causal=0)) < crossing(Call(90, 64))


def test_costs_follow_both_widths(crossing):
    """A column of values costs both algorithms alike; columns of keys give the linear one features, with their square."""
    narrow, wide_values, wide_keys, wide = (
        crossing(Call(80, d, value_dim=dv)) for d, dv in ((64, 64), (64, 128), (128, 64), (128, 128))
    )
    assert 0.9 * narrow < wide_values < 1.5 * narrow and wide_values < wide_keys == wide


@pytest.mark.parametrize(
    "d, dv, order, quadratic, linear",
    [
        (64, 128, 2, 128, 64),
        (32, 64, 2, 64, 32),
        (64, 256, 2, 128, 64),  # no Hopper kernels have a head dim of 256
        (40, 200, 2, 128, 64),
        (17, 130, 2, 96, 32),
        (48, 80, 2, 96, 64),
        (128, 64, 2, 128, 128),  # features are products of columns of keys
        (64, 60, 2, 64, 64),
        (64, 128, 1, 128, 128),
        (128, 256, 1, 128, 128),
    ],
)
def test_value_blocks_pay(head_dims, d, dv, order, quadratic, linear):
    """Kernels narrower than dv run once per block of its columns. The linear ones of order 2 have products of columns of keys,
    so their time grows with the square."""
    assert head_dims(Call(90, d, order, value_dim=dv))[1:] == [(quadratic, linear)] * 2


def test_few_tokens_run_once(head_dims):
    """Each further block costs launches."""
    assert head_dims(Call(90, 64, batch=1, value_dim=128)) == [(128, 128), (128, 64), (128, 64)]


def test_value_blocks_on_portable_kernels(head_dims):
    """The quadratic kernels run again only where wider ones would multiply many columns of zeros."""
    assert head_dims(Call(80, 64, value_dim=128)) == [(128, 64)] * 3
    assert head_dims(Call(80, 64, value_dim=256)) == [(256, 64)] * 3
    assert {quadratic for quadratic, _ in head_dims(Call(80, 64, value_dim=136))} == {96}


def test_few_heads_wait_for_launches(crossing):
    for call, quadratic, linear in (
        (Call(90, 32, order=1), 512, 2048),
        (Call(90, 64, order=1), 1024, 2048),
        (Call(90, 128, order=1), 1024, 2048),
    ):
        assert quadratic < crossing(call._replace(batch=16)) <= linear, "measured"
    assert crossing(Call(90, 64, batch=16)) <= 1.06 * crossing(Call(90, 64))
