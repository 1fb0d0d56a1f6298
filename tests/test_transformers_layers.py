"""Models in which the named layers run fastmax and the others softmax: masks, caches, and saved configurations."""

import copy
from types import SimpleNamespace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_decoders import (  # noqa: E402
    HYBRID,
    checkpointed,
    gpt2,
    gradients,
    hybrid,
    llama,
    mistral,
    padding_mask,
    run,
    tokens,
)
from transformers import DynamicCache  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers import FastmaxCache, add_decay  # noqa: E402
from fastmax.integrations.transformers.cache import FastmaxLayer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models

SLIDING, FULL = "sliding_attention", "full_attention"


def gemma(layers="global", **options):
    return hybrid("Gemma3", [SLIDING, FULL, SLIDING], fastmax={"layers": layers} | options)


MODELS = {
    "llama, last": lambda **options: llama(fastmax={"layers": [1]} | options),
    "gpt2, first": lambda **options: gpt2(fastmax={"layers": [0]} | options),
    "mistral": lambda **options: mistral(sliding_window=None, num_hidden_layers=2, fastmax={"layers": [0]} | options),
    "gemma 3, global": gemma,
}
ALL = pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)


def generate(model, ids, mask, cache=None, **options):
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return model.generate(ids, **{"attention_mask": mask, "max_new_tokens": 6, "do_sample": False} | options, **how)


# ---- the function


def compare(model, side):
    ids, mask = tokens(3, 9), padding_mask(side)
    real = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()

    def logits_and_gradients():
        logits = run(model, ids, mask, use_cache=False)[real]
        return logits, torch.autograd.grad(logits.square().mean(), tuple(model.parameters()), allow_unused=True)

    mixed = logits_and_gradients()
    model.set_attn_implementation("polynomial")
    torch.testing.assert_close(mixed, logits_and_gradients(), rtol=1e-7, atol=1e-8)
    for implementation in ("eager", "fastmax"):  # neither is what the other layers make of it
        model.set_attn_implementation(implementation)
        model.config.fastmax = {"layers": [*range(model.config.num_hidden_layers)]} if implementation == "fastmax" else {}
        if implementation == "eager" or SLIDING not in (getattr(model.config, "layer_types", None) or ()):
            assert (run(model, ids, mask, use_cache=False)[real] - mixed[0])[:9].abs().max() > 1e-3


@ALL
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_equals_the_naive_model(make_model, side):
    compare(make_model(), side)


@pytest.mark.parametrize("name", sorted(HYBRID.keys() - {"Gemma3"}))
def test_global_layers(name):
    model = hybrid(name, [FULL, SLIDING], fastmax={"layers": "global"})
    compare(model, "right")


@ALL
def test_shown(make_model):
    model = make_model()
    named = model.config.fastmax["layers"]
    named = [1] if named == "global" else named
    shown = integration.check(model)
    assert len(shown) == model.config.num_hidden_layers
    assert [index for index, what in enumerate(shown.values()) if what == "fastmax"] == named
    assert set(shown.values()) == {"fastmax", "sdpa"}
    assert all(name.endswith(("attn", "attention")) for name in shown)


def test_shown_where_nothing_is_named():
    assert set(integration.check(llama()).values()) == {"fastmax"}
    model = llama()
    model.set_attn_implementation("eager")
    assert set(integration.check(model).values()) == {"eager"}


def test_saved_with_the_configuration(tmp_path):
    model, ids = gemma(), tokens(2, 9)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.fastmax == {"layers": "global"} and integration.check(loaded) == integration.check(model)
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-3, atol=1e-3)  # Gemma rounds its buffers


def test_configure():
    model, ids = llama(), tokens(2, 9)
    before = model(ids).logits
    integration.configure(model, layers=[1])
    assert not torch.allclose(model(ids).logits, before)
    integration.configure(model)
    assert torch.equal(model(ids).logits, before)


def test_compiled():
    torch.compiler.reset()
    model, ids, mask = gemma(), tokens(3, 9), padding_mask("right")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(compiled(ids, attention_mask=mask, use_cache=False).logits, expected)


def test_gradient_checkpointing():
    model, ids, mask = gemma(), tokens(3, 9), padding_mask("right")
    expected = gradients(model, ids, mask)
    torch.testing.assert_close(gradients(checkpointed(model), ids, mask), expected)


def test_decays_in_the_layers_that_run_fastmax():
    model, ids = gemma(), tokens(3, 9)
    assert add_decay(model, 8.0) == ["model.layers.1.self_attn"]
    mask = padding_mask("left")
    assert torch.equal(generate(model, ids, mask, FastmaxCache(model.config)), generate(model, ids, mask))
    with pytest.raises(ValueError, match=r"model.layers.0.self_attn \(Gemma3Attention\) runs softmax attention \('sdpa'\)"):
        add_decay(gemma(), layers=[0, 1])
    model = llama(fastmax={"layers": [1]})
    add_decay(model)
    model.config.fastmax = {"layers": [0]}  # the gate's layer is one of softmax now
    for use in (lambda: model(ids), lambda: integration.check(model)):
        with pytest.raises(ValueError, match="a decay gate is for layers that run fastmax"):
            use()


# ---- caches


@ALL
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("beams", [1, 2], ids=["greedy", "beams"])
def test_generate_equals_no_cache(make_model, side, beams):
    model, ids = make_model(), tokens(3, 9)
    mask = torch.ones_like(ids) if side is None else padding_mask(side)
    cache = FastmaxCache(model.config)
    expected = generate(model, ids, mask, num_beams=beams)
    assert torch.equal(generate(model, ids, mask, cache, num_beams=beams), expected)
    shown = integration.check(model).values()
    assert [isinstance(layer, FastmaxLayer) for layer in cache.layers] == [what == "fastmax" for what in shown]
    assert [layer.is_sliding for layer in cache.layers] == DynamicCache(config=model.config).is_sliding
    assert cache.get_seq_length() == 14


@ALL
def test_logits_in_parts(make_model):
    model, ids, mask = make_model(exact_window=2), tokens(3, 9), padding_mask("left")
    expected, cache, parts = run(model, ids, mask, use_cache=False), FastmaxCache(model.config), []
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    for first, last in ((0, 1), (1, 6), (6, 8), (8, 9)):
        given = {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        parts.append(model(ids[:, first:last], past_key_values=cache, **given).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], expected[mask.bool()])


def test_default_cache_of_transformers():
    model, ids, mask = gemma(), tokens(3, 9), padding_mask("left")
    cached = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert torch.equal(cached, generate(model, ids, mask))


@pytest.mark.parametrize("make_model", [MODELS["llama, last"], gemma], ids=["llama", "gemma 3"])
def test_turns(make_model):
    model = make_model()
    text, mask, cache = tokens(3, 9), padding_mask("left"), FastmaxCache(model.config)
    for _ in range(2):
        answer = generate(model, text, mask, cache)
        assert torch.equal(answer, generate(model, text, mask))
        text = torch.cat((answer, tokens(3, 4)), dim=1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    twice = [generate(model, text, mask, copy.deepcopy(cache)) for _ in range(2)]
    assert torch.equal(*twice) and torch.equal(twice[0], generate(model, text, mask))


@pytest.mark.parametrize("make_model", [MODELS["llama, last"], gemma], ids=["llama", "gemma 3"])
def test_prefill_in_chunks(make_model):
    model, ids, mask = make_model(), tokens(3, 9), padding_mask("left")
    chunked = generate(model, ids, mask, FastmaxCache(model.config), prefill_chunk_size=4)
    assert torch.equal(chunked, generate(model, ids, mask))


def test_size():
    """Keys and values of a window and states do not grow; those of a softmax layer over all keys do."""
    for model, grows in ((gemma(), False), (llama(fastmax={"layers": [1]}), True)):
        sizes = set()
        for new in (8, 20):
            cache = FastmaxCache(model.config)
            generate(model, tokens(1, 6), torch.ones(1, 6), cache, max_new_tokens=new)
            sizes.add(cache.nbytes)
        assert (len(sizes) > 1) == grows


def test_size_with_linear_layers():
    """Linear layers have states and no keys and values."""
    cache = FastmaxCache(gemma().config)
    cache.layers[0] = SimpleNamespace(conv_states={0: None, 1: torch.ones(2, 3)}, recurrent_states={0: torch.ones(4)})
    assert cache.nbytes == 40


def test_tokens_cannot_be_taken_back():
    model, ids = llama(fastmax={"layers": [1]}), tokens(1, 6)
    cache = FastmaxCache(model.config)
    generate(model, ids, torch.ones(1, 6), cache)
    with pytest.raises(ValueError, match="FastmaxCache cannot forget tokens"):
        cache.crop(-1)
    assert {layer.get_seq_length() for layer in cache.layers} == {11}  # none of them, the softmax layer neither
    with pytest.raises(ValueError, match="FastmaxCache cannot forget tokens.*DynamicCache"):
        generate(model, ids, torch.ones(1, 6), FastmaxCache(model.config), prompt_lookup_num_tokens=2)


def test_cache_for_other_layers():
    model, ids = llama(fastmax={"layers": [1]}), tokens(1, 4)
    cache = FastmaxCache(model.config)
    integration.configure(model, layers=[0])
    with pytest.raises(ValueError, match="FastmaxCache holds no keys and values, and they were used"):
        model(ids, past_key_values=cache)


def test_sliding_layers_are_not_named():
    with pytest.raises(ValueError, match="full_attention in all layers that run fastmax, got sliding_attention too in gemma3"):
        FastmaxCache(gemma([0, 1]).config)
    with pytest.raises(ValueError, match="does not support sliding_window"):
        gemma([0, 1])(tokens(1, 4))
    with pytest.raises(ValueError, match="sliding_window"):
        mistral(num_hidden_layers=2, fastmax={"layers": [0]})(tokens(1, 9))


# ---- what is not a layer


NOT_LAYERS = {
    "a number": (1, TypeError, r'layers must be a list of different indices >= 0, or "global", got 1'),
    "text": ("sliding", TypeError, "got 'sliding'"),
    "not an index": ([0.0], TypeError, r"got \[0.0\]"),
    "a truth": ([True], TypeError, r"got \[True\]"),
    "none": ([], ValueError, r"got \[\]"),
    "negative": ([-1], ValueError, r"got \[-1\]"),
    "twice": ([1, 1], ValueError, r"got \[1, 1\]"),
}


@pytest.mark.parametrize("layers, error, message", NOT_LAYERS.values(), ids=NOT_LAYERS)
def test_wrong_option(layers, error, message):
    with pytest.raises(error, match=message):
        integration.configure(transformers.LlamaConfig(), layers=layers)
    with pytest.raises(error, match=message):
        llama(fastmax={"layers": layers})


def test_layers_that_the_model_has_not():
    with pytest.raises(ValueError, match=r"layers must be indices of the 2 layers of llama, got \[0, 2\]"):
        llama(fastmax={"layers": [0, 2]})
    with pytest.raises(ValueError, match=r'layers="global" needs full_attention in config.layer_types, got \[\] in llama'):
        llama(fastmax={"layers": "global"})
    with pytest.raises(ValueError, match=r"needs full_attention in config.layer_types, got \['sliding_attention'\] in gemma3"):
        hybrid("Gemma3", [SLIDING] * 2, fastmax={"layers": "global"})
    model = llama()
    model.config.fastmax = {"layers": [2]}  # since it was made
    with pytest.raises(ValueError, match="layers must be indices of the 2 layers"):
        model(tokens(1, 4))


NOT_CONFIGURED = {
    "one too many": ({"layers": [0, 7]}, r"layers must be indices of the 2 layers of llama, got \[0, 7\]"),
    "no global ones": ({"layers": "global"}, r'layers="global" needs full_attention in config.layer_types, got \[\] in llama'),
    "p": ({"p": 3}, "p must be 1 or 2, got 3"),
    "temperature": ({"temperature": 0.0}, "temperature must be > 0, got 0.0"),
    "coefficient": ({"a1": "1"}, "a1 must be a real number, got '1'"),
    "normalize": ({"normalize": "tokens"}, 'normalize must be False, True, "sequence" or "token", got \'tokens\''),
    "lim": ({"lim": 2.0}, "lim has no effect without normalize"),
    "dropout": ({"dropout": -0.1}, "dropout must be >= 0, got -0.1"),
    "rpe matrix": ({"rpe_matrix": torch.ones(3, 6)}, 'rpe_matrix must be "sinusoidal" or None here, got a tensor'),
    "window": ({"exact_window": -1}, "exact_window must be at least 0, got -1"),
    "algorithm": ({"algorithm": "fast"}, "algorithm must be one of 'auto', 'quadratic', 'linear', got 'fast'"),
    "gradient": ({"use_custom_gradient": 1}, "use_custom_gradient must be a bool, got 1"),
}


@pytest.mark.parametrize("options, message", NOT_CONFIGURED.values(), ids=NOT_CONFIGURED)
@pytest.mark.parametrize("made", [False, True], ids=["configuration", "model"])
@pytest.mark.parametrize("implementation", ["sdpa", "fastmax"])
def test_configure_refuses_at_once(options, message, made, implementation):
    model = llama()
    model.set_attn_implementation(implementation)
    before = model.config.to_dict()
    with pytest.raises((TypeError, ValueError), match=message):
        integration.configure(model if made else model.config, **options)
    assert model.config.to_dict() == before


def test_model_is_not_made_with_a_wrong_option():
    with pytest.raises(ValueError, match="p must be 1 or 2, got 3"):
        llama(fastmax={"p": 3})


def test_configure_one_part_of_a_composite_model():
    part = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 3}
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**part, vocab_size=40, num_hidden_layers=3),
        vision_config=transformers.CLIPVisionConfig(**part, image_size=8, patch_size=4, num_hidden_layers=2),
    )
    integration.configure(config, layers=[2])
    model = transformers.LlavaModel(config)
    integration.configure(model, layers=[2])
    model.set_attn_implementation({"text_config": "fastmax"})
    integration.configure(model, layers=[1, 2])
    with pytest.raises(ValueError, match=r"layers must be indices of the 3 layers of llama, got \[3\]"):
        integration.configure(model, layers=[3])
    with pytest.raises(ValueError, match=r"got \[1, 2\] in llava, which has no num_hidden_layers of its own: choose the part"):
        model.set_attn_implementation("fastmax")
    assert model.config.fastmax == model.config.text_config.fastmax == {"layers": [1, 2]}


def test_layer_without_an_index():
    model = llama(fastmax={"layers": [0]})
    del model.model.layers[0].self_attn.layer_idx
    with pytest.raises(ValueError, match="LlamaAttention has no layer_idx, by which the option layers"):
        integration.check(model)


def test_softmax_layers_that_sdpa_cannot_run():
    with pytest.raises(ValueError, match='Gemma2.* has no attn_implementation="sdpa" in transformers|softcap'):  # the 2nd: 5.4
        hybrid("Gemma2", [FULL, SLIDING], fastmax={"layers": "global"}, attn_logit_softcapping=50.0)(tokens(1, 4))
    layer = gemma().model.layers[0].self_attn
    q = torch.randn(1, 4, 3, 6)
    for name in ("softcap", "s_aux", "cu_seq_lens_q", "output_attentions", "log_input_gate"):
        with pytest.raises(ValueError, match=name):
            integration.fastmax_attention_forward(layer, q, q, q, None, **{name: torch.ones(1)})
