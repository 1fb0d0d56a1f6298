"""Derivatives against finite differences, and the two sides of `use_custom_gradient` against each other."""

from functools import partial

import pytest
import torch
from common import (
    ALGORITHMS,
    CHUNK,
    Case,
    assert_gradients_of,
    by_algorithm,
    by_causal,
    by_gradient,
    by_option,
    by_order,
    in_turn,
    make_inputs,
    make_options,
    run,
)
from torch.autograd import forward_ad, gradcheck, gradgradcheck

from fastmax import FastmaxSelfAttention, decoding, fastmax_attention, flash_attention

TINY = Case("tiny", n=3, m=4, b=1, h=2, hk=1, d=3, dv=2)


def tiny_leaves(device):
    inputs, _ = make_inputs(TINY, torch.float64, device)
    return tuple(x.requires_grad_() for x in inputs.values())


@in_turn("causal")
@by_algorithm
@by_causal
@by_option
def test_gradcheck(option, causal, algorithm, device):
    """Checks the custom gradient; `test_custom_equals_autograd` compares the other one with it."""
    options = make_options(option, TINY, torch.float64, device)
    attention = partial(fastmax_attention, causal=causal, algorithm=algorithm, **options)
    assert gradcheck(attention, tiny_leaves(device))


@in_turn("custom")
@by_gradient
@by_causal
@by_order
def test_gradcheck_rpe_tensor(p, causal, custom, device):
    rpe = (0.2 * torch.randn(TINY.n + TINY.m - 1, TINY.d, dtype=torch.float64)).to(device).requires_grad_()

    def attention(q, k, v, rpe_matrix):
        return fastmax_attention(q, k, v, rpe_matrix=rpe_matrix, causal=causal, p=p, use_custom_gradient=custom)

    assert gradcheck(attention, (*tiny_leaves(device), rpe))


@in_turn("custom")
@by_algorithm
@by_gradient
@by_order
def test_gradcheck_across_chunks(p, custom, algorithm, device):
    """The fast mode of gradcheck takes random directions. It checks the gradient that crosses from one chunk's state to the
    next."""
    inputs, _ = make_inputs(Case("", n=CHUNK + 3, h=1, d=2, dv=1), torch.float64, device)
    attention = partial(fastmax_attention, causal=True, p=p, use_custom_gradient=custom, algorithm=algorithm)
    assert gradcheck(attention, tuple(x.requires_grad_() for x in inputs.values()), fast_mode=True)


@in_turn("causal")
@by_algorithm
@by_causal
@pytest.mark.parametrize(
    "option", ["defaults", "p=1", "coefficients", "normalize=True", "normalize=token", "key padding", "noise", "everything"]
)
def test_second_and_forward_derivatives_by_autograd(option, causal, algorithm, device):
    options = make_options(option, TINY, torch.float64, device)
    attention = partial(fastmax_attention, causal=causal, use_custom_gradient=False, algorithm=algorithm, **options)
    leaves = tiny_leaves(device)
    assert gradgradcheck(attention, leaves, fast_mode=True)
    assert gradcheck(attention, leaves, check_forward_ad=True, fast_mode=True)


def test_second_and_forward_derivatives_of_rpe_tensor(device):
    rpe = (0.2 * torch.randn(TINY.n + TINY.m - 1, TINY.d, dtype=torch.float64)).to(device).requires_grad_()

    def attention(q, k, v, rpe_matrix):
        return fastmax_attention(q, k, v, rpe_matrix=rpe_matrix, causal=True, use_custom_gradient=False)

    assert gradgradcheck(attention, (*tiny_leaves(device), rpe), fast_mode=True)
    assert gradcheck(attention, (*tiny_leaves(device), rpe), check_forward_ad=True, fast_mode=True)


@by_algorithm
def test_torch_func_by_autograd(algorithm, device):
    """jvp, vjp and the Hessian of torch.func agree with torch.autograd."""
    q, k, v = (x.detach() for x in tiny_leaves(device))

    def loss(q):
        return fastmax_attention(q, k, v, causal=True, use_custom_gradient=False, algorithm=algorithm).square().sum()

    gradient = torch.autograd.functional.jacobian(loss, q)
    torch.testing.assert_close(torch.func.grad(loss)(q), gradient)
    direction = torch.randn_like(q)
    _, slope = torch.func.jvp(loss, (q,), (direction,))
    torch.testing.assert_close(slope, (gradient * direction).sum())
    torch.testing.assert_close(torch.func.hessian(loss)(q), torch.autograd.functional.hessian(loss, q))


@by_algorithm
@by_causal
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # PyTorch's own: no batching rule for tril_
def test_vmap_by_autograd(causal, algorithm, device):
    """torch.func.vmap over a batch, and per-sample gradients, across blocks of either algorithm."""
    case = Case("", n=2 * CHUNK + 5, b=3, h=2, hk=1, d=3, dv=2)
    inputs, grad_o = make_inputs(case, torch.float64, device)
    attention = partial(fastmax_attention, causal=causal, algorithm=algorithm, use_custom_gradient=False)
    expected = run(attention, inputs, grad_o)

    def sample(q, k, v):
        return attention(q[None], k[None], v[None])[0]

    def loss(q, k, v, grad_o):
        return (sample(q, k, v) * grad_o).sum()

    torch.testing.assert_close(torch.func.vmap(sample)(*inputs.values()), expected["o"])
    grads = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs.values(), grad_o)
    for name, grad in zip("qkv", grads, strict=True):
        torch.testing.assert_close(grad, expected[f"grad {name}"])


def assert_batched_gradients(outputs, inputs):
    """Asserts that three gradients at once, as `torch.autograd.functional.jacobian(vectorize=True)` takes them, are those that
    a loop takes."""
    grads = [torch.randn(3, *x.shape, dtype=x.dtype, device=x.device) for x in outputs]
    loop = [torch.autograd.grad(outputs, inputs, each, retain_graph=True) for each in zip(*grads, strict=True)]
    batched = torch.autograd.grad(outputs, inputs, grads, is_grads_batched=True, retain_graph=True)
    for x, ones in zip(batched, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(x, torch.stack(ones))


@in_turn("algorithm")
@by_algorithm
@by_causal
@by_option
def test_batched_gradients(option, causal, algorithm, device):
    options, leaves = make_options(option, TINY, torch.float64, device), tiny_leaves(device)
    assert_batched_gradients([fastmax_attention(*leaves, causal=causal, algorithm=algorithm, **options)], leaves)


def test_batched_gradients_of_softmax_and_log_sums(device):
    leaves = tiny_leaves(device)
    for attention in (partial(fastmax_attention, exact_window=2), flash_attention):
        o, lse = attention(*leaves, causal=True, return_lse=True)
        assert_batched_gradients([o, lse], leaves)
        assert_batched_gradients([lse], leaves[:2])


def test_batched_gradients_of_states_and_kept_keys(device):
    leaves = tiny_leaves(device)
    state = decoding.init_state(1, 1, TINY.d, value_dim=TINY.dv, dtype=torch.float64, device=device)
    _, state = decoding.prefill(leaves[0][:, :, :3], leaves[1][:, :, :3], leaves[2][:, :, :3], state)
    assert_batched_gradients([state.kv_state], leaves[1:2])
    layer = FastmaxSelfAttention(8, 2, kept_keys=4, exact_window=2, dtype=torch.float64, device=device)
    x = torch.randn(1, 12, 8, dtype=torch.float64, device=device, requires_grad=True)
    assert_batched_gradients([layer(x)], [x])


@by_algorithm
@pytest.mark.parametrize("names", ["q", "k", "v", "qkv"])
def test_second_derivative_of_the_custom_gradient_is_refused(names, algorithm, device):
    inputs, _ = make_inputs(TINY, torch.float64, device)
    leaves = [inputs[name].requires_grad_() for name in names]
    o = fastmax_attention(**inputs, causal=True, algorithm=algorithm)
    first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"second derivative.*use_custom_gradient=False"):
        torch.autograd.grad(sum(x.square().sum() for x in first), leaves)


def test_forward_derivative_of_the_custom_gradient_is_refused(device):
    q, k, v = (x.detach() for x in tiny_leaves(device))
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match=r"forward-mode derivative.*use_custom_gradient=False"),
    ):
        fastmax_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    with pytest.raises(RuntimeError, match=r"forward-mode derivative.*use_custom_gradient=False"):
        torch.func.jvp(lambda q: fastmax_attention(q, k, v), (q,), (torch.ones_like(q),))


@pytest.mark.parametrize("normalize", ["sequence", "token"])
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "constant"])
def test_forward_derivative_through_the_scaling_is_refused(recorded, normalize, device):
    """The scaling has a custom gradient of its own."""
    q, k, v = (x.detach().requires_grad_(recorded) for x in tiny_leaves(device))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=r"forward-mode derivative.*use_custom_gradient=False"):
        fastmax_attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v, normalize=normalize)


TRANSFORMS = {
    "grad": lambda f, q: torch.func.grad(f)(q),
    "vjp": lambda f, q: torch.func.vjp(f, q),
    "jacrev": lambda f, q: torch.func.jacrev(f)(q),
    "hessian": lambda f, q: torch.func.hessian(f)(q),
    "grad of vmap": lambda f, q: torch.func.grad(lambda x: torch.func.vmap(f)(x).sum())(torch.stack([q, q])),
    "vmap of grad": lambda f, q: torch.func.vmap(torch.func.grad(f))(torch.stack([q, q])),
    "jvp": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "jacfwd": lambda f, q: torch.func.jacfwd(f)(q),
    "jvp of vmap": lambda f, q: torch.func.jvp(torch.func.vmap(f), (torch.stack([q, q]),), (torch.stack([q, q]),)),
}


def softmax_attention(q, k, v, **options):
    return flash_attention(q, k, v)


@pytest.mark.parametrize("attention", [fastmax_attention, softmax_attention], ids=["fastmax", "flash"])
@pytest.mark.parametrize("normalize", [False, "token"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_through_the_custom_gradient_is_refused(transform, normalize, attention, device):
    q, k, v = (x.detach() for x in tiny_leaves(device))
    with pytest.raises(RuntimeError, match=r"fastmax: the custom gradient has no .*use_custom_gradient=False"):
        TRANSFORMS[transform](lambda x: attention(x, k, v, normalize=normalize).sum(), q)


@by_gradient
def test_vmap_and_constants_under_transforms(custom, device):
    """Calls without a derivative under a transform run, and autograd outside vmap differentiates through them."""
    q, k, v = (x.detach() for x in tiny_leaves(device))
    batch = torch.stack([q, 2.0 * q]).requires_grad_()

    def attention(x):
        return fastmax_attention(x, k, v, normalize="token", use_custom_gradient=custom)

    o, expected = torch.func.vmap(attention)(batch), torch.stack([attention(x) for x in batch])
    torch.testing.assert_close(o, expected)
    weight = torch.randn_like(o)
    grads = (torch.autograd.grad(x, batch, weight)[0] for x in (o, expected))
    torch.testing.assert_close(*grads)
    constant = attention(q).sum()
    slope = torch.func.grad(lambda x: x * attention(q).sum() + x * attention(q * x.detach()).sum())(
        torch.tensor(1.0, device=device)
    )
    torch.testing.assert_close(slope.double(), 2.0 * constant)


@pytest.mark.parametrize("attention", [*ALGORITHMS, "flash"])
@pytest.mark.parametrize("name", ["log_decay", "log_input_gate", "attention_mask"])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@by_gradient
def test_vmap_over_one_argument_alone(custom, name, attention, device):
    """q, k and v are not batched."""
    q, k, v = (x.detach() for x in tiny_leaves(device))
    of_keys = torch.rand(3, *k.shape[:3], device=device)
    batch = of_keys[:, :, 0] < 0.7 if name == "attention_mask" else -of_keys
    function = flash_attention if attention == "flash" else partial(fastmax_attention, algorithm=attention)

    def call(x):
        return function(q, k, v, causal=True, use_custom_gradient=custom, **{name: x})

    torch.testing.assert_close(torch.func.vmap(call)(batch), torch.stack([call(x) for x in batch]))


@by_causal
@pytest.mark.parametrize("algorithm", ["auto", *ALGORITHMS])
@by_option
def test_custom_equals_autograd(option, algorithm, causal, device):
    """The toggle changes only who computes: both sides agree to float64 rounding."""
    case = Case("", n=CHUNK // 4 + 3, m=CHUNK // 4 + 9, b=2, h=4, hk=2, d=7, dv=5)
    inputs, grad_o = make_inputs(case, torch.float64, device)
    options = dict(make_options(option, case, torch.float64, device), causal=causal, algorithm=algorithm)
    custom = run(fastmax_attention, inputs, grad_o, use_custom_gradient=True, **options)
    autograd = run(fastmax_attention, inputs, grad_o, use_custom_gradient=False, **options)
    for name, x in custom.items():
        assert (x - autograd[name]).norm() <= 1e-12 * x.norm(), name


def test_custom_equals_autograd_for_drawn_noise(device):
    """Both sides of the toggle draw the same noise."""
    inputs, grad_o = make_inputs(TINY, torch.float64, device)
    outputs = []
    for custom in (True, False):
        torch.manual_seed(3)
        outputs.append(run(fastmax_attention, inputs, grad_o, dropout=0.5, use_custom_gradient=custom))
    for name, x in outputs[0].items():
        torch.testing.assert_close(x, outputs[1][name])


@in_turn("custom")
@by_gradient
@by_algorithm
@pytest.mark.parametrize("names", ["q", "k", "v", "qk", "kv"])
def test_only_some_inputs_need_a_gradient(names, algorithm, custom, device):
    inputs, grad_o = make_inputs(TINY, torch.float64, device)
    options = {"causal": True, "algorithm": algorithm, "use_custom_gradient": custom}
    everything = run(fastmax_attention, inputs, grad_o, **options)
    leaves = {name: x.requires_grad_() if name in names else x for name, x in inputs.items()}
    fastmax_attention(**leaves, **options).backward(grad_o)
    assert_gradients_of(names, leaves, everything)


@by_gradient
@by_causal
def test_only_the_rpe_matrix_needs_a_gradient(causal, custom, device):
    inputs, grad_o = make_inputs(TINY, torch.float64, device)
    inputs["rpe_matrix"] = (0.2 * torch.randn(TINY.n + TINY.m - 1, TINY.d, dtype=torch.float64)).to(device)
    options = {"causal": causal, "use_custom_gradient": custom}
    everything = run(fastmax_attention, inputs, grad_o, **options)
    leaves = {name: x.requires_grad_() if name == "rpe_matrix" else x for name, x in inputs.items()}
    fastmax_attention(**leaves, **options).backward(grad_o)
    assert_gradients_of(("rpe_matrix",), leaves, everything)


@by_gradient
def test_one_tensor_in_several_places(custom, device):
    """q, k and v may be one tensor; its gradient is the sum."""
    x = torch.randn(2, 3, 9, 4, dtype=torch.float64, device=device, requires_grad=True)
    assert gradcheck(lambda x: fastmax_attention(x, x, x, causal=True, use_custom_gradient=custom), (x,), fast_mode=True)
