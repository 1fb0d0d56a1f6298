"""Direct calls of `torch.ops.fastmax`, on the CPU and through the CUDA library. Unsafe or silently wrong calls raise an error
that names the argument; errors inside the library keep their exception type."""

import os
import subprocess
import sys
from contextlib import contextmanager
from itertools import product

import pytest
import torch
from test_kernels import WHY_NOT

import fastmax
from fastmax.ops import extension
from fastmax.ops.registration import OPERATORS

B, H, HK, N, M, D, DV = 2, 4, 2, 6, 9, 16, 24
_CUDA = [pytest.mark.cuda, pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}")]
DEVICES = ["cpu", pytest.param("cuda", marks=_CUDA)]


def on_cuda(test):
    for mark in _CUDA:
        test = mark(test)
    return test


# The library's errors are RuntimeErrors: more does not pass its interface.
REFUSED = (ValueError, TypeError, RuntimeError)


def arguments(operator, device):
    """Returns valid arguments by name, in the order of the schema."""

    def tensor(*shape, dtype=torch.float32):
        return torch.rand(shape, device=device).to(dtype)

    q, k, v = tensor(B, H, N, D), tensor(B, HK, M, D), tensor(B, HK, M, DV)
    o, per_query = tensor(B, H, N, DV), tensor(B, H, N) + 1.0
    mask = torch.ones(B, M, dtype=torch.bool, device=device)
    if operator == "softmax":
        return {"x": q, "algorithm": "safe"}
    if operator == "normalize_tokens":
        return {"q": q, "k": k, "lim": 1.0}
    if operator == "normalize_tokens_backward":
        grads, factors = (
            {"grad_q": tensor(B, H, N, D), "grad_k": tensor(B, HK, M, D)},
            {"q_factor": tensor(B, H, N), "k_factor": tensor(B, HK, M)},
        )
        return grads | {"q": q, "k": k} | factors | {"lim": 1.0}
    if operator.startswith("normalized"):
        given, options = {"q": q, "k": k, "v": v}, {"lim": 1.0, "scale": 0.25, "a0": 1.0, "a1": 1.0}
        if operator == "normalized_forward":
            return given | options
        results = {"o": o, "z": per_query, "k_factor": tensor(B, HK, M)}
        return {"grad_o": tensor(B, H, N, DV), "grad_z": tensor(B, H, N)} | given | results | options
    if operator == "gradients_of_sums":
        return {"grad_o": tensor(B, H, N, DV), "grad_z": tensor(B, H, N), "o": o, "z": per_query}
    sums = {"g": tensor(B, H, M, DV), "e": tensor(B, H, M)}
    if operator.startswith("state_of"):
        tokens = {"log_decay": None, "k_start": None, "log_input_gate": None}
        options = {"scale": 0.25, "a0": 1.0, "a1": 1.0, "a2": 0.5, "p": 2, "allow_tf32": False, "keep": True}
        if operator == "state_of_keys":
            return {"k": k, "v": v, "attention_mask": mask} | tokens | options
        return sums | {"q": tensor(B, H, M, D), "k": k, "v": v} | tokens | options
    if operator.startswith("prefill"):
        q, rows = tensor(B, H, M, D), 1 + D + D * (D + 1) // 2
        tokens = {"log_decay": None, "k_start": None, "log_input_gate": None}
        state = tokens | {"kv_state": tensor(B, HK, rows, DV), "k_sum": tensor(B, HK, rows) + 1.0}
        options = {"scale": 0.25, "a0": 1.0, "a1": 1.0, "a2": 0.5, "p": 2, "allow_tf32": False}
        given = {"q": q, "k": k, "v": v, "attention_mask": mask} | state | options
        if operator == "prefill":
            return given
        operands, saved = {"q": q, "k": k, "v": v}, {"saved": torch.empty(B, HK, 0, dtype=torch.uint8, device=device)}
        if operator == "prefill_saved_":
            return operands | {"attention_mask": mask} | state | saved | options
        if operator == "prefill_backward_of_queries":
            return sums | operands | {"attention_mask": mask} | state | options
        if operator == "prefill_backward_of_keys_":
            grads = {f"grad_new_{name}": state.pop(name) for name in ("kv_state", "k_sum")}
            pairs = {"pairs": None, "pairs_of_states": None}
            return sums | grads | operands | {"attention_mask": mask} | state | pairs | saved | options
        new = {name: tensor(*given[name].shape) for name in ("kv_state", "k_sum")}
        grads = {f"grad_new_{name}": tensor(*x.shape) for name, x in new.items()}
        results = {"grad_o": tensor(B, H, M, DV), "grad_z": tensor(B, H, M)} | grads
        operands |= {"o": tensor(B, H, M, DV), "z": tensor(B, H, M) + 1.0}
        new = {f"new_{name}": x for name, x in new.items()}
        return results | operands | new | {"attention_mask": mask} | state | options
    operands, results = {"q": q, "k": k, "v": v}, {}
    tokens = {"log_decay": None, "k_start": None, "k_end": None, "log_input_gate": None}
    if operator.startswith("flash"):
        if operator != "flash_forward":
            results = {"grad_o": tensor(B, H, N, DV), "grad_lse": tensor(B, H, N)}
            operands |= {"o": o, "lse": per_query}
        options = {"scale": 0.25, "causal": True, "left": 3, "right": -1, "allow_tf32": False}
        return results | operands | {"attention_mask": mask} | tokens | options
    if operator in ("backward", "backward_qkv"):
        results = {"grad_o": tensor(B, H, N, DV), "grad_z": tensor(B, H, N)}
        operands |= {"o": o, "z": per_query}
    polynomial = {"scale": 0.25, "a0": 1.0, "a1": 1.0, "a2": 0.5, "p": 2}
    last = {"causal": True, "dropout": 0.1, "algorithm": "auto", "allow_tf32": False}
    noise = {"attention_mask": mask, "drop_noise": tensor(B, H, N, DV), "rpe_matrix": None}
    return results | operands | noise | tokens | polynomial | last


def with_tokens(operator, device):
    """Returns the arguments with a decay and bounds of keys, if the operator takes them."""
    given = arguments(operator, device)
    n = given.get("q", given["k"]).shape[2]
    tokens = {
        "log_decay": -torch.rand(B, HK, M, device=device),
        "k_start": torch.zeros(B, HK, n, dtype=torch.int32, device=device),
        "k_end": torch.full((B, HK, n), M, dtype=torch.int32, device=device),
        "pairs": torch.rand(B, H, n, device=device),
        "pairs_of_states": torch.rand(B, HK, 2, dtype=torch.float64, device=device),
    }
    return given | {name: x for name, x in tokens.items() if name in given}


def call(operator, given):
    return getattr(torch.ops.fastmax, operator).default(*given.values())


def halves(x):
    return x.half()


def swapped(x):
    """Returns the same number of elements in another shape."""
    return x.transpose(-1, -2).contiguous()


def longer(x):
    return torch.cat((x, x), dim=-1)


FORWARD = [
    ("q", lambda x: x[0], "q.*4-d|4-dimensional"),
    ("k", lambda x: x[:1], "k|batch"),
    ("k", halves, "dtype"),
    ("v", lambda x: x[:, :, :-1], "v must have"),
    ("v", lambda x: x[:, :1], "v must have"),
    ("k", lambda x: x[..., :8], "k must have"),
    ("attention_mask", lambda x: x[:, :-1], "attention_mask must have shape"),
    ("attention_mask", lambda x: x[:1], "attention_mask must have shape"),
    ("attention_mask", lambda x: x.to(torch.uint8), "attention_mask must be bool"),
    ("scale", lambda _: 0.0, "scale must be finite and > 0, got 0"),
    ("scale", lambda _: -0.25, "scale must be finite and > 0, got -0.25"),
    ("scale", lambda _: float("inf"), "scale must be finite and > 0, got inf"),
    ("scale", lambda _: float("nan"), "scale must be finite and > 0, got"),
]
POLYNOMIAL = [
    ("drop_noise", swapped, "drop_noise must have"),
    ("drop_noise", lambda x: x[:1], "drop_noise must have"),
    ("p", lambda _: 3, "p must be 1 or 2, got 3"),
    ("algorithm", lambda _: "fast", "algorithm must be .*fast"),
]
RESULTS = [(name, change, f"{name} must have") for name in ("o", "grad_o") for change in (swapped, halves)]


def per_query(name):
    return [(name, change, f"{name} must have shape") for change in (swapped, longer, lambda x: x[:, :1])]


STATE = [
    ("q", lambda x: x[:, :, :-1], f"k and v must have q's number of tokens {M - 1}, got {M}"),
    ("p", lambda _: 3, "p must be 1 or 2, got 3"),
    ("p", lambda _: 1, "kv_state must have shape"),
    *((name, lambda x: x[:, :, :-1], f"{name} must have shape") for name in ("kv_state", "k_sum")),
    *((name, lambda x: x.double(), f"{name} must be (torch.)?float32") for name in ("kv_state", "k_sum")),
]
NEW_STATE = [
    (f"{prefix}{name}", change, message)
    for prefix, name in product(("new_", "grad_new_"), ("kv_state", "k_sum"))
    for change, message in ((lambda x: x[:, :, :-1], f"{prefix}{name} must have shape"),
                            (lambda x: x.double(), f"{prefix}{name} must (be|have)"))
]  # fmt: skip
SUMS = [
    *(("g", change, "g must have") for change in (swapped, lambda x: x[:1])),
    ("g", halves, "g must (be torch.float32|have q's dtype)"),
    *(("e", change, "e must have shape") for change in (swapped, longer)),
    ("e", lambda x: x.double(), "e must be (torch.)?float32"),
]
OF_QUERIES = [row for row in FORWARD if row[0] != "attention_mask"] + STATE[:2] + SUMS
OF_KEYS = [row for row in FORWARD if row[0] in ("v", "attention_mask", "scale")] + [STATE[1], ("k", halves, "dtype")]
SAVED = [
    ("saved", lambda x: x.float(), "saved must be contiguous uint8"),
    ("saved", lambda x: x[:1], "saved must be contiguous uint8"),
    (
        "saved",
        lambda x: x.new_zeros(*x.shape[:2], 48),
        "saved must be what state_of_keys or state_of_queries saved .*, \\d+ bytes, got",
    ),
]
WINDOW = [(name, lambda _: -2, f"{name} must be at least -1 .*got -2") for name in ("left", "right")]
ROWS = [
    ("q", lambda x: x[0], "q.*4-d|4-dimensional"),
    ("k", lambda x: x[:1], "k must have shape"),
    ("k", lambda x: x[..., :8], "k must have shape"),
    ("k", halves, "k must (be torch.float32|have q's dtype)"),
    *(("lim", lambda _, lim=lim: lim, f"lim must be finite and > 0, got {text}")
      for lim, text in ((0.0, "0"), (-1.0, "-1"), (float("inf"), "inf"), (float("nan"), ""))),
]  # fmt: skip
NORMALIZED = [row for row in FORWARD if row[0] != "attention_mask"] + [row for row in ROWS if row[0] == "lim"]
GRADIENTS_OF_ROWS = [
    *((f"grad_{name}", change, f"grad_{name} must have") for name in "qk" for change in (swapped, lambda x: x[:, :1, :2])),
    *((f"grad_{name}", halves, f"grad_{name} must (be|have)") for name in "qk"),
    *((f"{name}_factor", change, f"{name}_factor must have shape") for name in "qk" for change in (swapped, longer)),
    *((f"{name}_factor", lambda x: x.double(), f"{name}_factor must be (torch.)?float32") for name in "qk"),
]
WRONG = {
    "forward": FORWARD + POLYNOMIAL,
    "flash_forward": FORWARD + WINDOW,
    "backward": FORWARD + POLYNOMIAL + RESULTS + per_query("z") + per_query("grad_z"),
    "backward_qkv": FORWARD + POLYNOMIAL + RESULTS + per_query("z") + per_query("grad_z"),
    "flash_backward": FORWARD + WINDOW + RESULTS + per_query("lse") + per_query("grad_lse"),
    "flash_backward_qkv": FORWARD + WINDOW + RESULTS + per_query("lse") + per_query("grad_lse"),
    "prefill": FORWARD + STATE,
    "prefill_backward": FORWARD + STATE + RESULTS + per_query("z") + per_query("grad_z") + NEW_STATE,
    "prefill_saved_": FORWARD + STATE + SAVED + [("k_sum", lambda _: None, "kv_state and k_sum must be given together")],
    "prefill_backward_of_queries": FORWARD + STATE + SUMS,
    "prefill_backward_of_keys_": FORWARD
    + STATE[:2]
    + SUMS
    + [row for row in NEW_STATE if row[0].startswith("grad_")]
    + [("grad_new_kv_state", lambda _: None, "grad_new_kv_state and grad_new_k_sum must be given together")]
    + SAVED,
    "state_of_keys": OF_KEYS,
    "state_of_queries": OF_QUERIES,
    "gradients_of_sums": RESULTS[2:] + per_query("z") + per_query("grad_z"),
    "normalize_tokens": ROWS,
    "normalize_tokens_backward": [*ROWS, *GRADIENTS_OF_ROWS],
    "normalized_forward": NORMALIZED,
    "normalized_backward": NORMALIZED
    + RESULTS
    + per_query("z")
    + per_query("grad_z")
    + [row for row in GRADIENTS_OF_ROWS if row[0] == "k_factor"],
    "softmax": [("algorithm", lambda _: "fast", "algorithm must be .*fast")],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", WRONG)
def test_the_arguments_are_valid(operator, device):
    outputs = call(operator, arguments(operator, device))
    for x in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        assert x.isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "operator, name, change, message",
    [
        pytest.param(operator, *row, id=f"{operator}-{row[0]}-{i}")
        for operator, rows in WRONG.items()
        for i, row in enumerate(rows)
    ],
)
def test_refused_by_name(operator, name, change, message, device):
    given = arguments(operator, device)
    given[name] = change(given[name])
    with pytest.raises(REFUSED, match=message):
        call(operator, given)


ATTENTION = ["forward", "backward", "backward_qkv", "flash_forward", "flash_backward", "flash_backward_qkv"]
PIECES = ["prefill_saved_", "state_of_keys", "state_of_queries", "prefill_backward_of_queries", "prefill_backward_of_keys_"]
OVER_PARTS = ["prefill", "prefill_backward", *PIECES]
TOKENS_OF = ("log_decay", "k_start", "k_end", "pairs", "pairs_of_states")  # that only some calls have
TOKENS = [
    *((name, change, f"{name} must have shape") for name in ("log_decay", "k_start", "k_end")
      for change in (swapped, lambda x: x[:, :1], lambda x: x[..., :-1])),
    ("log_decay", halves, "log_decay must be (torch.)?float32"),
    ("log_decay", lambda x: x.double(), "log_decay must be (torch.)?float32"),
    ("k_start", lambda x: x.long(), "k_start must be (torch.)?int32"),
    ("k_end", lambda x: x.float(), "k_end must be (torch.)?int32"),
    ("causal", lambda _: False, "log_decay needs causal"),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", [*ATTENTION, *OVER_PARTS])
def test_decays_and_bounds_refused_by_name(operator, device):
    for x in call(operator, with_tokens(operator, device)):
        assert x.isfinite().all()
    for name, change, message in TOKENS:
        given = with_tokens(operator, device)
        if name not in given:
            continue
        given[name] = change(given[name])
        with pytest.raises(REFUSED, match=message):
            call(operator, given)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", ["backward", "flash_backward"])
def test_gradients_of_what_was_not_given_have_no_elements(operator, device):
    *_, of_decay, of_gate = call(operator, arguments(operator, device))
    assert of_decay.shape == of_gate.shape == (0,)
    *_, of_decay, of_gate = call(operator, with_tokens(operator, device))
    assert of_decay.shape == (B, HK, M) and of_decay.dtype == torch.float32 and of_decay.is_contiguous()
    assert of_gate.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_prefill_without_a_decay(device):
    outputs = call("prefill_backward", arguments("prefill_backward", device))
    assert outputs[3].shape == (0,)
    outputs = call("prefill_backward", with_tokens("prefill_backward", device))
    assert outputs[3].shape == (B, HK, M) and outputs[3].dtype == torch.float32 and outputs[3].is_contiguous()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["new_kv_state", "new_k_sum"])
def test_the_gradient_of_a_decay_needs_the_new_state(name, device):
    given = with_tokens("prefill_backward", device) | {name: None}
    with pytest.raises(REFUSED, match="log_decay needs new_kv_state and new_k_sum"):
        call("prefill_backward", given)
    grads = {"grad_new_kv_state": None, "grad_new_k_sum": None}
    call("prefill_backward", given | grads)
    call("prefill_backward", arguments("prefill_backward", device) | {name: None})


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_of_a_decay_in_pieces_needs_pairs(device):
    operator = "prefill_backward_of_keys_"
    for change in ({"pairs": None}, {"pairs_of_states": None}):
        with pytest.raises(REFUSED, match="log_decay needs pairs and pairs_of_states"):
            call(operator, with_tokens(operator, device) | change)
    for name, change in (("pairs", swapped), ("pairs_of_states", lambda x: x[:1]), ("pairs_of_states", lambda x: x.float())):
        given = with_tokens(operator, device)
        with pytest.raises(REFUSED, match=f"{name} must"):
            call(operator, given | {name: change(given[name])})
    given = arguments(operator, device) | {"grad_new_kv_state": None, "grad_new_k_sum": None}
    *_, of_decay = call(operator, given)
    assert of_decay.shape == (0,)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("operator", ATTENTION)
def test_more_queries_than_keys_are_not_causal(operator, device):
    given = arguments(operator, device)
    given["k"], given["v"], given["attention_mask"] = given["k"][:, :, :3], given["v"][:, :, :3], None
    with pytest.raises(REFUSED, match="causal attention .*n .= m|causal attention takes at most"):
        call(operator, given)
    given["causal"] = False
    call(operator, given)


# ---- CUDA: other devices, sizes that a kernel cannot count


def tensors(operator):
    return [name for name, x in arguments(operator, "cpu").items() if torch.is_tensor(x)]


PLACES = [(operator, name) for operator in WRONG if operator != "softmax" for name in tensors(operator)]
PLACES.remove(("state_of_keys", "k"))  # the first tensor, which stands for q
PLACES.remove(("gradients_of_sums", "o"))  # likewise
PLACES += [("forward", "rpe_matrix"), ("backward", "rpe_matrix")]
PLACES += [(operator, name) for operator in ATTENTION for name in ("log_decay", "k_start", "k_end")]
PLACES += list(product(OVER_PARTS, ("log_decay", "k_start")))
PLACES += [("prefill_backward_of_keys_", name) for name in ("pairs", "pairs_of_states")]


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operator, name", PLACES)
def test_a_tensor_on_the_cpu_is_named(operator, name, dtype):
    """The error is also raised for float64, which the PyTorch implementation would compute."""
    given = (arguments if name not in TOKENS_OF else with_tokens)(operator, "cuda")
    if name == "rpe_matrix":
        given[name] = torch.zeros(N + M - 1, D)
    given = {n: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x for n, x in given.items()}
    given[name] = given[name].cpu()
    # If q or k moved, another tensor may be the first that is on another device.
    named = f"{name} (is on cpu|must be on [qk]'s device cuda:0)"
    if name in ("q", "k"):
        named += "|(k|saved) must be on [qk]'s device cpu"
    with pytest.raises(REFUSED, match=named):
        call(operator, given)


@on_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("operator, name", [place for place in PLACES if arguments(place[0], "cpu")[place[1]] is not None])
def test_a_tensor_on_another_gpu_is_named(operator, name):
    given = arguments(operator, "cuda:0")
    given[name] = given[name].to("cuda:1")
    with pytest.raises(RuntimeError, match="k is on cuda:0, and q is on cuda:1" if name == "q" else f"{name} is on cuda:1"):
        call(operator, given)


@on_cuda
@pytest.mark.parametrize("name", [name for name in WRONG if OPERATORS[name].kernel is not None])
def test_kernels_refuse_what_they_do_not_cover(name):
    """The kernels do not cover float64, and a direct call of them raises an error that says so."""
    kernel, given = OPERATORS[name].kernel, arguments(name, "cuda")
    assert kernel.covers(tuple(given.values())) or name.startswith("normalized")  # of which there are kernels of one dtype
    wide = tuple(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in given.values())
    assert not kernel.covers(wide)
    with pytest.raises(RuntimeError, match="must be bfloat16, float16 or float32 for the CUDA kernels"):
        kernel(wide)


@on_cuda
def test_kernels_refuse_a_wide_head():
    given = arguments("forward", "cuda") | {"drop_noise": None, "v": torch.rand(B, HK, M, 300, device="cuda")}
    with pytest.raises(RuntimeError, match="head_dim up to 32 64 96 128 256, got .* and 300"):
        OPERATORS["forward"].kernel(tuple(given.values()))


@on_cuda
def test_too_many_heads():
    """q has 2^32 heads by expansion, so that no tensor before the output is that large."""
    given = arguments("flash_forward", "cuda")
    for name in ("q", "k", "v"):
        given[name] = torch.ones(1, 1, 1, D, device="cuda").expand(2**16, 2**16, 1, D)
    given["attention_mask"] = None
    with pytest.raises(RuntimeError, match="q has too many heads: 65536 x 65536"):
        call("flash_forward", given)


@on_cuda
def test_z_of_any_strides():
    """The denominators are copied and not read as if they were contiguous."""
    given = arguments("backward", "cuda")
    expected = call("backward", given)
    given["z"] = given["z"].transpose(1, 2).contiguous().transpose(1, 2)
    assert all(map(torch.equal, call("backward", given), expected))


# ---- what fails inside the library


@contextmanager
def full_memory():
    """Prevents allocations beyond the reserved memory."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def large(dtype=torch.bfloat16, **options):
    torch.cuda.empty_cache()  # else tensors may be parts of larger blocks, whose rest is reserved and free
    return [torch.rand(1, 16, 2**15, 64, device="cuda", dtype=dtype, **options) for _ in range(3)]


@on_cuda
@pytest.mark.parametrize(
    "options",
    [{}, {"algorithm": "linear"}, {"algorithm": "linear", "p": 1}, {"algorithm": "quadratic"}],
    ids=["auto", "linear", "linear p = 1", "quadratic"],
)
@pytest.mark.filterwarnings("ignore:fastmax. f.s.:RuntimeWarning")
def test_attention_out_of_memory(options):
    q, k, v = large(requires_grad=True)
    grad_o = torch.ones_like(q)
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.fastmax_attention(q, k, v, causal=True, **options)
    with full_memory(), torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.fastmax_attention(q, k, v, causal=True, **options)
    o = fastmax.fastmax_attention(q, k, v, causal=True, **options)
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        o.backward(grad_o)
    fastmax.fastmax_attention(q, k, v, causal=True, **options).backward(grad_o)
    assert q.grad.isfinite().all()


@on_cuda
def test_flash_attention_and_softmax_out_of_memory():
    q, k, v = large()
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.flash_attention(q, k, v, causal=True)
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.softmax.online_softmax(q)


@on_cuda
def test_a_copy_of_an_operand_out_of_memory():
    """Rows that do not start at multiples of 16 bytes are copied before the kernels run, and the copy can fail."""
    q, k, v = (x[..., 1:58] for x in large())
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.fastmax_attention(q, k, v, causal=True)


@on_cuda
def test_the_pytorch_implementation_out_of_memory():
    """float64 is passed on to PyTorch operations, which run out of memory behind the library's interface."""
    q, k, v = large(torch.float64)
    with full_memory(), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        fastmax.fastmax_attention(q, k, v, causal=True)


# ---- FASTMAX_DEBUG, info


@on_cuda
def test_debug_prints_the_kernels():
    code = """
import torch, fastmax
q = torch.rand(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
fastmax.fastmax_attention(q, q, q, causal=True, algorithm="linear").sum().backward()
fastmax.fastmax_attention(q, q, q, causal=False, algorithm="linear", p=1)
fastmax.flash_attention(q, q, q)
torch.ops.fastmax.flash_forward(q, q, q, *[None] * 5, 0.1, True, 5, -1, False)
torch.ops.fastmax.flash_forward(q, q, q, *[None] * 5, 0.1, True, 63, -1, False)
first = torch.zeros(1, 2, 64, dtype=torch.int32, device="cuda")
torch.ops.fastmax.flash_forward(q, q, q, None, None, first, None, None, 0.1, True, 5, -1, False)
score = (0.1, 1.0, 1.0, 0.5, 2, True, 0.0)
torch.ops.fastmax.forward(q, q, q, None, None, None, None, first, None, None, *score, "auto", False)
torch.ops.fastmax.forward(q, q, q, None, None, None, None, first, None, None, *score, "linear", False)
decay = -torch.rand(1, 2, 64, device="cuda")
torch.ops.fastmax.forward(q, q, q, None, None, None, decay, None, None, None, *score, "quadratic", False)
fastmax.softmax.safe_softmax(q)
fastmax.fastmax_attention(q.double(), q.double(), q.double(), causal=True)  # PyTorch operations
"""
    for value, lines in (("1", 11), ("0", 0), ("", 0)):
        done = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | {"FASTMAX_DEBUG": value}, capture_output=True, text=True, check=True
        )
        printed = [line for line in done.stderr.splitlines() if line.startswith("fastmax")]
        assert len(printed) == lines, done.stderr
        if lines:
            hopper = "_sm90" in extension.build_info() and torch.cuda.get_device_capability() == (9, 0)
            dense = "sm90" if hopper else "sm80"
            forward, backward, first_order, flash, window, wide_window, *packed, linear_packed, decay, softmax = printed
            problem = ": b 1, h 2, hk 2, n 64, m 64, d 64, dv 64, head_dim_qk 64, head_dim_v 64, bf16, order 2, causal, sm_"
            assert forward.startswith(f"fastmax::forward: linear, linear2_{dense}" + problem)
            assert backward.startswith(f"fastmax::backward: linear, linear2_{dense}" + problem)
            assert "linear1_sm80" in first_order and "order 1, sm_" in first_order
            assert ("flash_window_sm90" if hopper else "flash_bounded_sm80") in window and "causal, window, sm_" in window
            assert f"flash_{dense}" in wide_window and "window" not in wide_window, "there is nothing that it hides"
            for name, line in zip(("flash", "quadratic"), packed, strict=True):
                assert f"{name}, {name}_bounded_{dense}" in line and "bounds of keys, sm_" in line
            assert f"linear, linear2_{dense}" in linear_packed and "bounds of keys, sm_" in linear_packed
            assert ("quadratic_decay_sm90" if hopper else "quadratic_bounded_sm80") in decay and "causal, decay, sm_" in decay
            assert f"flash_{dense}" in flash and softmax.startswith("fastmax::softmax: softmax_sm80: rows 128, width 64")


@on_cuda
def test_info_names_the_kernels():
    info = extension.build_info()
    has_sm90 = "90" in info.split(";")[0].split()
    kernels = ["quadratic_bounded", "quadratic", "linear1", "linear2", "flash_bounded", "flash"]
    found = info.rsplit("; kernels ", 1)[1].split()
    assert [name for name in found if name.endswith("_sm80")] == [f"{name}_sm80" for name in kernels]
    of_quadratic = [f"{name}_{kind}" for name in ("quadratic", "flash") for kind in ("bounded_sm90", "decay_sm90")]
    of_quadratic.append("flash_window_sm90")
    assert all((name in found) == has_sm90 for name in of_quadratic)
    for name in ("quadratic", "linear1", "linear2", "flash"):
        assert (f"{name}_sm90" in found) == has_sm90
        assert not has_sm90 or found.index(f"{name}_sm90") < found.index(f"{name}_sm80"), "it is asked first"
