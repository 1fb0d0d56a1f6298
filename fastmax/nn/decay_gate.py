"""The gate by which keys fade, logsigmoid of a linear map: what it computes, and the half-lives it starts from."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST_HALF_LIFE = 4.0  # tokens


def log_decay_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (b, n, embed_dim), weight (heads, embed_dim), bias (heads,) -> (b, n, heads) in float32, of float64 x in float64."""
    # The bias is added in float32: bfloat16 has no half-life between 977 and 1007 tokens.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.logsigmoid(F.linear(x, weight).to(dtype) + bias.to(dtype))


def biases_of_half_lives(heads: int, longest: float, shortest: float = SHORTEST_HALF_LIFE) -> Tensor:
    """Biases (heads,), float64, that give half-lives in tokens spread geometrically from `shortest` to `longest`, or `longest`
    to a single head, where the weights are 0."""
    shortest = shortest if heads > 1 else longest
    half_lives = torch.linspace(math.log(shortest), math.log(longest), heads, dtype=torch.float64, device="cpu").exp()
    return -torch.expm1(math.log(2.0) / half_lives).log()  # sigmoid(bias) ** half_life = 1/2
