"""The least time that a call or a kernel can take: floating-point operations and bytes, over rates measured on an H200.

This is a model, not a measurement. A multiply-add counts as two operations, and the masked half of a causal product is left
out. Every operand is read once and every result is written once; Nsight Compute's DRAM counters show what is read again. The
products of this project's kernels are those of docs/cuda.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

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


class Sizes(NamedTuple):
    """Sizes of one call, over all heads."""

    rows: int
    head_dim: int
    tensor: float  # bytes of q, of k, of v, of o
    summed: float  # bytes of those rows of k, or of v, that states of p = 2 are sums of
    product: float  # flop of one product with an (n, n) matrix
    state: float  # flop of adding all rows to the states of p = 2, or of reading them
    own_chunk: float  # flop of one product with an own, causal chunk
    snapshots: float  # bytes of all states of p = 2
    state1: float  # the same of p = 1


class Work(NamedTuple):
    flop: float | None
    bytes: float | None


def sizes(case: Case) -> Sizes:
    rows, d = case.batch * case.heads * case.tokens, case.head_dim
    native = max(32, d)  # head_dim 16 runs as 32
    chunk = CHUNK.get(native, case.tokens)
    chunks = max(0, -(-case.tokens // chunk) - 1) if case.causal else 1  # with a state before them
    share = chunks * chunk / case.tokens if case.causal else 1.0  # of the rows in a state, and about of those that read one
    return Sizes(
        rows,
        d,
        tensor=rows * d * DTYPES[case.dtype].itemsize,
        product=2 * rows * case.tokens * d * (0.5 if case.causal else 1.0),
        summed=share * rows * d * DTYPES[case.dtype].itemsize,
        state=2 * share * rows * native * native * (native + 8) / 2,
        own_chunk=rows * chunk * native if case.causal else 0.0,
        snapshots=case.batch * case.heads * chunks * (native * (native + 8) / 2 + 2 * native) * native * 2,
        state1=2 * rows * d * d,
    )


# Name of a kernel -> work of all its launches in one forward, and in one backward (None: it is not there). z, e and their like
# are 4 bytes a row.
_Passes = tuple[Callable[[Sizes], Work] | None, Callable[[Sizes], Work] | None]
_QUADRATIC: dict[str, _Passes] = {
    r"quadratic_fwd\w*_kernel|flash_fwd\w*_kernel|sdpa.*fprop": (
        lambda s: Work(2 * s.product, 4 * s.tensor + 4 * s.rows),
        None,
    ),
    r"quadratic_bwd_kv(_pair)?_kernel": (None, lambda s: Work(4 * s.product, 6 * s.tensor + 16 * s.rows)),
    r"quadratic_bwd_q(_pair)?_kernel": (None, lambda s: Work(3 * s.product, 5 * s.tensor + 16 * s.rows)),
    # Beside it what is added to grad_q in fp32 is another 4 bytes an element and block of keys, in L2 (not counted).
    r"quadratic_fused_bwd(_narrow)?_sm90_kernel": (None, lambda s: Work(5 * s.product, 7 * s.tensor + 16 * s.rows)),
    r"quadratic_round_grad_q_sm90_kernel": (None, lambda s: Work(None, 3 * s.tensor)),  # fp32 sums to results
    r"quadratic_bwd_sm90_kernel<.*, \(?(bool\))?(false|0)>": (None, lambda s: Work(3 * s.product, 5 * s.tensor + 16 * s.rows)),
    r"quadratic_bwd_sm90_kernel": (None, lambda s: Work(4 * s.product, 6 * s.tensor + 16 * s.rows)),  # owns keys
    # Of q and k together, with a factor for each row.
    r"normalize_tokens_kernel": (lambda s: Work(None, 4 * s.tensor + 8 * s.rows), None),
    r"normalize_tokens_backward_kernel": (None, lambda s: Work(None, 6 * s.tensor + 8 * s.rows)),
    r"merge_kernel": (lambda s: Work(None, 3 * s.tensor + 16 * s.rows), None),
    r"row_score_kernel": (None, lambda s: Work(None, 2 * s.tensor + 20 * s.rows)),
    r"flash_bwd_dq_dk_dv\w*_kernel|sdpa.*bprop": (None, lambda s: Work(5 * s.product, 7 * s.tensor + 8 * s.rows)),
}
# p = 2. The backward sums two kinds of states (k with v, q with g), reads one for grad_v, and takes grad_q and grad_k.
# Where there are few heads, rows are added to states twice (docs/cuda.md), which is not counted.
_LINEAR: dict[str, _Passes] = {
    r"linear_state(_sm90)?_kernel": (
        lambda s: Work(s.state, 2 * s.summed + s.snapshots),
        lambda s: Work(2 * s.state, 2 * (2 * s.summed + s.snapshots)),
    ),
    r"linear_read_kernel": (
        lambda s: Work(s.state + 2 * s.own_chunk, 4 * s.tensor + s.snapshots + 4 * s.rows),
        lambda s: Work(s.state + 2 * s.own_chunk, 4 * s.tensor + s.snapshots),
    ),
    r"linear_grad_kernel": (
        None,
        lambda s: Work(2 * (s.state + 3 * s.own_chunk), 2 * (5 * s.tensor + s.snapshots + 4 * s.rows)),
    ),
    # On Hopper: o, and of head dim 128 grad_v; grad_q (0), grad_k (1), or grad_k and grad_v (2) from one load of the states.
    r"linear_read_sm90_kernel<\d+, (\(bool\))?(false|0)\b": (
        lambda s: Work(s.state + 2 * s.own_chunk, 4 * s.tensor + s.snapshots + 4 * s.rows),
        None,
    ),
    r"linear_read_sm90_kernel<\d+, (\(bool\))?(true|1)\b": (
        None,
        lambda s: Work(s.state + 2 * s.own_chunk, 4 * s.tensor + s.snapshots),
    ),
    r"linear_grad_sm90_kernel<\d+, [^,]*\)[01]\b": (
        None,
        lambda s: Work(s.state + 3 * s.own_chunk, 5 * s.tensor + s.snapshots + 4 * s.rows),
    ),
    r"linear_grad_sm90_kernel<\d+, [^,]*\)2\b": (
        None,
        lambda s: Work(2 * s.state + 4 * s.own_chunk, 6 * s.tensor + s.snapshots + 4 * s.rows),
    ),
    r"linear_prepare_kernel": (None, lambda s: Work(None, 3 * s.tensor + 8 * s.rows)),
}
# p = 1: states only, without the products of rows with their own step. Parts are summed where few heads leave room for them.
_LINEAR1: dict[str, _Passes] = {
    r"linear1_walk_kernel": (
        lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows),
        lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows),
    ),
    # On Hopper: o (0), grad_q with g made on the way (1), grad_k and grad_v (2). Every block of a group makes the states.
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)0\b": (lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows), None),
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)1\b": (None, lambda s: Work(2 * s.state1, 5 * s.tensor + 12 * s.rows)),
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)2\b": (None, lambda s: Work(3 * s.state1, 6 * s.tensor + 8 * s.rows)),
    r"linear1_pair_walk_kernel": (None, lambda s: Work(3 * s.state1, 6 * s.tensor + 4 * s.rows)),
    r"linear1_sums(_sm90)?_kernel": (
        lambda s: Work(s.state1, 2 * s.tensor),
        lambda s: Work(2 * s.state1, 4 * s.tensor),
    ),
    r"linear_prepare_kernel": (None, lambda s: Work(None, 3 * s.tensor + 8 * s.rows)),
}


def work(name: str, case: Case, p: int | None, mode: str) -> Work | None:
    """Work of all launches of a kernel in one call of mode "fwd", "fwd+bwd" or "train" (per layer).

    None for unknown kernels, and for linear ones in dtypes and head dims whose states have another layout.

    Args:
        p: degree of the polynomial; 2 for softmax, None for the attention of other libraries.
    """
    if p is None:
        return None
    tables = [_QUADRATIC]
    if case.dtype == "bf16" and max(32, case.head_dim) in CHUNK:
        tables.append(_LINEAR1 if p == 1 else _LINEAR)
    for table in tables:
        for pattern, passes in table.items():
            if re.search(pattern, name):
                done = [of(sizes(case)) for of in passes[: 1 if mode == "fwd" else 2] if of is not None]
                return Work(*(None if None in part else sum(part) for part in zip(*done, strict=True))) if done else None
    return None
