"""Tiny causal models with attn_implementation="fastmax", in float64, and tokens for them."""

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import eager_mask

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


def qwen3(**options):
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        initializer_range=0.3, pad_token_id=PAD, bos_token_id=None, eos_token_id=None, **{"num_hidden_layers": 2} | options,
    )  # fmt: skip
    return make(transformers.Qwen3ForCausalLM, config)


HYBRID = {"Gemma2": {"attn_logit_softcapping": None}, "Gemma3": {}, "Olmo3": {}, "Cohere2": {}}


def hybrid(name, layer_types, **options):
    config_name = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    config = getattr(transformers, config_name)(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_hidden_layers=len(layer_types), num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, sliding_window=4, layer_types=layer_types, initializer_range=0.3, pad_token_id=PAD,
        bos_token_id=None, eos_token_id=None, **HYBRID[name] | options,
    )  # fmt: skip
    return make(getattr(transformers, f"{name}ForCausalLM"), config)


def mistral(**options):
    options = {"sliding_window": 4, "num_hidden_layers": 1} | options
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3, pad_token_id=PAD, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return make(transformers.MistralForCausalLM, config)


def polynomial_forward(module, query, key, value, attention_mask, scaling=None, **kwargs) -> tuple[Tensor, None]:
    """Computes transformers' eager attention with 1 + s + s^2 / 2 in place of exp(s), in all layers or in those that the
    configuration names; attention_mask (b, 1, n, m), 0 = visible."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    s = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    layers = (getattr(module.config, "fastmax", None) or {}).get("layers", "all")
    if layers == "global":
        layers = [index for index, kind in enumerate(module.config.layer_types) if kind == "full_attention"]
    w = 1 + s + s * s / 2 if layers == "all" or module.layer_idx in layers else s.exp()
    if attention_mask is not None:
        w = torch.where(attention_mask == 0, w, 0.0)
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0.0, w / z) @ value
    return o.transpose(1, 2), None


transformers.AttentionInterface.register("polynomial", polynomial_forward)
transformers.AttentionMaskInterface.register("polynomial", eager_mask)


def make(kind, config):
    """Returns a float64 model in eval mode, with attn_implementation="fastmax"."""
    torch.manual_seed(0)
    config._attn_implementation = "fastmax"
    return kind(config).double().eval()


def softmax_attention(q, k, v) -> Tensor:
    """Computes softmax attention written out, for modules of other files."""
    return (q @ k.mT).softmax(-1) @ v


def tokens(*shape) -> Tensor:
    return torch.randint(1, VOCABULARY, shape)


def padding_mask(side: str | None, lengths=(9, 6, 1)) -> Tensor | None:
    """Returns a mask (batch, keys), 1 = real token."""
    if side is None:
        return None
    position = torch.arange(max(lengths))
    rows = [position < length if side == "right" else position >= max(lengths) - length for length in lengths]
    return torch.stack(rows).long()


def run(model, ids, mask, **kwargs) -> Tensor:
    """Returns logits. Positions count from the first real token, as in generate."""
    if mask is not None:
        kwargs |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    return model(ids, **kwargs).logits


def assert_same_model(a, b, ids) -> None:
    """Checks that parameters and buffers are equal bit by bit, and that logits are close: sums depend on how memory is
    aligned."""
    torch.testing.assert_close(a.state_dict(), b.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(a(ids).logits, b(ids).logits)


def gradients(model, ids, mask) -> tuple[Tensor, ...]:
    """Returns the gradient of the loss by every parameter."""
    return torch.autograd.grad(model(ids, attention_mask=mask, labels=ids, use_cache=False).loss, tuple(model.parameters()))


def checkpointed(model):
    """Returns the model after turning on gradient checkpointing."""
    model.train()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # its name since 5.2x
    return model


def losses_of_training(model, ids, steps: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
