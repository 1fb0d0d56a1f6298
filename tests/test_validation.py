"""Every bad input raises an exception of the right type, which names the argument, its value and the accepted ones, before any
work."""

import re
import warnings
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fastmax
from fastmax import fastmax_attention
from fastmax.core import validation

B, H, HK, N, M, D, DV = 2, 4, 2, 5, 7, 8, 6


def tensor(*shape, dtype=torch.float32, device="cpu"):
    return torch.ones(shape, device=device).to(dtype)


def good():
    return {"q": tensor(B, H, N, D), "k": tensor(B, HK, M, D), "v": tensor(B, HK, M, DV)}


class NoCompute(TorchDispatchMode):
    """Fails on any tensor operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran before the arguments were checked")


def test_no_compute_notices_a_good_call():
    with pytest.raises(AssertionError, match="ran before"), NoCompute():
        fastmax_attention(**good())


# name: (arguments that differ from `good`, exception, what its message must hold)
BAD = {
    "q is no tensor": ({"q": [[1.0]]}, TypeError, ["q must be", "[[1.0]] (list)"]),
    "k is None": ({"k": None}, TypeError, ["k must be", "None"]),
    "v is an array": ({"v": "v"}, TypeError, ["v must be", "'v'"]),
    "q of rank 2": ({"q": tensor(N, D)}, ValueError, ["q must be", "4-d", "3-d", "2"]),
    "q of rank 5": ({"q": tensor(1, B, H, N, D)}, ValueError, ["q must be", "4-d", "5"]),
    "k of rank 3 with q of rank 4": ({"k": tensor(HK, M, D)}, ValueError, ["k must be", "3"]),
    "v of rank 2": ({"v": tensor(M, DV)}, ValueError, ["v must be", "2"]),
    "batch sizes differ": ({"k": tensor(3, HK, M, D)}, ValueError, ["batch", "2", "3"]),
    "batch size of v differs": ({"v": tensor(3, HK, M, DV)}, ValueError, ["v", "3"]),
    "head dims of q and k differ": ({"k": tensor(B, HK, M, D + 1)}, ValueError, ["k must", "head_dim", "8", "9"]),
    "tokens of k and v differ": ({"v": tensor(B, HK, M + 1, DV)}, ValueError, ["v must", "tokens", "7", "8"]),
    "heads of k and v differ": ({"v": tensor(B, 1, M, DV)}, ValueError, ["v must", "heads", "1", "2"]),
    "heads do not divide": (
        {"k": tensor(B, 3, M, D), "v": tensor(B, 3, M, DV)},
        ValueError,
        ["heads", "multiple", "4", "3"],
    ),
    "no kv heads": (
        {"k": tensor(B, 0, M, D), "v": tensor(B, 0, M, DV)},
        ValueError,
        ["heads", "multiple", "4", "0"],
    ),
    "more kv heads than query heads": (
        {"k": tensor(B, 8, M, D), "v": tensor(B, 8, M, DV)},
        ValueError,
        ["heads", "multiple", "4", "8"],
    ),
    "no head dim": ({"q": tensor(B, H, N, 0), "k": tensor(B, HK, M, 0)}, ValueError, ["head_dim", "0"]),
    "no value head dim": ({"v": tensor(B, HK, M, 0)}, ValueError, ["v must", "head_dim"]),
    "k has another dtype": ({"k": tensor(B, HK, M, D, dtype=torch.float64)}, TypeError, ["k must", "float32", "float64"]),
    "v has another dtype": ({"v": tensor(B, HK, M, DV, dtype=torch.float16)}, TypeError, ["v must", "float32", "float16"]),
    "k on another device": ({"k": tensor(B, HK, M, D, device="meta")}, ValueError, ["k must", "device", "cpu", "meta"]),
    "v on another device": ({"v": tensor(B, HK, M, DV, device="meta")}, ValueError, ["v must", "device", "cpu", "meta"]),
    "more queries than keys, causal": (
        {"q": tensor(B, H, 9, D), "causal": True},
        ValueError,
        ["causal", "n = 9", "m = 7"],
    ),
    "one query more than keys, causal": (
        {"q": tensor(B, H, M + 1, D), "causal": True},
        ValueError,
        ["causal", "n = 8", "m = 7"],
    ),
    "causal is a tensor": (
        {"causal": torch.ones(N, M, dtype=torch.bool)},
        TypeError,
        ["causal must be a bool", "attention_mask"],
    ),
    "causal is an int": ({"causal": 1}, TypeError, ["causal must be a bool", "1"]),
    "causal is None": ({"causal": None}, TypeError, ["causal must be a bool", "None"]),
    "temperature of zero": ({"temperature": 0.0}, ValueError, ["temperature must", "0"]),
    "negative temperature": ({"temperature": -1.0}, ValueError, ["temperature must", "-1"]),
    "temperature as text": ({"temperature": "1"}, TypeError, ["temperature must", "'1'"]),
    "lim of zero": ({"normalize": True, "lim": 0.0}, ValueError, ["lim must", "0"]),
    "negative lim": ({"normalize": "token", "lim": -2.0}, ValueError, ["lim must", "-2"]),
    "p of zero": ({"p": 0}, ValueError, ["p must", "1 or 2", "0"]),
    "p of three": ({"p": 3}, ValueError, ["p must", "1 or 2", "3"]),
    "p between": ({"p": 1.5}, ValueError, ["p must", "1 or 2", "1.5"]),
    "p is True": ({"p": True}, ValueError, ["p must", "1 or 2", "True (bool)"]),
    "p is a tensor": ({"p": tensor(2)}, ValueError, ["p must", "1 or 2", "(2,)"]),
    "temperature whose inverse is infinite": ({"temperature": 1e-320}, ValueError, ["temperature must", "1e-320"]),
    "a0 beyond floats": ({"a0": 10**400}, ValueError, ["a0 must be finite", "1000", "..."]),
    "a1 beyond float32": ({"a1": -3.5e38}, ValueError, ["a1 must be a number of float32, at most 3.4028e+38", "-3.5e+38"]),
    "dropout beyond float32": ({"dropout": 1e39}, ValueError, ["dropout must be a number of float32", "1e+39"]),
    "temperature whose inverse is beyond float32": ({"temperature": 1e-39}, ValueError, ["temperature must", "1e-39"]),
    "lim without normalize": ({"lim": 0.5}, ValueError, ["lim has no effect without normalize", "0.5"]),
    "noise without dropout": (
        {"drop_noise": tensor(B, H, N, DV)},
        ValueError,
        ["drop_noise has no effect without dropout", "dropout = 0"],
    ),
    "unknown normalize": ({"normalize": "row"}, ValueError, ["normalize must", "sequence", "token", "row"]),
    "normalize is a number": ({"normalize": 2}, ValueError, ["normalize must", "sequence", "token", "2"]),
    "negative dropout": ({"dropout": -0.1}, ValueError, ["dropout must", "-0.1"]),
    "dropout is a tensor": ({"dropout": tensor(2, 3)}, TypeError, ["dropout must", "(2, 3)"]),
    "noise is no tensor": ({"drop_noise": 0.5, "dropout": 0.1}, TypeError, ["drop_noise must", "0.5"]),
    "noise of q's shape": (
        {"drop_noise": tensor(B, H, N, D), "dropout": 0.1},
        ValueError,
        ["drop_noise must", "(2, 4, 5, 6)", "(2, 4, 5, 8)"],
    ),
    "noise to be broadcast": (
        {"drop_noise": tensor(1), "dropout": 0.1},
        ValueError,
        ["drop_noise must", "(2, 4, 5, 6)", "(1,)"],
    ),
    "noise of integers": (
        {"drop_noise": tensor(B, H, N, DV, dtype=torch.int64), "dropout": 0.1},
        TypeError,
        ["drop_noise must", "int64"],
    ),
    "noise on another device": (
        {"drop_noise": tensor(B, H, N, DV, device="meta"), "dropout": 0.1},
        ValueError,
        ["drop_noise must", "cpu", "meta"],
    ),
    "rpe_matrix is True": ({"rpe_matrix": True}, TypeError, ["rpe_matrix must", "sinusoidal", "True", "causal", "mask"]),
    "rpe_matrix is False": ({"rpe_matrix": False}, TypeError, ["rpe_matrix must", "sinusoidal", "False", "mask"]),
    "rpe_matrix is a number": ({"rpe_matrix": 3}, TypeError, ["rpe_matrix must", "3"]),
    "rpe_matrix is an unknown word": ({"rpe_matrix": "learned"}, TypeError, ["rpe_matrix must", "sinusoidal", "learned"]),
    "rpe_matrix for n = m": ({"rpe_matrix": tensor(2 * N - 1, D)}, ValueError, ["rpe_matrix must", "(11, 8)", "(9, 8)"]),
    "rpe_matrix of another head dim": (
        {"rpe_matrix": tensor(N + M - 1, D + 1)},
        ValueError,
        ["rpe_matrix must", "(11, 8)", "(11, 9)"],
    ),
    "rpe_matrix of rank 3": ({"rpe_matrix": tensor(1, N + M - 1, D)}, ValueError, ["rpe_matrix must", "(1, 11, 8)"]),
    "rpe_matrix of another dtype": (
        {"rpe_matrix": tensor(N + M - 1, D, dtype=torch.float64)},
        TypeError,
        ["rpe_matrix must", "float32", "float64"],
    ),
    "rpe_matrix on another device": (
        {"rpe_matrix": tensor(N + M - 1, D, device="meta")},
        ValueError,
        ["rpe_matrix must", "cpu", "meta"],
    ),
    "rpe_matrix with the linear algorithm": (
        {"rpe_matrix": tensor(N + M - 1, D), "algorithm": "linear"},
        ValueError,
        ["rpe_matrix", "linear", "quadratic", "sinusoidal"],
    ),
    "attention_mask is no tensor": ({"attention_mask": True}, TypeError, ["attention_mask must", "bool tensor", "True"]),
    "attention_mask of floats": ({"attention_mask": tensor(B, M)}, TypeError, ["attention_mask must", "bool", "float32"]),
    "attention_mask of another length": (
        {"attention_mask": tensor(B, N, dtype=torch.bool)},
        ValueError,
        ["attention_mask must", "(2, 7)", "(2, 5)"],
    ),
    "attention_mask to be broadcast": (
        {"attention_mask": tensor(1, M, dtype=torch.bool)},
        ValueError,
        ["attention_mask must", "(2, 7)", "(1, 7)"],
    ),
    "attention_mask of rank 4": (
        {"attention_mask": tensor(B, 1, 1, M, dtype=torch.bool)},
        ValueError,
        ["attention_mask must", "(2, 7)", "(2, 1, 1, 7)"],
    ),
    "attention_mask on another device": (
        {"attention_mask": tensor(B, M, dtype=torch.bool, device="meta")},
        ValueError,
        ["attention_mask must", "cpu", "meta"],
    ),
    "unknown algorithm": ({"algorithm": "fast"}, ValueError, ["algorithm must", "auto", "quadratic", "linear", "fast"]),
    "algorithm is None": ({"algorithm": None}, ValueError, ["algorithm must", "auto", "None"]),
    "algorithm is an array": ({"algorithm": np.array([1, 2])}, ValueError, ["algorithm must", "auto", "[1, 2]"]),
}
for _dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
    _all = {name: torch.ones(x.shape).to(_dtype) for name, x in good().items()}
    _name = str(_dtype).removeprefix("torch.")
    BAD[f"dtype {_name}"] = (_all, TypeError, ["q must", "float32", "bfloat16", _name])
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls some of these kinds prototypes
    NOT_DENSE = {
        "nested": (torch.nested.as_nested_tensor([torch.ones(3, 4)]), ["nested", "to_padded_tensor", "attention_mask"]),
        "jagged": (torch.nested.nested_tensor([torch.ones(3, 4)], layout=torch.jagged), ["nested", "to_padded_tensor"]),
        "sparse COO": (tensor(3, 4).to_sparse(), ["torch.sparse_coo", ".to_dense()"]),
        "sparse CSR": (tensor(3, 4).to_sparse_csr(), ["torch.sparse_csr", ".to_dense()"]),
        "quantized": (torch.quantize_per_tensor(tensor(3, 4), 0.1, 0, torch.qint8), ["quantized", "qint8", ".dequantize()"]),
    }
for _kind, (_tensor, _parts) in NOT_DENSE.items():
    for _name in ("q", "k", "v", "drop_noise", "rpe_matrix", "attention_mask"):
        _change = {_name: _tensor} | ({"dropout": 0.1} if _name == "drop_noise" else {})
        BAD[f"{_kind} {_name}"] = (_change, TypeError, [f"{_name} must be a dense tensor", *_parts])
for _name in ("temperature", "a0", "a1", "a2", "lim", "dropout"):
    for _value in (float("nan"), float("inf"), float("-inf")):
        BAD[f"{_name} = {_value}"] = ({_name: _value}, ValueError, [f"{_name} must", str(_value)])
    BAD[f"{_name} = None"] = ({_name: None}, TypeError, [f"{_name} must", "None"])


def assert_refused(attention, arguments, exception, parts):
    with pytest.raises(Exception) as raised, NoCompute():
        attention(**arguments)
    assert raised.type is exception, f"{raised.type.__name__}: {raised.value}"
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name, custom):
    changes, *refusal = BAD[name]
    assert_refused(partial(fastmax_attention, use_custom_gradient=custom), good() | changes, *refusal)


THREE_D = {
    "ranks differ": ({"k": tensor(B, HK, M, D)}, ValueError, ["k must"]),
    "heads do not divide": ({"k": tensor(3, M, D), "v": tensor(3, M, DV)}, ValueError, ["heads", "8", "3"]),
    "mask does not divide": ({"attention_mask": tensor(3, M, dtype=torch.bool)}, ValueError, ["attention_mask", "(3, 7)"]),
    "noise of rank 4": ({"drop_noise": tensor(B, H, N, DV), "dropout": 0.1}, ValueError, ["drop_noise", "(8, 5, 6)"]),
}


@pytest.mark.parametrize("name", THREE_D)
def test_bad_input_of_three_dimensions(name):
    changes, *refusal = THREE_D[name]
    assert_refused(fastmax_attention, {name: x.flatten(0, 1) for name, x in good().items()} | changes, *refusal)


def test_mask_whose_batch_divides_the_heads_of_q_alone():
    """q has 8 heads and k has 4, so a mask of 8 sequences would have two of them per head of k."""
    three_d = {name: x.flatten(0, 1) for name, x in good().items()}
    mask = tensor(8, M, dtype=torch.bool)
    assert_refused(fastmax_attention, three_d | {"attention_mask": mask}, ValueError, ["attention_mask", "4", "(8, 7)"])


def test_the_rpe_error_is_about_this_function():
    with pytest.raises(TypeError) as error:
        fastmax_attention(**good(), rpe_matrix="alibi")
    assert "'alibi'" in str(error.value) and "mask" not in str(error.value)


@pytest.mark.parametrize("name", ["q", "attention_mask", "temperature", "rpe_matrix"])
def test_messages_are_short(name):
    long = [[[float(i) for i in range(100)]] * 100] * 10
    for value in (long, np.zeros((100, 100)), "x" * 100_000):
        with pytest.raises(TypeError, match=f"{name} must") as error:
            fastmax_attention(**(good() | {name: value}))
        assert len(str(error.value)) < 400


@pytest.mark.parametrize("attention", [fastmax_attention, fastmax.flash_attention], ids=["fastmax", "flash"])
@pytest.mark.parametrize("value", [512, None, "no"])
def test_the_toggle_is_a_bool(value, attention):
    """512 in the position of the toggle is an embed_dim by mistake."""
    refusal = (TypeError, ["use_custom_gradient must be a bool", repr(value)])
    assert_refused(attention, good() | {"use_custom_gradient": value}, *refusal)


def test_flash_attention_refuses_too():
    refused = [
        ({"return_lse": 1}, ["return_lse must be a bool", "1"]),
        ({"causal": tensor(N, M)}, ["causal must be a bool", "attention_mask"]),
        ({"v": tensor(B, HK, M, DV).to_sparse()}, ["v must be a dense tensor"]),
        ({"scale": "1"}, ["scale must", "'1'"]),
    ]
    for change, parts in refused:
        assert_refused(fastmax.flash_attention, good() | change, TypeError, parts)


def test_the_state_s_device():
    state = fastmax.decoding.init_state(B, HK, D, DV, device="meta")
    arguments = {"q": tensor(B, H, 1, D), "k": tensor(B, HK, 1, D), "v": tensor(B, HK, 1, DV), "state": state}
    assert_refused(fastmax.decoding.step, arguments, ValueError, ["device", "meta", "cpu"])


def test_a_state_s_lim_without_normalize():
    with pytest.raises(ValueError, match=r"lim has no effect without normalize, got lim = 0\.5"):
        fastmax.decoding.init_state(B, HK, D, lim=0.5)


def test_numbers_of_other_kinds():
    """Fractions and numpy's numbers are accepted as real numbers."""
    inputs = good()
    expected = fastmax_attention(**inputs, a0=1.5, temperature=2.0)
    for half in (Fraction(3, 2), np.float32(1.5), np.float64(1.5)):
        assert torch.equal(fastmax_attention(**inputs, a0=half, temperature=np.int64(2), p=np.int64(2)), expected)


def test_options_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        fastmax_attention(*good().values(), True)


def test_a_good_call_raises_and_warns_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for causal in (False, True):
            o = fastmax_attention(**good(), causal=causal, temperature=2, dropout=0.1, normalize="token")
            assert o.shape == (B, H, N, DV)


@pytest.mark.parametrize("bad", [{"n": 0}, {"n": -1}, {"d": 0}], ids=["n = 0", "n < 0", "d = 0"])
def test_rpe_matrix_creator_refuses(bad):
    with pytest.raises(ValueError, match="|".join(bad)):
        fastmax.rpe_matrix_creator(**({"n": 4, "d": 4} | bad))


def test_rpe_matrix_creator_refuses_integer_dtypes():
    with pytest.raises(TypeError, match="dtype"):
        fastmax.rpe_matrix_creator(4, 4, dtype=torch.int64)


# ---- meta tensors


@pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "normalize": True, "dropout": 0.1}, {"rpe_matrix": "sinusoidal"}])
def test_meta_tensors_have_shapes_and_no_numbers(options, custom):
    inputs = {name: x.to("meta", torch.bfloat16).requires_grad_() for name, x in good().items()}
    o = fastmax_attention(**inputs, use_custom_gradient=custom, **options)
    assert o.shape == (B, H, N, DV) and o.dtype == torch.bfloat16 and o.is_meta
    o.sum().backward()
    assert all(x.grad.shape == x.shape for x in inputs.values())
    o, lse = fastmax.flash_attention(**inputs, use_custom_gradient=custom, return_lse=True)
    assert o.shape == (B, H, N, DV) and lse.shape == (B, H, N) and o.is_meta and lse.is_meta


def test_meta_tensors_inside_autocast():
    """Autocast does not support the meta device, so these tensors are not cast."""
    with torch.autocast("cpu", torch.bfloat16):
        assert fastmax_attention(**{name: x.to("meta") for name, x in good().items()}).dtype == torch.float32


# ---- denominators that can vanish


def vanishing(**options):
    """Returns the warnings of one call. The caller passes unique options, because each configuration warns once per process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fastmax_attention(**good(), **options)
    return [w for w in caught if issubclass(w.category, RuntimeWarning) and "not positive" in str(w.message)]


UNSAFE = {
    "p=1": {"p": 1, "a1": 1.0101},
    "p=1 at the limit": {"p": 1, "a0": 1.0102, "a1": 1.0102, "normalize": True},
    "p=1, lim too large": {"p": 1, "a1": 1.0103, "normalize": "token", "lim": 1.5},
    "p=1, lim^2 too large": {"p": 1, "a0": 1.2, "a1": 1.0105, "normalize": "token", "lim": 1.1},
    "p=1, normalize, unbounded rpe": {"p": 1, "a1": 0.5, "normalize": "token", "rpe_matrix": "sinusoidal"},
    "p=1, temperature too small": {"p": 1, "a1": 0.9104, "normalize": True, "temperature": 0.5},
    "p=2, discriminant": {"a0": 1.0105, "a1": 2.0, "a2": 0.5},
    "p=2, a2 = 0": {"a1": 1.0106, "a2": 0.0},
    "p=2, a2 < 0": {"a1": 1.0107, "a2": -0.1},
}
SAFE = {
    "defaults": {},
    "p=2": {"a0": 1.0, "a1": 1.4, "a2": 0.5},
    "p=2 without a1": {"a1": 0.0, "a2": 0.0},
    "p=1, normalize": {"p": 1, "a1": 0.9201, "normalize": True},
    "p=1, normalize=token, temperature": {"p": 1, "a1": 0.9202, "normalize": "token", "lim": 2.0, "temperature": 4.0},
    "p=1, normalize, small lim": {"p": 1, "a0": 0.4, "a1": 0.9203, "normalize": "token", "lim": 0.6},
    "p=1 without a1": {"p": 1, "a1": 0.0},
    "p=1 ignores a2": {"p": 1, "a1": 0.0, "a2": -5.0},
}


@pytest.mark.parametrize("name", UNSAFE)
def test_vanishing_denominators_warn_once(name):
    (first,) = vanishing(**UNSAFE[name])
    assert re.search(r"a2 > 0 and a1\^2 < 4 a0 a2", str(first.message)), "says what is safe for p = 2"
    assert re.search(r"a0 > \|a1\| lim\^2 / temperature", str(first.message)), "says what is safe for p = 1"
    assert vanishing(**UNSAFE[name]) == []
    (other,) = vanishing(**(UNSAFE[name] | {"a0": UNSAFE[name].get("a0", 1.0) - 0.001}))
    assert str(other.message) != str(first.message)


@pytest.mark.parametrize("name", SAFE)
def test_safe_settings_do_not_warn(name):
    assert vanishing(**SAFE[name]) == []


# ---- a causal call that looks ahead


@pytest.fixture
def nothing_warned(monkeypatch):
    monkeypatch.setattr(validation, "_warned", set())


def caught_from(call):
    """Returns the RuntimeWarnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [w for w in caught if issubclass(w.category, RuntimeWarning)]


def test_causal_normalize_sequence_warns_once_and_names_token(nothing_warned):
    (first,) = caught_from(lambda: fastmax_attention(**good() | {"q": tensor(B, H, M, D)}, causal=True, normalize=True))
    assert re.search(r'normalize="sequence" \(or True\) later tokens leak .* causal .*normalize="token"', str(first.message))
    assert caught_from(lambda: fastmax_attention(**good(), causal=True, normalize="sequence", lim=0.5)) == []


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_causal_normalize_sequence_warns_too(nothing_warned, dynamic):
    def attend(q, temperature):
        return fastmax_attention(**good() | {"q": q}, causal=True, normalize="sequence", temperature=temperature)

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True, dynamic=dynamic)
    (first,) = caught_from(lambda: compiled(tensor(B, H, M, D), 8.0))
    assert "later tokens leak" in str(first.message)
    assert caught_from(lambda: [compiled(tensor(B, H, n, D), 2.0 + n) for n in range(1, M)]) == []


@pytest.mark.parametrize(
    "options",
    [{"causal": True, "normalize": "token"}, {"causal": True}, {"normalize": "sequence"}, {"normalize": True}],
    ids=str,
)
def test_what_does_not_leak_does_not_warn(options, nothing_warned):
    assert caught_from(lambda: fastmax_attention(**good(), **options)) == []


# ---- where warnings point


def checkpointed():
    module = fastmax.FASTMultiHeadAttention(p=1)
    checkpoint(module, *good().values(), use_reentrant=False)


def swapped():
    layer = torch.nn.TransformerEncoderLayer(8, 2, dim_feedforward=8, dropout=0.0)
    fastmax.swap_attention(layer, p=1)
    layer(torch.ones(3, 1, 8))


@pytest.mark.parametrize("device", ["x", "", "cpu:-1", -1, 10**29, 1.5, True, [1], torch.ones(2)], ids=str)
def test_devices_that_do_not_exist(device):
    layers = [fastmax.FastmaxSelfAttention(8, 2, attention=attention) for attention in ("fastmax", "softmax")]
    error, got = (ValueError if type(device) in (str, int) else TypeError), re.escape(validation.describe(device))
    for call in (
        lambda: fastmax.FastmaxSelfAttention(8, 2, device=device),
        lambda: fastmax.decoding.init_state(1, 2, 4, device=device),
        *(partial(layer.init_state, 1, device=device) for layer in layers),
        *(partial(layer.init_state(1).to, device) for layer in layers),
    ):
        with pytest.raises(error, match=f'device must be None, a torch.device, a name such as "cuda:0" .*got {got}'):
            call()


@pytest.mark.parametrize("device", [None, "cpu", "cpu:0", "meta", torch.device("meta")], ids=str)
def test_devices(device):
    kind = "meta" if "meta" in str(device) else "cpu"
    assert fastmax.FastmaxSelfAttention(8, 2, device=device).qkv_proj.weight.device.type == kind
    assert fastmax.FastmaxSelfAttention(8, 2).init_state(1, device=device).device.type == kind


CALLS = {
    "function": (lambda: fastmax_attention(**good(), p=1), 0),
    "leak": (lambda: fastmax_attention(**good(), causal=True, normalize=True), 0),
    "module": (lambda: fastmax.FASTMultiHeadAttention(p=1)(**good()), 0),
    "state": (lambda: fastmax.decoding.init_state(1, 1, 4, p=1), 0),
    "layer": (swapped, 3),
    "checkpoint": (checkpointed, 2),
}


@pytest.mark.parametrize("name", CALLS)
def test_warnings_point_at_the_line_of_the_user(name, nothing_warned):
    call, line = CALLS[name]
    (warning,) = caught_from(call)
    assert (warning.filename, warning.lineno) == (__file__, call.__code__.co_firstlineno + line)


def test_warnings_of_a_script_point_at_it(nothing_warned):
    """At the top level of a program there is no caller's caller to point at."""
    script = compile("\nfastmax_attention(**inputs, p=1)", "script.py", "exec")
    (warning,) = caught_from(lambda: exec(script, {"fastmax_attention": fastmax_attention, "inputs": good()}))
    assert (warning.filename, warning.lineno) == ("script.py", 2)
