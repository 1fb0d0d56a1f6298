"""The GPT that the language-model examples share: blocks of `fastmax.FastmaxSelfAttention` and an MLP, each RMS-normalised.

Positions are the rotary ones of the layer. `attention="softmax"` is the same model with softmax in every layer, `every=4` one
with softmax in every fourth. A layer of another kind comes in through `make_layer`.
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

# Parts of the layer, all switched off: attention, normalised q and k, and rotary positions are what is left.
PLAIN = {"decay": False, "exact_window": 0, "output_norm": False, "conv": 0, "output_gate": False}
OF_FASTMAX = {"exact_window", "p", "a0", "a1", "a2", "temperature", "normalize", "algorithm"}  # keywords that softmax refuses
LOGITS = 8192 * 50304  # so many are in memory together while a loss is computed: 1.5 GiB, and as much for their gradient


@dataclass
class GPTConfig:
    vocab_size: int = 256  # bytes
    block_size: int = 128  # tokens of a training window; no limit of the model
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    attention: str = "fastmax"  # or "softmax": of every layer
    every: int = 0  # layers every, 2 every, ..., counted from 1, are full softmax with the same parts; 0: none
    parts: dict = field(default_factory=dict)  # keywords of FastmaxSelfAttention; softmax layers leave OF_FASTMAX out


def make_layer(config: GPTConfig, index: int, layer: type[FastmaxSelfAttention] = FastmaxSelfAttention) -> FastmaxSelfAttention:
    """Attention of the block `index`, from 0: x (B, T, C) -> (B, T, C)."""
    full = config.every > 0 and (index + 1) % config.every == 0
    attention = "softmax" if full else config.attention
    left_out = (OF_FASTMAX if attention == "softmax" else set()) | ({"window"} if full else set())
    parts = {"longest_half_life": max(4, config.block_size)} | config.parts
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
        config: sizes, and the attention of the layers.
        make_layer: (config, index) -> module x (B, T, C) -> (B, T, C) that takes `cu_seqlens`, None or as in
            FastmaxSelfAttention. Its weights start as it made them; those of a FastmaxSelfAttention as GPT-2's.

    Raises:
        ValueError: `config.every` is no number of layers there are: no layer would be softmax.
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
        # GPT-2: projections into the residual stream start smaller, so that it does not grow with depth
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
            targets: (B, T), the tokens to be predicted; -100 where there is none.
            cu_seqlens: int32 (s + 1,), as in FastmaxSelfAttention: the T tokens of a batch of one are s sequences.
            reduction: of the losses, "mean", "sum" or "none".

        Returns:
            Logits (B, T, vocab); with targets the cross-entropy in nats, a number or (B, T), 0 where there is no target.
        """
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cu_seqlens=cu_seqlens)
        x = self.norm(x)
        return self.head(x) if targets is None else self._loss(x.flatten(0, 1), targets, reduction)

    def _loss(self, x: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Through the tokens in chunks, whose logits the backward computes again where there are more than LOGITS."""
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

    def init_states(self, batch: int, *, fold_every: int = 1, **options) -> list[SelfAttentionState]:
        """The state of each layer before any token; `options` are those of `FastmaxSelfAttention.init_state`, `fold_every` too,
        which softmax layers do not know."""
        of_fastmax = {"fold_every": fold_every}
        return [
            block.attn.init_state(batch, **options, **({} if block.attn.attention == "softmax" else of_fastmax))
            for block in self.blocks
        ]

    def prefill(self, tokens: Tensor, states: list[SelfAttentionState]) -> tuple[Tensor, list[SelfAttentionState]]:
        """tokens (B, T), which continue from `states` -> logits (B, T, vocab) and the states after them."""
        x, after = self.embedding(tokens), []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block.prefill(x, state)
            after.append(state)
        return self.head(self.norm(x)), after

    @torch.no_grad()
    def step_(self, tokens: Tensor, states: list[SelfAttentionState]) -> Tensor:
        """tokens (B, 1) -> logits (B, 1, vocab). The states take the token in place; a KeyValueCache, which grows, is exchanged
        in the list."""
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            if isinstance(states[index].attention, KeyValueCache):
                x, states[index] = block.prefill(x, states[index])
            else:
                x = block.step_(x, states[index])
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8, generator: torch.Generator | None = None):
        """tokens (B, T) -> (B, T + count), sampled."""
        logits, states = self.prefill(tokens, self.init_states(len(tokens)))
        for _ in range(count):
            token = sample(logits[:, -1], temperature, generator)
            tokens = torch.cat([tokens, token], dim=1)
            logits = self.step_(token, states)
        return tokens


def sample(logits: Tensor, temperature: float, generator: torch.Generator | None = None) -> Tensor:
    """logits (B, vocab) -> tokens (B, 1); the likeliest where the temperature is 0."""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)
