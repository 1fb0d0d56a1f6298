"""`log_decay` in the CUDA kernels of Fastmax and of softmax, against float64 on poisoned memory, with the gradient of decays.
Kernels treat distant tiles of keys with a factor per query and one per key, and near or partly visible tiles with a factor per
pair, so sizes are below, at and above tiles of 16 to 128 tokens."""

from typing import NamedTuple

import pytest
import test_flash_window_kernels as flash
import test_kernels as fastmax_kernels
import torch
from common import make_decay, make_odd_decay, relative
from test_kernels import DEVICE, HEAD_DIMS, MODES, WHY_NOT, by_mode, by_order, precision  # noqa: F401
from test_packed_kernels import bounds

import fastmax
from fastmax import fastmax_attention
from fastmax.testing.errors import ROUNDING
from fastmax.testing.poison import poison_free_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

by_algorithm = pytest.mark.parametrize("algorithm", ["quadratic", "linear"])
by_head_dim = pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")
by_chunk = pytest.mark.parametrize("d, chunk", [(32, 256), (64, 256), (64, 512), (128, 1024), (96, 512), (256, 2048)])
KINDS = ("none", "a millionth", "strong", "none, ordinary or strong", "behind a million")

SCORE = ("scale", "a0", "a1", "a2", "p")
OF_FASTMAX = (
    *("q", "k", "v", "mask", "noise", "rpe", "log_decay", "first", "end", "gate"),
    *(*SCORE, "causal", "dropout", "algorithm", "tf32"),
)
OF_SOFTMAX = (*"qkv", "mask", "log_decay", "first", "end", "gate", "scale", "causal", "left", "right", "tf32")
OF_KEYS = ("log_decay", "gate")  # whose gradients are sums of pairs
RESULTS = ("o", "sum", "q", "k", "v", "log_decay", "gate")


def sizes_around(chunk):
    """Returns numbers of queries and keys that are around chunks of the linear algorithm."""
    return (
        (chunk - 1, chunk - 1),
        (chunk + 1, chunk + 1),
        (2 * chunk + 17, 2 * chunk + 17),
        (chunk + 5, 2 * chunk + 300),
    )


class Problem(NamedTuple):
    """A call of an operator: its arguments by name, and the gradients of its two outputs."""

    arguments: dict
    grads: tuple
    softmax: bool

    def replace(self, **arguments):
        return self._replace(arguments=self.arguments | arguments)


def decays(kind, hk, m):
    """Returns decays (2, hk, m). In "behind a million" the first half takes the running sum to -1e6 and more, and the rest is
    weak."""
    if kind == "a millionth":
        return torch.full((2, hk, m), -1e-6, device=DEVICE)
    if kind == "behind a million":
        tokens = torch.arange(m, device=DEVICE)
        return torch.where(tokens < m // 2, -2e6 / m, -1e-3 * torch.rand(2, hk, m, device=DEVICE))
    return make_decay(kind, 2, hk, m, device=DEVICE)


def gates(kind, hk, m):
    """Returns gates (2, hk, m), or None. Of "far apart" some are the ends of the range."""
    if kind is None:
        return None
    gate = 2.0 * torch.randn(2, hk, m, device=DEVICE)
    if kind == "far apart":
        drawn = torch.rand(2, hk, m, device=DEVICE)
        gate = torch.where(drawn < 0.3, -60.0, torch.where(drawn > 0.97, 30.0, gate))
    return gate


def of_fastmax(mode, algorithm, n, m=None, *, decay="ordinary", gate=None, d=64, h=4, hk=2, first=None, **options):
    """Returns the arguments of the operators. `first` are bounds of keys; operators also accept a decay without them."""
    m = m or n
    case = fastmax_kernels.size("", n, m, d=d, h=h, hk=hk, **options)
    arguments, grad_o = fastmax_kernels.operands(case, mode, algorithm)
    arguments = dict(zip(OF_FASTMAX, arguments, strict=True)) | accompanying(decay, gate, first, hk, m)
    # With gates far apart sums of weights and their gradients go up to exp(30), which would leave the range of fp16.
    of_sum = 1e-13 if gate == "far apart" else 1 / 30
    return Problem(arguments, (grad_o, of_sum * torch.randn(2, h, n, device=DEVICE)), False)


def accompanying(decay, gate, first, hk, m):
    log_decay = None if decay is None else decays(decay, hk, m)
    return {"log_decay": log_decay, "gate": gates(gate, hk, m), "first": first}


def of_softmax(mode, n, m=None, *, left=-1, decay="ordinary", gate=None, d=64, h=4, hk=2, first=None, **options):
    m = m or n
    case = flash.Case(n, m, left, -1, d, options.pop("dv", d), h, hk, causal=True, **options)
    arguments, grads = flash.operands(case, mode)
    arguments = dict(zip(OF_SOFTMAX, arguments, strict=True)) | accompanying(decay, gate, first, hk, m)
    return Problem(arguments, grads, True)


def run(problem):
    """Returns the results of the operators: o, z or lse, and the gradients of q, k, v and log_decay."""
    q, k, v, *rest = problem.arguments.values()
    forward, backward = (getattr(torch.ops.fastmax, "flash_" * problem.softmax + name) for name in ("forward", "backward"))
    poison_free_memory(DEVICE)
    o, total = forward(q, k, v, *rest)
    poison_free_memory(DEVICE)
    grads = backward(*problem.grads, q, k, v, o, total, *rest)
    results = dict(zip(RESULTS, (o, total, *grads[:3], *grads[-2:]), strict=True))
    return {name: x for name, x in results.items() if name not in OF_KEYS or problem.arguments[name] is not None}


def definition(problem, dtype):
    """Returns the same results from the whole matrix of weights, in a dtype. Decays and gates are float64, exponents at least
    float32."""
    x = problem.arguments
    q, k, v = (x[name].to(dtype).requires_grad_() for name in "qkv")
    of_keys = {name: x[name].double().requires_grad_() for name in OF_KEYS if x[name] is not None}
    none = torch.zeros(*k.shape[:3], dtype=torch.float64, device=DEVICE)
    n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    positions, keys = torch.arange(n, device=DEVICE) + m - n, torch.arange(m, device=DEVICE)
    sees = keys <= positions[:, None]
    if x.get("left", -1) >= 0:
        sees = sees & (positions[:, None] - keys <= x["left"])
    sees = sees.expand(q.shape[0], q.shape[1], n, m)
    if x["mask"] is not None:
        sees = sees & x["mask"][:, None, None, :]
    if x["first"] is not None:
        sees = sees & (keys >= x["first"].repeat_interleave(group, 1)[..., None])
    sums, gate = (of_keys.get(name, none).repeat_interleave(group, 1) for name in OF_KEYS)
    sums = sums.cumsum(-1)
    exponent = sums[..., positions.clamp(min=0), None] - sums[..., None, :] + gate[..., None, :]
    exponent = torch.where(sees, exponent, 0.0)
    s = x["scale"] * (q @ k.repeat_interleave(group, 1).mT)
    if problem.softmax:
        wide = torch.promote_types(dtype, torch.float32)
        s = torch.where(sees, s.to(wide) + exponent.to(wide), -torch.inf)
        shift = s.detach().amax(-1, keepdim=True)
        shift = torch.where(shift.isfinite(), shift, 0.0)
        w = (s - shift).exp()
    else:
        # The largest gates would leave the range of fp16, so there a row's weights are divided by its largest factor.
        shift = torch.where(sees, exponent.detach(), -torch.inf).amax(-1, keepdim=True)
        shift = torch.where(shift.isfinite() & (dtype == torch.float16), shift, 0.0)
        f = x["a0"] + s * (x["a1"] + (x["a2"] * s if x["p"] == 2 else 0.0))
        w = torch.where(sees, f * (exponent - shift).exp().to(dtype), 0.0)
    z = w.sum(-1, keepdim=True)
    blind, z_or_one = z == 0, torch.where(z == 0, 1.0, z)
    o = (w / z_or_one).to(dtype) @ v.repeat_interleave(group, 1)
    if x.get("noise") is not None:
        o = o * (1 + x["dropout"] * x["noise"].to(dtype))
    total = torch.where(blind, -torch.inf, z_or_one.log() + shift) if problem.softmax else z * shift.exp()
    grad_o, grad_total = problem.grads
    loss = (o * grad_o.to(dtype)).sum() + torch.where(blind, 0.0, total * grad_total[..., None].to(total.dtype)).sum()
    leaves = {"q": q, "k": k, "v": v} | of_keys
    grads = dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values())), strict=True))
    return {"o": o.detach(), "sum": total.detach().squeeze(-1)} | grads


def rounding_of(problem, mode):
    return ROUNDING["tf32" if mode == "tf32" else str(problem.arguments["q"].dtype).removeprefix("torch.")]


def check(problem, mode, least=None, bounds_alone=False, terms=0.1):
    """Checks that the error is at most twice that of the plain formula, or some roundings (`least`), and that a repetition has
    the same bits. With `bounds_alone`, decays of 0 are not passed. `terms` is the norm of what cancels in the gradients of q
    and k, relative to that of v; with gates, 0.3 of it does in those of decays."""

    def results():
        found = run(problem.replace(log_decay=None) if bounds_alone else problem)
        return {name: x for name, x in found.items() if not (bounds_alone and name == "log_decay")}

    actual = results()
    exact, plain = (definition(problem, dtype) for dtype in (torch.float64, problem.arguments["q"].dtype))
    rounding = rounding_of(problem, mode)
    for name, x in actual.items():
        seen = exact[name].isfinite()  # a log-sum-exp of no keys is -inf
        assert torch.equal(x.isfinite(), seen), name
        x, y, z = (values[seen].double() for values in (x, exact[name], plain[name]))
        # If one key has nearly all of a query's weight, grad_o . v and grad_o . o are nearly equal, and the rounding errors of
        # both remain in their difference. Gates give more queries such a key.
        of_decays = 0.3 * terms if "gate" in exact else 1e-3
        cancels = {"q": terms, "k": terms, "log_decay": of_decays, "gate": 0.1}.get(name, 0.0) * exact["v"].norm()
        size = max(y.norm(), cancels)
        times = 4 if name in OF_KEYS else 2  # differences of two sums of pairs
        of_plain = ((z - y).norm() / size).nan_to_num(nan=0.0, posinf=0.0)  # gradients of some rows leave the range of fp16
        allowed = max(times * of_plain + flash.FLOOR, times * rounding) if least is None else least
        assert (x - y).norm() / size <= allowed, name
    again = results()
    assert all(torch.equal(actual[name], again[name]) for name in actual)


def check_gradients_of_qkv_alone(problem, mode):
    """Checks the backward without gradients of decays and gates. Kernels then leave out the sums of pairs, which changes no
    product."""
    names = ("forward", "backward", "backward_qkv")
    forward, backward, backward_qkv = (getattr(torch.ops.fastmax, "flash_" * problem.softmax + name) for name in names)
    q, k, v, *rest = problem.arguments.values()
    given = (*problem.grads, q, k, v, *forward(q, k, v, *rest), *rest)
    poison_free_memory(DEVICE)
    actual = backward_qkv(*given)
    for name, x, expected in zip("qkv", actual, backward(*given), strict=False):
        assert relative(x, expected.double()) < rounding_of(problem, mode), name


@by_mode
@by_algorithm
@by_head_dim
def test_fastmax_head_dims(d, algorithm, mode, precision):  # noqa: F811
    for p in (1, 2):
        check(of_fastmax(mode, algorithm, 300, d=d, p=p, h=3, hk=1), mode)
    check(of_fastmax(mode, algorithm, 70, 333, d=d, mask=True, noise=True), mode)


@by_mode
@by_head_dim
def test_softmax_head_dims(d, mode, precision):  # noqa: F811
    check(of_softmax(mode, 300, d=d, h=3, hk=1), mode)
    check(of_softmax(mode, 70, 333, d=d, mask=True, layout="packed"), mode)
    check(of_softmax(mode, 300, d=d, left=90), mode)


@by_mode
@by_algorithm
@pytest.mark.parametrize("decay", KINDS)
def test_decays(decay, algorithm, mode, precision):  # noqa: F811
    for d in (64, 128):
        check(of_fastmax(mode, algorithm, 500, decay=decay, d=d), mode)
        check(of_softmax(mode, 500, decay=decay, d=d), mode)


@by_mode
@by_algorithm
def test_sizes(algorithm, mode, precision):  # noqa: F811
    for n, m in ((1, 1), (1, 300), (16, 17), (63, 65), (64, 128), (127, 400), (129, 129), (20, 1000)):
        for d in (64, 128):
            check(of_fastmax(mode, algorithm, n, m, d=d), mode)
            check(of_softmax(mode, n, m, d=d), mode)


@by_mode
@by_order
@by_chunk
def test_chunks_of_the_linear_algorithm(d, chunk, p, mode, precision):  # noqa: F811
    """States are read, decayed and handed on at chunk borders; each length is that of a chunk in some mode."""
    for n, m in sizes_around(chunk):
        mask = n > 2 * chunk
        decay = "none, ordinary or strong" if n == m and not mask else "ordinary"
        check(of_fastmax(mode, "linear", n, m, d=d, h=2, hk=1, p=p, decay=decay, mask=mask), mode)


@by_mode
def test_many_chunks_and_segments_of_the_linear_algorithm(mode, precision):  # noqa: F811
    """One head is cut into segments, and sequences begin at any token."""
    first = torch.arange(6000, device=DEVICE)
    first = torch.where(torch.rand(6000, device=DEVICE) < 0.001, first, 0).cummax(0)[0].to(torch.int32).expand(2, 1, -1)
    for p in (1, 2):
        check(of_fastmax(mode, "linear", 6000, h=1, hk=1, p=p), mode)
        check(of_fastmax(mode, "linear", 6000, h=1, hk=1, p=p, decay="a millionth", first=first), mode)


@by_mode
@by_algorithm
@by_head_dim
def test_gradients_without_that_of_the_decay(d, algorithm, mode, precision):  # noqa: F811
    decay = "none, ordinary or strong"
    problems = [of_fastmax(mode, algorithm, 600, d=d, p=p, decay=decay) for p in (1, 2)]
    if algorithm == "quadratic":
        problems.append(of_softmax(mode, 600, d=d, decay=decay))
    for problem in problems:
        check_gradients_of_qkv_alone(problem, mode)


@by_mode
def test_windows(mode, precision):  # noqa: F811
    for left in (1, 16, 63, 64, 128, 200):
        check(of_softmax(mode, 400, left=left, mask=left == 64), mode)


@by_mode
@by_algorithm
def test_packed_sequences(algorithm, mode, precision):  # noqa: F811
    for lengths in ([63, 65, 1, 127, 129], [300, 0, 20], [1, 2, 3] * 20):
        first, _ = bounds(lengths, True)
        for d in (64, 128):
            check(of_fastmax(mode, algorithm, sum(lengths), d=d, first=first), mode)
            check(of_softmax(mode, sum(lengths), d=d, first=first, left=70), mode)


@by_mode
@by_algorithm
def test_zero_bounds_change_nothing(algorithm, mode):
    """Results are equal bit for bit. Python always passes bounds with a decay."""
    none = torch.zeros(2, 2, 200, dtype=torch.int32, device=DEVICE)
    for problem in (of_fastmax(mode, algorithm, 200), of_softmax(mode, 200)):
        without, given = run(problem), run(problem.replace(first=none))
        assert all(torch.equal(without[name], given[name]) for name in without)


@by_mode
@by_algorithm
def test_strides_of_log_decay(algorithm, mode):
    """Transposed and expanded decays give the same bits, and the gradient is dense."""
    for problem in (of_fastmax(mode, algorithm, 200), of_softmax(mode, 200)):
        dense = problem.arguments["log_decay"]
        expanded = dense[:1, :1].expand(2, 2, 200)
        for x in (dense.permute(2, 1, 0).contiguous().permute(2, 1, 0), expanded):
            assert not x.is_contiguous()
            actual, expected = run(problem.replace(log_decay=x)), run(problem.replace(log_decay=x.contiguous()))
            assert all(torch.equal(actual[name], expected[name]) for name in actual)
            assert actual["log_decay"].is_contiguous() and actual["log_decay"].shape == (2, 2, 200)


@by_algorithm
@pytest.mark.parametrize("decay", KINDS)
def test_float32_keeps_its_digits(decay, algorithm, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for d in (64, 128):
        problem = of_fastmax("fp32", algorithm, 1500, decay=decay, d=d, h=2, hk=1)
        check(problem._replace(grads=(problem.grads[0], 30 * problem.grads[1])), "fp32", least=1e-5)
        check(of_softmax("fp32", 1500, decay=decay, d=d, h=2, hk=1), "fp32", least=1e-5)


@by_mode
@by_algorithm
def test_keys_that_have_decayed_to_nothing(algorithm, mode):
    """Keys 10 to 99 are padding and decay by 50 each. Queries there see only weights of 0, which softmax still normalises."""
    mask = torch.ones(2, 200, dtype=torch.bool, device=DEVICE)
    mask[:, 10:100] = False
    log_decay = torch.where(mask, -0.01, -50.0)[:, None].expand(2, 2, 200)
    for d in (64, 128):
        actual = run(of_fastmax(mode, algorithm, 200, d=d).replace(mask=mask, log_decay=log_decay))
        assert all(x.isfinite().all() for x in actual.values())
        assert not actual["o"][:, :, 20:100].any() and not actual["sum"][:, :, 20:100].any()
        assert not actual["q"][:, :, 20:100].any() and not actual["k"][:, :, 10:100].any()
        actual = run(of_softmax(mode, 200, d=d).replace(mask=mask, log_decay=log_decay))
        assert all(x.isfinite().all() for x in actual.values())
        assert actual["o"][:, :, 20:100].any(dim=-1).all()


@by_mode
@by_head_dim
@pytest.mark.parametrize("m", [1024, 1090])
def test_tiles_of_which_nothing_is_left_are_not_read(m, d, mode, precision):  # noqa: F811
    """A decay of 0.5 per token leaves 2^-100 after 139 tokens, so NaN keys 256 tokens earlier must have no more effect than
    hidden ones."""
    clean = of_fastmax(mode, "quadratic", 1024, m, d=d, h=2, hk=1)
    clean = clean.replace(log_decay=torch.full((2, 1, m), -0.5, device=DEVICE))
    poisoned = clean.replace(
        v=torch.cat([torch.full_like(clean.arguments["v"][:, :, :128], torch.nan), clean.arguments["v"][:, :, 128:]], 2)
    )
    expected, actual = run(clean), run(poisoned)
    assert actual["o"][:, :, 0].isnan().all()
    for name in ("o", "q", "k", "v"):
        assert torch.equal(actual[name][:, :, 512:], expected[name][:, :, 512:]), name


def test_covered_calls_do_not_reach_the_pytorch_implementation(kernels_alone):
    for mode in MODES:
        for algorithm, p in (("quadratic", 2), ("linear", 2), ("linear", 1)):
            run(of_fastmax(mode, algorithm, 50, p=p))
        run(of_softmax(mode, 50, left=9))


@by_mode
@by_algorithm
@by_head_dim
def test_every_kernel_at_small_sizes(d, algorithm, mode, precision):  # noqa: F811
    """This test has no reference. It is run under compute-sanitizer."""
    for n, m in ((17, 17), (150, 150), (129, 200)):
        results = (
            run(of_fastmax(mode, algorithm, n, m, d=d - (n == 150), h=2, hk=1, mask=n == 150)),
            run(of_softmax(mode, n, m, d=d, h=2, hk=1)),
        )
        assert all(x.isfinite().all() for result in results for x in result.values())


# ---- values above 0, and NaN


def with_nan(problem):
    """Returns decays with NaN in some heads: at the first token, after a few, in the middle, near the end, two in one tile."""
    m = problem.arguments["log_decay"].shape[-1]
    log_decay = problem.arguments["log_decay"].clone()
    log_decay[0, 0, [m // 2, m // 2 + 1, m - 2]] = torch.nan
    log_decay[0, -1, 0] = torch.nan
    log_decay[-1, 0, m // 10] = torch.nan
    return problem.replace(log_decay=log_decay)


def nan_rows(problem):
    """Returns which rows (b, h, n) of the PyTorch implementation on a CPU are NaN. It reads the first columns, as all columns
    agree."""

    def narrow(x):
        x = x.cpu() if isinstance(x, torch.Tensor) else x
        return x[..., :8].double() if isinstance(x, torch.Tensor) and x.dim() == 4 else x

    q, k, v, *rest = map(narrow, (problem.arguments | ({} if problem.softmax else {"algorithm": "quadratic"})).values())
    decay = list(problem.arguments).index("log_decay") - 3
    rest[decay] = rest[decay].double()
    o, total = getattr(torch.ops.fastmax, "flash_" * problem.softmax + "forward")(q, k, v, *rest)
    assert torch.equal(o.isnan().any(-1), total.isnan())
    return total.isnan().to(DEVICE)


def check_nan(problem):
    """Checks which rows are NaN, and that all others have the numbers of a call without NaN."""
    given = with_nan(problem)
    results, is_nan = run(given), nan_rows(given)
    clean = run(problem.replace(log_decay=given.arguments["log_decay"].nan_to_num(nan=0.0)))
    for name in ("o", "sum"):
        assert torch.equal(results[name].isnan(), is_nan.unsqueeze(-1).expand_as(results[name]) if name == "o" else is_nan), (
            name
        )
        assert torch.equal(results[name][~is_nan], clean[name][~is_nan]), name
    assert not is_nan.all() and results["q"][is_nan].isnan().all()


@by_mode
@by_algorithm
@pytest.mark.parametrize("d", [32, 64, 128])
def test_nan(d, algorithm, mode, precision):  # noqa: F811
    for p in (1, 2):
        check_nan(of_fastmax(mode, algorithm, 300, d=d, p=p, h=3, hk=1))
        check_nan(of_fastmax(mode, algorithm, 70, 333, d=d, p=p, mask=True, noise=True))
        check_nan(of_fastmax(mode, algorithm, 5000, d=d, p=p, h=2, hk=1))


@by_mode
@pytest.mark.parametrize("d", [32, 64, 128])
def test_nan_in_softmax(d, mode, precision):  # noqa: F811
    check_nan(of_softmax(mode, 300, d=d, h=3, hk=1))
    check_nan(of_softmax(mode, 70, 333, d=d, mask=True))
    for left in (1, 20, 90):
        check_nan(of_softmax(mode, 5000, d=d, left=left))


@by_mode
@by_algorithm
def test_nan_stays_in_its_packed_sequence(algorithm, mode, precision):  # noqa: F811
    for lengths in ([63, 65, 1, 127, 129], [300, 0, 20], [1, 2, 3] * 20, [2000, 100, 2900]):
        first, _ = bounds(lengths, True)
        for d in (64, 128):
            check_nan(of_fastmax(mode, algorithm, sum(lengths), d=d, first=first))
            check_nan(of_softmax(mode, sum(lengths), d=d, first=first, left=70))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("option", ["plain", "padding", "packed"])
@pytest.mark.parametrize("window", [0, 1, 50])
@by_algorithm
def test_values_above_zero_and_nan(algorithm, window, option, dtype):
    """Results of the public function have the numbers of decays without such values, and NaN where the definition has it."""
    n, h, hk, d = 700, 4, 2, 64
    q, k, v = (torch.randn(1, heads, n, d, device=DEVICE, dtype=dtype) / 8 for heads in (h, hk, hk))
    log_decay = make_odd_decay(1, hk, n, dtype=torch.float32, device=DEVICE)
    options = {"causal": True, "exact_window": window, "algorithm": algorithm, "return_lse": True}
    given = {"padding": {"attention_mask": torch.rand(1, n, device=DEVICE) < 0.3}}
    given["packed"] = {"cu_seqlens": torch.tensor([0, 1, 60, 60, 400, n], dtype=torch.int32, device=DEVICE)}
    options |= given.get(option, {})
    log_decay.requires_grad_()
    results = fastmax_attention(q, k, v, log_decay=log_decay, **options)
    clean = log_decay.detach().clamp(max=0.0).nan_to_num(nan=0.0, neginf=-torch.inf)
    expected = fastmax_attention(q, k, v, log_decay=clean, **options)
    on_cpu = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    exact = fastmax_attention(*(x.cpu().double() for x in (q, k, v)), log_decay=log_decay.detach().cpu().double(), **on_cpu)
    for x, y, z in zip(results, expected, exact, strict=True):
        is_nan = z.isnan().to(DEVICE)
        assert is_nan.any() and torch.equal(x.isnan(), is_nan)
        torch.testing.assert_close(x.detach()[~is_nan], y[~is_nan])
    (gradient,) = torch.autograd.grad(results, log_decay, [torch.ones_like(x) for x in results])
    assert not gradient[log_decay > 0].any()


@by_algorithm
def test_long_sums_of_values_above_zero(algorithm, monkeypatch):
    """Jumps of 16 over 8192 tokens and 600 tokens of 0.3 give the bits of decays of 0, gradients included."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for n, log_decay in (
        (8192, 32 * torch.rand(1, 2, 8192, device=DEVICE) - 16),
        (600, torch.full((1, 2, 600), 0.3, device=DEVICE)),
    ):
        tensors = [torch.randn(1, 2, n, 64, device=DEVICE) / 8 for _ in range(3)]

        def outcome(decay, tensors=tensors):
            leaves = [x.clone().requires_grad_() for x in (*tensors, decay)]
            o = fastmax_attention(*leaves[:3], log_decay=leaves[3], causal=True, algorithm=algorithm)
            return o.detach(), *torch.autograd.grad(o.square().sum(), leaves)

        *actual, gradient = outcome(log_decay)
        *expected, of_clamped = outcome(log_decay.clamp(max=0.0))
        assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))
        assert torch.equal(gradient, of_clamped.masked_fill(log_decay > 0, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("form", ["step", "step_", "step_, folding", "step_, folding 40", "prefill", "prefill in parts"])
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("padding", [False, True])
def test_values_above_zero_and_nan_in_states(padding, window, form, p, dtype):
    """Outputs of real tokens are NaN where one float64 call on these tokens is, and close to it elsewhere."""
    n, b, h, hk, d = 150, 2, 4, 2, 64
    q, k, v = (torch.randn(b, heads, n, d, device=DEVICE, dtype=dtype) / 4 for heads in (h, hk, hk))
    log_decay = make_odd_decay(b, hk, n, dtype=torch.float32, device=DEVICE, underflows=True)
    mask = torch.rand(b, n, device=DEVICE) < 0.5 if padding else None
    taken = torch.ones(b, n, dtype=torch.bool) if mask is None else mask.cpu()
    exact = torch.zeros(b, h, n, d, dtype=torch.float64)
    for entry, real in enumerate(taken):
        *alone, decays = (x[entry : entry + 1].cpu().double()[:, :, real] for x in (q, k, v, log_decay))
        options = {"causal": True, "log_decay": decays, "exact_window": window, "p": p} | ({"a0": 20.0} if p == 1 else {})
        exact[entry : entry + 1, :, real] = fastmax_attention(*alone, **options)
    flush_interval = {"step_, folding": 8, "step_, folding 40": 40}.get(form, 1)
    state = fastmax.decoding.init_state(
        b,
        hk,
        d,
        dtype=dtype,
        device=DEVICE,
        exact_window=window,
        flush_interval=flush_interval,
        p=p,
        **({"a0": 20.0} if p == 1 else {}),
    )
    lengths = {"prefill": [n], "prefill in parts": [20, 1, 70, n - 91]}.get(form, [1] * n)
    outputs, start = [], 0
    for length in lengths:
        part = slice(start, start + length)
        start += length
        token = (q[:, :, part], k[:, :, part], v[:, :, part], state)
        accompanying = {"log_decay": log_decay[..., part], "attention_mask": None if mask is None else mask[:, part]}
        if form.startswith("step_"):
            outputs.append(fastmax.decoding.step_(*token, **accompanying))
        else:
            o, state = (fastmax.decoding.prefill if form.startswith("prefill") else fastmax.decoding.step)(
                *token, **accompanying
            )
            outputs.append(o)
    o = torch.cat(outputs, dim=2).cpu().double().where(taken[:, None, :, None], 0.0)
    is_nan = exact.isnan()
    assert is_nan.any() and torch.equal(o.isnan(), is_nan)
    assert relative(o[~is_nan], exact[~is_nan]) < (1e-2 if dtype == torch.bfloat16 else 2e-3)
