"""Formulas for the bytes that attention moves to and from device memory, in this library's forwards and in plain attention."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from fastmax.core import validation

ALGORITHMS = ("standard", "flash", "quadratic", "linear")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_DIMS = (32, 64, 96, 128, 256)  # native head dims; others are widened to the next one
_WIDEST_IN_REGISTERS = 128  # largest head dim for p = 1, whose state is in registers
_CHUNK_OF_ORDER_1 = 256  # csrc/linear/order2/state_format.h
_FLOAT = 4  # bytes


class Traffic(NamedTuple):
    """Bytes read from and written to device memory."""

    read: int
    written: int

    @property
    def total(self) -> int:
        """Bytes read and written together."""
        return self.read + self.written

    def __add__(self, other: Traffic) -> Traffic:  # type: ignore[override]
        return Traffic(self.read + other.read, self.written + other.written)


def hbm_traffic(
    seqlen: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    algorithm: str = "flash",
    *,
    causal: bool = False,
    block_size: int | None = None,
    p: int = 2,
    log_decay: bool = False,
    cu_seqlens: Sequence[int] | None = None,
    window: int | tuple[int, int] | None = None,
    exact_window: int = 0,
    state: bool = False,
    log_input_gate: bool = False,
) -> Traffic:
    """Returns the bytes that the forward of one (batch, head) reads from and writes to device memory.

    The model: every kernel reads each of its operands once and writes each of its results once. Repeated reads by its blocks
    come from the L2 cache, which keeps nothing from one kernel to the next. Below, T = seqlen is the number of tokens,
    d = head_dim that of q, k and v, and e the bytes of an element.

    "flash", "quadratic" and "linear" are the portable kernels. Without accompanying tensors the Hopper kernels move about as
    much. With decays they scale values while they use them, and they merge the parts of an exact window while they write
    (docs/cuda.md).

    - "standard": three kernels (scores, softmax, weighted values), with scores and weights (T, T) of the given dtype in memory.
      Read (3 T d + 2 T^2) e, written (T d + 2 T^2) e. A causal mask saves nothing.
    - "flash", "quadratic": one kernel, with the same traffic for softmax and Fastmax. Read (3 T d) e, written T d e + 4 T (a
      float32 per query: log-sum-exp or denominator). With a `block_size` blocks share no cache: each block of that many queries
      reads every key and value that one of its queries sees. Let R be the number of keys that all blocks read together,
      T ceil(T / block_size) or, if causal, `sum(min(T, i block_size))` over the blocks i = 1, 2, ... Then read (T d + 2 R d) e.
    - "linear", p = 2: let D be the native head dim, F = D (D + 8) / 2 + 2 D, and C the queries per chunk, 256 to 2048 by D
      (csrc/linear/order2/state_format.h). A state has S bytes: F D numbers in bf16 or float32, and 2 D + 4 float32 sums. If
      not causal, there is one state: read (3 T d) e + S, written T d e + 4 T + S. If causal, each of the ceil(T / C) chunks
      except the first has one, and k and v are read for the states and again within their chunk: read
      (T d + 2 (T + (chunks - 1) C) d) e + (chunks - 1) S, written T d e + 4 T + (chunks - 1) S.
    - "linear", p = 1: the state stays in registers. Read (3 T d) e, written T d e + 4 T.
    - "linear" in float16 first makes float32 copies of q, k and v and reads these instead (e = 4): (3 T d) 2 more read,
      (3 T d) 4 more written.

    Options:

    - `log_decay`: one pass computes its running sums, two float32 per key, which attention reads; another pass looks for NaN.
      16 T more read, 8 T more written. "linear" also copies and scales the values that are added to states. There are t of
      them, (chunks - 1) C or, for p = 1, T: (t d) e more read, and as much more written.
    - `log_decay` or `cu_seqlens`: the first key that each query sees, an int32: 4 T more read. If not causal, also the end of
      its keys: 8 T. With a `block_size` only keys count that some query of a block sees.
    - `log_input_gate`: a float32 for each key, as often as the key is read: 4 T more read ("linear" with p = 2 and causal:
      4 (T + (chunks - 1) C)). With an exact window, for the keys that the algorithm itself reads.
    - `window`: keys outside are skipped. This changes the count only with a `block_size`; with a cache each key is read once
      anyway.
    - `exact_window` of W: "flash" with this window. Then the algorithm itself, causal, for T - W queries and keys, those at
      least W apart; if not causal, a second time for the keys behind the queries. Then each of these parts is merged into the
      outputs and float32 sums of its queries: 2 (T - W) (d e + 4) read, (T - W) (d e + 4) written. The running sums of
      `log_decay` are those of all T tokens, so W more than the keys: 16 W more read, 8 W more written.
    - `state`, as in `prefill`: with R = 1 + d + d (d + 1) / 2 rows (p = 1: 1 + d), R (d + 1) float32 are read and written.
      Every chunk has a state before it, and all keys are added to states. For p = 1 the chunks have 256 queries. Their sums,
      D (D + 2) + 1 float32, are written and read once, then turned into states, D^2 numbers in bf16 or float32 and 2 D + 1
      float32.

    Batch times heads is assumed to fill the device. If it does not, the linear algorithm reads keys and values a second time,
    to find the state before each segment (docs/cuda.md, "State kernel").

    Args:
        seqlen: number of queries, and of keys, at least 1.
        head_dim: of q, k and v, 1 to 256; at most 128 for "linear" with p = 1.
        dtype: float16, bfloat16 or float32 (true float32, not TF32).
        algorithm: "standard", "flash", "quadratic" or "linear".
        causal: whether keys after a query are hidden.
        block_size: queries per block of "flash" and "quadratic", at least 1 (`fastmax.traffic.tile_rows` returns that of the
            CUDA kernels), or None. The other algorithms take None only.
        p: 1 or 2, for "linear".
        log_decay: whether there are decays. They need `causal`; not for "standard".
        cu_seqlens: the values of `cu_seqlens` in `fastmax_attention`: from 0 to seqlen, not decreasing. Not for "standard", nor
            for "linear" without `causal`.
        window: as in `flash_attention`; for "flash".
        exact_window: as in `fastmax_attention`; for "quadratic" and "linear", without `block_size`.
        log_input_gate: whether there are gates. As `log_decay`.
        state: whether the tokens continue from a `DecodeState` and a new one is returned; for "linear", causal.

    Returns:
        `Traffic(read, written)` in bytes; `.total` is their sum.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    validation.check_count("seqlen", seqlen, most=2**63 - 1)  # no 32-bit limit: nothing is allocated
    validation.check_count("head_dim", head_dim)
    if head_dim > _HEAD_DIMS[-1]:
        raise ValueError(f"head_dim must be at most {_HEAD_DIMS[-1]}, the widest that there are kernels for, got {head_dim}")
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        got = dtype if isinstance(dtype, torch.dtype) else validation.describe(dtype)
        raise TypeError(f"dtype must be float16, bfloat16 or float32, got {got}")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {validation.describe(algorithm)}")
    validation.check_flag("causal", causal)
    if block_size is not None:
        validation.check_count("block_size", block_size)
        if algorithm not in ("flash", "quadratic"):
            raise ValueError(
                f'block_size must be None for algorithm="{algorithm}", which has no blocks of queries, got {block_size}'
            )
    validation.check_degree(p)
    validation.check_bool("log_decay", log_decay)
    validation.check_bool("log_input_gate", log_input_gate)
    validation.check_bool("state", state)
    validation.check_exact_window(exact_window)
    left, right = validation.check_window(window)
    bounds = None if cu_seqlens is None else _checked_bounds(cu_seqlens, seqlen)
    _check_options(algorithm, causal, block_size, log_decay, log_input_gate, bounds, window, exact_window, state)
    if algorithm == "standard":
        tensor = seqlen * head_dim * dtype.itemsize
        matrix = seqlen * seqlen * dtype.itemsize
        return Traffic(3 * tensor + 2 * matrix, tensor + 2 * matrix)
    if exact_window > 0:
        options: dict[str, Any] = {"log_decay": log_decay, "cu_seqlens": cu_seqlens}
        parts = [hbm_traffic(seqlen, head_dim, dtype, "flash", causal=causal, window=exact_window, **options)]
        queries = seqlen - exact_window  # those with global keys
        if queries > 0:
            options["cu_seqlens"] = None if cu_seqlens is None else (0, queries)  # one number per query, whatever its value
            options["log_input_gate"] = log_input_gate
            parts += [hbm_traffic(queries, head_dim, dtype, algorithm, causal=True, p=p, **options)] * (1 if causal else 2)
            parts += [Traffic(16 * exact_window, 8 * exact_window)] if log_decay else []
            output = queries * (head_dim * dtype.itemsize + _FLOAT)
            parts += [Traffic(2 * output, output)] * (1 if causal else 2)  # the merge
        return sum(parts[1:], parts[0])
    along = _along(seqlen, causal, log_decay, bounds is not None)
    if algorithm == "linear":
        return along + _linear(seqlen, head_dim, dtype, causal, p, log_decay, state, log_input_gate)
    tensor = seqlen * head_dim * dtype.itemsize
    keys = _keys_of_blocks(seqlen, block_size or seqlen, causal, left, right, bounds)
    gates = _FLOAT * keys if log_input_gate else 0
    return along + Traffic(tensor + 2 * keys * head_dim * dtype.itemsize + gates, tensor + _FLOAT * seqlen)


def _checked_bounds(cu_seqlens: Sequence[int], seqlen: int) -> list[int]:
    bounds = list(cu_seqlens) if isinstance(cu_seqlens, Sequence) else [None]
    if any(isinstance(x, bool) or not isinstance(x, int) for x in bounds):
        raise TypeError(f"cu_seqlens must hold ints, got {validation.describe(cu_seqlens)}")
    if len(bounds) < 2 or (bounds[0], bounds[-1]) != (0, seqlen) or any(x > y for x, y in pairwise(bounds)):
        raise ValueError(
            f"cu_seqlens must go from 0 to seqlen = {seqlen} without falling, got {validation.describe(cu_seqlens)}"
        )
    return bounds


def _check_options(
    algorithm: str,
    causal: bool,
    block_size: int | None,
    log_decay: bool,
    log_input_gate: bool,
    bounds: list[int] | None,
    window: int | tuple[int, int] | None,
    exact_window: int,
    state: bool,
) -> None:
    """Checks that the options can be combined."""
    given = {
        "log_decay": (log_decay, ("flash", "quadratic", "linear")),
        "log_input_gate": (log_input_gate, ("flash", "quadratic", "linear")),
        "cu_seqlens": (bounds is not None, ("flash", "quadratic", "linear")),
        "window": (window is not None, ("flash",)),
        "exact_window": (exact_window > 0, ("quadratic", "linear")),
        "state": (state, ("linear",)),
    }
    for name, (is_given, of) in given.items():
        if is_given and algorithm not in of:
            raise ValueError(f'{name} is for {", ".join(map(repr, of))}, got algorithm="{algorithm}"')
    for name, is_given in (("log_decay", log_decay), ("log_input_gate", log_input_gate), ("state", state)):
        if is_given and not causal:
            raise ValueError(f"{name} needs causal=True, got causal={causal}")
    if not causal and bounds is not None and algorithm == "linear" and exact_window == 0:
        raise ValueError('cu_seqlens without causal runs on algorithm="quadratic", got "linear"')
    if exact_window > 0 and (block_size is not None or state):
        other = "state=True" if state else f"block_size={block_size}"
        raise ValueError(f"exact_window must be 0 with {other}, got {exact_window}")


def _along(seqlen: int, causal: bool, log_decay: bool, packed: bool) -> Traffic:
    """Returns the traffic of decays and of bounds of keys."""
    sums = Traffic(16 * seqlen, 8 * seqlen) if log_decay else Traffic(0, 0)
    return sums + Traffic((4 if causal else 8) * seqlen if log_decay or packed else 0, 0)


def _keys_of_blocks(seqlen: int, rows: int, causal: bool, left: int, right: int, bounds: list[int] | None) -> int:
    """Returns the number of keys that some query of a block sees, summed over all blocks of `rows` queries."""
    keys = 0
    for start in range(0, seqlen, rows):
        stop = min(seqlen, start + rows)
        first = 0 if left < 0 else max(0, start - left)
        last = stop if causal else seqlen if right < 0 else min(seqlen, stop + right)
        if bounds is not None:
            first = max(first, bounds[bisect_right(bounds, start) - 1])
            last = min(last, bounds[bisect_left(bounds, stop)])
        keys += last - first
    return keys


def _linear(
    seqlen: int,
    head_dim: int,
    dtype: torch.dtype,
    causal: bool,
    p: int,
    log_decay: bool = False,
    state: bool = False,
    log_input_gate: bool = False,
) -> Traffic:
    if p == 1 and head_dim > _WIDEST_IN_REGISTERS:
        raise ValueError(f"head_dim must be at most {_WIDEST_IN_REGISTERS} for p = 1, got {head_dim}")
    numbers = seqlen * head_dim
    states, summed = 0, 0  # number of states in memory, and of keys that are added to states
    if p == 2 and causal:
        chunk = chunk_length(head_dim, dtype)
        chunks = -(-seqlen // chunk)
        states, summed = (chunks, seqlen) if state else (chunks - 1, (chunks - 1) * chunk)
    elif p == 2:
        states = 1
    widened = 3 * numbers if dtype == torch.float16 else 0
    element = _FLOAT if widened else dtype.itemsize
    scaled = (summed if p == 2 else seqlen) * head_dim * element if log_decay else 0
    snapshots = states * _state_bytes(head_dim, dtype)
    if p == 1 and state:
        width, summed = _native(head_dim), seqlen
        number = dtype.itemsize if dtype == torch.bfloat16 else _FLOAT
        sums = (2 * width + 1) * _FLOAT
        snapshots = -(-seqlen // _CHUNK_OF_ORDER_1) * (width * width * (_FLOAT + number) + 2 * sums)
    rows = 1 + head_dim + (head_dim * (head_dim + 1) // 2 if p == 2 else 0)
    saved = scaled + snapshots + (rows * (head_dim + 1) * _FLOAT if state else 0)
    gates = _FLOAT * (seqlen + summed) if log_input_gate else 0
    return Traffic(
        widened * dtype.itemsize + (numbers + 2 * (seqlen + summed) * head_dim) * element + saved + gates,
        widened * _FLOAT + numbers * dtype.itemsize + _FLOAT * seqlen + saved,
    )


def _native(head_dim: int) -> int:
    return next(width for width in _HEAD_DIMS if head_dim <= width)


def tile_rows(head_dim: int, dtype: torch.dtype = torch.float16) -> int:
    """Returns the queries per block of the quadratic forward kernel (csrc/quadratic/portable/tile_config.h).

    The arguments are those of `hbm_traffic`.
    """
    width = _native(head_dim)
    two_tiles = dtype == torch.bfloat16 or (dtype == torch.float16 and width <= 64)
    return 128 if width > 128 or two_tiles else 64


def chunk_length(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the queries per state of the linear kernels for p = 2, as `chunk_length` in csrc/linear/order2/state_format.h."""
    width = _native(head_dim)
    if width == 64 and dtype != torch.bfloat16:
        return 512
    return {96: 512, 128: 1024, 256: 2048}.get(width, 256)


def _state_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Returns the bytes of a state for p = 2: `state_words` and `state_sums` in csrc/linear/order2/state_format.h."""
    width = _native(head_dim)
    features = width * (width + 8) // 2 + 2 * width
    return features * width * (2 if dtype == torch.bfloat16 else _FLOAT) + (2 * width + 4) * _FLOAT
