"""Attention over several GPUs: `torchrun --nproc-per-node 2 -m benchmarks.distributed [--layers] [--only TEXT] [--out CSV]`.

Weak scaling: every rank holds the same number of tokens. The time of forward + backward over all ranks is compared with that
of one rank's tokens alone; every rank measures both in turn. Times are those of the slowest rank. The note has the bytes that
a rank received, counted at PyTorch's dispatcher and equal to the formula. `--device cpu` runs small sizes with gloo.

`--layers` measures layers and DTensors in place of functions, without counting bytes. Where heads are sharded, each rank has
its share of the heads and all tokens, and the comparison is with all heads on one GPU.

On one GPU, without torchrun, `--compute-only [RANKS]` measures each rank in turn, without the others and with messages that
take no time.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks import report
from benchmarks.messages import Received, as_rank
from benchmarks.registry import DTYPES
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol, Spread, device_ms, peak_bytes
from fastmax import FastmaxSelfAttention, fastmax_attention, flash_attention
from fastmax.distributed import (
    ContextParallel,
    Layout,
    TensorParallel,
    context_parallel_attention,
    context_parallel_flash_attention,
    contiguous_layout,
    exchanged_bytes,
    zigzag_layout,
)


@dataclass(frozen=True)
class Case:
    """`tokens` counts those of each rank, or of all ranks if mode is "memory"."""

    tokens: int
    head_dim: int
    heads: int = 32
    algorithm: str = "linear"
    dtype: str = "bf16"
    decay: bool = False
    gate: bool = False
    exact_window: int = 0
    mode: str = "fwd+bwd"  # or memory
    at_least: float = 0.0  # share of one GPU's rate, the target

    def label(self) -> str:
        given = {"decay": self.decay, "gate": self.gate, f"window {self.exact_window}": self.exact_window > 0}
        options = [name for name, has in given.items() if has]
        where = "in all" if self.mode == "memory" else "a GPU"
        return " ".join([self.algorithm, self.dtype, f"(1,{self.heads},{self.tokens} {where},{self.head_dim})", *options])

    def layout(self, world: int) -> Layout:
        """The layout that gives all ranks of causal attention the same work."""
        if self.algorithm == "linear":
            return contiguous_layout([self.tokens] * world)
        return zigzag_layout(self.tokens * world, world)


@dataclass(frozen=True)
class LayerCase:
    """A `FastmaxSelfAttention`, or attention to DTensors, with p = 2."""

    tokens: int  # of each rank if tokens are sharded, else of all ranks
    head_dim: int
    what: Literal["layer", "DTensors"]
    sharded: Literal["heads", "tokens"] = "heads"
    heads: int = 32
    dtype: str = "bf16"
    mode: str = "fwd+bwd"
    algorithm: str = "linear"

    def label(self) -> str:
        where = "a GPU" if self.sharded == "tokens" else "in all"
        return f"{self.what}, {self.sharded} sharded, {self.dtype} (1,{self.heads},{self.tokens} {where},{self.head_dim})"


CASES = {
    "cuda": (
        Case(65536, 64, at_least=0.92),
        Case(65536, 128, at_least=0.95),
        Case(65536, 64, decay=True),
        Case(65536, 64, decay=True, exact_window=256),
        Case(65536, 64, decay=True, gate=True, exact_window=256),
        Case(65536, 64, heads=16, algorithm="softmax", at_least=0.90),
        Case(65536, 64, heads=16, algorithm="softmax", decay=True, gate=True),
        Case(65536, 64, heads=16, algorithm="quadratic"),
        Case(2**20, 64, heads=16, mode="memory"),  # on one GPU; on several, tokens of all together
    ),
    "cpu": (
        Case(2048, 32, heads=2, dtype="fp32"),
        Case(512, 32, heads=2, dtype="fp32", decay=True, gate=True, exact_window=16),
        Case(512, 32, heads=2, dtype="fp32", algorithm="softmax", gate=True),
        Case(512, 32, heads=2, dtype="fp32", algorithm="quadratic", decay=True),
        Case(4096, 32, heads=2, dtype="fp32", mode="memory"),
    ),
}
LAYER_CASES = {
    "cuda": (
        LayerCase(65536, 64, "layer", "tokens"),
        LayerCase(65536, 64, "layer"),
        LayerCase(65536, 64, "DTensors"),
    ),
    "cpu": (
        LayerCase(512, 32, "layer", "tokens", heads=2, dtype="fp32"),
        LayerCase(512, 32, "layer", heads=2, dtype="fp32"),
        LayerCase(512, 32, "DTensors", heads=2, dtype="fp32"),
    ),
}


def attend(case: Case, tensors: dict[str, Tensor], layout: Layout | None) -> Tensor:
    """Computes attention over one rank's tokens, or with a layout over those of all ranks."""
    over_ranks = {} if layout is None else {"layout": layout}
    of_keys = {name: tensors.get(name) for name in ("log_decay", "log_input_gate")}
    options = {"causal": True} | of_keys | over_ranks
    q, k, v = (tensors[name] for name in "qkv")
    if case.algorithm == "softmax":
        return (flash_attention if layout is None else context_parallel_flash_attention)(q, k, v, **options)
    options |= {"temperature": case.head_dim**0.5, "algorithm": case.algorithm, "exact_window": case.exact_window}
    return (fastmax_attention if layout is None else context_parallel_attention)(q, k, v, **options)


def make_inputs(case: Case, tokens: int, device: torch.device, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    shape = 1, case.heads, tokens, case.head_dim
    tensors = {name: torch.randn(shape, generator=generator, device=device).to(DTYPES[case.dtype]) for name in "qkvg"}
    if case.decay:
        tensors["log_decay"] = -0.01 * torch.rand(shape[:3], generator=generator, device=device)
    if case.gate:
        tensors["log_input_gate"] = torch.randn(shape[:3], generator=generator, device=device)
    return {name: x.requires_grad_(name != "g") for name, x in tensors.items()}


def differentiate(case: Case, tensors: dict[str, Tensor], layout: Layout | None) -> None:
    leaves = [x for name, x in tensors.items() if name != "g"]
    torch.autograd.grad(attend(case, tensors, layout), leaves, tensors["g"])


def check(case: Case, device: torch.device) -> None:
    """Raises AssertionError if the ranks' output differs from that of one process, on fewer tokens."""
    group, few = dist.group.WORLD, replace(case, tokens=min(1024, case.tokens))
    layout = few.layout(group.size())
    with torch.no_grad():
        whole = make_inputs(few, layout.tokens, device, seed=0)
        places = torch.cat([torch.arange(part.start, part.stop, device=device) for part in layout.of(group.rank())])
        own = {name: x.index_select(2, places) for name, x in whole.items()}
        expected, got = attend(few, whole, None)[:, :, places], attend(few, own, layout)
    _compare(case, got, expected)


def _compare(case: Case | LayerCase, got: Tensor, expected: Tensor) -> None:
    error = ((got - expected).double().norm() / expected.double().norm()).item()
    if not error < (1e-5 if case.dtype == "fp32" else 1e-2):
        raise AssertionError(f"{case.label()}: the ranks' output differs from one process's by {error:.1e}")


@contextmanager
def together(device: torch.device):
    """Lets all ranks begin at the same time."""
    dist.all_reduce(torch.zeros(1, device=device))
    yield


def measure(case: Case, device: torch.device, protocol: Protocol) -> list[Row]:
    group = dist.group.WORLD
    world, rank = group.size(), group.rank()
    if world > 1:
        check(case, device)
    memory = case.mode == "memory"
    tokens = case.tokens // world if memory else case.tokens
    layout = replace(case, tokens=tokens).layout(world)
    tensors = make_inputs(case, tokens, device, seed=rank)
    alone, spread = (Call(lambda x=x: differentiate(case, tensors, x), lambda: together(device)) for x in (None, layout))
    by_formula = _bytes(case, layout, rank)
    with Received(group) as received:
        differentiate(case, tensors, layout)
    if received.bytes != by_formula:
        raise AssertionError(f"{case.label()}: rank {rank} received {received.bytes} bytes, by formula {by_formula}")
    if memory:
        found = {f"{world} GPUs": _peak(spread, device)}
    else:
        times = device_ms([alone, spread], device, protocol)
        found = dict(zip(("one GPU", f"{world} GPUs"), times, strict=True))
    found = {name: _slowest(x, device) for name, x in found.items()}
    rows = []
    for name, x in found.items():
        row = _row(case, tokens, name, x)
        if name != "one GPU":
            row["note"] = f"{received.bytes} bytes received by a rank, as by formula"
        if not memory and name != "one GPU":
            row |= {"peer": "one GPU", "of_peer": x.median / found["one GPU"].median}
            if case.at_least:
                most = _work(case, world) / case.at_least
                row |= {"target": most, "target_of": "peer", "met": "yes" if row["of_peer"] <= most else "no"}
            row["note"] += f"; {_work(case, world) / row['of_peer']:.1%} of one GPU's rate"
        rows.append(row)
    return rows


def measure_layer(case: LayerCase, device: torch.device, protocol: Protocol) -> list[Row]:
    world, weak = dist.get_world_size(), case.sharded == "tokens"
    attention = make_attention(case, device)
    with torch.no_grad():
        few = attention.inputs(min(1024, case.tokens) * (world if weak else 1))
        _compare(case, attention.of_ranks(attention.shard(few)), attention.shard(attention.of_one(few)))
    x = attention.inputs(case.tokens)
    own = x if weak else attention.shard(x)

    def differentiated(function, x: Tensor, weights: list[Tensor]) -> Call:
        leaf = x.clone().requires_grad_()
        return Call(lambda: torch.autograd.grad(function(leaf).square().sum(), [leaf, *weights]), lambda: together(device))

    alone, spread = (
        differentiated(attention.of_one, x, attention.weights_of_one),
        differentiated(attention.of_ranks, own, attention.weights_of_ranks),
    )
    found = [_slowest(x, device) for x in device_ms([alone, spread], device, protocol)]
    rows = [_row(case, case.tokens, name, x) for name, x in zip(("one GPU", f"{world} GPUs"), found, strict=True)]
    of_peer = found[1].median / found[0].median
    rows[1] |= {"peer": "one GPU", "of_peer": of_peer, "note": f"{_work(case, world) / of_peer:.1%} of one GPU's rate"}
    return rows


@dataclass(frozen=True)
class Attention:
    """A layer, or attention to q, k and v stacked in one tensor, on one GPU and over ranks."""

    of_one: Callable[[Tensor], Tensor]
    of_ranks: Callable[[Tensor], Tensor]  # from this rank's shard of the input to that of the output
    shard: Callable[[Tensor], Tensor]  # of an input or an output
    inputs: Callable[[int], Tensor]  # for a number of tokens, the same on all ranks
    weights_of_one: list[Tensor]
    weights_of_ranks: list[Tensor]


def make_attention(case: LayerCase, device: torch.device) -> Attention:
    rank, world, dtype = dist.get_rank(), dist.get_world_size(), DTYPES[case.dtype]
    mesh, width = init_device_mesh(device.type, (world,)), case.heads * case.head_dim

    def inputs(tokens: int) -> Tensor:
        shape = (1, tokens, width) if case.what == "layer" else (3, 1, case.heads, tokens, case.head_dim)
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)

    if case.what == "DTensors":
        attend = partial(fastmax_attention, causal=True, temperature=case.head_dim**0.5, algorithm="linear")

        def of_ranks(own: Tensor) -> Tensor:
            return attend(*(DTensor.from_local(x, mesh, [Shard(1)], run_check=False) for x in own)).to_local()

        return Attention(lambda x: attend(*x), of_ranks, lambda x: x.chunk(world, dim=-3)[rank], inputs, [], [])

    torch.manual_seed(0)
    layer = FastmaxSelfAttention(width, case.heads, device=device, dtype=dtype)
    style = ContextParallel() if case.sharded == "tokens" else TensorParallel()
    parallel = parallelize_module(copy.deepcopy(layer), mesh, style)
    shard = partial(parallel.context.own, dim=1) if case.sharded == "tokens" else (lambda x: x)
    return Attention(layer, parallel, shard, inputs, list(layer.parameters()), list(parallel.parameters()))


def measure_alone(case: Case, device: torch.device, protocol: Protocol, world: int) -> list[Row]:
    """Measures each of `world` ranks in turn, and one process with a rank's tokens (for memory: with all tokens)."""
    memory = case.mode == "memory"
    tokens = case.tokens // world if memory else case.tokens
    layout = replace(case, tokens=tokens).layout(world)
    own = make_inputs(case, tokens, device, seed=0)
    ranks = [Call(lambda: differentiate(case, own, layout), partial(as_rank, rank, world)) for rank in range(world)]
    if memory:
        of_ranks = [_peak(rank, device) for rank in ranks]
        whole = make_inputs(case, case.tokens, device, seed=0)
        one = _peak(Call(lambda: differentiate(case, whole, None)), device)
    else:
        one, *of_ranks = device_ms([Call(lambda: differentiate(case, own, None)), *ranks], device, protocol)
    rows = [_row(case, case.tokens, "one GPU", one)]
    for rank, x in enumerate(of_ranks):
        row = _row(case, tokens, f"rank {rank} of {world}", x) | {"peer": "one GPU", "of_peer": x.median / one.median}
        row["note"] = f"without messages: {_bytes(case, layout, rank)} bytes that would come are copied on the device"
        if not memory:
            row["note"] += f"; {_work(case, world) / row['of_peer']:.1%} of one GPU's rate"
        rows.append(row)
    return rows


def _peak(call: Call, device: torch.device) -> Spread:
    """MiB of the second call, which excludes what the first one allocates for good."""
    with call.context():
        call.function()
    return Spread(*(peak_bytes(call, device) / 2**20,) * 3, 1)


def _bytes(case: Case, layout: Layout, rank: int) -> int:
    """Returns the bytes received in forward and backward, by formula."""
    sizes = {"kv_heads": case.heads, "head_dim": case.head_dim, "dtype": DTYPES[case.dtype], "exact_window": case.exact_window}
    of_keys = {"log_decay": case.decay, "log_input_gate": case.gate}
    return sum(exchanged_bytes(layout, rank, **sizes, **of_keys, algorithm=case.algorithm))


def _work(case: Case | LayerCase, world: int) -> float:
    """Returns the work of a rank over that of one GPU. Softmax and the quadratic algorithm see the tokens of all ranks; of
    sharded heads a rank has its share."""
    if isinstance(case, LayerCase) and case.sharded == "heads":
        return 1 / world
    return 1 if case.algorithm == "linear" else world


def _row(case: Case | LayerCase, tokens: int, provider: str, x: Spread) -> Row:
    row = {"case": case.label(), "batch": 1, "heads": case.heads, "tokens": tokens, "head_dim": case.head_dim, "causal": True}
    row |= {"algorithm": case.algorithm, "dtype": case.dtype, "mode": case.mode, "provider": provider, "median": x.median}
    unit = "MiB" if case.mode == "memory" else "ms"
    return row | {"p20": x.p20, "p80": x.p80, "unit": unit, "samples": x.samples, "note": ""}


def _slowest(x: Spread, device: torch.device) -> Spread:
    """Returns the times of the slowest rank."""
    numbers = torch.tensor(x[:3], dtype=torch.float64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return Spread(*numbers.tolist(), x.samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the cases whose label contains this")
    parser.add_argument("--layers", action="store_true", help="measure layers and DTensors")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=CASES, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compute-only", type=int, nargs="?", const=2, default=0, metavar="RANKS", help="default: 2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--commit", default="")
    options = parser.parse_args()
    device, alone = torch.device(options.device), options.compute_only > 0
    if device.type == "cuda":
        device = torch.device("cuda", 0 if alone else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not alone:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rows_of = partial(measure_alone, world=options.compute_only) if alone else measure
    cases, suite = CASES, "ranks alone" if alone else "distributed"
    if options.layers:
        if alone:
            parser.error("--compute-only measures functions: leave --layers out")
        cases, suite, rows_of = LAYER_CASES, "distributed layers", measure_layer
    first = alone or dist.get_rank() == 0
    # All ranks take the same number of rounds.
    protocol = Protocol(dropped=3, rounds=options.rounds, seconds=0.0)
    check = "" if alone else "outputs compared with those of one process first"  # without other ranks there is no output
    text = protocol.text(device, check)
    constant = {"suite": suite, "protocol": text} | report.environment(device, options.commit)
    rows: list[Row] = []
    if first:
        print(report.HEADER)
    for case in cases[device.type]:
        if options.only not in case.label():
            continue
        for row in rows_of(case, device, protocol):
            rows.append(row | constant)
            if first:
                print(report.line(row), flush=True)
        if first and options.out:
            report.write_csv(rows, options.out)
    if not alone:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
