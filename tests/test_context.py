"""Layers and calls whose tokens are spread over ranks (`ContextParallel`, `context_parallel`), against one process."""

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from processes import check_messages, messages, run
from test_parallel_styles import EXACT, make_layer
from test_sharding import mesh_of
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastmax import FASTMultiHeadAttention, fastmax_attention, flash_attention, init_state, prefill, spread
from fastmax.distributed import ContextParallel, Layout, TensorParallel, agreement, context_parallel
from fastmax.distributed.context import Context
from fastmax.distributed.layout import contiguous_layout

N = 22
LAYOUTS = {
    "contiguous": "contiguous",
    "zigzag": "zigzag",
    "parts of every kind": Layout((((0, 1), (9, 15)), (), ((1, 9), (15, 22)))),
}
LAYERS = {
    "defaults": {"exact_window": 3, "num_kv_heads": 4},
    "linear": {"exact_window": 0, "p": 1, "algorithm": "linear", "conv": 3},
    "softmax": {"attention": "softmax", "decay": False},
    "window": {"attention": "softmax", "window": 4, "conv": 0},
}


def own_tokens(context: Context, tokens: int) -> Tensor:
    return context.own(torch.arange(tokens), 0)


def check_layer(group, options, layout, accompanying, recompute=False):
    mesh, layer = mesh_of(group), make_layer(options)
    parallel = parallelize_module(make_layer(options), mesh, ContextParallel(layout))
    own = own_tokens(parallel.context, N)
    x = torch.randn(1 if "cu_seqlens" in accompanying else 2, N, 32, dtype=torch.float64)
    of_rank = {name: y[:, own] if name == "key_padding_mask" else y for name, y in accompanying.items()}
    whole, part = x.clone().requires_grad_(), x[:, own]
    if "key_padding_mask" in of_rank:  # what padding holds reaches nothing
        part = part.masked_fill(~of_rank["key_padding_mask"].unsqueeze(-1), math.nan)
    part.requires_grad_()
    expected = layer(whole, **accompanying)
    y = checkpoint(parallel, part, use_reentrant=False, **of_rank) if recompute else parallel(part, **of_rank)
    seen = accompanying.get("key_padding_mask", torch.ones(1, N, dtype=torch.bool)).unsqueeze(-1).expand(len(x), N, 1)
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


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_packed_and_padded(layout):
    packed = {"cu_seqlens": torch.tensor([0, 1, 8, 8, 13, N], dtype=torch.int32)}
    run(check_layer, 3, LAYERS["defaults"], layout, packed)
    at = torch.arange(N)
    padded = {"key_padding_mask": torch.stack([at >= 5, at < 17])}
    run(check_layer, 3, LAYERS["defaults"], layout, padded)


def test_packed_with_padding():
    at = torch.arange(N)
    packed = {"cu_seqlens": torch.tensor([0, 1, 8, 8, 13, N], dtype=torch.int32)}
    packed["key_padding_mask"] = ((at != 1) & (at != 12) & (at != N - 1)).unsqueeze(0)
    run(check_layer, 3, LAYERS["defaults"], LAYOUTS["parts of every kind"], packed)


@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_and_computing_again(ranks):
    run(check_layer, ranks, LAYERS["defaults"], "contiguous", {}, True)


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


def check_manager(group, layout):
    mesh = mesh_of(group)
    layer, module = make_layer(LAYERS["defaults"]), FASTMultiHeadAttention(mask=True, normalize="token")
    x, q = torch.randn(2, N, 32, dtype=torch.float64), torch.randn(2, 4, N, 8, dtype=torch.float64)

    def everything(x: Tensor, q: Tensor) -> list[Tensor]:
        calls = fastmax_attention(q, q, q, exact_window=2), flash_attention(q, q, q, True, window=5), module(q, q, q)
        return [layer(x), *(y.transpose(1, 2) for y in calls)]

    expected, kept = everything(x, q), [x.clone(), q.clone()]
    with context_parallel(mesh, buffers=[x, q], buffer_seq_dims=[1, 2], no_restore_buffers={q}, layout=layout):
        outputs = everything(x, q)
    own = own_tokens(Context(mesh, layout), N)
    for y, whole in zip(outputs, expected, strict=True):
        assert_close(y, whole[:, own], **EXACT)
    assert torch.equal(x, kept[0]) and torch.equal(q, kept[1][:, :, own])
    assert_close(layer(x), expected[0], **EXACT)  # outside it is one rank's again


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_manager(layout):
    run(check_manager, 2, layout)


def check_threads(group):
    """Calls of another thread are of one rank; the context of a thread ends with its block."""
    mesh, q = mesh_of(group), torch.randn(1, 2, 6, 4, dtype=torch.float64)
    expected = fastmax_attention(q, q, q, normalize="sequence")
    with ThreadPoolExecutor(1) as thread, context_parallel(mesh):
        outer = spread.current()
        assert thread.submit(spread.current).result() is None
        assert torch.equal(thread.submit(fastmax_attention, q, q, q, normalize="sequence").result(), expected)

        def in_another_context() -> bool:
            with context_parallel(mesh):
                return spread.current() is not outer

        assert thread.submit(in_another_context).result()
        assert thread.submit(spread.current).result() is None
        assert spread.current() is outer
        with context_parallel(mesh):
            assert spread.current() is not outer
        assert spread.current() is outer
    assert spread.current() is None


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


def check_exchanges(group, options, layout):
    """How often ranks exchange arguments in a forward of a layer; its backward does not."""
    parallel = parallelize_module(make_layer(options), mesh_of(group), ContextParallel(layout))
    x = torch.randn(1, own_tokens(parallel.context, N).numel(), 32, dtype=torch.float64, requires_grad=True)
    with mock.patch.object(agreement, "_exchange_of", wraps=agreement._exchange_of) as exchanges:
        y = parallel(x)
        of_forward = exchanges.call_count
        y.sum().backward()
        assert exchanges.call_count == of_forward
    return of_forward


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("options", "count"), [({"conv": 3}, 3), ({"conv": 0}, 2)])
def test_a_forward_exchanges_arguments_few_times(options, count, layout):
    assert run(check_exchanges, 3, options, layout) == [count - isinstance(layout, Layout)] * 3


def check_refusals(group):
    mesh = mesh_of(group)
    layer = parallelize_module(make_layer(LAYERS["defaults"]), mesh, ContextParallel())
    eager = parallelize_module(make_layer({"use_custom_gradient": False}), mesh, ContextParallel())
    fixed = parallelize_module(make_layer({}), mesh, ContextParallel(contiguous_layout([N, 1])))
    zigzag = parallelize_module(make_layer({}), mesh, ContextParallel("zigzag"))
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
            lambda: layer(x, layer.init_state(1)),
            lambda: layer.step_(x[:, :1], layer.init_state(1)),
            lambda: layer(x, key_padding_mask=gap),
            lambda: layer(x, cu_seqlens=cu_seqlens, key_padding_mask=gap),
            lambda: eager(x),
            lambda: fixed(x),
            lambda: zigzag(x[:, : 3 + 4 * group.rank()]),
            lambda: in_context(lambda: prefill(q, q, q, state)),
            lambda: in_context(lambda: fastmax_attention(q, q, q, normalize="sequence")),
            lambda: in_context(lambda: None, buffers=[x], buffer_seq_dims=[]),
            lambda: in_context(lambda: None, no_restore_buffers={x}),
            lambda: in_context(lambda: None, buffers=[x.mT], buffer_seq_dims=[2]),
        ]
    )


def test_refuses_by_name():
    check_messages(
        check_refusals,
        'layout must be "contiguous", "zigzag" or a Layout',
        "ContextParallel is of FastmaxSelfAttention or FASTMultiHeadAttention, got Linear without one",
        "layout must have the parts of the mesh's 2 ranks, got those of 3",
        "state is of sequences that one rank has as a whole",
        "state is of sequences that one rank has as a whole",
        "key_padding_mask of a context parallel layer must leave the real tokens of each sequence together",
        "key_padding_mask of a context parallel layer must leave the real tokens of each sequence together",
        "use_custom_gradient=False has no context parallel form",
        "x must have the ",
        "ranks must hold (5, 5) tokens in a zigzag layout of 10, got (3, 7)",
        "decoding is of sequences that one rank has as a whole",
        'normalize must be False or "token"',
        "buffer_seq_dims must be as many as buffers, got 0 and 1",
        "no_restore_buffers must be some of buffers",
        "buffers[0] must be contiguous",
    )
