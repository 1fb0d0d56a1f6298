"""Passes of the linear kernels of order 1 (csrc/linear/order1/launch.cpp with stand-ins for the kernels). Every row is walked
once, each segment starts from sums of all rows before it, and all reads and writes lie in the workspace."""

import random
import subprocess

import pytest
from common import compile_probe

PROBE = """
#define FASTMAX_HAS_SM90
#include <cstdio>

#include "linear/linear.h"
#include "linear/order1/sm90/kernels.h"

namespace fastmax {
struct Bf16;
struct Fp16;
struct Tf32;
struct Fp32;

static void print(const char* pass, const Linear1Problem& p, const float* prefixes) {
  std::printf("%s %d %d %d %d %d %d %d ", pass, p.states(), p.x_group, p.y_group, p.nx, p.ny, p.pad, p.boundary);
  std::printf("%d %d %d %d %d %d %p\\n", p.group, p.segment, p.segments, p.part, p.lead_parts, p.parts, (const void*)prefixes);
}
static void print(const char* name, const float* data, int64_t head) {
  std::printf("%s %p %lld\\n", name, (const void*)data, (long long)head);
}
static void scales(const RowScale& e, const RowScale& inverse) {
  if (inverse.data != nullptr) print("e", e.data, e.head), print("inverse", inverse.data, inverse.head);
}
static void report(const Linear1SumArgs& a) { print("sums", a, a.prefixes), scales(a.y_scale, a.w_scale); }
static void report(const Linear1PairWalkArgs& a) { print("pair", a, a.prefixes), scales(a.y_scale, a.w_scale); }
static void report(const Linear1WalkArgs& a) {
  print("walk", a, a.prefixes);
  if (a.o.data != nullptr) scales({a.e, a.e_head, 1}, {a.inverse_z, a.e_head, 1});
}

template <class Math, class Args>
void linear_pass(const Args& a, int, cudaStream_t) {
  report(a);
}
template <class Math>
void linear_prepare(const PrepareArgs&, cudaStream_t) {}
template <class Math>
void linear_widen(const View&, float*, int, int, int, int, cudaStream_t) {}
void linear1_sums_sm90(const Linear1SumArgs& a, int, cudaStream_t) { report(a); }
void linear1_walk_sm90(const Linear1WalkArgs& a, int, cudaStream_t) { report(a); }
void linear1_pair_walk_sm90(const Linear1PairWalkArgs& a, int, cudaStream_t) { report(a); }
}  // namespace fastmax

#include "core/sm90/tensor_map.h"
namespace fastmax {
bool has_tensor_map(const TokenTensor& x) { return x.stride.token > 0; }
bool driver_makes_tensor_maps() { return true; }
}  // namespace fastmax

#include "linear/order1/launch.cpp"
#include "linear/order1/sm90/launch.cpp"

extern "C" {
const char* cudaGetErrorString(cudaError_t) { return ""; }
cudaError_t cudaMemcpy2DAsync(void*, size_t, const void*, size_t, size_t, size_t, cudaMemcpyKind, cudaStream_t) {
  return cudaSuccess;
}
cudaError_t cudaMemset2DAsync(void* data, size_t pitch, int, size_t width, size_t height, cudaStream_t) {
  std::printf("zeros %p %zu %zu %zu\\n", data, pitch, width, height);
  return cudaSuccess;
}
}

int main() {
  using namespace fastmax;
  int hopper, expanded, mask;
  BwdParams b{};
  while (std::scanf("%d %d %d %d %d %d %d %d %d %d", &b.b, &b.h, &b.hk, &b.n, &b.m, &b.head_dim_qk, &b.sm_count, &hopper,
                    &expanded, &mask) == 10) {
    const uint8_t kept = 1;
    b.d = b.dv = b.head_dim_v = b.head_dim_qk, b.causal = true, b.causal_offset = b.m - b.n;
    b.order = 1, b.sm_arch = 90, b.math = MathMode::kBF16;
    b.q_stride = b.k_stride = b.v_stride = b.o_stride = b.grad_o_stride = {1, 1, 64};
    b.o = &b;
    if (expanded) b.grad_o_stride.token = 0;
    if (mask) b.attention_mask = &kept;
    else b.attention_mask = nullptr;
    FwdParams f{};
    static_cast<AttentionParams&>(f) = b;
    f.z = reinterpret_cast<float*>(&f);
    const Linear1Walks& walks = hopper ? kLinear1WalksSm90 : kLinear1WalksSm80;
    const size_t bytes[2] = {linear1_fwd_workspace_bytes(f, walks), linear1_bwd_workspace_bytes(b, walks)};
    const uintptr_t base = 0x10000000;
    std::printf("covers %d %d\\n", linear1_sm90_covers(f, Direction::kForward), linear1_sm90_covers(b, Direction::kBackward));
    std::printf("fwd %zu\\n", bytes[0]);
    f.workspace = b.workspace = reinterpret_cast<void*>(base);
    launch_linear1_fwd(f, walks, nullptr);
    std::printf("bwd %zu\\n", bytes[1]);
    launch_linear1_bwd(b, walks, nullptr);
    std::puts("end");
  }
}
"""
BASE = 0x10000000
FIELDS = [
    *("states", "x_group", "y_group", "nx", "ny", "pad", "boundary"),
    *("group", "segment", "segments", "part", "lead_parts", "parts", "prefixes"),
]


@pytest.fixture(scope="module")
def plans():
    """Returns a function of calls. For each call it gives what the call covers, its two workspaces and its passes."""
    probe = compile_probe(PROBE)

    def run(calls):
        given = "\n".join(" ".join(map(str, map(int, call))) for call in calls)
        lines = subprocess.run([probe], input=given, capture_output=True, text=True, check=True).stdout.split("\n")
        blocks = "\n".join(lines).split("end\n")[:-1]
        assert len(blocks) == len(calls)
        return blocks

    return run


def pointer(text):
    return 0 if text == "(nil)" else int(text, 16)


def passes_of(lines):
    """Returns (name, numbers, tensors that accompany the rows) of every pass."""
    found = []
    for line in lines:
        name, *numbers = line.split()
        if name in ("sums", "walk", "pair"):
            found.append((name, dict(zip(FIELDS, [*map(int, numbers[:-1]), pointer(numbers[-1])], strict=True)), {}))
        elif name == "zeros":
            found.append((name, (pointer(numbers[0]), *map(int, numbers[1:])), {}))
        else:
            found[-1][2][name] = (pointer(numbers[0]), int(numbers[1]))
    return found


def check_problem(x, d, sm_count, hopper):
    """Checks that segments cover the rows of x, and that the parts up to part_before cover exactly the rows of y before each
    segment."""
    assert x["segment"] % 256 == 0 and x["boundary"] % 128 == 0 and x["part"] % 128 == 0
    assert (x["segments"] - 1) * x["segment"] < x["nx"] <= x["segments"] * x["segment"]
    assert x["segment"] % x["part"] == 0
    for segment in range(x["segments"]):
        before = x["lead_parts"] - 1 + segment * (x["segment"] // x["part"])
        end = x["boundary"] + (before - x["lead_parts"] + 1) * x["part"]
        assert before < x["parts"] and end == x["boundary"] + segment * x["segment"]
    assert x["boundary"] - x["lead_parts"] * x["part"] <= 0, "the first part begins at or before the first row"
    walks = x["states"] * x["x_group"]
    if hopper:
        assert x["group"] == (2 if d == 64 and 2 * walks <= sm_count else 1)
        assert x["segments"] == 1 or walks * x["segments"] * x["group"] <= sm_count, "one block a multiprocessor"
    return x["states"] * x["parts"] * (d * d + 2 * d + 4) * 4


def check(call, block, d, sm_count, hopper):
    b, h, _, n, m = call[:5]
    _, forward = block.split("fwd ")
    forward, backward = forward.split("bwd ")
    for index, text in enumerate((forward, backward)):
        size, *lines = text.strip().split("\n")
        size, passes = int(size), passes_of(lines)
        names = [name for name, *_ in passes if name != "zeros"]
        assert names == (["sums", "walk"] if index == 0 else ["sums", "walk", "sums", "pair"])
        zeroed = [numbers for name, numbers, _ in passes if name == "zeros"]
        divided, place = None, 0
        for name, x, scales in passes:
            if name == "zeros":
                continue
            assert (x["nx"], x["ny"]) == ((m, n) if index == 1 and place >= 2 else (n, m))
            place += 1
            needed = check_problem(x, d, sm_count, hopper)
            assert x["prefixes"] >= BASE and x["prefixes"] + needed <= BASE + size
            assert x["prefixes"] % 16 == 0
            if scales:
                divided = divided or scales
                assert scales == divided, "one walk writes what the other reads"
                assert scales["e"][1] == scales["inverse"][1] == (n + 127) // 128 * 128
                pad = scales["e"][1] - n
                for name in ("e", "inverse"):
                    first = scales[name][0] - 4 * pad
                    assert first % 256 == 0 and first >= BASE and first + 4 * b * h * scales[name][1] <= x["prefixes"]
                assert abs(scales["e"][0] - scales["inverse"][0]) >= 4 * b * h * scales["e"][1]
                if pad > 0:
                    assert zeroed == [(scales["e"][0] - 4 * pad, 4 * scales["e"][1], 4 * pad, 2 * b * h)]
        if index == 1 and hopper:
            assert (divided is None) == bool(call[8]), "a grad_o that the copy engine does not read is prepared"


def test_passes(plans):
    rng = random.Random(0)
    calls = [(2, 32, 32, 16384, 16384, 64, 132, 1, 0, 0), (1, 16, 16, 65536, 65536, 128, 132, 1, 0, 0)]
    for _ in range(600):
        hk, group = rng.choice((1, 2, 3, 8, 70)), rng.choice((1, 1, 2, 4))
        n = rng.choice((1, 17, 64, 127, 128, 129, 255, 256, 257, 700, 4097, 16384))
        m = n + rng.choice((0, 0, 0, 1, 100, 128, 1000, 5000))
        options = rng.choice((64, 128)), rng.choice((1, 78, 132)), rng.random() < 0.7, rng.random() < 0.3, 0
        calls.append((rng.choice((1, 2, 5)), hk * group, hk, n, m, *options))
    for call, block in zip(calls, plans(calls), strict=True):
        check(call, block, call[5], call[6], call[7])


def test_what_is_cut(plans):
    """64 heads have two blocks each and no sums; 16 heads of 128 have eight segments; more heads than half of the
    multiprocessors have one block each."""
    calls = [
        (2, 32, 32, 16384, 16384, 64, 132, 1, 0, 0),
        (1, 16, 16, 65536, 65536, 128, 132, 1, 0, 0),
        (1, 70, 70, 4096, 4096, 64, 132, 1, 0, 0),
    ]
    found = []
    for block in plans(calls):
        walk = next(x for name, x, _ in passes_of(block.split("bwd")[0].split("\n")[2:-1]) if name == "walk")
        found.append((walk["group"], walk["segments"], walk["parts"]))
    assert found == [(2, 1, 0), (1, 8, 7), (1, 1, 0)]


def test_covers(plans):
    def covers(n, m, mask, head_dim=64):
        return plans([(1, 2, 2, n, m, head_dim, 132, 1, 0, mask)])[0].split("\n")[0]

    assert covers(64, 64, 0) == covers(64, 80, 0) == covers(64, 64, 0, 128) == "covers 1 1"
    assert covers(64, 60, 0) == covers(64, 64, 1) == covers(64, 64, 0, 96) == "covers 0 0"
