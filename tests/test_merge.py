"""`return_lse` of `fastmax_attention`, and `merge_attention`, which merges attention over parts of the keys."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from common import (
    CHUNK,
    DTYPES,
    Case,
    Expected,
    assert_equals_definition,
    by_algorithm,
    by_causal,
    by_gradient,
    by_order,
    check_checkpointing,
    check_compiled,
    compare,
    definition,
    dtype_id,
    in_turn,
    make_decay,
    make_inputs,
    make_options,
    relative,
    run,
)
from test_validation import good

from fastmax import fastmax_attention, flash_attention, merge_attention

SMALL = Case("small", n=24, m=40, b=2, h=4, hk=2, d=8, dv=6)
with_lse = partial(fastmax_attention, return_lse=True)
flash_with_lse = partial(flash_attention, return_lse=True)
reference = partial(definition, return_lse=True)
by_attention = pytest.mark.parametrize(
    "attention",
    [
        partial(with_lse, algorithm="quadratic"),
        partial(with_lse, algorithm="linear"),
        partial(with_lse, algorithm="linear", p=1, temperature=2.0),
        partial(with_lse, exact_window=50),
        flash_with_lse,
    ],
    ids=["quadratic", "linear", "p1", "exact window over all", "flash"],
)


def make(case, dtype=torch.float32, device="cpu"):
    inputs, grad_o = make_inputs(case, dtype, device)
    return inputs, (
        grad_o,
        torch.randn(case.b, case.h, case.n).to(device, torch.float64 if dtype == torch.float64 else torch.float32),
    )


# ---- return_lse


OPTIONS = ("defaults", "p=1", "temperature", "coefficients", "normalize=sequence", "noise", "sinusoidal", "everything")


@in_turn("custom")
@pytest.mark.parametrize("option", OPTIONS)
@by_causal
@by_gradient
@by_algorithm
def test_log_of_the_sums_in_float64(algorithm, custom, causal, option, device):
    inputs, grads = make(SMALL, torch.float64, device)
    options = make_options(option, SMALL, torch.float64, device) | {"causal": causal}
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    assert_equals_definition(attention, reference, inputs, grads, **options)


@by_gradient
def test_log_of_the_sums_with_an_rpe_tensor(custom, device):
    inputs, grads = make(SMALL, torch.float64, device)
    inputs["rpe_matrix"] = torch.randn(SMALL.n + SMALL.m - 1, SMALL.d, dtype=torch.float64).to(device)
    assert_equals_definition(partial(with_lse, use_custom_gradient=custom), reference, inputs, grads)


@in_turn("custom")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@by_gradient
@by_algorithm
@by_order
def test_dtypes(p, algorithm, custom, dtype, device):
    inputs, grads = make(Case("", n=CHUNK + 20, h=2, hk=1, d=8), dtype, device)
    actual = Expected(inputs, grads, causal=True, p=p, return_lse=True).check(custom=custom, algorithm=algorithm)
    assert actual["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@by_gradient
@by_algorithm
def test_the_log_is_not_rounded_to_half_precision(algorithm, custom, device):
    inputs, _ = make(SMALL, torch.bfloat16, device)
    lse = with_lse(**inputs, use_custom_gradient=custom, algorithm=algorithm)[1]
    assert relative(lse, reference(**{name: x.double() for name, x in inputs.items()})[1]) <= 1e-5


@in_turn("custom")
@by_gradient
@by_algorithm
@pytest.mark.parametrize("index", [0, 1], ids=["o", "lse"])
def test_a_gradient_of_one_output_alone(index, algorithm, custom, device):
    inputs, grads = make(SMALL, device=device)
    used = [torch.zeros_like(x) for x in grads]
    used[index] = grads[index]
    attention = partial(with_lse, causal=True, use_custom_gradient=custom, algorithm=algorithm)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    used_alone = torch.autograd.grad(
        attention(**leaves)[index], list(leaves.values()), grads[index], materialize_grads=True, allow_unused=True
    )
    both = run(attention, inputs, tuple(used))
    compare({f"grad {name}": x for name, x in zip(leaves, used_alone, strict=True)},
            {name: x for name, x in both.items() if name.startswith("grad")})  # fmt: skip


@by_gradient
@by_algorithm
def test_queries_without_keys(algorithm, custom, device):
    inputs, grads = make(SMALL, torch.float64, device)
    mask = torch.rand(SMALL.b, SMALL.m, device=device) > 0.3
    mask[0] = False
    mask[1, :20] = False
    attention = partial(with_lse, use_custom_gradient=custom, algorithm=algorithm)
    actual = assert_equals_definition(attention, reference, inputs, grads, causal=True, attention_mask=mask)
    blind = actual["lse"].isneginf()
    assert blind[0].all() and blind[1].any() and not blind[1].all() and not actual["o"][blind].any()


def test_noise_does_not_touch_the_log(device):
    inputs, _ = make(SMALL, device=device)
    noise = torch.randn(SMALL.b, SMALL.h, SMALL.n, SMALL.dv, device=device)
    o, lse = with_lse(**inputs)
    noisy, same = with_lse(**inputs, dropout=0.3, drop_noise=noise)
    torch.testing.assert_close(same, lse)
    torch.testing.assert_close(noisy, o * (1.0 + 0.3 * noise))


@by_gradient
@by_algorithm
def test_without_it_there_is_only_the_output(algorithm, custom, device):
    inputs, _ = make(SMALL, device=device)
    attention = partial(fastmax_attention, use_custom_gradient=custom, algorithm=algorithm)
    o, lse = attention(**inputs, return_lse=True)
    assert torch.equal(attention(**inputs), o) and lse.shape == (SMALL.b, SMALL.h, SMALL.n)


@by_gradient
def test_three_dimensions(custom, device):
    inputs, grads = make(SMALL, device=device)
    attention = partial(with_lse, use_custom_gradient=custom)
    flat = run(attention, {name: x.flatten(0, 1) for name, x in inputs.items()}, tuple(x.flatten(0, 1) for x in grads))
    compare(flat, {name: x.flatten(0, 1) for name, x in run(attention, inputs, grads).items()})


def test_return_lse_of_another_kind_is_refused():
    for value in (1, None, "yes"):
        with pytest.raises(TypeError, match="return_lse must be a bool"):
            fastmax_attention(**good(), return_lse=value)


@by_gradient
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_activation_checkpointing(reentrant, custom, device):
    check_checkpointing(partial(with_lse, use_custom_gradient=custom), *make(SMALL, device=device), reentrant)


# ---- merging


SPLITS = {
    "in two": (0, 13, 40),
    "one key alone": (0, 1, 40),
    "many": (0, 3, 4, 11, 30, 39, 40),
    "a part without keys": (0, 15, 15, 40),
    "whole": (0, 40),
}


def merged_slices(attention, bounds, q, k, v):
    parts = [attention(q, k[:, :, begin:end], v[:, :, begin:end]) for begin, end in pairwise(bounds)]
    return merge_attention(*zip(*parts, strict=True))


@in_turn("custom")
@pytest.mark.parametrize("bounds", SPLITS.values(), ids=SPLITS)
@by_attention
@by_gradient
def test_slices_of_the_keys(custom, attention, bounds, device):
    if attention.keywords.get("exact_window") and min(end - begin for begin, end in pairwise(bounds)) < SMALL.n:
        pytest.skip("an exact window takes no more queries than keys")
    inputs, grads = make(SMALL, torch.float64, device)
    attention = partial(attention, use_custom_gradient=custom)
    assert_equals_definition(partial(merged_slices, attention, bounds), attention, inputs, grads, tolerance=1e-11)


@in_turn("custom")
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("decay", [False, True], ids=["plain", "decay"])
@by_attention
@by_gradient
def test_disjoint_masks_under_a_causal_mask(custom, attention, decay, parts, device):
    """Masks do not move keys, so decays, windows and the causal mask are those of all keys. Some queries see no key of a
    part."""
    inputs, grads = make(SMALL, torch.float64, device)
    if decay:
        inputs["log_decay"] = make_decay("-inf at places", 2, 2, 40, dtype=torch.float64, device=device)
    attention = partial(attention, causal=True, use_custom_gradient=custom)
    part_of_key = torch.randint(0, parts, (SMALL.b, SMALL.m), device=device)

    def merged(**tensors):
        results = [attention(**tensors, attention_mask=part_of_key == part) for part in range(parts)]
        return merge_attention(*zip(*results, strict=True))

    assert_equals_definition(merged, attention, inputs, grads, tolerance=1e-11)


def test_queries_without_keys_in_any_part(device):
    """They have output 0, lse -inf and gradients of 0, not NaN."""
    inputs, grads = make(SMALL, torch.float64, device)
    mask = torch.ones(SMALL.b, SMALL.m, dtype=torch.bool, device=device)
    mask[0] = False
    mask[1, :30] = False

    def merged(causal, attention_mask, **tensors):
        even = torch.arange(SMALL.m, device=device) % 2 == 0
        masks = attention_mask & even, attention_mask & ~even
        results = [with_lse(**tensors, causal=causal, attention_mask=half) for half in masks]
        return merge_attention(*zip(*results, strict=True))

    actual = assert_equals_definition(merged, reference, inputs, grads, causal=True, attention_mask=mask, tolerance=1e-11)
    assert actual["lse"][0].isneginf().all() and not any(x.isnan().any() for x in actual.values())


def test_polynomial_and_softmax_merge_to_an_exact_window(device):
    """The last 7 keys are weighed by exp, those before by the polynomial."""
    inputs, grads = make(Case("", n=30, h=2, hk=1, d=4), torch.float64, device)

    def merged(q, k, v):
        near = flash_with_lse(q, k, v, causal=True, scale=0.5, window=7)
        far, lse = with_lse(q[:, :, 7:], k[:, :, :-7], v[:, :, :-7], causal=True, temperature=2.0)
        far = torch.cat([torch.zeros_like(q[:, :, :7]), far], dim=2)
        lse = torch.cat([torch.full_like(q[:, :, :7, 0], -torch.inf), lse], dim=2)
        return merge_attention((near[0], far), (near[1], lse))

    whole = partial(reference, causal=True, temperature=2.0, exact_window=7)
    assert_equals_definition(merged, whole, inputs, grads)


def test_logarithms_of_hundreds(device):
    """Sums of exp(+-500) are out of float32's range, also if there is only one part."""
    outputs = [torch.full((1, 1, 4, 2), float(value), device=device, requires_grad=True) for value in (1, 2)]
    lses = [torch.tensor([[[500.0, -500.0, -torch.inf, 500.0]]], device=device).requires_grad_(),
            torch.tensor([[[500.0, -500.0, -500.0, -500.0]]], device=device).requires_grad_()]  # fmt: skip
    o, lse = merge_attention(outputs, lses)
    torch.testing.assert_close(o[0, 0, :, 0].tolist(), [1.5, 1.5, 2.0, 1.0])
    torch.testing.assert_close(lse[0, 0], torch.tensor([500.0, -500.0, -500.0, 500.0], device=device) +
                               torch.tensor([2.0, 2.0, 1.0, 1.0], device=device).log())  # fmt: skip
    grads = torch.autograd.grad((o.sum() + lse.sum()), (*outputs, *lses))
    assert all(x.isfinite().all() for x in grads)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_dtypes_of_what_is_merged(dtype, device):
    inputs, grads = make(SMALL, dtype, device)
    merged = partial(merged_slices, with_lse, (0, 13, 40))
    actual = run(merged, inputs, grads)
    assert actual["o"].dtype == dtype and actual["lse"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    whole = run(with_lse, inputs, grads)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for name, x in whole.items():
        assert relative(actual[name], x.double()) <= tolerance, name


def test_merging_compiles(device, fresh_dynamo):
    inputs, grads = make(SMALL, device=device)
    check_compiled(partial(merged_slices, with_lse, (0, 13, 40)), inputs, grads)


def parts():
    return [torch.zeros(2, 4, 5, 6) for _ in range(2)], [torch.zeros(2, 4, 5) for _ in range(2)]


REFUSED = {
    "nothing": (lambda outputs, lses: ([], []), ValueError, "outputs"),
    "another number of them": (lambda outputs, lses: (outputs, lses[:1]), ValueError, "lses.*2.*1"),
    "outputs of other shapes": (lambda outputs, lses: ([outputs[0], torch.zeros(2, 4, 7, 6)], lses), ValueError, "outputs"),
    "log-sums of another shape": (lambda outputs, lses: (outputs, [lses[0], torch.zeros(2, 4, 7)]), ValueError, "lses"),
    "log-sums that are no tensors": (lambda outputs, lses: (outputs, [0.0, 1.0]), TypeError, "lses"),
    "outputs of other dtypes": (lambda outputs, lses: ([outputs[0], outputs[1].half()], lses), TypeError, "outputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_merging_refuses(name):
    change, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        merge_attention(*change(*parts()))


def test_one_part_is_copied(device):
    """A write into the result must not change the part, and gradients flow through the copy."""
    (output, _), (lse, _) = ([x.to(device).requires_grad_() for x in tensors] for tensors in parts())
    o, lse_of_o = merge_attention([output], [lse])
    assert torch.equal(o, output) and torch.equal(lse_of_o, lse)
    grads = torch.autograd.grad(2 * o.sum() + 3 * lse_of_o.sum(), (output, lse))
    assert (grads[0] == 2).all() and (grads[1] == 3).all()
    with torch.no_grad():
        o, lse_of_o = merge_attention([output], [lse])
        o.fill_(7.0)
        lse_of_o.fill_(7.0)
    assert (output == 0).all() and (lse == 0).all()
