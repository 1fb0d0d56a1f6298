"""`FastmaxCache`: generation from states, against the same models without a cache."""

import copy
import importlib
from functools import partial
from unittest import mock

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tiny_decoders import PAD, VOCABULARY, gpt2, llama, make, padding_mask, run, tokens  # noqa: E402
from tiny_transformers import tiny_config, tiny_model  # noqa: E402

from fastmax.integrations.transformers import (  # noqa: E402
    FastmaxCache,
    add_decay,
    configure,
    fastmax_attention_forward,
    fastmax_mask,
)
from fastmax.integrations.transformers import cache as cache_module  # noqa: E402
from fastmax.integrations.transformers.cache import FastmaxLayer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models

FAMILIES = pytest.mark.parametrize("family", [llama, gpt2])
OPTIONS = {
    "p = 2": {},
    "p = 1": {"p": 1, "normalize": "token", "a1": 0.9, "temperature": 1.0},
    "exact window": {"exact_window": 4},
    "sinusoidal": {"rpe_matrix": "sinusoidal"},
}


def generate(model, ids, mask=None, cache=None, **options) -> Tensor:
    """Generates with the cache, or without any."""
    options = {"max_new_tokens": 8, "do_sample": False} | options
    mask = torch.ones_like(ids) if mask is None else mask
    how = {"use_cache": False} if cache is None else {"past_key_values": cache}
    return model.generate(ids, attention_mask=mask, **options, **how)


def tensors(value: object, seen: set[int]) -> dict[int, int]:
    """Returns the bytes of each memory that an object refers to, by its address."""
    if id(value) in seen:
        return {}
    seen.add(id(value))
    if isinstance(value, Tensor):
        return {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()}
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    parts = [*parts, *getattr(value, "__dict__", {}).values()]
    return {address: size for part in parts for address, size in tensors(part, seen).items()}


# ---- equal to no cache


@FAMILIES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
def test_generate_equals_no_cache(family, options, beams):
    model = family(fastmax=options)
    ids, mask = tokens(3, 9), padding_mask("left")
    cache = FastmaxCache(model.config)
    cached = generate(model, ids, mask, cache, num_beams=beams)
    assert torch.equal(cached, generate(model, ids, mask, num_beams=beams))
    assert cached.shape == (3, 17) and cache.get_seq_length() == 16
    assert {layer.state.kv_state.shape[0] for layer in cache.layers} == {3 * beams}


@FAMILIES
def test_sampling_equals_no_cache(family):
    model = family()
    ids, mask = tokens(3, 9), padding_mask("left")

    def sample(cache=None):
        torch.manual_seed(1)
        return generate(model, ids, mask, cache, do_sample=True, num_return_sequences=2, top_k=0)

    assert torch.equal(sample(FastmaxCache(model.config)), sample())


@FAMILIES
@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_logits_in_parts(family, side, options):
    """One token comes first, then twice several on top of the state, then one."""
    model = family(fastmax=options)
    ids, mask = tokens(3, 9), padding_mask(side)
    expected, cache, parts = run(model, ids, mask), FastmaxCache(model.config), []
    for first, last in ((0, 1), (1, 5), (5, 8), (8, 9)):
        given = {"past_key_values": cache}
        if mask is not None:
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            given |= {"attention_mask": mask[:, :last], "position_ids": positions[:, first:last]}
        parts.append(model(ids[:, first:last], **given).logits)
        assert cache.get_seq_length() == last
    real = torch.ones(3, 9, dtype=torch.bool) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(parts, dim=1)[real], expected[real])


@FAMILIES
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_right_padded_prompts_go_on_as_each_alone(family, options):
    """For tokens after padding, windows and positions count real tokens."""
    model = family(fastmax=options)
    ids, new, mask, cache = tokens(3, 9), tokens(3, 3), padding_mask("right"), FastmaxCache(model.config)
    run(model, ids, mask, past_key_values=cache)
    for i in range(3):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        position = mask.sum(-1, keepdim=True) - 1
        logits = model(new[:, i : i + 1], attention_mask=mask, position_ids=position, past_key_values=cache).logits
        for row, length in enumerate((9, 6, 1)):
            alone = torch.cat([ids[row, :length], new[row, : i + 1]]).unsqueeze(0)
            torch.testing.assert_close(logits[row], model(alone, use_cache=False).logits[0, -1:])


WITH_STATES = ["GPTNeoX", "GPTBigCode", "OPT", "Phi3", "Qwen3", "Gemma", "Cohere", "Mixtral", "Granite", "StableLm"]


def tiny(name):
    kind = getattr(transformers, f"{name}ForCausalLM")
    config = tiny_config(kind.config_class)
    config._attn_implementation = "fastmax"
    return tiny_model(kind, config)


@pytest.mark.parametrize("name", WITH_STATES)
def test_other_models(name):
    model, ids, mask = tiny(name), tokens(3, 9), padding_mask("left")
    options = {"pad_token_id": PAD, "eos_token_id": None, "bos_token_id": None}
    cached = generate(model, ids, mask, FastmaxCache(model.config), **options)
    assert torch.equal(cached, generate(model, ids, mask, **options))


def test_model_that_computes_on_cached_keys():
    model = tiny("JetMoe")
    model(tokens(1, 4))
    with pytest.raises(ValueError, match=r"FastmaxCache holds no keys and values, and they were used \(repeat\)"):
        model(tokens(1, 4), past_key_values=FastmaxCache(model.config))


def test_prefill_in_chunks():
    model = llama()
    ids, mask = tokens(3, 9), padding_mask("left")
    chunked = generate(model, ids, mask, FastmaxCache(model.config), prefill_chunk_size=4)
    assert torch.equal(chunked, generate(model, ids, mask))


@FAMILIES
def test_turns(family):
    """Each turn continues from the cache of the one before, which has seen all but the last token."""
    model = family()
    text, mask, cache = tokens(3, 9), padding_mask("left"), FastmaxCache(model.config)
    for _ in range(3):
        answer = generate(model, text, mask, cache)
        assert torch.equal(answer, generate(model, text, mask))
        text = torch.cat((answer, tokens(3, 4)), dim=1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    assert cache.get_seq_length() == 9 + 2 * 12 + 8 - 1


def test_prefix_used_twice():
    model, prefix = llama(), tokens(1, 7)
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        model(prefix, past_key_values=cache)
    for _ in range(2):
        text = torch.cat((prefix, tokens(1, 3)), dim=1)
        assert torch.equal(generate(model, text, None, copy.deepcopy(cache)), generate(model, text))
    assert cache.get_seq_length() == 7


def test_encoder_decoder_model():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=24, encoder_layers=1, decoder_layers=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
        encoder_attention_heads=2, decoder_attention_heads=3, max_position_embeddings=64, init_std=0.3, dropout=0.0,
        pad_token_id=PAD, bos_token_id=1, eos_token_id=None, decoder_start_token_id=1, forced_eos_token_id=None,
    )  # fmt: skip
    model = make(transformers.BartForConditionalGeneration, config)
    ids, mask, own = tokens(3, 9), padding_mask("right"), FastmaxCache(config)
    cache = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
    assert torch.equal(generate(model, ids, mask, cache, num_beams=2), generate(model, ids, mask, num_beams=2))
    assert len(own) == 2 and own.get_seq_length() == 8
    with pytest.raises(ValueError, match="FastmaxCache is for causal self-attention"):
        generate(model, ids, mask, FastmaxCache(config))


def test_gradients_through_the_cache():
    model, ids = llama(), tokens(2, 6)

    def gradients(logits):
        return torch.autograd.grad(logits.square().sum(), tuple(model.parameters()))

    cache = FastmaxCache(model.config)
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :4], ids[:, 4:5], ids[:, 5:])]
    torch.testing.assert_close(gradients(torch.cat(parts, dim=1)), gradients(model(ids).logits))


def test_inference_mode_then_not():
    model, cache = llama(), FastmaxCache(llama().config)
    with torch.inference_mode():
        text = generate(model, tokens(1, 4), None, cache)
    assert torch.equal(generate(model, text.clone(), None, cache), generate(model, text.clone()))


def test_autocast():
    model, ids, cache = llama().float(), tokens(2, 9), FastmaxCache(llama().config)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in (ids[:, :8], ids[:, 8:])]
        expected = model(ids).logits
    assert cache.layers[0].state.dtype == torch.bfloat16
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=0.05, atol=0.1)


# ---- the cache that generate makes


def made_by_generate(model, **options):
    ids = tokens(2, 5)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False} | options
    output = model.generate(ids, return_dict_in_generate=True, **options)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, use_cache=False)
    assert torch.equal(output.sequences, expected)
    return output.past_key_values


@FAMILIES
def test_made_where_the_configuration_asks_for_it(family, tmp_path):
    model = family()
    assert type(made_by_generate(model)) is transformers.DynamicCache
    configure(model, constant_memory=True)
    assert type(made_by_generate(model)) is FastmaxCache
    assert made_by_generate(model).get_seq_length() == 8  # a new one for each call
    assert type(made_by_generate(model, cache_implementation="dynamic")) is transformers.DynamicCache
    given = transformers.DynamicCache()
    assert made_by_generate(model, past_key_values=given) is given
    assert made_by_generate(model, use_cache=False) is None
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert type(made_by_generate(loaded)) is type(made_by_generate(copy.deepcopy(model))) is FastmaxCache
    model.set_attn_implementation("sdpa")
    assert type(made_by_generate(model)) is transformers.DynamicCache
    configure(loaded)
    assert type(made_by_generate(loaded)) is transformers.DynamicCache


def test_made_for_decay_gates():
    """A FastmaxCache is made, because transformers' caches do not store decays."""
    model = llama()
    add_decay(model)
    assert type(made_by_generate(model)) is FastmaxCache


def test_made_for_some_layers():
    cache = made_by_generate(llama(fastmax={"layers": [1], "constant_memory": True}))
    assert [type(layer) for layer in cache.layers] == [transformers.cache_utils.DynamicLayer, FastmaxLayer]


def test_made_for_the_decoder_of_two_parts():
    config = tiny_config(transformers.BartConfig)
    config.fastmax = {"constant_memory": True}
    config._attn_implementation = "fastmax"
    model = tiny_model(transformers.BartForConditionalGeneration, config)
    ids = tokens(2, 5)
    output = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert type(output.past_key_values.self_attention_cache) is FastmaxCache
    assert type(output.past_key_values.cross_attention_cache) is transformers.DynamicCache
    assert torch.equal(output.sequences, model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False))


def test_tokens_are_taken_back_by_another_cache():
    model = llama(fastmax={"constant_memory": True})
    ids, options = tokens(1, 6), {"prompt_lookup_num_tokens": 2}
    with pytest.raises(ValueError, match='cannot forget tokens.*cache_implementation="dynamic"'):
        model.generate(ids, max_new_tokens=8, **options)
    found = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation="dynamic", **options)
    assert torch.equal(found, generate(model, ids))


@pytest.mark.parametrize("gated", [False, True], ids=["constant memory", "gates"])
def test_assistant_that_asks_for_constant_memory(gated):
    """The cache of the main model is not its own."""
    model, assistant, ids = llama(), llama(), tokens(1, 6)
    options = {"assistant_model": assistant, "cache_implementation": "dynamic"}
    asks = add_decay if gated else partial(configure, constant_memory=True)
    asks(assistant)
    what = "learned gates.*: a model without gates" if gated else "constant_memory=True.*: configure it without constant_memory"
    with pytest.raises(ValueError, match=f"assistant_model must .* LlamaForCausalLM whose own configuration asks .* {what}"):
        model.generate(ids, max_new_tokens=8, do_sample=False, **options)
    if not gated:
        configure(assistant)
        found = model.generate(ids, max_new_tokens=8, do_sample=False, **options)
        assert torch.equal(found, generate(model, ids))


def test_continuous_batching_is_refused(monkeypatch):
    """With FlashAttention installed transformers would switch to it."""
    continuous = importlib.import_module("transformers.generation.continuous_batching.continuous_api")
    switch = mock.Mock(side_effect=AssertionError("transformers may switch the attention"))
    monkeypatch.setattr(continuous.ContinuousBatchingManager, "__init__", switch)
    model = llama()
    with pytest.raises(ValueError, match='attn_implementation="fastmax" of LlamaForCausalLM has no form in continuous'):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)
    assert model.config._attn_implementation == "fastmax"


def test_constant_memory_is_a_bool():
    with pytest.raises(TypeError, match="constant_memory must be a bool, got 1"):
        configure(llama(), constant_memory=1)


# ---- the cache as transformers sees it


@pytest.mark.parametrize("options", [{}, {"exact_window": 4}], ids=["p = 2", "exact window"])
def test_size_does_not_depend_on_the_length(options):
    model, sizes = llama(fastmax=options), set()
    for new in (1, 5, 40):
        cache = FastmaxCache(model.config)
        generate(model, tokens(3, 9), padding_mask("left"), cache, max_new_tokens=new)
        assert cache.get_seq_length() == 8 + new
        held = sum(tensors(cache, set()).values())
        assert cache.nbytes <= held < cache.nbytes + 1000
        sizes.add(held)
    assert len(sizes) == 1


def test_before_any_token():
    cache = FastmaxCache(llama().config)
    assert len(cache) == 2 and cache.nbytes == cache.get_seq_length() == 0 and cache.layers[0].get_max_length() == -1
    assert cache.get_mask_sizes(5, 0) == (5, 0)
    assert not cache.is_compileable and not cache.layers[0].is_croppable
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(2)
    cache.layers[0].offload()
    cache.layers[0].prefetch()


def test_reset():
    model, cache = llama(), FastmaxCache(llama().config)
    first = generate(model, tokens(3, 9), padding_mask("left"), cache)
    cache.reset()
    assert cache.get_seq_length() == cache.nbytes == 0
    text = first[:2, 5:]  # another batch, no padding
    assert torch.equal(generate(model, text, None, cache), generate(model, text))


CHANGES = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 2])), [2, 0, 2]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2])), [2]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
}


@pytest.fixture(params=[1, 3], ids=["each token joins", "buffered"])
def buffers(request, monkeypatch):
    monkeypatch.setattr(cache_module, "flush_interval_of", lambda device, p: request.param)
    return request.param


@pytest.mark.parametrize("options", [{}, {"exact_window": 4}, {"log_decay": [-0.1, -0.3]}], ids=str)
@pytest.mark.parametrize("beams", [1, 2])
def test_buffered_tokens(buffers, options, beams):
    model, ids, mask = llama(fastmax=options), tokens(3, 9), padding_mask("left")
    cache = FastmaxCache(model.config)
    expected = generate(model, ids, mask, num_beams=beams)
    assert torch.equal(generate(model, ids, mask, cache, num_beams=beams), expected)
    assert {layer.state.flush_interval for layer in cache.layers} == {buffers}
    if beams == 1:  # a second turn, on what is buffered
        text = torch.cat((expected, tokens(3, 2)), dim=1)
        mask = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
        assert torch.equal(generate(model, text, mask, cache), generate(model, text, mask))


@pytest.mark.parametrize("kernels, p, expected", [(True, 2, 32), (True, 1, 1), (False, 2, 1)])
def test_which_states_buffer(kernels, p, expected, monkeypatch):
    monkeypatch.setattr(cache_module.ops.extension, "expects_kernels", lambda x: kernels)
    assert cache_module.flush_interval_of(torch.zeros(1), p) == expected


@pytest.mark.parametrize("change, rows", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("options", [{}, {"exact_window": 4}], ids=["p = 2", "exact window"])
def test_batch(change, rows, options):
    model, ids, mask = llama(fastmax=options), tokens(3, 9), padding_mask("left")
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        run(model, ids, mask, past_key_values=cache)
    change(cache)
    text = torch.cat((ids[rows], tokens(len(rows), 1)), dim=1)
    mask = torch.nn.functional.pad(mask[rows], (0, 1), value=1)
    assert torch.equal(generate(model, text, mask, cache), generate(model, text, mask))


def test_offloaded_state_waits_for_its_tokens(monkeypatch):
    """`Cache.update` offloads the layer as soon as it has the new keys, before the attention runs."""
    moves, move = [], FastmaxLayer._move
    model, cache = llama(num_hidden_layers=1), FastmaxCache(llama(num_hidden_layers=1).config)
    monkeypatch.setattr(FastmaxLayer, "_move", lambda self, device: moves.append((str(device), self.get_seq_length())))
    update = FastmaxLayer.update

    def update_and_offload(self, *args, **kwargs):
        announced = update(self, *args, **kwargs)
        self.offload()
        return announced

    monkeypatch.setattr(FastmaxLayer, "update", update_and_offload)
    with torch.no_grad():
        model(tokens(1, 4), past_key_values=cache)
        cache.layers[0].device = torch.device("meta")  # in the place of a GPU
        model(tokens(1, 1), past_key_values=cache)
    assert moves == [("cpu", 4), ("meta", 4), ("cpu", 5)]
    cache.layers[0].hidden = torch.zeros(1)
    move(cache.layers[0], torch.device("meta"))
    assert cache.layers[0].state.device == cache.layers[0].hidden.device == torch.device("meta")


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_in_parts_on_a_gpu(dtype):
    model, ids = llama(hidden_size=64, num_attention_heads=2, num_key_value_heads=1).to("cuda", dtype), tokens(2, 40).cuda()
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([32, 1, 1, 6], dim=1)]
        expected = model(ids).logits
    tolerance = 1e-3 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=tolerance, atol=tolerance * expected.abs().max().item())


@pytest.mark.cuda
def test_offloading():
    model = llama(num_hidden_layers=3).cuda()
    ids, mask = tokens(3, 9).cuda(), padding_mask("left").cuda()
    cache = FastmaxCache(model.config, offloading=True)
    assert torch.equal(generate(model, ids, mask, cache, num_beams=2), generate(model, ids, mask, num_beams=2))
    assert {layer.state.device.type for layer in cache.layers} == {"cpu", "cuda"}


# ---- what is not attention over all earlier tokens


def test_tokens_cannot_be_taken_back():
    model, cache = llama(), FastmaxCache(llama().config)
    for options in ({"assistant_model": llama()}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="FastmaxCache cannot forget tokens.*DynamicCache"):
            generate(model, tokens(1, 6), None, FastmaxCache(model.config), **options)
    with pytest.raises(ValueError, match="FastmaxCache cannot forget tokens"):
        cache.crop(-1)


def announced() -> tuple:
    x = torch.randn(2, 2, 3, 6)
    return FastmaxCache(llama().config).update(x, x, 0)


USES = {
    "product": lambda keys, x: x @ keys,
    "sdpa": lambda keys, x: torch.nn.functional.scaled_dot_product_attention(x, keys, keys),
    "cat": lambda keys, x: torch.cat((keys, x), dim=2),
    "shape": lambda keys, x: keys.shape,
    "slice": lambda keys, x: keys[:, :, -1:],
    "transpose": lambda keys, x: keys.transpose(1, 2),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_no_other_attention_can_use_the_keys(use):
    for keys in (*announced(), FastmaxCache(llama().config).layers[0].keys):
        with pytest.raises(ValueError, match="FastmaxCache holds no keys and values, and they were used"):
            use(keys, torch.randn(2, 2, 3, 6))


@FAMILIES
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_model_that_no_longer_runs_fastmax(family, implementation):
    model = family()
    cache = FastmaxCache(model.config)
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match="FastmaxCache holds no keys and values"):
        model(tokens(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match=f"attn_implementation=\"fastmax\", got '{implementation}'"):
        FastmaxCache(model.config)


def test_configuration():
    with pytest.raises(TypeError, match="config must be a model's configuration.*got LlamaForCausalLM"):
        FastmaxCache(llama())
    config = transformers.Gemma2Config(num_hidden_layers=2, attn_implementation="fastmax")
    with pytest.raises(ValueError, match="full_attention in all layers that run fastmax, got sliding_attention too in gemma2"):
        FastmaxCache(config)


def started(**options):
    """Returns a model and a cache that has seen a left-padded batch."""
    model = llama(fastmax=options)
    cache = FastmaxCache(model.config)
    with torch.no_grad():
        run(model, tokens(3, 9), padding_mask("left"), past_key_values=cache)
    return model, cache


def later_mask(change):
    mask = torch.nn.functional.pad(padding_mask("left"), (0, 1), value=1)
    change(mask)
    return mask


LATER = {
    "no mask": None,
    "seen since": later_mask(lambda mask: mask.fill_(1)),
    "hidden since": later_mask(lambda mask: mask[0].fill_(0)),
    "another token of the row": later_mask(lambda mask: mask[1].copy_(mask[1, [*range(1, 9), 0, 9]])),
    "rows exchanged": later_mask(lambda mask: mask.copy_(mask.flip(0))),
}


@pytest.mark.parametrize("mask", LATER.values(), ids=LATER)
def test_mask_that_says_something_else_of_earlier_tokens(mask):
    model, cache = started()
    with pytest.raises(ValueError, match="attention_mask differs from that of earlier calls"):
        model(tokens(3, 1), attention_mask=mask, past_key_values=cache)


def test_mask_that_comes_too_late():
    model, cache = llama(), FastmaxCache(llama().config)
    with torch.no_grad():
        model(tokens(3, 9), past_key_values=cache)
        model(tokens(3, 1), past_key_values=cache, attention_mask=torch.ones(3, 10))
    with pytest.raises(ValueError, match="attention_mask differs from that of earlier calls"):
        model(tokens(3, 1), attention_mask=later_mask(lambda mask: None)[:, [0, *range(10)]], past_key_values=cache)


@pytest.mark.parametrize("mask", [None, torch.ones(1, 10)], ids=["no mask", "mask"])
def test_another_batch(mask):
    model, cache = started()
    with pytest.raises(ValueError, match="holds states for a batch of 3, got one of 1; .*batch_repeat_interleave"):
        model(tokens(1, 1), attention_mask=mask, past_key_values=cache)


def test_options_of_a_state_are_fixed():
    for options in ({"a2": 0.6}, {"log_decay": [-0.1, -0.2]}):
        model, cache = started()
        model.config.fastmax = options
        (name,) = options
        with pytest.raises(ValueError, match=f"was made with the options .*temperature.*, got .*'{name}': "):
            model(tokens(3, 1), past_key_values=cache)


REFUSED = {
    "noise": ({"dropout": 0.1}, "dropout must be 0 with a FastmaxCache, got"),
    "quadratic": ({"algorithm": "quadratic"}, 'no form with algorithm="quadratic"'),
    "autograd": ({"use_custom_gradient": False}, "no form with use_custom_gradient=False"),
    "sequence": ({"normalize": True}, 'normalize="sequence" looks at all rows'),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_refused_option(options, message):
    model = llama(fastmax=options).train()
    with pytest.raises(ValueError, match=message):
        model(tokens(1, 4), past_key_values=FastmaxCache(model.config))


@pytest.mark.parametrize("options", [{"algorithm": "fast"}, {"use_custom_gradient": 0}, {"dropout": "none"}], ids=repr)
def test_options_that_a_state_does_not_take_are_checked_all_the_same(options):
    model = llama().train()
    model.config.fastmax = options  # by hand, since it was made
    with torch.no_grad(), pytest.raises((TypeError, ValueError), match=f"{next(iter(options))} must be"):
        model(tokens(1, 4), past_key_values=FastmaxCache(model.config))


@pytest.mark.parametrize("name", ["quadratic", "sequence"])
def test_options_that_no_state_has_are_refused_when_the_cache_is_made(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        FastmaxCache(llama(fastmax=options).config)


def test_offloading_is_a_bool():
    with pytest.raises(TypeError, match="offloading must be a bool, got 'no'"):
        FastmaxCache(llama().config, offloading="no")


def test_bidirectional_call():
    model = llama()
    with pytest.raises(ValueError, match="FastmaxCache is for causal self-attention"):
        model(tokens(1, 4), past_key_values=FastmaxCache(model.config), is_causal=False)


def test_keys_are_taken_once():
    model = llama()
    attention, query, (keys, values) = model.model.layers[0].self_attn, torch.randn(2, 4, 3, 6), announced()
    mask = fastmax_mask(2, 3, 3)
    for wrong in ((keys, announced()[1]), (values, keys), (announced()[0].layer.keys, values)):
        with pytest.raises(ValueError, match="takes the keys and values of each call once"):
            fastmax_attention_forward(attention, query, *wrong, mask)
    fastmax_attention_forward(attention, query, keys, values, mask)
    with pytest.raises(ValueError, match="takes the keys and values of each call once"):
        fastmax_attention_forward(attention, query, keys, values, mask)


def test_fewer_queries_than_new_keys():
    keys, values = announced()
    attention = llama().model.layers[0].self_attn
    with pytest.raises(ValueError, match="as many new keys as queries, got 3 and 1"):
        fastmax_attention_forward(attention, torch.randn(2, 4, 1, 6), keys, values, fastmax_mask(2, 1, 3, 2))


def test_cache_of_a_call_that_failed():
    model, cache = llama(), FastmaxCache(llama().config)

    def fail(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        model(tokens(1, 4), past_key_values=cache)
    hook.remove()
    with pytest.raises(ValueError, match=r"different numbers of tokens \(0, where the first has seen 4\)"):
        model(tokens(1, 4), past_key_values=cache)
    with pytest.raises(ValueError, match="before those of an earlier call came to fastmax's attention"):
        model(tokens(1, 1), past_key_values=cache)
    cache.reset()
    assert torch.equal(generate(model, tokens(1, 4).fill_(3), None, cache), generate(model, tokens(1, 4).fill_(3)))
