"""Measures a step of generation: passes over many states or caches, after a check against float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

import fastmax
from benchmarks import timing
from benchmarks.providers import PROVIDERS, Pairs
from benchmarks.registry import DTYPES, Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol, Spread
from benchmarks.workloads.common import LIMITS, WrongResult, bandwidth, failure, make_row, precision, prepare

Token = tuple[Tensor, Tensor, Tensor]
State = fastmax.decoding.DecodeState

CONTEXT = 30  # tokens in the state that is timed
FLUSH_INTERVAL = 32
FASTMAX = ("fastmax", "fastmax_in_place", "fastmax_buffered")
SOFTMAX = ("sdpa_flash", "sdpa_cudnn")  # with a cache of case.tokens keys and values
NAMES = (*FASTMAX, *SOFTMAX, "copy")


@dataclass(frozen=True)
class Pass:
    """Consecutive steps with different states or keys, so that none is in the device's cache."""

    function: Callable[[], None]
    steps: int
    bytes_of_step: float  # bytes that a step reads and writes, on average
    one: Callable[[], object] | None = None  # a single step, for the host time
    context: Callable[[], AbstractContextManager] = nullcontext


@torch.no_grad()
def measure_decode(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Measures a step, with states or key/value caches that together exceed the device's cache.

    On CUDA the steps of a pass are one graph, so mode "step" excludes host time. Mode "host" measures it.
    """
    with precision(case.dtype):
        errors: dict[str, float] = {}
        caches: list[tuple[Tensor, Tensor]] = []

        def checked(name: str) -> Pass:
            if name in FASTMAX:
                errors[name] = check_pass(name, case, device)
            return make_pass(name, case, device, _cache_bytes(device), caches)

        passes, notes = prepare(case, skip, checked)
        rows = []
        for mode in case.modes:
            results = _host_us(passes, device, protocol) if mode == "host" else _step_us(passes, notes, device, protocol)
            for name in case.providers:
                if mode == "host" and name == "copy":
                    continue
                row = make_row(case, mode, name, results, notes[name], device) | {"error": errors.get(name, "")}
                if mode == "step" and name in results:
                    row |= bandwidth(passes[name].bytes_of_step, results[name].median / 1e3, device)
                rows.append(row)
        return rows


def _host_us(passes: Mapping[str, Pass], device: torch.device, protocol: Protocol) -> dict[str, Spread]:
    calls = {name: Call(x.one, x.context) for name, x in passes.items() if x.one is not None}
    return dict(zip(calls, timing.host_us(list(calls.values()), device, protocol), strict=True))


def _step_us(passes: Mapping[str, Pass], notes: dict[str, str], device: torch.device, protocol: Protocol) -> dict[str, Spread]:
    """Returns the microseconds of a step. A pass that cannot be captured as a graph gets a note."""
    calls = {}
    for name, x in passes.items():
        try:
            with x.context():
                calls[name] = Call(_replayed(x.function, device))
        except RuntimeError as error:
            notes[name] = failure(error)
    results = {}
    for name, x in zip(calls, timing.device_ms(list(calls.values()), device, protocol), strict=True):
        results[name] = x.times(1e3 / passes[name].steps)
    return results


def make_pass(name: str, case: Case, device: torch.device, cache_bytes: int, caches: list[tuple[Tensor, Tensor]]) -> Pass:
    """Returns the pass of a provider.

    Args:
        cache_bytes: size of the device's cache.
        caches: keys and values that softmax providers share; missing ones are added.
    """
    if name in SOFTMAX:
        return _softmax(name, case, device, cache_bytes, caches)
    state, tokens = _state(case, device, FLUSH_INTERVAL if name == "fastmax_buffered" else 1)
    bytes_of_state = state.kv_state.nbytes + state.k_sum.nbytes
    count = math.ceil(8 * cache_bytes / bytes_of_state)
    if name == "copy":
        source = torch.randn(count, bytes_of_state // 4, device=device)
        target = torch.empty_like(source)

        def copy() -> None:
            for to, x in zip(target, source, strict=True):
                to.copy_(x)

        return Pass(copy, count, 2 * bytes_of_state)
    token = tuple(x[:, :, -1:] for x in tokens)
    if name == "fastmax":
        states = [state.clone() for _ in range(count)]
        new_states: list[State] = []  # keeps the results alive, so that each step writes to different memory

        def new_state() -> None:
            new_states[:] = [fastmax.decoding.step(*token, x)[1] for x in states]

        return Pass(new_state, count, 2 * bytes_of_state, partial(fastmax.decoding.step, *token, state))
    rounds, rate = 1, 2.0
    if name == "fastmax_buffered":  # in a pass one state in FLUSH_INTERVAL flushes, or each state once
        rounds, rate = (1 if count >= FLUSH_INTERVAL else FLUSH_INTERVAL), 1 + 1 / FLUSH_INTERVAL
        count = math.ceil(count / FLUSH_INTERVAL) * FLUSH_INTERVAL if rounds == 1 else count
    states = [state.clone() for _ in range(count)]
    for i, x in enumerate(states):
        if x.buffered is not None:
            x.buffered.fill_(i % FLUSH_INTERVAL)

    def in_place() -> None:
        for x in itertools.chain.from_iterable(itertools.repeat(states, rounds)):
            fastmax.decoding.step_(*token, x)

    return Pass(in_place, rounds * count, rate * bytes_of_state, partial(fastmax.decoding.step_, *token, state))


def _softmax(name: str, case: Case, device: torch.device, cache_bytes: int, caches: list[tuple[Tensor, Tensor]]) -> Pass:
    shape = (case.batch, case.heads, case.tokens, case.head_dim)
    dtype = DTYPES[case.dtype]
    bytes_of_cache = 2 * math.prod(shape) * dtype.itemsize
    for _ in range(len(caches), math.ceil(8 * cache_bytes / bytes_of_cache)):
        caches.append(tuple(torch.randn(shape, dtype=dtype, device=device) for _ in "kv"))
    q = torch.randn(*shape[:2], 1, case.head_dim, dtype=dtype, device=device)

    def attend() -> None:
        for cache in caches:
            F.scaled_dot_product_attention(q, *cache)

    one = partial(F.scaled_dot_product_attention, q, *caches[0])
    return Pass(attend, len(caches), bytes_of_cache, one, PROVIDERS[name].context)


def _state(case: Case, device: torch.device, flush_interval: int = 1) -> tuple[State, Token]:
    """Returns the state after CONTEXT tokens, and all tokens."""
    generator = torch.Generator(device).manual_seed(case.head_dim)
    shape = (case.batch, case.heads, CONTEXT + FLUSH_INTERVAL + 2, case.head_dim)
    q, k, v = (torch.randn(shape, generator=generator, dtype=DTYPES[case.dtype], device=device) for _ in "qkv")
    options = {
        "dtype": q.dtype,
        "device": device,
        "temperature": case.head_dim**0.5,
        "p": case.p,
        "flush_interval": flush_interval,
    }
    state = fastmax.decoding.init_state(case.batch, case.heads, case.head_dim, **options)
    return fastmax.decoding.prefill(*(x[:, :, :CONTEXT] for x in (q, k, v)), state)[1], (q, k, v)


def check_pass(name: str, case: Case, device: torch.device) -> float:
    """Returns the relative error of the last two steps, against the definition in float64.

    Raises:
        WrongResult: the error is above the limit.
    """
    case = replace(case, batch=1, heads=min(case.heads * case.batch, 64))
    state, (q, k, v) = _state(case, device, FLUSH_INTERVAL if name == "fastmax_buffered" else 1)
    n, outputs = q.shape[2], []
    for t in range(CONTEXT, n):
        token = tuple(x[:, :, t : t + 1] for x in (q, k, v))
        if name == "fastmax":
            o, state = fastmax.decoding.step(*token, state)
        else:
            o = fastmax.decoding.step_(*token, state)
        outputs.append(o)
    got = torch.cat(outputs[-2:], 2).double()
    distance = torch.arange(n - 2, n, device=device)[:, None] - torch.arange(n, device=device)
    pairs = Pairs(case, torch.arange(case.heads, device=device), distance)
    weight = PROVIDERS["fastmax"].weight(q.double()[:, :, -2:] @ k.double().mT, pairs)
    weight = torch.where(distance >= 0, weight, 0.0)
    expected = (weight @ v.double()) / weight.sum(-1, keepdim=True)
    error = ((got - expected).norm() / expected.norm()).item()
    if not error < LIMITS[case.dtype]:
        raise WrongResult(f"{name} is wrong on {case.label()}: relative error {error:.1e}")
    return error


def _cache_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 2**25


def _replayed(function: Callable[[], None], device: torch.device) -> Callable[[], None]:
    if device.type != "cuda":
        return function
    function()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
