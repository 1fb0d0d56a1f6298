"""Configurations of attention: what one consists of (`Case`), and the fixed ones of the table (`cases`)."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

LAYOUTS = ("contiguous", "token-major", "packed", "unaligned")


class Case(NamedTuple):
    """A configuration: sizes and dtype of random q, k and v, and options of `fastmax_attention`.

    Attributes:
        layout: memory layout, one of `LAYOUTS`.
        padding: passes an `attention_mask` that hides some keys of every sequence, and all keys of the first.
        noise: passes a `drop_noise`.
        rpe: passes a random `rpe_matrix`.
        decay: passes a `log_decay`, with fast and slow decays by head, and tokens without decay or with a reset.
        gate: passes a `log_input_gate`, with ordinary, large and very small factors.
        sequences: number of packed sequences, of which some may be empty; 0: no `cu_seqlens`.
        magnitude: factor of q and k. None: their rows are scaled to lengths below 0.9 instead, so that |q.k| < 1.
        precision: argument of `torch.set_float32_matmul_precision`.
        softmax: checks `flash_attention` and its log-sum-exp instead.
        positive: takes the absolute values of q and k, so that scores are positive.
    """

    name: str
    options: dict
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    queries: int = 300
    keys: int = 300
    head_dim: int = 32
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    padding: bool = False
    noise: bool = False
    rpe: bool = False
    decay: bool = False
    gate: bool = False
    sequences: int = 0
    magnitude: float | None = 1.0
    precision: str = "highest"
    softmax: bool = False
    positive: bool = False

    @property
    def mode(self) -> str:
        """The arithmetic: the dtype, or "tf32"."""
        if self.dtype == torch.float32 and self.precision != "highest":
            return "tf32"
        return str(self.dtype).removeprefix("torch.")

    @property
    def operator(self) -> tuple[str, str]:
        """The kind of operator, by which the table of random configurations is divided."""
        return ("softmax", "") if self.softmax else (self.options["algorithm"], f"p={self.options['p']}")


def cases() -> list[Case]:
    """Returns the configurations of the table, each for the code path in its name. 300 tokens are more than a chunk, and no
    multiple of it."""
    options = {"causal": True, "temperature": 32**0.5}
    ball = {"normalize": "token", "temperature": 2.0}  # keeps 1 + s positive, which p = 1 needs
    table = [
        Case(
            f"p={p} {algorithm} {'causal' if causal else 'full'}",
            {**(options if p == 2 else ball), "p": p, "algorithm": algorithm, "causal": causal},
        )
        for p, algorithm, causal in itertools.product((2, 1), ("quadratic", "linear"), (True, False))
    ]
    table += [
        Case(f"{str(dtype).removeprefix('torch.')} {algorithm}", {**options, "algorithm": algorithm}, dtype=dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
        for algorithm in ("quadratic", "linear")
    ]
    for algorithm in ("quadratic", "linear"):
        here = {**options, "algorithm": algorithm}
        table += [
            Case(f"fewer queries than keys, {algorithm}", here, queries=70),
            Case(f"more queries than keys, {algorithm}", {**here, "causal": False}, keys=70),
            Case(f"grouped queries, {algorithm}", here, heads=6),
            Case(f"one kv head, value_dim 48, {algorithm}", here, heads=4, kv_heads=1, value_dim=48),
            Case(f"odd head_dim 19, {algorithm}", here, head_dim=19),
            Case(f"token-major (b, n, h, d), {algorithm}", here, layout="token-major"),
            Case(f"padding, {algorithm}", {**here, "causal": False}, padding=True),
            Case(f"padding, causal, {algorithm}", here, padding=True),
            Case(f"dropout noise, {algorithm}", {**here, "dropout": 0.3}, noise=True),
            Case(f'normalize="sequence", {algorithm}', {**here, "normalize": "sequence", "lim": 2.0, "temperature": 1.0}),
            Case(f'normalize="token", {algorithm}', {**here, "normalize": "token", "lim": 3.0, "temperature": 2.0}),
            Case(f"a0, a1, a2 = 2, 0.5, 0.3, {algorithm}", {**here, "a0": 2.0, "a1": 0.5, "a2": 0.3}),
            Case(f"sinusoidal rpe, {algorithm}", {**here, "rpe_matrix": "sinusoidal"}),
            Case(f"one query, {algorithm}", here, queries=1),
            Case(f"decay, {algorithm}", {**here, "return_lse": True}, decay=True),
            Case(f"decay, grouped, fewer queries, {algorithm}", here, queries=70, heads=6, decay=True),
            Case(f"gates, {algorithm}", {**here, "return_lse": True}, gate=True),
            Case(
                f"gates, decay, exact window, {algorithm}",
                {**here, "exact_window": 50},
                heads=6,
                decay=True,
                gate=True,
            ),
            Case(f"exact window, {algorithm}", {**here, "exact_window": 50, "return_lse": True}),
            Case(f"exact window, full, {algorithm}", {**here, "exact_window": 50, "causal": False}),
            Case(f"packed sequences, {algorithm}", here, batch=1, sequences=7),
            Case(f"packed, decay, exact window, {algorithm}", {**here, "exact_window": 9}, batch=1, decay=True, sequences=7),
        ]
    table.append(Case("packed sequences, full", {**options, "causal": False}, batch=1, sequences=7))
    table += [Case("rpe matrix", options, rpe=True), Case("rpe matrix, fewer queries", options, queries=70, rpe=True)]
    softmax = {"causal": True, "scale": 0.2}
    table += [
        Case(f"softmax, {str(dtype).removeprefix('torch.')}", softmax, dtype=dtype, softmax=True)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    ]
    table += [
        Case("softmax, full, more queries than keys", {}, keys=70, softmax=True),
        Case("softmax, grouped, fewer queries", softmax, queries=70, heads=6, value_dim=48, softmax=True),
        Case("softmax, padding, causal", softmax, padding=True, softmax=True),
        Case("softmax, window", {**softmax, "window": 50}, softmax=True),
        Case("softmax, window of two bounds, full", {"window": (20, 5)}, softmax=True),
        Case("softmax, decay", softmax, decay=True, softmax=True),
        Case("softmax, gates, window", {**softmax, "window": 50}, gate=True, softmax=True),
        Case("softmax, packed sequences", softmax, batch=1, sequences=7, softmax=True),
    ]
    return table
