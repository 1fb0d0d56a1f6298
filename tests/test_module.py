"""`FASTMultiHeadAttention`: the ancestor's positional order, defaults, eval mode, copies."""

import copy
import inspect
import io
import math
import pickle

import pytest
import torch
from common import Case, by_gradient, make_inputs, make_options

from fastmax import FASTMultiHeadAttention, fastmax_attention, rpe_matrix_creator

CASE = Case("", n=20, b=2, h=3, d=8, dv=6)
ORDER = (
    "q", "k", "v", "drop_noise", "rpe_matrix", "mask", "dropout", "normalize", "temperature", "a0", "a1", "a2", "lim", "p",
)  # fmt: skip


def test_positional_order():
    parameters = inspect.signature(FASTMultiHeadAttention.forward).parameters.values()
    positional = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    assert tuple(positional) == ("self", *ORDER)
    constructor = list(inspect.signature(FASTMultiHeadAttention).parameters.values())
    assert constructor[0].name == "use_custom_gradient" and constructor[0].default is True


@by_gradient
def test_every_positional_argument_lands_where_it_should(custom, device):
    """All fourteen arguments are passed by position, each different from its default, and compared with the same by name."""
    inputs, _ = make_inputs(CASE, device=device)
    noise = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, device=device)
    rpe = rpe_matrix_creator(CASE.n, CASE.d, device, structured=True)
    values = (noise, rpe, True, 0.3, "token", 2.5, 1.5, 0.75, 0.25, 0.8, 2)
    o = FASTMultiHeadAttention(custom)(*inputs.values(), *values)
    options = dict(zip(ORDER[3:], values, strict=True))
    options["causal"] = options.pop("mask")
    assert torch.equal(o, fastmax_attention(**inputs, use_custom_gradient=custom, **options))
    for name in set(options) - {"drop_noise", "rpe_matrix"}:  # each of them matters
        default = inspect.signature(fastmax_attention).parameters[name].default
        if options[name] != default:
            changed = options | {name: default}
            changed.pop({"dropout": "drop_noise", "normalize": "lim"}.get(name), None)  # which are refused without it
            assert not torch.equal(o, fastmax_attention(**inputs, use_custom_gradient=custom, **changed)), name


def test_defaults_are_those_of_the_contract(device):
    """The defaults are mask=False, dropout=0.0, normalize=False, temperature=1.0, a0=1.0, a1=1.0, a2=0.5, lim=1.0, p=2."""
    inputs, _ = make_inputs(CASE, device=device)
    o = FASTMultiHeadAttention()(**inputs)
    spelled = FASTMultiHeadAttention()(*inputs.values(), None, None, False, 0.0, False, 1.0, 1.0, 1.0, 0.5, 1.0, 2)
    assert torch.equal(o, spelled)
    assert torch.equal(o, fastmax_attention(**inputs))


OTHER = {
    "rpe_matrix": "sinusoidal",
    "mask": True,
    "dropout": 0.3,
    "normalize": True,
    "temperature": 2.5,
    "a0": 1.5,
    "a1": 0.75,
    "a2": 0.25,
    "lim": 0.4,
    "p": 1,
}


@pytest.mark.parametrize("name", OTHER)
def test_constructor_sets_defaults_and_forward_overrides(name, device):
    inputs, _ = make_inputs(CASE, device=device)
    base = {"normalize": "token"} if name == "lim" else {}
    value = {name: OTHER[name]}

    def call(module, **options):
        torch.manual_seed(1)
        return module(**inputs, **options)

    default = call(FASTMultiHeadAttention(**base))
    set_in_constructor = FASTMultiHeadAttention(**base, **value)
    expected = call(FASTMultiHeadAttention(**base), **value)
    assert not torch.equal(expected, default)
    assert torch.equal(call(set_in_constructor), expected)
    assert torch.equal(call(set_in_constructor, **{name: None}), expected)
    if name != "rpe_matrix":  # None is the module's, so "none at all" cannot be said in forward
        parameter = inspect.signature(fastmax_attention).parameters["causal" if name == "mask" else name]
        assert torch.equal(call(set_in_constructor, **{name: parameter.default}), default)


def test_falsy_values_override(device):
    """0, 0.0 and False are values; only None stands for the module's own value."""
    inputs, _ = make_inputs(CASE, device=device)
    module = FASTMultiHeadAttention(mask=True, dropout=0.5, normalize=True, a1=0.3)
    o = module(**inputs, mask=False, dropout=0.0, normalize=False, a1=0.0)
    assert torch.equal(o, fastmax_attention(**inputs, a1=0.0))


@by_gradient
def test_eval_mode_adds_no_noise(custom, device):
    inputs, _ = make_inputs(CASE, device=device)
    module = FASTMultiHeadAttention(custom, dropout=0.5)
    noise = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, device=device)
    quiet = fastmax_attention(**inputs, use_custom_gradient=custom)
    assert not torch.equal(module(**inputs), quiet)
    module.eval()
    assert torch.equal(module(**inputs), quiet)
    assert torch.equal(module(**inputs, drop_noise=noise), quiet)
    assert torch.equal(module(**inputs, drop_noise=noise, dropout=0.9), quiet)
    module.train()
    assert not torch.equal(module(**inputs, drop_noise=noise), quiet)


def test_attention_mask_and_algorithm_are_keywords(device):
    inputs, _ = make_inputs(CASE, device=device)
    options = make_options("key padding", CASE, device=device) | {"algorithm": "linear"}
    assert torch.equal(FASTMultiHeadAttention()(**inputs, **options), fastmax_attention(**inputs, **options))


@pytest.mark.parametrize("window", [0, 3])
def test_decays_and_gates_of_keys(window, device):
    q, k, v = (torch.randn(2, 3, 8, 4, dtype=torch.float64, device=device) for _ in range(3))
    gate, log_decay = torch.randn(2, 3, 8, device=device), -torch.rand(2, 3, 8, device=device)
    module = FASTMultiHeadAttention(mask=True, exact_window=window)
    for given in ({"log_input_gate": gate}, {"log_decay": log_decay}, {"log_decay": log_decay, "log_input_gate": gate}):
        expected = fastmax_attention(q, k, v, causal=True, exact_window=window, **given)
        assert torch.equal(module(q, k, v, **given), expected) and not torch.equal(expected, module(q, k, v))


@pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
def test_the_toggle_reaches_the_operator(custom, device):
    inputs, _ = make_inputs(CASE, device=device)
    q = inputs["q"].requires_grad_()
    o = FASTMultiHeadAttention(use_custom_gradient=custom)(**inputs)
    (grad,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    if custom:
        with pytest.raises(RuntimeError, match="use_custom_gradient=False"):
            grad.sum().backward()
    else:
        grad.sum().backward()
        assert q.grad.norm() > 0


def test_a_mask_in_the_place_of_rpe_matrix_is_a_type_error():
    inputs, _ = make_inputs(CASE)
    with pytest.raises(TypeError, match=r"rpe_matrix.*mask"):
        FASTMultiHeadAttention()(*inputs.values(), None, True)


def test_a_tensor_in_the_place_of_mask_points_to_attention_mask():
    inputs, _ = make_inputs(CASE)
    with pytest.raises(TypeError, match=r"mask.*attention_mask"):
        FASTMultiHeadAttention()(*inputs.values(), None, None, torch.ones(CASE.n, CASE.n, dtype=torch.bool))


BAD_OPTIONS = [
    {"rpe_matrix": True},
    {"rpe_matrix": "alibi"},
    {"mask": 1},
    {"dropout": -1.0},
    {"normalize": "row"},
    {"temperature": 0.0},
    {"a0": math.nan},
    {"a1": "1"},
    {"a2": math.inf},
    {"lim": 0.0},
    {"p": 3},
    {"algorithm": "fast"},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: "-".join(map(str, *options.items())))
def test_bad_options_raise_in_the_constructor(options):
    ((name, value),) = options.items()
    with pytest.raises((TypeError, ValueError), match=rf"{name} must .*{value}"):
        FASTMultiHeadAttention(**options)


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=lambda options: "-".join(map(str, *options.items())))
def test_bad_options_raise_in_the_call(options):
    ((name, value),) = options.items()
    inputs, _ = make_inputs(CASE)
    with pytest.raises((TypeError, ValueError), match=rf"{name} must .*{value}"):
        FASTMultiHeadAttention()(**inputs, **options)


def test_a_matrix_is_for_forward():
    with pytest.raises(TypeError, match=r"rpe_matrix must be \"sinusoidal\" or None here, got a tensor .*\(3, 4\).*forward"):
        FASTMultiHeadAttention(rpe_matrix=torch.zeros(3, 4))


@pytest.mark.parametrize("arguments", [(512, 8), (512,), (True, 8), (1,)], ids=str)
def test_dimensions_are_refused_with_what_takes_their_place(arguments):
    with pytest.raises(TypeError, match=r"has no weights .*\(batch, heads, tokens, head_dim\).*swap_attention") as error:
        FASTMultiHeadAttention(*arguments)
    assert all(str(value) in str(error.value) for value in arguments)


def test_lim_is_for_calls_that_normalize(device):
    """The constructor's lim applies when a call normalizes. A lim passed to a call that does not normalize is an error."""
    inputs, _ = make_inputs(CASE, device=device)
    module = FASTMultiHeadAttention(lim=0.5)
    assert torch.equal(module(**inputs, normalize="token"), fastmax_attention(**inputs, normalize="token", lim=0.5))
    plain = fastmax_attention(**inputs)
    assert torch.equal(module(**inputs), plain)
    assert torch.equal(module(**inputs, normalize=False), plain)
    with pytest.raises(ValueError, match=r"lim has no effect without normalize, got lim = 0\.7"):
        module(**inputs, lim=0.7)
    assert torch.equal(FASTMultiHeadAttention(normalize="token", lim=0.5)(**inputs, normalize=False), plain)
    with pytest.raises(ValueError, match=r"lim has no effect without normalize, got lim = 0\.7"):
        module(**inputs, normalize=False, lim=0.7)


in_either_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])


@in_either_mode
def test_noise_without_dropout_is_refused(training, device):
    inputs, _ = make_inputs(CASE, device=device)
    noise = torch.randn(CASE.b, CASE.h, CASE.n, CASE.dv, device=device)
    with pytest.raises(ValueError, match=r"drop_noise has no effect without dropout"):
        FASTMultiHeadAttention().train(training)(**inputs, drop_noise=noise)
    with pytest.raises(ValueError, match=r"drop_noise has no effect without dropout"):
        FASTMultiHeadAttention(dropout=0.5).train(training)(**inputs, drop_noise=noise, dropout=0.0)


@in_either_mode
def test_noise_is_checked(training, device):
    inputs, _ = make_inputs(CASE, device=device)
    module = FASTMultiHeadAttention(dropout=0.5).train(training)
    with pytest.raises(ValueError, match=r"drop_noise must have the output's shape \(2, 3, 20, 6\), got \(3,\)"):
        module(**inputs, drop_noise=torch.ones(3, device=device))
    with pytest.raises(TypeError, match=r"drop_noise must be .*got 0\.5 \(float\)"):
        module(**inputs, drop_noise=0.5)
    with pytest.raises(ValueError, match=r"dropout must be >= 0, got -0\.5"):
        module(**inputs, dropout=-0.5)


@in_either_mode
@pytest.mark.parametrize("shape", [(CASE.n, CASE.n), (CASE.b, CASE.n), (CASE.b, CASE.h, CASE.n, CASE.dv), None], ids=str)
def test_a_mask_in_the_place_of_drop_noise_points_to_where_masks_go(shape, training):
    inputs, _ = make_inputs(CASE)
    mask = True if shape is None else torch.ones(shape, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"drop_noise must .*(bool).*attention_mask, .*\(batch, keys\).*mask=True"):
        FASTMultiHeadAttention().train(training)(*inputs.values(), mask)


@pytest.mark.parametrize("name", OTHER)
def test_options_are_attributes_that_each_call_reads(name, device):
    inputs, _ = make_inputs(CASE, device=device)
    base = {"normalize": "token"} if name == "lim" else {}

    def call(module):
        torch.manual_seed(1)
        return module(**inputs)

    module = FASTMultiHeadAttention(**base)
    default = call(module)
    setattr(module, name, OTHER[name])
    assert getattr(module, name) == OTHER[name] and f"{name}={OTHER[name]!r}" in repr(module)
    assert not torch.equal(call(module), default)
    assert torch.equal(call(module), call(FASTMultiHeadAttention(**base, **{name: OTHER[name]})))


def test_attributes_are_checked_in_the_call(device):
    inputs, _ = make_inputs(CASE, device=device)
    for options in [*BAD_OPTIONS, {"exact_window": -1}, {"use_custom_gradient": 1}]:
        ((name, value),) = options.items()
        module = FASTMultiHeadAttention(normalize="token")
        setattr(module, name, value)
        with pytest.raises((TypeError, ValueError), match=rf"{name} must .*{value}"):
            module(**inputs)


@in_either_mode
@pytest.mark.parametrize("value", [-1, 0.0, "1", None, float("nan")])
def test_a_lim_that_waits_is_checked_in_the_call(value, training, device):
    inputs, _ = make_inputs(CASE, device=device)
    module = FASTMultiHeadAttention().train(training)
    module.lim = value
    with pytest.raises((TypeError, ValueError), match="lim must be .*got "):
        module(**inputs)


@pytest.mark.parametrize("arguments", [{"embed_dim": 512, "num_heads": 8}, {"d_model": 512}], ids=str)
def test_dimensions_by_keyword(arguments):
    with pytest.raises(TypeError, match=r"embed_dim = 512|d_model = 512") as error:
        FASTMultiHeadAttention(**arguments)
    assert "has no weights" in str(error.value) and "swap_attention" in str(error.value)


def test_it_has_no_state():
    module = FASTMultiHeadAttention(normalize="token", p=1)
    assert module.state_dict() == {} and list(module.parameters()) == []
    module.load_state_dict({})


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


def through_torch_save(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, through_pickle, through_torch_save])
def test_copies_compute_the_same(duplicate, device):
    inputs, _ = make_inputs(CASE, device=device)
    options = {"mask": True, "normalize": "token", "temperature": 2.0, "a1": 0.5, "rpe_matrix": "sinusoidal"}
    module = FASTMultiHeadAttention(False, **options).eval()
    again = duplicate(module)
    assert again.use_custom_gradient is False and not again.training
    assert torch.equal(again(**inputs), module(**inputs))


def test_repr_names_the_options():
    text = repr(FASTMultiHeadAttention(p=1, temperature=8.0))
    assert "p=1" in text and "temperature=8.0" in text and "use_custom_gradient=True" in text
