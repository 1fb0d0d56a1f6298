"""Configurations that are drawn at random, each from its index and a seed, for a CPU, a GPU, or the Hopper kernels."""

from __future__ import annotations

import itertools
import math
import random
from typing import NamedTuple

import torch

from fastmax.testing.configurations import LAYOUTS, Case


class Limits(NamedTuple):
    """Limits of a random configuration: (query, key) pairs of all heads, elements of a tensor, head dim, tokens."""

    pairs: int
    elements: int
    head_dim: int
    tokens: int


# The definition has several float64 tensors with all weights: 2**22 of them are 32 MB.
_LIMITS = {"cpu": Limits(2**16, 2**16, 40, 1100)}
_OTHER_DEVICES = Limits(2**22, 2**22, 256, 4200)
_MIN_ROWS = 128  # with fewer queries or keys in total, the plain error would vary by chance


def random_case(index: int, seed: int, device: torch.device | str) -> Case:
    """Returns configuration number `index`, drawn with the seed `seed + index`."""
    device = torch.device(device)
    draw = random.Random(seed + index)
    limits = _LIMITS.get(device.type, _OTHER_DEVICES)

    def chance(probability: float) -> bool:
        return draw.random() < probability

    def between(low: float, high: float) -> float:
        """Draws from a log-uniform distribution."""
        return math.exp(draw.uniform(math.log(low), math.log(high)))

    def tokens() -> int:
        if chance(0.4):  # near the sizes of the kernels' tiles and chunks
            return min(
                limits.tokens,
                draw.choice((16, 32, 64, 128, 256, 512, 1024, 2048)) * draw.choice((1, 1, 3)) + draw.choice((-1, 0, 1)),
            )
        return round(between(1, limits.tokens))

    def head_dim() -> int:
        native = [d for d in (16, 32, 64, 96, 128, 256) if d <= limits.head_dim]
        if chance(0.6):
            return draw.choice(native)
        return round(between(1, limits.head_dim)) | chance(0.5)  # odd in at least half of the cases

    causal, p = chance(0.6), draw.choice((1, 2))
    algorithm = draw.choice(("quadratic", "linear", "linear", "auto"))
    dtypes = [(torch.float32, "highest"), (torch.float16, "highest"), (torch.bfloat16, "highest")]
    dtypes.append((torch.float64, "highest") if device.type == "cpu" else (torch.float32, "high"))
    dtype, precision = draw.choice(dtypes)

    d = min(limits.head_dim, head_dim())
    dv = d if chance(0.6) else min(limits.head_dim, head_dim())
    sinusoidal = chance(0.1)
    group, hk = (1, 1) if chance(0.3) else (draw.choice((1, 1, 2, 3, 4)), draw.choice((1, 1, 2, 3, 5)))
    h = group * hk
    pairs = limits.pairs // h
    if sinusoidal:  # the definition has a row of the rpe matrix for every pair
        d, pairs = min(d, 64), pairs // 16
    n, m = tokens(), tokens()
    if chance(0.5):
        m = n
    if causal:
        n, m = min(n, m), max(n, m)
    if n * m > pairs:
        longest = math.isqrt(pairs)
        square = draw.randint(longest // 2, longest)
        n, m = (square, square) if n == m else (max(1, min(n, pairs // m)), m)
    # d * d: autograd saves the features of a chunk, d (d + 1) / 2 per row.
    most = max(1, min(pairs // (n * m), limits.elements // (h * max(n, m) * max(d, dv, d * d // 64))))
    b = max(min(most, draw.choice((1, 1, 2, 3, 8))), math.ceil(_MIN_ROWS / (h * n)), math.ceil(_MIN_ROWS / (hk * m)))

    options: dict = {"causal": causal, "p": p, "algorithm": algorithm}
    magnitude: float | None = None if p == 1 else 1.0
    normalize = draw.choice((False, False, False, False, True, "sequence", "token"))
    reach = 0.81  # largest |q.k| if magnitude is None
    if normalize:
        options |= {"normalize": normalize, "lim": round(draw.uniform(0.3, 0.9) if p == 1 else draw.uniform(0.3, 3.0), 3)}
    if sinusoidal:
        options["rpe_matrix"] = "sinusoidal"
        reach += 0.9 * math.sqrt(d / 2 + 1)
    if p == 1:  # |s| < 1, so that f stays positive
        options["temperature"] = reach * between(1.0, 4.0)
    else:
        options["temperature"] = between(0.5, 2.0) * (1.0 if normalize else math.sqrt(d))
        # Scores of 25, so f is in the hundreds. Not for the linear algorithm: its features cancel where |q||k| is large and f
        # is not.
        if algorithm == "quadratic" and not normalize and chance(0.3):
            magnitude = 5.0
    if chance(0.4):
        a0, a2 = draw.uniform(1.0, 2.0), draw.uniform(0.3, 1.0)
        a1 = draw.uniform(-0.8, 0.8) * (1.0 if p == 1 else math.sqrt(4.0 * a0 * a2))
        options |= {"a0": round(a0, 3), "a1": round(a1, 3), "a2": round(a2, 3)}
    options["temperature"] = round(options["temperature"], 3)
    noise = chance(0.25)
    if noise:
        options["dropout"] = round(draw.uniform(0.05, 0.6), 3)
    layout = draw.choice(LAYOUTS if d == dv else [x for x in LAYOUTS if x != "packed"])
    padding = chance(0.25)
    positive = p == 2 and not sinusoidal and chance(0.25)
    if positive:  # f may have real roots, or no quadratic term: it is positive for positive scores
        a0, a2 = draw.uniform(1.0, 2.0), draw.choice((0.0, draw.uniform(0.0, 0.5)))
        options |= {"a0": round(a0, 3), "a1": round(draw.uniform(1.0, 2.0) * math.sqrt(4.0 * a0 * max(a2, 0.25)), 3)}
        options["a2"] = round(a2, 3)

    def window() -> int:
        return draw.choice((1, 2, 63, 64, 65, round(between(1, 2 * m)), round(between(1, 2 * m))))

    softmax = not sinusoidal and chance(0.15)
    decay = causal and chance(0.35)
    sequences = 0
    one_entry = n == m and h * n >= _MIN_ROWS <= hk * m
    if one_entry and (causal or softmax or algorithm != "linear") and chance(0.6):
        b, sequences = 1, draw.choice((1, 2, 3, 8, 30))
    if softmax:
        options = {"causal": causal, "scale": round(1.0 / options["temperature"], 3)}
        noise = positive = False
        if chance(0.6):
            # At least two keys: with one, the gradient of its score is 0, and only rounding would be measured.
            size = max(2, window())
            options["window"] = draw.choice((size, (-1, 0), (size, 0), (size, window()), (size, -1)))
    else:
        if n <= m and chance(0.35):
            options["exact_window"] = window()
        if chance(0.3):
            options["return_lse"] = True
    gate = causal and chance(0.25)
    return Case(
        f"random {index}", options, batch=b, heads=h, kv_heads=hk, queries=n, keys=m, head_dim=d, value_dim=dv, dtype=dtype,
        layout=layout, padding=padding, noise=noise, decay=decay, gate=gate, sequences=sequences, magnitude=magnitude,
        precision=precision, softmax=softmax, positive=positive,
    )  # fmt: skip


def for_hopper(case: Case) -> Case | None:
    """Returns the configuration, changed so that the Hopper kernels cover it (docs/cuda.md); None if it differs too much.

    The algorithm stays the one that the scores were drawn for: with large scores the features of the linear algorithm cancel.
    """
    options, width = case.options, max(case.head_dim, case.value_dim)
    if case.rpe or options.get("rpe_matrix") or options.get("exact_window") or width > 128:
        return None
    if not case.softmax:
        of_order1 = options["causal"] and not (case.padding or case.decay or case.gate or case.sequences)
        is_linear = options["algorithm"] == "linear" and (options["p"] == 2 or of_order1)
        if is_linear and (64 < width <= 96 or (options["p"] == 1 and width <= 32)):  # widths without a linear kernel
            wider = case.head_dim + 32
            if not options.get("normalize"):
                temperature = options["temperature"] * math.sqrt(wider / case.head_dim)  # keeps the size of the scores
                options = options | {"temperature": round(temperature, 3)}
            case = case._replace(head_dim=wider, value_dim=case.value_dim + 32)
        options = options | {"algorithm": "linear" if is_linear else "quadratic"}
    return case._replace(options=options, dtype=torch.bfloat16, precision="highest")


def hopper_indices(count: int, seed: int, device: torch.device | str) -> list[int]:
    """Returns the indices of the first `count` configurations of a seed that `for_hopper` accepts."""
    brought = (index for index in itertools.count() if for_hopper(random_case(index, seed, device)) is not None)
    return list(itertools.islice(brought, count))
