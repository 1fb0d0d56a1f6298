"""Decays and gates in Hugging Face models: the option `log_decay`, and gates added by `add_decay` and `add_input_gate`."""

import copy
from unittest import mock

import pytest
import torch

from fastmax import FastmaxSelfAttention, fastmax_attention
from fastmax.testing.reference import naive_attention

transformers = pytest.importorskip("transformers")

from tiny_decoders import (  # noqa: E402
    PAD,
    VOCABULARY,
    assert_same_model,
    checkpointed,
    gpt2,
    gradients,
    llama,
    losses_of_training,
    make,
    padding_mask,
    run,
    tokens,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers import FastmaxCache, add_decay, add_input_gate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models

KV_HEADS = {llama: 2, gpt2: 3}
FAMILIES = pytest.mark.parametrize("family", KV_HEADS)


def constant(family, **options):
    return family(fastmax={"log_decay": [-0.5, -0.01, -2.0][: KV_HEADS[family]]} | options)


def gated(family, num_hidden_layers=2, **options):
    """Adds decay gates that depend on their input."""
    model = family(fastmax=options, num_hidden_layers=num_hidden_layers)
    add_decay(model, 16.0)
    return drawn(model)


def input_gated(family, num_hidden_layers=2, **options):
    """Adds input gates that depend on their input."""
    model = family(fastmax=options, num_hidden_layers=num_hidden_layers)
    add_input_gate(model)
    return drawn(model)


def with_both(family, num_hidden_layers=2, **options):
    model = gated(family, num_hidden_layers, **options)
    add_input_gate(model)
    return drawn(model)


def drawn(model):
    for name, parameter in gates(model).items():
        if name.endswith("weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model


KINDS = pytest.mark.parametrize("kind", [constant, gated, input_gated, with_both])
GATED = pytest.mark.parametrize("kind", [gated, input_gated, with_both])


def gates(model) -> dict:
    return {name: x for name, x in model.named_parameters() if "fastmax_decay" in name or "fastmax_input_gate" in name}


# ---- the function


@FAMILIES
def test_constant_decays_equal_the_definition(family):
    model, ids, mask = constant(family), tokens(3, 9), padding_mask("right")
    real = mask.bool()

    def logits_and_gradients():
        logits = run(model, ids, mask)[real]
        return logits, torch.autograd.grad(logits.square().sum(), tuple(model.parameters()))

    seen = []

    def reference(q, k, v, *, attention_mask, log_decay, **options):
        seen.append(log_decay)
        options.pop("dropout", None)
        rows = torch.tensor(model.config.fastmax["log_decay"], dtype=torch.float64)[:, None]
        log_decay = torch.where(attention_mask[:, None], rows, 0)  # from the option, not as handed over
        return naive_attention(q, k, v, attention_mask=attention_mask, log_decay=log_decay, **options)

    ours = logits_and_gradients()
    with mock.patch.object(integration.forward, "fastmax_attention", side_effect=reference):
        expected = logits_and_gradients()
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)
    assert len(seen) == 2
    model.config.fastmax = {}
    assert (run(model, ids, mask)[real] - ours[0]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"exact_window": 3}], ids=["p = 2", "exact window"])
@GATED
def test_gates_by_hand(kind, options):
    model = kind(llama, **options)
    attention = model.model.layers[1].self_attn
    seen = {}
    attention.register_forward_hook(
        lambda module, args, kwargs, output: seen.update(kwargs, output=output[0]), with_kwargs=True
    )
    ids, mask = tokens(3, 9), padding_mask("right")
    run(model, ids, mask)
    x = seen["hidden_states"]
    q, k, v = (
        projection(x).unflatten(-1, (-1, 6)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = apply_rotary_pos_emb(q, k, *seen["position_embeddings"])
    given = {}
    if kind is not input_gated:
        gate = attention.fastmax_decay
        log_decay = torch.nn.functional.logsigmoid(x @ gate.weight.T + gate.bias).mT
        given["log_decay"] = torch.where(mask.bool()[:, None], log_decay, 0)
    if kind is not gated:
        gate = attention.fastmax_input_gate
        given["log_input_gate"] = 8 * torch.tanh((x @ gate.weight.T + gate.bias) / 8).mT
    options = options | {"causal": True, "temperature": 6**0.5, "attention_mask": mask.bool()}
    o = fastmax_attention(q, k, v, **given, **options)
    torch.testing.assert_close(seen["output"], attention.o_proj(o.transpose(1, 2).flatten(2)))
    assert not torch.allclose(o, fastmax_attention(q, k, v, **options))


@FAMILIES
@KINDS
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batch_equals_sequences_alone(family, kind, side):
    model, ids, mask = kind(family), tokens(3, 9), padding_mask(side)
    together = run(model, ids, mask)
    for row, keep in enumerate(mask.bool()):
        torch.testing.assert_close(together[row, keep][None], run(model, ids[row, keep][None], None))


# ---- generation


@FAMILIES
@KINDS
@pytest.mark.parametrize("options", [{}, {"exact_window": 3}], ids=["p = 2", "exact window"])
@pytest.mark.parametrize("beams", [1, 2], ids=["greedy", "beams"])
def test_generate_equals_no_cache(family, kind, options, beams):
    model, ids, mask = kind(family, **options), tokens(3, 9), padding_mask("left")
    how = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "num_beams": beams}
    cached = model.generate(ids, past_key_values=FastmaxCache(model.config), **how)
    assert torch.equal(cached, model.generate(ids, use_cache=False, **how))


@KINDS
def test_padding_between_turns_decays_nothing(kind):
    """In one turn some rows are shorter than others, so they are padded in the middle of the sequence."""
    model, ids = kind(llama), tokens(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 3:6] = 0
    cache = FastmaxCache(model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts = [
        model(ids[:, i:j], attention_mask=mask[:, :j], position_ids=positions[:, i:j], past_key_values=cache).logits
        for i, j in ((0, 4), (4, 5), (5, 9))
    ]
    keep = mask[1].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[1, keep][None], run(model, ids[1, keep][None], None))


def test_keys_and_values_with_decays():
    """transformers' cache is used if the decays of old keys are known, and refused if they are not."""
    ids = tokens(2, 9)
    model, cache = constant(llama), transformers.DynamicCache()
    parts = [model(part, past_key_values=cache).logits for part in ids.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)
    for kind in (gated, input_gated):
        model, cache = kind(llama), transformers.DynamicCache()
        model(ids[:, :4], past_key_values=cache)
        with pytest.raises(
            ValueError, match=r"those of 4 keys in the cache are not known: (past_key_values|cache)=FastmaxCache"
        ):
            model(ids[:, 4:], past_key_values=cache)


# ---- the gates as a part of the model


def test_start():
    model = llama()
    assert add_decay(model, 100.0) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    layer = FastmaxSelfAttention(24, 4, num_kv_heads=2, longest_half_life=100.0, dtype=torch.float64)
    for name, x in gates(model).items():
        assert x.dtype == torch.float64 and x.requires_grad
        torch.testing.assert_close(x, layer.decay_proj.bias if name.endswith("bias") else torch.zeros(2, 24).double())


def test_start_that_leaves_a_model_as_it_is():
    model, ids = llama(), tokens(2, 9)
    before = model(ids).logits
    assert add_input_gate(model) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(gates(model)) == 4 and not any(x.any() for x in gates(model).values())
    torch.testing.assert_close(model(ids).logits, before)
    model = llama()
    before = model(ids).logits
    add_decay(model, 1e6, shortest_half_life=1e6)
    after = model(ids).logits
    assert not torch.equal(before, after)
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)


@FAMILIES
@GATED
def test_saved_and_loaded(kind, family, tmp_path):
    model, ids = kind(family), tokens(2, 9)
    model.save_pretrained(tmp_path)
    for load in (type(model), transformers.AutoModelForCausalLM):
        loaded, info = load.from_pretrained(tmp_path, dtype=torch.float64, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert gates(loaded).keys() == gates(model).keys()
        assert_same_model(loaded, model, ids)
    copied = copy.deepcopy(loaded)
    assert_same_model(copied, model, ids)
    next(iter(gates(copied).values())).data.fill_(1.0)
    assert_same_model(loaded, model, ids)
    assert (copied(ids).logits - model(ids).logits).abs().max() > 1e-3


def test_configuration_alone():
    """A new model made from the configuration equals one to which gates are added."""
    model = llama()
    add_decay(model, 50.0, shortest_half_life=7.0, layers=[1])
    add_input_gate(model, layers=[1])
    config = transformers.LlamaConfig.from_dict(model.config.to_dict())
    config._attn_implementation = "fastmax"
    fresh = make(transformers.LlamaForCausalLM, config)
    assert list(gates(fresh)) == list(gates(model)) and "layers.1." in next(iter(gates(fresh)))
    torch.testing.assert_close(gates(fresh), gates(model))


def test_checkpoint_without_gates(tmp_path):
    """Weights that the file lacks are initialised, and are not whatever the memory held."""
    model = llama()
    model.save_pretrained(tmp_path)
    add_decay(model, 50.0)
    add_input_gate(model)
    with mock.patch.object(torch, "empty_like", lambda x, **options: torch.full_like(x, 7.0, **options)):
        loaded, info = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path, config=model.config, dtype=torch.float64, output_loading_info=True
        )
    assert len(info["missing_keys"]) == 8
    torch.testing.assert_close(gates(loaded), gates(model))


def test_trained_gates_are_not_initialised_again(tmp_path):
    """transformers keeps all trained parts when a model gets a new head or becomes a part of another; gates must be kept
    too."""
    model = with_both(llama)
    model.save_pretrained(tmp_path)
    fresh = make(transformers.LlamaForCausalLM, copy.deepcopy(model.config))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    for trained in (model, fresh, loaded):
        for x in gates(trained).values():
            x.data.fill_(3.0)
        trained.init_weights()
        assert all((x == 3.0).all() for x in gates(trained).values())


@FAMILIES
def test_trained(family):
    model, ids = family().float().train(), tokens(2, 16)
    add_decay(model, 16.0)
    add_input_gate(model)
    before = {name: x.detach().clone() for name, x in gates(model).items()}
    losses = losses_of_training(model, ids, 4)
    assert losses[-1] < losses[0] - 0.3
    assert all((x != before[name]).all() for name, x in gates(model).items())


def test_gradient_checkpointing():
    model, ids, mask = with_both(llama), tokens(3, 9), padding_mask("right")
    expected = gradients(model, ids, mask)
    torch.testing.assert_close(gradients(checkpointed(model), ids, mask), expected)


def test_compiled():
    torch.compiler.reset()
    model, ids, mask = with_both(llama, num_hidden_layers=1), tokens(3, 9), padding_mask("right")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def logits_and_gradients(model):
        logits = model(ids, attention_mask=mask, use_cache=False).logits
        return logits, torch.autograd.grad(logits.square().mean(), tuple(parameters))

    parameters = tuple(model.parameters())
    torch.testing.assert_close(logits_and_gradients(compiled), logits_and_gradients(model))


def test_autocast():
    model, ids = with_both(llama).float(), tokens(2, 9)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    torch.testing.assert_close(logits.float(), model(ids).logits, rtol=0.1, atol=0.2)


@pytest.mark.cuda
@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(kind, dtype):
    """The reference is a model on the CPU in float64. A whole sequence is compared, and one in parts from states."""
    model, ids = kind(llama, exact_window=4), tokens(2, 40)
    expected = model(ids).logits
    model, ids = model.to("cuda", dtype), ids.cuda()
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([32, 1, 1, 6], dim=1)]
    loss = model(ids, labels=ids).loss
    loss.backward()
    assert all(x.grad.isfinite().all() and x.grad.any() for x in gates(model).values())
    error = (torch.cat(parts, dim=1).cpu().double() - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == torch.float32 else 0.1)


# ---- models without decays


def encoder(kind="bert"):
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=3,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return make(transformers.BertModel, config)


def bart(**options):
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=3, max_position_embeddings=64, init_std=0.3, dropout=0.0,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None, **options,
    )  # fmt: skip
    return make(transformers.BartForConditionalGeneration, config)


def test_encoder_decoder_model(tmp_path):
    model = bart()
    assert add_decay(model, 8.0) == [f"model.decoder.layers.{i}.self_attn" for i in range(2)]
    model.save_pretrained(tmp_path)
    loaded = transformers.BartForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    source, target = tokens(2, 6), tokens(2, 5)
    torch.testing.assert_close(loaded(source, decoder_input_ids=target).logits, model(source, decoder_input_ids=target).logits)
    model = bart(fastmax={"log_decay": [-0.1, -0.1, -0.1]})
    with pytest.raises(ValueError, match="log_decay needs a causal layer, and BartAttention sees all keys"):
        model(source, decoder_input_ids=target)


def softmax_model():
    model = llama()
    model.set_attn_implementation("sdpa")
    return model


def twice():
    model = llama()
    add_decay(model, layers=[0])
    return model


NOT_ADDED = {
    "encoder": (encoder, {}, "BertModel has no causal layer that runs fastmax"),
    "softmax": (softmax_model, {}, "no causal layer that runs fastmax"),
    "softmax layer": (softmax_model, {"layers": [0]}, r"model.layers.0.self_attn \(LlamaAttention\) runs softmax attention"),
    "encoder layer": (
        encoder,
        {"layers": [0]},
        "for causal self-attention with a layer_idx|must be indices of attention layers",
    ),
    "no such layer": (llama, {"layers": [0, 5]}, r"layers must be indices of attention layers .* got \[5\]"),
    "no layer": (llama, {"layers": []}, "layers must be indices"),
    "twice": (twice, {"layers": [1]}, "model.layers.0.self_attn of LlamaForCausalLM has a decay gate already"),
    "constant": (lambda: constant(llama), {}, "has constant decays, the option log_decay"),
    "zero": (llama, {"longest_half_life": 0.0}, "longest_half_life must be"),
    "order": (llama, {"longest_half_life": 2.0}, "shortest_half_life must be at most longest_half_life, got 4.0 and 2.0"),
}


@pytest.mark.parametrize("make_model, arguments, message", NOT_ADDED.values(), ids=NOT_ADDED)
def test_not_added(make_model, arguments, message):
    model = make_model()
    before = list(gates(model))
    with pytest.raises(ValueError, match=message):
        add_decay(model, **arguments)
    assert list(gates(model)) == before


@pytest.mark.parametrize("name", ["encoder", "softmax", "softmax layer", "encoder layer", "no such layer", "no layer"])
def test_input_gates_not_added(name):
    make_model, arguments, message = NOT_ADDED[name]
    model = make_model()
    with pytest.raises(ValueError, match=message):
        add_input_gate(model, **arguments)
    assert not gates(model)


def test_input_gates_not_added_twice():
    model = constant(llama)
    add_input_gate(model, layers=[0])
    with pytest.raises(ValueError, match="model.layers.0.self_attn of LlamaForCausalLM has an input gate already"):
        add_input_gate(model, layers=[1])
    assert len(gates(model)) == 2 and "log_decay" in model.config.fastmax  # beside constant decays


@pytest.mark.parametrize("layers", [5, "01", {"0": 1}, [0, "1"], [True], [1.0], torch.tensor(1)], ids=repr)
def test_layers_of_another_kind(layers):
    model = llama()
    with pytest.raises(TypeError, match="layers must be indices of attention layers of LlamaForCausalLM, or None, got "):
        add_decay(model, layers=layers)
    assert not list(gates(model))


@pytest.mark.parametrize("function", [add_decay, add_input_gate, integration.configure, integration.check])
def test_what_is_no_model(function):
    with pytest.raises(TypeError, match="model must be .*got 'llama'"):
        function("llama")


def test_what_has_no_configuration_is_not_configured():
    with pytest.raises(ValueError, match="model must hold a transformers model with its configuration, got a Linear"):
        integration.configure(torch.nn.Linear(2, 2), p=1)


def test_softmax_is_refused_where_there_are_gates(tmp_path):
    model, ids = gated(llama), tokens(1, 4)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"a decay gate is for layers that run fastmax, and model.layers.0.self_attn"):
        model.set_attn_implementation("sdpa")
    assert model.config._attn_implementation == "fastmax"
    with pytest.raises(ValueError, match=r"layers.0.self_attn \(LlamaAttention\) runs softmax attention \('sdpa'\)"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    model.config._attn_implementation = "sdpa"  # by hand
    with pytest.raises(ValueError, match="a decay gate is for layers that run fastmax"):
        model(ids)
    with pytest.raises(ValueError, match="a decay gate is for layers that run fastmax"):
        integration.check(model)


def test_used_bidirectionally():
    for kind, name in ((constant, "log_decay"), (gated, "log_decay"), (input_gated, "log_input_gate")):
        with pytest.raises(ValueError, match=f"{name} needs a causal layer, and LlamaAttention sees all keys in this call"):
            kind(llama)(tokens(1, 4), is_causal=False)


def test_gates_and_configuration_that_disagree():
    for kind, place, title in ((gated, "fastmax_decay", "a decay gate"), (input_gated, "fastmax_input_gate", "an input gate")):
        model = kind(llama)
        delattr(model.config, place)
        with pytest.raises(ValueError, match=rf"does not list layer 0 \(LlamaAttention\), which has {title}"):
            model(tokens(1, 4))
    model = llama()
    model.config.fastmax_decay = {"layers": [1]}
    with pytest.raises(ValueError, match=r"lists layer 1 \(LlamaAttention\), which has no decay gate"):
        model(tokens(1, 4))
    model = gated(llama)
    integration.configure(model, p=2, temperature=3.0)  # options come and go, gates stay
    model(tokens(1, 4))
    with pytest.raises(ValueError, match="has constant decays"):
        integration.configure(model, log_decay=[-1.0, -1.0])
    with pytest.raises(ValueError, match=r"model.layers.1.self_attn \(LlamaAttention\) runs softmax attention"):
        integration.configure(model, layers=[0])
    assert model.config.fastmax == {"p": 2, "temperature": 3.0}
    model.config.fastmax = {"log_decay": [-1.0, -1.0]}
    with pytest.raises(ValueError, match="has constant decays"):
        model(tokens(1, 4))


@pytest.mark.parametrize("kind, name", [(gated, "log_decay"), (input_gated, "log_input_gate")])
def test_layer_that_keeps_the_argument_for_itself(kind, name):
    model, interface = kind(llama), integration.fastmax_attention_forward

    def without(*args, **kwargs):
        del kwargs[name]
        return interface(*args, **kwargs)

    transformers.AttentionInterface.register("fastmax", without)
    try:
        with pytest.raises(ValueError, match=f"LlamaAttention keeps the argument {name}"):
            model(tokens(1, 4))
    finally:
        transformers.AttentionInterface.register("fastmax", interface)


@pytest.mark.parametrize("name", ["log_decay", "log_input_gate"])
def test_layers_of_softmax_refuse_what_they_would_ignore(name):
    model = llama(fastmax={"layers": [1]})
    with pytest.raises(ValueError, match=f"does not support {name} .* in LlamaAttention, a layer of softmax attention"):
        model(tokens(1, 4), **{name: torch.zeros(1, 2, 4, dtype=torch.float64)})


WRONG = {
    "a number": (-1.0, TypeError, "log_decay must be a list of numbers <= 0.* got -1.0"),
    "a tensor": (torch.zeros(2), TypeError, "log_decay must be a list"),
    "text": (["-1"], TypeError, "log_decay must be a list"),
    "growing": ([-1.0, 0.1], ValueError, r"got \[-1.0, 0.1\]"),
    "nan": ([float("nan"), 0.0], ValueError, "log_decay must be a list of numbers <= 0"),
}


@pytest.mark.parametrize("value, error, message", WRONG.values(), ids=WRONG)
def test_wrong_option(value, error, message):
    with pytest.raises(error, match=message):
        integration.configure(transformers.LlamaConfig(), log_decay=value)


def test_one_number_for_each_key_value_head():
    model = llama(fastmax={"log_decay": [-1.0] * 4})
    with pytest.raises(ValueError, match="for each of the 2 key/value heads of LlamaAttention, got 4"):
        model(tokens(1, 4))
