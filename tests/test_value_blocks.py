"""Values wider than the kernels that run them (csrc/core/value_blocks.h): the blocks of a call on the host, and on a GPU the
results of calls that have blocks. test_emulated_kernels.py runs blocks on the Hopper kernels, test_cost_model.py has the
choice."""

import subprocess

import pytest
import test_prefill_kernels as prefill
import torch
from common import Case as WindowCase
from common import compile_probe, relative
from test_exact_window_kernels import check as check_window
from test_exact_window_kernels import make as make_window
from test_kernels import DEVICE, MODES, WHY_NOT, by_mode, in_mode, precision, size  # noqa: F401

import fastmax
from fastmax.ops import extension
from fastmax.testing import checks

PROBE = """
#include <cstdio>
#include <cstring>

#include "core/value_blocks.cpp"

using namespace fastmax;

char v[4096], o[4096], g[4096], grad_o[4096], noise[4096], workspace[1 << 20], grad_q[4096], grad_k[4096];
float lse[64], state[65536], sums[65536], z[64], decays[64];
long long at(const void* x, const void* begin) {
  return x == nullptr ? -1 : static_cast<const char*>(x) - static_cast<const char*>(begin);
}
bool in_workspace(const void* x) { return at(x, workspace) >= 0 && at(x, workspace) < (1 << 20); }

namespace fastmax {  // in place of the runtime and of kernels
void launch_copy_rows(const RowsParams& p, cudaStream_t) {
  if (p.from == lse) {
    std::printf("copy lse %d: %d rows of %d heads, %lld apart\\n", in_workspace(p.to), p.tokens, p.heads,
                (long long)p.from_stride.head);
    return;
  }
  const bool reads = in_workspace(p.to);
  std::printf("%s column %lld: %d of %lld, %d rows of %d heads\\n", reads ? "read" : "write",
              at(reads ? p.from : p.to, state) / 4, p.columns, (long long)(reads ? p.from_stride : p.to_stride).token, p.tokens,
              p.heads);
}
void launch_add_rows(const RowsParams& p, cudaStream_t) {
  const char* of_input = p.to == grad_q ? "grad_q" : p.to == grad_k ? "grad_k" : nullptr;
  const char* name = of_input != nullptr ? of_input : p.to == decays ? "grad_log_decay" : "grad_k_sum";
  std::printf("add %s (%d, %d, %d, %d)\\n", name, p.b, p.heads, p.tokens, p.columns);
}
constexpr Algorithm kLinearAlgorithm("linear"), kQuadraticAlgorithm("quadratic");
}  // namespace fastmax
extern "C" {
const char* cudaGetErrorString(cudaError_t) { return ""; }
cudaError_t cudaMemsetAsync(void*, int, size_t bytes, cudaStream_t) { return std::printf("zeros %zu\\n", bytes), cudaSuccess; }
}

size_t fwd_bytes(const FwdParams& p) { return 1000 + p.dv; }
size_t bwd_bytes(const BwdParams& p) { return 2000 + p.dv; }
const char* whose(const void* x, const void* given, const char* other) {
  return x == given ? "given" : x == nullptr ? "none" : other;
}
void fwd(const FwdParams& p, cudaStream_t) {
  std::printf("forward of %d: v %lld, o %lld, noise %lld, z %d, lse %s, state of %d\\n", p.dv, at(p.v, v), at(p.o, o),
              at(p.noise, noise), p.z == z, whose(p.local_lse, lse, "copied"), p.state.dv);
}
void bwd(const BwdParams& p, cudaStream_t) {
  std::printf("backward of %d: v %lld, o %lld, grad_o %lld, grad_v %lld, grad_z %d, ", p.dv, at(p.v, v), at(p.o, o),
              at(p.grad_o, grad_o), at(p.grad_v, g), p.grad_z != nullptr);
  std::printf("grad_q %s, grad_log_decay %s, k_sum's %s, adds %d\\n", whose(p.grad_q, grad_q, "own"),
              whose(p.grad_log_decay, decays, "own"), whose(p.state.grad_new_k_sum, sums, "zeros"), p.adds);
}

int main() {
  const Kernels kernels{"", nullptr, nullptr, fwd_bytes, bwd_bytes, fwd, bwd};
  for (const bool has_state : {false, true}) {
    FwdParams f{};
    BwdParams b{};
    for (AttentionParams* p : {static_cast<AttentionParams*>(&f), static_cast<AttentionParams*>(&b)}) {
      p->b = 1, p->h = 2, p->hk = 1, p->n = p->m = 5, p->d = 16, p->dv = 104, p->head_dim_qk = p->head_dim_v = 32, p->order = 1;
      p->v = v, p->noise = has_state ? nullptr : noise;
    }
    f.o = o, f.z = z, f.local_lse = has_state ? nullptr : lse, f.local_lse_head = 7, f.workspace = workspace;
    b.o = o, b.grad_o = grad_o, b.grad_v = g, b.grad_q = grad_q, b.grad_k = grad_k, b.grad_z = z, b.workspace = workspace;
    b.grad_log_decay = has_state ? nullptr : decays;
    if (has_state) {
      f.mode = FwdMode::kOutputsAndState, b.mode = BwdMode::kInputsAndState;
      f.state = {state, sums, state, sums, 15, 100};
      b.state = {state, sums, state, sums, state, sums, state, sums, 15, 100};
    }
    std::printf("%d blocks, %d %d bytes\\n", value_blocks(f), fwd_workspace_bytes(kernels, f) > 1032,
                bwd_workspace_bytes(kernels, b) > 2032);
    launch_fwd(kernels, f, nullptr);
    launch_bwd(kernels, b, nullptr);
    b.adds = true;
    if (!has_state) launch_bwd(kernels, b, nullptr);
  }
  FwdParams one{};
  one.dv = one.head_dim_v = 64, one.v = v;
  std::printf("%d block, %zu bytes\\n", value_blocks(one), fwd_workspace_bytes(kernels, one));
  launch_fwd(kernels, one, nullptr);
}
"""


def test_blocks_of_a_call():
    """104 columns in memory, 100 of them the caller's, for kernels of 32: offsets are in bytes of bf16."""
    copies = ["copy lse 1: 5 rows of 2 heads, 7 apart"] * 3  # of the log-sum-exps of local keys, before a block changes them
    forward = [
        f"forward of {dv}: v {at}, o {at}, noise {at}, z 1, lse {lse}, state of 0"
        for dv, at, lse in ((32, 0, "given"), (32, 64, "copied"), (32, 128, "copied"), (8, 192, "copied"))
    ]
    sums = ["add grad_q (1, 2, 5, 16)", "add grad_k (1, 1, 5, 16)"]
    backward = []
    for dv, at in ((32, 0), (32, 64), (32, 128), (8, 192)):
        whose = "given" if at == 0 else "own"
        backward.append(
            f"backward of {dv}: v {at}, o {at}, grad_o {at}, grad_v {at}, grad_z {int(at == 0)}, grad_q {whose}, "
            f"grad_log_decay {whose}, k_sum's none, adds 0"
        )
        backward += [*sums, "add grad_log_decay (1, 1, 5, 1)"] if at > 0 else []
    adding = [x.replace("own", "given").replace("adds 0", "adds 1") for x in backward if x.startswith("backward")]
    with_state = ["4 blocks, 1 1 bytes"]
    columns = [(0, 32), (32, 32), (64, 32), (96, 4)]

    def copied(how, first, count):
        return f"{how} column {first}: {count} of 100, 16 rows of 1 heads"

    for first, count in columns:
        at, dv = 2 * first, min(32, 104 - first)
        with_state.append(copied("read", first, count))
        with_state.append(f"forward of {dv}: v {at}, o {at}, noise -1, z 1, lse none, state of {count}")
        with_state.append(copied("write", first, count))
    for first, count in columns:
        at, dv = 2 * first, min(32, 104 - first)
        with_state += [copied("read", first, count)] * 3 + ["zeros 64"] * (first == 32)
        with_state.append(
            f"backward of {dv}: v {at}, o {at}, grad_o {at}, grad_v {at}, grad_z {int(at == 0)}, "
            f"grad_q {'own' if at else 'given'}, grad_log_decay none, k_sum's {'zeros' if at else 'given'}, adds 0"
        )
        with_state.append(copied("write", first, count))
        with_state += ["add grad_k_sum (1, 1, 16, 1)", *sums] if at > 0 else []
    one = ["1 block, 1064 bytes", "forward of 64: v 0, o -1, noise -1, z 0, lse none, state of 0"]
    printed = subprocess.run([compile_probe(PROBE)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == ["4 blocks, 1 1 bytes", *copies, *forward, *backward, *adding, *with_state, *one]


# ---- on a GPU

on_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]


def gpu(test):
    for mark in on_cuda:
        test = mark(test)
    return test


@pytest.fixture
def in_blocks(capfd):
    """Returns in_blocks(), the operators that ran since the last time: those with value blocks and those without."""

    def found():
        lines = [line for line in capfd.readouterr().err.splitlines() if ", head_dim_qk " in line]
        names = {line.split(":")[2]: ", value blocks" in line for line in lines}
        return {name for name, has in names.items() if has}, {name for name, has in names.items() if not has}

    extension.set_debugging(True)
    found()
    yield found
    extension.set_debugging(False)


def check_blocks(in_blocks):
    """Checks that the linear algorithm ran in value blocks. Softmax of local keys may have, in calls that run in parts."""
    names = {name.removeprefix("exact_window_") for name in in_blocks()[0]}
    assert {"forward", "backward"} <= names <= {"forward", "backward", "flash_forward", "flash_backward"}


WIDTHS = [(64, 128), (32, 64), (64, 256), (48, 80), (40, 200), (17, 130)]
by_widths = pytest.mark.parametrize("d, dv", WIDTHS)
LONG = dict(b=1, h=8, hk=4)  # enough pairs for blocks to pay
OPTIONS = {
    "none": {},
    "all": dict(mask=True, noise=True, layout="unaligned"),
    "token-major": dict(layout="token-major", return_lse=True),
    "not causal": dict(causal=False, mask=True),
    "exact window": dict(exact_window=70, return_lse=True),
}


def linear(*args, **options):
    case = size("", *args, **options)
    return case._replace(options=case.options | {"algorithm": "linear"})


@gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@by_mode
@by_widths
def test_linear_against_float64(d, dv, mode, options, in_blocks):
    case = in_mode(linear(2100, 2300, d=d, dv=dv, **LONG, **options), mode)
    assert checks.check(case, DEVICE, 3).wrong == []
    check_blocks(in_blocks)


@gpu
@pytest.mark.parametrize("options", [
    dict(decay=True), dict(decay=True, padding=True, exact_window=70), dict(sequences=8, decay=True),
    dict(sequences=8, exact_window=70, noise=True),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("mode", ["bf16", "fp32"])
@by_widths
def test_decays_and_packed_sequences(d, dv, mode, options, in_blocks):
    case = in_mode(linear(2100, d=d, dv=dv, noise=options.get("noise", False), **LONG), mode)
    window = {"exact_window": options["exact_window"]} if "exact_window" in options else {}
    case = case._replace(
        options=case.options | window | {"return_lse": True}, decay=options.get("decay", False),
        padding=options.get("padding", False), sequences=options.get("sequences", 0),
    )  # fmt: skip
    assert checks.check(case, DEVICE, 4).wrong == []
    check_blocks(in_blocks)


@gpu
@pytest.mark.parametrize("softmax", [False, True], ids=["quadratic", "flash"])
@by_mode
@by_widths
def test_quadratic_against_float64(d, dv, mode, softmax):
    """Whether blocks pay depends on the device; values of 200 and 256 columns have them on Hopper in bf16."""
    case = size("", 2100, 2300, d=d, dv=dv, mask=True, noise=not softmax, **LONG)
    options = {"causal": True} if softmax else case.options | {"algorithm": "quadratic"}
    assert checks.check(in_mode(case._replace(options=options, softmax=softmax), mode), DEVICE, 5).wrong == []


@gpu
@pytest.mark.parametrize("d, dv", [(128, 256), (64, 256), (40, 200)])
@pytest.mark.parametrize("options", [dict(p=1), dict(p=1, normalize="token", lim=0.8), dict(p=1, causal=False)], ids=str)
def test_order_1_against_float64(d, dv, options):
    case = in_mode(linear(2100, d=d, dv=dv, **LONG, **options), "bf16")._replace(magnitude=None)
    assert checks.check(case, DEVICE, 6).wrong == []


@gpu
@pytest.mark.parametrize("algorithm", ["linear", "quadratic"])
@pytest.mark.parametrize("decay", [None, "weak", "ordinary"])
def test_windows_wider_than_a_chunk(algorithm, decay):
    """One pass of wide kernels covers this window where narrow ones do not."""
    case = WindowCase("", n=1500, m=1500, b=1, h=4, hk=2, d=64, dv=128)
    check_window(*make_window(case, decay=decay), algorithm=algorithm, exact_window=300)


@gpu
@pytest.mark.parametrize("decay", [None, "ordinary", "-inf at places"])
@by_mode
@by_widths
def test_prefill_against_float64(d, dv, mode, decay, in_blocks, precision):  # noqa: F811
    # With decays, hundreds of masked tokens leave nothing of the state in float32.
    mask = decay != "ordinary"
    given = prefill.arguments(prefill.Case(3000, d, dv, h=4, hk=2, mask=mask, layout="token-major", decay=decay), mode)
    prefill.check(given, mode)
    prefill.check_gradients(given, mode)
    assert in_blocks()[0] == {"prefill", "prefill_backward"}


@gpu
def test_few_tokens_run_once(in_blocks):
    q, k = (torch.randn(1, 2, 70, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    fastmax.fastmax_attention(q, k, torch.cat((q, k), -1), causal=True, algorithm="linear")
    assert in_blocks() == (set(), {"forward"})


@gpu
def test_graphs_and_other_columns():
    """A replayed graph has the bits of calls, and values in other columns do not reach a block."""
    q, k = (torch.randn(2, 8, 2000, 64, device=DEVICE).bfloat16() for _ in range(2))
    v = torch.randn(2, 8, 2000, 256, device=DEVICE).bfloat16()[..., 64:192]

    def call():
        return fastmax.fastmax_attention(q, k, v, causal=True, algorithm="linear", temperature=8.0)

    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = call()
    graph.replay()
    assert torch.equal(o, expected)
    v[..., 64:] = torch.nan
    assert torch.equal(call()[..., :64], expected[..., :64])


@gpu
@pytest.mark.parametrize("options", [
    {"algorithm": "linear"}, {"algorithm": "linear", "exact_window": 0, "decay": False}, {"exact_window": 0, "p": 1},
    {"attention": "softmax"},
], ids=str)  # fmt: skip
def test_layer(options):
    """head_dim 64, value_dim 128: outputs and gradients, and the same outputs from states, token by token at the end."""
    layer = fastmax.FastmaxSelfAttention(
        256, 4, num_kv_heads=2, head_dim=64, value_dim=128, device=DEVICE, dtype=torch.bfloat16, **options
    )
    exact = fastmax.FastmaxSelfAttention(
        256, 4, num_kv_heads=2, head_dim=64, value_dim=128, device=DEVICE, dtype=torch.float64, **options
    )
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 1503, 256, device=DEVICE).bfloat16().requires_grad_()
    wide = x.detach().double().requires_grad_()
    expected, y = exact(wide), layer(x)
    assert relative(y, expected.detach()) < 0.08
    grad = torch.randn_like(y)
    y.backward(grad), expected.backward(grad.double())
    assert relative(x.grad, wide.grad) < 0.08
    for (name, weight), of_exact in zip(layer.named_parameters(), exact.parameters(), strict=True):
        if name != "decay_proj.bias":  # a sum over tokens that cancels
            assert relative(weight.grad, of_exact.grad) < 0.08, name
    with torch.no_grad():
        state, pieces = layer.init_state(2), []
        for piece in x.detach().split([1000, 500, 1, 1, 1], dim=1):
            o, state = layer(piece, state)
            pieces.append(o)
    assert relative(torch.cat(pieces, 1), expected.detach()) < 0.08
