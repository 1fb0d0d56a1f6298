"""The operators `largest_so_far`, `gather_kept` and `kept_step_`, against sorts and loops over places, and the gradient against
autograd."""

from typing import NamedTuple

import pytest
import torch
from common import dtype_id, relative
from torch import Tensor

from fastmax import eager, ops
from fastmax.ops import extension
from fastmax.testing.poison import poison_free_memory

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_largest_so_far(count, device):
    rank, index, earlier = candidates(device=device)
    torch.library.opcheck(torch.ops.fastmax.largest_so_far.default, (rank, index, earlier, count))
    assert torch.equal(torch.ops.fastmax.largest_so_far(rank, index, earlier, count), largest(rank, index, earlier, count))


@pytest.mark.parametrize(
    "blocks, per_block, count", [(1, 256, 256), (1, 3, 40), (9, 256, 100), (33, 70, 256), (5, 900, 1024), (3, 1500, 2048)]
)
def test_largest_so_far_sizes(blocks, per_block, count, device):
    """Kernels sort powers of two of elements, and merge lists of 1, 2, 4, ... blocks."""
    rank, index, earlier = candidates(2, 2, (blocks, 2), per_block, values=1000, device=device)
    for given in (rank, torch.where(torch.rand(2, 2, blocks + 2, 1, device=device) < 0.3, -torch.inf, rank)):
        for keys in (index, torch.arange(rank[0, 0].numel(), device=device).view(rank.shape[2:]).flip(-1).expand_as(rank)):
            kept = ops.largest_so_far(given, keys, earlier, count)
            assert torch.equal(kept, largest(given, keys, earlier, count))


def candidates(b: int = 2, hk: int = 3, sequences=(5, 2), per_block: int = 5, values: int = 6, device="cpu"):
    """Returns ranks, some equal, some of no key and a NaN, indices, and the number of earlier blocks of the same sequence."""
    shape = b, hk, sum(sequences), per_block
    rank = torch.randint(-values // 2, values // 2, shape, device=device).double()
    rank = torch.where(rank == -(values // 2), -torch.inf, rank)
    rank[0, 1, -1, -1] = torch.nan
    index = torch.randperm(rank.numel(), device=device).view(shape)
    return rank, index, torch.cat([torch.arange(blocks, device=device) for blocks in sequences])


def largest(rank: Tensor, index: Tensor, earlier: Tensor, count: int) -> Tensor:
    """The same as `largest_so_far`, by a sort of all earlier keys."""
    kept = []
    for block, before in enumerate(earlier.tolist()):
        latest_first = slice(block - before, block + 1)
        ranks, indices = (x[:, :, latest_first].flip(2).flatten(2) for x in (rank, index))
        ranks, order = ranks.nan_to_num(torch.inf, neginf=-torch.inf).sort(dim=-1, descending=True, stable=True)
        found = torch.where(ranks == -torch.inf, -1, indices.gather(-1, order))
        found = torch.nn.functional.pad(found, (0, count), value=-1)[..., :count]
        kept.append(found.sort(dim=-1).values)
    return torch.stack(kept, dim=2)


class Places(NamedTuple):
    """Arguments of `gather_kept` and the number of keys."""

    kept: Tensor
    recent_keys: Tensor
    block: int
    tokens: int


def places(lengths=(37, 3, 20), block=8, window=5, count=6, b=2, hk=2, first=0, device="cpu") -> Places:
    """Returns the places of packed sequences. `first`: number of blocks that are left out, as after a state."""
    kept, recent, origin = [], [], 0
    for length in lengths:
        rank = torch.rand(b, hk, length).cumsum(-1).sin()  # some are kept for long, some not
        for begin in range(0, length, block):
            known = max(0, begin - window)
            most = rank[..., :known].topk(min(count, known), dim=-1).indices.sort(dim=-1).values + origin
            kept.append(torch.nn.functional.pad(most, (count - most.shape[-1], 0), value=-1))
            there = min(max(window - begin, 0), block), min(max(length + window - begin, 0), block)
            recent.append([origin + begin - window, *there])
        origin += length
    places = torch.stack(kept[first:], dim=2), torch.tensor(recent[first:]).expand(b, -1, 3)
    return Places(*(x.to(device) for x in places), block, origin)


PLACES = {
    "one sequence": {"lengths": (37,)},
    "packed": {},
    "after a state": {"lengths": (50,), "first": 3},
    "more kept than keys": {"lengths": (9, 30), "count": 40},
    "one kept": {"count": 1},
    "window beyond a block": {"window": 21, "lengths": (64, 10)},
    "fewer tokens than the window": {"lengths": (4, 5), "window": 9},
    "blocks of 256": {"lengths": (900,), "block": 256, "window": 128, "count": 256, "b": 1},
    "as many kept as kernels have": {"lengths": (2400,), "block": 256, "window": 9, "count": 2048, "b": 1, "hk": 1},
}


def rows(of: Places, d: int, dv: int, dtype: torch.dtype, device="cpu") -> list[Tensor]:
    """Returns k and v, strided as a projection of the layer has them, and log factors that fall and rise."""
    b, hk = of.kept.shape[:2]
    both = torch.randn(b, of.tokens, hk, d + dv, dtype=dtype, device=device).transpose(1, 2)
    log_factor = torch.randn(b, hk, of.tokens, dtype=torch.float64, device=device) + 0.3 * torch.arange(
        of.tokens, device=device
    )
    return [*both.split([d, dv], dim=-1), log_factor]


def expected_rows(k: Tensor, v: Tensor, log_factor: Tensor, of: Places, decays: bool) -> tuple[Tensor, ...]:
    """The results of `gather_kept` in float64, place by place."""
    (b, hk, blocks, count), block = of.kept.shape, of.block
    sizes = b, blocks, hk, count + block
    keys, values, factor = (x.new_zeros(*sizes, *x.shape[3:], dtype=torch.float64) for x in (k, v, log_factor))
    has_key = torch.zeros(sizes, dtype=torch.bool, device=k.device)
    for entry, c, head, place in torch.cartesian_prod(*map(torch.arange, sizes)).tolist():
        first, begin, end = of.recent_keys[entry, c].tolist()
        i = place - count
        key = int(of.kept[entry, head, c, place]) if i < 0 else first + i if begin <= i < end else -1
        if key >= 0:
            has_key[entry, c, head, place] = True
            for out, x in ((keys, k), (values, v), (factor, log_factor)):
                out[entry, c, head, place] = x[entry, head, key].double()
    keys, values, factor, has_key = (x.flatten(0, 1) for x in (keys, values, factor, has_key))
    assert torch.equal(has_key, has_key[:, :1].expand_as(has_key)), "the same places in all heads"
    if not decays:
        return keys, values, factor, None, None, has_key[:, 0]
    least = torch.stack([factor[..., i:].masked_fill(~has_key[..., i:], torch.inf).amin(-1) for i in range(sizes[3])], dim=-1)
    gate = torch.where(has_key, factor - least, 0.0)
    decay = torch.zeros_like(gate)
    follows = least[..., 1:].isfinite()
    decay[..., 1:] = torch.where(follows, least[..., :-1] - least[..., 1:], 0.0)
    return keys, values, gate, decay, least[..., count:].nan_to_num(posinf=0.0), has_key[:, 0]


def check_rows(actual: tuple, expected: tuple, dtype: torch.dtype) -> None:
    """Checks results of `gather_kept`. Rows are copies; gates and decays are rounded once."""
    names = "keys", "values", "gate", "log_decay", "least", "has_key"
    for name, x, y in zip(names, actual, expected, strict=True):
        if y is None:
            assert x is None, name
        elif name in ("keys", "values", "has_key"):
            assert torch.equal(x.to(y.dtype), y), name
        else:
            limit = 1e-12 if name == "least" or dtype == torch.float64 else 2e-7  # sums of two float32 have some 48 digits
            torch.testing.assert_close(x.double(), y, rtol=limit, atol=limit * y.abs().max().item(), msg=name)


@pytest.mark.parametrize("custom", [True, False])
@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_gather_kept(options, decays, custom, device):
    of = places(**options, device=device)
    dtypes = DTYPES if of.tokens < 100 else (torch.bfloat16,)
    for dtype in dtypes:
        for d, dv in ((8, 16), (5, 3)) if of.tokens < 100 else ((16, 8),):
            given = rows(of, d, dv, dtype, device)
            results = ops.gather_kept(*given, *of[:3], decays, custom)
            check_rows(results, expected_rows(*given, of, decays), dtype)


@pytest.mark.parametrize("decays", [True, False])
@pytest.mark.parametrize("options", PLACES.values(), ids=PLACES)
def test_gradient(options, decays, device):
    """The custom gradient, with the same bits each time, and autograd's, against autograd in float64."""
    of = places(**options, device=device)
    for dtype in DTYPES:
        given = [x.requires_grad_() for x in rows(of, 16, 8, dtype, device)]
        wide = [x.detach().double().requires_grad_() for x in given]
        expected = ops.gather_kept(*wide, *of[:3], decays, False)[:3]
        grads = [torch.randn_like(x) for x in expected]
        exact = torch.autograd.grad(expected, wide, grads)
        rounding = torch.finfo(dtype).eps
        found = []
        for custom in (True, True, False):
            results = ops.gather_kept(*given, *of[:3], decays, custom)[:3]
            cast = [x.to(y.dtype) for x, y in zip(grads, results, strict=True)]
            found.append(torch.autograd.grad(results, given, cast))
            for x, y in zip(found[-1], exact, strict=True):
                assert x.dtype == y.dtype or x.dtype == dtype
                assert (x.double() - y).norm() <= 2 * rounding * y.norm()
        assert all(map(torch.equal, found[0], found[1]))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_opcheck(dtype, device):
    of = places(device=device)
    for decays in (True, False):
        given = [x.requires_grad_() for x in rows(of, 8, 16, dtype, device)]
        torch.library.opcheck(torch.ops.fastmax.gather_kept.default, (*given, *of[:3], decays))
        grads = [torch.randn_like(x) for x in torch.ops.fastmax.gather_kept(*given, *of[:3], decays)[:3]]
        arguments = of.kept, of.recent_keys, given[2].detach(), *grads
        torch.library.opcheck(torch.ops.fastmax.gather_kept_backward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
@pytest.mark.parametrize("custom", [True, False])
def test_gradients_of_a_key_in_many_blocks_are_summed_in_float32(custom, dtype, device):
    """A sum of ones in bfloat16 ends at 256, in float16 at 2048."""
    k, v = (torch.randn(1, 2, 5, 3, dtype=dtype, device=device, requires_grad=True) for _ in range(2))
    log_factor = torch.randn(1, 2, 5, dtype=torch.float64, device=device, requires_grad=True)
    kept, none = torch.full((1, 2, 4096, 1), 3, device=device), torch.zeros(1, 4096, 3, dtype=torch.int64, device=device)
    results = ops.gather_kept(k, v, log_factor, kept, none, 1, True, custom)[:3]
    sum(x[:, :, 0].sum() for x in results).backward()
    for x in (k, v, log_factor):
        assert (x.grad[:, :, 3] == 4096.0).all() and not x.grad[:, :, [0, 1, 2, 4]].any()


def test_nan_stays_in_its_places(device):
    """A NaN of a key reaches no place without a key, and the NaN of a log factor no other place."""
    of = places(device=device)
    for dtype in (torch.float64, torch.float32):
        given = [x.contiguous() for x in rows(of, 4, 4, dtype, device)]
        clean = ops.gather_kept(*given, *of[:3], True, True)
        for x in given:
            x[:, :, 11] = torch.nan
        dirty = ops.gather_kept(*given, *of[:3], True, True)
        places_of_it = expected_rows(*given, of, False)[2].isnan()
        assert places_of_it.any()
        for name, x, y in zip(("keys", "values", "gate"), dirty, clean, strict=False):
            has_nan = x.isnan().reshape(*places_of_it.shape, -1).any(-1)
            assert torch.equal(has_nan, places_of_it), name
            if name != "gate":
                assert torch.equal(x[~places_of_it], y[~places_of_it])
        assert not dirty[3].isnan().any() and not dirty[4].isnan().any()


def test_gradients_of_some_results(device):
    of = places(device=device)
    given = [x.requires_grad_() for x in rows(of, 4, 4, torch.float64, device)]
    for used in (slice(0, 1), slice(1, 3)):
        grads = [
            torch.autograd.grad(
                sum(x.sin().sum() for x in ops.gather_kept(*given, *of[:3], True, custom)[used]), given, allow_unused=True
            )
            for custom in (True, False)
        ]
        for x, y in zip(*grads, strict=True):
            assert torch.equal(x, torch.zeros_like(x) if y is None else y)


def test_infinite_factors_are_as_nan(device):
    of = places(device=device)
    for dtype in (torch.float64, torch.float32):
        k, v, log_factor = rows(of, 4, 4, dtype, device)
        for odd in (torch.inf, -torch.inf):
            results = []
            for x in (odd, torch.nan):
                log_factor[..., 11] = x
                results.append(ops.gather_kept(k, v, log_factor, *of[:3], True, True)[2:])
            assert all(torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0)) for x, y in zip(*results, strict=True))


def test_second_derivatives(device):
    of = places(lengths=(12, 5), block=3, window=2, count=2, b=1, device=device)
    given = [x.contiguous().requires_grad_() for x in rows(of, 2, 3, torch.float64, device)]

    def function(*given):
        return ops.gather_kept(*given, *of[:3], False, False)[:3]

    assert torch.autograd.gradcheck(function, given) and torch.autograd.gradgradcheck(function, given)
    results = ops.gather_kept(*given, *of[:3], True, True)[:3]
    grads = torch.autograd.grad([x.sin().sum() for x in results], given, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(sum(x.sum() for x in grads), given)


# ---- steps

LIMITS = 6, 5, 8  # K, W and B


class Steps(NamedTuple):
    """Tokens of a state, and its slots at first: arguments of `kept_step_`."""

    tokens: list[tuple]  # q, k, v, log_input_gate and log_decay of each
    others: list[tuple]  # outputs for other keys, and the log of the sums of their weights
    slots: tuple[Tensor, ...]
    counts: list[Tensor | None]
    limits: tuple[int, int, int] = LIMITS
    first: int = 0  # position of the first token


def steps(
    n=40, b=2, h=4, hk=2, d=16, dv=8, decay=True, padding=False, ties=False, full=None, dtype=torch.bfloat16, device="cpu"
) -> Steps:
    """`full`: K, W and B of a state that has all the keys it can have. None: it has none, and LIMITS."""
    sizes = (h, d), (hk, d), (hk, dv)
    rows = [torch.randn(b, n, heads, width, dtype=dtype, device=device).transpose(1, 2) for heads, width in sizes]
    wide = eager.compute_dtype(dtype)
    gate, log_decay = torch.randn(2, b, hk, n, dtype=wide, device=device)
    gate = gate.round() if ties else gate
    log_decay = -log_decay.square()
    log_decay[..., n // 2] = -3000.0  # counts as -1000
    tokens = [
        (*(x[:, :, i : i + 1] for x in rows), gate[..., i : i + 1], log_decay[..., i : i + 1] if decay else None)
        for i in range(n)
    ]
    others = [
        (torch.randn(b, 1, h, dv, dtype=dtype, device=device).transpose(1, 2), torch.randn(b, h, 1, dtype=wide, device=device))
        for _ in range(n)
    ]
    for i, (other, lse) in enumerate(others[::3]):  # no key, and keys that weigh more or less than all others together
        lse[:, 0], lse[:, 1] = -torch.inf, 90.0 * (-1) ** i
        other[:, 0] = 0
    limits = full or LIMITS
    slots = sum(limits)
    state = [torch.zeros(b, hk, slots, width, dtype=dtype, device=device) for width in (d, dv)]
    factors = torch.zeros(b, hk, slots, dtype=torch.float64, device=device)
    state = *state, factors, torch.full((b, hk, slots), -1, device=device)
    counts = [(torch.arange(b, device=device) + i) % 3 > 0 if padding else None for i in range(n)]
    if full is None:
        return Steps(tokens, others, state, counts)
    kept, window, block = limits
    for x in state[:3]:
        x.normal_()
    first = 3 * kept // block * block + block - n // 2  # a block ends among these tokens
    recent = torch.arange(first - first % block - window, first, device=device)
    chosen = torch.rand(b, hk, int(recent[0]), device=device).argsort(-1)[..., :kept]
    taken = torch.cat([chosen, recent.expand(b, hk, -1)], dim=-1)
    state[3].scatter_(2, torch.rand(b, hk, slots, device=device).argsort(-1)[..., : taken.shape[2]], taken)
    return Steps(tokens, others, state, counts, limits, first)


def run_steps(of: Steps, step) -> tuple[list, tuple]:
    """Returns the results of `step(token, other, slots, positions, count, limits)` for all tokens, and the slots after them."""
    slots = tuple([x.clone() for x in of.slots])
    positions = torch.full((len(slots[0]),), of.first, device=slots[0].device)
    results = []
    for token, other, count in zip(of.tokens, of.others, of.counts, strict=True):
        if count is not None:  # as `fastmax.nn.kept_keys.step` passes padding
            token = [None if x is None else torch.where(count.view(-1, *(1,) * (x.dim() - 1)), x, 0) for x in token]
            count = count.long()
        results.append(step(tuple(token), other, slots, positions, count, of.limits))
        positions = positions + (1 if count is None else count)
    return results, slots


def in_place(token, other, slots, positions, count, limits=LIMITS):
    return ops.kept_step_(token, other, slots, positions, count, *limits, 0.5)


def check_steps(actual: tuple[list, tuple], of: Steps) -> None:
    """Checks outputs and slots against float64. The slots have no order, but both fill the first free one."""
    dtype = of.slots[0].dtype
    widened = [[None if x is None else x.double() for x in token] for token in of.tokens]
    others = [tuple(x.double() for x in other) for other in of.others]
    slots = tuple(x if x.dtype == torch.int64 else x.double() for x in of.slots)
    exact = of._replace(tokens=widened, others=others, slots=slots)
    expected, slots = run_steps(exact, in_place)
    rounding = 1e-12 if dtype == torch.float64 else max(torch.finfo(dtype).eps, 1e-4)  # a log factor is about -1000
    for o, y in zip(actual[0], expected, strict=True):
        torch.testing.assert_close(o.double(), y, rtol=0, atol=2 * rounding * max(1.0, y.abs().max().item()))
    *rows, positions = actual[1]
    assert torch.equal(positions, slots[3])
    for x, y in zip(rows, slots[:3], strict=True):
        taken = positions >= 0
        torch.testing.assert_close(x[taken].double(), y[taken], rtol=0, atol=1e-9)


STEPS = {
    "decay": {},
    "without decay": {"decay": False},
    "ties": {"decay": False, "ties": True},
    "padding": {"padding": True},
    "group of one": {"h": 2},
    "unaligned": {"d": 5, "dv": 3},
    "unaligned values": {"dv": 3},
    "wide keys": {"d": 200, "n": 20},
    "many keys": {"full": (256, 128, 256), "n": 5},
    "as many keys as kernels have": {"full": (2048, 1792, 256), "n": 3, "d": 8, "b": 1},
    "many unaligned keys": {"full": (300, 9, 64), "d": 5, "dv": 3, "n": 5},
    "wide values": {"dv": 200, "n": 20},
}


@pytest.mark.parametrize("options", STEPS.values(), ids=STEPS)
def test_kept_step(options, device):
    for dtype in DTYPES:
        of = steps(**options, dtype=dtype, device=device)
        check_steps(run_steps(of, in_place), of)


def test_opcheck_kept_step(device):
    for options in ({}, {"decay": False, "padding": True}):
        of = steps(n=1, **options, device=device)
        positions = torch.zeros(2, dtype=torch.int64, device=device)
        count = None if of.counts[0] is None else of.counts[0].long()
        arguments = *of.tokens[0], *of.others[0], *of.slots, positions, count, *LIMITS, 0.5
        torch.library.opcheck(torch.ops.fastmax.kept_step_.default, arguments)


def test_kept_step_refuses_to_record(device):
    of = steps(n=1, device=device)
    of.tokens[0][1].requires_grad_()
    with pytest.raises(RuntimeError, match="step_ writes over the state that a gradient would need"):
        in_place(of.tokens[0], of.others[0], of.slots, torch.zeros(2, dtype=torch.int64, device=device), None)


@pytest.mark.cuda
@pytest.mark.parametrize("d, dv", [(16, 8), (5, 3)])
def test_kernels_run(d, dv, capfd):
    """In all dtypes that they have, for k and v of any strides, and into memory that had NaN."""
    device = torch.device("cuda")
    if extension.problem(device) is not None:
        pytest.skip(extension.problem(device))
    of, (rank, index, earlier) = places(device=device), candidates(device=device)
    extension.set_debugging(True)
    try:
        for dtype in DTYPES[1:]:
            for given in (rows(of, d, dv, dtype, device), [x.mT.contiguous().mT for x in rows(of, d, dv, dtype, device)]):
                poison_free_memory(device)
                leaves = [x.requires_grad_() for x in given]
                results = ops.gather_kept(*leaves, *of[:3], True, True)
                check_rows(results, expected_rows(*given, of, True), dtype)
                poison_free_memory(device)
                grads = torch.autograd.grad([x.float().square().sum() for x in results[:3]], leaves)
                plain = ops.gather_kept(*leaves, *of[:3], True, False)
                expected = torch.autograd.grad([x.float().square().sum() for x in plain[:3]], leaves)
                assert all(relative(x, y.double()) <= 2 * torch.finfo(dtype).eps for x, y in zip(grads, expected, strict=True))
        ops.largest_so_far(rank, index, earlier, 4)
        run_steps(steps(n=2, d=d, dv=dv, device=device), in_place)
    finally:
        extension.set_debugging(False)
    printed = capfd.readouterr().err
    for name in (
        "gather_kept: gather_sm80",
        "gather_kept_backward: gather_sm80",
        "largest_so_far: choice_sm80",
        "kept_step_: kept_step_sm80",
    ):
        assert f"fastmax::{name}" in printed


@pytest.mark.cuda
def test_wide_choices_run_pytorch_operations(device):
    """More kept keys than kernels have."""
    of = places(lengths=(2500,), block=256, window=128, count=2100, b=1, hk=1, device=device)
    given = [x.requires_grad_() for x in rows(of, 8, 8, torch.bfloat16, device)]
    results = ops.gather_kept(*given, *of[:3], True, True)
    assert all(map(torch.equal, results, eager.gather_kept(*given, *of[:3], True)))
    torch.autograd.grad([x.float().sum() for x in results[:3]], given)
