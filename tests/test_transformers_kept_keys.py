"""The option `kept_keys` of Hugging Face models: against the definition, from states, trained, converted and refused."""

from itertools import pairwise
from unittest import mock

import pytest
import torch

from fastmax import convert
from fastmax.nn import kept_keys
from fastmax.prepare import sharded_dispatch

transformers = pytest.importorskip("transformers")

from test_transformers_gates import drawn  # noqa: E402
from tiny_decoders import (  # noqa: E402
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
from torch import Tensor  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers import FastmaxCache, add_decay, add_input_gate  # noqa: E402
from fastmax.integrations.transformers import cache as cache_module  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models
BLOCK, WINDOW, KEPT = 3, 2, 2
LONG = 17
BERT = {"vocab_size": 40, "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
BERT |= {"attention_probs_dropout_prob": 0.0}
FAMILIES = pytest.mark.parametrize("family", [llama, gpt2])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(kept_keys, "_BLOCK", BLOCK)


def keeping(family, decay="gates", **options):
    constant = {"log_decay": [-0.1, -0.5, -0.01][: 2 if family is llama else 3]} if decay == "constant" else {}
    model = family(fastmax={"exact_window": WINDOW, "kept_keys": KEPT} | constant | options)
    if decay == "gates":
        add_decay(model, 16.0)
    add_input_gate(model)
    return drawn(model)


def of_sequence(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, log_decay: Tensor | None, options: dict) -> Tensor:
    """Computes one sequence of n tokens, (heads, n, ...), by the definition in `fastmax.nn.kept_keys`."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    gate = gate.repeat_interleave(q.shape[0] // gate.shape[0], dim=0)
    sums = torch.zeros_like(gate)
    if log_decay is not None:
        sums = log_decay.repeat_interleave(q.shape[0] // log_decay.shape[0], dim=0).cumsum(-1)
    s = q @ k.mT / options["temperature"]
    rank, n = gate - sums, q.shape[1]
    weights = torch.zeros_like(s)
    for head in range(q.shape[0]):
        for i in range(n):
            first = i // BLOCK * BLOCK - WINDOW  # of the keys that are not chosen
            by_rank = sorted(range(max(0, first)), key=lambda j: (rank[head, j].item(), j), reverse=True)
            for j in range(i + 1):
                x = s[head, i, j]
                weight = 1 + x + x * x / 2
                if j >= first or j in by_rank[:KEPT]:
                    weight = weight + x.exp()
                weight = x.exp() if j > i - WINDOW else gate[head, j].exp() * weight
                weights[head, i, j] = (sums[head, i] - sums[head, j]).exp() * weight
    return weights / weights.sum(-1, keepdim=True) @ v


def by_definition(rows, padding, cu_seqlens, kept, options):
    """Takes the place of `forward._with_kept_keys`."""
    assert kept == KEPT
    o = torch.zeros_like(rows.q)
    for b in range(rows.q.shape[0]):
        places = torch.arange(rows.q.shape[2]) if padding is None else padding[b].nonzero().flatten()
        bounds = [0, len(places)] if cu_seqlens is None else cu_seqlens.tolist()
        for start, stop in pairwise(bounds):
            own = places[start:stop]
            q, k, v, gate, log_decay = (None if x is None else x[b][:, own] for x in rows)
            o[b, :, own] = of_sequence(q, k, v, gate, log_decay, options)
    return o


def defined():
    return mock.patch.object(integration.forward, "_with_kept_keys", by_definition)


@FAMILIES
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("decay", ["gates", "constant", ""])
def test_equals_the_definition(family, side, decay):
    model, ids = keeping(family, decay), tokens(3, LONG)
    mask = padding_mask(side, (LONG, 11, 1))
    real = torch.ones(3, LONG, dtype=torch.bool) if mask is None else mask.bool()

    def logits_and_gradients():
        logits = run(model, ids, mask)[real]
        return logits, torch.autograd.grad(logits.square().sum(), tuple(model.parameters()))

    ours = logits_and_gradients()
    with defined():
        expected = logits_and_gradients()
    torch.testing.assert_close(ours, expected, rtol=1e-8, atol=1e-9)
    model.config.fastmax = {"exact_window": WINDOW}
    assert (run(model, ids, mask)[real] - ours[0]).abs().max() > 1e-3


def test_packed():
    model, ids = keeping(llama), tokens(2, LONG)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in ((6, 11), (1, 9, 7))])
    packed = model(ids, position_ids=positions, use_cache=False).logits
    with defined():
        torch.testing.assert_close(packed, model(ids, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(packed[:1, 6:], model(ids[:1, 6:], use_cache=False).logits)


# ---- generation


@FAMILIES
@pytest.mark.parametrize("decay", ["gates", "constant", ""])
@pytest.mark.parametrize("sizes", [[LONG], [1] * LONG, [4, 1, 1, LONG - 6]], ids=str)
def test_parts_equal_the_whole(family, sizes, decay):
    model, ids = keeping(family, decay), tokens(2, LONG)
    expected = model(ids, use_cache=False).logits
    for inference in (False, True):
        with torch.inference_mode(inference):
            cache = FastmaxCache(model.config)
            parts = [model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)]
            torch.testing.assert_close(torch.cat(parts, 1), expected)
            # The state of a layer, its keys and values in K + W + B slots of each head, and 16 bytes for each
            slots = KEPT + WINDOW + BLOCK
            (layer, _), heads = (x for x in (cache.layers, model.config.num_attention_heads))
            heads = getattr(model.config, "num_key_value_heads", heads)
            width = 24 // model.config.num_attention_heads
            assert layer.nbytes - layer.state.nbytes == 2 * (heads * slots * (2 * 8 * width + 16) + 8)
            assert cache.nbytes == 2 * layer.nbytes


@FAMILIES
@pytest.mark.parametrize("beams", [1, 2], ids=["greedy", "beams"])
@pytest.mark.parametrize("flush_interval", [1, 3], ids=["each token joins", "buffered"])
def test_generate_equals_no_cache(family, beams, flush_interval, monkeypatch):
    monkeypatch.setattr(cache_module, "flush_interval_of", lambda device, p: flush_interval)
    model, ids, mask = keeping(family), tokens(3, LONG), padding_mask("left", (LONG, 11, 1))
    how = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    assert torch.equal(model.generate(ids, **how), model.generate(ids, use_cache=False, **how))


def test_padding_between_turns():
    model, ids = keeping(llama), tokens(2, LONG)
    mask = torch.ones(2, LONG, dtype=torch.long)
    mask[1, 3:6] = 0
    mask[1, 8] = 0
    cache = FastmaxCache(model.config)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    parts = [
        model(ids[:, i:j], attention_mask=mask[:, :j], position_ids=positions[:, i:j], past_key_values=cache).logits
        for i, j in ((0, 4), (4, 8), (8, 9), (9, LONG))
    ]
    keep = mask[1].bool()
    torch.testing.assert_close(torch.cat(parts, 1)[1, keep][None], run(model, ids[1, keep][None], None))
    torch.testing.assert_close(torch.cat(parts, 1)[:1], run(model, ids[:1], None))


def test_a_cache_of_other_options_is_refused():
    model, ids = keeping(llama), tokens(2, 9)
    cache = FastmaxCache(model.config)
    model(ids, past_key_values=cache)
    integration.configure(model, exact_window=WINDOW, kept_keys=KEPT + 1)
    with pytest.raises(ValueError, match="the state in FastmaxCache was made with the options .*'kept_keys': 2"):
        model(ids[:, :1], past_key_values=cache)


# ---- as an option of the model


def test_saved_and_loaded(tmp_path):
    model, ids = keeping(llama), tokens(2, LONG)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.fastmax == {"exact_window": WINDOW, "kept_keys": KEPT}
    assert_same_model(loaded, model, ids)


def test_trained_with_gradient_checkpointing_and_compiled():
    model, ids, mask = keeping(llama), tokens(3, LONG), padding_mask("right", (LONG, 11, 1))
    expected = gradients(model, ids, mask)
    torch.testing.assert_close(gradients(checkpointed(model), ids, mask), expected)
    losses = losses_of_training(model, ids, 4)
    assert losses[-1] < losses[0] - 0.3


def test_autocast():
    model, ids = keeping(llama).float(), tokens(2, LONG)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    assert logits.isfinite().all()


def test_converted():
    model = llama(fastmax={}, num_hidden_layers=1)
    model.set_attn_implementation("sdpa")
    ids = tokens(2, LONG)
    softmax = model(ids).logits
    names = convert.swap(model, exact_window=WINDOW, kept_keys=LONG)
    assert [name.rpartition(".")[0] for name in names] == ["model.layers.0.self_attn.fastmax_input_gate"] * 2
    assert model.config.fastmax["kept_keys"] == LONG and model(ids).logits.shape == softmax.shape


def test_options_of_an_earlier_configuration():
    model = llama(fastmax={"kept_keys": 0})
    model.set_attn_implementation("sdpa")
    convert.swap(model, exact_window=WINDOW)
    assert "kept_keys" not in model.config.fastmax
    model = llama(fastmax={"kept_keys": 2, "exact_window": WINDOW})
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="has kept_keys = 2, but swap got 0: pass the same value"):
        convert.swap(model, exact_window=WINDOW)
    convert.swap(model, exact_window=WINDOW, kept_keys=2)


def test_encoder_and_decoder():
    """The decoder's self-attention has kept keys; the encoder and the cross-attention have none."""
    sizes = {"vocab_size": 40, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    special = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": None,
    }
    config = transformers.BartConfig(**sizes, **special, init_std=0.3, dropout=0.0)
    model, ids, target = make(transformers.BartForConditionalGeneration, config), tokens(2, LONG), tokens(2, 12)
    model.set_attn_implementation("sdpa")
    names = convert.swap(model, exact_window=WINDOW, kept_keys=KEPT)
    drawn(model)
    assert names and all(".decoder.layers.0.self_attn." in name for name in names)
    logits = model(ids, decoder_input_ids=target, use_cache=False).logits
    with defined():
        torch.testing.assert_close(logits, model(ids, decoder_input_ids=target, use_cache=False).logits)


def test_refused():
    model, ids = llama(fastmax={"exact_window": WINDOW, "kept_keys": KEPT}), tokens(1, 5)
    with pytest.raises(
        ValueError, match="LlamaAttention has no input gate, by which the 2 kept_keys are chosen: .*add_input_gate"
    ):
        model(ids)
    with (
        mock.patch.object(sharded_dispatch, "current", object),
        pytest.raises(ValueError, match="no form in context_parallel, got 2"),
    ):
        keeping(llama)(ids)
    with pytest.raises(ValueError, match="kept_keys needs a causal layer, and BertSelfAttention sees all keys in this call"):
        make(transformers.BertModel, transformers.BertConfig(**BERT, fastmax=dict(model.config.fastmax)))(ids)
    encoder = make(transformers.BertModel, transformers.BertConfig(**BERT))
    with pytest.raises(ValueError, match="needs layers of causal self-attention, got 2 for BertModel, which has none"):
        integration.configure(encoder, exact_window=2, kept_keys=2)
    refused = {
        "exact_window": {},
        "dropout": {"exact_window": 2, "dropout": 0.1},
        "rpe_matrix": {"exact_window": 2, "rpe_matrix": "sinusoidal"},
        "normalize": {"exact_window": 2, "normalize": "sequence"},
    }
    for name, options in refused.items():
        with pytest.raises(ValueError, match=f"kept_keys needs an exact_window.*got 2 with {name} = "):
            integration.configure(model, kept_keys=2, **options)
        live = keeping(llama)
        live.config.fastmax = {"kept_keys": 2} | options  # is not checked before the call
        with pytest.raises(ValueError, match=f"kept_keys needs an exact_window.*got 2 with {name} = "):
            live(ids)
    with pytest.raises(TypeError, match="kept_keys must be an int, got 2.0"):
        integration.configure(model, exact_window=2, kept_keys=2.0)
    with pytest.raises(ValueError, match="kept_keys must be at least 0, got -1"):
        integration.configure(model, exact_window=2, kept_keys=-1)
    assert model.config.fastmax == {"exact_window": WINDOW, "kept_keys": KEPT}
    with pytest.raises(ValueError, match="kept_keys needs input gates, got 2 with input_gate=False"):
        convert.swap(llama(), kept_keys=2, input_gate=False)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype, monkeypatch):
    """The reference is a model on the CPU in float64. A whole sequence is compared, and one in parts from states."""
    monkeypatch.setattr(kept_keys, "_BLOCK", 16)
    model, ids = keeping(llama, exact_window=4), tokens(2, 60)
    expected = model(ids).logits
    model, ids = model.to("cuda", dtype), ids.cuda()
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([32, 1, 1, 26], dim=1)]
    loss = model(ids, labels=ids).loss
    loss.backward()
    error = (torch.cat(parts, dim=1).cpu().double() - expected).norm() / expected.norm()
    assert error < (1e-3 if dtype == torch.float32 else 0.1)
