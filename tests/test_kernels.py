"""The CUDA kernels: every code path against float64 on poisoned memory, and properties that the tests for all devices do not
check. Sizes are chosen by path: tiles of 64 and 128, chunks of 256 (d <= 64), 512 (d = 96), 1024 (d = 128), 2048 (d = 256), and
segments of at least 256 (p = 1). With few heads the walk over keys is cut into segments (p = 2), with many it is one walk."""

import itertools
import math
from functools import lru_cache

import pytest
import torch
from common import assert_replayed, capture, pytorch_implementation, relative, torch_warns

import fastmax
from fastmax import eager, fastmax_attention
from fastmax.core.score import Score
from fastmax.ops import extension
from fastmax.testing import checks, evaluation
from fastmax.testing.configurations import LAYOUTS, Case
from fastmax.testing.errors import ROUNDING
from fastmax.testing.evaluation import matmul_precision
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.reference import naive_attention
from fastmax.testing.tensors import random_tensors, unaligned

DEVICE = torch.device("cuda")


def why_not():
    if (problem := extension.problem()) is not None:
        return problem
    return extension.problem(DEVICE) if torch.cuda.is_available() else "there is no CUDA device"


WHY_NOT = why_not()
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

MODES = {
    "bf16": (torch.bfloat16, "highest"),
    "fp16": (torch.float16, "highest"),
    "tf32": (torch.float32, "high"),
    "fp32": (torch.float32, "highest"),
}
ALGORITHMS = ("quadratic", "linear")
HEAD_DIMS = (16, 32, 64, 96, 128, 256)
by_mode = pytest.mark.parametrize("mode", MODES)
by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
by_order = pytest.mark.parametrize("p", [1, 2], ids=["p1", "p2"])


def in_mode(case, mode):
    dtype, precision = MODES[mode]
    return case._replace(dtype=dtype, precision=precision)


@pytest.fixture
def precision(mode):
    with matmul_precision(MODES[mode][1]):
        yield


# ---- output and gradients against float64, bit by bit repeatable, on poisoned memory


def size(name, n, m=None, d=64, dv=None, *, h=2, hk=None, b=2, causal=True, p=2, mask=False, noise=False, layout="contiguous",
         magnitude=1.0, **options):  # fmt: skip
    """Returns a row of the tables below. With p = 1 its temperature keeps 1 + s away from 0."""
    options = {"causal": causal, "p": p, "temperature": 50.0 if p == 1 else d**0.5} | options
    if noise:
        options["dropout"] = 0.3
    return Case(
        name, options, batch=b, heads=h, kv_heads=hk or h, queries=n, keys=m or n, head_dim=d, value_dim=dv or d, padding=mask,
        noise=noise, layout=layout, magnitude=magnitude,
    )  # fmt: skip


LENGTHS = (1, 2, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 1023, 1025)
FOR_BOTH = [
    *(size(f"head dim {d}", 200, d=d, causal=causal) for d in HEAD_DIMS for causal in (True, False)),
    *(size(f"head dim {d}, all options", 150, 333, d=d, h=4, hk=2, mask=True, noise=True, layout="packed") for d in HEAD_DIMS),
    *(size(f"length {n}", n) for n in LENGTHS),
    *(size(f"p = 1, length {n}", n, p=1) for n in (1, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1025)),
    *(
        size("n < m", n, m, causal=c)
        for n, m in ((1, 300), (17, 64), (64, 129), (300, 301), (129, 1000))
        for c in (True, False)
    ),
    *(size("n > m", n, m, causal=False) for n, m in ((300, 1), (300, 17), (129, 65), (1000, 130))),
    size("one head", 700, b=1, h=1),
    size("GQA 4:1", 300, h=8, hk=2),
    size("MQA", 130, 190, d=32, h=6, hk=1),
    size("padding mask", 300, mask=True),
    size("padding mask, not causal", 300, 200, mask=True, causal=False),
    size("noise", 300, noise=True),
    size("p = 1", 300, p=1),
    size("p = 1, not causal, all options", 300, 400, p=1, causal=False, mask=True, noise=True),
    size("other coefficients", 300, a0=0.7, a1=-0.3, a2=1.1),
    size("hardly a constant", 300, a0=1e-3, a1=0.0, a2=1.0),
    size("token-major", 300, h=4, layout="token-major"),
    size("packed qkv", 300, h=4, layout="packed"),
    size("unaligned view", 150, layout="unaligned"),
    size("unaligned view, noise", 150, layout="unaligned", noise=True),
    size("ragged head dim", 150, d=40, dv=24),
    size("odd head dim", 150, d=37, dv=51, noise=True),
    size("head dim 1", 150, d=1, dv=1),
    size("dv > d", 150, d=16, dv=128),
    size("dv < d", 150, d=128, dv=16),
    size("large scores", 300, magnitude=30.0, temperature=1.0),
    size("head dim 160", 150, d=160),
    size("head dim 200, dv 64", 300, d=200, dv=64),
    size("head dims 130, 256", 129, d=130, dv=256, mask=True, noise=True),
    size("head dims 256, 40", 300, 500, d=256, dv=40, h=4),
    size("head dims 40, 256, full", 257, d=40, dv=256, causal=False, mask=True, noise=True),
    *(size(f"wide heads, head dim {d}, n {n} m {m}", n, m, d=d, h=6, hk=2) for d in (128, 256) for n, m in ((1, 70), (63, 65))),
    *(size(f"wide heads, head dim {d}", 1000, d=d, h=4, hk=2, mask=True, noise=True) for d in (128, 200, 256)),
    *(size(f"wide heads, head dim {d}, full", 700, 300, d=d, causal=False, mask=True, noise=True) for d in (128, 256)),
    size("long", 4096, b=1, h=2, hk=1),
]
_SEVERAL_CHUNKS = {16: 700, 32: 700, 64: 1300, 96: 2500, 128: 4500, 256: 4500}
_MANY_HEADS = {32: 50, 64: 26, 96: 5, 128: 3}
_SEGMENTS = {16: 2300, 32: 2300, 64: 2300, 96: 2900, 128: 4500}  # of one head; a state of head dim 256 fills the device
FOR_LINEAR = [
    *(size(f"two heads, head dim {d}", n, b=1, d=d) for d, n in _SEVERAL_CHUNKS.items()),
    *(size(f"two heads, head dim {d}, not causal", 300, n, b=1, d=d, causal=False) for d, n in _SEVERAL_CHUNKS.items()),
    *(size(f"segments, head dim {d}", n, b=1, h=1, d=d) for d, n in _SEGMENTS.items()),
    *(size(f"segments, head dim {d}, full", 300, n, b=1, h=1, d=d, causal=False, mask=True) for d, n in _SEGMENTS.items()),
    *(size(f"segments, length {n}", n, n + 77, b=1, h=2, hk=1, d=32, mask=True) for n in (2303, 2304, 2305, 2433, 3000)),
    *(size(f"segments, {n} queries at the end", n, 5000, b=1, h=2, hk=1, d=32, noise=True) for n in (1, 255, 257, 700)),
    *(size(f"one walk, head dim {d}", _SEVERAL_CHUNKS[d], b=1, h=h, d=d) for d, h in _MANY_HEADS.items()),
    *(
        size(f"all options, head dim {d}", n - 77, n, h=4, hk=2, d=d, mask=True, noise=True, layout="packed")
        for d, n in _SEVERAL_CHUNKS.items()
    ),
    *(size(f"p = 1, head dim {d}", 900, 937, h=4, hk=2, d=d, p=1, mask=True, noise=True) for d in HEAD_DIMS),
    *(size(f"p = 1, segments, head dim {d}", 4500, 4577, b=1, d=d, p=1) for d in HEAD_DIMS),
    *(size(f"p = 1, segments, head dim {d}, full", 2300, 3100, b=1, d=d, p=1, causal=False, mask=True) for d in HEAD_DIMS),
    *(size(f"p = 1, one segment, head dim {d}", 700, b=2, h=210, hk=70, d=d, p=1, noise=True) for d in (32, 64)),
    *(size(f"p = 1, GQA, length {n}", n, b=1, h=6, hk=2, p=1) for n in (511, 512, 513, 767, 768, 769, 1025)),
    *(size(f"p = 1, head dim {d}, not causal", 900, 637, b=1, d=d, p=1, causal=False) for d in HEAD_DIMS),
    size("segments, many queries, few keys, full", 4200, 29, b=5, h=1, causal=False),
    size("segments, few queries, many keys, full", 29, 4200, b=5, h=1, causal=False, noise=True),
    *(size(f"GQA, length {n}", n, b=1, h=2, hk=1) for n in (255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 1537)),
    size("one walk, GQA, offset", 1100, 1201, h=28, hk=14, mask=True, noise=True),
    size("one walk, not causal", 200, 1201, b=1, h=26, causal=False),
    size("one query, many keys", 1, 3000, b=1),
    size("far offset", 70, 3000, b=1),
    size("many heads, one query", 1, 1500, h=32, hk=16),
    size("other coefficients, chunks", 1300, b=1, a0=0.7, a1=-0.3, a2=1.1),
    size("token-major, chunks", 1200, h=4, layout="token-major"),
    size("ragged head dim, chunks", 1200, b=1, d=40, dv=24),
    size("odd head dim, chunks", 1200, b=1, d=37, dv=51, noise=True),
    size("dv > d, chunks", 2200, b=1, d=16, dv=96),
    size("large scores, chunks", 1300, b=1, magnitude=30.0, temperature=1.0),
    size("ragged head dim, 256", 4200, b=1, d=136, dv=200),
    size("head dim 256 for dv alone", 2300, 4200, b=1, d=40, dv=250, noise=True),
    size("head dim 256 for d alone", 2100, 2300, b=1, d=255, dv=64, mask=True),
    size("many chunks", 9000, b=1, h=1, d=32),
]
# Grids are one-dimensional: their other dimensions end at 65535.
MANY = [
    size("70000 sequences", 5, 7, b=70000, h=1, d=16),
    size("70000 heads", 5, b=1, h=70000, d=16),
    size("70000 heads, GQA", 3, 9, b=1, h=70000, hk=35000, d=16, mask=True),
]


def case_id(case):
    sizes = f"n{case.queries} m{case.keys}" if case.name in ("n < m", "n > m") else ""
    return f"{case.name} {sizes}{'' if case.options['causal'] else ' full'}".strip()


@by_mode
@pytest.mark.parametrize(
    "case, algorithm",
    [
        pytest.param(case, algorithm, id=f"{algorithm}-{case_id(case)}")
        for cases, algorithms in ((FOR_BOTH, ALGORITHMS), (FOR_LINEAR, ("linear",)), (MANY, ALGORITHMS))
        for case in cases
        for algorithm in algorithms
    ],
)
def test_against_float64(case, algorithm, mode):
    case = in_mode(case._replace(options=case.options | {"algorithm": algorithm}), mode)
    assert checks.check(case, DEVICE, 1234).wrong == []


@by_mode
@by_algorithm
@by_order
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_every_kernel_at_small_sizes(d, p, algorithm, mode, precision):
    """This test has no reference. It is run under compute-sanitizer."""
    for n, m in ((1, 1), (17, 17), (150, 150), (129, 200), (17, 1500)):  # the last: segments
        odd = n == 150
        case = size("", n, m, d=d - odd, b=1, h=2, hk=1, p=p, mask=odd, noise=odd, causal=n != 129, algorithm=algorithm)
        tensors = random_tensors(in_mode(case, mode), DEVICE)
        assert all(x.isfinite().all() for x in evaluation.run(fastmax_attention, tensors, case.options).values())


# ---- the operators themselves

NOTHING = (None,) * 7  # mask, noise, rpe matrix, decay, bounds of keys, gates


def operands(case, mode, algorithm, seed=0):
    """Returns the arguments of torch.ops.fastmax.forward, and grad_o."""
    case = in_mode(case, mode)
    tensors = random_tensors(case, DEVICE, seed)
    x = {"a0": 1.0, "a1": 1.0, "a2": 0.5, "dropout": 0.0} | case.options
    score = Score(1.0 / x["temperature"], x["a0"], x["a1"], x["a2"], x["p"])
    optional = tensors.get("attention_mask"), tensors.get("drop_noise"), *(None,) * 5
    options = (*score, x["causal"], x["dropout"], algorithm, mode == "tf32")
    grad_o = torch.randn(*tensors["q"].shape[:3], case.value_dim, device=DEVICE, dtype=case.dtype)
    return (tensors["q"], tensors["k"], tensors["v"], *optional, *options), grad_o


def both(arguments, grad_o, grad_z=None):
    """Returns o, z and the gradients of q, k and v."""
    o, z = torch.ops.fastmax.forward(*arguments)
    return o, z, *torch.ops.fastmax.backward(grad_o, grad_z, *arguments[:3], o, z, *arguments[3:])[:3]


def widened(arguments):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


def denominators(q, k, v, mask, noise, rpe, decay, first, end, gate, scale, a0, a1, a2, p, causal, *rest):
    """Returns z by its definition."""
    n, m = q.shape[2], k.shape[2]
    s = scale * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT)
    f = a0 + a1 * s + (a2 * s * s if p == 2 else 0.0)
    visible = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n if causal else m)
    if mask is not None:
        visible = visible & mask[:, None, None, :]
    return torch.where(visible, f, 0.0).sum(-1)


def with_gradient_of_the_denominators(arguments, grad_o):
    """Returns a gradient of z, NaN where a query sees no key, and the float64 gradients of q, k and v by it and by grad_o."""
    _, exact_z, *exact = both(widened(arguments), grad_o.double())
    grad_z = torch.where(exact_z == 0, torch.nan, torch.randn_like(exact_z) / exact_z)
    q, k = (x.double().requires_grad_() for x in arguments[:2])
    z = denominators(q, k, *widened(arguments[2:]))
    of_z = torch.autograd.grad(z, (q, k), torch.where(exact_z == 0, 0.0, grad_z))
    exact[:2] = [x + y for x, y in zip(exact[:2], of_z, strict=True)]
    return grad_z, exact


def test_the_library_registers_every_operator():
    steps = ("decode_step", "decode_step_", "buffered_step_")
    pieces = ("prefill_saved_", "gradients_of_sums", "prefill_backward_of_queries", "prefill_backward_of_keys_")
    states = ("prefill", "prefill_backward", "state_of_keys", "state_of_queries", *pieces)
    windows = ("exact_window_forward", "exact_window_backward", "merge_", "merge_parts", "merge_parts_backward")
    of_keys = ("finite_decay", "largest_so_far", "gather_kept", "gather_kept_backward", "kept_step_")
    for name in ("forward", "backward", *windows, *steps, *states, *of_keys):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmax_cuda::{name}", "CUDA"), name


@by_mode
@by_algorithm
@by_order
def test_denominators(p, algorithm, mode, precision):
    for case in (
        size("", 300, 317, h=4, hk=2, p=p, mask=True, noise=True),
        size("", 1300, d=37, dv=16, h=1, p=p, layout="unaligned"),
        size("", 300, 900, d=128, p=p, causal=False),
    ):
        arguments, _ = operands(case, mode, algorithm)
        _, z = torch.ops.fastmax.forward(*arguments)
        exact = denominators(*widened(arguments))
        assert z.dtype == torch.float32 and z.is_contiguous() and z.shape == exact.shape
        assert torch.equal(z == 0, exact == 0), "zero exactly where a query sees no key"
        assert relative(z, exact) <= (3e-6 if mode == "fp32" else ROUNDING[in_mode(case, mode).mode])


@by_mode
@by_algorithm
@by_order
@pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
def test_gradient_of_the_denominators(d, p, algorithm, mode, precision):
    """It adds to that of the output, may have any strides, and is not read if a query sees no key."""
    for case in (
        size("", 300, 317, d=d, h=4, hk=2, p=p, mask=True, noise=True),
        size("", 130, 90, d=d - 1, h=2, p=p, causal=False, layout="unaligned"),
    ):
        arguments, grad_o = operands(case, mode, algorithm)
        grad_z, exact = with_gradient_of_the_denominators(arguments, grad_o)
        strided = grad_z.float().transpose(1, 2).contiguous().transpose(1, 2)
        for given in (grad_z.float(), strided):
            poison_free_memory(DEVICE)
            actual = both(arguments, grad_o, given)[2:]
            for name, x, y in zip("qkv", actual, exact, strict=True):
                assert relative(x, y) <= max(2e-5, 4 * ROUNDING[in_mode(case, mode).mode]), name
        zero = both(arguments, grad_o, torch.zeros_like(strided))
        assert all(map(torch.equal, zero, both(arguments, grad_o)))


@by_mode
@pytest.mark.parametrize(
    "states, n, m, d, causal", [(70_000, 200, 600, 16, True), (66_000, 3, 5, 160, False)], ids=["d16", "d160"]
)
def test_first_order_states_beyond_65535(states, n, m, d, causal, mode, precision):
    """Each state has two parts, which a scan adds up. d = 160 runs other kernels. Some heads are compared with float64."""
    arguments, grad_o = operands(size("", n, m, d=d, b=1, h=states, p=1, causal=causal), mode, "linear")
    results = both(arguments, grad_o)
    some = [0, 1, 65_535, 65_536, states - 1]
    q, k, v, *rest = arguments
    chosen = [x[:, some].double() for x in (q, k, v)]
    exact = both((*chosen, *rest), grad_o[:, some].double())
    for x, y in zip(results, exact, strict=True):
        assert relative(x[:, some], y) <= max(5e-6, 2 * ROUNDING[in_mode(size("", n), mode).mode])


@pytest.mark.parametrize(
    "b, h, n",
    [(1, 1, 420_000), (1, 5, 90_000), (2, 13, 80_000), (64, 16, 2048), (1, 1000, 1100)],
    ids=["segments", "one walk", "states and time", "batch entries", "heads of one entry"],
)
def test_states_beyond_832_mib_run_in_phases(b, h, n):
    """Results agree with the quadratic kernels, and the memory is bounded."""
    q, k, v, grad_o = (torch.randn(b, h, n, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    score = (128**-0.5, 1.0, 1.0, 0.5, 2)

    def run(algorithm):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        arguments = (q, k, v, *NOTHING, *score, True, 0.0, algorithm, False)
        results = both(arguments, grad_o)
        return results, torch.cuda.max_memory_allocated() - before

    linear, peak = run("linear")
    quadratic, _ = run("quadratic")
    for x, y in zip(linear, quadratic, strict=True):
        assert relative(x, y) < 2 * ROUNDING["bfloat16"]
    states, results, g_and_e = 832 + 128, 4 * q.nbytes / 2**20, 1.1 * q.nbytes / 2**20
    assert peak / 2**20 < states + results + g_and_e


@pytest.mark.parametrize("b, h, hk, n, m", [(16, 32, 16, 2048, 2100), (1, 800, 400, 1100, 1150)], ids=["batch", "heads"])
def test_phases_of_grouped_heads_with_mask_and_noise(b, h, hk, n, m):
    """Tensors that accompany q, k and v must be cut into the same phases."""
    q, grad_o, noise = (torch.randn(b, h, n, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.randn(b, hk, m, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    mask = torch.rand(b, m, device=DEVICE) > 0.3
    mask[:, : m - n + 1] = True  # every query sees a key
    results = []
    for algorithm in ("linear", "quadratic"):
        arguments = (q, k, v, mask, noise, *NOTHING[2:], 128**-0.5, 1.0, 1.0, 0.5, 2, True, 0.3, algorithm, False)
        results.append(both(arguments, grad_o))
    for x, y in zip(*results, strict=True):
        assert relative(x, y) < 2 * ROUNDING["bfloat16"]


@by_mode
@by_algorithm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_are_not_written(layout, algorithm, mode, precision):
    """Kernels read aligned operands without a copy, so they could write to them."""
    arguments, grad_o = operands(size("", 300, h=4, mask=True, noise=True, layout=layout), mode, algorithm)
    o, z = torch.ops.fastmax.forward(*arguments)
    given = [grad_o, o, z, *(x for x in arguments if isinstance(x, torch.Tensor))]
    before = [x.clone() for x in given]
    torch.ops.fastmax.forward(*arguments)
    torch.ops.fastmax.backward(grad_o, None, *arguments[:3], o, z, *arguments[3:])
    for x, y in zip(given, before, strict=True):
        assert torch.equal(x, y)


@by_mode
@by_algorithm
@by_order
def test_bitwise_repeatable_on_a_full_device(p, algorithm, mode, precision):
    arguments, grad_o = operands(size("", 2000, b=2, h=16, hk=4, p=p, mask=True), mode, algorithm)
    first = both(arguments, grad_o)
    for _ in range(4):
        poison_free_memory(DEVICE)
        for x, y in zip(first, both(arguments, grad_o), strict=True):
            assert torch.equal(x, y)


@by_mode
@by_algorithm
@pytest.mark.parametrize("d, dv", [(64, 64), (37, 51)], ids=["aligned", "padded"])
@pytest.mark.parametrize("layout", ["contiguous", "token-major"])
def test_outputs_lie_in_memory_as_their_inputs_do(layout, d, dv, algorithm, mode, precision):
    arguments, grad_o = operands(size("", 40, 50, d=d, dv=dv, h=4, hk=2, layout=layout), mode, algorithm)
    o, _, *grads = both(arguments, grad_o)
    for x, like in zip((o, *grads), (arguments[0], *arguments[:3]), strict=True):
        assert (x if layout == "contiguous" else x.transpose(1, 2)).is_contiguous()
        assert x.shape[:3] == like.shape[:3] and x.dtype == like.dtype


@by_algorithm
@pytest.mark.parametrize(
    "q, k",
    [
        pytest.param((0, 2, 5, 64), (0, 2, 5, 64), id="no batch"),
        pytest.param((2, 2, 0, 64), (2, 2, 7, 64), id="no queries"),
        pytest.param((2, 4, 5, 64), (2, 2, 0, 64), id="no keys"),
    ],
)
def test_empty(q, k, algorithm):
    q, k = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for shape in (q, k))
    grad_o = torch.randn_like(q)
    o, z, *grads = both((q, k, k, *NOTHING, 0.1, 1.0, 1.0, 0.5, 2, False, 0.0, algorithm, False), grad_o)
    assert torch.equal(o, torch.zeros_like(q)) and torch.equal(z, torch.zeros(q.shape[:3], device=DEVICE))
    for x, like in zip(grads, (q, k, k), strict=True):
        assert torch.equal(x, torch.zeros_like(like))


# What is wrong with operands -> how, and a word of the error.
UNSAFE = {
    "dtypes": (lambda x: x | {"k": x["k"].float()}, "dtype"),
    "head dims": (lambda x: x | {"k": x["k"][..., :32]}, "k must have shape"),
    "heads": (lambda x: x | {"q": x["q"][:, :3]}, "heads must be a multiple"),
    "mask": (lambda x: x | {"mask": torch.ones(2, 49, dtype=torch.bool, device=DEVICE)}, "attention_mask"),
    "n > m": (lambda x: x | {"causal": True, "q": torch.cat([x["q"]] * 2, dim=2)}, "n <= m"),
}
UNSAFE_FASTMAX = UNSAFE | {
    "noise": (lambda x: x | {"noise": x["q"][:, :, :1]}, "drop_noise"),
    "algorithm": (lambda x: x | {"algorithm": "cubic"}, "algorithm"),
}


def safe_operands():
    """Returns valid operands, which UNSAFE changes."""
    tensors = {
        name: torch.randn(2, heads, 50, 64, device=DEVICE, dtype=torch.bfloat16)
        for name, heads in zip("qkv", (4, 2, 2), strict=True)
    }
    return tensors | {"mask": None, "causal": False}


@pytest.mark.parametrize("change, message", UNSAFE_FASTMAX.values(), ids=UNSAFE_FASTMAX)
def test_unsafe_operands_are_refused(change, message):
    """The operators refuse them, since they may be called without `fastmax_attention`."""
    x = change(safe_operands() | {"noise": None, "algorithm": "quadratic"})
    score = (0.1, 1.0, 1.0, 0.5, 2)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.fastmax.forward(
            x["q"], x["k"], x["v"], x["mask"], x["noise"], *NOTHING[2:], *score, x["causal"], 0.3, x["algorithm"], False
        )


# ---- long sequences


def sampled(arguments, grad_o, rows, keys):
    """Returns o, z and grad_q of some rows and grad_k and grad_v of some keys in float64, for one causal head with n = m. They
    follow from the definition; but the gradient of a key needs the output of every row, which the linear algorithm of the
    PyTorch implementation computes in float64 and which must agree with the definition on the rows."""
    q, k, v, grad_o = (x[0, 0].double() for x in (*arguments[:3], grad_o))
    scale, a0, a1, a2, p = arguments[10:15]
    positions = torch.arange(len(q), device=q.device)

    def weights(q, k, visible):
        s = scale * (q @ k.T)
        return torch.where(visible, a0 + s * (a1 + a2 * s if p == 2 else a1), 0.0)

    q_rows = q[rows].requires_grad_()
    w = weights(q_rows, k, positions <= rows[:, None])
    z = w.sum(-1, keepdim=True)
    o = (w @ v) / z
    (grad_q,) = torch.autograd.grad(o, q_rows, grad_o[rows])
    del w

    every_o, every_z = (x[0, 0] for x in pytorch_implementation("forward")(*widened(arguments[:-2]), "linear", False))
    every_z = every_z.unsqueeze(-1)
    assert relative(every_o[rows], o.detach()) < 1e-8 and relative(every_z[rows], z.detach()) < 1e-10
    k_some, v_some = k[keys].requires_grad_(), v[keys].requires_grad_()
    w = weights(q, k_some, keys <= positions[:, None])
    part = w @ v_some
    numerator = every_o * every_z + (part - part.detach())  # the values of all keys, the derivatives of some
    denominator = every_z + (w - w.detach()).sum(-1, keepdim=True)
    grad_k, grad_v = torch.autograd.grad(numerator / denominator, (k_some, v_some), grad_o)
    return [x.detach() for x in (o, z, grad_q, grad_k, grad_v)]


# Measured between both algorithms at n = 100003 (bf16) and 20011 (fp32): below 1.5e-2 and 5e-5. The floor of fp32 is the
# rounding of accumulators that a million terms went through.
LONG = {"bf16": 1.5e-2, "fp16": 5e-3, "tf32": 5e-3, "fp32": 1e-4}


@pytest.mark.parametrize(
    "n, algorithm, modes, d",
    [(100003, "quadratic", "bf16 fp32", 64), (100003, "linear", "bf16 fp16 tf32 fp32", 64), (2**20, "linear", "bf16 fp32", 32)],
    ids=["100003-quadratic", "100003-linear", "2**20-linear"],
)
@by_order
def test_long_sequences(n, algorithm, modes, d, p):
    for mode in modes.split():
        case = size("", n, b=1, h=1, d=d, p=p)
        arguments, grad_o = operands(case, mode, algorithm)
        with matmul_precision(MODES[mode][1]):
            o, z, *grads = (x[0, 0] for x in both(arguments, grad_o))
        generator = torch.Generator().manual_seed(7)
        rows, keys = (torch.randperm(n, generator=generator)[:32].to(DEVICE) for _ in range(2))
        rows[0], keys[0] = n - 1, 0  # the whole sequence
        exact = sampled(arguments, grad_o, rows, keys)
        actual = (o[rows], z[rows, None], grads[0][rows], grads[1][keys], grads[2][keys])
        for name, x, y in zip(("o", "z", "grad_q", "grad_k", "grad_v"), actual, exact, strict=True):
            error = ((x.double() - y).norm(dim=-1) / y.norm(dim=-1)).square().mean().sqrt().item()  # no row counts for more
            assert error <= LONG[mode], f"{mode} {name}: {error:.2e}"


# ---- streams, graphs, devices, compilers


def on_a_late_stream(tensors, call):
    """Runs `call` on a stream of its own, on which its tensors arrive late."""
    late = [torch.zeros_like(x) for x in tensors]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        for x, y in zip(late, tensors, strict=True):
            x.copy_(y)
        actual = call(*late)
    side.synchronize()
    return actual


@by_algorithm
@pytest.mark.parametrize("d", [64, 37], ids=["aligned", "padded"])
def test_side_stream(d, algorithm):
    """The operands arrive late on a stream of their own, and the kernels must wait for that stream."""
    arguments, grad_o = operands(size("", 300, d=d, dv=d, mask=True), "bf16", algorithm)
    expected = both(arguments, grad_o)
    actual = on_a_late_stream(arguments[:3], lambda *late: both((*late, *arguments[3:]), grad_o))
    for x, y in zip(actual, expected, strict=True):
        assert torch.equal(x, y)


@by_algorithm
@by_mode
def test_cuda_graph(mode, algorithm, precision):
    """Forward and backward are captured once and replayed on other inputs."""
    case = in_mode(size("", 700, h=4, hk=2, mask=True, noise=True), mode)
    options = case.options | {"algorithm": algorithm}
    static, other = (random_tensors(case, DEVICE, seed) for seed in (1, 2))
    grad_o = torch.randn(static["drop_noise"].shape, device=DEVICE, dtype=case.dtype)
    leaves = [static[name].requires_grad_() for name in "qkv"]

    def train():
        o = fastmax_attention(**static, **options)
        return o.detach(), *torch.autograd.grad(o, leaves, grad_o)

    graph, captured = capture(train)
    for inputs in (other, random_tensors(case, DEVICE, 3)):
        with torch.no_grad():
            for name, x in static.items():
                x.copy_(inputs[name])
        assert_replayed(graph, captured, train())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@by_algorithm
@by_mode
def test_second_device(mode, algorithm):
    """The tensors are on a device that is not the current one."""
    case = in_mode(size("", 700, d=40, h=4, hk=2, mask=True, noise=True, algorithm=algorithm), mode)
    assert torch.cuda.current_device() == 0
    assert checks.check(case, "cuda:1", 5).wrong == []
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        assert checks.check(case, "cuda:0", 5).wrong == []
        assert torch.cuda.current_device() == 1


@torch_warns
@by_algorithm
@pytest.mark.parametrize("mode", ["bf16", "tf32"])
def test_compile(mode, algorithm, precision, fresh_dynamo):
    case = in_mode(size("", 300, h=4, hk=2, mask=True, layout="token-major", algorithm=algorithm), mode)
    tensors = random_tensors(case, DEVICE)
    compiled = torch.compile(fastmax_attention, fullgraph=True)
    expected = evaluation.run(fastmax_attention, tensors, case.options)
    for name, x in evaluation.run(compiled, tensors, case.options).items():
        assert torch.equal(x, expected[name]), name


@by_algorithm
def test_compiled_code_follows_the_precision_setting(algorithm, fresh_dynamo):
    case = size("", 300, algorithm=algorithm)
    tensors = random_tensors(case, DEVICE)
    compiled = torch.compile(fastmax_attention, fullgraph=True, backend="aot_eager")
    outputs = {}
    for precision in ("highest", "high", "highest"):
        with matmul_precision(precision):
            outputs[precision] = evaluation.run(compiled, tensors, case.options)
            expected = evaluation.run(fastmax_attention, tensors, case.options)
        for name, x in outputs[precision].items():
            assert torch.equal(x, expected[name]), f"{precision}: {name}"
    assert not torch.equal(outputs["high"]["o"], outputs["highest"]["o"])


# ---- precision


@by_algorithm
@by_order
def test_highest_and_high_are_two_arithmetics(p, algorithm):
    """True fp32 is right to 1e-6, TF32 to 1e-3 and visibly worse than fp32."""
    case = size("", 600, h=4, hk=2, p=p)
    tensors = random_tensors(case, DEVICE)
    exact = evaluation.run(naive_attention, tensors, case.options, torch.float64)
    errors = {}
    for precision in ("highest", "high", "medium"):
        with matmul_precision(precision):
            actual = evaluation.run(fastmax_attention, tensors, case.options | {"algorithm": algorithm})
        errors[precision] = {name: relative(actual[name], x) for name, x in exact.items()}
    for name in exact:
        assert errors["highest"][name] <= 4e-6, (name, errors)
        assert 2e-5 <= errors["high"][name] <= 4e-3, (name, errors)
    assert errors["medium"] == errors["high"]


@by_algorithm
@by_order
def test_the_newer_precision_setting_is_obeyed(p, algorithm):
    """`torch.backends.cuda.matmul.fp32_precision` has the effect of `set_float32_matmul_precision`."""
    case = size("", 300, p=p, algorithm=algorithm)
    tensors = random_tensors(case, DEVICE)
    expected = {}
    for setting in ("highest", "high"):
        with matmul_precision(setting):
            expected[setting] = fastmax_attention(**tensors, **case.options)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        for newer, older in (("tf32", "high"), ("ieee", "highest")):
            torch.backends.cuda.matmul.fp32_precision = newer
            assert torch.equal(fastmax_attention(**tensors, **case.options), expected[older])
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert not torch.equal(expected["high"], expected["highest"])


@by_algorithm
@pytest.mark.parametrize("magnitude", [30.0, 200.0])
@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_huge_scores(mode, magnitude, algorithm, precision):
    """f(s) is 1e7 or 1e11 and sums are larger, far past float16, while every result has an ordinary size."""
    case = in_mode(size("", 300, magnitude=magnitude, temperature=1.0, algorithm=algorithm), mode)
    tensors = random_tensors(case, DEVICE)
    plain = {name: value for name, value in case.options.items() if name != "algorithm"}
    exact = evaluation.run(naive_attention, tensors, plain, torch.float64)
    for name, x in evaluation.run(fastmax_attention, tensors, case.options).items():
        assert exact[name].abs().max() < 6e4
        assert relative(x, exact[name]) <= 4 * ROUNDING[case.mode], name


# ---- calls that the kernels do not cover


def test_covered_calls_do_not_reach_the_pytorch_implementation(monkeypatch):
    calls = []

    def counted(right):
        return lambda *args, **options: calls.append(None) or right(*args, **options)

    for name in ("forward", "backward", "decode_step", "decode_step_", "buffered_step_"):
        monkeypatch.setattr(eager, name, counted(getattr(eager, name)))
    for mode, algorithm, d in itertools.product(MODES, (*ALGORITHMS, "auto"), (1, 16, 37, 128)):
        with matmul_precision(MODES[mode][1]):
            both(*operands(size("", 50, d=d, mask=True, noise=True), mode, algorithm))
        assert not calls, (mode, algorithm, d)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        token = torch.randn(2, 4, 1, 64, device=DEVICE, dtype=dtype)
        for step in (fastmax.decoding.step, fastmax.decoding.step_):
            step(token, token, token, fastmax.decoding.init_state(2, 4, 64, dtype=dtype, device=DEVICE))
        fastmax.decoding.step_(
            token,
            token,
            token,
            fastmax.decoding.init_state(2, 4, 64, dtype=dtype, device=DEVICE, exact_window=2, flush_interval=4),
        )
        assert not calls, dtype
    both(*operands(size("", 50, d=300), "fp32", "auto"))
    assert len(calls) == 2, "and the rest does"
    token = token.double()
    for step in (fastmax.decoding.step, fastmax.decoding.step_):
        step(token, token, token, fastmax.decoding.init_state(2, 4, 64, dtype=torch.float64, device=DEVICE))
    assert len(calls) == 4


@by_algorithm
@pytest.mark.parametrize("what", ["float64", "head dim 300", "value dim 300", "rpe tensor"])
def test_what_is_not_covered_runs_on_pytorch_operations(what, algorithm):
    sizes = {"head dim 300": {"d": 300}, "value dim 300": {"dv": 300}}.get(what, {})
    arguments, grad_o = operands(size("", 70, 90, h=4, hk=2, mask=True, noise=True, **sizes), "fp32", algorithm)
    if what == "float64":
        arguments, grad_o = widened(arguments), grad_o.double()
    if what == "rpe tensor":
        rpe = torch.randn(159, 64, device=DEVICE)
        arguments = (*arguments[:5], rpe, *arguments[6:])
    q, k, v, *rest = arguments
    o, z = torch.ops.fastmax.forward(*arguments)
    expected = pytorch_implementation("forward")(*arguments)
    assert torch.equal(o, expected[0]) and torch.equal(z, expected[1])
    assert what == "rpe tensor" or relative(z, denominators(*widened(arguments))) < 1e-5
    grads = torch.ops.fastmax.backward(grad_o, None, q, k, v, o, z, *rest)
    for x, y in zip(grads, pytorch_implementation("backward")(grad_o, None, q, k, v, o, z, *rest), strict=True):
        assert torch.equal(x, y)
    assert grads[3].shape == ((159, 64) if what == "rpe tensor" else (0,))
    assert grads[4].shape == (0,)


# ---- memory


def peak_of_both(arguments, grad_o):
    """Returns the peak memory of a forward and backward beside their operands, after a first one."""
    both(arguments, grad_o)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both(arguments, grad_o)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_bytes(n, mode, algorithm, p):
    """Returns the peak memory of a forward and backward with 4 heads of 64, operands included, and the size of q, k, v, o and
    the gradients."""
    arguments, grad_o = operands(size("", n, b=1, h=4, p=p), mode, algorithm)
    return peak_of_both(arguments, grad_o) + 4 * grad_o.nbytes, 8 * grad_o.nbytes


@by_mode
@pytest.mark.parametrize(
    "algorithm, p", [("linear", 2), ("linear", 1), ("quadratic", 2)], ids=["linear-p2", "linear-p1", "quadratic"]
)
def test_memory_is_linear_in_tokens(algorithm, p, mode, precision):
    """Memory beside q, k, v, o and the gradients never includes an (n, m) tensor. For p = 2 it is at most one state of d (1 + d
    + d (d + 1) / 2) numbers of 8 bytes per 256 tokens; for p = 1 half of what the tensors take. Beside the states there are g =
    grad_o / z, a float per row, and for fp16 fp32 copies of q, k and v. A quadratic backward in one kernel needs sums of grad_q
    in fp32, a quarter of the tensors, grad_o / z, an eighth, and floats per row."""
    n, d, heads = 65536, 64, 4
    (half, _), (whole, tensors) = (peak_bytes(tokens, mode, algorithm, p) for tokens in (n // 2, n))
    assert half < whole <= 2.1 * half
    states = 0
    if algorithm == "linear":
        states = 8 * d * (1 + d + d * (d + 1) // 2) * heads * (n // 256) if p == 2 else tensors / 2
    copies = tensors * (1.0 if mode == "fp16" else 0.4)
    assert whole <= tensors + states + copies, f"{whole / 2**20:.0f} MB for tensors of {tensors / 2**20:.0f} MB"


# ---- one token at a time


@lru_cache(maxsize=1)
def a_state(d, dv, hk, p, dtype):
    """Returns the state after 40 tokens in float32 (float64 for float64 tokens)."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    k, v = (torch.randn(3, hk, 40, x, generator=generator, device=DEVICE, dtype=torch.float64) for x in (d, dv))
    state = fastmax.decoding.init_state(3, hk, d, dv, dtype=torch.float64, device=DEVICE, p=p, temperature=d**0.5)
    _, state = fastmax.decoding.prefill(k, k, v, state)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return state.kv_state.to(wide), state.k_sum.to(wide)


@pytest.mark.parametrize("d, dv", [(64, 64), (16, 16), (128, 128), (96, 32), (37, 51), (1, 1), (5, 130)], ids=lambda x: str(x))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=lambda x: str(x)[6:])
@pytest.mark.parametrize("with_decay", [False, True], ids=["", "decay"])
@pytest.mark.parametrize("with_gate", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
@by_order
def test_decode_step(p, masked, with_gate, with_decay, dtype, d, dv):
    """The step agrees with the PyTorch implementation in float64, with and without groups, and leaves the given state
    unchanged."""
    if p == 1 and d == 1:
        pytest.skip("1 + s is not positive for one channel")
    for h, hk, layout in ((8, 2, unaligned), (6, 3, torch.clone), (2, 2, unaligned), (20, 1, torch.clone)):
        kv_state, k_sum = a_state(d, dv, hk, p, dtype)
        before = kv_state.clone(), k_sum.clone()
        q, k, v = (layout(torch.randn(3, heads, 1, x, device=DEVICE).to(dtype)) for heads, x in ((h, d), (hk, d), (hk, dv)))
        mask = torch.tensor([[True], [False], [True]], device=DEVICE) if masked else None
        log_decay = torch.tensor([-0.3, 0.0, -math.inf], dtype=kv_state.dtype, device=DEVICE) if with_decay else None
        log_decay = None if log_decay is None else log_decay[:, None, None].expand(3, hk, 1)
        gate = torch.randn(hk, 3, 1, dtype=kv_state.dtype, device=DEVICE).transpose(0, 1) if with_gate else None
        score = Score(0.1 / d if p == 1 else d**-0.5, 1.0, 1.0, 0.5, p)
        poison_free_memory(DEVICE)
        actual = torch.ops.fastmax.decode_step(q, k, v, kv_state, k_sum, mask, log_decay, gate, *score)
        wide = (None if x is None else x.double() for x in (log_decay, gate))
        exact = eager.decode_step(*(x.double() for x in (q, k, v, kv_state, k_sum)), mask, *wide, score)
        assert torch.equal(kv_state, before[0]) and torch.equal(k_sum, before[1])
        o, *state = actual
        assert o.dtype == dtype and o.shape == (3, h, 1, dv)
        limit = {torch.float64: 1e-12, torch.float32: 5e-6}.get(dtype) or ROUNDING[str(dtype)[6:]]
        assert relative(o, exact[0]) <= limit
        for x, y, like in zip(state, exact[1:], before, strict=True):
            assert x.dtype == like.dtype and x.shape == like.shape
            assert relative(x, y) <= (1e-12 if dtype == torch.float64 else 1e-6)
        if masked:
            for x, like in zip(state, before, strict=True):
                assert torch.equal(x[1], like[1]) and not torch.equal(x[0], like[0])
        again = torch.ops.fastmax.decode_step(q, k, v, kv_state, k_sum, mask, log_decay, gate, *score)
        assert all(torch.equal(x, y) for x, y in zip(actual, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda x: str(x)[6:])
@by_order
def test_generating_equals_the_parallel_form(p, dtype):
    case = size("", 40, h=4, hk=2, p=p)._replace(dtype=dtype)
    tensors = random_tensors(case, DEVICE)
    exact = naive_attention(**{name: x.double() for name, x in tensors.items()}, **case.options)
    state = fastmax.decoding.init_state(2, 2, 64, dtype=dtype, device=DEVICE, p=p, temperature=case.options["temperature"])
    outputs = []
    for tokens in zip(*(x.split(1, dim=2) for x in tensors.values()), strict=True):
        o, state = fastmax.decoding.step(*tokens, state)
        outputs.append(o)
    assert relative(torch.cat(outputs, dim=2), exact) <= (5e-6 if dtype == torch.float32 else ROUNDING["bfloat16"])


# ---- the library


def test_build_info_names_what_was_built():
    info = extension.build_info()
    assert "architectures" in info and all(mode in info for mode in MODES)
    assert all(str(d) in info for d in HEAD_DIMS)


def test_no_warning_where_kernels_run(recwarn):
    extension._checked.clear()
    fastmax_attention(**random_tensors(size("", 20), DEVICE))
    assert not [w for w in recwarn if "fastmax" in str(w.message)]
