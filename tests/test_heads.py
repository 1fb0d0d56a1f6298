"""`split_heads`, `join_heads` and `rotary_factors`, the parts of a layer around attention: PyTorch operations against a float64
definition, gradients, registration, errors, and the layer that uses them. tests/test_heads_kernels.py checks the kernels."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import check_operator, relative, torch_warns

from fastmax import FastmaxSelfAttention
from fastmax.nn.rotary import Rotation
from fastmax.nn.short_convolution import ShortConvolution
from fastmax.ops import extension

SPLIT, SPLIT_GRADIENT = torch.ops.fastmax.split_heads, torch.ops.fastmax.split_heads_backward
JOIN, JOIN_GRADIENT = torch.ops.fastmax.join_heads, torch.ops.fastmax.join_heads_backward
ROTARY = torch.ops.fastmax.rotary_factors
TENSORS = ("qkv", "recent", "conv_weight", "q_weight", "k_weight", "cos", "sin", "places")
SIZES = ("heads", "kv_heads", "head_dim", "q_eps", "k_eps")
B, N, H, HK, D, DV = 2, 7, 4, 2, 6, 5


def split_arguments(
    b=B, n=N, h=H, hk=HK, d=D, dv=DV, width=4, recent=True, norms=(True, True), rotated=4, per_row=False, packed=False,
    dtype=torch.float64, weight_dtype=None, device="cpu",
):  # fmt: skip
    """Returns the arguments of `split_heads` by name. `packed` starts in the middle of a sequence and has short ones."""
    made = {"dtype": dtype, "device": device}
    channels = (h + hk) * d + hk * dv
    given = dict.fromkeys((*TENSORS, *SIZES))
    given["qkv"] = torch.randn(b, n, channels, **made)
    if width > 1:
        given["conv_weight"] = torch.randn(channels, 1, width, **made).to(weight_dtype or dtype)
        given["recent"] = torch.randn(b, width - 1, channels, **made) if recent else None
        if packed:
            lengths = [2, 1, 3, 1, 1, 9, 4] * n
            places = torch.cat([torch.arange(2, 4), *map(torch.arange, lengths)])[:n]
            given["places"] = places.to(device)
    for name, has_norm in zip(("q_weight", "k_weight"), norms, strict=True):
        given[name] = (1 + 0.3 * torch.randn(d, **made)).to(weight_dtype or dtype) if has_norm else None
    if rotated:
        positions = torch.randint(1000, (b, n) if per_row else (n,), device=device)
        given["cos"], given["sin"] = Rotation.at(positions, rotated, 100.0, dtype)
    return given | {"heads": h, "kv_heads": hk, "head_dim": d, "q_eps": 1e-5, "k_eps": 1e-3}


def split_by_definition(
    qkv, recent, conv_weight, q_weight, k_weight, cos, sin, places, heads, kv_heads, head_dim, q_eps, k_eps
):
    n = qkv.shape[1]
    if conv_weight is not None:
        width = conv_weight.shape[-1]
        tokens = F.pad(qkv, (0, 0, width - 1, 0)) if recent is None else torch.cat([recent, qkv], 1)
        windows = torch.stack(
            [tokens[:, i : i + n] for i in range(width)], -1
        )  # (b, n, channels, width), the token itself last
        if places is not None:
            lag = torch.arange(width - 1, -1, -1, device=qkv.device)
            windows = torch.where((lag <= places.unsqueeze(-1)).view(n, 1, width), windows, 0.0)
        qkv = torch.einsum("bncw,cw->bnc", windows, conv_weight[:, 0])
    q, k = (qkv[..., : heads * head_dim], qkv[..., heads * head_dim : (heads + kv_heads) * head_dim])
    v = qkv[..., (heads + kv_heads) * head_dim :].unflatten(-1, (kv_heads, -1))
    results = []
    for x, count, weight, eps in ((q, heads, q_weight, q_eps), (k, kv_heads, k_weight, k_eps)):
        x = x.unflatten(-1, (count, head_dim))
        if weight is not None:
            x = weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
        if cos is not None:
            half = cos.shape[-1] // 2
            pairs = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos[..., :half], sin[..., half:])
            x = torch.cat([pairs.real, pairs.imag, x[..., 2 * half :]], -1)
        results.append(x)
    return *results, v


def join_arguments(b=B, n=N, h=H, dv=DV, norm=True, gate=True, dtype=torch.float64, weight_dtype=None, device="cpu"):
    made = {"dtype": dtype, "device": device}
    return {
        "o": torch.randn(b, n, h, dv, **made).transpose(1, 2),
        "norm_weight": (1 + 0.3 * torch.randn(dv, **made)).to(weight_dtype or dtype) if norm else None,
        "gate": 3 * torch.randn(b, n, h * dv, **made) if gate else None,
        "eps": 1e-5,
    }


def join_by_definition(o, norm_weight, gate, eps):
    b, h, n, dv = o.shape
    if norm_weight is not None:
        o = norm_weight * o / torch.sqrt((o * o).mean(-1, keepdim=True) + eps)
    y = torch.einsum("bhnd->bnhd", o).reshape(b, n, h * dv)
    return y if gate is None else y * gate * torch.sigmoid(gate)


def differentiable(given):
    return {name: x for name, x in given.items() if torch.is_tensor(x) and name not in ("cos", "sin", "places")}


def outputs_and_gradients(function, given, grads):
    """Returns the outputs, and the gradients of all differentiable tensors by name. `grads` are those of the outputs."""
    leaves = {name: x.detach().requires_grad_() for name, x in differentiable(given).items()}
    outputs = function(*(given | leaves).values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return outputs, dict(zip(leaves, torch.autograd.grad(outputs, list(leaves.values()), grads), strict=True))


def gradients_like(outputs):
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [torch.randn_like(x) for x in outputs]


def check(function, definition, given, limit=1e-12):
    with torch.no_grad():
        grads = gradients_like(definition(*given.values()))
    outputs, of_inputs = outputs_and_gradients(function, given, grads)
    exact, of_exact = outputs_and_gradients(definition, given, grads)
    for x, y in zip((*outputs, *of_inputs.values()), (*exact, *of_exact.values()), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.isfinite().all()
        assert (x - y).norm() <= limit * y.norm()
    for x in outputs:
        assert x.is_contiguous()


SPLITS = {
    "all": {},
    "one sequence": {"recent": False},
    "packed": {"packed": True},
    "packed, from zeros": {"packed": True, "recent": False, "n": 23},
    "positions per row": {"per_row": True},
    "one head": {"h": 1, "hk": 1},
    "grouped": {"h": 6, "hk": 2, "dv": 3},
    "all channels rotated": {"rotated": D},
    "one pair rotated": {"rotated": 2},
    "no rotation": {"rotated": 0},
    "one norm": {"norms": (False, True)},
    "the other norm": {"norms": (True, False)},
    "no norm": {"norms": (False, False)},
    "no convolution": {"width": 1},
    "wide": {"width": 8},
    "wider than the sequence": {"width": 5, "n": 2},
    "convolution alone": {"norms": (False, False), "rotated": 0},
    "norms alone": {"width": 1, "rotated": 0},
    "rotation alone": {"width": 1, "norms": (False, False)},
    "nothing": {"width": 1, "norms": (False, False), "rotated": 0},
    "one token": {"n": 1, "b": 1},
    "no tokens": {"n": 0},
    "no batch": {"b": 0},
}
JOINS = {
    "all": {},
    "norm alone": {"gate": False},
    "gate alone": {"norm": False},
    "nothing": {"norm": False, "gate": False},
    "one token": {"n": 1, "b": 1},
    "no tokens": {"n": 0},
    "no batch": {"b": 0},
}


@pytest.mark.parametrize("options", SPLITS.values(), ids=SPLITS)
def test_split_by_definition(options, device):
    check(SPLIT, split_by_definition, split_arguments(**options, device=device))


@pytest.mark.parametrize("options", JOINS.values(), ids=JOINS)
def test_join_by_definition(options, device):
    check(JOIN, join_by_definition, join_arguments(**options, device=device))


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["same", "float32"])
def test_other_dtypes(dtype, limit, weight_dtype):
    """Gradients have the dtypes of what they belong to. The weights are rounded, so the definition has rounded ones."""
    for arguments, operator, definition in (
        (split_arguments, SPLIT, split_by_definition),
        (join_arguments, JOIN, join_by_definition),
    ):
        given = arguments(dtype=dtype)
        grads = gradients_like(operator(*given.values()))
        cast = {name: x.to(weight_dtype) if weight_dtype and "weight" in name else x for name, x in given.items()}
        outputs, of_inputs = outputs_and_gradients(operator, cast, grads)
        wide = {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}
        exact, of_exact = outputs_and_gradients(definition, wide, [x.double() for x in grads])
        for x, y in zip((*outputs, *of_inputs.values()), (*exact, *of_exact.values()), strict=True):
            assert relative(x.detach(), y.detach()) < limit
        assert all(x.dtype == dtype for x in outputs)
        assert all(x.dtype == cast[name].dtype for name, x in of_inputs.items())


def test_gradcheck():
    for operator, given in ((SPLIT, split_arguments(n=5, packed=True)), (JOIN, join_arguments(n=3))):
        names = list(differentiable(given))

        def function(*tensors, operator=operator, given=given, names=names):
            return operator(*(given | dict(zip(names, tensors, strict=True))).values())

        assert torch.autograd.gradcheck(function, [given[name].requires_grad_() for name in names])


def test_gradient_of_one_result():
    """Results that nobody uses have no gradient, and take no part."""
    given = split_arguments(recent=False)
    for i in range(3):
        leaves = {name: x.detach().requires_grad_() for name, x in differentiable(given).items()}
        arguments = (given | leaves).values()
        of_operator, of_definition = (
            torch.autograd.grad(function(*arguments)[i].sin().sum(), list(leaves.values()), allow_unused=True)
            for function in (SPLIT, split_by_definition)
        )
        for x, y in zip(of_operator, of_definition, strict=True):
            assert (x == 0).all() if y is None else relative(x, y) < 1e-12


def test_opcheck():
    for operator, gradient, given, others in (
        (
            SPLIT,
            SPLIT_GRADIENT,
            split_arguments(),
            [split_arguments(**SPLITS[x]) for x in ("nothing", "one token", "one norm")],
        ),
        (JOIN, JOIN_GRADIENT, join_arguments(), [join_arguments(**JOINS[x]) for x in ("nothing", "gate alone")]),
    ):
        for i, arguments in enumerate((given, *others)):
            grads = gradients_like(operator(*arguments.values()))
            check_operator(gradient.default, (*grads, *arguments.values()), traced=i == 0)
            leaves = {name: x.requires_grad_() for name, x in differentiable(arguments).items()}
            check_operator(operator.default, tuple((arguments | leaves).values()), traced=i == 0)
    arguments = [x.detach() if torch.is_tensor(x) else x for x in split_arguments().values()]
    check_operator(
        SPLIT_GRADIENT.default, (None, torch.randn(B, N, HK, D, dtype=torch.float64), None, *arguments), traced=False
    )


def test_no_second_derivative():
    for operator, given in ((SPLIT, split_arguments()), (JOIN, join_arguments())):
        leaves = {name: x.requires_grad_() for name, x in differentiable(given).items()}
        outputs = operator(*(given | leaves).values())
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        (grad, *_) = torch.autograd.grad(sum(x.sin().sum() for x in outputs), list(leaves.values()), create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative; pass use_custom_gradient=False"):
            grad.sum().backward()


WRONG = [
    ("split", "qkv", lambda x: x[0], "qkv must be 3-dimensional"),
    ("split", "qkv", lambda x: x[..., :-1], "qkv must have .heads . kv_heads. . head_dim channels and a positive multiple"),
    ("split", "qkv", lambda x: x[..., : (H + HK) * 8], "qkv must have"),
    ("split", "conv_weight", lambda x: x[:, 0], "conv_weight must be 3-dimensional"),
    ("split", "conv_weight", lambda x: x[:-1], "conv_weight must have shape"),
    ("split", "conv_weight", lambda x: x[..., :3], "recent must have shape"),
    ("split", "conv_weight", lambda x: x.double(), "conv_weight must be float32 or have qkv's dtype"),
    ("split", "conv_weight", lambda _: None, "(recent|places) needs conv_weight"),
    ("split", "recent", lambda x: x[:1], "recent must have shape"),
    ("split", "recent", lambda x: x.half(), "recent must (be|have)"),
    ("split", "q_weight", lambda x: x[1:], "q_weight must have shape"),
    ("split", "k_weight", lambda x: x.half(), "k_weight must be float32 or have qkv's dtype"),
    ("split", "cos", lambda _: None, "cos and sin must be given together"),
    ("split", "cos", lambda x: x[:-1], "cos must have shape"),
    ("split", "sin", lambda x: x[..., :2], "sin must have shape"),
    ("split", "cos", lambda x: x.double(), "cos must be (torch.)?float32"),
    ("split", "cos", lambda x: x[0, 0], "cos must be 3- or 4-dimensional"),
    ("split", "places", lambda x: x[1:], "places must have shape"),
    ("split", "places", lambda x: x.float(), "places must be int32 or int64"),
    *(("split", name, lambda _: 0, f"{name} must be at least 1, got 0") for name in ("heads", "kv_heads", "head_dim")),
    *(("split", name, lambda _: -1.0, f"{name} must be finite and >= 0, got -1") for name in ("q_eps", "k_eps")),
    ("join", "o", lambda x: x[0], "o must be 4-dimensional"),
    ("join", "norm_weight", lambda x: x[1:], "norm_weight must have shape"),
    ("join", "norm_weight", lambda x: x.half(), "norm_weight must be float32 or have o's dtype"),
    ("join", "gate", lambda x: x[:, 1:], "gate must have shape"),
    ("join", "gate", lambda x: x.half(), "gate must (be|have)"),
    ("join", "eps", lambda _: float("nan"), "eps must be finite and >= 0"),
]
GRADIENTS = [
    ("split", "grad_q_rows", lambda x: x[:, :, 1:], "grad_q_rows must have shape"),
    ("split", "grad_v_rows", lambda x: x.half(), "grad_v_rows must (be|have)"),
    ("join", "grad_y", lambda x: x[..., 1:], "grad_y must have shape"),
    ("join", "grad_y", lambda x: x.half(), "grad_y must (be|have)"),
]


def call(which, given, device, with_gradients):
    arguments = {"split": split_arguments, "join": join_arguments}[which]
    made = arguments(**({"d": 8, "packed": True} if which == "split" else {}), dv=8, dtype=torch.float32, device=device)
    operator, gradient = {"split": (SPLIT, SPLIT_GRADIENT), "join": (JOIN, JOIN_GRADIENT)}[which]
    if with_gradients:
        names = ("grad_q_rows", "grad_k_rows", "grad_v_rows") if which == "split" else ("grad_y",)
        made = dict(zip(names, gradients_like(operator(*made.values())), strict=True)) | made
    for name, change in given.items():
        made[name] = change(made[name])
    return (gradient if with_gradients else operator)(*made.values())


@pytest.mark.parametrize("which, name, wrong, message", [*WRONG, *GRADIENTS])
def test_refused_by_name(which, name, wrong, message, device):
    is_gradient = name.startswith("grad_")
    for with_gradients in (True,) if is_gradient else (False, True):
        call(which, {}, device, with_gradients)
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call(which, {name: wrong}, device, with_gradients)


# ---- rotary_factors


POSITIONS = {
    "none": torch.arange(0),
    "one": torch.tensor([5]),
    "some": torch.arange(17),
    "a million": torch.arange(70) + 10**6,
    "the largest int32": 2**31 - 1 - torch.arange(33),
    "negative": -torch.arange(40),
    "per row": torch.tensor([[3], [10**5], [2**30]]),
    "rows": torch.arange(3 * 50).view(3, 50) * 12345,
    "no rows": torch.arange(0).view(0, 4),
    "every other": torch.arange(99)[::2],
    "transposed": torch.arange(3 * 50).view(50, 3).mT,
    "expanded": torch.arange(9).expand(2, 9),
}


def check_rotary(positions, half, base, wide):
    cos, sin = ROTARY(positions, half, base, wide)
    # Extended precision; what is left is the rounding of the frequencies and of the angles to float64, and that of the results.
    frequencies = np.longdouble(base) ** (np.arange(half, dtype=np.longdouble) / -half)
    angles = (positions.cpu().numpy()[..., None] * frequencies)[..., None, :]
    rounding = np.finfo(np.float64 if wide else np.float32).eps
    limit = rounding + 4 * np.abs(angles) * np.finfo(np.float64).eps
    for x, exact, sign in ((cos, np.cos(angles), 1), (sin, np.sin(angles), -1)):
        assert x.shape == (*positions.shape, 1, 2 * half) and x.is_contiguous() and x.device == positions.device
        assert x.dtype == (torch.float64 if wide else torch.float32)
        first, second = np.split(x.cpu().double().numpy(), 2, axis=-1)
        assert np.array_equal(first, sign * second)
        assert (np.abs(second - exact) <= limit).all()


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rotary_factors(positions, device):
    for dtype in (torch.int32, torch.int64):
        for half, base, wide in ((16, 1e4, False), (16, 1e4, True), (1, 1.0, False), (5, 5e5, False), (128, 100.0, False)):
            check_rotary(positions.to(device).to(dtype), half, base, wide)


def test_rotary_factors_are_registered(device):
    for name in ("per row", "every other", "none"):
        for wide in (False, True):
            check_operator(ROTARY.default, (POSITIONS[name].to(device), 6, 1e4, wide), traced=name == "per row")


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"positions": torch.tensor(3)}, "positions must be 1- or 2-dimensional, got 0 dimensions"),
        ({"positions": torch.zeros(1, 2, 3, dtype=torch.int64)}, "positions must be 1- or 2-dimensional, got 3 dimensions"),
        ({"positions": torch.zeros(3)}, "positions must be int32 or int64, got torch.float32"),
        ({"half": 0}, "half must be at least 1, got 0"),
        ({"base": 0.0}, "base must be finite and > 0, got 0"),
        ({"base": float("inf")}, "base must be finite and > 0, got inf"),
    ],
)
def test_rotary_factors_are_refused_by_name(wrong, message, device):
    given = {"positions": torch.arange(4), "half": 8, "base": 1e4, "wide": False} | wrong
    given["positions"] = given["positions"].to(device)
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        ROTARY(*given.values())


def test_rotary_factors_in_transforms():
    positions = torch.arange(3 * 5).view(3, 5)
    cos, sin = torch.func.vmap(lambda x: Rotation.at(x, 8, 1e4, torch.float32))(positions)
    for x, y in zip((cos, sin), ROTARY(positions, 4, 1e4, False), strict=True):
        assert torch.equal(x, y)


# ---- the layer


def layer_of(dtype=torch.float32, **options):
    torch.manual_seed(1)
    layer = FastmaxSelfAttention(64, 4, dtype=dtype, **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return layer


def train(layer, x, **options):
    x = x.detach().requires_grad_()
    y = layer(x, **options)
    return y.detach(), *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])


@pytest.fixture
def operators(monkeypatch):
    """Makes layers use the operators on a CPU too, and returns the names of those that were called."""
    called = []
    monkeypatch.setattr(extension, "expects_kernels", lambda x: x.dtype != torch.float64)
    for name in ("split_heads", "join_heads"):
        original = getattr(torch.ops.fastmax, name)

        def function(*arguments, name=name, original=original):
            called.append((name, arguments[2] is not None if name == "split_heads" else None))
            return original(*arguments)

        monkeypatch.setattr(f"fastmax.ops.{name}", function)
    return called


LAYERS = {
    "default": {},
    "grouped": {"num_kv_heads": 2, "value_dim": 24},
    "wide convolution": {"conv": 7},
    "no convolution": {"conv": 0},
    "without norms": {"qk_norm": False, "output_norm": False},
    "without rotation and gate": {"rope": False, "output_gate": False},
    "softmax": {"attention": "softmax"},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_the_layer_uses_the_operators(options, operators):
    """Outputs and gradients are those of PyTorch operations, which use_custom_gradient=False takes."""
    layer, x = layer_of(**options), torch.randn(2, 37, 64)
    actual = train(layer, x)
    assert operators == [("split_heads", layer.conv is not None), ("join_heads", None)]
    layer.use_custom_gradient = False
    for y, exact in zip(actual, train(layer, x), strict=True):
        assert relative(y, exact.double()) < 2e-5  # float32 sums in another order
    assert len(operators) == 2


def test_packed_and_padded_sequences(operators):
    layer, x = layer_of(), torch.randn(1, 37, 64)
    mask = torch.rand(2, 37) < 0.7
    for given, options in (
        (x, {"cu_seqlens": torch.tensor([0, 1, 9, 9, 37], dtype=torch.int32)}),
        (torch.randn(2, 37, 64), {"attention_mask": mask}),
    ):
        results = []
        for layer.use_custom_gradient in (True, False):
            results.append(train(layer, given, **options))
        keep = options.get("attention_mask", torch.ones(1, 37, dtype=torch.bool))
        for y, exact in zip(*results, strict=True):
            y, exact = (z[keep] if z.shape[:2] == keep.shape else z for z in (y, exact))
            assert relative(y, exact.double()) < 3e-6
    assert len(operators) == 4


def test_generation(operators):
    """A sequence in pieces has the outputs of one call, and the states of PyTorch operations."""
    layer, x = layer_of(), torch.randn(2, 23, 64)
    with torch.no_grad():
        whole = layer(x)
        results = []
        for layer.use_custom_gradient in (True, False):
            state, outputs = layer.init_state(2), []
            for begin, end in itertools.pairwise((0, 2, 3, 4, 17, 22)):
                y, state = layer(x[:, begin:end], state)
                outputs.append(y)
            outputs.append(layer.step_(x[:, 22:], state))
            results.append((torch.cat(outputs, 1), state.recent))
            torch.testing.assert_close(results[-1][0], whole)
    assert torch.equal(results[0][1], results[1][1])
    assert len(operators) == 2 + 2 * 6


def test_a_state_has_derivatives_of_any_order(operators):
    layer, x = layer_of(), torch.randn(1, 1, 64, requires_grad=True)
    y, _ = layer(x, layer.init_state(1))
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    grad.square().sum().backward()
    assert operators == [] and x.grad.isfinite().all()


def test_transforms_use_pytorch_operations(operators):
    layer, x = layer_of(), torch.randn(3, 2, 9, 64)
    layer.use_custom_gradient = False
    expected = torch.stack([layer(rows) for rows in x])
    layer.use_custom_gradient = True
    torch.testing.assert_close(torch.func.vmap(layer)(x), expected)
    assert operators == []


@torch_warns
def test_compiled(operators, fresh_dynamo):
    layer, x = layer_of(), torch.randn(2, 37, 64)
    expected = train(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = x.requires_grad_()
    y = compiled(x)
    for z, exact in zip((y, *torch.autograd.grad(y.sin().sum(), [x, *layer.parameters()])), expected, strict=True):
        torch.testing.assert_close(z, exact)


def test_autocast(operators):
    """The weights stay float32, and the tokens are bfloat16."""
    layer, x = layer_of(), torch.randn(2, 37, 64)
    with torch.autocast("cpu", torch.bfloat16):
        actual = train(layer, x)
        layer.use_custom_gradient = False
        expected = train(layer, x)
    assert len(operators) == 2
    for y, exact in zip(actual, expected, strict=True):
        assert y.dtype == exact.dtype and relative(y, exact.double()) < 3e-2


def test_a_convolution_that_does_more_is_called(operators):
    layer, x = layer_of(), torch.randn(2, 9, 64)
    expected = layer(x)
    seen = []
    layer.conv.register_forward_hook(lambda module, arguments, output: seen.append(output))
    torch.testing.assert_close(layer(x), expected)

    class Negative(ShortConvolution):
        def forward(self, x, *arguments):
            y, last = super().forward(x, *arguments)
            return -y, last

    hooked = layer.conv
    layer.conv = Negative(hooked.weight.shape[0], 4)
    layer.conv.weight = hooked.weight
    torch.testing.assert_close(layer(x), -expected)  # signs of q and k cancel, and that of v stays
    assert len(seen) == 1 and [has_weight for name, has_weight in operators if name == "split_heads"] == [True, False, False]


def test_norms_without_scales_or_eps(operators):
    """An RMS norm without an eps takes that of the dtype, which the operator does not know."""
    layer, x = layer_of(), torch.randn(2, 9, 64)
    with torch.no_grad():
        layer.q_norm.weight.fill_(1.0)
    expected = layer(x)
    layer.q_norm = torch.nn.RMSNorm(16, 1e-6, elementwise_affine=False)
    torch.testing.assert_close(layer(x), expected)
    assert len(operators) == 4
    layer.q_norm = torch.nn.RMSNorm(16)
    layer(x)
    assert [name for name, _ in operators[4:]] == ["join_heads"]


def test_float64_and_other_head_dims_use_pytorch_operations(operators):
    for layer in (layer_of(dtype=torch.float64), layer_of(head_dim=12)):
        layer(torch.randn(1, 5, 64, dtype=layer.qkv_proj.weight.dtype))
    assert operators == []


def test_last_tokens():
    conv, x, recent = ShortConvolution(3, 4), torch.randn(2, 5, 3), torch.randn(2, 3, 3)
    tokens = torch.cat([recent, x], 1)
    for n in range(6):
        assert torch.equal(conv.last_tokens(x[:, :n], recent), tokens[:, n : n + 3])
        assert torch.equal(conv(x[:, :n], recent)[1], tokens[:, n : n + 3])
        zeros = torch.cat([torch.zeros_like(recent), x], 1)
        assert torch.equal(conv.last_tokens(x[:, :n]), zeros[:, n : n + 3])
    count = torch.tensor([0, 4])
    expected = torch.stack([tokens[0, :3], tokens[1, 4:7]])
    assert torch.equal(conv.last_tokens(x, recent, count), expected)
