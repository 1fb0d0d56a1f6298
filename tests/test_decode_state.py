"""`DecodeState` as an object: saving, moving, beams, copies, pytrees, and what it prints."""

import copy
import io
import pickle
from dataclasses import fields, replace

import pytest
import torch
from common import Case, definition, make_inputs
from test_decode import OPTIONS, advance, assert_same_states, by_decode_option, new_state, pieces
from torch.utils import _pytree as pytree

import fastmax

CASE = Case("", n=6, b=3, h=4, hk=2, d=5, dv=7)


def a_state(device="cpu", dtype=torch.float64, option="everything"):
    """Returns a state after a prefill of four tokens, and the two tokens that follow."""
    inputs, _ = make_inputs(CASE, dtype, device)
    state = new_state(CASE, device, dtype, **OPTIONS[option])
    _, state = fastmax.decoding.prefill(*(x[:, :, :4] for x in inputs.values()), state)
    return state, {name: x[:, :, 4:] for name, x in inputs.items()}


def proceed(state, inputs):
    return advance(inputs, [1, 1], state)[0]


# ---- saving


@by_decode_option
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_save_and_load(dtype, option, device):
    """A state is loaded by `torch.load` with its default, `weights_only=True`."""
    state, rest = a_state(device, dtype, option)
    file = io.BytesIO()
    torch.save({"state": state, "step": 3}, file)
    file.seek(0)
    loaded = torch.load(file)["state"]
    assert_same_states(loaded, state)
    assert {name: getattr(loaded, name) for name in OPTION_FIELDS} == {name: getattr(state, name) for name in OPTION_FIELDS}
    assert type(loaded.score) is type(state.score)
    torch.testing.assert_close(proceed(loaded, rest), proceed(state, rest))


OPTION_FIELDS = ("tokens", "dtype", "head_dim", "score", "normalize", "lim")


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deep", "pickle"]
)
def test_copies(copied):
    state, rest = a_state()
    assert_same_states(copied(state), state)
    torch.testing.assert_close(proceed(copied(state), rest), proceed(state, rest))


@pytest.mark.parametrize(
    "change, message", [({"window": torch.zeros(3)}, "window"), ({"lim": None}, "lim")], ids=["more", "less"]
)
def test_a_file_of_another_version_is_refused(change, message):
    """Fields that a later version saved would be missing from the result."""
    saved = a_state()[0].__getstate__() | change
    saved = {name: value for name, value in saved.items() if value is not None or name not in change}
    with pytest.raises(TypeError, match=message):
        fastmax.decoding.DecodeState.__new__(fastmax.decoding.DecodeState).__setstate__(saved)


# ---- moving


def test_to_device():
    state, _ = a_state()
    moved = state.to("meta")
    assert all(
        x.is_meta and x.shape == y.shape for x, y in zip(moved.tensors().values(), state.tensors().values(), strict=True)
    )
    assert moved.device == torch.device("meta") and moved.tokens == state.tokens and moved.dtype == state.dtype
    assert_same_states(state.to("cpu"), state)


@pytest.mark.cuda
def test_to_cuda_and_back():
    state, rest = a_state()
    assert_same_states(state.to("cuda").to("cpu"), state)
    rest_on_device = {name: x.cuda() for name, x in rest.items()}
    torch.testing.assert_close(proceed(state.to("cuda"), rest_on_device).cpu(), proceed(state, rest))


@pytest.mark.parametrize("to", [lambda x, t: x.to(t), lambda x, t: x.to(dtype=t), lambda x, t: x.to("cpu", t)], ids=range(3))
def test_to_dtype(to, device):
    """The new dtype is that of later tokens. Sums that are wide enough keep theirs."""
    state, rest = a_state(device, torch.float32, "coefficients")
    half = to(state, torch.bfloat16).to(device)
    assert_same_states(half, state)
    assert half.dtype == torch.bfloat16
    narrow = {name: x.bfloat16() for name, x in rest.items()}
    exact = proceed(state, {name: x.float() for name, x in narrow.items()})
    torch.testing.assert_close(proceed(half, narrow), exact.bfloat16())

    double = to(state, torch.float64).to(device)
    assert double.kv_state.dtype == double.k_sum.dtype == torch.float64
    assert to(a_state(device, torch.float32)[0], torch.float64).positions.dtype == torch.int64
    torch.testing.assert_close(proceed(double, {name: x.double() for name, x in rest.items()}).float(), proceed(state, rest))
    assert_same_states(double.to(torch.float32), state)


@pytest.mark.parametrize("arguments", [(torch.int64,), ("cpu", torch.complex64), (torch.bfloat16, torch.float32)], ids=str)
def test_to_refuses(arguments):
    with pytest.raises(TypeError, match="dtype"):
        a_state()[0].to(*arguments)


# ---- batch entries


@by_decode_option
@pytest.mark.parametrize("indices", [[2, 0], [1], [0, 0, 2, 1], torch.tensor([1, 2], dtype=torch.int32), []], ids=str)
def test_select(indices, option, device):
    """After a beam search reorders, entry i continues as entry indices[i] would have."""
    state, rest = a_state(device, option=option)
    index = torch.as_tensor(indices, dtype=torch.int64, device=device)
    chosen = state.select(indices)
    assert all(map(torch.equal, chosen.tensors().values(), (x[index] for x in state.tensors().values())))
    of_chosen = {name: x[index] for name, x in rest.items()}
    torch.testing.assert_close(proceed(chosen, of_chosen), proceed(state, rest)[index])
    assert chosen.tokens == state.tokens


@by_decode_option
def test_repeat(option, device):
    """A prompt that is repeated can be continued in several ways, each of which equals the definition."""
    inputs, _ = make_inputs(Case("", n=6, b=4, h=2, d=5, dv=3), torch.float64, device)
    for x in inputs.values():
        x[1::2, :, :4] = x[0::2, :, :4]
    options = OPTIONS[option]
    state = fastmax.decoding.init_state(2, 2, 5, 3, dtype=torch.float64, device=device, **options)
    _, state = fastmax.decoding.prefill(*(x[::2, :, :4] for x in inputs.values()), state)
    o = proceed(state.repeat(2), {name: x[:, :, 4:] for name, x in inputs.items()})
    torch.testing.assert_close(o, definition(**inputs, causal=True, **options)[:, :, 4:], rtol=1e-10, atol=1e-10)


def test_selected_entries_have_memory_of_their_own():
    state, rest = a_state()
    before = copy.deepcopy(state)
    token = next(pieces(rest))
    fastmax.decoding.step_(*token, state.select([0, 1, 2]))
    fastmax.decoding.step_(*(x[:0] for x in token), state.select([]))
    assert_same_states(state, before)


def test_gradients_through_selected_entries():
    inputs, _ = make_inputs(CASE, torch.float64)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    _, state = fastmax.decoding.prefill(*(x[:, :, :5] for x in leaves.values()), new_state(CASE))
    o, _ = fastmax.decoding.step(*(x[[1, 1], :, 5:] for x in leaves.values()), state.select([1, 1]))
    expected = definition(**leaves, causal=True)[1, :, 5:]
    torch.testing.assert_close(o, expected.expand(2, -1, -1, -1), rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(o.sum(), list(leaves.values()))
    for x, y in zip(grads, torch.autograd.grad(2 * expected.sum(), list(leaves.values())), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-10)


BAD_INDICES = {
    "too large": ([0, 3], IndexError, r"from 0 to 2.*\[0, 3\]"),
    "negative": (torch.tensor([-1]), IndexError, "from 0 to 2"),
    "a mask": (torch.tensor([True, False, True]), ValueError, "integers.*bool"),
    "floats": ([0.0], ValueError, "integers.*float"),
    "two dimensions": ([[0]], ValueError, r"\(entries,\)"),
    "a number": (1, ValueError, r"\(entries,\)"),
}


@pytest.mark.parametrize("name", BAD_INDICES)
def test_bad_indices(name):
    indices, exception, message = BAD_INDICES[name]
    with pytest.raises(exception, match=message):
        a_state()[0].select(indices)


@pytest.mark.parametrize("repeats, exception", [(0, ValueError), (2.0, TypeError), (True, TypeError)])
def test_bad_repeats(repeats, exception):
    with pytest.raises(exception, match="repeats"):
        a_state()[0].repeat(repeats)


# ---- the object


def test_every_tensor_is_mapped():
    """A tensor that is added to the state must not stay behind where the others are moved, cut or saved."""
    state, _ = a_state()
    inside = {field.name for field in fields(state) if isinstance(getattr(state, field.name), torch.Tensor)}
    assert inside == set(state.tensors()) == {"kv_state", "k_sum", "positions"}
    assert all(x.shape[0] == CASE.b for x in state.tensors().values())
    assert a_state(option="defaults")[0].tensors().keys() == {"kv_state", "k_sum"}
    assert state.nbytes == sum(x.numel() * x.element_size() for x in state.tensors().values())


def test_clone_and_detach():
    state, rest = a_state()
    token = next(pieces(rest))
    _, state = fastmax.decoding.step(token[0], token[1].requires_grad_(), token[2], state)
    assert all(x.requires_grad for x in state.clone().tensors().values() if x.is_floating_point())
    cut = state.detach()
    assert not any(x.requires_grad for x in cut.tensors().values())
    assert_same_states(cut, state)
    assert cut.kv_state.data_ptr() == state.kv_state.data_ptr() != state.clone().kv_state.data_ptr()
    turned = replace(cut, kv_state=cut.kv_state.mT.contiguous().mT)
    assert turned.clone().kv_state.is_contiguous() and torch.equal(turned.clone().kv_state, cut.kv_state)


def test_states_are_compared_by_identity():
    state, _ = a_state()
    assert state == state and state != state.clone() and len({state, state.clone()}) == 2


def test_repr_is_short():
    text = repr(a_state()[0])
    for part in (
        "(3, 2, 78, 7)",
        "(3, 2, 78)",
        "tokens=4",
        "torch.float64",
        "cpu",
        "p=2",
        "temperature=3",
        "a0=1.5",
        "'token'",
    ):
        assert part in text
    assert "tensor(" not in text and len(text) < 300
    assert "normalize" not in repr(a_state(option="defaults")[0])
    repr(pytree.tree_map(lambda x: 0, a_state()[0]))


@by_decode_option
def test_pytree(option):
    state, _ = a_state(option=option)
    leaves, spec = pytree.tree_flatten({"layer": [state, 2]})
    assert [x is y for x, y in zip(leaves, [*state.tensors().values(), 2], strict=True)]
    assert_same_states(pytree.tree_unflatten(leaves, spec)["layer"][0], state)
    keys = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(state)[0]]
    assert keys == [f".{name}" for name in state.tensors()]
    assert_same_states(pytree.tree_map_only(torch.Tensor, torch.clone, state), state)
    assert spec != pytree.tree_structure({"layer": [replace(state, lim=0.1), 2]}), "options are part of the structure"


@by_decode_option
def test_vmap_over_states(option):
    """The states of a model's layers are one state with an additional dimension."""
    (one, rest), (other, _) = (a_state(option=option) for _ in range(2))
    other = other.select([2, 1, 0])
    layers = pytree.tree_map(lambda *x: torch.stack(x), one, other)
    token = next(pieces(rest))
    o, after = torch.func.vmap(fastmax.decoding.step, in_dims=(None, None, None, 0))(*token, layers)
    for i, state in enumerate((one, other)):
        expected_o, expected = fastmax.decoding.step(*token, state)
        torch.testing.assert_close(o[i], expected_o, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after.map(lambda x, i=i: x[i]).tensors(), expected.tensors(), rtol=1e-12, atol=1e-12)


def test_gradient_by_torch_func():
    state, rest = a_state(option="normalize=token")
    token = next(pieces(rest))
    grad = torch.func.grad(lambda state: fastmax.decoding.step(*token, state)[0].sum())(state)
    leaf = replace(state, kv_state=state.kv_state.clone().requires_grad_())
    (expected,) = torch.autograd.grad(fastmax.decoding.step(*token, leaf)[0].sum(), leaf.kv_state)
    torch.testing.assert_close(grad.kv_state, expected)
