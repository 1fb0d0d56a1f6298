"""Decay gate: log decays as the logsigmoid of a linear map, and the biases for given half-lives."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SHORTEST_HALF_LIFE = 4.0  # tokens


def log_decay_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns log decays (b, n, heads) of x (b, n, embed_dim), in float32, or float64 for float64 x.

    Args:
        weight: (heads, embed_dim).
        bias: (heads,).
    """
    # The bias is added in float32: in bfloat16, half-lives of 977 and 1007 tokens are neighbours.
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return F.logsigmoid(F.linear(x, weight).to(dtype) + bias.to(dtype))


def biases_of_half_lives(heads: int, longest: float, shortest: float = SHORTEST_HALF_LIFE) -> Tensor:
    """Returns the biases (heads,), float64, of a gate with weights 0 whose half-lives go from `shortest` to `longest` tokens.

    The half-lives are spaced geometrically. A single head has `longest`.
    """
    shortest = shortest if heads > 1 else longest
    half_lives = torch.linspace(math.log(shortest), math.log(longest), heads, dtype=torch.float64, device="cpu").exp()
    return -torch.expm1(math.log(2.0) / half_lives).log()  # sigmoid(bias) ** half_life = 1/2
