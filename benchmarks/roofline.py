"""The least time that a call or a kernel can take: floating-point operations and bytes, divided by rates measured on an H200.

This is a model, not a measurement. A multiply-add counts as two operations, and the masked half of a causal product does not
count. Every operand is read once and every result is written once; Nsight Compute's DRAM counters show repeated reads. The
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
BACKWARD = 2.5  # flop of the backward over the forward's: five products, or five passes over the features, instead of two

# Queries per state of the linear kernels in bf16, p = 2: a longer chunk trades state traffic for flop.
CHUNK = {d: chunk_length(d, torch.bfloat16) for d in (32, 64, 96, 128)}
CHUNK_P1 = 128


def attention_ms(case: Case, algorithm: str, p: int, mode: str) -> float:
    """Returns the floor of "fwd" or "fwd+bwd". For "auto" it is the smaller one of both algorithms."""
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
    return forward if mode == "fwd" else forward + ms(BACKWARD * flop, tensors=8, states=2)  # the same and their gradients


def copy_ms(moved: int) -> float:
    """Returns the time of moving `moved` bytes, read and written together."""
    return 1e3 * moved / COPY


class Sizes(NamedTuple):
    """Sizes of one call, over all heads."""

    rows: int
    head_dim: int
    tensor: float  # bytes of one of q, k, v and o
    summed: float  # bytes of the rows of k, or of v, that are added to states (p = 2)
    product: float  # flop of one product with an (n, n) matrix
    state: float  # flop of adding all rows to states (p = 2), or of reading states
    own_chunk: float  # flop of one product of causal pairs within chunks
    snapshots: float  # bytes of all states (p = 2)
    state1: float  # flop of adding all rows to states (p = 1), or of reading states


class Work(NamedTuple):
    """Work of a kernel; None: not modelled."""

    flop: float | None
    bytes: float | None


def sizes(case: Case) -> Sizes:
    """Returns the sizes of a case."""
    rows, d = case.batch * case.heads * case.tokens, case.head_dim
    native = max(32, d)  # head_dim 16 runs as 32
    chunk = CHUNK.get(native, case.tokens)
    chunks = max(0, -(-case.tokens // chunk) - 1) if case.causal else 1  # those with a state before them
    share = chunks * chunk / case.tokens if case.causal else 1.0  # of the rows added to a state, or that read one (about)
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


# Name of a kernel (pattern) -> work of all its launches in one forward, and in one backward (None: it does not run). z, e and
# similar numbers are 4 bytes per row.
_Passes = tuple[Callable[[Sizes], Work] | None, Callable[[Sizes], Work] | None]
_QUADRATIC: dict[str, _Passes] = {
    r"quadratic_fwd\w*_kernel|flash_fwd\w*_kernel|sdpa.*fprop": (
        lambda s: Work(2 * s.product, 4 * s.tensor + 4 * s.rows),
        None,
    ),
    r"quadratic_bwd_kv(_pair)?_kernel": (None, lambda s: Work(4 * s.product, 6 * s.tensor + 16 * s.rows)),
    r"quadratic_bwd_q(_pair)?_kernel": (None, lambda s: Work(3 * s.product, 5 * s.tensor + 16 * s.rows)),
    # Not counted: additions to grad_q in fp32, in L2, another 4 bytes per element and block of keys.
    r"quadratic_fused_bwd(_narrow)?_sm90_kernel": (None, lambda s: Work(5 * s.product, 7 * s.tensor + 16 * s.rows)),
    r"quadratic_round_grad_q_sm90_kernel": (None, lambda s: Work(None, 3 * s.tensor)),  # fp32 sums to results
    r"quadratic_bwd_sm90_kernel<.*, \(?(bool\))?(false|0)>": (None, lambda s: Work(3 * s.product, 5 * s.tensor + 16 * s.rows)),
    r"quadratic_bwd_sm90_kernel": (None, lambda s: Work(4 * s.product, 6 * s.tensor + 16 * s.rows)),  # owns keys
    # The factors of k alone; and for q and k together, with a factor for each row.
    r"normalize_tokens_kernel<.*, \(?(bool\))?(false|0)>": (lambda s: Work(None, s.tensor + 4 * s.rows), None),
    r"normalize_tokens_kernel": (lambda s: Work(None, 4 * s.tensor + 8 * s.rows), None),
    r"normalize_tokens_backward_kernel": (None, lambda s: Work(None, 6 * s.tensor + 8 * s.rows)),
    r"merge_kernel": (lambda s: Work(None, 3 * s.tensor + 12 * s.rows), None),
    r"row_score_kernel": (None, lambda s: Work(None, 2 * s.tensor + 20 * s.rows)),
    r"flash_bwd_dq_dk_dv\w*_kernel|sdpa.*bprop": (None, lambda s: Work(5 * s.product, 7 * s.tensor + 8 * s.rows)),
}
# p = 2. The backward computes two kinds of states (of k and v, of q and g), reads one for grad_v, and computes grad_q and
# grad_k. With few heads, rows are added to states twice (docs/cuda.md), which is not counted.
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
    # On Hopper. Read: o, and for head dim 128 grad_v. Gradients: grad_q (0), grad_k (1), or with one load of the states grad_k
    # and grad_v (2).
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
# p = 1: states only, without the products within a step. With few heads, sums over parts of the sequence are computed too.
_LINEAR1: dict[str, _Passes] = {
    r"linear1_walk_kernel": (
        lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows),
        lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows),
    ),
    # On Hopper: o (0), grad_q and g (1), grad_k and grad_v (2). Every block of a group computes the states.
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)0\b": (lambda s: Work(2 * s.state1, 4 * s.tensor + 4 * s.rows), None),
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)1, [^,]*, \(?(bool\))?(true|1)\b": (  # and q, whose rows are shortened
        None,
        lambda s: Work(2 * s.state1, 6 * s.tensor + 20 * s.rows),
    ),
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)1\b": (None, lambda s: Work(2 * s.state1, 5 * s.tensor + 12 * s.rows)),
    r"linear1_walk_sm90_kernel<\d+, [^,]*\)2\b": (None, lambda s: Work(3 * s.state1, 6 * s.tensor + 8 * s.rows)),
    r"linear1_pair_walk_kernel": (None, lambda s: Work(3 * s.state1, 6 * s.tensor + 4 * s.rows)),
    r"linear1_sums(_sm90)?_kernel": (
        lambda s: Work(s.state1, 2 * s.tensor),
        lambda s: Work(2 * s.state1, 4 * s.tensor),
    ),
    r"linear_prepare_kernel": (None, lambda s: Work(None, 3 * s.tensor + 8 * s.rows)),
}

# The parts of a layer around attention, with as many heads of k and v as of q: convolution, norms and rotation; norm and gate.
_LAYER: dict[str, _Passes] = {
    r"split_heads_kernel": (lambda s: Work(None, 6 * s.tensor), None),
    r"split_heads_backward_kernel": (None, lambda s: Work(None, 9 * s.tensor)),
    r"join_heads_kernel": (lambda s: Work(None, 3 * s.tensor), None),
    r"join_heads_backward_kernel": (None, lambda s: Work(None, 5 * s.tensor)),
}


def work(name: str, case: Case, p: int | None, mode: str) -> Work | None:
    """Returns the work of all launches of a kernel in one call of mode "fwd", "fwd+bwd" or "train" (per layer).

    None for unknown kernels, and for linear kernels in dtypes and head dims whose states have another layout.

    Args:
        name: name of the kernel.
        p: degree of the polynomial; 2 for softmax, None for attention of other libraries.
    """
    if p is None:
        return None
    tables = [_QUADRATIC, _LAYER]
    if case.dtype == "bf16" and max(32, case.head_dim) in CHUNK:
        tables.append(_LINEAR1 if p == 1 else _LINEAR)
    for table in tables:
        for pattern, passes in table.items():
            if re.search(pattern, name):
                done = [of(sizes(case)) for of in passes[: 1 if mode == "fwd" else 2] if of is not None]
                return Work(*(None if None in part else sum(part) for part in zip(*done, strict=True))) if done else None
    return None
