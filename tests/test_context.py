"""Layers and calls whose tokens are spread over ranks (`ContextParallel`, `context_parallel`), against one process."""

import copy
import ctypes
import math
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random
from unittest import mock

import pytest
import torch
from processes import check_messages, messages, run
from test_distributed import cuts
from test_parallel_styles import EXACT, make_layer
from test_sharding import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastmax import FASTMultiHeadAttention, fastmax_attention, flash_attention
from fastmax.decoding import init_state, prefill
from fastmax.distributed import ContextParallel, Layout, TensorParallel, context_parallel, rank_consistency
from fastmax.distributed.context import Context
from fastmax.distributed.layout import contiguous_layout
from fastmax.nn import kept_keys
from fastmax.prepare import sharded_dispatch

N = 22
LAYOUTS = {
    "contiguous": "contiguous",
    "zigzag": "zigzag",
    "parts of every kind": Layout((((0, 1), (9, 15)), (), ((1, 9), (15, 22)))),
}
LAYERS = {
    "defaults": {"exact_window": 3, "num_kv_heads": 4},
    "wide values": {"exact_window": 3, "num_kv_heads": 4, "value_dim": 11},
    "input gate": {"exact_window": 3, "num_kv_heads": 4, "input_gate": True},
    "input gate, ring": {"exact_window": 0, "input_gate": True, "decay": False, "algorithm": "quadratic"},
    "linear": {"exact_window": 0, "p": 1, "algorithm": "linear", "conv": 3},
    "softmax": {"attention": "softmax", "decay": False},
    "window": {"attention": "softmax", "window": 4, "conv": 0},
    "kept keys": {"exact_window": 2, "num_kv_heads": 4, "kept_keys": 2},
    "kept keys without decay": {"exact_window": 5, "kept_keys": 3, "decay": False, "value_dim": 11},
}


def own_tokens(context: Context, tokens: int) -> Tensor:
    return context.own(torch.arange(tokens), 0)


def check_layer(group, options, layout, accompanying, recompute=False, block=3):
    with mock.patch.object(kept_keys, "_BLOCK", block):
        compare_layer(group, options, layout, accompanying, recompute)


def compare_layer(group, options, layout, accompanying, recompute):
    mesh, layer = mesh_of(group), make_layer(options)
    parallel = parallelize_module(make_layer(options), mesh, ContextParallel(layout))
    own = own_tokens(parallel.context, N)
    x = torch.randn(1 if "cu_seqlens" in accompanying else 2, N, 32, dtype=torch.float64)
    of_rank = {name: y[:, own] if name == "attention_mask" else y for name, y in accompanying.items()}
    whole, part = x.clone().requires_grad_(), x[:, own]
    if "attention_mask" in of_rank:  # what padding holds reaches nothing
        part = part.masked_fill(~of_rank["attention_mask"].unsqueeze(-1), math.nan)
    part.requires_grad_()
    expected = layer(whole, **accompanying)
    y = checkpoint(parallel, part, use_reentrant=False, **of_rank) if recompute else parallel(part, **of_rank)
    seen = accompanying.get("attention_mask", torch.ones(1, N, dtype=torch.bool)).unsqueeze(-1).expand(len(x), N, 1)
    expected, y = expected * seen, y * seen[:, own]
    assert_close(y, expected[:, own], **EXACT)
    expected.pow(2).sum().backward()
    y.pow(2).sum().backward()
    assert_close(part.grad, whole.grad[:, own], **EXACT)
    for (name, parameter), got in zip(layer.named_parameters(), parallel.parameters(), strict=True):
        torch.distributed.all_reduce(got.grad, group=group)
        assert_close(got.grad, parameter.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer(options, layout):
    run(check_layer, 3, options, layout, {})


@pytest.mark.parametrize("seed", range(20))
def test_kept_keys_of_any_parts(seed):
    random = Random(seed)
    options = {"num_kv_heads": random.choice([2, 8]), "kept_keys": random.randint(1, 9), "exact_window": random.randint(1, 9)}
    options["decay"] = random.random() < 0.8
    ranks = random.randint(2, 4)
    run(check_layer, ranks, options, cuts(random, N, ranks), {}, random.random() < 0.3, random.choice([1, 2, 4, 7, 16, 30]))


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("name", ["defaults", "input gate"])
def test_packed_and_padded(name, layout):
    packed = {"cu_seqlens": torch.tensor([0, 1, 8, 8, 13, N], dtype=torch.int32)}
    run(check_layer, 3, LAYERS[name], layout, packed)
    at = torch.arange(N)
    padded = {"attention_mask": torch.stack([at >= 5, at < 17])}
    run(check_layer, 3, LAYERS[name], layout, padded)


def test_packed_with_padding():
    at = torch.arange(N)
    packed = {"cu_seqlens": torch.tensor([0, 1, 8, 8, 13, N], dtype=torch.int32)}
    packed["attention_mask"] = ((at != 1) & (at != 12) & (at != N - 1)).unsqueeze(0)
    run(check_layer, 3, LAYERS["defaults"], LAYOUTS["parts of every kind"], packed)


@pytest.mark.parametrize("name", ["defaults", "kept keys"])
@pytest.mark.parametrize("ranks, layout", [(1, "contiguous"), (1, "zigzag"), (4, "contiguous")])
def test_other_numbers_of_ranks_and_computing_again(name, ranks, layout):
    run(check_layer, ranks, LAYERS[name], layout, {}, True)


def test_kept_keys_of_normalised_rows():
    run(check_layer, 3, LAYERS["kept keys"] | {"normalize": "token"}, LAYOUTS["parts of every kind"], {})


def check_with_heads(group):
    mesh = mesh_of(group, (2, 2), ("tokens", "heads"))
    layer = make_layer(LAYERS["defaults"])
    parallel = parallelize_module(copy.deepcopy(layer), mesh["heads"], TensorParallel())
    parallelize_module(parallel, mesh["tokens"], ContextParallel("zigzag"))
    own = own_tokens(parallel.context, N)
    x = torch.randn(2, N, 32, dtype=torch.float64)
    expected, y = layer(x), parallel(x[:, own])
    assert_close(y, expected[:, own], **EXACT)
    expected.pow(2).sum().backward()
    y.pow(2).sum().backward()
    for (name, parameter), got in zip(layer.named_parameters(), parallel.parameters(), strict=True):
        local = got.grad.to_local()
        torch.distributed.all_reduce(local, group=mesh["tokens"].get_group())
        assert_close(got.grad.full_tensor(), parameter.grad, **EXACT, msg=lambda text, name=name: f"{name}: {text}")


def test_tokens_and_heads():
    run(check_with_heads, 4)


@mock.patch.object(kept_keys, "_BLOCK", 3)
def check_manager(group, layout, name):
    mesh = mesh_of(group)
    layer, module = make_layer(LAYERS[name]), FASTMultiHeadAttention(mask=True, normalize="token")
    x, q = torch.randn(2, N, 32, dtype=torch.float64), torch.randn(2, 4, N, 8, dtype=torch.float64)

    def everything(x: Tensor, q: Tensor) -> list[Tensor]:
        gated = {"causal": True, "log_input_gate": q[..., 0]}
        calls = fastmax_attention(q, q, q, exact_window=2), flash_attention(q, q, q, causal=True, window=5), module(q, q, q)
        calls += fastmax_attention(q, q, q, exact_window=2, **gated), flash_attention(q, q, q, **gated)
        return [layer(x), *(y.transpose(1, 2) for y in calls)]

    expected, kept = everything(x, q), [x.clone(), q.clone()]
    with context_parallel(mesh, buffers=[x, q], buffer_seq_dims=[1, 2], no_restore_buffers={q}, layout=layout):
        outputs = everything(x, q)
    own = own_tokens(Context(mesh, layout), N)
    for y, whole in zip(outputs, expected, strict=True):
        assert_close(y, whole[:, own], **EXACT)
    assert torch.equal(x, kept[0]) and torch.equal(q, kept[1][:, :, own])
    assert_close(layer(x), expected[0], **EXACT)  # outside it is one rank's again


@pytest.mark.parametrize("name", ["defaults", "kept keys"])
@pytest.mark.parametrize("ranks, layout", [(1, "contiguous"), (2, "contiguous"), (2, "zigzag")])
def test_manager(ranks, layout, name):
    run(check_manager, ranks, layout, name)


def check_threads(group):
    """Checks that calls of another thread ignore the context, and that the context of a thread ends with its block."""
    mesh, q = mesh_of(group), torch.randn(1, 2, 6, 4, dtype=torch.float64)
    expected = fastmax_attention(q, q, q, normalize="sequence")
    with ThreadPoolExecutor(1) as thread, context_parallel(mesh):
        outer = sharded_dispatch.current()
        assert thread.submit(sharded_dispatch.current).result() is None
        assert torch.equal(thread.submit(fastmax_attention, q, q, q, normalize="sequence").result(), expected)

        def in_another_context() -> bool:
            with context_parallel(mesh):
                return sharded_dispatch.current() is not outer

        assert thread.submit(in_another_context).result()
        assert thread.submit(sharded_dispatch.current).result() is None
        assert sharded_dispatch.current() is outer
        with context_parallel(mesh):
            assert sharded_dispatch.current() is not outer
        assert sharded_dispatch.current() is outer
    assert sharded_dispatch.current() is None


def test_a_context_is_of_one_thread():
    run(check_threads, 2)


class Nested(torch.autograd.Function):
    """y = function(x), whose backward runs so many backwards inside each other that autograd takes a thread of its own."""

    @staticmethod
    def forward(ctx, x: Tensor, function, depth: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function, ctx.depth = function, depth
        return x.clone() if depth else function(x).detach()

    @staticmethod
    def backward(ctx, grad: Tensor):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = Nested.apply(x, ctx.function, ctx.depth - 1) if ctx.depth else ctx.function(x)
        y.backward(grad)
        return x.grad, None, None


def check_recomputing_in_another_thread(group):
    mesh, layer, threads = mesh_of(group), make_layer(LAYERS["defaults"]), []

    def noted(x: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        return layer(x)

    x = torch.randn(2, N, 32, dtype=torch.float64)
    whole = x.clone().requires_grad_()
    layer(whole).sum().backward()
    with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
        part = x.clone().requires_grad_()
        # As where a GPU's backward computes activations again.
        Nested.apply(part, lambda x: checkpoint(noted, x, use_reentrant=False), 70).sum().backward()
    assert threading.get_ident() not in threads[-2:]
    assert_close(part.grad, whole.grad[:, own_tokens(Context(mesh), N)], **EXACT)


def test_threads_of_autograd_are_in_the_context_of_the_backward():
    run(check_recomputing_in_another_thread, 2)


def check_compiled(group):
    mesh, q = mesh_of(group), torch.randn(1, 2, N, 4, dtype=torch.float64)
    own = own_tokens(Context(mesh), N)
    part = q[:, :, own].contiguous()
    attend = torch.compile(lambda q: fastmax_attention(2.0 * q, q, q, causal=True, exact_window=2) + 1.0, backend="eager")
    whole, alone = (fastmax_attention(2.0 * x, x, x, causal=True, exact_window=2) + 1.0 for x in (q, part))
    for _ in range(2):
        assert_close(attend(part), alone, **EXACT)
        with context_parallel(mesh):
            assert_close(attend(part), whole[:, :, own], **EXACT)


@pytest.mark.parametrize("steals", [False, True], ids=["as installed", "stolen references"])
def test_a_context_keeps_its_references(steals, monkeypatch):
    """PyTorch 2.11 has a thread-local object that takes a reference it does not own; the context must survive that."""
    stash = torch._C._stash_obj_in_tls

    def stealing(key: str, x: object) -> None:
        before = sys.getrefcount(x)
        stash(key, x)
        if sys.getrefcount(x) > before:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(x))

    if steals:
        monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stealing)
    sharded_dispatch._stash_steals.cache_clear()
    outer, inner = object(), object()
    counts = [sys.getrefcount(x) for x in (outer, inner)]
    for _ in range(3):
        with sharded_dispatch.entered(outer):
            with sharded_dispatch.entered(inner), sharded_dispatch.entered(None):
                assert sharded_dispatch.current() is None
            assert sharded_dispatch.current() is outer
    assert [sys.getrefcount(x) for x in (outer, inner)] == counts
    sharded_dispatch._stash_steals.cache_clear()


def test_compiled_code_looks_where_it_is():
    run(check_compiled, 2)


def check_layer_that_refuses(group):
    mesh, found = mesh_of(group), []
    x = torch.randn(1, 4, 32, dtype=torch.float64)
    layer, plain = make_layer(LAYERS["defaults"]), {"cu_seqlens": torch.tensor([0, 3, 8], dtype=torch.int32)}
    parallel = parallelize_module(copy.deepcopy(layer), mesh, ContextParallel())
    fixed = parallelize_module(copy.deepcopy(layer), mesh, ContextParallel(contiguous_layout([4, 4])))
    wrong = [
        lambda: parallel(x if group.rank() == 0 else x.float(), **plain),
        lambda: parallel(x, **(plain if group.rank() == 0 else {"cu_seqlens": torch.tensor([0, 9, 8], dtype=torch.int32)})),
        lambda: fixed(x if group.rank() == 0 else x[:, :3]),
    ]
    for function in wrong:
        found += messages([function])
        assert parallel(x, **plain).shape == x.shape  # ranks are in step
    return found


def test_a_layer_that_refuses_its_arguments_tells_the_others():
    for rank, found in enumerate(run(check_layer_that_refuses, 2)):
        told = "fastmax.distributed: rank 1 refused its arguments: "
        expected = (
            "TypeError: x must have the dtype of the weights",
            "ValueError: cu_seqlens must go from 0 to n = 8 without falling",
            "ValueError: x must have the 4 tokens of rank 1 in the layout, got 3",
        )
        for message, text in zip(found, expected, strict=True):
            assert message.startswith(told + text if rank == 0 else text.split(": ", 1)[1]), message


IN_STEP = {  # what rank 1 does otherwise: its error, which rank 0 is told, or twice the error of both
    "batch": ("fastmax.distributed: batch of x must be the same on all ranks, got 1 on rank 0 and 2 on rank 1",) * 2,
    "sequences": ("fastmax.distributed: cu_seqlens must be the same on all ranks, got ",) * 2,
    "a mask": ("fastmax.distributed: function must be the same on all ranks, got ",) * 2,
    "state": ("ValueError: state must be None in a context parallel layer",),
    "kept keys": ("fastmax.distributed: kept_keys must be the same on all ranks, got 0 on rank 0 and 2 on rank 1",) * 2,
    "input gate": ("fastmax.distributed: log_input_gate must be the same on all ranks, got None on rank 0 and given on rank 1",)
    * 2,
    "projection": ("ValueError: qkv_proj must return 64 channels",),
    "zigzag and sequences": ("ranks must hold (4, 4) tokens in a zigzag layout of 8, got (5, 3)",) * 2,
    "another name": ("TypeError: scale is not an argument of fastmax_attention",),
    "an argument too many": ("TypeError: too many positional arguments",),
    "no tensor": ("TypeError: q must be a torch.Tensor, got None",),
    "one dimension": ("ValueError: q must be 4-d",),
    "another name of a module": ("TypeError: scale is not an argument of FASTMultiHeadAttention.forward",),
    "mask of a module": ("TypeError: mask must be a bool",),
    "dropout of a module": ("TypeError: dropout must be a real number",),
    "noise of a module": ("ValueError: drop_noise must have ",),
    "module of a context": ("TypeError: mask must be a bool",),
}


def call_otherwise(case: str, differs: bool, mesh) -> None:
    tokens = 4 if case != "zigzag and sequences" else 3 if differs else 5
    x, q = torch.randn(1, tokens, 32, dtype=torch.float64), torch.randn(1, 2, 4, 8, dtype=torch.float64)
    layer = parallelize_module(make_layer(LAYERS["defaults"]), mesh, ContextParallel("zigzag" if tokens != 4 else "contiguous"))
    module = FASTMultiHeadAttention(mask=True)
    real, cu_seqlens = torch.ones(1, 4, dtype=torch.bool), torch.tensor([0, 3, 8], dtype=torch.int32)
    if case == "batch":
        batch = 2 if differs else 1
        layer(x.expand(batch, -1, -1), attention_mask=real.expand(batch, -1))
    elif case == "sequences":  # in those of rank 1 alone there is padding between real tokens
        gap = torch.tensor([[True, True, True, False]]) if not differs else torch.tensor([[False, True, True, True]])
        layer(x, attention_mask=gap, cu_seqlens=torch.tensor([0, 5, 8], dtype=torch.int32) if not differs else cu_seqlens)
    elif case == "a mask":
        layer(x, attention_mask=real if differs else None)
    elif case == "state":
        layer(x, layer.init_state(1) if differs else None)
    elif case == "kept keys":
        options = LAYERS["input gate"] | {"kept_keys": 2 if differs else 0}
        parallelize_module(make_layer(options), mesh, ContextParallel())(x)
    elif case == "input gate":
        parallelize_module(make_layer(LAYERS["input gate" if differs else "defaults"]), mesh, ContextParallel())(x)
    elif case == "projection":
        if differs:
            layer.qkv_proj = nn.Linear(32, 48, bias=False, dtype=torch.float64)
        layer(x)
    elif case == "zigzag and sequences":
        layer(x, cu_seqlens=cu_seqlens if differs else None)
    elif case == "module of a context":
        parallelize_module(module, mesh, ContextParallel())
        module(q, q, q, mask=3 if differs else None)
    else:
        with context_parallel(mesh, layout="zigzag" if case in ("no tensor", "one dimension") else "contiguous"):
            if case == "another name":
                fastmax_attention(q, q, q, causal=True, **({"scale": 1.0} if differs else {}))
            elif case == "an argument too many":
                fastmax_attention(q, q, q, *((True,) if differs else ()))
            elif case == "no tensor":
                fastmax_attention(None if differs else q, q, q)
            elif case == "one dimension":
                fastmax_attention(q[0, 0, 0] if differs else q, q, q)
            elif case == "another name of a module":
                module(q, q, q, **({"scale": 1.0} if differs else {}))
            elif case == "mask of a module":
                module.mask = 3 if differs else True
                module(q, q, q)
            elif case == "dropout of a module":
                module.eval().dropout = "a" if differs else 0.0
                module(q, q, q)
            else:
                module.eval().dropout = 0.5
                module(q, q, q, q[:, :, :3] if differs else q)


def check_in_step(group, case):
    mesh = mesh_of(group)
    layer = parallelize_module(make_layer(LAYERS["defaults"]), mesh, ContextParallel())
    x, limit = torch.randn(1, 4, 32, dtype=torch.float64), rank_consistency.time_limit()
    rank_consistency.set_time_limit(30.0)
    found = messages([lambda: call_otherwise(case, group.rank() == 1, mesh)])[0]
    assert layer(x).shape == x.shape
    rank_consistency.set_time_limit(limit.total_seconds())
    return found


@pytest.mark.parametrize("case", IN_STEP)
def test_a_rank_that_differs_is_an_error_on_all_and_ranks_stay_in_step(case):
    of_rank_0, of_rank_1 = run(check_in_step, 2, case)
    message, *alike = IN_STEP[case]
    told = "" if alike else "fastmax.distributed: rank 1 refused its arguments: "
    assert of_rank_0.startswith(told + message), of_rank_0
    assert of_rank_1.startswith(message if alike else message.split(": ", 1)[1]), of_rank_1


def check_options_that_differ(group, layout, options, changed):
    layer = parallelize_module(make_layer(options), mesh_of(group), ContextParallel(layout))
    x = torch.randn(1, own_tokens(layer.context, 8).numel(), 32, dtype=torch.float64)
    name, value = changed
    expected = getattr(layer, name)
    if group.rank() == 1:
        setattr(layer, name, value)
    found = messages([lambda: layer(x)])[0]
    setattr(layer, name, expected)
    assert layer(x).shape == x.shape
    return found


@pytest.mark.parametrize("layout", ["contiguous", contiguous_layout([4, 4])], ids=["contiguous", "Layout"])
@pytest.mark.parametrize(
    ("options", "changed", "message"),
    [
        ({}, ("rope_base", 10.0), "rope_base must be the same on all ranks, got 10000.0 on rank 0 and 10.0 on rank 1"),
        ({}, ("rope_dim", 4), "rope_dim must be the same on all ranks, got 2 on rank 0 and 4 on rank 1"),
        ({"attention": "softmax"}, ("window", 2), "window must be the same on all ranks, got None on rank 0 and 2 on rank 1"),
    ],
)
def test_options_of_the_layer_are_compared(layout, options, changed, message):
    assert run(check_options_that_differ, 2, layout, options, changed) == [f"fastmax.distributed: {message}"] * 2


def check_exchanges(group, options, layout, is_padded):
    """Checks how often ranks compare arguments in a forward of a layer. The backward compares none."""
    parallel = parallelize_module(make_layer(options), mesh_of(group), ContextParallel(layout))
    x = torch.randn(1, own_tokens(parallel.context, N).numel(), 32, dtype=torch.float64, requires_grad=True)
    mask = torch.ones(x.shape[:2], dtype=torch.bool) if is_padded else None
    with mock.patch.object(rank_consistency, "_checker_of", wraps=rank_consistency._checker_of) as exchanges:
        y = parallel(x, attention_mask=mask)
        of_forward = exchanges.call_count
        y.sum().backward()
        assert exchanges.call_count == of_forward
    return of_forward


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("options", "count"), [({"conv": 3}, 3), ({"conv": 0}, 2)])
def test_a_forward_exchanges_arguments_few_times(options, count, layout):
    assert run(check_exchanges, 3, options, layout, False) == [count] * 3
    assert run(check_exchanges, 3, options, layout, True) == [count + 1] * 3


def check_positions(group, layout):
    context = Context(mesh_of(group), layout)
    own = own_tokens(context, N)
    context.refuse_local_positions(own.unsqueeze(0))
    context.refuse_local_positions(own.expand(2, -1) - 1)  # padding on the left
    local = torch.arange(own.numel()).expand(2, -1)

    def counts_from_the_first_local_token():
        context.refuse_local_positions(local)
        context.layout_of(own.numel())  # ranks that hold the first tokens learn of the error here

    if group.size() == 1:
        counts_from_the_first_local_token()
        return []
    return messages([counts_from_the_first_local_token])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_positions_that_begin_at_each_rank_are_refused(layout):
    for (found,) in run(check_positions, 2, layout):
        assert "position_ids must be the positions of this rank's tokens in the whole sequence, got 0, 1, 2, ..." in found
    assert run(check_positions, 1, layout) == [[]]


def check_refusals(group):
    mesh = mesh_of(group)
    layer = parallelize_module(make_layer(LAYERS["defaults"]), mesh, ContextParallel())
    eager = parallelize_module(make_layer({"use_custom_gradient": False}), mesh, ContextParallel())
    fixed = parallelize_module(make_layer({}), mesh, ContextParallel(contiguous_layout([N, 1])))
    zigzag = parallelize_module(make_layer({}), mesh, ContextParallel("zigzag"))
    keeping = make_layer({"exact_window": 3, "input_gate": True, "kept_keys": 2})
    keeping.qkv_proj.register_forward_hook(lambda *_: pytest.fail("computed before it was refused"))
    x, q = torch.randn(1, 8, 32, dtype=torch.float64), torch.randn(1, 2, 8, 4, dtype=torch.float64)
    state = init_state(1, 2, 4, dtype=torch.float64)
    # Padding between the tokens of two ranks.
    gap = torch.arange(8).unsqueeze(0) < 6 if group.rank() == 0 else torch.arange(8).unsqueeze(0) > 1
    cu_seqlens = torch.tensor([0, 3, 16], dtype=torch.int32)

    def in_context(function, **options):
        with context_parallel(mesh, **options):
            function()

    return messages(
        [
            lambda: ContextParallel("striped")._apply(make_layer({}), mesh),
            lambda: parallelize_module(nn.Linear(2, 2), mesh, ContextParallel()),
            lambda: ContextParallel(contiguous_layout([1, 1, 1]))._apply(make_layer({}), mesh),
            lambda: in_context(lambda: keeping(x, attention_mask=gap)),
            lambda: parallelize_module(keeping, mesh, ContextParallel())(x, cu_seqlens=cu_seqlens),
            lambda: layer(x, layer.init_state(1)),
            lambda: layer.step_(x[:, :1], layer.init_state(1)),
            lambda: layer(x, attention_mask=gap),
            lambda: layer(x, cu_seqlens=cu_seqlens, attention_mask=gap),
            lambda: eager(x),
            lambda: fixed(x),
            lambda: zigzag(x[:, : 3 + 4 * group.rank()]),
            lambda: in_context(lambda: prefill(q, q, q, state)),
            lambda: in_context(lambda: fastmax_attention(q, q, q, normalize="sequence")),
            lambda: in_context(lambda: None, buffers=[x], buffer_seq_dims=[]),
            lambda: in_context(lambda: None, no_restore_buffers={x}),
            lambda: in_context(lambda: None, buffers=[x.mT], buffer_seq_dims=[2]),
            lambda: in_context(lambda: None, buffers=[x[:, :-1], x[:, 1:]], buffer_seq_dims=[1, 1]),
            lambda: in_context(lambda: None, buffers=[x], buffer_seq_dims=[3]),
            lambda: in_context(lambda: None, buffers=[x], buffer_seq_dims=["1"]),
            lambda: in_context(lambda: None, buffers=None),
            lambda: Context(mesh).own([1, 2], 0),
            lambda: Context(mesh).own(x, -4),
        ]
    )


def test_refuses_by_name():
    check_messages(
        check_refusals,
        'layout must be "contiguous", "zigzag" or a Layout',
        "ContextParallel needs a FastmaxSelfAttention or FASTMultiHeadAttention, got Linear without one",
        "layout must be for the 2 ranks of the mesh, got one for 3",
        "attention_mask must be None in a context parallel layer with kept_keys, got a tensor of shape (",
        "cu_seqlens must be None in a context parallel layer with kept_keys, got a tensor of shape (",
        "state must be None in a context parallel layer",
        "state must be None in a context parallel layer",
        "attention_mask of a context parallel layer must have padding only on the left or on the right",
        "attention_mask of a context parallel layer must have padding only on the left or on the right",
        "use_custom_gradient=False is not supported with context parallelism",
        "x must have the ",
        "ranks must hold (5, 5) tokens in a zigzag layout of 10, got (3, 7)",
        "decoding needs whole sequences on one rank",
        'normalize must be False or "token"',
        "buffer_seq_dims must have one dimension per buffer, got 0 for 1",
        "no_restore_buffers must be a subset of buffers",
        "buffers[0] must be contiguous",
        "buffers[1] shares memory with buffers[0], and each is written in place: pass a copy",
        "buffer_seq_dims[0] must be a dimension of a tensor with 3, got 3",
        "buffer_seq_dims[0] must be an int, got '1'",
        "buffers must be a sequence, got None",
        "x must be a torch.Tensor, got ",
        "dim must be a dimension of a tensor with 3, got -4",
    )
