"""Invalid bounds of keys, and a program that calls the kernels with them: `python tests/invalid_bounds.py flash`.

The values of `cu_seqlens` on a GPU are not read back. Kernels must end with any of them, inside memory. The program prints the
name of each call before it starts, so that the last line names a call that hangs. Valid calls follow in the same process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import fastmax
from fastmax.prepare.bounds import sequence_of_token

LEAST, MOST = -(2**31), 2**31 - 1
VALID = (0, 100, 612, 612, 1024)


def cu_seqlens(n: int) -> dict[str, Tensor]:
    """Invalid `cu_seqlens` of n tokens, by name."""
    generator = torch.Generator().manual_seed(1)
    values = {
        "unsorted": (0, 400 * n // 1024, 500 * n // 1024, 100 * n // 1024, n),
        "falling": (n, n // 2, n // 3, 0),
        "equal": (n // 2,) * 5,
        "negative": (-n, -100, -1, 0),
        "beyond the tokens": (n, 2 * n, 3 * n),
        "least and most": (LEAST, MOST, LEAST, MOST, 0, LEAST, n),
        "most and least": (MOST, LEAST, MOST, LEAST),
        "near": torch.randint(-n, 2 * n, (40,), generator=generator),
        "any": torch.randint(LEAST, MOST, (40,), generator=generator),
    }
    return {name: torch.as_tensor(x, dtype=torch.int32) for name, x in values.items()}


def key_bounds(n: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Invalid first and end keys of n queries, by name: those of `cu_seqlens`, and others that operators accept."""
    generator = torch.Generator().manual_seed(2)
    at = torch.arange(n)
    steps = at // 50 % 2 == 0
    bounds = {}
    for name, x in cu_seqlens(n).items():
        sequence = sequence_of_token(x, n)
        bounds[f"{name} sequences"] = x[sequence], x[sequence + 1]
    bounds |= {
        "falling": (n - 1 - at, n - at),
        "steps": (torch.where(steps, n, 0), torch.where(steps, 0, n)),
        "steps of least and most": (torch.where(steps, MOST, LEAST), torch.where(steps, LEAST, MOST)),
        "no key": (torch.full((n,), MOST), torch.full((n,), LEAST)),
        "every key": (torch.full((n,), LEAST), torch.full((n,), MOST)),
        "near": tuple(torch.randint(-n, 2 * n, (2, n), generator=generator)),
        "any": tuple(torch.randint(LEAST, MOST, (2, n), generator=generator)),
    }
    return {name: (first.int(), end.int()) for name, (first, end) in bounds.items()}


# ---- the program

Call = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v, cu_seqlens
# Head dims and dtypes of Hopper's kernels and of the portable ones.
KERNELS = [(d, torch.bfloat16) for d in (64, 32, 128, 256)] + [(64, torch.float16), (64, torch.float32)]


def inputs(n: int, d: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(1, h, n, d, device=device).to(dtype).requires_grad_() for h in (4, 2, 2))


def log_decay(q: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return -0.02 * torch.rand(1, 2, q.shape[2], generator=generator).to(q.device)


def fastmax_calls() -> dict[str, Call]:
    calls = {}
    for name, options in {
        "quadratic": {"causal": True, "algorithm": "quadratic"},
        "quadratic, not causal": {"algorithm": "quadratic"},
        "linear": {"causal": True, "algorithm": "linear"},
        "linear, p = 1": {"causal": True, "algorithm": "linear", "p": 1, "a0": 8.0},
        "exact window": {"causal": True, "exact_window": 100},
        "exact window, not causal": {"exact_window": 100},
        "normalised by sequence": {"algorithm": "quadratic", "normalize": "sequence"},
    }.items():

        def attend(q, k, v, cu, options=options, **more):
            temperature = 1.0 if "normalize" in options else q.shape[-1] ** 0.5
            return fastmax.fastmax_attention(q, k, v, cu_seqlens=cu, temperature=temperature, **options, **more)

        calls[name] = attend
        if "causal" in options:
            calls[f"{name}, decays"] = lambda q, k, v, cu, attend=attend: attend(q, k, v, cu, log_decay=log_decay(q))
    return calls


def flash_calls() -> dict[str, Call]:
    return {
        "causal": lambda q, k, v, cu: fastmax.flash_attention(q, k, v, causal=True, cu_seqlens=cu),
        "not causal": lambda q, k, v, cu: fastmax.flash_attention(q, k, v, cu_seqlens=cu),
        "window": lambda q, k, v, cu: fastmax.flash_attention(q, k, v, causal=True, window=200, cu_seqlens=cu),
        "window, not causal": lambda q, k, v, cu: fastmax.flash_attention(q, k, v, window=(90, 300), cu_seqlens=cu),
        "decays": lambda q, k, v, cu: fastmax.flash_attention(q, k, v, causal=True, cu_seqlens=cu, log_decay=log_decay(q)),
    }


CALLS = {"fastmax": fastmax_calls, "flash": flash_calls}


def with_gradients(call: Call, q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple[Tensor, ...]:
    o = call(q, k, v, cu)
    generator = torch.Generator().manual_seed(4)
    grad_o = torch.randn(o.shape, generator=generator).to(o)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def run_packed(which: str, device: str) -> Iterator[str]:
    """Calls the public functions with invalid `cu_seqlens`, forward and backward; then checks valid calls against float64."""
    n = VALID[-1]
    for name, call in CALLS[which]().items():
        for d, dtype in KERNELS:
            q, k, v = inputs(n, d, dtype, device)
            before = [x.detach().clone() for x in (q, k, v)]
            for kind, cu in cu_seqlens(n).items():
                yield f"{name}, d {d}, {dtype}: {kind} {cu.tolist()}"
                with_gradients(call, q, k, v, cu.to(device))
            assert all(map(torch.equal, before, (q, k, v))), "an operand has changed"
            cu = torch.tensor(VALID, dtype=torch.int32, device=device)
            yield f"{name}, d {d}, {dtype}: valid"
            actual = with_gradients(call, q, k, v, cu)
            wide = (x.detach().double().requires_grad_() for x in (q, k, v))
            for x, exact in zip(actual, with_gradients(call, *wide, cu), strict=True):
                error = ((x.double() - exact).norm() / exact.norm()).item()
                assert error < 0.05, f"a valid call after invalid ones is wrong by {error}"


def run_operators(device: str) -> Iterator[str]:
    """Calls the operators with invalid first and end keys, in every kernel that reads them."""
    operators, n = torch.ops.fastmax, 1000
    score = (0.1, 1.0, 0.9, 0.6)
    for d, dtype in KERNELS:
        q, k, v = (x.detach() for x in inputs(n, d, dtype, device))
        grad_o, decay = torch.randn_like(q), log_decay(q)
        mask = torch.rand(1, n, device=device) < 0.9
        for kind, bounds in key_bounds(n).items():
            first, end = (x.to(device).expand(1, 2, n) for x in bounds)
            for causal in (True, False):
                for decays in (None, decay) if causal else (None,):
                    for padding in (None, mask):
                        at = f"d {d}, {dtype}, {causal=}, decays {decays is not None}, mask {padding is not None}: {kind}"
                        accompanying = (decays, first, None if causal else end)
                        for algorithm in ("quadratic", "linear") if causal else ("quadratic",):
                            yield f"{algorithm}, {at}"
                            options = (padding, None, None, *accompanying, None, *score, 2, causal, 0.0, algorithm, False)
                            o, z = operators.forward(q, k, v, *options)
                            operators.backward(grad_o, None, q, k, v, o, z, *options)
                        for left, right in ((-1, -1), (70, 0 if causal else 200)):
                            yield f"flash, window {left}, {right}, {at}"
                            options = (padding, *accompanying, None, score[0], causal, left, right, False)
                            o, lse = operators.flash_forward(q, k, v, *options)
                            operators.flash_backward(grad_o, None, q, k, v, o, lse, *options)


def run_prefill(device: str) -> Iterator[str]:
    """Calls `prefill` with sequences that each continue from a state."""
    n = VALID[-1]
    q, k, v = (x.detach() for x in inputs(n, 64, torch.bfloat16, device))
    for kind, cu in cu_seqlens(n).items():
        for options in ({}, {"exact_window": 50}, {"p": 1, "a0": 8.0}):
            yield f"prefill, {options}: {kind} {cu.tolist()}"
            state = fastmax.decoding.init_state(
                cu.shape[0] - 1, 2, 64, 64, dtype=torch.bfloat16, device=device, temperature=8.0, **options
            )
            fastmax.decoding.prefill(q, k, v, state, cu_seqlens=cu.to(device))


PARTS = {
    "fastmax": lambda device: run_packed("fastmax", device),
    "flash": lambda device: run_packed("flash", device),
    "operators": run_operators,
    "prefill": run_prefill,
}


def main(part: str, device: str = "cuda") -> None:
    torch.manual_seed(0)
    for name in PARTS[part](device):
        if device == "cuda":
            torch.cuda.synchronize()  # the call before this one has ended
        print(name, flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
