"""Decays, packed sequences, windows and prefill on streams of their own and in CUDA graphs, forward and backward."""

import pytest
import torch
from common import assert_replayed, capture, torch_warns
from test_kernels import DEVICE, WHY_NOT, on_a_late_stream

import fastmax
from fastmax import fastmax_attention, flash_attention

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

TOKENS = 700
INPUTS = ("q", "k", "v", "log_decay", "cu_seqlens", "grad_o", "grad_lse")


def draw(seed):
    """Returns random operands of one batch entry, which can be packed. Some tokens are resets."""
    g = torch.Generator(DEVICE).manual_seed(seed)
    q, k, v, grad_o = (torch.randn(1, h, TOKENS, 64, device=DEVICE, dtype=torch.bfloat16, generator=g) for h in (4, 2, 2, 4))
    log_decay = -torch.rand(1, 2, TOKENS, device=DEVICE, generator=g)
    resets = torch.rand(1, 2, TOKENS, device=DEVICE, generator=g) < 0.01
    cuts = torch.randint(0, TOKENS + 1, (6,), device=DEVICE, generator=g).sort().values.to(torch.int32)
    cuts[0], cuts[-1] = 0, TOKENS
    grad_lse = torch.randn(1, 4, TOKENS, device=DEVICE, generator=g)
    return dict(zip(INPUTS, (q, k, v, torch.where(resets, -torch.inf, log_decay), cuts, grad_o, grad_lse), strict=True))


def attend(x, options, algorithm):
    given = {name: x[name] for name in ("log_decay", "cu_seqlens") if name in options}
    q, k, v = (x[name] for name in "qkv")
    if "softmax" in options:
        return flash_attention(q, k, v, causal=True, window=100 if "window" in options else None, return_lse=True, **given)
    window = 100 if "window" in options else 0
    return fastmax_attention(q, k, v, causal=True, exact_window=window, algorithm=algorithm, return_lse=True, **given)


def train(x, options, algorithm):
    leaves = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v", *({"log_decay"} & set(options)))}
    o, lse = attend(x | leaves, options, algorithm)
    grads = torch.autograd.grad((o, lse), list(leaves.values()), (x["grad_o"], x["grad_lse"]))
    return o.detach(), lse.detach(), *grads


def prefill(x, options, _):
    """Runs two pieces from an empty state. Returns the outputs and the last state."""
    state = fastmax.decoding.init_state(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    outputs = []
    for piece in (slice(0, 300), slice(300, TOKENS)):
        decay = {"log_decay": x["log_decay"][:, :, piece]} if "log_decay" in options else {}
        o, state = fastmax.decoding.prefill(*(x[name][:, :, piece] for name in "qkv"), state, **decay)
        outputs.append(o)
    return *outputs, state.kv_state, state.k_sum


CALLS = {
    **{
        f"{name}, {algorithm}": (train, options, algorithm)
        for algorithm in ("quadratic", "linear")
        for name, options in (
            ("decay", ("log_decay",)),
            ("packed", ("cu_seqlens",)),
            ("packed with decay", ("cu_seqlens", "log_decay")),
            ("window", ("window",)),
            ("packed with decay and window", ("cu_seqlens", "log_decay", "window")),
        )
    },
    "softmax with window": (train, ("softmax", "window"), None),
    "softmax, packed with decay": (train, ("softmax", "cu_seqlens", "log_decay"), None),
    "prefill": (prefill, (), None),
    "prefill with decay": (prefill, ("log_decay",), None),
}
by_call = pytest.mark.parametrize("call", CALLS)


@by_call
def test_side_stream(call):
    """The operands arrive late on a stream of their own, and the kernels must wait for that stream."""
    run, *how = CALLS[call]
    x = draw(1)
    expected = run(x, *how)
    actual = on_a_late_stream(list(x.values()), lambda *late: run(dict(zip(x, late, strict=True)), *how))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@torch_warns
@by_call
def test_cuda_graph(call):
    """The graph is captured once and replayed on other inputs, with other decays and other sequences."""
    run, *how = CALLS[call]
    static = draw(1)
    graph, captured = capture(lambda: run(static, *how))
    for seed in (2, 3):
        for name, x in draw(seed).items():
            static[name].copy_(x)
        assert_replayed(graph, captured, run(draw(seed), *how))
