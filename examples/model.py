"""The GPT that the language-model examples share: nanoGPT's shape, with RoPE and RMS-normalised queries and keys.

With `parts` the attention of a block is the layer `fastmax.FastmaxSelfAttention`, for Fastmax and for softmax alike. Without,
it is one replaceable module and nothing else: `block.attn.attend` takes q, k, v of shape (B, nh, T, hd) and returns the same
shape, causally. It is `SoftmaxAttention` or `fastmax.FASTMultiHeadAttention`, neither of which has weights: exchanging them
keeps every parameter of the model.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rope import rope
from torch import Tensor, nn

import fastmax


@dataclass
class GPTConfig:
    vocab_size: int = 256  # bytes
    block_size: int = 128
    n_layer: int = 4
    n_head: int = 4
    n_embd: int = 128
    attention: str = "fastmax"  # or "softmax"
    p: int = 2  # degree of Fastmax's polynomial
    temperature: float | None = 1.0  # of p = 2, None: sqrt(head_dim); see make_attention
    normalize: bool | str = False  # of p = 2
    qk_norm: bool = True
    rope: bool = True
    custom_gradient: bool = True
    parts: bool = False  # decay, short convolution, norm and gate of the output, and for Fastmax an exact window
    exact_window: int = 16  # of Fastmax with parts


class SoftmaxAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def make_attention(config: GPTConfig) -> nn.Module:
    """The causal attention that `config` names, on ready-made heads.

    A polynomial grows slowly, so Fastmax needs larger scores than softmax to look as sharply: p = 2 starts best without the
    usual division by sqrt(head_dim). For p = 1 the weight 1 + s is positive only while s > -1: rows in the unit ball keep it
    so, and a temperature a little above 1 keeps the denominator away from zero.
    """
    if config.attention == "softmax":
        return SoftmaxAttention()
    if config.p == 2:
        temperature = config.temperature or math.sqrt(config.n_embd / config.n_head)
        options = {"p": 2, "temperature": temperature, "normalize": config.normalize}
    else:
        options = {"p": 1, "normalize": "token", "temperature": 1.1}
    return fastmax.FASTMultiHeadAttention(config.custom_gradient, mask=True, **options)


def make_layer(config: GPTConfig) -> nn.Module:
    """x (B, T, C) -> (B, T, C)."""
    if not config.parts:
        return CausalSelfAttention(config)
    options = {}
    if config.attention == "fastmax":
        options = {"exact_window": config.exact_window, "p": config.p}
        if config.p == 2:
            temperature = config.temperature or math.sqrt(config.n_embd / config.n_head)
            options |= {"temperature": temperature, "normalize": config.normalize}
    return fastmax.FastmaxSelfAttention(
        config.n_embd,
        config.n_head,
        attention=config.attention,
        qk_norm=config.qk_norm,
        rope=config.rope,
        longest_half_life=config.block_size,
        use_custom_gradient=config.custom_gradient,
        **options,
    )


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        head_dim = config.n_embd // config.n_head
        self.n_head, self.rope = config.n_head, config.rope
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd, bias=False)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.q_norm = nn.RMSNorm(head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(head_dim) if config.qk_norm else nn.Identity()
        self.attend = make_attention(config)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)  # 3 x (B, nh, T, hd)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rope:
            q, k = rope(q), rope(k)
        return self.proj(self.attend(q, k, v).transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.n_embd)
        self.attn = make_layer(config)
        self.mlp_norm = nn.LayerNorm(config.n_embd)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd), nn.GELU(), nn.Linear(4 * config.n_embd, config.n_embd)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.endswith("decay_proj.weight"):
                # GPT-2: residual projections start smaller, so that the residual stream does not grow with depth
                residual = name.endswith((".proj.weight", "out_proj.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer) if residual else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens (B, T) -> logits (B, T, vocab); with targets (B, T), the mean cross-entropy in nats."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8, generator: torch.Generator | None = None):
        """tokens (B, T) -> (B, T + count), sampled."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.block_size :])[:, -1] / temperature
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, token], dim=1)
        return tokens
