"""Errors of outputs and gradients against the definition in float64, and the limit that is allowed for each."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.testing.evaluation import NUMBERS_PER_KEY, implementation, run
from fastmax.testing.reference import naive_attention, naive_softmax_attention

# Added to twice the error of the plain formula, which may be 0 by chance.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}

# Smallest limit for a random configuration. For half types: one rounding of an output to its dtype, which plain PyTorch avoids
# where few numbers are summed. For TF32: one rounding of each operand of two products, because cuBLAS does not use TF32 for the
# smallest sizes. For float64: another order of summation, because the definition is not more exact.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tf32": 2.0**-8, "float32": 1e-6, "float64": 1e-12}
# Relative error of weights per unit of the largest log-sum, by dtype. A float32 log-sum L has an error of up to 2^-24 L, and so
# has every weight exp(s - L) that is computed from it, in the backward of softmax and in the merge of an exact window. Plain
# PyTorch has no such numbers: its sums are relative to the largest score. With TF32 products the scores have larger errors.
ROUNDING_OF_LOG_SUM = {dtype: 2.0**-53 if dtype == torch.float64 else 2.0**-24 for dtype in FLOOR}
# The linear algorithm sums features that cancel (docs/algorithm.md). Terms up to this many times f do not raise the limit.
CANCELLATION = 16.0
# From this error on, the plain formula gives no limit: sums or weights left the range of float16. The limit is then this number
# of roundings.
PLAIN_FAILED = 0.1
ROUNDINGS_WHERE_PLAIN_FAILED = 8


class Errors(NamedTuple):
    """Relative errors of one tensor against float64; `tensor` is "o", "lse", or the name of an input for its gradient."""

    tensor: str
    custom: float
    autograd: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether both errors are within the limit; False if one is NaN."""
        return self.custom <= self.allowed and self.autograd <= self.allowed


def measure(tensors: dict[str, Tensor], options: dict, rounding: float | None = None, softmax: bool = False) -> list[Errors]:
    """Returns the errors of the outputs and of the gradient of each floating-point input.

    Args:
        tensors: q, k, v (4-d), and optionally `rpe_matrix`, `drop_noise`, `attention_mask`, `log_decay`, `log_input_gate` and
            `cu_seqlens`.
        options: the other arguments of `fastmax_attention` (or `flash_attention`), without `use_custom_gradient`.
        rounding: the smallest limit (see ROUNDING). It also determines the limit where the plain formula failed.
        softmax: whether to check `flash_attention`.
    """
    q = tensors["q"]
    plain_options = {name: value for name, value in options.items() if name != "algorithm"}
    by_definition, checked = naive_softmax_attention if softmax else naive_attention, implementation(softmax)
    exact = run(by_definition, tensors, plain_options, torch.float64)
    plain = run(by_definition, tensors, plain_options)
    custom = run(checked, tensors, {**options, "use_custom_gradient": True})
    autograd = run(checked, tensors, {**options, "use_custom_gradient": False})
    of_log_sums = rounding_of_scores(q) * largest_log_sum(tensors, plain_options, softmax)
    of_outputs = lost_to_rounded_outputs(tensors, plain_options, softmax, exact["o"])
    natural = math.sqrt(exact["o"].numel())  # the expected norm of grad_o
    longest = tensors["v"].double().norm(dim=-1).max().item() if tensors["v"].numel() else 1.0

    def size(name: str) -> float:
        """Returns the size that errors are relative to: the norm of the tensor, or if the terms grad_o . v cancel nearly
        completely (few keys, or an exact value of zero) the size of those terms."""
        norm = exact[name][exact[name].isfinite()].norm().item()
        if norm <= 1e-10 * natural:
            return max(natural * longest, 1.0)
        return max(norm, 0.1 * natural * longest) if name in "qk" and tensors["k"].shape[2] <= 2 else norm

    def error(result: dict[str, Tensor], name: str) -> float:
        x, y = result[name].double(), exact[name]
        return torch.where(x == y, 0.0, x - y).norm().item() / size(name)  # both are -inf if there is no key

    def allowed(name: str) -> float:
        plain_error = error(plain, name)
        dtype = torch.finfo(q.dtype)  # subnormal numbers are rounded to multiples of the smallest one
        more = 0.5 * dtype.smallest_normal * dtype.eps * math.sqrt(exact[name].numel()) / size(name)
        if name != "lse":
            more += of_log_sums
        more += 2.0 * of_outputs.get(name, 0.0) / size(name)
        if rounding is None:
            return 2.0 * plain_error + FLOOR[q.dtype] + more
        if not plain_error < PLAIN_FAILED:
            return ROUNDINGS_WHERE_PLAIN_FAILED * rounding + more
        return max(2.0 * plain_error + FLOOR[q.dtype], rounding) + more

    return [Errors(name, error(custom, name), error(autograd, name), allowed(name)) for name in exact]


def lost_to_rounded_outputs(tensors: dict[str, Tensor], options: dict, softmax: bool, o: Tensor) -> dict[str, float]:
    """Returns the error of the gradients, by name, that results from saving o in a half dtype; Frobenius norm.

    A rounding error of a row of o changes grad_o . o. This change acts on the gradients like a gradient of the row's log-sum of
    weights. If one key has nearly all of the weight, the true gradient is nearly zero and the error dominates.
    """
    dtype = tensors["q"].dtype
    if dtype not in (torch.float16, torch.bfloat16) or not o.numel():
        return {}
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    leaves = {name: wide[name].requires_grad_() for name in ("q", "k", "rpe_matrix", *NUMBERS_PER_KEY) if name in wide}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    signs = torch.randint(2, lse.shape, generator=torch.Generator().manual_seed(0)).to(lse) * 2 - 1
    changes = 0.25 * torch.finfo(dtype).eps * o.norm(dim=-1) * signs  # half of the largest rounding of each element
    seen = lse.isfinite()
    grads = torch.autograd.grad((lse[seen] * changes[seen]).sum(), list(leaves.values()), materialize_grads=True)
    return {name: x.norm().item() for name, x in zip(leaves, grads, strict=True)}


def rounding_of_scores(q: Tensor) -> float:
    """Returns the relative error of a score in an exponential, or of the log of a sum."""
    if q.is_cuda and q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        return 2.0**-11
    return ROUNDING_OF_LOG_SUM[q.dtype]


def largest_log_sum(tensors: dict[str, Tensor], options: dict, softmax: bool) -> float:
    """Returns the largest magnitude of a row's log-sum of weights, by definition; 0 if no weight is an exponential."""
    if not softmax and not options.get("exact_window"):
        return 0.0
    wide = {name: x.double() if x.is_floating_point() else x for name, x in tensors.items()}
    by_definition = naive_softmax_attention if softmax else naive_attention
    lse = by_definition(**wide, **(options if softmax else {**options, "return_lse": True}))[1]
    lse = lse[lse.isfinite()]
    return lse.abs().max().item() if lse.numel() else 0.0


def cancellation(tensors: dict[str, Tensor], options: dict) -> float:
    """Returns how many times larger the terms that the linear algorithm sums are than f(q.k), for typical rows. 1 for the
    quadratic algorithm."""
    options = {"algorithm": "auto", "p": 2, "temperature": 1.0, "lim": 1.0} | options
    if options["algorithm"] == "quadratic":
        return 1.0
    d = tensors["q"].shape[-1]
    q, k = (tensors[name].double().square().sum(-1).mean().sqrt().item() for name in "qk")
    if options.get("normalize"):
        q, k = min(q, options["lim"]), min(k, options["lim"])
    if "rpe_matrix" in options:  # sinusoidal: q and its rotation, k and d / 2 pairs of cosine and sine
        q, k = q * math.sqrt(2.0), math.hypot(k, math.sqrt(d / 2))
    s = q * k / options["temperature"]
    a0, a1, a2 = options.get("a0", 1.0), options.get("a1", 1.0), options.get("a2", 0.5) if options["p"] == 2 else 0.0
    return (a0 + abs(a1) * s + a2 * s * s) / (a0 + a2 * s * s / d)
