"""Hugging Face models whose tokens are spread over ranks by `context_parallel`, against one process."""

from functools import partial

import pytest
import torch
from processes import messages, run
from test_sharding import mesh_of
from torch.testing import assert_close

pytest.importorskip("fastmax.integrations.transformers")

from tiny_decoders import VOCABULARY, gpt2, llama

from fastmax.distributed import context_parallel

FAMILIES = {"llama": llama, "gpt2": gpt2}
OPTIONS = {"exact_window": 3, "log_decay": [-0.1, -0.2]}
N = 22


def inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (2, N), generator=generator), torch.arange(N).repeat(2, 1)


def check_model(group, family):
    model = FAMILIES[family](fastmax={"exact_window": 3} if family == "gpt2" else OPTIONS)
    ids, positions = inputs()
    expected = model(ids, use_cache=False).logits.detach()
    with context_parallel(mesh_of(group), buffers=[ids, positions, expected], buffer_seq_dims=[1, 1, 1]):
        assert ids.shape[1] < N
        assert_close(model(ids, position_ids=positions, use_cache=False).logits, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_process(family):
    run(check_model, 2, family)


def check_refusals(group):
    model, mixed = llama(fastmax=OPTIONS), llama(fastmax=OPTIONS | {"layers": [0]})
    found = []
    for layout, asked in (("contiguous", (model, False)), ("contiguous", (mixed, True)), ("zigzag", (model, True))):
        (ids, positions), (asked_model, given) = inputs(), asked
        with context_parallel(mesh_of(group), buffers=[ids, positions], buffer_seq_dims=[1, 1], layout=layout):
            options = {"position_ids": positions} if given else {}
            found += messages([lambda: asked_model(ids, use_cache=False, **options)])  # noqa: B023
    return found


def test_refuses_by_name():
    for of_positions, of_layers, of_documents in run(check_refusals, 2):
        assert "position_ids must be the positions of this rank's tokens in the whole sequence, got 0, 1, 2" in of_positions
        assert of_layers.startswith("LlamaAttention, a layer of softmax attention that the option layers leaves out, sees")
        assert "LlamaAttention got packed documents (position_ids that do not count on, or cu_seq_lens_q)" in of_documents


def check_padding(group):
    """Returns the logits of real tokens of left-padded rows, and the error of a gap that no rank sees whole."""
    model = llama(fastmax={"exact_window": 3})
    found = []
    for hidden in (slice(0, 4), slice(N // 2, N // 2 + 1)):
        ids, positions = inputs()
        mask = torch.ones_like(ids, dtype=torch.bool)
        mask[1, hidden] = False
        with context_parallel(mesh_of(group), buffers=[ids, positions, mask], buffer_seq_dims=[1, 1, 1], layout="contiguous"):
            call = partial(model, ids, position_ids=positions, attention_mask=mask, use_cache=False)
            found += messages([call]) if hidden.start else [call().logits.detach()]
    return found


def test_padding():
    left, between = zip(*run(check_padding, 2), strict=True)
    ids, positions = inputs()
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    expected = llama(fastmax={"exact_window": 3})(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits
    assert_close(torch.cat(left, 1)[mask.bool()], expected[mask.bool()], rtol=1e-10, atol=1e-10)
    assert all("padding between" in message for message in between)
