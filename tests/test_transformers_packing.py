"""Packed batches of Hugging Face models equal the documents one by one."""

import copy
from unittest import mock

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tiny_decoders import gpt2, hybrid, llama, mistral, run, tokens  # noqa: E402
from transformers import masking_utils as masks  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402
from fastmax.integrations.transformers import FastmaxCache, add_decay, add_input_gate  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own remarks on small models

LENGTHS = 4, 1, 7
WAYS = pytest.mark.parametrize("way", ["positions", "cu_seq_lens", "both"])


def gemma(**options):
    return hybrid("Gemma3", ["sliding_attention", "full_attention"], fastmax={"layers": "global"} | options)


def gated(**options):
    model = llama(fastmax=options)
    add_decay(model, 8.0)
    add_input_gate(model)
    for layer in model.model.layers:
        for gate in (layer.self_attn.fastmax_decay, layer.self_attn.fastmax_input_gate):
            torch.nn.init.normal_(gate.weight, std=0.3)
    return model


MODELS = {
    "llama": llama,
    "gpt2": gpt2,
    "mistral": lambda: mistral(sliding_window=None),
    "gemma 3, global layers": gemma,
    "softmax first": lambda: llama(fastmax={"layers": [1]}),
    "exact window": lambda: llama(fastmax={"exact_window": 3}),
    "decays": lambda: llama(fastmax={"log_decay": [-0.5, -0.02]}),
    "gates": gated,
    "gates and exact window": lambda: gated(exact_window=2),
    "sequence": lambda: llama(fastmax={"normalize": "sequence", "lim": 1.5}),
    "sinusoidal": lambda: llama(fastmax={"rpe_matrix": "sinusoidal"}),
}
pytestmark = [pytestmark, pytest.mark.filterwarnings("ignore:.*later tokens:RuntimeWarning")]


def positions(lengths) -> torch.Tensor:
    return torch.cat([torch.arange(n) for n in lengths])[None]


def bounds(lengths) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def arguments(way, lengths=LENGTHS) -> dict:
    given = {"use_cache": False}
    if way != "cu_seq_lens":
        given["position_ids"] = positions(lengths)
    if way != "positions":
        given |= {"cu_seq_lens_q": bounds(lengths), "cu_seq_lens_k": bounds(lengths), "max_length_q": 7, "max_length_k": 7}
    return given


def logits_and_gradients(model, logits):
    return logits, torch.autograd.grad(logits.square().mean(), tuple(model.parameters()))


def one_by_one(model, ids, lengths=LENGTHS):
    return torch.cat([run(model, document, None, use_cache=False) for document in ids.split(lengths, dim=1)], dim=1)


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
@WAYS
def test_equals_documents_one_by_one(make_model, way):
    model, ids = make_model(), tokens(1, sum(LENGTHS))
    given = arguments(way)
    options = getattr(model.config, "fastmax", None) or {}
    if way == "cu_seq_lens" and (model.config.model_type == "gpt2" or {"layers", "rpe_matrix"} & options.keys()):
        pytest.skip("not the same with positions that go on")
    packed = logits_and_gradients(model, model(ids, **given).logits)
    tolerance = 1e-6 if "position_ids" in given else 1e-3  # else positions go on, and RoPE rounds to float32
    torch.testing.assert_close(
        packed, logits_and_gradients(model, one_by_one(model, ids)), rtol=tolerance, atol=0.1 * tolerance
    )
    whole = run(model, ids, None)
    assert (whole - packed[0]).abs().max() > 1e-3


@pytest.mark.parametrize("static", [False, True], ids=["eager", "as in a graph"])
def test_rows_of_a_batch(static):
    """Each row is packed in its own way, and one is not packed."""
    lengths = [(4, 1, 7), (6, 6), (12,)]
    for model in (gated(exact_window=2), gemma()):
        ids = tokens(3, 12)
        given = {"position_ids": torch.cat([positions(row) for row in lengths]), "use_cache": False}
        with mock.patch.object(integration.packing, "is_tracing", lambda x: static):
            packed = logits_and_gradients(model, model(ids, **given).logits)
        alone = torch.cat([one_by_one(model, row[None], row_lengths) for row, row_lengths in zip(ids, lengths, strict=True)])
        torch.testing.assert_close(packed, logits_and_gradients(model, alone), rtol=1e-6, atol=1e-8)


def flattened(documents, **options) -> dict:
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    return collate([{"input_ids": document.tolist()} for document in documents])


@pytest.mark.parametrize("make_model", [llama, gpt2, gemma])
@pytest.mark.parametrize("bounds", [False, True], ids=["positions", "bounds"])
def test_flattened_batch(make_model, bounds):
    model, documents = make_model().train(), [tokens(n) for n in LENGTHS]
    loss = model(**flattened(documents, return_flash_attn_kwargs=bounds), use_cache=False).loss
    longer = [document for document in documents if len(document) > 1]
    each = [model(document[None], labels=document[None]).loss * (len(document) - 1) for document in longer]
    torch.testing.assert_close(loss, sum(each) / (sum(LENGTHS) - len(LENGTHS)))
    single = model(**flattened(documents[:1], return_flash_attn_kwargs=bounds), use_cache=False).loss
    torch.testing.assert_close(single, each[0] / (LENGTHS[0] - 1))


def test_heads_are_not_copied():
    x = torch.randn(2, 5, 3, 4).transpose(1, 2)  # (b, h, n, d) as transformers' layers have it
    end_to_end = integration.packing.end_to_end(x)
    assert end_to_end.shape == (1, 3, 10, 4) and end_to_end.data_ptr() == x.data_ptr()
    assert torch.equal(integration.packing.rows_again(end_to_end, 2), x)


def test_compiled():
    torch.compiler.reset()
    model, ids = llama(fastmax={"layers": [1], "exact_window": 2}), tokens(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for lengths in ([LENGTHS, (6, 6)], [(12,), (12,)], [(3, 9), (12,)]):
        given = {"position_ids": torch.cat([positions(row) for row in lengths]), "use_cache": False}
        torch.testing.assert_close(compiled(ids, **given).logits, model(ids, **given).logits)
    torch.testing.assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


def test_compiled_with_bounds():
    torch.compiler.reset()
    model, ids = llama(num_hidden_layers=1), tokens(1, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    def gradients(model_):
        return logits_and_gradients(model, model_(ids, **arguments("both")).logits)

    torch.testing.assert_close(gradients(compiled), gradients(model))


@pytest.mark.cuda
@pytest.mark.parametrize(
    "make_model", [lambda: gated(exact_window=2), lambda: llama(fastmax={"layers": [1]})], ids=["gates", "layers"]
)
def test_rows_of_a_batch_on_a_gpu(make_model):
    model, ids = make_model(), tokens(2, 300)
    given = {"position_ids": torch.cat([positions((100, 1, 199)), positions((170, 130))]), "use_cache": False}
    packed, gradients = logits_and_gradients(model, model(ids, **given).logits)
    model, given = model.float().cuda(), given | {"position_ids": given["position_ids"].cuda()}
    ours, ours_gradients = logits_and_gradients(model, model(ids.cuda(), **given).logits)
    for x, y in zip((packed, *gradients), (ours, *ours_gradients), strict=True):
        assert (y.cpu().double() - x).norm() < 2e-3 * x.norm()


# ---- what is not packed


CU = bounds(LENGTHS)
ALONE = {"use_cache": False, "cu_seq_lens_q": CU}
REFUSED = {
    "a cache, positions": (llama, {"position_ids": positions(LENGTHS)}, "there is one of the two"),
    "a mask": (llama, ALONE | {"attention_mask": torch.ones(1, 12)}, "got cu_seq_lens_q, causal, an attention_mask"),
    "other keys": (llama, ALONE | {"cu_seq_lens_k": bounds((5, 7))}, "cu_seq_lens_k must be cu_seq_lens_q.* got shapes"),
    "other bounds of keys": (
        llama,
        ALONE | {"cu_seq_lens_k": bounds((4, 2, 6))},
        "must be cu_seq_lens_q, since",
    ),
    "keys alone": (llama, {"use_cache": False, "cu_seq_lens_k": CU}, "cu_seq_lens_k needs cu_seq_lens_q"),
    "not causal": (llama, ALONE | {"is_causal": False}, "got cu_seq_lens_q, not causal"),
    "bounds beyond the row": (llama, ALONE | {"cu_seq_lens_q": bounds((4, 9))}, "cu_seqlens must go from 0 to n = 12"),
    "softmax layers without positions": (gemma, ALONE, "cu_seq_lens_q must name the documents that position_ids do"),
    "softmax layers, other positions": (gemma, ALONE | {"position_ids": positions((6, 6))}, "must name the documents"),
}


@pytest.mark.parametrize("make_model, given, message", REFUSED.values(), ids=REFUSED)
def test_refused(make_model, given, message):
    with pytest.raises(ValueError, match=message):
        make_model()(tokens(1, 12), **given)


def switched():
    model = llama()
    model.set_attn_implementation("sdpa")
    model.set_attn_implementation("fastmax")
    return copy.deepcopy(model)


@pytest.mark.parametrize("make_model", [llama, gpt2, gemma, switched])
def test_refused_with_an_empty_cache(make_model):
    """Tokens that continue from the cache would see all documents."""
    model = make_model()
    given = {"cu_seq_lens_q": CU, "position_ids": positions(LENGTHS)}
    caches = transformers.DynamicCache(config=model.config), FastmaxCache(model.config)
    wrong = [{"past_key_values": cache, "use_cache": use_cache} for cache in caches for use_cache in (True, False)]
    for cached in ({}, {"use_cache": True}, *wrong):
        with pytest.raises(ValueError, match=r"without a cache .* got cu_seq_lens_q and a \w+Cache in \w+Attention"):
            model(tokens(1, 12), **given, **cached)
    model.set_attn_implementation("sdpa")  # transformers' own business
    model(tokens(1, 12), **given)


def test_refused_with_a_state():
    model = llama()
    with pytest.raises(ValueError, match="there is one of the two"):
        model(tokens(1, 12), past_key_values=FastmaxCache(model.config), position_ids=positions(LENGTHS))


def test_refused_with_earlier_keys():
    """The function itself refuses them, because another model's layer may call it without fastmax's hook."""
    layer, mask = llama().model.layers[0].self_attn, integration.fastmax_mask(1, 12, 15, 3)
    q, k = torch.randn(1, 4, 12, 6), torch.randn(1, 2, 15, 6)
    with pytest.raises(ValueError, match="12 queries of 15 keys"):
        integration.fastmax_attention_forward(layer, q, k, k, mask, cu_seq_lens_q=CU)
    cache = FastmaxCache(layer.config)
    k = cache.update(k[:, :, :12], k[:, :, :12], 0)
    with pytest.raises(ValueError, match="12 queries of 12 keys, a FastmaxCache"):
        integration.fastmax_attention_forward(layer, q, *k, integration.fastmax_mask(1, 12, 12), cu_seq_lens_q=CU)


def test_bounds_are_of_one_row():
    with pytest.raises(ValueError, match="cu_seq_lens_q is for a batch of one, got one of 2"):
        llama()(tokens(2, 12), **ALONE)


def patterns(n=12):
    """Returns mask functions, and whether each is causal within the documents."""
    documents = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None]
    packed = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(documents))
    later = torch.zeros(1, n, n, dtype=torch.bool)
    later[0, 2, 9] = True
    earlier = torch.ones(1, n, n, dtype=torch.bool)
    earlier[0, 10, 7] = False
    skips = documents.clone()
    skips[0, :4] = 2  # the first document again at the end
    return {
        "packed": (packed, True),
        "in another order": (masks.and_masks(masks.packed_sequence_mask_function(documents), masks.causal_mask_function), True),
        "of a function of its own": (lambda row, head, q, k: (documents[row, q] == documents[row, k]) & (q - k >= 0), True),
        "causal": (masks.and_masks(masks.causal_mask_function, masks.causal_mask_function), True),
        "both ways in documents": (masks.packed_sequence_mask_function(documents), False),
        "or": (masks.or_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(documents)), False),
        "window": (masks.sliding_window_causal_mask_function(3), False),
        "chunks": (masks.and_masks(masks.chunked_overlay(5, torch.zeros(1).long()), packed), True),
        "one later key": (masks.or_masks(packed, lambda row, head, q, k: later[row, q, k]), False),
        "one earlier key less": (masks.and_masks(packed, lambda row, head, q, k: earlier[row, q, k]), False),
        "a document in two parts": (
            masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(skips)),
            False,
        ),
    }


@pytest.mark.parametrize("name", patterns())
@pytest.mark.parametrize("all_pairs", [1 << 24, 0], ids=["every key of a query", "some keys of a query, here all"])
def test_patterns_are_compared(name, all_pairs, monkeypatch):
    monkeypatch.setattr(integration.packing, "_ALL_PAIRS", all_pairs)
    pattern, is_packed = patterns()[name]
    first = integration.packing.first_tokens(pattern, 1, 12, torch.device("cpu"))
    assert integration.packing.differs_from_packing(pattern, first).item() is not is_packed


@pytest.mark.parametrize(
    "keys_of",
    [
        lambda q, k, begin: (k >= begin) & (k <= q) & (k > q - 7),  # a window
        lambda q, k, begin: (k >= begin) & (k <= q) & (k // 20 == q // 20),  # chunks
        lambda q, k, begin: (k >= begin) & (k <= q + 1),  # the next token
        lambda q, k, begin: (k >= begin) & (k < q),  # without the token itself
        lambda q, k, begin: (k >= begin - 1) & (k <= q),  # the last token of the document before
    ],
)
def test_ends_of_documents_show_every_interval(keys_of, monkeypatch):
    """In long rows, with no other key of a query compared than a single one."""
    monkeypatch.setattr(integration.packing, "_ALL_PAIRS", 0)
    monkeypatch.setattr(integration.packing, "_KEYS", 1)
    first = torch.zeros(2, 100, dtype=torch.bool)
    first[0, [0, 17, 64]] = first[1, [0, 50, 51]] = True
    begin = torch.where(first, torch.arange(100), 0).cummax(1).values

    def differs(keys_of):
        return integration.packing.differs_from_packing(lambda row, head, q, k: keys_of(q, k, begin[row, q]), first).item()

    assert not differs(lambda q, k, begin: (k >= begin) & (k <= q))
    assert differs(keys_of)


def test_patterns_with_holes_in_long_rows(monkeypatch):
    monkeypatch.setattr(integration.packing, "_ALL_PAIRS", 0)
    n = 1000
    first = torch.arange(n)[None] == 0
    rng = torch.rand(n, n, generator=torch.Generator().manual_seed(0))
    for share in (0.1, 1e-3):
        hole = rng < share
        assert integration.packing.differs_from_packing(lambda row, head, q, k, hole=hole: (k <= q) & ~hole[q, k], first)


@pytest.mark.parametrize("name", patterns())
def test_layer_refuses_another_pattern(name):
    pattern, is_packed = patterns()[name]
    mask = integration.fastmax_mask(1, 12, 12, mask_function=pattern, allow_is_causal_skip=False)
    layer, q = llama().model.layers[0].self_attn, torch.randn(1, 4, 12, 6, dtype=torch.float64)
    if not is_packed:
        with pytest.raises(ValueError, match="takes the causal and the bidirectional mask, not that of this layer"):
            integration.fastmax_attention_forward(layer, q, q, q, mask)
        return
    o, _ = integration.fastmax_attention_forward(layer, q, q, q, mask)
    index = torch.arange(12)
    visible = pattern(torch.tensor(0), torch.tensor(0), index[:, None], index)
    s = q @ q.mT / 6**0.5
    w = torch.where(visible, 1 + s + s * s / 2, 0.0)
    torch.testing.assert_close(o.transpose(1, 2), w / w.sum(-1, keepdim=True) @ q)


ARGUMENTS_OF_OTHERS = {
    "a window": {"local_size": 20},
    "a function of numbers": {"use_vmap": True},
    "a bidirectional mask": {"allow_is_causal_skip": True},
    "padding": {"attention_mask": torch.ones(1, 12, dtype=torch.bool)},
    "a cache": {"kv_length": 15, "q_offset": 3},
    "a static cache": {"q_offset": torch.tensor(0)},
}


@pytest.mark.parametrize("changed", ARGUMENTS_OF_OTHERS.values(), ids=ARGUMENTS_OF_OTHERS)
def test_what_transformers_never_packs_is_not_compared(changed):
    pattern, _ = patterns()["packed"]
    sizes = {"batch_size": 1, "q_length": 12, "kv_length": 12, "q_offset": 0, "kv_offset": 0}
    arguments = sizes | {"mask_function": pattern, "attention_mask": None, "allow_is_causal_skip": False}
    assert integration.fastmax_mask(**arguments).refusal is None
    assert "takes the causal and the bidirectional mask" in integration.fastmax_mask(**arguments | changed).refusal


def test_another_pattern_in_a_compiled_layer():
    torch.compiler.reset()
    layer, q = llama().model.layers[0].self_attn, torch.randn(1, 4, 12, 6, dtype=torch.float64)

    @torch.compile(fullgraph=True, backend="eager")
    def attend(q, hidden):
        pattern = masks.and_masks(masks.causal_mask_function, lambda row, head, query, key: ~hidden[query, key])
        mask = integration.fastmax_mask(1, 12, 12, mask_function=pattern, allow_is_causal_skip=False)
        return integration.fastmax_attention_forward(layer, q, q, q, mask)[0]

    hidden = torch.zeros(12, 12, dtype=torch.bool)
    attend(q, hidden)
    hidden[10, 7] = True
    with pytest.raises(RuntimeError, match="takes the causal and the bidirectional mask"):
        attend(q, hidden)


def test_patterns_with_a_state():
    pattern, _ = patterns()["packed"]
    layer, q = llama().model.layers[0].self_attn, torch.randn(1, 4, 12, 6)
    keys = FastmaxCache(layer.config).update(q[:, :2], q[:, :2], 0)
    mask = integration.fastmax_mask(1, 12, 12, mask_function=pattern, allow_is_causal_skip=False)
    with pytest.raises(ValueError, match="without a cache .*; got a FastmaxCache"):
        integration.fastmax_attention_forward(layer, q, *keys, mask)
