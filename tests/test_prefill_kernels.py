"""`prefill` on the CUDA kernels: outputs, states and gradients against float64 on poisoned memory, from states of some tokens.
Sizes are chosen by path, as in tests/test_kernels.py: chunks of 256 (head dim <= 64) to 2048 tokens, few states whose walk is
cut into segments, many states that use the memory of accumulators in groups, snapshots past 832 MiB."""

from itertools import product
from typing import NamedTuple

import pytest
import torch
from common import capture, make_decay, pytorch_implementation, relative, torch_warns
from test_kernels import DEVICE, MODES, WHY_NOT, by_mode, precision  # noqa: F401

import fastmax
from fastmax import eager
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory
from fastmax.testing.tensors import token_major, unaligned

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]


class Case(NamedTuple):
    n: int
    d: int = 64
    dv: int = 0  # 0: d
    h: int = 4
    hk: int = 2
    b: int = 2
    mask: bool = False
    decay: str | None = None  # of common.DECAYS; -inf as the operator takes it: a decay of 0 and a first key
    layout: str = "contiguous"
    p: int = 2
    gate: bool = False


LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 511, 512, 513, 767, 769, 1025)
SEVERAL_CHUNKS = {16: 700, 32: 700, 64: 1300, 96: 2500, 128: 2500, 256: 4500}
CASES = {
    **{f"length {n}": Case(n) for n in LENGTHS},
    **{f"head dim {d}": Case(300, d) for d in SEVERAL_CHUNKS},
    **{f"several chunks, head dim {d}": Case(n, d, b=1) for d, n in SEVERAL_CHUNKS.items()},
    **{f"around a chunk of {c}, head dim {d}": Case(c + 1, d, b=1) for d, c in ((32, 256), (128, 1024), (256, 2048))},
    **{f"head dims {d}, {dv}": Case(150, d, dv)
       for d, dv in ((37, 51), (40, 24), (1, 1), (5, 130), (16, 128), (128, 16), (64, 32), (200, 64), (130, 256), (255, 33))},
    **{f"segments, head dim {d}": Case(n, d, b=1, h=1, hk=1) for d, n in ((32, 2300), (64, 2300), (96, 2900), (128, 4500))},
    **{f"segments, length {n}": Case(n, 32, b=1, h=2, hk=1, decay="ordinary") for n in (2303, 2304, 2305, 3000)},
    "GQA 4:1": Case(300, h=8, hk=2),
    "MQA": Case(130, 32, h=6, hk=1),
    "one head": Case(700, b=1, h=1, hk=1),
    "mask": Case(300, mask=True),
    "mask, ragged head dims": Case(700, 37, 51, mask=True, layout="unaligned"),
    "unaligned": Case(300, layout="unaligned"),
    "token-major": Case(300, layout="token-major"),
    "many states": Case(300, b=5, h=60, hk=60),
    "many states, a decay and a mask": Case(300, b=5, h=60, hk=60, mask=True, decay="-inf at places"),
    "many states, head dim 128": Case(600, 128, b=3, h=40, hk=20),
    "many states, head dim 256": Case(300, 256, b=1, h=7, hk=7),
    **{f"p = 1, length {n}": Case(n, p=1) for n in (1, 17, 255, 256, 257, 700)},
    **{f"p = 1, head dim {d}": Case(600, d, p=1, mask=True) for d in SEVERAL_CHUNKS},
    **{f"p = 1, head dims {d}, {dv}": Case(150, d, dv, p=1, decay="ordinary")
       for d, dv in ((37, 51), (1, 1), (16, 128), (130, 256))},
    "p = 1, GQA, a decay and a mask": Case(600, h=8, hk=2, p=1, mask=True, decay="-inf at places"),
    "p = 1, many states": Case(300, b=5, h=60, hk=60, p=1),
    **{f"gates, p = {p}, head dim {d}": Case(n, d, p=p, gate=True) for p in (1, 2) for d, n in SEVERAL_CHUNKS.items()},
    **{f"gates, length {n}": Case(n, gate=True) for n in (1, 17, 255, 256, 257)},
    "gates, a decay and a mask": Case(700, h=8, hk=2, mask=True, decay="-inf at places", gate=True),
    "gates, p = 1, a decay and a mask": Case(600, h=8, hk=2, p=1, mask=True, decay="ordinary", gate=True),
    "gates, many states": Case(300, b=5, h=60, hk=60, decay="ordinary", gate=True),
}  # fmt: skip


def in_layout(x, layout):
    return {"contiguous": torch.clone, "unaligned": unaligned, "token-major": token_major}[layout](x)


def a_state(case, generator):
    """Returns sums over 40 tokens in float32."""
    k, v = (torch.randn(case.b, case.hk, 40, x, generator=generator, device=DEVICE) for x in (case.d, case.dv or case.d))
    features = [k.new_ones(*k.shape[:3], 1), k]
    if case.p == 2:
        row, column = torch.triu_indices(case.d, case.d, device=DEVICE)
        features.append(k[..., row] * k[..., column])
    features = torch.cat(features, dim=-1)
    return features.mT @ v, features.sum(2)


def arguments(case, mode):
    """Returns arguments of torch.ops.fastmax.prefill."""
    dtype = MODES[mode][0]
    generator = torch.Generator(DEVICE).manual_seed(case.n)
    sizes = ((case.h, case.d), (case.hk, case.d), (case.hk, case.dv or case.d))
    q, k, v = (
        in_layout(torch.randn(case.b, heads, case.n, x, generator=generator, device=DEVICE).to(dtype), case.layout)
        for heads, x in sizes
    )
    mask = log_decay = first = None
    if case.mask:
        mask = torch.rand(case.b, case.n, generator=generator, device=DEVICE) > 0.3
        mask[0, : case.n // 2] = False
    if case.decay is not None:
        log_decay = make_decay(case.decay, case.b, case.hk, case.n, device=DEVICE)
        resets = log_decay == -torch.inf
        first = torch.where(resets, torch.arange(case.n, device=DEVICE), -1).cummax(-1).values.to(torch.int32)
        log_decay = torch.where(resets, 0.0, log_decay)
    score = Score(0.1 / case.d if case.p == 1 else case.d**-0.5, 1.0, 1.0, 0.5, case.p)
    gate = 2.0 * torch.randn(case.b, case.hk, case.n, generator=generator, device=DEVICE) if case.gate else None
    return q, k, v, mask, log_decay, first, gate, *a_state(case, generator), *score, mode == "tf32"


def in_float64(given):
    q, k, v, mask, log_decay, first, gate, kv_state, k_sum = (
        x.double() if x is not None and x.is_floating_point() else x for x in given[:9]
    )
    call = Call(Score(*given[9:14]), causal=True, attention_mask=mask, log_decay=log_decay, k_start=first, log_input_gate=gate)
    return eager.forward_from_state(q, k, v, call, kv_state, k_sum)


def rounding(mode):
    """Returns the largest relative error of an output."""
    if mode == "fp32":
        return 1e-5
    return 2 * ROUNDING[{"bf16": "bfloat16", "fp16": "float16"}.get(mode, mode)]


def check(given, mode):
    """Checks results against float64, that arguments are unchanged, and that a repetition gives the same bits."""
    before = [x.clone() for x in given[7:9]]
    poison_free_memory(DEVICE)
    actual = torch.ops.fastmax.prefill(*given)
    # fp32: tensor cores cut off what they add up, row after row; the output divides out most of that.
    limits = (rounding(mode), *(1e-4 if mode == "fp32" else rounding(mode),) * 2)
    limits = (limits[0], *limits)
    for name, limit, x, y in zip(("o", "z", "kv_state", "k_sum"), limits, actual, in_float64(given), strict=True):
        assert x.shape == y.shape and x.dtype == (given[0].dtype if name == "o" else torch.float32), name
        if not y.any():  # the one token that is not forgotten is padding
            assert not x.any(), name
            continue
        assert relative(x, y) <= limit, f"{name}: {relative(x, y):.1e}"
    assert all(map(torch.equal, given[7:9], before))
    poison_free_memory(DEVICE)
    assert all(map(torch.equal, torch.ops.fastmax.prefill(*given), actual))


@by_mode
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case, mode, precision):  # noqa: F811
    check(arguments(case, mode), mode)


@by_mode
@pytest.mark.parametrize(
    "decay", ["none", "ordinary", "strong", "-inf at places", "-inf at the first token", "-inf everywhere"]
)
@pytest.mark.parametrize("d, n", [(64, 255), (64, 256), (64, 700), (128, 1500), (256, 300)])
def test_decays(d, n, decay, mode, precision):  # noqa: F811
    # A mask beside strong decays leaves nothing of any key to some queries, in fp32.
    check(arguments(Case(n, d, decay=decay, mask=d == 64 and decay != "strong"), mode), mode)


def test_bounds_without_a_decay():
    """In each head a sequence begins at another token, and queries from there on do not see the state."""
    given = list(arguments(Case(700), "bf16"))
    begin = torch.tensor([0, 600, 256, 300], device=DEVICE, dtype=torch.int32).view(2, 2, 1)
    token = torch.arange(700, device=DEVICE)
    given[5] = torch.where(token >= begin, begin, -1)
    check(given, "bf16")


@by_mode
def test_a_forgotten_state_is_not_read(mode, precision):  # noqa: F811
    """A reset at the first token hides the state, so a NaN in it must have no effect."""
    given = list(arguments(Case(600, decay="-inf at the first token"), mode))
    expected = torch.ops.fastmax.prefill(*given)
    given[7], given[8] = (torch.full_like(x, torch.nan) for x in given[7:9])
    assert all(map(torch.equal, torch.ops.fastmax.prefill(*given), expected))


def test_states_of_one_column_and_of_all():
    """The numbers of the state all differ, and one token changes a few columns, so that a number in the wrong place is
    noticed."""
    for d, dv in ((32, 32), (37, 51), (64, 64), (96, 80), (128, 128), (256, 256)):
        for mode, p in product(("bf16", "fp32"), (1, 2)):
            given = list(arguments(Case(1, d, dv, b=1, h=2, hk=2, p=p), mode))
            for i in (7, 8):
                given[i] = torch.randperm(given[i].numel(), device=DEVICE).view(given[i].shape).float()
            given[3] = torch.zeros(1, 1, dtype=torch.bool, device=DEVICE)  # the token does not join
            *_, kv_state, k_sum = torch.ops.fastmax.prefill(*given)
            assert torch.equal(kv_state, given[7]) and torch.equal(k_sum, given[8]), (d, dv, mode, p)


@pytest.mark.parametrize("decay", [None, "ordinary"], ids=["", "decay"])
@pytest.mark.parametrize("d, h, n, p", [(256, 3, 36_000, 2), (128, 8, 47_000, 2), (256, 9, 36_000, 1)])
def test_phases(d, h, n, p, decay):
    """Snapshots of more than 832 MiB are made in phases. The accumulators must survive from one phase to the next."""
    check(arguments(Case(n, d, b=1, h=h, hk=h, decay=decay, p=p), "bf16"), "bf16")


@by_mode
@pytest.mark.parametrize("decay", [None, "-inf at places"], ids=["", "decay"])
@pytest.mark.parametrize("sizes", [(300, 1, 1, 17, 400), (1, 256, 1, 0, 600), (5,) * 20, (256, 256, 255, 1)], ids=str)
def test_any_split_equals_one_call(sizes, decay, mode, precision):  # noqa: F811
    """Prefills and steps in turn equal one call and the definition."""
    case = Case(sum(sizes), d=64, decay=decay, mask=True)
    dtype = MODES[mode][0]
    q, k, v, mask = arguments(case, mode)[:4]
    log_decay = None if decay is None else make_decay(decay, case.b, case.hk, case.n, device=DEVICE)
    state = fastmax.decoding.init_state(case.b, case.hk, case.d, dtype=dtype, device=DEVICE, temperature=8.0)
    outputs, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        options = {"attention_mask": mask[:, part], "log_decay": None if decay is None else log_decay[..., part]}
        function = fastmax.decoding.step if size == 1 else fastmax.decoding.prefill
        o, state = function(*(x[:, :, part] for x in (q, k, v)), state, **options)
        outputs.append(o)
        start += size
    options = {"causal": True, "temperature": 8.0, "attention_mask": mask}
    exact_decay = None if decay is None else torch.where(mask[:, None], log_decay, 0.0).double()
    exact = fastmax.fastmax_attention(*(x.double() for x in (q, k, v)), **options, log_decay=exact_decay)
    assert relative(torch.cat(outputs, dim=2), exact) <= rounding(mode)
    assert state.tokens == case.n


@by_mode
def test_an_empty_state_is_the_parallel_form(mode, precision):  # noqa: F811
    q, k, v, *_ = arguments(Case(3000), mode)
    state = fastmax.decoding.init_state(2, 2, 64, dtype=q.dtype, device=DEVICE, temperature=8.0)
    o, _ = fastmax.decoding.prefill(q, k, v, state)
    expected = fastmax.fastmax_attention(q, k, v, causal=True, algorithm="linear", temperature=8.0)
    assert relative(o, expected.double()) <= rounding(mode)
    assert not state.kv_state.any() and not state.k_sum.any()


def test_a_state_of_any_strides():
    given = list(arguments(Case(70), "bf16"))
    expected = torch.ops.fastmax.prefill(*given)
    given[7], given[8] = given[7].mT.contiguous().mT, given[8].repeat_interleave(2, 2)[..., ::2]
    assert all(map(torch.equal, torch.ops.fastmax.prefill(*given), expected))


@pytest.mark.parametrize("case", [Case(0), Case(9, b=0)], ids=["no token", "no batch"])
def test_nothing_to_do(case):
    given = arguments(case._replace(n=max(case.n, 1), b=max(case.b, 1)), "bf16")
    given = [x[: case.b] if torch.is_tensor(x) else x for x in given]
    given[:3] = [x[:, :, : case.n] for x in given[:3]]
    o, z, kv_state, k_sum = torch.ops.fastmax.prefill(*given)
    assert (
        o.shape == given[0].shape
        and z.shape == o.shape[:3]
        and torch.equal(kv_state, given[7])
        and torch.equal(k_sum, given[8])
    )
    assert case.b == 0 or (kv_state.data_ptr() != given[7].data_ptr() and k_sum.data_ptr() != given[8].data_ptr())


def test_what_is_covered(monkeypatch):
    """Kernels cover every 16- and 32-bit dtype and order, forward and backward, but not float64 or wide heads."""
    calls = []
    for name in ("forward_from_state", "backward_from_state"):
        right = getattr(eager, name)
        monkeypatch.setattr(eager, name, lambda *args, right=right, name=name: calls.append(name) or right(*args))

    def prefill(d=64, dtype=torch.bfloat16, **options):
        x = torch.randn(2, 4, 50, d, device=DEVICE).to(dtype).requires_grad_()
        calls.clear()
        o, _ = fastmax.decoding.prefill(
            x, x, x, fastmax.decoding.init_state(2, 4, d, dtype=dtype, device=DEVICE, temperature=d, **options)
        )
        o.sum().backward()
        return calls

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for d in (1, 16, 37, 128):
            assert prefill(d, dtype) == prefill(d, dtype, p=1) == [], (dtype, d)
    for options in ({"dtype": torch.float64}, {"d": 300}):
        assert prefill(**options) == ["forward_from_state", "backward_from_state"]


def test_a_captured_graph():
    """A replay reads the tokens and the state that are then in its memory."""
    given = arguments(Case(600, decay="ordinary"), "bf16")
    graph, outputs = capture(lambda: torch.ops.fastmax.prefill(*given))
    for seed in range(2):
        generator = torch.Generator(DEVICE).manual_seed(seed)
        given[0].normal_(generator=generator), given[7].mul_(1.5), given[8].mul_(1.25)
        graph.replay()
        assert all(map(torch.equal, outputs, torch.ops.fastmax.prefill(*given)))


@torch_warns
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled(fresh_dynamo):
    """Compiled code calls the kernels, with static and dynamic shapes."""
    compiled = torch.compile(fastmax.decoding.prefill, fullgraph=True)
    for n in (40, 70, 300):
        q, k, v, *_ = arguments(Case(n), "bf16")
        state = fastmax.decoding.init_state(2, 2, 64, dtype=torch.bfloat16, device=DEVICE, temperature=8.0)
        with torch.no_grad():
            (o, after), (expected, expected_after) = (f(q, k, v, state) for f in (compiled, fastmax.decoding.prefill))
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(after.tensors(), expected_after.tensors())


# ---- gradients

LEAVES = {"q": 0, "k": 1, "v": 2, "log_decay": 4, "gate": 6, "kv_state": 7, "k_sum": 8}  # of arguments()
OUTPUTS = ("o", "z", "kv_state", "k_sum")


def output_grads(given, outputs=OUTPUTS):
    """Returns gradients of the outputs by name, in their dtypes."""
    q, v, kv_state, k_sum = given[0], given[2], given[7], given[8]
    generator = torch.Generator(DEVICE).manual_seed(7)
    shapes = {"o": (*q.shape[:3], v.shape[3]), "z": q.shape[:3], "kv_state": kv_state.shape, "k_sum": k_sum.shape}
    # About as large as what the other queries would want of the state.
    sizes = {"o": 1.0, "z": 1e-3, "kv_state": 1e-3, "k_sum": 1e-3}
    grads = {name: sizes[name] * torch.randn(shape, generator=generator, device=DEVICE) for name, shape in shapes.items()}
    return {name: grads[name].to(q.dtype if name == "o" else torch.float32) for name in outputs}


def gradients(function, given, grads):
    """Returns the gradients of a function that returns OUTPUTS, by the name of the argument."""
    given = list(given)
    leaves = {name: given[i].detach().clone().requires_grad_() for name, i in LEAVES.items() if given[i] is not None}
    for name, x in leaves.items():
        given[LEAVES[name]] = x
    outputs = dict(zip(OUTPUTS, function(given), strict=True))
    of = [outputs[name] for name in grads]
    found = torch.autograd.grad(of, list(leaves.values()), list(grads.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def operator(given):
    return torch.ops.fastmax.prefill(*given)


def compare(actual, exact, mode):
    limit = 1e-4 if mode == "fp32" else 4 * rounding(mode)
    for name, x in actual.items():
        y = exact[name].double()
        # Where little but one key is seen, or added, sums of pairs cancel but for a rounding of them.
        size = max(y.norm(), {"q": 0.1, "k": 0.1, "log_decay": 1e-2, "gate": 1e-2}.get(name, 0.0) * exact["v"].norm())
        if size == 0:
            assert not x.any(), name
            continue
        error = ((x - y).norm() / size).item()
        assert error <= limit * (2 if name in ("log_decay", "gate") else 1), f"{name}: {error:.1e}"


def check_gradients(given, mode, outputs=OUTPUTS):
    """Checks gradients against autograd through the float64 operations, and that a repetition gives the same bits."""
    grads = output_grads(given, outputs)
    poison_free_memory(DEVICE)
    actual = gradients(operator, given, grads)
    wide = [x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    # Recorded PyTorch operations keep much of many states: there the gradient by hand, which tests/test_decode.py compares.
    reference = in_float64 if given[2].shape[0] * given[2].shape[1] <= 8 else operator
    exact = gradients(reference, wide, {name: x.double() for name, x in grads.items()})
    compare(actual, exact, mode)
    for name, x in actual.items():
        assert x.shape == given[LEAVES[name]].shape and x.dtype == given[LEAVES[name]].dtype, name
    poison_free_memory(DEVICE)
    again = gradients(operator, given, grads)
    assert all(torch.equal(again[name], x) for name, x in actual.items())


@by_mode
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_against_float64(case, mode, precision):  # noqa: F811
    check_gradients(arguments(case, mode), mode)


@by_mode
@pytest.mark.parametrize("decay", ["none", "ordinary", "-inf at places", "-inf at the first token", "-inf everywhere"])
@pytest.mark.parametrize("d, n", [(64, 1), (64, 256), (64, 700), (128, 1500), (256, 300)])
def test_gradients_with_decays(d, n, decay, mode, precision):  # noqa: F811
    check_gradients(arguments(Case(n, d, decay=decay, mask=d == 64), mode), mode)


@by_mode
@pytest.mark.parametrize("h", [4, 8], ids=["GQA 2:1", "GQA 4:1"])
def test_gradients_of_a_group(h, mode, precision):  # noqa: F811
    check_gradients(arguments(Case(520, h=h, mask=True, decay="ordinary"), mode), mode)


@pytest.mark.parametrize("outputs", [("o",), ("kv_state",), ("k_sum",), ("z",), ("o", "k_sum")], ids="+".join)
def test_gradients_of_some_outputs(outputs):
    """Outputs without a gradient count as those with a gradient of zeros."""
    check_gradients(arguments(Case(300, decay="ordinary"), "fp32"), "fp32", outputs)


COEFFICIENTS = {"a1 = 0": (1.0, 0.0, 0.5), "a0 = 0": (0.0, 0.0, 0.5), "a2 = 0": (1.0, 0.05, 0.0), "a2 < 0": (1.0, 0.1, -1e-3),
                "a1 is tiny": (1.0, 1e-30, 0.5), "all are tiny": (1e-15, 1e-15, 5e-16)}  # fmt: skip


@by_mode
@pytest.mark.parametrize("coefficients", COEFFICIENTS)
def test_gradients_where_a_coefficient_is_zero(coefficients, mode, precision):  # noqa: F811
    """Parts of a state that no query reads then still get and pass on a gradient."""
    given = list(arguments(Case(300, decay="ordinary"), mode))
    given[10:13] = COEFFICIENTS[coefficients]
    check_gradients(given, mode, ("o", "kv_state", "k_sum"))


@by_mode
@pytest.mark.parametrize("sizes", [(300, 1, 17, 400), (256, 257, 255), (1,) * 8], ids=str)
@pytest.mark.parametrize("decay", [None, "ordinary"], ids=["", "decay"])
def test_gradients_of_any_split_are_those_of_one_call(sizes, decay, mode, precision):  # noqa: F811
    """The gradients of several prefills agree with `fastmax_attention` in float64."""
    case = Case(sum(sizes), decay=decay)
    q, k, v, _, log_decay, *_ = arguments(case, mode)
    grad_o = output_grads(arguments(case, mode), ("o",))["o"]

    def leaves(*tensors):
        return [x.detach().clone().requires_grad_() for x in tensors if x is not None]

    ours, exact = leaves(q, k, v, log_decay), leaves(*(x if x is None else x.double() for x in (q, k, v, log_decay)))
    state, outputs = fastmax.decoding.init_state(case.b, case.hk, case.d, dtype=q.dtype, device=DEVICE, temperature=8.0), []
    for part in zip(*(x.split(sizes, dim=2) for x in ours), strict=True):
        o, state = fastmax.decoding.prefill(*part[:3], state, log_decay=part[3] if decay else None)
        outputs.append(o)
    actual = torch.autograd.grad(torch.cat(outputs, dim=2), ours, grad_o)
    o = fastmax.fastmax_attention(*exact[:3], causal=True, temperature=8.0, log_decay=exact[3] if decay else None)
    expected = torch.autograd.grad(o, exact, grad_o.double())
    compare(*(dict(zip(("q", "k", "v", "log_decay"), grads, strict=False)) for grads in (actual, expected)), mode)


@by_mode
def test_a_forgotten_state_has_no_gradient(mode, precision):  # noqa: F811
    """A reset at the first token hides the state, so its gradient is 0, even if it holds NaN."""
    given = list(arguments(Case(600, decay="-inf at the first token"), mode))
    grads = output_grads(given)
    expected = gradients(operator, given, grads)
    given[7], given[8] = (torch.full_like(x, torch.nan) for x in given[7:9])
    actual = gradients(operator, given, grads)
    assert all(torch.equal(actual[name], x) for name, x in expected.items())
    assert not actual["kv_state"].any() and not actual["k_sum"].any()


def test_the_gradient_of_a_state_goes_through_padding():
    """All tokens are padding and no query has a gradient, so each number of the state's gradient must stay in its place."""
    for d, dv in ((32, 32), (37, 51), (64, 64), (96, 80), (128, 128), (256, 256)):
        for mode, p in product(("bf16", "fp32"), (1, 2)):
            given = list(arguments(Case(300, d, dv, b=1, h=2, hk=2, p=p), mode))
            given[3] = torch.zeros(1, 300, dtype=torch.bool, device=DEVICE)
            grads = output_grads(given, ("kv_state", "k_sum"))
            actual = gradients(operator, given, grads)
            for name, x in grads.items():
                torch.testing.assert_close(actual[name], x, rtol=1e-6, atol=0.0)
            assert not any(actual[name].any() for name in ("q", "k", "v"))


@pytest.mark.parametrize("decay", [None, "ordinary"], ids=["", "decay"])
@pytest.mark.parametrize("d, h, n, p", [(256, 3, 36_000, 2), (128, 8, 47_000, 2), (256, 9, 36_000, 1)])
def test_gradients_in_phases(d, h, n, p, decay):
    """Snapshots of more than 832 MiB are made in phases. The accumulators must survive from one phase to the next."""
    given = arguments(Case(n, d, b=1, h=h, hk=h, decay=decay, p=p), "bf16")
    grads = output_grads(given)
    wide = [x.float() if torch.is_tensor(x) and x.is_floating_point() else x for x in given]
    o, z, *state = pytorch_implementation("prefill")(*wide)
    grads_and_tokens = (grads["o"].float(), *list(grads.values())[1:], *wide[:3])
    exact = pytorch_implementation("prefill_backward")(*grads_and_tokens, o, z, *state, *wide[3:])
    exact = dict(zip(LEAVES, exact, strict=True))
    compare(gradients(operator, given, grads), exact, "bf16")


def test_a_captured_gradient():
    given = arguments(Case(600, decay="ordinary"), "bf16")
    o, z, kv_state, k_sum = torch.ops.fastmax.prefill(*given)
    grads = output_grads(given)
    inputs = *grads.values(), *given[:3], o, z, kv_state, k_sum, *given[3:]
    graph, outputs = capture(lambda: torch.ops.fastmax.prefill_backward(*inputs))
    for factor in (1.5, 0.5):
        for x in grads.values():
            x.mul_(factor)
        graph.replay()
        assert all(map(torch.equal, outputs, torch.ops.fastmax.prefill_backward(*inputs)))


@torch_warns
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_gradients(fresh_dynamo):
    compiled = torch.compile(fastmax.decoding.prefill, fullgraph=True)
    for n in (40, 300):
        q, k, v, _, log_decay, *_ = arguments(Case(n, decay="ordinary"), "bf16")
        leaves = [x.requires_grad_() for x in (q, k, v, log_decay)]
        state = fastmax.decoding.init_state(2, 2, 64, dtype=torch.bfloat16, device=DEVICE, temperature=8.0)
        results = []
        for function in (compiled, fastmax.decoding.prefill):
            o, after = function(q, k, v, state, log_decay=log_decay)
            loss = o.float().square().sum() + 1e-3 * after.kv_state.sum() + 1e-3 * after.k_sum.sum()
            results.append(torch.autograd.grad(loss, leaves))
        torch.testing.assert_close(*results)
