"""The least time that a call can take on an H200: floating-point operations and bytes, over rates measured there."""

from __future__ import annotations

import torch

from benchmarks.registry import DTYPES, Case
from fastmax.traffic import chunk_length

COPY = 4.25e12  # bytes/s, read plus written
MATMUL = {"bf16": 780e12, "fp16": 780e12, "tf32": 400e12, "fp32": 400e12 / 3}  # flop/s; fp32 is three TF32 products
BACKWARD = 2.5  # times the forward's flop: five products, or five passes over the features, instead of two

# Queries per state of the linear kernels in bf16, p = 2: a longer chunk trades state traffic for flop.
CHUNK = {d: chunk_length(d, torch.bfloat16) for d in (32, 64, 96, 128)}
CHUNK_P1 = 128


def attention_ms(case: Case, algorithm: str, p: int, mode: str) -> float:
    """Floor of "fwd" or "fwd+bwd". For "auto" the smaller of both algorithms."""
    if algorithm == "auto":
        return min(attention_ms(case, choice, p, mode) for choice in ("quadratic", "linear"))
    d, rows = case.head_dim, case.batch * case.heads * case.tokens
    size = DTYPES[case.dtype].itemsize
    snapshots = 0.0
    if algorithm == "quadratic":
        flop = (2 if case.causal else 4) * case.tokens * d
    elif p == 2:
        features, chunk = d * (d + 1) / 2, CHUNK.get(d, 256)
        flop = 4 * features * d + (2 * chunk * d if case.causal else 0)
        snapshots = 2 * size * features * d / chunk if case.causal else 0.0
    else:
        flop = 4 * d * d + (2 * CHUNK_P1 * d if case.causal else 0)

    def ms(flop: float, tensors: int, states: int) -> float:
        return 1e3 * rows * max(flop / MATMUL[case.dtype], (tensors * size * d + states * snapshots) / COPY)

    forward = ms(flop, tensors=4, states=1)  # q, k, v, o
    return forward if mode == "fwd" else forward + ms(BACKWARD * flop, tensors=8, states=2)  # those, and a gradient for each


def copy_ms(moved: int) -> float:
    """`moved` counts bytes read and bytes written."""
    return 1e3 * moved / COPY
