"""Bytes that attention moves to and from device memory: formulas for this library's forward passes and for plain attention."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fastmax import validation

ALGORITHMS = ("standard", "flash", "quadratic", "linear")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_HEAD_DIMS = (32, 64, 96, 128, 256)  # what other head dims are widened to
_WIDEST_IN_REGISTERS = 128  # of p = 1, whose state is kept there
_FLOAT = 4


class Traffic(NamedTuple):
    """Bytes."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def hbm_traffic(
    seqlen: int,
    head_dim: int,
    dtype: torch.dtype = torch.float16,
    algorithm: str = "flash",
    *,
    causal: bool = False,
    block_size: int | None = None,
    p: int = 2,
) -> Traffic:
    """Bytes that the forward pass of one (batch, head) reads from and writes to device memory.

    Every kernel is taken to read each of its operands once and to write each of its results once; what its blocks read again
    comes from the L2 cache, which holds nothing from one kernel to the next. T = seqlen tokens, d = head_dim for q, k and v,
    e the bytes of an element.

    - "standard": scores, softmax and weighted values as three kernels, with scores and weights (T, T) of the given dtype in
      memory: read (3 T d + 2 T^2) e, written (T d + 2 T^2) e. A causal mask saves nothing.
    - "flash", "quadratic": one kernel; softmax and Fastmax differ in nothing here. Read (3 T d) e, written T d e + 4 T (a
      float32 per query: log-sum-exp or denominator). With a `block_size` no cache is shared: each block of so many queries
      reads every key and value that one of its queries sees. With R the keys that all blocks read, T ceil(T / block_size) or,
      causal, `sum(min(T, i block_size))` over the blocks i = 1, 2, ...: read (T d + 2 R d) e.
    - "linear", p = 2: with D the native head dim, F = D (D + 8) / 2 + 2 D and chunks of C queries, a state is S = F D bf16 or
      float32 numbers and 2 D + 4 float32 sums. Not causal there is one: read (3 T d) e + S, written T d e + 4 T + S. Causal
      there is one for each of the ceil(T / C) chunks but the first, and k and v are read for the states and again within their
      chunk: read (T d + 2 (T + (chunks - 1) C) d) e + (chunks - 1) S, written T d e + 4 T + (chunks - 1) S. C is 256 to 2048
      by D (csrc/linear/order2/state_format.h).
    - "linear", p = 1: the state stays in registers: read (3 T d) e, written T d e + 4 T.
    - "linear" in float16 first makes float32 copies of q, k and v, which are then read in their place (e = 4): (3 T d) 2 more
      read, (3 T d) 4 more written.

    Batch times heads is taken to fill the device: where it does not, the linear algorithm reads keys and values once more, for
    what each segment of them starts from (docs/cuda.md, "State kernel").

    Args:
        seqlen: queries, and as many keys, at least 1.
        head_dim: of q, k and v, 1 to 256; to 128 for "linear" with p = 1.
        dtype: float16, bfloat16 or float32 (true float32, not TF32).
        algorithm: "standard", "flash", "quadratic" or "linear".
        causal: whether keys after a query are left out.
        block_size: queries per block of "flash" and "quadratic", at least 1 (`fastmax.traffic.tile_rows`: the CUDA kernels'),
            or None. The others have none.
        p: 1 or 2, of "linear".

    Returns:
        `Traffic(read, written)` in bytes, and their sum as `.total`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    validation.check_count("seqlen", seqlen)
    validation.check_count("head_dim", head_dim)
    if head_dim > _HEAD_DIMS[-1]:
        raise ValueError(f"head_dim must be at most {_HEAD_DIMS[-1]}, the widest that there are kernels for, got {head_dim}")
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be float16, bfloat16 or float32, got {dtype!r}")
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(repr, ALGORITHMS))}, got {algorithm!r}")
    validation.check_flag("causal", causal)
    if block_size is not None:
        validation.check_count("block_size", block_size)
        if algorithm not in ("flash", "quadratic"):
            raise ValueError(
                f'block_size must be None for algorithm="{algorithm}", which has no blocks of queries, got {block_size}'
            )
    if isinstance(p, bool) or p not in (1, 2):
        raise ValueError(f"p must be 1 or 2, got {p!r}")
    if algorithm == "linear":
        return _linear(seqlen, head_dim, dtype, causal, p)
    tensor = seqlen * head_dim * dtype.itemsize
    if algorithm == "standard":
        matrix = seqlen * seqlen * dtype.itemsize
        return Traffic(3 * tensor + 2 * matrix, tensor + 2 * matrix)
    rows = block_size or seqlen
    blocks = -(-seqlen // rows)
    keys = sum(min(seqlen, i * rows) for i in range(1, blocks + 1)) if causal else blocks * seqlen
    return Traffic(tensor + 2 * keys * head_dim * dtype.itemsize, tensor + _FLOAT * seqlen)


def _linear(seqlen: int, head_dim: int, dtype: torch.dtype, causal: bool, p: int) -> Traffic:
    if p == 1 and head_dim > _WIDEST_IN_REGISTERS:
        raise ValueError(f"head_dim must be at most {_WIDEST_IN_REGISTERS} for p = 1, got {head_dim}")
    numbers = seqlen * head_dim
    states, keys = 0, seqlen  # keys and values read, counting those read twice
    if p == 2 and causal:
        chunk = chunk_length(head_dim, dtype)
        states = -(-seqlen // chunk) - 1
        keys += states * chunk
    elif p == 2:
        states = 1
    state = states * _state_bytes(head_dim, dtype)
    widened = 3 * numbers if dtype == torch.float16 else 0
    element = _FLOAT if widened else dtype.itemsize
    return Traffic(
        widened * dtype.itemsize + (numbers + 2 * keys * head_dim) * element + state,
        widened * _FLOAT + numbers * dtype.itemsize + _FLOAT * seqlen + state,
    )


def _native(head_dim: int) -> int:
    return next(width for width in _HEAD_DIMS if head_dim <= width)


def tile_rows(head_dim: int, dtype: torch.dtype = torch.float16) -> int:
    """Queries of a block of the quadratic forward kernel, for arguments of `hbm_traffic` (csrc/quadratic/tile_config.h)."""
    width = _native(head_dim)
    two_tiles = dtype == torch.bfloat16 or (dtype == torch.float16 and width <= 64)
    return 128 if width > 128 or two_tiles else 64


def chunk_length(head_dim: int, dtype: torch.dtype) -> int:
    """Queries per state of the linear kernels, p = 2, as the function of this name in csrc/linear/order2/state_format.h."""
    width = _native(head_dim)
    if width == 64 and dtype != torch.bfloat16:
        return 512
    return {96: 512, 128: 1024, 256: 2048}.get(width, 256)


def _state_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """A state of p = 2: `state_words` and `state_sums` in csrc/linear/order2/state_format.h."""
    width = _native(head_dim)
    features = width * (width + 8) // 2 + 2 * width
    return features * width * (2 if dtype == torch.bfloat16 else _FLOAT) + (2 * width + 4) * _FLOAT
