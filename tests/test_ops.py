"""The registered operators inside PyTorch: opcheck, compile, export, autocast, checkpointing, DDP; repeatability; memory."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import processes
import pytest
import torch
from common import (
    CHUNK,
    Case,
    Memory,
    by_algorithm,
    by_causal,
    by_gradient,
    by_layout,
    by_option,
    by_order,
    check_export,
    check_operator,
    compare,
    dtype_id,
    in_turn,
    make_inputs,
    make_options,
    relative,
    run,
    torch_warns,
)
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from fastmax import FASTMultiHeadAttention, eager, fastmax_attention, ops
from fastmax.core.call import Call
from fastmax.core.score import Score
from fastmax.eager.planner import LinearPlan
from fastmax.testing.reference import naive_attention

CASE = Case("", n=24, m=30, b=2, h=4, hk=2, d=8, dv=6)
SQUARE = Case("", n=24, b=2, h=2, d=8)


class Block(nn.Module):
    """Projections around the attention, as a model has them."""

    def __init__(self, width=16, heads=2, **options):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = FASTMultiHeadAttention(**options)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attention(q, k, v).transpose(1, 2).flatten(2))


# ---- opcheck


def operator_arguments(case, device, dtype=torch.float32, layout="contiguous", *, mask=False, noise=False, rpe=False,
                       p=2, causal=False, algorithm="auto"):  # fmt: skip
    """Returns the arguments of torch.ops.fastmax.forward, leaves that need a gradient, and grad_o."""
    inputs, grad_o = make_inputs(case, dtype, device, layout)
    leaves = [x.requires_grad_() for x in inputs.values()]
    mask = torch.rand(case.b, case.m, device=device) > 0.3 if mask else None
    noise = torch.randn(case.b, case.h, case.n, case.dv, device=device, dtype=dtype) if noise else None
    rpe = torch.randn(case.n + case.m - 1, case.d, device=device, dtype=dtype, requires_grad=True) if rpe else None
    dropout = 0.2 if noise is not None else 0.0
    return (*leaves, mask, noise, rpe, *[None] * 4, 0.5, 1.0, 1.0, 0.5, p, causal, dropout, algorithm, False), grad_o


OPERATOR_CALLS = {
    "defaults": (CASE, {}),
    "causal, linear": (CASE, {"causal": True, "algorithm": "linear"}),
    "p=1, linear": (CASE, {"p": 1, "algorithm": "linear"}),
    "mask, noise": (CASE, {"mask": True, "noise": True, "causal": True}),
    "rpe": (CASE, {"rpe": True}),
    "token-major": (SQUARE, {"layout": "token-major"}),
    "packed qkv": (SQUARE, {"layout": "packed qkv"}),
    "transposed": (SQUARE, {"layout": "transposed"}),
    "bfloat16": (CASE, {"dtype": torch.bfloat16}),
    "float64": (CASE, {"dtype": torch.float64, "mask": True}),
    "empty": (Case("", n=0, b=2), {}),
}
TRACED = ("mask, noise", "rpe")
by_operator_call = pytest.mark.parametrize("call", OPERATOR_CALLS)


@by_operator_call
def test_opcheck_forward(call, device):
    case, options = OPERATOR_CALLS[call]
    arguments, _ = operator_arguments(case, device, **options)
    check_operator(torch.ops.fastmax.forward.default, arguments, traced=call in TRACED)


@by_operator_call
def test_opcheck_backward(call, device):
    case, options = OPERATOR_CALLS[call]
    arguments, grad_o = operator_arguments(case, device, **options)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]
    o, z = torch.ops.fastmax.forward(*arguments)
    q, k, v, *rest = arguments
    arguments = grad_o, torch.randn_like(z), q, k, v, o, z, *rest
    for backward in (torch.ops.fastmax.backward, torch.ops.fastmax.backward_qkv):
        check_operator(backward.default, arguments, traced=call in TRACED)


def decays_with_resets(m, device, dtype=torch.float32, share=0.1):
    """Returns token-major decays (2, 3, m), with -inf at a share of the tokens."""
    x = -torch.rand(2, m, 3, device=device).mT
    return torch.where(torch.rand_like(x) < share, -torch.inf, x).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
def test_opcheck_finite_decay(dtype, device):
    log_decay = decays_with_resets(50, device, dtype).requires_grad_()
    for options in ((False, False), (True, True)):
        torch.library.opcheck(torch.ops.fastmax.finite_decay.default, (log_decay, *options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=dtype_id)
def test_decay_sums(dtype, device):
    log_decay = decays_with_resets(50, device, dtype, share=0.0).requires_grad_()
    torch.library.opcheck(torch.ops.fastmax.decay_sums.default, (log_decay,))
    expected = log_decay.double().cumsum(-1)
    sums = torch.ops.fastmax.decay_sums(log_decay)
    assert sums.dtype == torch.float64
    assert torch.equal(sums, expected)
    weights = torch.randn_like(sums)
    grads = [torch.autograd.grad((x * weights).sum(), log_decay)[0] for x in (sums, expected)]
    assert torch.equal(*grads)


@pytest.mark.parametrize("m", [1, 17, 2047, 2048, 2049, 9000])
@pytest.mark.parametrize("share", [0.0, 1e-3, 1.0])
def test_finite_decay(m, share, device):
    """The kernel has tiles of 2048, so m is below, at and above that."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        log_decay = decays_with_resets(m, device, dtype, share)
        for continues in (False, True):
            finite, k_start = torch.ops.fastmax.finite_decay(log_decay, continues, False)
            resets = (log_decay == -torch.inf).cpu().numpy()
            last = np.maximum.accumulate(np.where(resets, np.arange(m), -1 if continues else 0), axis=-1)
            assert np.array_equal(k_start.cpu().numpy(), last)
            assert torch.equal(finite, torch.where(log_decay == -torch.inf, 0.0, log_decay.float()))


def test_finite_decay_refuses_by_name(device):
    with pytest.raises((ValueError, RuntimeError), match=r"log_decay must have shape \(b, hk, m\), got \(4, 5\)"):
        torch.ops.fastmax.finite_decay(torch.zeros(4, 5, device=device), False, False)


def test_the_gradient_of_a_reset_is_zero(device):
    log_decay = decays_with_resets(300, device).requires_grad_()
    q, k, v = (torch.randn(2, 3, 300, 8, device=device) for _ in range(3))
    fastmax_attention(q, k, v, causal=True, log_decay=log_decay).square().sum().backward()
    resets = log_decay == -torch.inf
    assert not log_decay.grad[resets].any() and log_decay.grad[~resets].count_nonzero() > resets.numel() / 2


@by_layout
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_fake_tensors_have_the_real_layout(layout, dtype, device):
    """Shapes, strides and dtypes of fake results are those of real ones."""
    arguments, grad_o = operator_arguments(SQUARE, device, dtype, layout)
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments]

    def both(q, k, v, grad_o):
        o, z = torch.ops.fastmax.forward(q, k, v, *arguments[3:])
        given = grad_o, None, q, k, v, o, z, *arguments[3:]
        return o, z, *torch.ops.fastmax.backward(*given), *torch.ops.fastmax.backward_qkv(*given)

    real = both(*arguments[:3], grad_o)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = both(*(mode.from_tensor(x) for x in (*arguments[:3], grad_o)))
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def test_one_head_whose_strides_tie_is_not_token_major(device):
    """A view of one head may have the strides of token-major memory too. Kernels and fake tensors must agree on the layout of
    the output."""
    q = torch.randn(2, 5, 64, device=device).as_strided((2, 1, 5, 64), (320, 64, 64, 1))
    o = fastmax_attention(q, q, q)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = fastmax_attention(*(mode.from_tensor(q),) * 3)
    assert o.stride() == fake.stride() == (320, 320, 64, 1)


@by_algorithm
def test_noise_of_another_dtype(algorithm, device):
    """Direct calls accept noise of any dtype, in the forward and the backward."""
    (q, k, v, mask, noise, rpe, *rest), grad_o = operator_arguments(
        CASE, device, torch.bfloat16, noise=True, causal=True, algorithm=algorithm
    )
    leaves = {"q": q, "k": k, "v": v}
    results = []
    for given in (noise, noise.float()):

        def operator(q, k, v, given=given):
            return torch.ops.fastmax.forward(q, k, v, mask, given, rpe, *rest)[0]

        results.append(run(operator, leaves, grad_o))
    for name, x in results[0].items():
        assert relative(results[1][name], x.double()) <= 1e-2, name


@by_algorithm
def test_denominators_have_a_gradient(algorithm, device):
    """The gradient is that of the definition; `return_lse` and merging need it."""
    case = replace(CASE, n=9, m=11)
    arguments, grad_o = operator_arguments(case, device, torch.float64, causal=True, algorithm=algorithm)
    o, z = torch.ops.fastmax.forward(*arguments)
    grad_z = torch.randn_like(z)
    actual = torch.autograd.grad((o, z), arguments[:3], (grad_o, grad_z))
    o, z = ops.attention(*arguments[:3], Call(Score(0.5, 1.0, 1.0, 0.5, 2), causal=True, algorithm=algorithm))
    through_function = torch.autograd.grad((o, z), arguments[:3], (grad_o, grad_z))
    q, k, v = arguments[:3]
    o, lse = naive_attention(q, k, v, causal=True, temperature=2.0, return_lse=True)
    expected = torch.autograd.grad((o, lse.exp()), arguments[:3], (grad_o, grad_z))
    for x, y, z in zip(actual, through_function, expected, strict=True):
        assert torch.equal(x, y)
        torch.testing.assert_close(x, z, rtol=1e-10, atol=1e-10)


def test_second_output_without_keys(device):
    """A query without keys has a sum of weights of 0, whose log is -inf."""
    q, k = torch.randn(2, 3, 5, 8, device=device), torch.randn(2, 3, 0, 8, device=device)
    o, z = torch.ops.fastmax.forward(q, k, k, *[None] * 7, 0.5, 1.0, 1.0, 0.5, 2, False, 0.0, "auto", False)
    assert o.shape == q.shape and not o.any() and z.shape == q.shape[:3] and not z.any()
    o, lse = torch.ops.fastmax.flash_forward(q, k, k, *[None] * 5, 0.5, False, -1, -1, False)
    assert not o.any() and (lse == -torch.inf).all()


# ---- torch.compile, torch.export


@pytest.mark.parametrize("option", ["normalize=True", "everything"])
def test_compile_options(option, device, fresh_dynamo):
    """The call is one graph without a break and gives the same numbers. aot_eager runs the traced program alone."""
    inputs, grad_o = make_inputs(CASE, device=device)
    options = make_options(option, CASE, device=device) | {"causal": True}
    compiled = torch.compile(fastmax_attention, fullgraph=True, backend="aot_eager")
    compare(run(compiled, inputs, grad_o, **options), run(fastmax_attention, inputs, grad_o, **options))


def test_compile_rpe_tensor(device, fresh_dynamo):
    inputs, grad_o = make_inputs(CASE, device=device)
    inputs["rpe_matrix"] = 0.1 * torch.randn(CASE.n + CASE.m - 1, CASE.d, device=device)
    compiled = torch.compile(fastmax_attention, fullgraph=True, backend="aot_eager")
    compare(run(compiled, inputs, grad_o), run(fastmax_attention, inputs, grad_o))


@by_causal
def test_compile_dynamic_is_one_graph_for_all_lengths(causal, device, fresh_dynamo):
    """No length, and no choice of algorithm by length, ends up in a guard."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fastmax_attention, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in (12, 37, 3 * CHUNK + 5):  # on both sides of the crossover, d**2 = 16
        inputs, grad_o = make_inputs(Case("", n=n, d=4), device=device)
        compare(run(compiled, inputs, grad_o, causal=causal), run(fastmax_attention, inputs, grad_o, causal=causal))
        graphs.append(counter.frame_count)
    # The first call may trace twice, to find out that the options are constants; no later one traces again.
    assert graphs[-1] == graphs[0] > 0


def test_compile_autograd_with_symbolic_coefficients(device, fresh_dynamo):
    x = torch.randn(1, 2, 9, 4, device=device)

    def attend(a2):
        return fastmax_attention(x, x, x, causal=True, a2=a2, use_custom_gradient=False)

    compiled = torch.compile(attend, backend="aot_eager", dynamic=True)
    for a2 in (0.5, 0.6, 0.7):
        torch.testing.assert_close(compiled(a2), attend(a2))


def test_options_that_an_operator_lacks(device):
    call = Call(Score(1.0, 1.0, 1.0, 0.5, 2), causal=True)
    x = torch.randn(1, 2, 5, 4, device=device)
    for name, value in {"left": 1, "right": 0, "lag": 3}.items():
        with pytest.raises(ValueError, match=f"{name} is not supported by this operator"):
            ops.attention(x, x, x, call._replace(**{name: value}))


@torch_warns
def test_compile_inductor(device, fresh_dynamo):
    """A model's block is compiled by Inductor, forward and backward, at two lengths."""
    block = Block(mask=True, normalize="token", temperature=2.0).to(device)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    for n in (20, 130):
        x = torch.randn(2, n, 16, device=device)
        results = []
        for module in (block, compiled):
            y = module(x)
            results.append([y, *torch.autograd.grad(y.square().sum(), list(block.parameters()))])
        torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "options", [{}, {"mask": True, "normalize": "token", "rpe_matrix": "sinusoidal"}], ids=["full", "causal"]
)
def test_export_with_dynamic_length(options, device):
    check_export(Block(**options).to(device).eval(), device)


# ---- autocast, checkpointing, functional_call, DDP


@by_gradient
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_autocast(dtype, custom, device):
    """Like scaled_dot_product_attention, calls run in autocast's dtype, and gradients have the leaves' own."""
    inputs, grad_o = make_inputs(CASE, device=device)
    options = {"use_custom_gradient": custom, "causal": True}
    cast = {name: x.to(dtype) for name, x in inputs.items()}
    expected = run(fastmax_attention, cast, grad_o.to(dtype), **options)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, dtype):
        o = fastmax_attention(**leaves, **options)
    assert o.dtype == dtype and torch.equal(o, expected["o"])
    o.backward(grad_o.to(dtype))
    for name, x in leaves.items():
        assert torch.equal(x.grad, expected[f"grad {name}"].float())


@by_algorithm
@by_causal
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
def test_autocast_reaches_no_operator(dtype, causal, algorithm, device):
    """Operators that are called directly inside autocast, forward and backward, use the dtypes of their arguments and give the
    same bits."""
    case = Case("", n=CHUNK + 13, h=4, hk=2, d=8)
    (q, k, v, *rest), grad_o = operator_arguments(
        case, device, dtype, mask=True, noise=True, causal=causal, algorithm=algorithm
    )
    leaves = {"q": q, "k": k, "v": v}

    def operator(q, k, v):
        return torch.ops.fastmax.forward(q, k, v, *rest)[0]

    expected = run(operator, leaves, grad_o)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(operator, leaves, grad_o)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@by_algorithm
@by_causal
def test_autocast_around_the_backward(causal, algorithm, device):
    """The backward may run inside autocast too."""
    inputs, grad_o = make_inputs(Case("", n=CHUNK + 13, h=4, hk=2, d=8), torch.bfloat16, device)
    attention = partial(fastmax_attention, causal=causal, algorithm=algorithm)
    expected = run(attention, inputs, grad_o)
    with torch.autocast(device.type, torch.bfloat16):
        actual = run(attention, inputs, grad_o)
    for name, x in expected.items():
        assert torch.equal(actual[name], x), name


@by_gradient
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
def test_autocast_casts_rpe_matrix_and_noise(dtype, custom, device):
    """A float32 matrix and float32 noise accompany q of either dtype, and gradients have the dtypes of the leaves."""
    inputs, grad_o = make_inputs(CASE, dtype, device)
    inputs["rpe_matrix"] = 0.2 * torch.randn(CASE.n + CASE.m - 1, CASE.d, device=device)
    noise = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, device=device)
    options = {"dropout": 0.3, "use_custom_gradient": custom}
    cast = {name: x.bfloat16() for name, x in inputs.items()}
    expected = run(fastmax_attention, cast, grad_o.bfloat16(), drop_noise=noise.bfloat16(), **options)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        o = fastmax_attention(**leaves, drop_noise=noise, **options)
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected["o"])
    o.backward(grad_o.bfloat16())
    for name, x in leaves.items():
        assert x.grad.dtype == x.dtype and torch.equal(x.grad, expected[f"grad {name}"].to(x.dtype)), name


@by_gradient
def test_float32_noise_with_half_q(custom, device):
    inputs, grad_o = make_inputs(CASE, torch.bfloat16, device)
    noise = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, device=device)
    options = {"dropout": 0.3, "use_custom_gradient": custom}
    expected = run(fastmax_attention, inputs, grad_o, drop_noise=noise.bfloat16(), **options)
    actual = run(fastmax_attention, inputs, grad_o, drop_noise=noise, **options)
    assert actual["o"].dtype == torch.bfloat16
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


@by_gradient
def test_autocast_mixes_dtypes_and_leaves_float64(custom, device):
    inputs, _ = make_inputs(CASE, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        mixed = fastmax_attention(inputs["q"], inputs["k"].bfloat16(), inputs["v"], use_custom_gradient=custom)
        wide = fastmax_attention(*(x.double() for x in inputs.values()), use_custom_gradient=custom)
    assert mixed.dtype == torch.bfloat16 and wide.dtype == torch.float64


@by_gradient
def test_autocast_trains_a_block(custom, device):
    block = Block(use_custom_gradient=custom).to(device)
    with torch.autocast(device.type, torch.bfloat16):
        block(torch.randn(2, 20, 16, device=device)).float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in block.parameters())


@in_turn("custom")
@by_gradient
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@pytest.mark.parametrize("dropout", [0.0, 0.4], ids=["no noise", "noise"])
def test_activation_checkpointing(dropout, reentrant, custom, device):
    """Recomputing gives the same bits, noise included."""
    inputs, grad_o = make_inputs(CASE, device=device)
    attention = partial(fastmax_attention, causal=True, dropout=dropout, use_custom_gradient=custom)

    def saved(q, k, v):
        return checkpoint(attention, q, k, v, use_reentrant=reentrant)

    torch.manual_seed(5)
    expected = run(attention, inputs, grad_o)
    torch.manual_seed(5)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    o = saved(**leaves)
    o.backward(grad_o)  # the reentrant form refuses autograd.grad
    assert torch.equal(o, expected["o"])
    for name, x in leaves.items():
        assert torch.equal(x.grad, expected[f"grad {name}"])


@pytest.mark.parametrize("option", ["defaults", "sinusoidal", "normalize=token"])
def test_checkpoint_that_ends_with_the_attention(option, device):
    """The attention's backward is then the first to ask for saved tensors, and the forward is recorded again at that time."""
    inputs, grad_o = make_inputs(SQUARE, device=device)

    def attention(q, k, v):
        return fastmax_attention(q.sin(), k.sin(), v.sin(), **make_options(option, SQUARE))

    plain = run(attention, inputs, grad_o)
    again = run(lambda q, k, v: checkpoint(attention, q, k, v, use_reentrant=False), inputs, grad_o)
    assert all(torch.equal(x, plain[name]) for name, x in again.items())


@by_gradient
def test_functional_call(custom, device):
    block, other = (Block(use_custom_gradient=custom).to(device) for _ in range(2))
    x = torch.randn(2, 20, 16, device=device)
    parameters = dict(other.named_parameters())
    y = torch.func.functional_call(block, parameters, x)
    assert torch.equal(y, other(x)) and not torch.equal(y, block(x))
    grads = torch.autograd.grad(y.square().sum(), list(parameters.values()))
    expected = torch.autograd.grad(other(x).square().sum(), list(parameters.values()))
    for grad, reference in zip(grads, expected, strict=True):
        assert torch.equal(grad, reference)


def test_functional_call_under_torch_func_grad(device):
    block = Block(use_custom_gradient=False).to(device)
    x = torch.randn(2, 20, 16, device=device)

    def loss(parameters):
        return torch.func.functional_call(block, parameters, x).square().sum()

    parameters = {name: p.detach() for name, p in block.named_parameters()}
    grads = torch.func.grad(loss)(parameters)
    block(x).square().sum().backward()
    for name, p in block.named_parameters():
        torch.testing.assert_close(grads[name], p.grad)


def train_half_a_batch(group, x, state):
    found = []
    for custom in (True, False):
        block = Block(use_custom_gradient=custom, mask=True)
        block.load_state_dict(state)
        model = DistributedDataParallel(block, process_group=group)
        model(x[2 * group.rank() : 2 * group.rank() + 2]).square().mean().backward()
        found.append({name: p.grad for name, p in block.named_parameters()})
    return found


def test_ddp():
    """Two gloo processes with half of the batch each get the gradients of one process with all of it, on both sides of the
    toggle."""
    block = Block(mask=True)
    x = torch.randn(4, 20, 16)
    block(x).square().mean().backward()
    for first, second in zip(*processes.run(train_half_a_batch, 2, x, block.state_dict()), strict=True):
        for name, p in block.named_parameters():
            assert torch.equal(first[name], second[name])
            torch.testing.assert_close(first[name], p.grad)


# ---- repeatability


@in_turn("custom")
@by_algorithm
@by_gradient
@by_order
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_bitwise_repeatable(dtype, p, custom, algorithm, device, several_threads):
    inputs, grad_o = make_inputs(Case("", n=CHUNK + 13, h=4, hk=2), dtype, device)
    options = {"p": p, "causal": True, "algorithm": algorithm, "use_custom_gradient": custom}
    first = run(fastmax_attention, inputs, grad_o, **options)
    for _ in range(3):
        again = run(fastmax_attention, inputs, grad_o, **options)
        for name, x in first.items():
            assert torch.equal(x, again[name]), name


@by_option
def test_training_and_inference_agree(option, device):
    """Recording for autograd does not change the output of the custom operator by a bit."""
    inputs, _ = make_inputs(CASE, device=device)
    options = make_options(option, CASE, device=device)
    with torch.no_grad():
        quiet = fastmax_attention(**inputs, **options)
    with torch.inference_mode():
        inference = fastmax_attention(**inputs, **options)
    recorded = fastmax_attention(**{name: x.requires_grad_() for name, x in inputs.items()}, **options)
    assert torch.equal(quiet, recorded) and torch.equal(inference, recorded)


# ---- memory


@by_algorithm
@by_causal
def test_saved_for_backward(causal, algorithm, device):
    """The custom gradient keeps q, k, v, o, the denominators (b, h, n), mask and noise, and nothing else."""
    inputs, _ = make_inputs(CASE, device=device)
    inputs = {name: x.requires_grad_() for name, x in inputs.items()}
    options = make_options("key padding", CASE, device=device) | make_options("noise", CASE, device=device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        o = fastmax_attention(**inputs, causal=causal, algorithm=algorithm, **options)
    known = [*inputs.values(), o, options["attention_mask"], options["drop_noise"]]
    known = {x.untyped_storage().data_ptr() for x in known}
    rest = [x for x in saved if x.untyped_storage().data_ptr() not in known]
    assert [tuple(x.shape) for x in rest] == [(CASE.b, CASE.h, CASE.n)]
    assert len({x.untyped_storage().data_ptr() for x in saved}) == len(known) + 1


def test_memory_sees_inside_the_operator():
    inputs, _ = make_inputs(Case("", n=64, d=4, h=1))
    with Memory() as memory:
        fastmax_attention(**inputs, algorithm="quadratic")
    assert memory.largest >= 64 * 64, "one tile of scores"
    assert memory.peak >= 4 * 64 * 64 and memory.alive < memory.peak


def footprint(n, d, p, causal, algorithm, custom):
    inputs, grad_o = make_inputs(Case("", n=n, h=1, d=d))
    with Memory() as memory:
        run(fastmax_attention, inputs, grad_o, p=p, causal=causal, algorithm=algorithm, use_custom_gradient=custom)
    return memory


@in_turn("custom")
@by_gradient
@by_causal
@pytest.mark.parametrize("algorithm, p", [("quadratic", 2), ("linear", 2), ("linear", 1)])
def test_memory_is_linear_in_tokens(algorithm, p, causal, custom):
    """No (n, m) tensor, no (n, d^2) tensor, no state per token: doubling n adds O(n d) and the largest tensor stays small."""
    n, d = {"quadratic": 2048, "linear": 4096}[algorithm], 64
    half, whole = (footprint(size, d, p, causal, algorithm, custom) for size in (n // 2, n))
    assert whole.largest < n * d * d / 2 and whole.largest < n * n / 2
    # 4 bytes an element. Beside q, k, v, o and the four gradients a few working copies.
    assert whole.peak - half.peak < 4 * 40 * (n // 2) * d


def test_live_states_grow_with_the_root_of_the_chunks(monkeypatch):
    """Autograd records 200 chunks of keys. It holds 15 states between blocks of chunks, 15 within a block, and the features of
    one chunk."""
    chunk = 16
    monkeypatch.setattr(eager.planner, "plan_linear", lambda device, heads, *rest: LinearPlan(chunk, 1, heads))
    inputs, grad_o = make_inputs(Case("", n=1, m=200 * chunk, h=1, d=128, dv=4))
    with Memory() as memory:
        run(fastmax_attention, inputs, grad_o, algorithm="linear", use_custom_gradient=False)
    # 12.5e6 bytes. Without checkpoints of blocks 50e6 (every state), without those of chunks 18e6 (all features of a block).
    assert memory.peak < 15e6


@pytest.mark.parametrize("options", [{"algorithm": "linear"}, {"algorithm": "quadratic"}, {"exact_window": 5}])
def test_meta_tensors_take_no_computation(options):
    q, k, v = (torch.empty(1, heads, 2**20, 64, device="meta") for heads in (4, 2, 2))
    with (
        patch.object(eager, "forward", side_effect=AssertionError),
        patch.object(eager, "backward", side_effect=AssertionError),
    ):
        o = fastmax_attention(q.requires_grad_(), k, v, causal=True, temperature=8.0, **options)
        (grad,) = torch.autograd.grad(o.sum(), q)
    assert o.device.type == grad.device.type == "meta"
    assert o.shape == grad.shape == q.shape
