"""The GPT that the language-model examples share: pre-norm blocks of `fastmax.FastmaxSelfAttention` and an MLP.

Positions are the layer's rotary embeddings. `attention="softmax"` gives the same model with softmax in every layer, `every=3`
a hybrid with softmax in every third. Pass `make_layer` to train another attention layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fastmax import FastmaxSelfAttention
from fastmax.nn.key_value_cache import KeyValueCache
from fastmax.nn.self_attention_state import SelfAttentionState

# Switches the parts of the layer off. Attention, normalised q and k, and rotary positions remain.
PLAIN = {"decay": False, "exact_window": 0, "output_norm": False, "conv": 0, "output_gate": False}
OF_FASTMAX = {"exact_window", "p", "a0", "a1", "a2", "temperature", "normalize", "algorithm"}
OF_FASTMAX |= {"input_gate", "kept_keys"}  # and those before are not of softmax
WITHOUT_DECAY = {"decay": False, "steady_heads": 0}  # for the softmax layers of a hybrid (docs/far_keys.md)
LOGITS = 8192 * 50304  # at most this many in memory at a time in the loss: 1.5 GiB, and the same for their gradient


@dataclass
class GPTConfig:
    vocab_size: int = 256  # bytes
    block_size: int = 128  # tokens of a training window; the model accepts longer sequences
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    attention: str = "fastmax"  # or "softmax"; in every layer
    every: int = 0  # each `every`-th layer is softmax attention to all keys; 0: none
    parts: dict = field(default_factory=dict)  # keywords of FastmaxSelfAttention; softmax layers ignore those in OF_FASTMAX
    softmax_parts: dict = field(default_factory=dict)  # replace `parts` in the layers of `every`, as WITHOUT_DECAY does


def make_layer(config: GPTConfig, index: int, layer: type[FastmaxSelfAttention] = FastmaxSelfAttention) -> FastmaxSelfAttention:
    """Returns the attention of block `index`, counted from 0: x (B, T, C) -> (B, T, C)."""
    full = config.every > 0 and (index + 1) % config.every == 0
    attention = "softmax" if full else config.attention
    left_out = (OF_FASTMAX if attention == "softmax" else set()) | ({"window"} if full else set())
    parts = {"longest_half_life": max(4, config.block_size)} | config.parts | (config.softmax_parts if full else {})
    parts = {name: value for name, value in parts.items() if name not in left_out}
    return layer(config.n_embd, config.n_head, attention=attention, **parts)


class Block(nn.Module):
    def __init__(self, config: GPTConfig, attn: nn.Module):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.attn = attn
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd, bias=False),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd, bias=False),
        )

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cu_seqlens=cu_seqlens)
        return x + self.mlp(self.mlp_norm(x))

    def prefill(self, x: Tensor, state: SelfAttentionState) -> tuple[Tensor, SelfAttentionState]:
        y, state = self.attn(self.attn_norm(x), state)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), state

    def step_(self, x: Tensor, state: SelfAttentionState) -> Tensor:
        x = x + self.attn.step_(self.attn_norm(x), state)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """
    Args:
        config: sizes and attention.
        make_layer: function (config, index) that returns the attention of a block, a module x (B, T, C) -> (B, T, C) that
            takes `cu_seqlens`, None or as in FastmaxSelfAttention. The module initialises its weights; the output
            projection of a FastmaxSelfAttention is then scaled as in GPT-2.

    Raises:
        ValueError: `config.every` is larger than the number of layers, so no layer would be softmax.
    """

    def __init__(self, config: GPTConfig, make_layer: Callable[[GPTConfig, int], nn.Module] = make_layer):
        super().__init__()
        if not 0 <= config.every <= config.n_layer:
            raise ValueError(f"every must be from 0 to the {config.n_layer} layers, got {config.every}")
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, make_layer(config, index)) for index in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=1e-6)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)
        # As in GPT-2: smaller initial projections into the residual stream, so that its variance does not grow with depth
        into_residual = 1 / math.sqrt(2 * config.n_layer)
        for block in self.blocks:
            nn.init.normal_(block.mlp[0].weight, std=0.02)
            nn.init.normal_(block.mlp[2].weight, std=0.02 * into_residual)
            if isinstance(block.attn, FastmaxSelfAttention):
                with torch.no_grad():
                    block.attn.out_proj.weight.mul_(into_residual)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, *, cu_seqlens: Tensor | None = None, reduction: str = "mean"
    ) -> Tensor:
        """
        Args:
            tokens: (B, T).
            targets: (B, T), the tokens to predict; -100 is ignored.
            cu_seqlens: int32 (s + 1,), as in FastmaxSelfAttention: the row of T tokens (B = 1) packs s sequences.
            reduction: "mean", "sum" or "none".

        Returns:
            Logits (B, T, vocab) without targets, otherwise the cross-entropy in nats: a scalar, or (B, T) with "none", which
            is 0 where a target is ignored.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens=cu_seqlens)
        x = self.norm(x)
        return self.head(x) if targets is None else self._loss(x.flatten(0, 1), targets, reduction)

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Returns the cross-entropy of x (B * T, C). Above LOGITS it works in chunks, whose logits the backward recomputes."""
        chunk = max(1, LOGITS // self.config.vocab_size)
        if len(x) <= chunk:
            losses = self._losses(x, targets.flatten())
        else:
            pieces = zip(x.split(chunk), targets.flatten().split(chunk), strict=True)
            losses = torch.cat([checkpoint(self._losses, *piece, use_reentrant=False) for piece in pieces])
        if reduction == "none":
            return losses.view(targets.shape)
        return losses.sum() if reduction == "sum" else losses.sum() / (targets != -100).sum()

    def _losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), targets, reduction="none")

    def init_states(self, batch: int, *, flush_interval: int = 1, **options) -> list[SelfAttentionState]:
        """Returns the empty state of each layer.

        Args:
            batch: number of sequences.
            flush_interval, options: as in `FastmaxSelfAttention.init_state`. Softmax layers have no buffer.
        """
        layers = [block.attn for block in self.blocks]
        buffer = {"flush_interval": flush_interval}
        return [layer.init_state(batch, **options, **({} if layer.attention == "softmax" else buffer)) for layer in layers]

    def prefill(self, tokens: Tensor, states: list[SelfAttentionState]) -> tuple[Tensor, list[SelfAttentionState]]:
        """Returns logits (B, T, vocab) of tokens (B, T) that continue from `states`, and the new states."""
        x, after = self.embedding(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.prefill(x, state)
            after.append(state)
        return self.head(self.norm(x)), after

    @torch.no_grad()
    def step_(self, tokens: Tensor, states: list[SelfAttentionState]) -> Tensor:
        """Returns logits (B, 1, vocab) of tokens (B, 1). States are updated in place; in the list, a KeyValueCache, which
        grows, is replaced by a new one."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if isinstance(states[index].attention, KeyValueCache):
                x, states[index] = block.prefill(x, states[index])
            else:
                x = block.step_(x, states[index])
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8, generator: torch.Generator | None = None):
        """Samples `count` tokens after tokens (B, T); returns all (B, T + count)."""
        logits, states = self.prefill(tokens, self.init_states(len(tokens)))
        for _ in range(count):
            token = sample(logits[:, -1], temperature, generator)
            tokens = torch.cat([tokens, token], dim=1)
            logits = self.step_(token, states)
        return tokens


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """Samples tokens (B, 1) from logits (B, vocab); temperature 0 takes the most likely token."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
