"""Converting a trained softmax model: what each step changes, what it leaves, and what it refuses."""

import copy
import importlib
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import relative
from torch import nn

from fastmax import FastmaxSelfAttention, convert

VOCABULARY, C, N, WINDOW = 11, 16, 24, 4
PARTS = {"decay": False, "output_norm": False, "conv": 0, "output_gate": False}
OPTIONS = {
    "plain": PARTS,
    "all parts": {},
    "grouped": PARTS | {"num_kv_heads": 2, "head_dim": 6, "bias": True},
    "no norm, no rope": PARTS | {"qk_norm": False, "rope": False},
}
by_option = pytest.mark.parametrize("option", OPTIONS)


class Model(nn.Module):
    """Returns logits of the next token, or with targets their cross-entropy."""

    def __init__(self, layers: int = 3, dtype: torch.dtype = torch.float64, **options):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, C, dtype=dtype)
        options = {"attention": "softmax", "dtype": dtype} | options
        self.blocks = nn.ModuleList(FastmaxSelfAttention(C, 4, **options) for _ in range(layers))
        self.head = nn.Linear(C, VOCABULARY, dtype=dtype)

    def forward(self, tokens, targets=None, **given):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(F.rms_norm(x, (C,)), **given)
        logits = self.head(x)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make(**options) -> Model:
    """Returns a model with weights so large that scores matter."""
    torch.manual_seed(0)
    model = Model(**options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape or (2, N))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())


# ---- swap


@by_option
def test_swap_keeps_weights_and_local_keys(option):
    model = make(**OPTIONS[option])
    teacher, before = copy.deepcopy(model), dict(model.named_parameters())
    assert convert.swap(model, exact_window=WINDOW) == []
    after = dict(model.named_parameters())
    assert before.keys() == after.keys() and all(x is after[name] for name, x in before.items())
    x = tokens()
    assert relative(model(x[:, :WINDOW]), teacher(x[:, :WINDOW])) < 1e-12
    assert relative(model(x), teacher(x)) > 1e-4


@by_option
def test_swap_with_a_window_as_long_as_the_sequence_is_softmax(option):
    model = make(**OPTIONS[option])
    teacher = copy.deepcopy(model)
    convert.swap(model, exact_window=N)
    x = tokens()
    assert relative(model(x), teacher(x)) < 1e-12


def test_swap_is_the_layer_made_anew():
    model = make(**PARTS)
    weights = model.state_dict()
    convert.swap(model, exact_window=WINDOW, temperature=3.0, decay=True, longest_half_life=64.0)
    options = PARTS | {"decay": True, "attention": "fastmax", "exact_window": WINDOW, "temperature": 3.0}
    anew = make(**options)
    missing, unexpected = anew.load_state_dict(weights, strict=False)
    assert unexpected == [] and all("decay_proj" in name for name in missing)
    anew.load_state_dict(model.state_dict())
    x = tokens()
    torch.testing.assert_close(model(x), anew(x))
    assert model.blocks[0].extra_repr() == anew.blocks[0].extra_repr()


def test_swap_keeps_mode_dtype_device_hooks_and_gradients_that_are_off():
    model = Model(dtype=torch.bfloat16, device="meta", **PARTS).eval()
    model.blocks[0].qkv_proj.weight.requires_grad_(False)
    called = []
    model.blocks[1].register_forward_hook(lambda *_: called.append(1))
    blocks = list(model.blocks)
    convert.swap(model, decay=True)
    assert blocks == list(model.blocks) and not any(module.training for module in model.modules())
    assert not model.blocks[0].qkv_proj.weight.requires_grad
    made = {(block.decay_proj.weight.dtype, block.decay_proj.weight.device.type) for block in model.blocks}
    assert made == {(torch.bfloat16, "meta")}
    model.blocks[1](torch.empty(1, N, C, dtype=torch.bfloat16, device="meta"))
    assert called == [1]


def test_new_gates_hardly_decay_at_first():
    model = make(**PARTS | {"num_kv_heads": 2})
    new = convert.swap(model, exact_window=WINDOW, decay=True, longest_half_life=800.0)
    assert new == [f"blocks.{i}.decay_proj.{part}" for i in range(3) for part in ("weight", "bias")]
    gate = model.blocks[2].decay_proj
    assert not gate.weight.any()
    half_lives = math.log(0.5) / F.logsigmoid(gate.bias.detach())
    assert half_lives.tolist() == pytest.approx([100.0, 800.0])


def test_new_input_gates_change_nothing_at_first():
    model = make(**PARTS | {"num_kv_heads": 2})
    same, x = copy.deepcopy(model), tokens(2, N)
    convert.swap(same, exact_window=WINDOW)
    new = convert.swap(model, exact_window=WINDOW, input_gate=True)
    assert new == [f"blocks.{i}.input_gate_proj.{part}" for i in range(3) for part in ("weight", "bias")]
    y = model(x)
    assert relative(y, same(x)) < 1e-12
    of_gates = torch.autograd.grad(y.square().sum(), [x for name, x in model.named_parameters() if name in new])
    assert all(gradient.any() for gradient in of_gates)


def test_kept_keys_are_those_of_the_layer():
    """The converted model is one whose layers were made with the option, with the same weights."""
    model = make(**PARTS | {"num_kv_heads": 2})
    new = convert.swap(model, exact_window=WINDOW, decay=True, kept_keys=3)
    options = {"decay": True, "input_gate": True, "kept_keys": 3, "exact_window": WINDOW, "temperature": math.sqrt(C // 4)}
    anew = make(**PARTS | {"num_kv_heads": 2, "attention": "fastmax"} | options)
    anew.load_state_dict(model.state_dict())
    x = tokens(2, 4 * WINDOW)
    y = model(x)
    assert torch.equal(y, anew(x))
    gradients = torch.autograd.grad(y.square().sum(), [x for name, x in model.named_parameters() if name in new])
    assert all(gradient.any() for gradient in gradients)


def test_gates_that_are_there_stay():
    model = make()
    before = snapshot(model)
    assert convert.swap(model, decay=True) == []
    assert equal(before, snapshot(model))
    new = convert.swap(make(**PARTS), decay=True, input_gate=True)
    assert [name.split(".", 2)[2] for name in new[:4]] == [
        f"{gate}.{part}" for gate in ("decay_proj", "input_gate_proj") for part in ("weight", "bias")
    ]


@pytest.mark.parametrize("layers", [[0, 2], ["blocks.2", "blocks.0"], [0, "blocks.2", 0]])
def test_swap_of_some_layers(layers):
    model = make(**PARTS)
    new = convert.swap(model, exact_window=WINDOW, layers=layers, decay=True)
    assert [block.attention for block in model.blocks] == ["fastmax", "softmax", "fastmax"]
    assert sorted({name.split(".")[1] for name in new}) == ["0", "2"]
    assert model.blocks[1].decay_proj is None
    assert convert.swap(model, exact_window=N) == [] and model.blocks[1].options["exact_window"] == N
    assert model.blocks[0].options["exact_window"] == WINDOW


def test_layers_with_a_window_stay():
    model = make(**PARTS)
    model.blocks[1].window = 3
    convert.swap(model)
    assert [block.attention for block in model.blocks] == ["fastmax", "softmax", "fastmax"]


def test_swap_of_a_single_layer():
    layer = FastmaxSelfAttention(C, 4, attention="softmax", dtype=torch.float64, **PARTS)
    teacher = copy.deepcopy(layer)
    assert convert.swap(layer, exact_window=WINDOW, decay=True) == ["decay_proj.weight", "decay_proj.bias"]
    x = torch.randn(2, N, C, dtype=torch.float64)
    assert list(convert.attention_errors(layer, teacher, [x])) == [""]


def test_generation_after_a_swap():
    model = make(**PARTS)
    convert.swap(model, exact_window=WINDOW, decay=True)
    layer = model.blocks[0]
    x = torch.randn(2, N, C, dtype=torch.float64)
    state, outputs = layer.init_state(2), []
    for token in x.split(1, dim=1):
        y, state = layer(token, state)
        outputs.append(y)
    assert relative(torch.cat(outputs, dim=1), layer(x)) < 1e-12


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"exact_window": 0}, ValueError, "exact_window must be at least 1"),
        ({"exact_window": 2.0}, TypeError, "exact_window"),
        ({"temperature": -1.0}, ValueError, "temperature must be > 0"),
        ({"decay": 1}, TypeError, "decay"),
        ({"decay": True, "longest_half_life": 0.0}, ValueError, "longest_half_life"),
        ({"decay": True, "longest_half_life": 3.0}, ValueError, "longest_half_life must be at least 4 tokens, got 3.0"),
        ({"layers": [3]}, ValueError, "layers must be from 0 to 2.*blocks.0.*got 3"),
        ({"layers": [-1]}, ValueError, "layers must be from 0 to 2"),
        ({"layers": ["blocks"]}, ValueError, "layers.*got 'blocks'"),
        ({"layers": [True]}, TypeError, "layers"),
        ({"layers": "blocks.0"}, TypeError, "layers"),
        ({"layers": torch.tensor(1)}, TypeError, r"layers must be .*got a tensor of shape \(\)"),
        ({"layers": 1}, TypeError, r"layers must be .*got 1"),
        ({"layers": []}, ValueError, "layers must hold at least one"),
        ({"kept_keys": -1}, ValueError, "kept_keys must be at least 0, got -1"),
        (
            {"kept_keys": 3, "input_gate": False, "layers": [1]},
            ValueError,
            "kept_keys needs input gates, got 3 with input_gate=False",
        ),
    ],
)
def test_swap_refuses_and_leaves_the_model(options, error, message):
    model = make(**PARTS)
    before, described = snapshot(model), repr(model)
    with pytest.raises(error, match=message):
        convert.swap(model, **options)
    assert equal(before, snapshot(model)) and repr(model) == described


@pytest.mark.parametrize(
    "attribute", ["options", "attention", "decay_proj", "longest_half_life", "input_gate_proj", "kept_keys"]
)
def test_swap_that_is_interrupted_leaves_the_model(attribute):
    class Failing(FastmaxSelfAttention):
        def __setattr__(self, name, value):
            if name == attribute and failing:
                failing.clear()
                raise KeyboardInterrupt
            super().__setattr__(name, value)

    failing, x = [], tokens()
    model = make(**PARTS)
    model.blocks[1].__class__ = Failing
    before, described, expected = snapshot(model), repr(model), model(x)
    failing.append(1)
    with pytest.raises(KeyboardInterrupt):
        convert.swap(model, decay=True, kept_keys=2)
    assert not failing and equal(before, snapshot(model)) and repr(model) == described and torch.equal(model(x), expected)
    assert {block.longest_half_life for block in model.blocks} == {1024.0}


@pytest.mark.parametrize(
    "model, message",
    [
        (nn.Linear(2, 2), "no such layers"),
        (FastmaxSelfAttention(C, 4), "layers of fastmax"),
        (FastmaxSelfAttention(C, 4, attention="softmax", window=3), "softmax with a window"),
    ],
)
def test_swap_refuses_a_model_with_nothing_to_swap(model, message):
    with pytest.raises(ValueError, match=message):
        convert.swap(model)


def test_swap_refuses_what_is_no_model():
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got 'llama'"):
        convert.swap("llama")


# ---- transfer


@pytest.fixture
def swapped() -> tuple[Model, Model, list[str]]:
    """A model after the swap, its teacher, and the names of the new parameters."""
    model = make(**PARTS)
    teacher = copy.deepcopy(model)
    return model, teacher, convert.swap(model, exact_window=WINDOW, decay=True, longest_half_life=32.0)


@pytest.mark.parametrize("of", ["decay_proj", "q_norm"])
def test_transfer_makes_the_error_smaller_and_touches_nothing_else(swapped, of):
    model, teacher, _ = swapped
    batches = [tokens() for _ in range(10)]
    names = [name for name, _ in model.named_parameters() if of in name]
    before, taught = snapshot(model), snapshot(teacher)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.embedding.weight.requires_grad_(False)
    error = convert.attention_errors(model, teacher, batches)
    rows = convert.transfer(model, teacher, batches, names, steps=10)
    assert [row["step"] for row in rows] == list(range(1, 11))
    after = convert.attention_errors(model, teacher, batches)
    assert set(after) == {"blocks.0", "blocks.1", "blocks.2"} and sum(after.values()) < sum(error.values())
    first = convert.attention_errors(model, teacher, batches[:1])
    assert rows[0]["error"] != pytest.approx(sum(first.values()) / 3)  # of the model as it was then
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == set(names)
    assert equal(taught, snapshot(teacher)) and teacher.training
    assert not model.embedding.weight.requires_grad and model.head.weight.requires_grad
    assert (model.head.weight.grad == 1).all() and all(x.grad is None for x in teacher.parameters())
    assert not any(module._forward_hooks for module in teacher.modules())


def test_the_teacher_runs_in_eval_mode():
    """The teacher's dropout must not change the errors. Afterwards each of its modules is in its earlier mode."""
    model, x = make(**PARTS), tokens()
    teacher = copy.deepcopy(model)
    convert.swap(model, exact_window=WINDOW)
    expected = convert.attention_errors(model, teacher, [x])
    teacher.embedding = nn.Sequential(teacher.embedding, nn.Dropout(0.5))
    teacher.head.eval()
    modes = [module.training for module in teacher.modules()]
    assert convert.attention_errors(model, teacher, [x]) == expected
    assert [module.training for module in teacher.modules()] == modes


def test_the_error_is_that_of_outputs_for_the_same_input(swapped):
    model, teacher, _ = swapped
    x = tokens()
    hidden, expected = teacher.embedding(x), {}
    for i, (block, own) in enumerate(zip(model.blocks, teacher.blocks, strict=True)):
        y, of_teacher = (layer(F.rms_norm(hidden, (C,))) for layer in (block, own))
        expected[f"blocks.{i}"] = ((y - of_teacher).square().mean() / of_teacher.square().mean()).item()
        hidden = hidden + of_teacher
    assert convert.attention_errors(model, teacher, [x]) == pytest.approx(expected, rel=1e-5)


def test_packed_and_padded_batches(swapped):
    """The errors are those of the separate documents, and padding does not count."""
    model, teacher, _ = swapped
    x = tokens(2, N // 2)
    expected = convert.attention_errors(model, teacher, [x])
    packed = {"tokens": x.reshape(1, N), "cu_seqlens": torch.tensor([0, N // 2, N], dtype=torch.int32)}
    assert convert.attention_errors(model, teacher, [packed]) == pytest.approx(expected, rel=1e-6)
    padded = {"tokens": F.pad(x, (0, 5)), "attention_mask": (torch.arange(N // 2 + 5) < N // 2).expand(2, -1)}
    assert convert.attention_errors(model, teacher, [padded]) == pytest.approx(expected, rel=1e-6)


def test_transfer_of_one_layer_leaves_the_others(swapped):
    model, teacher, _ = swapped
    before = snapshot(model)
    convert.transfer(model, teacher, [tokens()] * 2, ["blocks.1.decay_proj.bias"], steps=2)
    changed = {name for name, x in model.state_dict().items() if not torch.equal(x, before[name])}
    assert changed == {"blocks.1.decay_proj.bias"}


def test_transfer_refuses(swapped):
    model, teacher, new = swapped
    batches, before = [tokens()], snapshot(model)
    masked = {"tokens": tokens(), "attention_mask": torch.zeros(2, N, dtype=torch.bool)}
    calls = [
        (dict(parameters=[]), ValueError, "parameters must hold at least one name"),
        (dict(parameters=["head"]), ValueError, "parameters must be names of the model's"),
        (dict(parameters="head.weight"), TypeError, "parameters"),
        (
            dict(parameters=["head.weight"]),
            ValueError,
            "parameters must belong to swapped.*blocks.1.*got 'head.weight'",
        ),
        (dict(teacher=model), ValueError, "teacher must be a copy of the model"),
        (dict(teacher=copy.deepcopy(model)), ValueError, "teacher must have softmax attention.*'blocks.0', got.*fastmax"),
        (dict(teacher=make(layers=1, **PARTS)), ValueError, "teacher.*'blocks.1', got none of that name"),
        (dict(model=teacher, teacher=model), ValueError, "must have layers with fastmax attention"),
        (dict(steps=0), ValueError, "steps"),
        (dict(learning_rate=0.0), ValueError, "learning_rate"),
        (dict(batches=["text"]), TypeError, "batches must hold tensors"),
        (dict(batches=[5]), TypeError, "batches must hold tensors"),
        (dict(batches=5), TypeError, "batches must be an iterable of batches, got 5"),
        (dict(batches={"tokens": tokens()}), TypeError, "batches must be an iterable of batches"),
        (
            dict(batches=tokens()),
            ValueError,
            r"batches must hold tensors \(b, n\), got .*\(2, 24\): pass one batch as \[batch\]",
        ),
        (dict(batches=[masked]), ValueError, "batches must hold real tokens"),
        (dict(teacher=None), TypeError, "teacher must be a torch.nn.Module, got None"),
        (dict(model="llama"), TypeError, "model must be a torch.nn.Module, got 'llama'"),
    ]
    for changes, error, message in calls:
        arguments = {"model": model, "teacher": teacher, "batches": batches, "parameters": new, "steps": 1} | changes
        with pytest.raises(error, match=message):
            convert.transfer(**arguments)
    assert equal(before, snapshot(model)) and not any(module._forward_hooks for module in teacher.modules())
    with pytest.raises(ValueError, match="but ended after 1"):
        convert.transfer(model, teacher, batches, new, steps=2)
    assert model.head.weight.requires_grad
    with pytest.raises(ValueError, match="batches must hold at least one"):
        convert.attention_errors(model, teacher, [])
    for function in (convert.attention_errors, convert.fit_polynomial):
        with pytest.raises(TypeError, match="batches must be an iterable of batches, got None"):
            function(model, teacher, None)


def test_an_error_that_is_not_finite_ends_the_transfer(swapped):
    model, teacher, new = swapped
    with torch.no_grad():
        teacher.blocks[1].out_proj.weight.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="error is nan at step 1"):
        convert.transfer(model, teacher, [tokens()], new, steps=1)


# ---- fit_polynomial


def test_the_polynomial_of_least_error_is_found(swapped):
    """The teacher has the same weights and a polynomial of its own, so that the error can vanish."""
    model, _, _ = swapped
    teacher = copy.deepcopy(model)
    for own, block in zip(teacher.blocks, model.blocks, strict=True):
        own.attention = "softmax"
        own.forward = FastmaxSelfAttention.forward.__get__(changed := copy.deepcopy(block))
        changed.options |= {"a0": 2.0, "a1": 2.2, "a2": 0.8}
    before = snapshot(model)
    rows = convert.fit_polynomial(model, teacher, [tokens(4, N)], rounds=9)
    assert rows[0] == pytest.approx({"round": 0, "error": rows[0]["error"], "a0": 1.0, "a1": 1.0, "a2": 0.5})
    assert rows[-1]["error"] < 1e-6 * rows[0]["error"]
    found = [{name: block.options[name] for name in ("a0", "a1", "a2")} for block in model.blocks]
    assert found == [pytest.approx({"a0": 2.0, "a1": 2.2, "a2": 0.8}, rel=1e-2)] * 3
    assert found == [{name: rows[-1][name] for name in found[0]}] * 3
    assert equal(before, snapshot(model))


def test_a_fitted_polynomial_is_positive_and_no_worse(swapped):
    model, teacher, _ = swapped
    batches = [tokens() for _ in range(2)]
    rows = convert.fit_polynomial(model, teacher, iter(batches), rounds=4)
    errors = [row["error"] for row in rows]
    assert len(rows) == 5 and errors == sorted(errors, reverse=True) and errors[-1] < errors[0]
    assert all(row["a2"] > 0 and row["a1"] ** 2 < 4 * row["a0"] * row["a2"] for row in rows)
    assert sum(convert.attention_errors(model, teacher, batches).values()) / 3 == pytest.approx(errors[-1], rel=1e-6)


def test_fit_polynomial_refuses_and_leaves_the_model(swapped):
    model, teacher, _ = swapped
    for block in model.blocks:
        block.options |= {"a0": 1.3, "a1": 1.1, "a2": 0.7}
    options = [dict(block.options) for block in model.blocks]
    with pytest.raises(ValueError, match="batches must hold at least one"):
        convert.fit_polynomial(model, teacher, [])
    with pytest.raises(ValueError, match="rounds"):
        convert.fit_polynomial(model, teacher, [tokens()], rounds=0)
    with pytest.raises(IndexError):
        convert.fit_polynomial(model, teacher, [tokens(), tokens() + VOCABULARY])
    assert [block.options for block in model.blocks] == options
    model.blocks[0].options["a0"] = 3.0
    with pytest.raises(ValueError, match="one positive polynomial"):
        convert.fit_polynomial(model, teacher, [tokens()])


# ---- finetune


@pytest.mark.parametrize("kind", ["tensor", "mapping", "sequence"])
def test_finetune(swapped, kind):
    model, _, new = swapped
    start = tokens(2, 1)
    text = (start + torch.arange(N + 1)) % VOCABULARY  # what follows a token is known
    batch = {
        "tensor": text,
        "mapping": {"tokens": text[:, :-1], "targets": text[:, 1:]},
        "sequence": (text[:, :-1], text[:, 1:]),
    }
    same = copy.deepcopy(model)
    rows = convert.finetune(model, [batch[kind]] * 20, steps=20, learning_rate=0.01)
    assert [row["step"] for row in rows] == list(range(1, 21)) and rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    assert rows[0]["loss"] == pytest.approx(same(text[:, :-1], text[:, 1:]).item(), rel=1e-6)
    before = snapshot(same)
    convert.finetune(same, [batch[kind]], new, steps=1)
    assert {name for name, x in same.state_dict().items() if not torch.equal(x, before[name])} <= set(new)


def test_gates_are_not_decayed_to_zero():
    model = make(decay=True, conv=0, output_gate=False)
    convert.swap(model, exact_window=WINDOW, input_gate=True)
    with torch.no_grad():
        for block in model.blocks:
            block.input_gate_proj.weight.normal_()
    before = snapshot(model)
    batch = tokens(2, 1), tokens(2, 1)  # one token: nothing decays, so gates have no gradient
    convert.finetune(model, [batch], steps=1, learning_rate=0.01, weight_decay=0.5)
    same = {name for name, x in model.state_dict().items() if torch.equal(x, before[name])}
    assert {name for name in before if "decay_proj" in name or "input_gate_proj" in name} <= same
    assert not any("out_proj" in name for name in same)


def assert_finetune_decays_matrices(model, batch, gates, monkeypatch):
    """Asserts that weight decay is for all matrices but those of modules named in `gates`, which the model has."""
    groups = []
    monkeypatch.setattr(torch.optim, "AdamW", lambda given, **options: groups.extend(given) or torch.optim.SGD(given))
    convert.finetune(model, [batch], steps=1)
    decayed = {id(x) for x in groups[0]["params"]}
    assert groups[1]["weight_decay"] == 0.0
    matrices_of_gates = 0
    for name, x in model.named_parameters():
        is_gate = any(gate in name for gate in gates)
        matrices_of_gates += is_gate and x.dim() == 2
        assert (id(x) in decayed) == (x.dim() == 2 and not is_gate), name
    assert matrices_of_gates > 0


def test_what_finetune_decays(monkeypatch):
    model = make(decay=True)
    convert.swap(model, exact_window=WINDOW, input_gate=True)
    assert any(x.dim() == 3 for x in model.parameters())  # a convolution
    assert_finetune_decays_matrices(model, (tokens(), tokens()), ("decay_proj", "input_gate_proj"), monkeypatch)


def test_padding_of_a_float_mask_is_refused(swapped):
    model, teacher, _ = swapped
    additive = torch.zeros(2, N).masked_fill(torch.arange(N) > 3, -torch.inf)
    with pytest.raises(TypeError, match="attention_mask of a batch must be bool or integer, 0 = padding, got torch.float32"):
        convert.attention_errors(model, teacher, [{"tokens": tokens(), "attention_mask": additive}])


def test_finetune_refuses(swapped):
    model, _, _ = swapped
    for batch, message in (((tokens(),), "scalar loss of a batch"), ("text", "batches must hold")):
        with pytest.raises(TypeError, match=message):
            convert.finetune(model, [batch], steps=1)
    with pytest.raises(TypeError, match="must return logits"):
        convert.finetune(nn.Linear(N, 3, dtype=torch.float64), [torch.zeros(2, N, dtype=torch.float64)], steps=1)
    for batch in (tokens(2, 1), tokens(0, N), tokens(N)):
        with pytest.raises(ValueError, match=r"a batch that is a tensor must be tokens \(b, n\), n at least 2"):
            convert.finetune(model, [batch], steps=1)
    with pytest.raises(ValueError, match="must have parameters that require a gradient, got none"):
        convert.finetune(copy.deepcopy(model).requires_grad_(False), [tokens()], steps=1)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module"):
        convert.finetune(None, [tokens()], steps=1)
    for options in ({"steps": 0}, {"learning_rate": -1.0}, {"warmup": -1}, {"max_norm": 0.0}, {"weight_decay": math.nan}):
        with pytest.raises(ValueError, match=next(iter(options))):
            convert.finetune(model, [tokens()], **{"steps": 1} | options)


def test_saving(swapped):
    model, teacher, new = swapped
    convert.transfer(model, teacher, [tokens()] * 3, new, steps=3)
    anew = make(**PARTS)
    convert.swap(anew, exact_window=WINDOW, decay=True)
    anew.load_state_dict(model.state_dict())
    x = tokens()
    assert equal(snapshot(anew), snapshot(model))
    torch.testing.assert_close(anew(x), model(x))


# ---- autocast


def test_autocast_sees_the_weights_of_each_step(swapped):
    """One autocast context surrounds calls and steps. None may use a cast that autocast cached of earlier weights or without
    gradients."""
    model, teacher, new = swapped
    model, teacher, x = model.float(), teacher.float(), tokens()
    batches = [{"tokens": x[:, :-1], "targets": x[:, 1:]}] * 6

    def stages(model, teacher):
        def loss():
            with torch.no_grad():
                return model(**batches[0]).item()

        yield loss()
        yield convert.fit_polynomial(model, teacher, [x], rounds=2)[-1]["error"]
        yield from (row["error"] for row in convert.transfer(model, teacher, [x] * 6, new, steps=6, learning_rate=0.05))
        yield from convert.attention_errors(model, teacher, [x]).values()
        yield loss()
        yield from (row["loss"] for row in convert.finetune(model, batches, steps=6, learning_rate=0.01))
        yield loss()
        yield from (row["loss"] for row in convert.finetune(teacher, batches, steps=6, learning_rate=0.01))

    expected = list(stages(copy.deepcopy(model), copy.deepcopy(teacher)))
    assert expected[-1] < 0.9 * expected[-6]
    with torch.autocast("cpu", torch.bfloat16):
        assert list(stages(model, teacher)) == pytest.approx(expected, rel=0.05)


# ---- Hugging Face models


@pytest.fixture
def llama():
    """A tiny softmax model in float64, with scores of order one."""
    transformers = pytest.importorskip("transformers")
    options = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    options |= {"vocab_size": VOCABULARY, "num_key_value_heads": 2, "initializer_range": 0.3}
    options |= {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options)).double()


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models
def test_what_finetune_decays_in_a_hugging_face_model(llama, monkeypatch):
    convert.swap(llama, exact_window=WINDOW, decay=True, input_gate=True, longest_half_life=32.0)
    assert_finetune_decays_matrices(llama, tokens(), ("fastmax_decay", "fastmax_input_gate"), monkeypatch)


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models
def test_hugging_face(llama, tmp_path):
    model, teacher = llama, copy.deepcopy(llama)
    weights = snapshot(model)
    new = convert.swap(model, exact_window=WINDOW, decay=True, longest_half_life=32.0, layers=[0, 2])
    assert len(new) == 4 and all("fastmax_decay" in name and "layers.1" not in name for name in new)
    assert equal(weights, {name: x for name, x in snapshot(model).items() if name not in new})
    x = tokens()
    names = ["model.layers.0.self_attn", "model.layers.2.self_attn"]
    padded = {"input_ids": x, "attention_mask": (torch.arange(N) >= torch.tensor([[0], [5]])).long()}
    for batch in (x, padded):
        errors = convert.attention_errors(model, teacher, [batch])
        assert list(errors) == names and all(1e-6 < error < 0.5 for error in errors.values())

    with pytest.raises(ValueError, match="teacher must have softmax attention.*layers.0.self_attn', got.*with fastmax"):
        convert.attention_errors(model, copy.deepcopy(model), [x])
    batches = [tokens() for _ in range(8)]
    before = convert.attention_errors(model, teacher, batches)
    rows = convert.fit_polynomial(model, teacher, batches[:2], rounds=3)
    assert rows[-1]["error"] < rows[0]["error"] and model.config.fastmax["a1"] == rows[-1]["a1"]
    fitted = convert.attention_errors(model, teacher, batches)
    convert.transfer(model, teacher, batches, new, steps=8)
    after = convert.attention_errors(model, teacher, batches)
    assert sum(after.values()) < sum(fitted.values()) < sum(before.values())
    changed = {name for name, x in model.state_dict().items() if name not in new and not torch.equal(x, weights[name])}
    assert changed == set()
    losses = convert.finetune(model, [{"input_ids": x, "labels": x}] * 10, steps=10, learning_rate=0.01)
    assert losses[-1]["loss"] < losses[0]["loss"]

    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert relative(loaded(x).logits, model.eval()(x).logits) < 1e-6


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_batches_of_a_hugging_face_model(llama):
    """A mask counts by keyword and by position, and no layer adds its keys to a cache of the teacher."""
    model, teacher, x = llama, copy.deepcopy(llama), tokens()
    convert.swap(model, exact_window=WINDOW)
    mask = (torch.arange(N) >= torch.tensor([[0], [5]])).long()
    padded = convert.attention_errors(model, teacher, [{"input_ids": x, "attention_mask": mask}])
    assert convert.attention_errors(model, teacher, [(x, mask)]) == padded
    assert convert.attention_errors(model, teacher, [{"input_ids": x, "attention_mask": mask, "use_cache": True}]) == padded
    with pytest.raises(ValueError, match=r"attention_mask of a batch must be a tensor \(b, n\), got .*\(2, 1, 24, 24\)"):
        convert.attention_errors(model, teacher, [(x, torch.ones(2, 1, N, N))])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("way", ["positions", "rows", "cu_seq_lens", "positional"])
def test_packed_batches_of_a_hugging_face_model(llama, way):
    """Documents packed end to end have the errors that they have separately, and training accepts them."""
    model, teacher, x = llama, copy.deepcopy(llama), tokens(4, N // 2)
    new = convert.swap(model, exact_window=WINDOW, decay=True, longest_half_life=32.0)
    expected = convert.attention_errors(model, teacher, [x])
    rows = 2 if way == "rows" else 1
    ids, positions = x.reshape(rows, -1), torch.arange(N // 2).repeat(rows, 4 // rows)
    packed = {"input_ids": ids, "position_ids": positions}
    if way == "cu_seq_lens":
        bounds = torch.arange(0, x.numel() + 1, N // 2, dtype=torch.int32)
        packed |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": N // 2, "max_length_k": N // 2}
    batch = (ids, None, positions) if way == "positional" else packed
    assert convert.attention_errors(model, teacher, [batch]) == pytest.approx(expected, rel=1e-6)
    whole = convert.attention_errors(model, teacher, [ids])
    assert all(abs(whole[name] / expected[name] - 1) > 1e-3 for name in expected)
    [row] = convert.transfer(model, teacher, [batch], new, steps=1)
    assert row["error"] == pytest.approx(sum(expected.values()) / 3, rel=1e-6)
    expected = convert.attention_errors(model, teacher, [x])
    fitted = convert.fit_polynomial(model, teacher, [batch], rounds=1)
    assert fitted[0]["error"] == pytest.approx(sum(expected.values()) / 3, rel=1e-6)
    if way != "positional":
        convert.finetune(model, [packed | {"labels": ids}], steps=1)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_batches_that_mean_something_else_to_the_teacher_are_refused(llama):
    model, teacher, x = llama, copy.deepcopy(llama), tokens(1, N)
    convert.swap(model, exact_window=WINDOW)
    mask, positions = torch.ones_like(x), (torch.arange(N) % 8)[None]
    bounds = torch.tensor([0, 8, 16, N], dtype=torch.int32)
    documents = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 8, "max_length_k": 8}
    cache = pytest.importorskip("transformers").DynamicCache()
    calls = [
        ({"attention_mask": mask[:, 1:]}, r"attention_mask of a batch must have the shape of its tokens \(1, 24\)"),
        (documents | {"cu_seq_lens_q": bounds + 2}, "cu_seqlens must go from 0 to n = 24|cu_seq_lens_q must name"),
        ({"attention_mask": mask, "position_ids": positions}, "packed sequences.*without an attention_mask"),
        (documents, "cu_seq_lens_q must name the documents that position_ids do"),
        (documents | {"position_ids": (torch.arange(N) % 12)[None]}, "cu_seq_lens_q must name the documents"),
        ({"past_key_values": cache}, "past_key_values of a batch must be None, .*got a DynamicCache"),
    ]
    for given, message in calls:
        with pytest.raises(ValueError, match=message):
            convert.attention_errors(model, teacher, [{"input_ids": x} | given])
    with pytest.raises(TypeError, match="cu_seq_lens_q must be an int32 tensor"):
        convert.attention_errors(model, teacher, [{"input_ids": x, "cu_seq_lens_q": [0, N]}])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_teacher_that_sees_later_tokens_is_refused(llama, monkeypatch):
    from transformers.models.llama import modeling_llama

    model, teacher = llama, copy.deepcopy(llama)
    convert.swap(model, exact_window=WINDOW)
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: torch.ones(1, 1, N, N, dtype=torch.bool))
    with pytest.raises(ValueError, match="teacher must be causal"):
        convert.attention_errors(model, teacher, [tokens(1, N)])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_documents_are_those_that_the_teacher_sees(llama, implementation, monkeypatch):
    """Positions that look packed do not make documents: a model may not look for documents in them."""
    from transformers.models.llama import modeling_llama

    model, teacher = llama, copy.deepcopy(llama)
    convert.swap(model, exact_window=N)
    teacher.set_attn_implementation(implementation)
    x, positions = tokens(2, N), torch.arange(N // 2).repeat(2, 2)
    batch = {"input_ids": x, "position_ids": positions}
    assert max(convert.attention_errors(model, teacher, [batch]).values()) < 1e-12
    make = modeling_llama.create_causal_mask
    unpacked = lambda position_ids, **given: make(position_ids=None, **given)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "create_causal_mask", unpacked)
    with pytest.raises(ValueError, match="packed sequences"):
        convert.attention_errors(model, teacher, [batch])


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_window_as_long_as_the_sequence_is_softmax_in_a_hugging_face_model(llama):
    x = tokens()
    expected = llama(x).logits
    convert.swap(llama, exact_window=N)
    assert relative(llama(x).logits, expected) < 1e-6
    with pytest.raises(ValueError, match="must run softmax attention"):
        convert.swap(llama)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_input_gates_of_a_hugging_face_model(llama):
    same, x = copy.deepcopy(llama), tokens()
    convert.swap(same, exact_window=WINDOW)
    new = convert.swap(llama, exact_window=WINDOW, input_gate=True)
    assert set(new) == {name for name, _ in llama.named_parameters() if "fastmax_input_gate" in name} and new
    assert relative(llama(x).logits, same(x).logits) < 1e-12
    with pytest.raises(ValueError, match="kept_keys needs input gates, got 2 with input_gate=False"):
        convert.swap(same, kept_keys=2, input_gate=False)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("layers, decay", [([7], False), (["a"], False), (1, False), (torch.tensor(1), False), ([1, 7], True)])
def test_a_hugging_face_model_is_left_as_it_was(llama, layers, decay):
    before, config = snapshot(llama), llama.config.to_dict()
    with pytest.raises((ValueError, TypeError), match="layers must be"):
        convert.swap(llama, layers=layers, decay=decay)
    assert equal(before, snapshot(llama)) and llama.config.to_dict() == config
    assert llama.config._attn_implementation == "sdpa"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_failed_swap_leaves_a_hugging_face_model_as_it_was_for_others_of_its_configuration(llama, monkeypatch):
    hugging_face = importlib.import_module("fastmax.convert.hugging_face")
    monkeypatch.setattr(hugging_face, "add_input_gate", mock.Mock(side_effect=ValueError("no input gates")))
    before, config, x = snapshot(llama), llama.config.to_dict(), tokens()
    expected = llama(x).logits
    with pytest.raises(ValueError, match="no input gates"):
        convert.swap(llama, decay=True, input_gate=True)
    assert equal(before, snapshot(llama)) and llama.config.to_dict() == config
    type(llama)(llama.config)
    assert llama.config._attn_implementation == "sdpa" and torch.equal(llama(x).logits, expected)
    monkeypatch.undo()
    assert convert.swap(llama, decay=True, input_gate=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_swap_keeps_options_that_are_configured_and_refuses_others_than_its_own(llama):
    integration = pytest.importorskip("fastmax.integrations.transformers")
    for name, configured, given in [
        ("exact_window", {"exact_window": 8}, {"exact_window": WINDOW}),
        ("temperature", {"temperature": 2.0}, {}),
        ("layers", {"layers": [0, 2]}, {}),
        ("layers", {"layers": "global"}, {"layers": [1]}),
    ]:
        llama.config.fastmax = configured
        before = llama.config.to_dict()
        with pytest.raises(ValueError, match=rf"config.fastmax.*{name} = .*reset the configuration.*configure\(model\)"):
            convert.swap(llama, **given)
        assert llama.config.to_dict() == before and llama.config._attn_implementation == "sdpa"
    kept = {"a1": 1.1, "constant_memory": True, "log_decay": [-0.1, -0.2]}
    integration.configure(llama, exact_window=WINDOW, layers=(0, 2), **kept)
    convert.swap(llama, exact_window=WINDOW, layers=[0, 2])
    assert llama.config.fastmax == kept | {"exact_window": WINDOW, "layers": [0, 2]}
