"""The first forward of a model is observed: softmax attention that does not ask for fastmax's function is refused by name."""

import copy
import pickle
import threading

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention as sdpa

transformers = pytest.importorskip("transformers")

import tiny_decoders  # noqa: E402
from tiny_decoders import checkpointed, gpt2, gradients, llama, padding_mask, tokens  # noqa: E402
from tiny_transformers import inputs, tiny_config, tiny_model  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers.observation import FirstForward, observer_at_work  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models

WIDTH = 24  # of the models' hidden states


@torch.library.custom_op("fastmax_tests::flash_attn_forward", mutates_args=())
def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stands for a kernel of another package, with a typical name."""
    return (q @ k.mT).softmax(-1) @ v


class Mixer(torch.nn.Module):
    """Attention in all but its name; each subclass computes it in another way."""

    def __init__(self):
        super().__init__()
        self.projection = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        return x + self.mix(*self.projection(x).chunk(3, dim=-1))


class Fused(Mixer):
    def mix(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Renamed(Mixer):
    def mix(self, q, k, v):
        return sdpa(q, k, v)


class Static(Mixer):
    @staticmethod
    def mix(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


class Kernel(Mixer):
    def mix(self, q, k, v):
        return flash(q, k, v)


class Flex(Mixer):
    def mix(self, q, k, v):
        return flex.flex_attention(*(x[:, None].detach() for x in (q, k, v)))[:, 0]  # on a CPU it has no backward


class HeadsOfPyTorch(Mixer):
    """Calls the function behind nn.MultiheadAttention with weights of its own."""

    def mix(self, q, k, v):
        w, b = self.projection.weight, self.projection.bias
        arguments = WIDTH, 2, w, b, None, None, False, 0.0, w[:WIDTH], None
        return torch.nn.functional.multi_head_attention_forward(q, k, v, *arguments)[0]


class Einsum(Mixer):
    def mix(self, q, k, v):
        return torch.einsum("bnm,bmd->bnd", torch.softmax(torch.einsum("bnd,bmd->bnm", q, k), dim=-1), v)


class Bmm(Mixer):
    def mix(self, q, k, v):
        return torch.bmm(torch.softmax(torch.bmm(q, k.mT), dim=-1), v)


class Baddbmm(Mixer):
    def mix(self, q, k, v):
        bias = torch.zeros(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
        return torch.baddbmm(bias, q, k.mT, alpha=0.5).softmax(-1) @ v


class Functions(Mixer):
    def mix(self, q, k, v):
        return tiny_decoders.softmax_attention(q, k, v)


class InParts(Mixer):
    def weights(self, q, k):
        return torch.nn.functional.softmax(q @ k.mT, dim=-1)

    def mix(self, q, k, v):
        return self.weights(q, k) @ v


class Inherited(InParts):
    def forward(self, x):
        return self.mix(x, x, x)


class ModuleOfSoftmax(Mixer):
    """Its softmax is a part that the constructor makes."""

    def __init__(self):
        super().__init__()
        self.activation = torch.nn.Softmax(dim=-1)

    def mix(self, q, k, v):
        return self.activation(q @ k.mT) @ v


class MaskedScaledAndDropped(Mixer):
    """Does all that models do to scores and weights."""

    def mix(self, q, k, v):
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
        s = (q @ k.transpose(-1, -2)).div_(k.shape[-1] ** 0.5)
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
        s = (s + torch.zeros_like(s)).masked_fill(hidden, -1e9).view(-1, *s.shape[-2:])
        w = torch.nn.functional.dropout(s.float().softmax(-1).to(q.dtype), 0.1, training=True)
        w = torch.where(hidden, 0.0, w) * torch.ones(w.shape[0], 1, 1, dtype=w.dtype)
        return (w.view(q.shape[0], 2, *w.shape[-2:]) @ v).transpose(1, 2).flatten(2)


class RowByRow(Mixer):
    """Writes the scores into a tensor that exists before."""

    def mix(self, q, k, v):
        s = q.new_zeros(q.shape[0], q.shape[1], k.shape[1])
        for row in range(q.shape[1]):
            s[:, row] = (k @ q[:, row, :, None])[..., 0]
        return s.softmax(-1) @ v


class LogSoftmax(Mixer):
    def mix(self, q, k, v):
        return torch.log_softmax(q @ k.mT, dim=-1).exp() @ v


class Broadcast(Mixer):
    """Uses products and sums in place of matrix products."""

    def mix(self, q, k, v):
        w = (q[:, :, None] * k[:, None]).sum(-1).softmax(-1)
        return (w[..., None] * v[:, None]).sum(2)


class LearnedQueries(Mixer):
    def __init__(self):
        super().__init__()
        self.queries = torch.nn.Parameter(torch.randn(5, WIDTH))

    def mix(self, q, k, v):
        queries = torch.nn.functional.linear(self.queries, self.projection.weight[:WIDTH])
        return ((queries @ k.mT).softmax(-1) @ v).mean(1, keepdim=True)


class TalkingWeights(Mixer):
    """Mixes the weights of the heads by a matrix of parameters."""

    def mix(self, q, k, v):
        q, k, v = (x.unflatten(-1, (2, -1)).transpose(1, 2) for x in (q, k, v))
        w = (q @ k.mT).softmax(-1)
        w = torch.einsum("bhnm,hg->bgnm", w, self.projection.weight[:2, :2])
        return (w @ v).transpose(1, 2).flatten(2)


class Recorded(Mixer):
    """Computes attention inside an autograd function."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

        @staticmethod
        def backward(ctx, grad):
            return grad, grad, grad

    def mix(self, q, k, v):
        return self.Function.apply(q, k, v)


class Compiled(Mixer):
    @torch.compile(fullgraph=True, backend="eager")
    def mix(self, q, k, v):
        return (q @ k.mT).softmax(-1) @ v


class AttentionRouter(torch.nn.Module):
    """No attention: it weighs experts, and multiplies matrices with the weights."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH, 4))
        self.experts = torch.nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        w = torch.softmax(x @ self.weight, dim=-1)
        each = torch.einsum("bnd,edf->bnef", x, self.experts)
        best, chosen = w.topk(2)
        some = (each.gather(2, chosen[..., None].expand(*chosen.shape, WIDTH)) * best[..., None]).sum(2)
        return some + (w[..., None, :] @ each).squeeze(2)


class CosineRouter(AttentionRouter):
    def forward(self, x):
        weight = torch.nn.functional.normalize(self.weight.float(), dim=0).to(x.dtype)
        w = torch.softmax(torch.nn.functional.normalize(x, dim=-1) @ weight / 0.1, dim=-1)
        return (w[..., None, :] @ (x[..., None, :] * w[..., None])).squeeze(2)


class RouterThatAttends(AttentionRouter):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


class AttentionGate(Mixer):
    """No attention: it weighs channels."""

    def mix(self, q, k, v):
        return q.sigmoid() * k.softmax(-1) + v


class Linear(Mixer):
    """Linear attention: the softmax is of queries and keys each by themselves."""

    def mix(self, q, k, v):
        return q.softmax(-1) @ (k.softmax(1).mT @ v)


class NoSoftmax(Mixer):
    def mix(self, q, k, v):
        return torch.relu(q @ k.mT) @ v


class Classifier(Mixer):
    """No attention: its softmax of logits is a result."""

    def mix(self, q, k, v):
        logits = torch.nn.functional.linear(q @ (k.mT @ v), self.projection.weight[:8])
        self.classes = logits.softmax(-1), (q @ k.mT).softmax(-1)  # of similarities too, as CLIP has them
        return v


class LanguageModel(Mixer):
    """No attention: the softmax is of `sample`, which `forward` does not call."""

    def mix(self, q, k, v):
        return q @ (k.mT @ v)

    def sample(self, x):
        return torch.softmax(self(x), dim=-1).multinomial(1)


class OtherWeights(Mixer):
    """Takes a softmax of a linear map, as dynamic convolutions and deformable attention do."""

    def mix(self, q, k, v):
        return torch.softmax(q[..., :3], -1) @ v.unfold(1, 3, 1).mean((1, 2))[:, :, None].expand(-1, 3, WIDTH)


ATTENTION = [
    Fused, Renamed, Static, Kernel, Flex, HeadsOfPyTorch, Einsum, Bmm, Baddbmm, Functions, InParts, Inherited, ModuleOfSoftmax,
    MaskedScaledAndDropped, RowByRow, LogSoftmax, Broadcast, LearnedQueries, TalkingWeights, Recorded, Compiled,
    RouterThatAttends,
]  # fmt: skip
NO_ATTENTION = [
    AttentionRouter, CosineRouter, AttentionGate, Linear, NoSoftmax, Classifier, LanguageModel, OtherWeights,
]  # fmt: skip
GRADIENTS = pytest.mark.parametrize("context", [torch.enable_grad, torch.inference_mode])


def with_mixer(mixer, make_model=llama, **options):
    """A model whose last MLP calls the mixer first."""
    model = make_model(**options)
    layer = (model.model.layers if make_model is llama else model.transformer.h)[-1]
    layer.mlp = torch.nn.Sequential(mixer.double(), layer.mlp)
    integration.check(model)
    return model


def hooks(model) -> list:
    return [
        hook
        for module in model.modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        if type(hook).__module__ == FirstForward.__module__
    ]


def nothing_at_work() -> bool:
    from torch.nn.modules.module import _has_any_global_hook

    return (
        observer_at_work() is None
        and not _has_any_global_hook()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._dynamo.eval_frame._stance.stance == "default"
    )


# ---- what is refused


@pytest.mark.parametrize("kind", ATTENTION)
@GRADIENTS
def test_attention_of_its_own_is_refused_in_the_first_forward(kind, context):
    model, ids = with_mixer(kind()), tokens(2, 9)
    message = rf'cannot run attn_implementation="fastmax": model.layers.1.mlp.0 \({kind.__name__}\) computes softmax attention'
    for _ in range(2):
        with pytest.raises(ValueError, match=message), context():
            model(ids)
        assert nothing_at_work()
    model.set_attn_implementation("sdpa")
    with context():
        model(ids)  # transformers' own business
    model.set_attn_implementation("fastmax")
    with pytest.raises(ValueError, match=message), context():
        model(ids)


@pytest.mark.parametrize("kind", [Fused, Einsum, MaskedScaledAndDropped])
def test_attention_in_training(kind):
    model, ids = with_mixer(kind(), gpt2).train(), tokens(2, 9)
    with pytest.raises(ValueError, match=rf"transformer.h.1.mlp.0 \({kind.__name__}\) computes softmax attention"):
        model(ids, labels=ids)


@pytest.mark.parametrize("kind", [Fused, InParts])
def test_attention_in_generation_and_under_checkpointing(kind):
    model, ids = with_mixer(kind()), tokens(2, 9)
    with pytest.raises(ValueError, match="computes softmax attention"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="computes softmax attention"):
        gradients(checkpointed(model), ids, None)
    assert nothing_at_work()


@pytest.mark.parametrize("kind", NO_ATTENTION)
@GRADIENTS
def test_what_is_no_attention_passes(kind, context):
    model, ids = with_mixer(kind()), tokens(2, 9)
    with context():
        first, second = model(ids).logits, model(ids).logits
    assert torch.equal(first, second) and nothing_at_work() and not hooks(model)


class Overriding(LlamaAttention):
    """Does not run the attention of its base class, which asks the interface."""

    def forward(self, hidden_states, **kwargs):
        q = k = v = hidden_states
        return sdpa(q, k, v), None


class Idle(LlamaAttention):
    """Computes another function, which no operation shows."""

    def forward(self, hidden_states, **kwargs):
        return torch.cumsum(hidden_states, 1), None


class KernelOutsideOfPyTorch(LlamaAttention):
    """Calls a kernel that is not a PyTorch operator."""

    def forward(self, hidden_states, **kwargs):
        x = hidden_states.detach().numpy()
        return torch.from_numpy(x * 2), None


@pytest.mark.parametrize("kind", [Overriding, Idle, KernelOutsideOfPyTorch])
def test_attention_layer_that_does_not_ask_is_refused(kind):
    model = llama()
    model.model.layers[1].self_attn = kind(model.config, 1).double()
    integration.check(model)
    with pytest.raises(
        ValueError, match=rf"model.layers.1.self_attn \({kind.__name__}\) computes softmax attention of its own"
    ):
        model(tokens(2, 9))


def test_layer_that_asks_the_interface_is_attention_by_any_name():
    model, ids = llama(), tokens(2, 9)
    expected = model(ids).logits
    layer = model.model.layers[1].self_attn
    layer.__class__ = type("Mixer", (type("Renamed", (LlamaAttention,), {}),), {})
    assert integration.check(model)["model.layers.1.self_attn"] == "fastmax"
    torch.testing.assert_close(model(ids).logits, expected)


def test_part_that_the_choice_does_not_reach():
    """MaskFormer makes another configuration for its backbone."""
    kind = transformers.MaskFormerModel
    config = tiny_config(kind.config_class)
    config._attn_implementation = "fastmax"
    model = tiny_model(kind, config)
    with pytest.raises(ValueError, match=r"\(MaskFormerSwinSelfAttention\) computes softmax attention of its own"):
        model(**next(inputs(model)))


def test_softmax_that_was_asked_for_passes():
    model, ids = llama(fastmax={"layers": [1]}), tokens(2, 9)
    model(ids)
    assert not hooks(model)
    model.set_attn_implementation("eager")
    model(ids)


# ---- what is observed, and for how long


def test_second_forward_is_not_observed():
    model, ids = llama(), tokens(2, 9)
    assert hooks(model)
    seen = []
    model.model.layers[0].register_forward_hook(lambda *given: seen.append(observer_at_work()))
    first = model(ids, attention_mask=padding_mask("right")[:2]).logits
    assert not hooks(model)
    second = model(ids, attention_mask=padding_mask("right")[:2]).logits
    assert torch.equal(first, second)
    assert seen[0] is not None and seen[1] is None and nothing_at_work()


def test_training_after_evaluation_is_not_observed_again():
    model, ids = llama(), tokens(2, 9)
    model(ids)
    model.train()(ids)
    assert not hooks(model)


def test_gradients_of_the_observed_forward():
    model, ids = llama(), tokens(2, 9)
    first, second = gradients(model, ids, None), gradients(model, ids, None)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_first_forward_that_fails_is_observed_again():
    model, ids = with_mixer(Fused()), tokens(2, 9)
    before = len(hooks(model))
    with pytest.raises(ValueError, match="custom 4-d mask"):
        model(ids, attention_mask=torch.ones(2, 1, 9, 9).bool())
    assert len(hooks(model)) >= before and nothing_at_work()
    with pytest.raises(ValueError, match="computes softmax attention"):
        model(ids)


def test_first_forward_in_the_handler_of_another_error():
    model, ids = llama(), tokens(2, 9)
    try:
        raise KeyError("something else")
    except KeyError:
        model(ids)
    assert not hooks(model) and nothing_at_work()


class Interrupted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.again = False

    def forward(self, x):
        if not self.again:
            self.again = True
            raise KeyboardInterrupt
        return x


def test_first_forward_after_an_interrupt():
    model, ids = with_mixer(Interrupted()), tokens(2, 9)
    with pytest.raises(KeyboardInterrupt):
        model(ids)
    model(ids)
    assert nothing_at_work() and not hooks(model)


class Optional(torch.nn.Module):
    """Runs its part only if it is told to."""

    def __init__(self, part):
        super().__init__()
        self.part, self.enabled = part, False

    def forward(self, x):
        return self.part(x) if self.enabled else x


@pytest.mark.parametrize("kind", [Fused, InParts])
def test_part_that_did_not_run_is_observed_when_it_does(kind):
    optional, ids = Optional(kind()), tokens(2, 9)
    model = with_mixer(optional)
    model(ids)
    assert len(hooks(model)) == 1
    optional.enabled = True
    with pytest.raises(ValueError, match=rf"{kind.__name__}\) computes softmax attention"):
        model(ids)
    assert nothing_at_work()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"])
def test_copies_are_observed(copied):
    model, ids = with_mixer(InParts()), tokens(2, 9)
    other = copied(model)
    with pytest.raises(ValueError, match="InParts"):
        other(ids)
    other.config._attn_implementation = "sdpa"
    other(ids)


def test_part_of_a_model_by_itself():
    model, ids = with_mixer(Fused()), tokens(2, 9)
    with pytest.raises(ValueError, match=r"\(Fused\) computes softmax attention"):
        model.model(ids)
    with pytest.raises(ValueError, match=r"\(Fused\) computes softmax attention"):
        model.model.layers[1].mlp(torch.randn(2, 3, WIDTH, dtype=torch.float64))


def test_other_threads_are_not_observed():
    other, ids = InParts(), tokens(2, 9)
    results = []

    class Waits(torch.nn.Module):
        def forward(self, x):
            thread = threading.Thread(target=lambda: results.append(other(torch.randn(2, 3, WIDTH))))
            thread.start()
            thread.join()
            return x

    with_mixer(Waits())(ids)
    assert len(results) == 1


def test_tensors_without_values_are_not_observed():
    model, ids = llama(), tokens(2, 9)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert model(fake.from_tensor(ids), use_cache=False).logits.shape == (2, 9, 40)
    assert hooks(model) and nothing_at_work()


def test_real_inputs_in_fake_tensor_mode_are_not_observed():
    """The model and its inputs are real tensors, so that only the mode tells that results have no values."""
    model, ids = llama(), tokens(2, 9)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(model(ids, use_cache=False).logits, FakeTensor)
    assert hooks(model) and nothing_at_work()


def test_fake_tensors_of_a_part_do_not_abort_the_observation():
    """PyTorch dispatches "prim.device" for fake tensors, and ends the process if the observer raises an error there."""

    class PlansItsShape(Mixer):
        def mix(self, q, k, v):
            with FakeTensorMode(allow_non_fake_inputs=True):
                shape = (q + k).shape
            return v.reshape(shape)

    model = with_mixer(PlansItsShape())
    model(tokens(2, 9))
    assert not hooks(model) and nothing_at_work()


# ---- under torch.compile


def test_compiled_part_runs_as_it_is_written_at_first():
    torch.compiler.reset()
    for kind in (Fused, AttentionGate):
        model, ids = with_mixer(kind(), num_hidden_layers=1), tokens(2, 9)
        model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
        if kind is Fused:
            with pytest.raises(ValueError, match=r"\(Fused\) computes softmax attention"):
                model(ids, use_cache=False)
        else:
            first = model(ids, use_cache=False).logits
            torch.testing.assert_close(model(ids, use_cache=False).logits, first)
            assert not hooks(model)
        assert nothing_at_work()


@pytest.mark.parametrize("fullgraph, kind", [(True, Fused), (False, InParts)])
def test_attention_in_a_model_that_is_compiled_before_it_runs(fullgraph, kind):
    torch.compiler.reset()
    model, ids = with_mixer(kind(), num_hidden_layers=1), tokens(2, 9)
    with pytest.raises(Exception if fullgraph else ValueError, match=rf"\({kind.__name__}\) computes softmax attention"):
        torch.compile(model, fullgraph=fullgraph, backend="eager")(ids, use_cache=False)


def test_compiled_after_the_first_forward():
    torch.compiler.reset()
    model, ids = with_mixer(AttentionRouter(), num_hidden_layers=1), tokens(2, 9)
    expected = model(ids, use_cache=False).logits
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="eager")(ids, use_cache=False).logits, expected)
