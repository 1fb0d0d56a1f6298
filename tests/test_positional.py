"""`rpe_matrix_creator` and what its rows mean."""

import math

import pytest
import torch
from common import DTYPES, Case, by_causal, by_gradient, dtype_id, in_turn, make_inputs, run

from fastmax import fastmax_attention, rpe_matrix_creator
from fastmax.prepare.positional import append_sinusoidal_key, append_sinusoidal_query, token_positions
from fastmax.testing.reference import sinusoidal_rows


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("d", [1, 2, 5, 16])
def test_structured_rows_are_the_sinusoids(n, d):
    """Rows are `sin(t w_f), cos(t w_f)` interleaved, for t from the farthest past to the farthest future, `w_f =
    10000^(-2f/d)`."""
    rows = rpe_matrix_creator(n, d, dtype=torch.float64, structured=True)
    assert rows.shape == (2 * n - 1, d)
    torch.testing.assert_close(rows, sinusoidal_rows(n, n, d), rtol=0.0, atol=1e-13)


def test_structured_rows_by_hand():
    rows = rpe_matrix_creator(2, 4, dtype=torch.float64, structured=True)
    w = 10000.0 ** (-2.0 / 4.0)
    t = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64)
    expected = torch.stack([t.sin(), t.cos(), (t * w).sin(), (t * w).cos()], dim=1)
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("kind", [{}, {"is_zero": False}, {"structured": True}], ids=["zeros", "normal", "structured"])
def test_shape_dtype_and_device(kind, dtype, device):
    for d in (4, 7):
        rows = rpe_matrix_creator(9, d, device, dtype, **kind)
        assert rows.shape == (17, d) and rows.dtype == dtype and rows.device.type == device.type


def test_positional_arguments_and_defaults():
    rows = rpe_matrix_creator(9, 4)
    assert rows.dtype == torch.float32 and torch.equal(rows, torch.zeros(17, 4))
    ordered = rpe_matrix_creator(9, 4, torch.device("cpu"), torch.float64, True, True)
    assert torch.equal(ordered, rpe_matrix_creator(9, 4, dtype=torch.float64, structured=True))


def test_not_zero_is_standard_normal():
    torch.manual_seed(1)
    rows = rpe_matrix_creator(2000, 16, is_zero=False)
    assert rows.mean().abs() < 0.02 and (rows.std() - 1.0).abs() < 0.02
    torch.manual_seed(1)
    assert torch.equal(rpe_matrix_creator(2000, 16, is_zero=False), rows)


def test_structured_rows_stay_exact_far_away():
    """At distances of hundred thousands, fp32 angles would lose digits."""
    n = 200_000
    row = rpe_matrix_creator(n, 2, structured=True)[0]
    t = torch.tensor(float(n - 1), dtype=torch.float64)
    torch.testing.assert_close(row.double(), torch.stack([t.sin(), t.cos()]), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("d", [4, 7], ids=["even", "odd"])
def test_appended_channels_stay_exact_far_away(d, device):
    """At position 5,000,000 an fp32 angle is off by a quarter. The channels of keys and their products `q . r_(i-j)` must still
    be exact."""
    first, n = 5_000_000, 3
    q, k = torch.randn(1, 1, n, d, device=device), torch.randn(1, 1, n, d, device=device)
    appended_q = append_sinusoidal_query(q, token_positions(first + 2, n, q.device))
    appended_k = append_sinusoidal_key(k, token_positions(first, n, k.device))
    assert torch.equal(appended_q[..., :d], q) and torch.equal(appended_k[..., :d], k)
    w = [10000.0 ** (-2.0 * f / d) for f in range((d + 1) // 2)]
    u = [[f((first + j) * x) for f in (math.cos, math.sin) for x in w] for j in range(n)]
    torch.testing.assert_close(appended_k[0, 0, :, d:].cpu(), torch.tensor(u), rtol=0.0, atol=1e-6)
    rows = sinusoidal_rows(n, n + 2, d)  # queries two positions on, as with two keys more
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    expected = (q[0, 0].cpu().double().unsqueeze(1) * rows[j - i + n - 1]).sum(-1)
    scores = (appended_q[..., d:] @ appended_k[..., d:].mT)[0, 0]
    torch.testing.assert_close(scores.cpu().double(), expected, rtol=0.0, atol=1e-5)


@in_turn("custom")
@by_gradient
@by_causal
@pytest.mark.parametrize("d", [4, 7], ids=["even", "odd"])
def test_creator_sinusoidal_and_tensor_agree(d, causal, custom, device):
    inputs, grad_o = make_inputs(Case("", n=21, d=d), torch.float64, device)
    options = {"causal": causal, "use_custom_gradient": custom, "temperature": 3.0}
    rows = rpe_matrix_creator(21, d, device, torch.float64, structured=True)
    by_rows = run(fastmax_attention, inputs, grad_o, rpe_matrix=rows, **options)
    by_name = run(fastmax_attention, inputs, grad_o, rpe_matrix="sinusoidal", algorithm="linear", **options)
    for name, x in by_rows.items():
        torch.testing.assert_close(by_name[name], x, rtol=1e-9, atol=1e-11)


@by_gradient
def test_zero_matrix_changes_nothing(custom, device):
    inputs, grad_o = make_inputs(Case("", n=21, d=5), torch.float64, device)
    rows = rpe_matrix_creator(21, 5, device, torch.float64)
    with_rows = run(fastmax_attention, inputs, grad_o, rpe_matrix=rows, use_custom_gradient=custom)
    without = run(fastmax_attention, inputs, grad_o, use_custom_gradient=custom, algorithm="quadratic")
    for name, x in without.items():
        torch.testing.assert_close(with_rows[name], x)


@pytest.mark.parametrize("row, i, j", [(0, 4, 0), (4, 0, 0), (4, 3, 3), (8, 0, 4), (6, 1, 3)])
def test_which_row_meets_which_pair(row, i, j, device):
    """A matrix with only one nonzero row changes exactly the scores of the pairs with `j - i + n - 1 == row`."""
    n, d = 5, 3
    q = torch.ones(1, 1, n, d, dtype=torch.float64, device=device)
    k = torch.zeros(1, 1, n, d, dtype=torch.float64, device=device)
    v = torch.eye(n, dtype=torch.float64, device=device).expand(1, 1, n, n)  # the output is the weights
    rows = torch.zeros(2 * n - 1, d, dtype=torch.float64, device=device)
    rows[row] = 1.0
    weights = fastmax_attention(q, k, v, rpe_matrix=rows)[0, 0]
    moved = weights > 1.0 / n + 1e-9
    assert moved[i, j]
    index = torch.arange(n, device=device)
    assert torch.equal(moved, index[None, :] - index[:, None] + n - 1 == row)


@pytest.mark.parametrize("positions", ["shift", "distance"])
def test_sinusoidal_depends_on_distance_alone(positions, device):
    """With constant q and k, the weight of a key depends on its distance and not on its position, for any number of earlier
    keys."""
    n, m, d = 6, 40, 8
    q = torch.full((1, 1, n, d), 0.3, dtype=torch.float64, device=device)
    k = torch.full((1, 1, m, d), 0.2, dtype=torch.float64, device=device)
    v = torch.eye(m, dtype=torch.float64, device=device).expand(1, 1, m, m)
    weights = fastmax_attention(q, k, v, rpe_matrix="sinusoidal", temperature=4.0)[0, 0]
    if positions == "shift":
        fewer = fastmax_attention(q, k[:, :, 10:], v[:, :, 10:, 10:], rpe_matrix="sinusoidal", temperature=4.0)[0, 0]
        ratio = weights[:, 10:] / fewer
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
    else:
        ratio = weights[1:, 1:] / weights[:-1, :-1]
        torch.testing.assert_close(ratio, ratio[:, :1].expand_as(ratio))
