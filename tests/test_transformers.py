"""The Hugging Face integration on small random models, against the same models with dense masks and a naive polynomial."""

import copy
import importlib
import math
import sys
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fastmax import fastmax_attention, swap_attention

transformers = pytest.importorskip("transformers")

from tiny_decoders import (  # noqa: E402
    HYBRID,
    PAD,
    VOCABULARY,
    assert_same_model,
    checkpointed,
    gpt2,
    gradients,
    hybrid,
    llama,
    losses_of_training,
    make,
    mistral,
    padding_mask,
    run,
    tokens,
)
from tiny_transformers import tiny_config  # noqa: E402
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers.cross_attention import tell_cross_attention  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models


FAMILIES = pytest.mark.parametrize("family", [llama, gpt2])
OF_POSITIONS = pytest.mark.parametrize("options", [{"exact_window": 3}, {"rpe_matrix": "sinusoidal"}], ids=str)


# ---- the whole model


@FAMILIES
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_equals_the_naive_model(family, side):
    model = family()
    ids, mask = tokens(3, 9), padding_mask(side)
    real = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()

    def logits_and_gradients():
        logits = run(model, ids, mask)[real]
        loss = torch.nn.functional.cross_entropy(logits, ids[real])
        return logits, torch.autograd.grad(loss, tuple(model.parameters()))

    fastmax = logits_and_gradients()
    model.set_attn_implementation("polynomial")
    naive = logits_and_gradients()
    torch.testing.assert_close(fastmax, naive, rtol=1e-8, atol=1e-9)
    model.set_attn_implementation("eager")
    first = slice(9)  # the first sequence has no padding, of which softmax makes NaN
    assert (logits_and_gradients()[0][first] - naive[0][first]).abs().max() > 1e-3


def test_one_layer_by_hand():
    model = llama()
    attention = model.model.layers[0].self_attn
    seen = {}

    def keep(module, args, kwargs, output):
        seen.update(kwargs, output=output[0])

    attention.register_forward_hook(keep, with_kwargs=True)
    run(model, tokens(3, 9), padding_mask("right"))

    x = seen["hidden_states"]
    q, k, v = (
        projection(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *seen["position_embeddings"])
    o = fastmax_attention(q, k, v, causal=True, temperature=math.sqrt(6), attention_mask=padding_mask("right").bool())
    torch.testing.assert_close(seen["output"], attention.o_proj(o.transpose(1, 2).flatten(2)))


@FAMILIES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_sequences_alone(family, side):
    model = family()
    ids, mask = tokens(3, 9), padding_mask(side)
    together = run(model, ids, mask)
    for row, keep in enumerate(mask.bool()):
        alone = run(model, ids[row, keep][None], None)
        torch.testing.assert_close(together[row, keep][None], alone)


@FAMILIES
def test_training_step(family):
    model = family().train().float()
    ids = tokens(2, 16)
    losses = losses_of_training(model, ids, 5)
    assert losses[-1] < losses[0] - 0.5


# ---- generation


@FAMILIES
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
def test_generate_with_cache_equals_without(family, beams):
    model = family()
    ids, mask = tokens(3, 9), padding_mask("left")
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False, "num_beams": beams}
    cached = model.generate(ids, **options, use_cache=True)
    recomputed = model.generate(ids, **options, use_cache=False)
    assert cached.shape == (3, 21)
    assert torch.equal(cached, recomputed)
    for row, keep in enumerate(mask.bool()):
        alone = model.generate(ids[row, keep][None], **options | {"attention_mask": mask[row, keep][None]})
        assert torch.equal(alone[0, -12:], cached[row, -12:])


@FAMILIES
def test_cached_logits_equal_one_pass(family):
    """A prefill is followed by several tokens at once, as in speculative decoding, and then by one."""
    model = family()
    ids = tokens(2, 9)
    expected = model(ids).logits
    first = model(ids[:, :4], use_cache=True)
    several = model(ids[:, 4:8], past_key_values=first.past_key_values, use_cache=True)
    last = model(ids[:, 8:], past_key_values=several.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat((first.logits, several.logits, last.logits), dim=1), expected)


@pytest.mark.parametrize("options", [{"exact_window": 4}, {"rpe_matrix": "sinusoidal"}], ids=["exact window", "sinusoidal"])
def test_mask_of_four_dimensions_in_a_step(options):
    model, ids = llama(), tokens(2, 9)
    integration.configure(model, **options)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    y = model(ids[:, 8:], past_key_values=cache, attention_mask=torch.ones(2, 1, 1, 9, dtype=torch.bool)).logits
    torch.testing.assert_close(y, model(ids, use_cache=False).logits[:, 8:])


@pytest.mark.parametrize("options", [{"exact_window": 4}, {"rpe_matrix": "sinusoidal"}], ids=["exact window", "sinusoidal"])
def test_padding_between_tokens_is_refused(options):
    """It would count as positions. `FastmaxCache` and kept keys count real tokens only."""
    model, ids = llama(), tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 3:5] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    model(ids, **given)
    integration.configure(model, **options)
    with pytest.raises(ValueError, match="attention_mask must have padding at the ends of a sequence only"):
        model(ids, **given, use_cache=False)
    for side in (slice(0, 3), slice(7, None)):
        mask = torch.ones_like(ids)
        mask[1, side] = 0
        model(ids, attention_mask=mask, use_cache=False)


def test_padding_between_tokens_with_kept_keys():
    model, ids = llama(), tokens(2, 9)
    integration.add_input_gate(model)
    integration.configure(model, exact_window=4, kept_keys=2)
    mask = torch.ones_like(ids)
    mask[1, 3:5] = 0
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0), "use_cache": False}
    alone = model(ids[1:, mask[1].bool()], use_cache=False).logits[0]
    torch.testing.assert_close(model(ids, **given).logits[1, mask[1].bool()], alone)


def test_single_query_that_is_said_not_to_be_causal():
    """Models say so where one query sees all keys. It still has a position."""
    layer = llama().model.layers[0].self_attn
    layer.config.fastmax = {"exact_window": 3}
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 1), (2, 9), (2, 9)))
    for mask in (None, torch.ones(2, 1, 1, 9, dtype=torch.bool)):
        o, _ = integration.fastmax_attention_forward(layer, q, k, v, mask, scaling=0.25, is_causal=False)
        expected = fastmax_attention(q, k, v, causal=True, temperature=4.0, exact_window=3)
        torch.testing.assert_close(o.transpose(1, 2), expected)


def test_mask_made_without_arguments():
    mask = integration.FastmaxMask(True, None)
    for use in (mask.dense, lambda: mask.cu_seqlens(torch.device("cpu"))):
        with pytest.raises(ValueError, match="arguments of a FastmaxMask for .* must be given, got None"):
            use()


def test_positions_of_several_axes_that_start_again():
    text = torch.arange(6).expand(3, 2, -1)
    image = torch.tensor([[0, 0, 0, 0, 2, 3], [0, 0, 1, 1, 2, 3], [0, 1, 0, 1, 2, 3]])  # four patches, then text
    packed = torch.tensor([0, 1, 2, 0, 1, 2]).expand(3, 1, -1)
    for accepted in (text, image[:, None]):
        integration.FastmaxMask(True, None).refuse_packing(accepted)
    with pytest.raises(ValueError, match="position_ids start again within a row"):
        integration.FastmaxMask(True, None).refuse_packing(packed)
    padding = torch.tensor([[True, True, True, False, True, True]])
    integration.FastmaxMask(True, padding).refuse_packing(packed)


# ---- bidirectional and cross attention


def bert(attention_probs_dropout_prob=0.0):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=64, initializer_range=0.3,
        attention_probs_dropout_prob=attention_probs_dropout_prob, hidden_dropout_prob=0.0,
    )  # fmt: skip
    return make(transformers.BertModel, config)


@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
def test_bidirectional_model(given):
    model = bert()
    for layer in model.encoder.layer:
        del layer.attention.self.is_causal  # the mask alone must say it
    ids, mask = tokens(3, 9), padding_mask("right")
    keep = mask.bool() if given else torch.ones_like(mask).bool()
    o = model(ids, attention_mask=mask if given else None).last_hidden_state
    model.set_attn_implementation("polynomial")
    expected = model(ids, attention_mask=mask if given else None).last_hidden_state
    torch.testing.assert_close(o[keep], expected[keep])


def bart(**options):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=3, max_position_embeddings=64, init_std=0.3, dropout=0.0,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None, **options,
    )  # fmt: skip
    return make(transformers.BartForConditionalGeneration, config)


def test_encoder_decoder_model():
    model = bart()
    source, mask, target = tokens(3, 9), padding_mask("right"), tokens(3, 5)
    logits = model(source, attention_mask=mask, decoder_input_ids=target).logits
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
    cached = model.generate(source, **options, use_cache=True)
    assert torch.equal(cached, model.generate(source, **options, use_cache=False))
    model.set_attn_implementation("polynomial")
    torch.testing.assert_close(logits, model(source, attention_mask=mask, decoder_input_ids=target).logits)


@OF_POSITIONS
def test_cross_attention_has_no_positions(options):
    """The target may be computed in pieces, and padding of the source changes nothing."""
    model = bart(fastmax=options)
    source, target, mask = tokens(3, 9), tokens(3, 9), padding_mask("right")
    logits = model(source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
    encoded = model.get_encoder()(source, attention_mask=mask)
    cache, pieces = None, []
    for piece in target.split((4, 1, 1, 1, 1, 1), dim=1):
        given = {"encoder_outputs": encoded, "attention_mask": mask, "past_key_values": cache, "use_cache": True}
        out = model(decoder_input_ids=piece, **given)
        cache, pieces = out.past_key_values, [*pieces, out.logits]
    torch.testing.assert_close(torch.cat(pieces, 1), logits)
    for row, length in enumerate(mask.sum(1).tolist()):
        one = slice(row, row + 1)
        alone = model(source[one, :length], decoder_input_ids=target[one], use_cache=False).logits
        torch.testing.assert_close(logits[one], alone)


def moonshine(**options):
    """Its attention layers are of one class, which says neither what they are nor what their keys are of."""
    heads = {f"{part}_num_{kind}_heads": 2 for part in ("encoder", "decoder") for kind in ("attention", "key_value")}
    layers = {"encoder_num_hidden_layers": 1, "decoder_num_hidden_layers": 2, "initializer_range": 0.3}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32}
    return make(
        transformers.MoonshineForConditionalGeneration, transformers.MoonshineConfig(**sizes, **heads, **layers, **options)
    )


@OF_POSITIONS
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_cross_attention_that_does_not_say_so(options, compiled):
    """With as many queries as keys it has no positions either."""
    model, target = moonshine(fastmax=options), tokens(2, 7)
    decoder, encoded = model.get_decoder(), torch.randn(2, 7, 16, dtype=torch.float64)

    def hidden(encoded, decoder=decoder):
        return decoder(target, encoder_hidden_states=encoded, use_cache=False).last_hidden_state

    y = hidden(encoded)
    if compiled:
        torch._dynamo.reset()
        whole = torch.compile(decoder, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(hidden(encoded, whole), y)
    torch.testing.assert_close(hidden(encoded.flip(1)), y)
    torch.testing.assert_close(hidden(torch.cat((encoded, encoded), 1)), y)  # every key twice
    integration.configure(model)
    assert not torch.allclose(hidden(encoded), y)  # self-attention has positions


@OF_POSITIONS
def test_layer_that_takes_queries_and_keys(options):
    sam = importlib.import_module("transformers.models.sam.modeling_sam")
    config = transformers.SamMaskDecoderConfig(hidden_size=16, num_attention_heads=2, attn_implementation="fastmax")
    layer, (q, k) = sam.SamAttention(config, downsample_rate=1).double(), torch.randn(2, 2, 1, 7, 16, dtype=torch.float64)
    plain = {name: layer(*x)[0] for name, x in {"self": (q, q, q), "cross": (q, k, k)}.items()}
    config.fastmax = options
    (name,) = options
    with pytest.raises(ValueError, match=rf"{name} = .* 7 queries and 7 keys are of one sequence, and SamAttention does not"):
        layer(q, k, k)
    tell_cross_attention(layer)
    torch.testing.assert_close(layer(q, k, value=k)[0], plain["cross"])
    torch.testing.assert_close(layer(query=q, key=k, value=k)[0], plain["cross"])
    expected = layer(q, q, q)[0]
    assert not torch.allclose(expected, plain["self"])
    torch.testing.assert_close(checkpoint(layer, q.requires_grad_(), q, q, use_reentrant=True)[0], expected)


@pytest.mark.parametrize("argument", [True, False], ids=["arguments", "of the class"])
def test_layer_that_does_not_tell_what_its_keys_are_of(argument):
    """Other keys could be among its arguments, or be pooled from its own."""

    class Pooled(torch.nn.Module):
        def forward(self, hidden_states):
            keys = hidden_states[:, :, ::2]
            return integration.fastmax_attention_forward(self, hidden_states, keys, keys, None)

    class Any(Pooled):
        def forward(self, *args):
            return integration.fastmax_attention_forward(self, args[0], args[1], args[1], None)

    layer = (Any if argument else Pooled)()
    layer.config, layer.is_causal = bert().config, False
    q = torch.randn(2, 2, 6, 8)
    layer(*((q, q) if argument else (q,)))
    layer.config.fastmax = {"exact_window": 3}
    with pytest.raises(ValueError, match="exact_window = 3 needs to know whether 6 queries and [63] keys are of one sequence"):
        layer(*((q, q) if argument else (q,)))


def test_single_query_of_cross_attention_with_is_causal():
    layer = llama().model.layers[0].self_attn
    layer.is_cross_attention, layer.config.fastmax = True, {"exact_window": 3}  # as in Idefics, whose layers are all is_causal
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 1), (2, 9), (2, 9)))
    o, _ = integration.fastmax_attention_forward(layer, q, k, v, None, scaling=0.25)
    torch.testing.assert_close(o.transpose(1, 2), fastmax_attention(q, k, v, causal=False, temperature=4.0))
    with pytest.raises(ValueError, match="which of 9 keys the 9 queries of LlamaAttention see: it is causal cross-attention"):
        integration.fastmax_attention_forward(layer, q.expand(-1, -1, 9, -1), k, v, None)


def test_bidirectional_queries_with_cached_keys():
    """A block of tokens that see each other and all before. A window of all keys is softmax."""
    model, ids = llama(), tokens(2, 9)
    integration.configure(model, exact_window=9)

    def logits():
        cache = transformers.DynamicCache()
        model(ids[:, :5], is_causal=False, past_key_values=cache)
        return model(ids[:, 5:], is_causal=False, past_key_values=cache).logits

    y = logits()
    with pytest.raises(ValueError, match='normalize="sequence" looks at all rows at once'):
        integration.configure(model, normalize="sequence")
        logits()
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(y, logits())


@pytest.mark.filterwarnings("ignore:.*later tokens leak")
@pytest.mark.parametrize("name", ["causal", "bidirectional", "encoder"])
def test_padding_does_not_scale_the_queries(name):
    """Queries at padding would be the longest of their sequence."""
    model = {"causal": llama, "bidirectional": bert, "encoder": lambda: bart().get_encoder()}[name]()
    integration.configure(model, normalize="sequence", lim=1.5)
    mask = padding_mask("right")
    x = model.get_input_embeddings()(tokens(3, 9)).detach()
    x[~mask.bool()] *= 50
    given = {"use_cache": False} if name == "causal" else {}
    y = model(inputs_embeds=x, attention_mask=mask, **given)[0]
    for row, keep in enumerate(mask.bool()):
        torch.testing.assert_close(y[row, keep], model(inputs_embeds=x[row : row + 1, keep], **given)[0][0])


@pytest.mark.parametrize("given", [True, False], ids=["mask", "no mask"])
def test_causal_model_used_bidirectionally(given):
    """transformers' switch for it is is_causal=False in the call."""
    model = llama()
    ids, mask = tokens(3, 9), padding_mask("right")
    arguments = {"is_causal": False, "attention_mask": mask if given else None}
    logits = model(ids, **arguments).logits
    model.set_attn_implementation("polynomial")
    keep = mask.bool() if given else torch.ones_like(mask).bool()
    torch.testing.assert_close(logits[keep], model(ids, **arguments).logits[keep])


# ---- models that share a configuration


def test_a_model_that_would_change_what_another_runs_is_refused():
    config, ids = llama().config, tokens(1, 7)
    kind = transformers.LlamaForCausalLM
    for first, second in (("fastmax", "sdpa"), ("sdpa", "fastmax")):
        config = copy.deepcopy(config)
        model = kind._from_config(config, attn_implementation=first).double().eval()
        logits = model(ids).logits
        message = f'this LlamaModel, asked for attn_implementation="{second}", is also that of a LlamaModel that runs "{first}"'
        with pytest.raises(ValueError, match=message):
            kind._from_config(config, attn_implementation=second)
        assert config._attn_implementation == first and torch.equal(model(ids).logits, logits)
        other = kind._from_config(config, attn_implementation=first)
        with pytest.raises(ValueError, match="pass a copy of the config, copy.deepcopy"):
            other.set_attn_implementation(second)
        config._attn_implementation = second
        with pytest.raises(ValueError, match=f'is also that of a Llama.* that runs "{first}"'):
            integration.check(other)
        assert torch.equal(model(ids).logits, logits)
        apart = kind._from_config(copy.deepcopy(config), attn_implementation=second).double().eval()
        apart.load_state_dict(model.state_dict())
        assert not torch.allclose(apart(ids).logits, logits)
        del model, other
        kind._from_config(config, attn_implementation=second)  # nobody else runs by it


def test_models_around_the_same_layers_share_their_configuration():
    model = llama()
    around = transformers.LlamaForSequenceClassification(model.config).double()
    around.model = model.model
    model.model.set_attn_implementation("sdpa")
    assert set(integration.check(around).values()) == {"sdpa"}


# ---- options


def recorded_call(model, *args, **kwargs):
    """Returns the arguments of the first call of fastmax_attention."""
    with mock.patch.object(integration.forward, "fastmax_attention", side_effect=fastmax_attention) as attention:
        model(*args, **kwargs)
    return attention.call_args_list[0]


def test_grouped_keys_are_not_repeated():
    q, k, v = recorded_call(llama(), tokens(2, 5)).args
    assert q.shape == (2, 4, 5, 6) and k.shape == v.shape == (2, 2, 5, 6)


@pytest.mark.parametrize(
    "model, temperature",
    [(llama, math.sqrt(6)), (gpt2, math.sqrt(8)), (lambda: gpt2(scale_attn_weights=False), 1.0)],
    ids=["llama", "gpt2", "gpt2 unscaled"],
)
def test_default_temperature_is_the_inverse_scale(model, temperature):
    assert recorded_call(model(), tokens(2, 5)).kwargs["temperature"] == pytest.approx(temperature)


def test_scale_left_to_the_attention_function():
    attention = llama().model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 6, dtype=torch.float64)
    o, _ = integration.fastmax_attention_forward(attention, q, q, q, None, scaling=None)
    torch.testing.assert_close(o.transpose(1, 2), fastmax_attention(q, q, q, causal=True, temperature=math.sqrt(6)))


@pytest.mark.filterwarnings("ignore:fastmax. f.s. = .* is not positive:RuntimeWarning")  # p = 1
def test_options_from_the_configuration():
    model = llama(fastmax={"p": 1, "temperature": 30.0})
    call = recorded_call(model, tokens(2, 5))
    assert call.kwargs["p"] == 1 and call.kwargs["temperature"] == 30.0
    restored = transformers.LlamaConfig.from_dict(model.config.to_dict())
    assert restored.fastmax == {"p": 1, "temperature": 30.0}


def test_exact_window():
    """A window as wide as the sequence gives softmax attention, which the model had before."""
    model, ids, mask = llama(), tokens(3, 9), padding_mask("left")
    plain = run(model, ids, mask)
    integration.configure(model, exact_window=9)
    exact = run(model, ids, mask)
    model.set_attn_implementation("eager")
    first = slice(1)  # the sequence without padding, of which softmax makes NaN
    torch.testing.assert_close(exact[first], run(model, ids, mask)[first], rtol=1e-4, atol=1e-5)  # its softmax is float32
    assert not torch.allclose(exact, plain)


def test_configure():
    model = llama()
    ids = tokens(2, 5)
    before = model(ids).logits
    integration.configure(model, temperature=30.0, normalize="token")
    assert recorded_call(model, ids).kwargs["normalize"] == "token"
    assert not torch.allclose(model(ids).logits, before)
    integration.configure(model.config)
    assert torch.equal(model(ids).logits, before)
    with pytest.raises(TypeError, match=r"unknown fastmax option 'sharpness'.*temperature"):
        integration.configure(model, sharpness=2)
    for other in (["p", 1], "p=1", 1):
        model.config.fastmax = other
        with pytest.raises(TypeError, match="config.fastmax must be a dict of options, got "):
            model(ids)
    model.config.fastmax = {"sharpness": 2}
    with pytest.raises(TypeError, match="unknown fastmax option 'sharpness'"):
        model(ids)


@pytest.mark.parametrize("error", [TypeError, RuntimeError, ValueError])
def test_an_error_of_any_kind_puts_configurations_back(error, monkeypatch):
    model = llama(fastmax={"p": 1})
    before = dict(vars(model.config))
    monkeypatch.setattr(integration.models, "_check_layers", mock.Mock(side_effect=error("no such layer")))
    with pytest.raises(error, match="no such layer"):
        integration.configure(model, temperature=3.0)
    assert vars(model.config) == before and model.config.fastmax == {"p": 1}
    model.config._attn_implementation = "sdpa"
    with pytest.raises(error, match="no such layer"):
        model.set_attn_implementation("fastmax")
    assert model.config._attn_implementation == "sdpa"


def test_configure_reaches_sub_configurations():
    config = transformers.LlavaConfig()
    integration.configure(config, p=1)
    assert config.fastmax == config.text_config.fastmax == config.vision_config.fastmax == {"p": 1}


def test_configure_reaches_copies_of_the_configuration():
    """An encoder-decoder model gives its parts copies of the configuration."""
    config = transformers.BertGenerationConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
    )  # fmt: skip
    model = make(transformers.BertGenerationEncoder, config)
    model.encoder.layer[0].attention.self.config = copy.deepcopy(config)
    integration.configure(model, temperature=30.0)
    assert recorded_call(model, tokens(2, 5)).kwargs["temperature"] == 30.0


def test_noise_only_in_training():
    model = llama(fastmax={"dropout": 0.5})
    ids = tokens(2, 5)
    exact = model(ids).logits
    assert torch.equal(model(ids).logits, exact)
    assert not torch.allclose(model.train()(ids).logits, exact)


def test_compiled_model():
    torch.compiler.reset()
    model = llama()
    ids, mask = tokens(3, 9), padding_mask("right")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = compiled(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits, model(ids, attention_mask=mask, use_cache=False).logits)


@FAMILIES
def test_gradient_checkpointing(family):
    model, ids, mask = family(), tokens(3, 9), padding_mask("right")
    expected = gradients(model, ids, mask)
    torch.testing.assert_close(gradients(checkpointed(model), ids, mask), expected)


# ---- what is saved


def test_saved_model_comes_back_with_fastmax(tmp_path):
    model = llama()
    integration.configure(model, temperature=30.0)
    model.save_pretrained(tmp_path)
    for again in range(2):  # what was loaded is saved with the choice too
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
        assert loaded.config._attn_implementation == "fastmax"
        ids = tokens(2, 5)
        assert_same_model(loaded, model, ids)
        loaded.save_pretrained(tmp_path := tmp_path / str(again))
    chosen = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert chosen.config._attn_implementation == "eager"
    chosen.save_pretrained(tmp_path / "eager")
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "eager").config._attn_implementation == "sdpa"


def test_saved_choice_is_refused_where_the_integration_is_not_imported(tmp_path, monkeypatch):
    llama().save_pretrained(tmp_path)
    monkeypatch.delitem(transformers.AttentionInterface._global_mapping, "fastmax")
    with pytest.raises(ValueError, match='attn_implementation="fastmax"` is not supported'):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def siglip():
    part = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 3}
    return transformers.SiglipConfig(
        text_config=part | {"vocab_size": VOCABULARY, "projection_size": 24},
        vision_config=part | {"image_size": 8, "patch_size": 4},
    )


def test_choice_of_one_part_is_saved(tmp_path):
    config = siglip()
    config._attn_implementation = {"": "eager", "text_config": "fastmax", "vision_config": "eager"}
    transformers.SiglipModel(config).save_pretrained(tmp_path)
    config = transformers.SiglipModel.from_pretrained(tmp_path).config
    assert config._attn_implementation == config.vision_config._attn_implementation == "eager"
    assert config.text_config._attn_implementation == "fastmax"


# ---- models with attention of their own


OWN_ATTENTION = [
    "Bloom", "XGLM", "GPTNeoXJapanese", "TrOCR", "Mvp", "MPNet", "RoFormer", "RemBert", "MegatronBert", "ConvBert",
    "Luke", "Nystromformer", "Tapas", "IBert", "BlipText", "Vilt", "ImageGPT", "Deberta", "DebertaV2", "XLNet",
    "FSMT", "ProphetNet", "Swinv2", "PvtV2", "GPTNeo", "Falcon", "Sam", "Mpt", "LED", "SpeechT5",
]  # fmt: skip
NO_MODEL = {"TrOCR": "TrOCRForCausalLM"}


def own_attention(name) -> tuple[type, object]:
    kind = getattr(transformers, NO_MODEL.get(name, f"{name}Model"))
    return kind, tiny_config(kind.config_class)


@pytest.mark.parametrize("name", OWN_ATTENTION)
def test_model_with_attention_of_its_own_is_refused(name):
    kind, config = own_attention(name)
    config._attn_implementation = "fastmax"
    with pytest.raises(ValueError, match='cannot run attn_implementation="fastmax"'), torch.device("meta"):
        kind(config)
    config._attn_implementation = "eager"
    with torch.device("meta"):
        model = kind(config)
    with pytest.raises(ValueError, match='cannot run attn_implementation="fastmax"'):
        model.set_attn_implementation("fastmax")
    assert {part._attn_implementation for part in integration.options.configurations(model)} == {"eager"}
    config._attn_implementation = "fastmax"  # by hand
    with pytest.raises(ValueError, match='cannot run attn_implementation="fastmax"'):
        integration.check(model)


def test_part_with_attention_of_its_own():
    """The pooling head of SigLIP's vision model is an nn.MultiheadAttention."""
    model = transformers.SiglipModel(siglip())
    with pytest.raises(ValueError, match=r"vision_model.head.attention \(MultiheadAttention\) computes softmax"):
        model.set_attn_implementation("fastmax")
    assert model.config._attn_implementation == model.config.text_config._attn_implementation == "sdpa"
    model.set_attn_implementation({"text_config": "fastmax"})
    assert model.config.text_config._attn_implementation == "fastmax"
    swap_attention(model)
    model.set_attn_implementation("fastmax")
    assert model.config.vision_config._attn_implementation == "fastmax"


def test_chosen_part_with_attention_of_its_own():
    kind = transformers.BlipModel
    config = tiny_config(kind.config_class)
    with torch.device("meta"):
        model = kind(config)
    before = [part._attn_implementation for part in integration.options.configurations(model)]
    with pytest.raises(ValueError, match='the blip_text_model part cannot run attn_implementation="fastmax"'):
        model.set_attn_implementation({"text_config": "fastmax"})
    assert [part._attn_implementation for part in integration.options.configurations(model)] == before


USES = {
    "add": lambda mask, x: x + mask,
    "radd": lambda mask, x: mask + x,
    "inverted": lambda mask, x: 1.0 - mask,
    "sdpa": lambda mask, x: torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask),
    "where": lambda mask, x: torch.where(mask, x, 0.0),
    "masked_fill": lambda mask, x: x.masked_fill(mask, 0.0),
    "slice": lambda mask, x: mask[:, :, :, :3],
    "to": lambda mask, x: mask.to(x.dtype),
    "shape": lambda mask, x: mask.shape,
    "equal": lambda mask, x: mask == 0,
    "truth": lambda mask, x: bool(mask),
    "length": lambda mask, x: len(mask),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_other_attention_can_use_the_mask(use):
    for pattern in (causal_mask_function, bidirectional_mask_function):
        mask = integration.fastmax_mask(2, 4, 4, mask_function=pattern)
        assert not hasattr(mask, "to") and mask is not None
        with pytest.raises(ValueError, match='cannot run attn_implementation="fastmax": a part of it computes attention'):
            use(mask, torch.randn(2, 1, 4, 4))


def test_dynamic_mask_is_refused():
    """Doge makes a bias of its own from the mask."""
    config = transformers.DogeConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, attention_dropout=0.0,
    )  # fmt: skip
    model = make(transformers.DogeForCausalLM, config)
    for mask in (None, padding_mask("right")):
        with pytest.raises(ValueError, match='doge cannot run attn_implementation="fastmax"'):
            model(tokens(3, 9), attention_mask=mask)


# ---- what is not the same function


@pytest.mark.parametrize("name", HYBRID)
def test_sliding_mask_is_refused_by_the_layer_that_uses_it(name):
    ids, mask = tokens(3, 9), padding_mask("right")
    with pytest.raises(ValueError, match="sliding_window"):
        hybrid(name, ["full_attention", "sliding_attention"])(ids, attention_mask=mask)
    model = hybrid(name, ["full_attention"] * 2)
    logits = run(model, ids, mask)
    model.set_attn_implementation("polynomial")
    torch.testing.assert_close(logits, run(model, ids, mask), rtol=1e-8, atol=1e-9)


def test_mistral_without_its_window():
    model = mistral(sliding_window=None)
    ids = tokens(2, 9)
    logits = model(ids).logits
    model.set_attn_implementation("polynomial")
    torch.testing.assert_close(logits, model(ids).logits)


def ids_and(**kwargs):
    return {"input_ids": tokens(2, 8)} | kwargs


PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]] * 2)
REFUSED = {
    "sliding window": (mistral, ids_and(), "sliding_window=None"),
    "packed sequences with a cache": (llama, ids_and(position_ids=PACKED), "packed sequences"),
    "packed sequences with a cache, absolute positions": (gpt2, ids_and(position_ids=PACKED), "packed sequences"),
    "packed sequences with a mask": (llama, ids_and(position_ids=PACKED, attention_mask=torch.ones(2, 8)), "packed sequences"),
    "packed sequences of one token": (llama, ids_and(position_ids=torch.tensor([[0, *range(7)]] * 2)), "packed sequences"),
    "custom mask": (llama, ids_and(attention_mask=torch.ones(2, 1, 8, 8).tril().bool()), "custom 4-d mask"),
    "custom mask without a row for each query": (
        llama,
        ids_and(attention_mask=torch.ones(2, 1, 1, 8).bool()),
        "custom 4-d mask",
    ),
    "mask of the new tokens only": (llama, ids_and(attention_mask=torch.ones(2, 5)), "must cover all 8 keys"),
}


@pytest.mark.parametrize("model, arguments, message", REFUSED.values(), ids=REFUSED)
def test_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model()(**arguments)


@pytest.mark.parametrize(
    "name",
    ["sliding_window", "softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices", "cache"],
)
def test_refused_by_argument(name):
    attention = llama().model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 6)
    integration.fastmax_attention_forward(attention, q, q, q, None, **{name: None})
    with pytest.raises(ValueError, match=f"does not support {name}"):
        integration.fastmax_attention_forward(attention, q, q, q, None, **{name: torch.ones(4)})


def test_attention_weights_are_refused():
    attention = llama().model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 6)
    with pytest.raises(ValueError, match="no attention weights to return"):
        integration.fastmax_attention_forward(attention, q, q, q, None, output_attentions=True)


def test_packing_with_a_mask_is_refused_in_a_compiled_model():
    torch.compiler.reset()
    compiled = torch.compile(llama(num_hidden_layers=1), fullgraph=True, backend="aot_eager")
    ids, mask = tokens(2, 8), torch.ones(2, 8)
    compiled(ids, position_ids=torch.arange(8).expand(2, -1), attention_mask=mask, use_cache=False)
    with pytest.raises(RuntimeError, match="takes packed sequences .* without an attention_mask"):
        compiled(ids, position_ids=PACKED, attention_mask=mask, use_cache=False)


DROPPING = {
    "llama": (lambda: llama(attention_dropout=0.1), "LlamaAttention.attention_dropout", "attention_dropout"),
    "gpt2": (lambda: gpt2(attn_pdrop=0.1), "GPT2Attention.attn_dropout.p", "attn_pdrop"),
    "bert": (lambda: bert(attention_probs_dropout_prob=0.1), "BertSelfAttention.dropout.p", "attention_probs_dropout_prob"),
}


@pytest.mark.parametrize("model, attribute, option", DROPPING.values(), ids=DROPPING)
def test_attention_dropout_is_refused_in_training_only(model, attribute, option):
    model, ids = model(), tokens(2, 5)
    model(ids)
    with pytest.raises(ValueError, match="no attention weights to drop, got dropout = 0.1: set ") as error:
        model.train()(ids)
    assert f"{attribute} to 0 in every layer of the live model" in str(error.value) and option in str(error.value)
    kind, *path, last = attribute.split(".")  # the advice, followed
    for layer in model.modules():
        if type(layer).__name__ == kind:
            setattr(layer.get_submodule(".".join(path)), last, 0.0)
    model(ids)


def test_the_option_dropout_takes_the_place_of_attention_dropout():
    """This is as in `swap_attention`."""
    ids = tokens(2, 5)
    model = llama(attention_dropout=0.5, fastmax={"dropout": 0.0})
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
    integration.configure(model, dropout=0.5)
    assert not torch.allclose(model.train()(ids).logits, model.eval()(ids).logits)


@FAMILIES
def test_static_cache_is_refused(family):
    with pytest.raises(ValueError, match="static cache"):
        family().generate(tokens(1, 4), max_new_tokens=4, cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("normalize", [True, "sequence"])
def test_sequence_normalisation_has_no_cached_form(normalize):
    model = llama(fastmax={"normalize": normalize})
    ids = tokens(1, 4)
    options = {"max_new_tokens": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert model.generate(ids, **options, use_cache=False).shape == (1, 7)
    with pytest.raises(ValueError, match='normalize="sequence" looks at all rows'):
        model.generate(ids, **options, use_cache=True)


def test_layer_that_does_not_say_whether_it_is_causal():
    attention = llama().model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 6)
    del attention.is_causal
    with pytest.raises(ValueError, match="neither a mask nor its is_causal"):
        integration.fastmax_attention_forward(attention, q, q, q, None)
    attention.is_causal = False
    with pytest.raises(ValueError, match="takes padding masks only"):
        integration.fastmax_attention_forward(attention, q, q, q, torch.ones(1, 3, dtype=torch.bool))


# ---- the package itself


def reimport(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("fastmax.integrations.transformers")]:
        monkeypatch.delitem(sys.modules, name)
    return importlib.import_module("fastmax.integrations.transformers")


def test_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5.4: pip install 'transformers>=5.4'"):
        reimport(monkeypatch)


def test_old_package(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.3.1")
    with pytest.raises(ImportError, match=r"needs transformers >= 5.4, found 5.3.1"):
        reimport(monkeypatch)
