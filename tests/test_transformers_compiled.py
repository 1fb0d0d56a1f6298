"""Hugging Face models under `torch.compile` with its default backend, Inductor, on a CPU."""

import copy

import pytest
import torch

from fastmax.core import validation

transformers = pytest.importorskip("transformers")

from common import torch_warns  # noqa: E402
from tiny_decoders import gpt2, llama, padding_mask, qwen3, tokens  # noqa: E402
from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: E402
from torch._inductor.exc import InvalidCxxCompiler  # noqa: E402
from transformers import DynamicCache  # noqa: E402

from fastmax.integrations.transformers import FastmaxCache  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), torch_warns]  # remarks of transformers on small models

CLOSE = {"rtol": 1e-4, "atol": 1e-5}  # Llama and Qwen3 normalise in float32
AGAIN = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]).expand(3, -1)  # positions of two packed documents


@pytest.fixture(autouse=True)
def compiler(fresh_dynamo):
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        pytest.skip(f"Inductor needs a C++ compiler: {error}")


def small(family):
    return family(num_hidden_layers=1)


@pytest.mark.parametrize("family", [qwen3, gpt2])
def test_default_call(family):
    model, ids = small(family), tokens(3, 9)
    with torch.no_grad():
        actual, expected = torch.compile(model, fullgraph=True)(ids), model(ids)
    torch.testing.assert_close(actual.logits, expected.logits, **CLOSE)
    assert actual.past_key_values.get_seq_length() == 9


def test_attention_mask_and_labels():
    model, ids, mask = small(llama), tokens(3, 9), padding_mask("right")
    given = {"attention_mask": mask, "position_ids": torch.arange(9).expand(3, -1), "labels": ids}
    compiled = torch.compile(model)
    with torch.no_grad():
        actual, expected = compiled(ids, **given), model(ids, **given)
        torch.testing.assert_close((actual.loss, actual.logits), (expected.loss, expected.logits), **CLOSE)
        with pytest.raises(RuntimeError, match="attn_implementation='fastmax' takes packed sequences"):
            compiled(ids, attention_mask=torch.ones_like(mask), position_ids=AGAIN, labels=ids)


def test_training():
    model, ids = small(llama), tokens(3, 9)
    of_loss, of_expected = (
        torch.autograd.grad(called(ids, labels=ids).loss, tuple(model.parameters())) for called in (torch.compile(model), model)
    )
    torch.testing.assert_close(of_loss, of_expected, **CLOSE)


@pytest.mark.parametrize(
    "family, kind",
    [(gpt2, DynamicCache), (llama, FastmaxCache)],  # the last in 20 graphs
)
def test_step_with_a_cache(family, kind):
    model, ids, mask = small(family), tokens(3, 9), padding_mask("left")
    cache = kind(config=model.config)
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], past_key_values=cache)
        same, other = copy.deepcopy(cache), copy.deepcopy(cache)
        expected = model(ids[:, 8:], attention_mask=mask, past_key_values=cache).logits
        compiled = torch.compile(model)
        torch.testing.assert_close(compiled(ids[:, 8:], attention_mask=mask, past_key_values=same).logits, expected, **CLOSE)
        if kind is FastmaxCache:
            with pytest.raises(RuntimeError, match="attention_mask differs from that of earlier calls"):
                compiled(ids[:, 8:], attention_mask=torch.ones_like(mask), past_key_values=other)


def test_every_message_compiles():
    def check(x):
        validation.check_in_graph((x > 0).all(), 'a "quoted" word, a \\back\\slash\nand a line')
        return x + 1

    compiled = torch.compile(check, fullgraph=True)
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match="a 'quoted' word, a /back/slash and a line"):
        compiled(torch.zeros(2))
