"""`log_input_gate` in the CUDA kernels of Fastmax and of softmax, against float64 on poisoned memory, with the gradient of
gates. Kernels have an instance for decays and gates together, so each case is run with and without decays."""

import pytest
import torch
from common import make_decay, relative
from test_decay_kernels import (
    by_algorithm,
    by_chunk,
    by_head_dim,
    check,
    check_gradients_of_qkv_alone,
    of_fastmax,
    of_softmax,
    rounding_of,
    run,
    sizes_around,
)
from test_kernels import DEVICE, WHY_NOT, by_mode, precision  # noqa: F401
from test_packed_kernels import bounds

import fastmax
from fastmax import fastmax_attention, flash_attention
from fastmax.testing.errors import ROUNDING

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

# `terms` of `check` if, for most queries, one key has nearly all of the weight: grad_o . v and grad_o . o differ by a rounding.
ONE_KEY = 1.0
by_decay = pytest.mark.parametrize("decay", [None, "ordinary"])


@by_mode
@by_algorithm
@by_head_dim
@by_decay
def test_fastmax_head_dims(decay, d, algorithm, mode, precision):  # noqa: F811
    for p in (1, 2):
        check(of_fastmax(mode, algorithm, 300, d=d, p=p, h=3, hk=1, decay=decay, gate="ordinary"), mode)
    check(of_fastmax(mode, algorithm, 70, 333, d=d, mask=True, noise=True, decay=decay, gate="ordinary"), mode)


@by_mode
@by_head_dim
@by_decay
def test_softmax_head_dims(decay, d, mode, precision):  # noqa: F811
    check(of_softmax(mode, 300, d=d, h=3, hk=1, decay=decay, gate="ordinary"), mode)
    check(of_softmax(mode, 70, 333, d=d, mask=True, layout="packed", decay=decay, gate="ordinary"), mode)
    check(of_softmax(mode, 300, d=d, left=90, decay=decay, gate="ordinary"), mode)


@by_mode
@by_algorithm
@by_decay
def test_sizes(decay, algorithm, mode, precision):  # noqa: F811
    for n, m in ((1, 1), (1, 300), (16, 17), (63, 65), (64, 128), (127, 400), (129, 129), (20, 1000)):
        for d in (64, 128):
            check(of_fastmax(mode, algorithm, n, m, d=d, decay=decay, gate="ordinary"), mode)
            check(of_softmax(mode, n, m, d=d, decay=decay, gate="ordinary"), mode)


@by_mode
@by_algorithm
@pytest.mark.parametrize("decay", [None, "a millionth", "strong", "none, ordinary or strong", "behind a million"])
def test_decays(decay, algorithm, mode, precision):  # noqa: F811
    for d in (64, 128):
        terms = ONE_KEY if decay == "strong" else 0.1
        check(of_fastmax(mode, algorithm, 500, decay=decay, gate="ordinary", d=d), mode, terms=terms)
        check(of_softmax(mode, 500, decay=decay, gate="ordinary", d=d), mode)


@by_mode
@by_algorithm
@by_decay
def test_gates_far_apart(decay, algorithm, mode, precision):  # noqa: F811
    """The largest gates outweigh all others, and rows of the smallest alone still have outputs."""
    for d in (64, 128):
        check(of_fastmax(mode, algorithm, 500, decay=decay, gate="far apart", d=d), mode, terms=ONE_KEY)
        check(of_softmax(mode, 500, decay=decay, gate="far apart", d=d), mode)


@by_mode
@by_decay
@by_chunk
def test_chunks_of_the_linear_algorithm(d, chunk, decay, mode, precision):  # noqa: F811
    for n, m in sizes_around(chunk):
        mask = n > 2 * chunk
        for p in (1, 2):
            check(of_fastmax(mode, "linear", n, m, d=d, h=2, hk=1, p=p, decay=decay, gate="ordinary", mask=mask), mode)


@by_mode
@by_decay
def test_segments_of_the_linear_algorithm(decay, mode, precision):  # noqa: F811
    for p in (1, 2):
        check(of_fastmax(mode, "linear", 6000, h=1, hk=1, p=p, decay=decay, gate="ordinary"), mode)


@by_mode
@by_decay
def test_windows_of_softmax(decay, mode, precision):  # noqa: F811
    for left in (1, 16, 63, 64, 128, 200):
        check(of_softmax(mode, 400, left=left, mask=left == 64, decay=decay, gate="ordinary"), mode)


@by_mode
@by_algorithm
@by_decay
def test_packed_sequences(decay, algorithm, mode, precision):  # noqa: F811
    for lengths in ([63, 65, 1, 127, 129], [300, 0, 20], [1, 2, 3] * 20):
        first, _ = bounds(lengths, True)
        for d in (64, 128):
            check(of_fastmax(mode, algorithm, sum(lengths), d=d, first=first, decay=decay, gate="ordinary"), mode)
            check(of_softmax(mode, sum(lengths), d=d, first=first, left=70, decay=decay, gate="ordinary"), mode)


@by_algorithm
@by_decay
def test_float32_keeps_its_digits(decay, algorithm, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    for d in (64, 128):
        problem = of_fastmax("fp32", algorithm, 1500, decay=decay, gate="ordinary", d=d, h=2, hk=1)
        check(problem._replace(grads=(problem.grads[0], 30 * problem.grads[1])), "fp32", least=1e-5)
        check(of_softmax("fp32", 1500, decay=decay, gate="ordinary", d=d, h=2, hk=1), "fp32", least=1e-5)


@by_mode
@by_algorithm
@by_head_dim
@by_decay
def test_gradients_without_those_of_decays_and_gates(decay, d, algorithm, mode, precision):  # noqa: F811
    problems = [of_fastmax(mode, algorithm, 600, d=d, p=p, decay=decay, gate="ordinary") for p in (1, 2)]
    if algorithm == "quadratic":
        problems.append(of_softmax(mode, 600, d=d, decay=decay, gate="ordinary"))
    for problem in problems:
        check_gradients_of_qkv_alone(problem, mode)


@by_mode
@by_algorithm
def test_strides_of_gates(algorithm, mode):
    """Transposed and expanded gates give the same bits, and the gradient is dense."""
    for problem in (of_fastmax(mode, algorithm, 200, gate="ordinary"), of_softmax(mode, 200, gate="ordinary")):
        dense = problem.arguments["gate"]
        for x in (dense.permute(2, 1, 0).contiguous().permute(2, 1, 0), dense[:1, :1].expand(2, 2, 200)):
            assert not x.is_contiguous()
            actual, expected = run(problem.replace(gate=x)), run(problem.replace(gate=x.contiguous()))
            assert all(torch.equal(actual[name], expected[name]) for name in actual)
            assert actual["gate"].is_contiguous() and actual["gate"].shape == (2, 2, 200)


@by_mode
@by_algorithm
def test_gates_of_zero_are_none(algorithm, mode, precision):  # noqa: F811
    for problem in (of_fastmax(mode, algorithm, 300), of_softmax(mode, 300)):
        without, given = run(problem), run(problem.replace(gate=torch.zeros(2, 2, 300, device=DEVICE)))
        for name, x in without.items():
            assert relative(given[name], x.double()) <= 4 * rounding_of(problem, mode), name


@by_mode
@by_algorithm
@pytest.mark.parametrize("d", [32, 64, 128])
@by_decay
def test_nan(decay, d, algorithm, mode, precision):  # noqa: F811
    """Rows that weigh a key whose gate is NaN are NaN, and no others change."""
    problems = [of_fastmax(mode, algorithm, n, m, d=d, p=p, decay=decay, gate="ordinary", mask=mask)
                for p in (1, 2) for n, m, mask in ((300, 300, False), (70, 333, True), (5000, 5000, False))]  # fmt: skip
    problems += [of_softmax(mode, 300, d=d, decay=decay, gate="ordinary"),
                 of_softmax(mode, 2000, d=d, left=90, decay=decay, gate="ordinary")]  # fmt: skip
    for problem in problems:
        n, m = (problem.arguments[name].shape[2] for name in "qk")
        gate, mask = problem.arguments["gate"].clone(), problem.arguments["mask"]
        gate[0, 0, [m // 2, m - 2]] = torch.nan
        gate[-1, 0, [m // 10, m // 9]] = torch.nan
        if mask is not None:
            mask = mask.clone()
            mask[:, [m // 2, m // 10]], mask[:, m // 9] = True, False
            problem = problem.replace(mask=mask)
        x = problem.arguments
        positions, keys = torch.arange(n, device=DEVICE)[:, None] + m - n, torch.arange(m, device=DEVICE)
        sees = keys <= positions
        if x.get("left", -1) >= 0:
            sees = sees & (positions - keys <= x["left"])
        counts = gate.isnan() if mask is None else gate.isnan() & mask[:, None]
        rows = (sees & counts[:, :, None]).any(-1).repeat_interleave(x["q"].shape[1] // gate.shape[1], 1)
        results, clean = run(problem.replace(gate=gate)), run(problem.replace(gate=torch.where(gate.isnan(), 0.0, gate)))
        assert rows.any() and not rows.all()
        assert torch.equal(results["sum"].isnan(), rows)
        assert torch.equal(results["o"].isnan(), rows[..., None].expand_as(results["o"]))
        for name in ("o", "sum"):
            assert torch.equal(results[name][~rows], clean[name][~rows]), name
        assert results["q"][rows].isnan().all()


def test_covered_calls_do_not_reach_the_pytorch_implementation(kernels_alone):
    for mode in ("bf16", "fp16", "tf32", "fp32"):
        for algorithm, p in (("quadratic", 1), ("quadratic", 2), ("linear", 1), ("linear", 2)):
            run(of_fastmax(mode, algorithm, 50, p=p, gate="ordinary"))
        run(of_softmax(mode, 50, left=9, gate="ordinary"))
    q, k, v = (torch.randn(1, 2, 70, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gate = torch.randn(1, 2, 70, device=DEVICE, requires_grad=True)
    for window in (0, 20):
        fastmax_attention(q, k, v, causal=True, exact_window=window, log_input_gate=gate).sum().backward()
    flash_attention(q, k, v, causal=True, log_input_gate=gate).sum().backward()


@by_mode
@by_decay
@pytest.mark.parametrize("window, flush_interval", [(0, 1), (0, 32), (40, 1), (40, 32)])
def test_any_split_equals_one_call(window, flush_interval, decay, mode, precision):  # noqa: F811
    """Prefills, steps and steps in place equal one call in float64. With padding, windows of states count real tokens alone."""
    sizes, b, h, hk, d = (70, 1, 1, 33, *[1] * 45, 300, *[1] * 40), 2, 4, 2, 64
    n, dtype = sum(sizes), of_fastmax(mode, "linear", 1).arguments["q"].dtype
    q, k, v = (torch.randn(b, heads, n, d, device=DEVICE).to(dtype) for heads in (h, hk, hk))
    mask = torch.rand(b, n, device=DEVICE) > (0.3 if window == 0 else -1.0)
    gate = 2.0 * torch.randn(b, hk, n, device=DEVICE)
    log_decay = None if decay is None else make_decay("-inf at places", b, hk, n, device=DEVICE)
    options = {"exact_window": window, "temperature": 8.0}
    state = fastmax.decoding.init_state(
        b, hk, d, dtype=dtype, device=DEVICE, flush_interval=flush_interval, **options
    ).with_gates()
    outputs, start = [], 0
    for i, size in enumerate(sizes):
        part = slice(start, start + size)
        of_keys = {
            "attention_mask": mask[:, part],
            "log_input_gate": gate[..., part],
            "log_decay": None if decay is None else log_decay[..., part],
        }
        tokens = [x[:, :, part] for x in (q, k, v)]
        if size > 1:
            o, state = fastmax.decoding.prefill(*tokens, state, **of_keys)
        elif i % 2:
            o, state = fastmax.decoding.step(*tokens, state, **of_keys)
        else:
            o = fastmax.decoding.step_(*tokens, state, **of_keys)
        outputs.append(o)
        start += size
    exact_decay = None if decay is None else torch.where(mask[:, None], log_decay, 0.0).double()
    exact = fastmax_attention(
        *(x.double() for x in (q, k, v)),
        causal=True,
        attention_mask=mask,
        log_input_gate=gate.double(),
        log_decay=exact_decay,
        **options,
    )
    rounding = ROUNDING["tf32" if mode == "tf32" else str(dtype).removeprefix("torch.")]
    real = mask[:, None, :, None]
    assert relative(torch.cat(outputs, dim=2) * real, exact * real) <= max(2 * rounding, 2e-5)


@by_mode
@by_algorithm
@by_head_dim
def test_every_kernel_at_small_sizes(d, algorithm, mode, precision):  # noqa: F811
    """This test has no reference. It is run under compute-sanitizer."""
    for n, m in ((17, 17), (150, 150), (129, 200)):
        for decay in (None, "ordinary"):
            options = {"d": d - (n == 150), "h": 2, "hk": 1, "decay": decay, "gate": "ordinary"}
            results = run(of_fastmax(mode, algorithm, n, m, mask=n == 150, **options)), run(of_softmax(mode, n, m, **options))
            assert all(x.isfinite().all() for result in results for x in result.values())
