"""`python -m fastmax.verify [--device cuda]`: the custom gradient against autograd against the definition in float64.

Prints a table of relative errors (Frobenius norm) of the output and of every gradient; the exit status is 1 when one of them
is larger than allowed. Allowed is twice the error that the definition itself makes in plain PyTorch at the same precision,
plus a rounding floor.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastmax.functional import fastmax_attention
from fastmax.positional import rpe_matrix_creator
from fastmax.reference import naive_attention

# Added to twice the plain error, so that a case which the plain formula happens to get exactly right is not held to zero.
FLOOR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}


class Case(NamedTuple):
    """One configuration: sizes and dtype of random q, k, v, and options of `fastmax_attention`.

    `padding=True` hides some keys of every sequence, and all keys of the first; `noise=True` passes a `drop_noise`;
    `rpe=True` passes a random `rpe_matrix`.
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
    token_major: bool = False
    padding: bool = False
    noise: bool = False
    rpe: bool = False


class Errors(NamedTuple):
    """Relative errors against float64 of one tensor (`"o"`, or the name of an input for its gradient)."""

    tensor: str
    custom: float
    autograd: float
    allowed: float

    @property
    def passed(self) -> bool:
        """False for NaN too."""
        return self.custom <= self.allowed and self.autograd <= self.allowed


def cases() -> list[Case]:
    """The table: each row is there for the code path in its name. 300 tokens are more than one chunk and not a multiple."""
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
            Case(f"token-major (b, n, h, d), {algorithm}", here, token_major=True),
            Case(f"padding, {algorithm}", {**here, "causal": False}, padding=True),
            Case(f"padding, causal, {algorithm}", here, padding=True),
            Case(f"dropout noise, {algorithm}", {**here, "dropout": 0.3}, noise=True),
            Case(f'normalize="sequence", {algorithm}', {**here, "normalize": "sequence", "lim": 2.0, "temperature": 1.0}),
            Case(f'normalize="token", {algorithm}', {**here, "normalize": "token", "lim": 3.0, "temperature": 2.0}),
            Case(f"a0, a1, a2 = 2, 0.5, 0.3, {algorithm}", {**here, "a0": 2.0, "a1": 0.5, "a2": 0.3}),
            Case(f"sinusoidal rpe, {algorithm}", {**here, "rpe_matrix": "sinusoidal"}),
            Case(f"one query, {algorithm}", here, queries=1),
        ]
    return [*table, Case("rpe matrix", options, rpe=True), Case("rpe matrix, fewer queries", options, queries=70, rpe=True)]


def definition(q: Tensor, k: Tensor, v: Tensor, *, normalize=False, lim=1.0, rpe_matrix=None, **options) -> Tensor:
    """`fastmax_attention` (4-d) by its definition: the whole matrix of weights, in the dtype of its arguments."""
    n, m, d = q.shape[-2], k.shape[-2], q.shape[-1]
    if normalize == "token":
        q, k = (x * (lim / x.norm(dim=-1, keepdim=True)).clamp(max=1.0) for x in (q, k))
    elif normalize:
        q, k = (x * (lim / x.norm(dim=-1, keepdim=True).amax(-2, keepdim=True)) for x in (q, k))
    if isinstance(rpe_matrix, str):
        longest = max(n, m)
        rows = rpe_matrix_creator(longest, d, q.device, q.dtype, structured=True)
        rpe_matrix = rows[longest - m : longest + n - 1]
    return naive_attention(q, k, v, rpe_matrix=rpe_matrix, **options)


def measure(tensors: dict[str, Tensor], options: dict) -> list[Errors]:
    """Errors of the output and of the gradient of each floating-point input.

    `tensors` holds q, k, v (4-d) and, when wanted, `rpe_matrix`, `drop_noise`, `key_padding_mask`; `options` the other
    arguments of `fastmax_attention`, `use_custom_gradient` excepted. The loss is a fixed random projection of the output.
    """
    q, v = tensors["q"], tensors["v"]
    generator = torch.Generator().manual_seed(0)
    grad_o = torch.randn(*q.shape[:-1], v.shape[-1], generator=generator, dtype=torch.float64).to(q.device, q.dtype)
    variables = [name for name in ("q", "k", "v", "rpe_matrix") if name in tensors]
    plain_options = {name: value for name, value in options.items() if name != "algorithm"}

    def run(function: Callable[..., Tensor], dtype: torch.dtype, options: dict) -> dict[str, Tensor]:
        inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
        inputs |= {name: inputs[name].detach().requires_grad_() for name in variables}
        o = function(**inputs, **options)
        grads = torch.autograd.grad(o, [inputs[name] for name in variables], grad_o.to(dtype))
        return {"o": o.detach(), **dict(zip(variables, grads, strict=True))}

    exact = run(definition, torch.float64, plain_options)
    plain = run(definition, q.dtype, plain_options)
    custom = run(fastmax_attention, q.dtype, {**options, "use_custom_gradient": True})
    autograd = run(fastmax_attention, q.dtype, {**options, "use_custom_gradient": False})

    def error(result: dict[str, Tensor], name: str) -> float:
        """Relative; absolute where the exact value is zero but for rounding (grad_q when only one key is visible, say)."""
        difference, size = (result[name].double() - exact[name]).norm().item(), exact[name].norm().item()
        return difference / size if size > 1e-10 else difference

    return [
        Errors(name, error(custom, name), error(autograd, name), 2.0 * error(plain, name) + FLOOR[q.dtype]) for name in exact
    ]


def random_tensors(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a case, for `measure`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    def heads(count: int, tokens: int, channels: int) -> Tensor:
        if case.token_major:
            return normal(case.batch, tokens, count, channels).transpose(1, 2)
        return normal(case.batch, count, tokens, channels)

    tensors = {
        "q": heads(case.heads, case.queries, case.head_dim),
        "k": heads(case.kv_heads, case.keys, case.head_dim),
        "v": heads(case.kv_heads, case.keys, case.value_dim),
    }
    if case.rpe:
        tensors["rpe_matrix"] = normal(case.queries + case.keys - 1, case.head_dim)
    if case.noise:
        tensors["drop_noise"] = heads(case.heads, case.queries, case.value_dim)
    if case.padding:
        mask = torch.rand(case.batch, case.keys, generator=generator) < 0.7
        mask[0] = False
        tensors["key_padding_mask"] = mask.to(device)
    return tensors


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fastmax.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run the configurations whose name contains this")
    args = parser.parse_args(arguments)
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"no configuration is called {args.only!r}")

    print(f"relative error against float64 on {args.device}; 'of allowed' is the worst of the row, 100% is the limit")
    print(f"{'':<38}{'custom gradient':^36} {'autograd':^36}")
    columns = "".join(f"{name:>9}" for name in ("o", "grad_q", "grad_k", "grad_v"))
    print(f"{'configuration':<38}{columns} {columns} {'of allowed':>11}")
    failed = 0
    for case in chosen:
        rows = measure(random_tensors(case, args.device, args.seed), case.options)
        passed = all(row.passed for row in rows)
        failed += not passed
        shown = [row for row in rows if row.tensor != "rpe_matrix"]
        numbers = " ".join("".join(f"{getattr(row, which):>9.1e}" for row in shown) for which in ("custom", "autograd"))
        share = max(max(row.custom, row.autograd) / row.allowed for row in rows)
        print(f"{case.name:<38}{numbers} {share:>11.0%}{'' if passed else '  FAILED'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} configurations within the limit")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
