"""Decay gates and input gates: log_decay and log_input_gate from linear maps of x, and the biases for given half-lives."""

from __future__ import annotations

import math
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmax import eager
from fastmax.nn.plain import call_part, is_plain

SHORTEST_HALF_LIFE = 4.0  # tokens
STEADY_HALF_LIFE = 2.0**24  # tokens: hardly any decay over a context
INPUT_GATE_BOUND = 8.0  # of |log_input_gate|


def log_decay_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns log decays (b, n, heads) of x (b, n, embed_dim), in float32, or float64 for float64 x.

    Args:
        weight: (heads, embed_dim).
        bias: (heads,).
    """
    return F.logsigmoid(_per_head(x, weight, bias))


def log_input_gate_of(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns log input gates (b, n, heads), at most INPUT_GATE_BOUND in size. Arguments and dtype are as in `log_decay_of`."""
    return _log_input_gate(_per_head(x, weight, bias))


def log_gates_of(
    x: Tensor, decay: nn.Module | None, input_gate: nn.Module | None, heads: int
) -> tuple[Tensor | None, Tensor | None]:
    """Returns the results of `log_decay_of` and `log_input_gate_of` for two maps of x, None where there is none.

    Two linear maps become one, which reads x once and has one gradient of x. A map that is no plain `nn.Linear` is called.

    Raises:
        ValueError: a call returns something else than (b, n, heads).
    """
    if _is_linear(decay) and _is_linear(input_gate):
        weight, bias = (torch.cat([getattr(linear, name) for linear in (decay, input_gate)]) for name in ("weight", "bias"))
        of_decay, of_gate = _per_head(x, weight, bias).split([len(decay.weight), len(input_gate.weight)], dim=-1)
    else:
        of_decay, of_gate = _of_map("decay_proj", decay, x, heads), _of_map("input_gate_proj", input_gate, x, heads)
    return None if of_decay is None else F.logsigmoid(of_decay), None if of_gate is None else _log_input_gate(of_gate)


def _is_linear(module: nn.Module | None) -> TypeGuard[nn.Linear]:
    return module is not None and is_plain(module, nn.Linear) and module.bias is not None


def _of_map(name: str, module: nn.Module | None, x: Tensor, heads: int) -> Tensor | None:
    if module is None:
        return None
    if _is_linear(module):
        return _per_head(x, module.weight, module.bias)
    return call_part(name, module, x, (*x.shape[:2], heads)).to(eager.compute_dtype(x.dtype))


def _log_input_gate(y: Tensor) -> Tensor:
    return INPUT_GATE_BOUND * torch.tanh(y / INPUT_GATE_BOUND)


def _per_head(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    # The bias is added in float32: in bfloat16, half-lives of 977 and 1007 tokens are neighbours.
    dtype = eager.compute_dtype(x.dtype)
    return F.linear(x, weight).to(dtype) + bias.to(dtype)


def zero_gate(channels: int, heads: int, like: Tensor) -> nn.Linear:
    """Returns the linear map of a gate with weights and biases 0, of the dtype and on the device of `like`.

    It draws no random numbers, so a layer of a given seed has the other weights that it has without this map.
    """
    linear = nn.Linear(channels, heads, device="meta", dtype=like.dtype)
    linear.weight, linear.bias = (nn.Parameter(like.new_zeros(x.shape)) for x in (linear.weight, linear.bias))
    return linear


def biases_of_half_lives(heads: int, longest: float, shortest: float = SHORTEST_HALF_LIFE, steady: int = 0) -> Tensor:
    """Returns biases (heads,), float64, of a decay gate with weights 0 whose half-lives go from `shortest` to `longest` tokens.

    The half-lives are spaced geometrically. A single head has `longest`. The last `steady` heads have STEADY_HALF_LIFE instead.
    """
    others = heads - steady
    shortest = shortest if others > 1 else longest
    half_lives = torch.linspace(math.log(shortest), math.log(longest), others, dtype=torch.float64, device="cpu").exp()
    half_lives = torch.cat([half_lives, half_lives.new_full((steady,), STEADY_HALF_LIFE)])
    return -torch.expm1(math.log(2.0) / half_lives).log()  # sigmoid(bias) ** half_life = 1/2
