"""Tiny causal models with attn_implementation="fastmax", in float64, and tokens for them."""

import torch
import transformers
from torch import Tensor

import fastmax.integrations.transformers  # noqa: F401  (the name "fastmax")

VOCABULARY, PAD = 40, 0


def llama(**options):
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,  # scores of order one, so that masks and scales matter
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    } | options
    return make(transformers.LlamaForCausalLM, transformers.LlamaConfig(**options))


def gpt2(**options):
    options = {
        "vocab_size": VOCABULARY,
        "n_embd": 24,
        "n_layer": 2,
        "n_head": 3,
        "n_positions": 64,
        "initializer_range": 0.3,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": None,
    } | options
    return make(transformers.GPT2LMHeadModel, transformers.GPT2Config(**options))


def make(kind, config):
    """A float64 model in eval mode, with attn_implementation="fastmax"."""
    torch.manual_seed(0)
    config._attn_implementation = "fastmax"
    return kind(config).double().eval()


def tokens(*shape) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def padding_mask(side: str | None, lengths=(9, 6, 1)) -> Tensor | None:
    """(batch, keys), 1 = takes part."""
    if side is None:
        return None
    position = torch.arange(max(lengths))
    rows = [position < length if side == "right" else position >= max(lengths) - length for length in lengths]
    return torch.stack(rows).long()


def run(model, ids, mask, **kwargs) -> Tensor:
    """Logits. Positions count from the first token that is no padding, as generate counts them."""
    if mask is not None:
        kwargs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return model(ids, **kwargs).logits
