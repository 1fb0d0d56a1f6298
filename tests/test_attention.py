"""Output and gradients against the definition in float64: every row of the contract, size by size and option by option."""

from functools import lru_cache

import pytest
import torch
from common import (
    ALGORITHMS,
    CHUNK,
    Case,
    Expected,
    assert_within_contract,
    bounded,
    by_algorithm,
    by_causal,
    by_dtype,
    by_gradient,
    by_layout,
    by_option,
    by_order,
    by_size,
    check,
    compare,
    definition,
    dtype_id,
    in_turn,
    make_inputs,
    make_options,
    relative,
    run,
)

from fastmax import fastmax_attention
from fastmax.testing.reference import sinusoidal_rows

MIDDLE = Case("a chunk and more", n=CHUNK + 13, m=CHUNK + 20, b=2, h=2, hk=1, d=8, dv=6)
SMALL = Case("small", n=30, m=35, b=2, h=4, hk=2, d=8, dv=6)
SQUARE = Case("square", n=40, b=2, h=3, d=8)


@lru_cache(maxsize=1)  # the parametrisation below runs through algorithms and gradients first
def expected(case, dtype, device, causal, option="defaults", p=2):
    inputs, grad_o = make_inputs(case, dtype, device)
    return Expected(inputs, grad_o, **({"causal": causal, "p": p} | make_options(option, case, dtype, device)))


@in_turn("custom")
@by_algorithm
@by_gradient
@by_order
@by_size
def test_sizes(case, causal, p, algorithm, custom, device):
    expected(case, torch.float32, device, causal, p=p).check(custom=custom, algorithm=algorithm)


def positive(*shape, **options):
    """Returns rows of positive numbers. Their scores are in (0, 1), where polynomials with real roots can be positive."""
    return bounded(*shape, **options).abs()


REAL_ROOTS = {
    "a1^2 > 4 a0 a2": {"a0": 1.0, "a1": 3.0, "a2": 0.5},
    "a1^2 = 4 a0 a2": {"a0": 0.5, "a1": 1.0, "a2": 0.5},
    "a2 = 0": {"a0": 1.0, "a1": 2.0, "a2": 0.0},
    "a2 < 0": {"a0": 1.0, "a1": 1.5, "a2": -0.4},
    "a0 = 0": {"a0": 0.0, "a1": 1.0, "a2": 0.5},
}


@in_turn("custom")
@by_algorithm
@by_gradient
@by_causal
@pytest.mark.parametrize("coefficients", REAL_ROOTS)
def test_polynomials_with_real_roots(coefficients, causal, algorithm, custom, device):
    """Such a polynomial is not a square plus a positive rest, the form that the default takes."""
    inputs, grad_o = make_inputs(MIDDLE, device=device, q_and_k=positive)
    check(inputs, grad_o, custom=custom, algorithm=algorithm, causal=causal, **REAL_ROOTS[coefficients])


@in_turn("custom")
@by_algorithm
@by_gradient
@by_order
@by_causal
@by_dtype
def test_dtypes(dtype, causal, p, algorithm, custom, device):
    expected(MIDDLE, dtype, device, causal, p=p).check(custom=custom, algorithm=algorithm)


@in_turn("custom")
@by_algorithm
@by_gradient
@by_causal
@by_option
def test_options(option, causal, algorithm, custom, device):
    expected(MIDDLE, torch.float32, device, causal, option).check(custom=custom, algorithm=algorithm)


@by_gradient
@pytest.mark.parametrize("rpe", [False, True], ids=["no rpe", "rpe"])
def test_half_precision_is_rounded_once(rpe, custom, device):
    """Sums over blocks and over the query heads of a kv head are formed in fp32. Only one rounding of each element of the
    output and of the gradients remains, 1.7e-3 in all."""
    case = Case("many blocks", n=1024 if rpe else 2048, h=8, hk=1, d=4)
    inputs, grad_o = make_inputs(case, torch.bfloat16, device)
    if rpe:
        inputs["rpe_matrix"] = 0.3 * bounded(case.n + case.m - 1, case.d, dtype=torch.bfloat16, device=device)
    options = {"causal": True, "algorithm": "quadratic"}
    exact = run(fastmax_attention, {name: x.double() for name, x in inputs.items()}, grad_o.double(), **options)
    for name, x in run(fastmax_attention, inputs, grad_o, use_custom_gradient=custom, **options).items():
        # Kernels round weights and their derivatives to bfloat16 too.
        assert relative(x, exact[name]) <= (2.5e-3 if device.type == "cpu" else 5e-3), name


@in_turn("custom")
@by_option
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=dtype_id)
@by_gradient
def test_options_in_half_precision(option, dtype, custom, device):
    inputs, grad_o = make_inputs(SMALL, dtype, device)
    check(inputs, grad_o, custom=custom, algorithm="linear", causal=True, **make_options(option, SMALL, dtype, device))


@in_turn("custom")
@by_layout
@by_causal
@by_algorithm
@by_gradient
def test_strides(layout, causal, algorithm, custom, device):
    inputs, grad_o = make_inputs(SQUARE, device=device, layout=layout)
    check(inputs, grad_o, custom=custom, algorithm=algorithm, causal=causal)


@in_turn("custom")
@by_algorithm
@by_gradient
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
@pytest.mark.parametrize("columns, first", [(18, 0), (9, 0), (32, 1), (32, 2)], ids=lambda size: str(size))
def test_rows_that_no_vector_load_fits(columns, first, dtype, algorithm, custom, device):
    """Rows of 8 are cut from wider ones, so their strides and addresses may not be multiples of 16 bytes."""
    inputs, grad_o = make_inputs(SQUARE, dtype, device)
    options = {"causal": True, "algorithm": algorithm, "use_custom_gradient": custom}
    expected = run(fastmax_attention, inputs, grad_o, **options)
    cut = {}
    for name, x in inputs.items():
        wide = x.new_full((*x.shape[:-1], columns), torch.nan)
        cut[name] = wide[..., first : first + SQUARE.d].copy_(x)
    compare(run(fastmax_attention, cut, grad_o, **options), expected)


@by_algorithm
@by_gradient
def test_scores_of_any_size(algorithm, custom, device):
    """The default polynomial is positive everywhere, so q and k need no bound."""

    def normal(*shape, dtype, device):
        return 2.0 * torch.randn(shape, dtype=torch.float64).to(device, dtype)

    inputs, grad_o = make_inputs(MIDDLE, device=device, q_and_k=normal)
    check(inputs, grad_o, custom=custom, algorithm=algorithm, causal=True)


@in_turn("custom")
@by_algorithm
@by_gradient
@pytest.mark.parametrize("size", [1e-30, 1e3], ids=["tiny", "large"])
def test_extreme_scores(size, algorithm, custom, device):
    """Scores far below overflow of the accumulator give no NaN. If all scores are 0, the output is the mean of v."""

    def scaled(*shape, dtype, device):
        return size * torch.randn(shape, dtype=torch.float64).to(device, dtype)

    inputs, grad_o = make_inputs(MIDDLE, device=device, q_and_k=scaled)
    check(inputs, grad_o, custom=custom, algorithm=algorithm)


@by_algorithm
@by_gradient
def test_scores_beyond_the_range_of_half_precision(algorithm, custom, device):
    """Scores of 1e3 have f = 5e5, past the largest float16, so the accumulator must be fp32."""

    def scaled(*shape, dtype, device):
        return 20.0 * torch.randn(shape, dtype=torch.float64).to(device, dtype)

    inputs, _ = make_inputs(SMALL, torch.float16, device, q_and_k=scaled)
    o = fastmax_attention(**inputs, use_custom_gradient=custom, algorithm=algorithm)
    exact = definition(**{name: x.double() for name, x in inputs.items()})
    assert (o.double() - exact).norm() <= 2e-3 * exact.norm()


# ---- shapes


@in_turn("custom")
@by_algorithm
@by_gradient
@by_causal
def test_three_dimensions(causal, algorithm, custom, device):
    inputs, grad_o = make_inputs(SMALL, device=device)
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    out = check(flat, grad_o.flatten(0, 1), custom=custom, algorithm=algorithm, causal=causal)
    whole = fastmax_attention(**inputs, causal=causal, algorithm=algorithm, use_custom_gradient=custom)
    assert out["o"].shape == (SMALL.b * SMALL.h, SMALL.n, SMALL.dv)
    torch.testing.assert_close(out["o"], whole.flatten(0, 1))


@by_gradient
def test_three_dimensions_with_padding_and_noise(custom, device):
    inputs, grad_o = make_inputs(SMALL, device=device)
    flat = {name: x.flatten(0, 1) for name, x in inputs.items()}
    options = make_options("everything", SMALL, device=device)
    options["drop_noise"] = options["drop_noise"].flatten(0, 1)
    check(flat, grad_o.flatten(0, 1), custom=custom, causal=True, **options)


@in_turn("custom")
@by_gradient
@by_algorithm
@by_dtype
@pytest.mark.parametrize("layout", ["contiguous", "packed qkv", "token-major"])
def test_output_layout(layout, dtype, algorithm, custom, device):
    """The output is dense and has the memory layout of q: heads before tokens, or tokens before heads."""
    inputs, grad_o = make_inputs(SQUARE, dtype, device, layout)
    out = run(fastmax_attention, inputs, grad_o, use_custom_gradient=custom, algorithm=algorithm)
    o = out["o"]
    assert o.shape == (SQUARE.b, SQUARE.h, SQUARE.n, SQUARE.dv)
    assert o.dtype == dtype and o.device.type == device.type
    assert (o if layout == "contiguous" else o.transpose(1, 2)).is_contiguous()
    for name in "qkv":
        assert out[f"grad {name}"].shape == inputs[name].shape
        assert out[f"grad {name}"].dtype == dtype


@in_turn("custom")
@by_gradient
@by_algorithm
@by_causal
@pytest.mark.parametrize("shape", [{"b": 0}, {"n": 0}, {"n": 0, "m": 0}], ids=["no batch", "no queries", "no tokens"])
def test_empty(shape, causal, algorithm, custom, device):
    b, n, m = (shape.get(name, size) for name, size in (("b", 2), ("n", 5), ("m", 5)))
    inputs = {
        "q": torch.randn(b, 4, n, 8, device=device),
        "k": torch.randn(b, 2, m, 8, device=device),
        "v": torch.randn(b, 2, m, 6, device=device),
    }
    out = run(
        fastmax_attention,
        inputs,
        torch.randn(b, 4, n, 6, device=device),
        causal=causal,
        algorithm=algorithm,
        use_custom_gradient=custom,
    )
    assert out["o"].shape == (b, 4, n, 6)
    for name, x in inputs.items():
        assert torch.equal(out[f"grad {name}"], torch.zeros_like(x))


@in_turn("custom")
@by_gradient
@by_algorithm
@pytest.mark.parametrize("option", ["normalize=True", "normalize=token", "sinusoidal", "noise", "key padding"])
def test_empty_with_options(option, algorithm, custom, device):
    empty = torch.randn(2, 4, 0, 8, device=device, requires_grad=True)
    options = dict(
        {
            "normalize=True": {"normalize": True},
            "normalize=token": {"normalize": "token"},
            "sinusoidal": {"rpe_matrix": "sinusoidal"},
            "noise": {"dropout": 0.5},
            "key padding": {"attention_mask": torch.ones(2, 0, dtype=torch.bool, device=device)},
        }[option]
    )
    o = fastmax_attention(empty, empty, empty, use_custom_gradient=custom, algorithm=algorithm, **options)
    assert o.shape == (2, 4, 0, 8)
    o.sum().backward()
    assert empty.grad.shape == empty.shape


@by_algorithm
def test_empty_on_the_meta_device(algorithm):
    """Without values, a gate may hold NaN, whose rows are then looked up."""
    q, k, v = (torch.randn(0, 5, 8, device="meta", requires_grad=True) for _ in range(3))
    gate = torch.zeros(0, 5, device="meta")
    for custom in (True, False):
        o = fastmax_attention(q, k, v, causal=True, log_input_gate=gate, use_custom_gradient=custom, algorithm=algorithm)
        assert o.shape == (0, 5, 8)


@by_gradient
@by_algorithm
def test_no_keys(algorithm, custom, device):
    """A query with no visible key has output 0 and gradient 0."""
    inputs = {
        "q": torch.randn(2, 4, 5, 8, device=device),
        "k": torch.randn(2, 2, 0, 8, device=device),
        "v": torch.randn(2, 2, 0, 6, device=device),
    }
    grad_o = torch.randn(2, 4, 5, 6, device=device)
    out = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, use_custom_gradient=custom)
    assert torch.equal(out["o"], torch.zeros(2, 4, 5, 6, device=device))
    assert torch.equal(out["grad q"], torch.zeros_like(inputs["q"]))


@in_turn("custom")
@by_gradient
@by_algorithm
@by_layout
def test_inputs_are_never_written(layout, algorithm, custom, device):
    inputs, grad_o = make_inputs(SQUARE, device=device, layout=layout)
    options = make_options("everything", SQUARE, device=device)
    tensors = [*inputs.values(), grad_o, options["attention_mask"], options["drop_noise"]]
    before, versions = [x.clone() for x in tensors], [x._version for x in tensors]
    run(fastmax_attention, inputs, grad_o, causal=True, algorithm=algorithm, use_custom_gradient=custom, **options)
    assert [x._version for x in tensors] == versions
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x, y)


# ---- key padding mask


@in_turn("custom")
@by_gradient
@by_algorithm
@by_causal
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_its_sequences(side, causal, algorithm, custom, device):
    """Each sequence of a padded batch has the output that it has alone, whatever the padding holds."""
    inputs, _ = make_inputs(SQUARE, device=device)
    mask = torch.zeros(2, SQUARE.n, dtype=torch.bool, device=device)
    for row, length in zip(mask, (40, 23), strict=True):
        row[(slice(-length, None) if side == "left" else slice(length))] = True
    for name in "kv":
        inputs[name] = torch.where(mask[:, None, :, None], inputs[name], 50.0)
    o = fastmax_attention(**inputs, causal=causal, attention_mask=mask, algorithm=algorithm, use_custom_gradient=custom)
    for row in range(2):
        keep = mask[row]
        q, k, v = (inputs[name][row : row + 1, :, keep].double() for name in "qkv")
        alone = definition(q, k, v, causal=causal)
        torch.testing.assert_close(o[row : row + 1, :, keep].double(), alone, rtol=1e-5, atol=1e-6)


@by_gradient
def test_large_values_of_masked_keys_do_not_overflow(custom):
    """The linear algorithm in PyTorch operations multiplies a masked value by 0 before its products could overflow."""
    q, k, v = (torch.randn(1, 1, 8, 4) for _ in range(3))
    mask = torch.arange(8)[None] != 3
    results = []
    for masked in (0.0, 3e38):
        v[:, :, 3] = masked
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"causal": True, "attention_mask": mask, "algorithm": "linear", "use_custom_gradient": custom}
        o = fastmax_attention(*leaves, **options)
        results.append([o, *torch.autograd.grad(10.0 * o.sum(), leaves)])
    for name, actual, expected in zip(("o", "q", "k", "v"), *reversed(results), strict=True):
        assert torch.equal(actual, expected), name


@in_turn("custom")
@by_gradient
@by_algorithm
@by_causal
@by_order
def test_fully_masked_rows(p, causal, algorithm, custom, device):
    """Fully masked rows have output and gradient zero, not NaN, and do not change the other rows."""
    inputs, grad_o = make_inputs(SQUARE, device=device)
    mask = torch.ones(2, SQUARE.n, dtype=torch.bool, device=device)
    mask[0] = False  # a sequence without keys
    mask[1, :7] = False  # causal: the first 7 queries see none
    options = {"causal": causal, "p": p, "attention_mask": mask}
    out = check(inputs, grad_o, custom=custom, algorithm=algorithm, **options)
    assert torch.equal(out["o"][0], torch.zeros_like(out["o"][0]))
    for name in "qkv":
        assert torch.equal(out[f"grad {name}"][0], torch.zeros_like(inputs[name][0]))
    if causal:
        assert torch.equal(out["o"][1, :, :7], torch.zeros_like(out["o"][1, :, :7]))
        assert torch.equal(out["grad q"][1, :, :7], torch.zeros_like(inputs["q"][1, :, :7]))
    for name in "kv":
        assert torch.equal(out[f"grad {name}"][1, :, :7], torch.zeros_like(inputs[name][1, :, :7]))


@in_turn("custom")
@by_gradient
@by_algorithm
@pytest.mark.parametrize("layout", ["sliced", "every other column", "transposed", "expanded"])
def test_masks_of_any_strides(layout, algorithm, custom, device):
    """The mask is a slice of a wider mask, as in generation, or one row expanded over the batch."""
    inputs, grad_o = make_inputs(SMALL, device=device)
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.3
    mask[:, 0] = True
    filled = torch.zeros(SMALL.b, 2 * SMALL.m + 3, dtype=torch.bool, device=device)
    if layout == "sliced":
        filled[:, 3 : SMALL.m + 3] = mask
        view = filled[:, 3 : SMALL.m + 3]
    elif layout == "every other column":
        filled[:, 3::2] = mask
        view = filled[:, 3::2]
    elif layout == "transposed":
        view = mask.mT.contiguous().mT
    else:
        view = mask[:1].expand(SMALL.b, -1)
    options = {"causal": True, "algorithm": algorithm, "use_custom_gradient": custom}
    expected = run(fastmax_attention, inputs, grad_o, attention_mask=view.contiguous(), **options)
    actual = run(fastmax_attention, inputs, grad_o, attention_mask=view, **options)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


# ---- normalize


@in_turn("custom")
@by_gradient
@by_dtype
@pytest.mark.parametrize("normalize", [True, "sequence", "token"])
def test_normalize(normalize, dtype, custom, device):
    def normal(*shape, dtype, device):
        return 3.0 * torch.randn(shape, dtype=torch.float64).to(device, dtype)

    inputs, grad_o = make_inputs(SMALL, dtype, device, q_and_k=normal)
    options = {"normalize": normalize, "lim": 1.3, "temperature": 0.8}
    check(inputs, grad_o, custom=custom, algorithm="linear", causal=True, **options)


@by_gradient
@pytest.mark.parametrize("normalize", [True, "sequence", "token"])
def test_normalize_keeps_zero_input_zero(normalize, custom, device):
    """If q and k are zero, every score is 0, the output is the mean of v, and no gradient is NaN."""
    inputs, grad_o = make_inputs(SMALL, device=device)
    inputs["q"], inputs["k"] = torch.zeros_like(inputs["q"]), torch.zeros_like(inputs["k"])
    out = run(fastmax_attention, inputs, grad_o, normalize=normalize, use_custom_gradient=custom)
    mean = inputs["v"].mean(2, keepdim=True).repeat_interleave(2, dim=1)
    torch.testing.assert_close(out["o"], mean.expand_as(out["o"]))
    for x in out.values():
        assert x.isfinite().all()


def test_normalize_true_means_sequence(device):
    inputs, _ = make_inputs(SMALL, device=device)
    assert torch.equal(fastmax_attention(**inputs, normalize=True), fastmax_attention(**inputs, normalize="sequence"))


@by_gradient
@pytest.mark.parametrize("size", [1e-25, 1e25], ids=["tiny", "huge"])
def test_normalize_sequence_neither_overflows_nor_underflows(size, custom, device):
    """Scaling all of q and k changes nothing, even where their squares leave the range of fp32."""
    inputs, _ = make_inputs(SMALL, device=device)
    scaled = dict(inputs, q=size * inputs["q"], k=size * inputs["k"])
    o = fastmax_attention(**inputs, normalize="sequence", use_custom_gradient=custom)
    torch.testing.assert_close(fastmax_attention(**scaled, normalize="sequence", use_custom_gradient=custom), o)


# ---- noise


@by_algorithm
@by_gradient
def test_drawn_noise_is_standard_normal_and_multiplies(algorithm, custom, device):
    case = Case("many outputs", n=100, b=2, h=4, d=4, dv=50)
    inputs, _ = make_inputs(case, device=device)
    options = {"algorithm": algorithm, "use_custom_gradient": custom}
    quiet = fastmax_attention(**inputs, **options)
    noise = (fastmax_attention(**inputs, dropout=0.5, **options) / quiet - 1.0) / 0.5
    noise = noise[quiet.abs() > 1e-3]
    assert noise.numel() > 30_000
    assert noise.mean().abs() < 0.03 and (noise.std() - 1.0).abs() < 0.03
    assert (noise < -2.0).any(), "1 + dropout * noise may change sign"


@by_gradient
def test_drawn_noise_follows_the_generator(custom, device):
    inputs, _ = make_inputs(SMALL, device=device)

    def call(seed):
        torch.manual_seed(seed)
        return fastmax_attention(**inputs, dropout=0.3, use_custom_gradient=custom)

    assert torch.equal(call(1), call(1))
    assert not torch.equal(call(1), call(2))


@by_gradient
def test_no_noise_without_dropout(custom, device):
    inputs, _ = make_inputs(SMALL, device=device)
    o = fastmax_attention(**inputs, use_custom_gradient=custom)
    state = torch.get_rng_state()
    assert torch.equal(fastmax_attention(**inputs, dropout=0.0, use_custom_gradient=custom), o)
    assert torch.equal(torch.get_rng_state(), state)


@by_gradient
def test_no_gradient_flows_to_the_noise(custom, device):
    inputs, grad_o = make_inputs(SMALL, device=device)
    noise = torch.randn(grad_o.shape, device=device, requires_grad=True)
    q = inputs["q"].requires_grad_()
    fastmax_attention(**inputs, drop_noise=noise, dropout=0.3, use_custom_gradient=custom).backward(grad_o)
    assert noise.grad is None and q.grad is not None


# ---- relative positions


@in_turn("custom")
@by_gradient
@by_causal
@by_dtype
@pytest.mark.parametrize("algorithm", ["auto", "quadratic"])
def test_rpe_tensor(algorithm, dtype, causal, custom, device):
    inputs, grad_o = make_inputs(SMALL, dtype, device)
    inputs["rpe_matrix"] = 0.5 * bounded(SMALL.n + SMALL.m - 1, SMALL.d, dtype=dtype, device=device)
    check(inputs, grad_o, custom=custom, algorithm=algorithm, causal=causal, temperature=1.5)


@in_turn("custom")
@by_gradient
@by_order
@pytest.mark.parametrize("option", ["defaults", "p=1 coefficients", "key padding", "noise", "normalize=token"])
def test_rpe_tensor_across_tiles(option, p, custom, device):
    case = Case("ragged tiles", n=CHUNK + 13, m=CHUNK + 20, h=4, hk=2, d=7, dv=5)
    inputs, grad_o = make_inputs(case, device=device)
    inputs["rpe_matrix"] = 0.3 * bounded(case.n + case.m - 1, case.d, device=device)
    options = dict(make_options(option, case, device=device), p=p, temperature=2.0)
    check(inputs, grad_o, custom=custom, causal=True, **options)


@by_gradient
@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2), (9, 4)], ids=lambda s: f"n={s[0]} m={s[1]}")
def test_rpe_tensor_at_small_sizes(shape, custom, device):
    case = Case("small", n=shape[0], m=shape[1], d=3, dv=4)
    inputs, grad_o = make_inputs(case, device=device)
    inputs["rpe_matrix"] = bounded(case.n + case.m - 1, case.d, device=device)
    check(inputs, grad_o, custom=custom, temperature=3.0)


@in_turn("custom")
@by_gradient
@by_algorithm
@by_causal
@pytest.mark.parametrize("d", [1, 4, 7], ids=lambda d: f"d={d}")
@pytest.mark.parametrize("shape", [(20, 20), (6, 20), (1, 20)], ids=lambda s: f"n={s[0]} m={s[1]}")
def test_sinusoidal_equals_its_matrix(shape, d, causal, algorithm, custom, device):
    """The factorised form equals the quadratic algorithm with the sinusoids written out as a matrix."""
    n, m = shape
    inputs, grad_o = make_inputs(Case("", n=n, m=m, d=d, dv=5), torch.float64, device)
    options = {"causal": causal, "use_custom_gradient": custom, "temperature": 3.0}
    factorised = run(fastmax_attention, inputs, grad_o, rpe_matrix="sinusoidal", algorithm=algorithm, **options)
    rows = sinusoidal_rows(n, m, d).to(device)
    explicit = run(fastmax_attention, inputs, grad_o, rpe_matrix=rows, **options)
    for name, x in factorised.items():
        torch.testing.assert_close(x, explicit[name], rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}")


# ---- the choice of algorithm


@in_turn("custom")
@by_gradient
@by_causal
@by_order
@pytest.mark.parametrize("n", [20, 4 * CHUNK], ids=["short", "long"])
def test_auto_equals_both_algorithms(n, p, causal, custom, device):
    inputs, grad_o = make_inputs(Case("", n=n, h=1, d=4), torch.float64, device)
    options = {"p": p, "causal": causal, "use_custom_gradient": custom}
    auto = run(fastmax_attention, inputs, grad_o, **options)
    for algorithm in ALGORITHMS:
        forced = run(fastmax_attention, inputs, grad_o, algorithm=algorithm, **options)
        for name, x in auto.items():
            assert_within_contract(name, forced[name], x, x)
