"""Argument names of other libraries are refused, with a message that names what to use in their place."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fastmax
from fastmax import FASTMultiHeadAttention, fastmax_attention, flash_attention
from fastmax.core import other_arguments
from fastmax.prepare import sharded_dispatch

Q = torch.ones(2, 4, 5, 8)
PARAMETERS = Path(__file__).parents[1] / "docs" / "parameters.md"


def call_module(q, k, v, **options):
    return FASTMultiHeadAttention()(q, k, v, **options)


FUNCTIONS = {
    "fastmax_attention": fastmax_attention,
    "flash_attention": flash_attention,
    "FASTMultiHeadAttention.forward": call_module,
}
# The value, and what the message of each function names. None: an argument that the function has.
CASES = {
    "is_causal": (True, "causal=True", "causal=True", "mask=True"),
    "causal": (True, None, None, "mask=True"),
    "mask": (torch.ones(5, 5, dtype=torch.bool), "causal=True", "attention_mask", None),
    "attn_mask": (torch.ones(5, 5, dtype=torch.bool), "attention_mask", "causal=True", "mask=True"),
    "key_padding_mask": (
        torch.ones(2, 5),
        "attention_mask, .*opposite",
        "attention_mask, .*opposite",
        "attention_mask, .*opposite",
    ),
    "scale": (0.5, "temperature, its inverse", None, "temperature"),
    "softmax_scale": (0.5, "temperature, its inverse", "pass scale", "temperature"),
    "dropout_p": (0.1, "dropout", "not supported", "dropout"),
    "enable_gqa": (True, "fewer heads", "fewer heads", "fewer heads"),
    "window_size": ((3, 0), "exact_window", r"window=\(left, right\)", "exact_window"),
    "alibi_slopes": (torch.ones(4), "log_decay", "log_decay", "log_decay"),
    "return_attn_probs": (True, "return_lse", "return_lse", "return_lse"),
    "cu_seqlens_q": (None, "cu_seqlens", "cu_seqlens", "cu_seqlens"),
    "initial_state": (None, "init_state", "init_state", "init_state"),
    "temperature": (2.0, None, "pass scale", None),
    "exact_window": (2, None, "window=w", None),
    "drop_noise": (Q, None, "fastmax_attention", None),
    "need_weights": (False, "never formed", "never formed", "never formed"),
    "use_custom_gradient": (True, None, None, "constructor"),
}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", CASES)
def test_refused_with_what_takes_their_place(name, function):
    value, *instead = CASES[name]
    instead = dict(zip(FUNCTIONS, instead, strict=True))[function]
    if instead is None:
        pytest.skip(f"{function} has {name}")
    got = re.escape(f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value))
    with pytest.raises(TypeError, match=rf"^{name} is not an argument of {function}, got {got}.*: .*{instead}"):
        FUNCTIONS[function](Q, Q, Q, **{name: value})


@pytest.mark.parametrize("name", ["attention_mask", "drop_noise", "log_decay", "cu_seqlens", "return_lse"])
def test_arguments_of_forward_in_the_constructor(name):
    with pytest.raises(TypeError, match=f"{name} is not an argument of FASTMultiHeadAttention, got .*argument of forward"):
        FASTMultiHeadAttention(**{name: None})


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), lambda q, k, v, **given: FASTMultiHeadAttention(**given)])
def test_names_that_nobody_has(function):
    with pytest.raises(TypeError, match=r"nonsense is not an argument of \S+, got 3 \(int\)$"):
        function(Q, Q, Q, nonsense=3)


@pytest.mark.parametrize("function", [fastmax_attention, flash_attention])
def test_refused_in_a_context_too(function):
    def call(attention, arguments):
        raise AssertionError("the context got arguments that the function does not have")

    context = SimpleNamespace(call=call, telling=lambda check: check)
    with sharded_dispatch.entered(context), pytest.raises(TypeError, match="is_causal is not an argument of"):
        function(Q, Q, Q, is_causal=True)


def test_no_name_of_the_table_is_an_argument_of_both_functions():
    own = [set(inspect.signature(function).parameters) for function in (fastmax_attention, flash_attention)]
    assert not set(other_arguments.INSTEAD) & set.intersection(*own) - {"causal"}  # the module calls it mask


def test_the_documentation_s_table_is_covered():
    table = PARAMETERS.read_text().split("## Called elsewhere")[1]
    rows = [row.split("|")[2:5] for row in table.splitlines() if row.startswith("| ")][2:]
    names = {name for row in rows for cell in row for name in re.findall(r"`([a-z_]+)(?:=[^`]*)?`", cell)}
    functions = {"flash_attn_varlen_func", "flash_attn_with_kvcache"}
    own = {*inspect.signature(fastmax_attention).parameters}
    assert {"attn_mask", "softmax_scale", "window_size"} <= names
    assert names - functions - own <= set(other_arguments.INSTEAD)


# ---- sizes that a 64-bit integer cannot hold, or a 32-bit one

SIZES = {
    "exact_window": lambda size: fastmax_attention(Q, Q, Q, exact_window=size),
    "exact_window of a module": lambda size: FASTMultiHeadAttention(exact_window=size),
    "exact_window of a state": lambda size: fastmax.decoding.init_state(1, 1, 4, exact_window=size),
    "exact_window of a layer": lambda size: fastmax.FastmaxSelfAttention(8, 2, exact_window=size),
    "exact_window of hbm_traffic": lambda size: fastmax.hbm_traffic(8, 64, algorithm="linear", exact_window=size),
    "window": lambda size: flash_attention(Q, Q, Q, window=size),
    "window on the left": lambda size: flash_attention(Q, Q, Q, window=(size, 0)),
    "window on the right": lambda size: flash_attention(Q, Q, Q, window=(0, size)),
    "window of a layer": lambda size: fastmax.FastmaxSelfAttention(8, 2, attention="softmax", window=size),
    "batch": lambda size: fastmax.decoding.init_state(size, 1, 4),
    "kv_heads": lambda size: fastmax.decoding.init_state(1, size, 4),
    "head_dim": lambda size: fastmax.decoding.init_state(1, 1, size),
    "value_dim": lambda size: fastmax.decoding.init_state(1, 1, 4, size),
    "flush_interval": lambda size: fastmax.decoding.init_state(1, 1, 4, flush_interval=size),
    "batch of a layer": lambda size: fastmax.FastmaxSelfAttention(8, 2).init_state(size),
    "embed_dim": lambda size: fastmax.FastmaxSelfAttention(size, 1),
    "conv": lambda size: fastmax.FastmaxSelfAttention(8, 2, conv=size),
    "repeats": lambda size: fastmax.decoding.init_state(1, 1, 4).repeat(size),
    "block_size": lambda size: fastmax.softmax.online_softmax(Q, block_size=size),
    "n": lambda size: fastmax.rpe_matrix_creator(size, 4),
    "d": lambda size: fastmax.rpe_matrix_creator(4, size),
}


@pytest.mark.parametrize("size", [2**31, 2**63, 10**30], ids=["2^31", "2^63", "10^30"])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_have_a_limit(name, size):
    with pytest.raises(ValueError, match=rf"^{name.split()[0]} must be .*2147483647.*, got .*{str(size)[:5]}"):
        SIZES[name](size)


def test_a_window_of_the_limit_is_all_keys():
    q = torch.randn(1, 2, 6, 4, dtype=torch.float64)
    exact = flash_attention(q, q, q, causal=True, scale=1.0)
    for custom in (True, False):
        o = fastmax_attention(q, q, q, causal=True, exact_window=2**31 - 1, use_custom_gradient=custom)
        torch.testing.assert_close(o, exact)
        o = flash_attention(q, q, q, causal=True, scale=1.0, window=2**31 - 1, use_custom_gradient=custom)
        torch.testing.assert_close(o, exact)


# ---- messages


def test_state_shapes_have_no_quotes():
    state, k = fastmax.decoding.init_state(2, 4, 8), torch.ones(3, 4, 1, 8)
    with pytest.raises(ValueError, match=r"k must have the state's shape \(2, 4, tokens, 8\), got \(3, 4, 1, 8\)"):
        fastmax.decoding.step(k, k, k, state)


WRONG = {
    "dtype of a state": (
        lambda: fastmax.decoding.init_state(1, 1, 4, dtype="float32"),
        r"dtype must be float64.*'float32' \(str\)",
    ),
    "dtype that is an array": (lambda: fastmax.decoding.init_state(1, 1, 4, dtype=Q.numpy()), "dtype must be float64.*ndarray"),
    "rpe_matrix of a state": (
        lambda: fastmax.decoding.init_state(1, 1, 4, rpe_matrix=Q),
        "rpe_matrix must be .*None here, got a tensor of shape.*a recurrent state has no fixed number of keys",
    ),
    "structured": (lambda: fastmax.rpe_matrix_creator(4, 4, structured=Q), "structured must be a bool.*a tensor of shape"),
    "is_zero": (lambda: fastmax.rpe_matrix_creator(4, 4, is_zero=0), r"is_zero must be a bool, got 0 \(int\)"),
    "num_heads": (lambda: fastmax.FastmaxSelfAttention(8, None), "num_heads must be an int, got None"),
    "attention": (lambda: fastmax.FastmaxSelfAttention(8, 2, attention=Q), 'attention must be "fastmax".*a tensor of shape'),
    "p of a layer": (lambda: fastmax.FastmaxSelfAttention(8, 2, p=Q), "p must be 1 or 2, got a tensor of shape"),
    "p of softmax": (
        lambda: fastmax.FastmaxSelfAttention(8, 2, attention="softmax", p=Q),
        'p has no effect with attention="softmax", got a tensor of shape',
    ),
    "flush_interval of softmax": (
        lambda: fastmax.FastmaxSelfAttention(8, 2, attention="softmax").init_state(1, flush_interval=Q),
        "flush_interval must be an int, got a tensor of shape",
    ),
    "indices": (lambda: fastmax.decoding.init_state(1, 1, 4).select(None), "indices must be a tensor or sequence.*None"),
    "cu_seqlens of hbm_traffic": (
        lambda: fastmax.hbm_traffic(8, 64, cu_seqlens=8),
        r"cu_seqlens must hold ints, got 8 \(int\)",
    ),
    "p of hbm_traffic": (lambda: fastmax.hbm_traffic(8, 64, p=Q), "p must be 1 or 2, got a tensor of shape"),
    "algorithm of hbm_traffic": (lambda: fastmax.hbm_traffic(8, 64, algorithm=Q), "algorithm must be one of .*a tensor of"),
    "float mask": (lambda: fastmax_attention(Q, Q, Q, attention_mask=Q[:, 0, :, 0]), "attention_mask must be.*mask == 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    call, message = WRONG[name]
    with pytest.raises((TypeError, ValueError), match=message) as error:
        call()
    assert len(str(error.value)) < 400 and "\n" not in str(error.value)
