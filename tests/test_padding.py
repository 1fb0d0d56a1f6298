"""Padding masks on the quadratic CUDA kernels, which treat fully visible, fully masked and mixed tiles of keys differently."""

import pytest
import torch
from test_kernels import DEVICE, HEAD_DIMS, WHY_NOT, by_mode, in_mode, precision  # noqa: F401 (precision: a fixture)

from fastmax.testing import evaluation
from fastmax.testing.configurations import Case
from fastmax.testing.errors import ROUNDING, measure
from fastmax.testing.evaluation import implementation
from fastmax.testing.tensors import random_tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

by_attention = pytest.mark.parametrize("softmax", [False, True], ids=["fastmax", "flash"])
by_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
by_head_dim = pytest.mark.parametrize("d", HEAD_DIMS, ids=lambda d: f"d{d}")


def patterns(m):
    """Returns masks (entries, m), one entry for each way in which tiles of 16 to 128 keys can be visible or masked."""
    key = torch.arange(m)
    tile = key // 64
    rows = [
        key >= 0,  # all
        key < 0,  # none
        key < m // 2,  # padded behind, within a tile
        key < m // 2 // 128 * 128,  # and at the boundary of every tile
        key >= m - m // 3,  # padded before
        (key < 128) | (key >= 384),  # a hole of whole tiles
        (key < 129) | (key >= 383),  # and one key off them
        tile % 2 == 0,
        tile % 2 == 1,
        key == 0,
        key == m - 1,
        key == m // 2,
        key % 16 == 7,
        torch.rand(m, generator=torch.Generator().manual_seed(0)) < 0.5,
    ]
    return torch.stack(rows).to(DEVICE)


def case_and_tensors(n, m, d, mode, softmax, causal, seed=0):
    options = {"causal": causal} if softmax else {"causal": causal, "algorithm": "quadratic", "temperature": d**0.5}
    case = Case(
        "", options, batch=len(patterns(m)), heads=4, kv_heads=2, queries=n, keys=m, head_dim=d, value_dim=d, softmax=softmax
    )
    case = in_mode(case, mode)
    return case, random_tensors(case, DEVICE, seed)


def results(case, tensors, mask):
    """Returns output, log-sum-exp and gradients of the kernels, on poisoned memory."""
    options = {**case.options, "use_custom_gradient": True}
    tensors = tensors if mask is None else tensors | {"attention_mask": mask}
    return evaluation.run(implementation(case.softmax), tensors, options, poison=True)


def assert_equal(actual, expected):
    for name, x in actual.items():
        assert torch.equal(x, expected[name]), name


@by_attention
@by_causal
@by_mode
@by_head_dim
@pytest.mark.parametrize("n, m", [(500, 500), (70, 517)], ids=["n = m", "n < m"])
def test_every_pattern_against_float64(n, m, d, mode, causal, softmax, precision):  # noqa: F811
    """Entries are compared one by one, so that the error of one is not averaged with the others."""
    case, tensors = case_and_tensors(n, m, d, mode, softmax, causal)
    masks = patterns(m)
    got = results(case, tensors, masks)
    # Where few keys are seen, the terms of softmax's gradient by a score all but cancel (autograd: 5e-6 in fp32).
    rounding = ROUNDING[case.mode] * (8 if softmax else 1)
    for entry, mask in enumerate(masks):
        alone = {name: x[entry : entry + 1] for name, x in tensors.items()} | {"attention_mask": mask[None]}
        wrong = [row for row in measure(alone, case.options, rounding, softmax) if not row.passed]
        assert not wrong, (entry, wrong)
        for name, x in got.items():
            seen = x[entry].isfinite() | ((x[entry] == -torch.inf) if name == "lse" else torch.tensor(False, device=DEVICE))
            assert seen.all(), (entry, name)


@by_attention
@by_causal
@by_mode
@by_head_dim
def test_a_mask_that_keeps_every_key_changes_nothing(d, mode, causal, softmax, precision):  # noqa: F811
    """Fully visible tiles take the path without a mask, so the bits are the same."""
    case, tensors = case_and_tensors(300, 333, d, mode, softmax, causal)
    assert_equal(results(case, tensors, torch.ones_like(patterns(333))), results(case, tensors, None))


@by_attention
@by_causal
@by_mode
@by_head_dim
def test_dropped_keys_leave_no_trace(d, mode, causal, softmax, precision):  # noqa: F811
    """Other keys and values at masked positions give the same bits, and their gradient is 0."""
    case, tensors = case_and_tensors(300, 517, d, mode, softmax, causal)
    mask = patterns(517)
    dropped = ~mask[:, None, :, None]
    first = results(case, tensors, mask)
    assert_equal(results(case, tensors | {name: tensors[name].masked_fill(dropped, 3.0) for name in "kv"}, mask), first)
    gradients = [x for name, x in first.items() if x.shape == tensors["k"].shape]
    assert len(gradients) == 2
    for x in gradients:
        assert (x.masked_select(dropped) == 0).all() and x.masked_select(~dropped).any()


@by_attention
@by_mode
@by_head_dim
@pytest.mark.parametrize("kept", [1, 63, 64, 65, 128, 200, 256])
def test_padding_behind_is_a_shorter_sequence(kept, d, mode, softmax, precision):  # noqa: F811
    """Skipped tiles would only have added zeros, so the bits are those of the shorter sequence."""
    case, tensors = case_and_tensors(150, 400, d, mode, softmax, causal=False)
    mask = (torch.arange(400, device=DEVICE) < kept).expand(case.batch, -1)
    short = tensors | {name: tensors[name][:, :, :kept].contiguous() for name in "kv"}
    expected = results(case._replace(keys=kept), short, None)
    for name, x in results(case, tensors, mask).items():
        assert torch.equal(x if x.shape == expected[name].shape else x[:, :, :kept], expected[name]), name


@by_attention
def test_a_mask_row_at_any_address(softmax):
    """Masks are read by bytes, so rows may start at any address."""
    case, tensors = case_and_tensors(130, 333, 64, "bf16", softmax, causal=True)
    mask = patterns(333)
    wide = torch.zeros(len(mask), 400, dtype=torch.bool, device=DEVICE)
    wide[:, 3:336] = mask
    assert_equal(results(case, tensors, wide[:, 3:336]), results(case, tensors, mask))
