"""Measures time on a device, time on the host, and peak memory.

Calls that are compared take turns, so that a change of the machine's speed affects all of them. The first rounds are dropped.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

FLUSHES = 8  # flushes of the cache before each call
QUEUED = 50  # calls queued while the host is timed: fewer than the 1024 launches at which the driver blocks the host
SEGMENTS = 10  # segments of a sustained measurement
WARM_SHARE = 0.3  # unmeasured time before a sustained measurement, as a share of it: clocks and temperature settle


class Call(NamedTuple):
    function: Callable[[], object]
    context: Callable[[], AbstractContextManager] = nullcontext  # entered before timing starts


@dataclass(frozen=True)
class Protocol:
    dropped: int = 3
    rounds: int = 5  # least number of rounds that count
    seconds: float = 4.0  # rounds are repeated until they took this long together
    max_rounds: int = 100
    sustained: float = 1.0  # seconds of a sustained measurement

    def text(self, device: torch.device, check: str = "checked against float64 first") -> str:
        """Describes the protocol. `check` says what was compared before; "": nothing."""
        clock = "CUDA events, L2 flushed before each call" if device.type == "cuda" else "perf_counter"
        return (
            f"same inputs in one process{check and f', {check}'}; {clock}; calls take turns; "
            f"first {self.dropped} rounds dropped, {self.rounds} to {self.max_rounds} kept; median, p20, p80. sustained: calls "
            f"back to back for {self.sustained:g} s after {WARM_SHARE:.0%} as long unmeasured, {SEGMENTS} segments"
        )


class Spread(NamedTuple):
    median: float
    p20: float
    p80: float
    samples: int

    def times(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.p20 * factor, self.p80 * factor, self.samples)


def spread(samples: list[float]) -> Spread:
    low, middle, high = (torch.tensor(samples, dtype=torch.float64).quantile(x).item() for x in (0.2, 0.5, 0.8))
    return Spread(middle, low, high, len(samples))


def device_ms(calls: list[Call], device: torch.device, protocol: Protocol) -> list[Spread]:
    """Returns the milliseconds that each call keeps the device busy (CPU: until it returns)."""
    one_round = _cuda_round if device.type == "cuda" else _cpu_round
    return _take_turns(lambda: one_round(calls, device), protocol, seconds_per_unit=1e-3)


def sustained_ms(calls: list[Call], device: torch.device, protocol: Protocol) -> list[Spread]:
    """Returns the milliseconds per call, host time included, in a loop without pauses or cache flushes, as in training.

    Each call has a loop of its own, at least `protocol.sustained` seconds long. The spread is that of the loop's segments.
    """
    return [_sustained(call, device, protocol.sustained) for call in calls]


def _sustained(call: Call, device: torch.device, seconds: float) -> Spread:
    with call.context():
        call.function()
        _synchronize(device)
        start = time.perf_counter()
        call.function()
        _synchronize(device)
        once = max(time.perf_counter() - start, 1e-9)
        for _ in range(math.ceil(WARM_SHARE * seconds / once)):
            call.function()
        _synchronize(device)  # the queue is empty, so the loop starts the device and the host together
        calls = max(1, math.ceil(seconds / SEGMENTS / once))
        times = []
        start = time.perf_counter()
        while len(times) < SEGMENTS or sum(times) < seconds:
            for _ in range(calls):
                call.function()
            _synchronize(device)
            now = time.perf_counter()
            times.append(now - start)
            start = now
    return spread([1e3 * segment / calls for segment in times])


def host_us(calls: list[Call], device: torch.device, protocol: Protocol) -> list[Spread]:
    """Returns the microseconds of CPU time per call, without waiting for the device."""

    def one_round() -> list[float]:
        times = []
        for function, context in calls:
            with context():
                _synchronize(device)
                start = time.perf_counter()
                for _ in range(QUEUED):
                    function()
                times.append((time.perf_counter() - start) / QUEUED * 1e6)
        _synchronize(device)
        return times

    return _take_turns(one_round, protocol, seconds_per_unit=1e-6 * QUEUED)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Returns the peak memory of the call, in addition to what was allocated before it."""
    with call.context():
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            call.function()
            torch.cuda.synchronize(device)
            return torch.cuda.max_memory_allocated(device) - before
        # Returns freed memory to the system. Otherwise the call could reuse it, and it would not be counted.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = _status_bytes("VmRSS")
        call.function()
        return _status_bytes("VmHWM") - before


def _take_turns(one_round: Callable[[], list[float]], protocol: Protocol, seconds_per_unit: float) -> list[Spread]:
    for _ in range(protocol.dropped):
        one_round()
    kept: list[list[float]] = []
    spent = 0.0
    while len(kept) < protocol.rounds or (spent < protocol.seconds and len(kept) < protocol.max_rounds):
        kept.append(one_round())
        spent += sum(kept[-1]) * seconds_per_unit
    return [spread(list(samples)) for samples in zip(*kept, strict=True)]


def _cpu_round(calls: list[Call], device: torch.device) -> list[float]:
    times = []
    for function, context in calls:
        with context():
            start = time.perf_counter()
            function()
            times.append((time.perf_counter() - start) * 1e3)
    return times


def _cuda_round(calls: list[Call], device: torch.device) -> list[float]:
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in calls]
    for (function, context), (start, stop) in zip(calls, events, strict=True):
        with context():
            # Removes the inputs from the cache. It also keeps the device busy (about 1 ms on an H200) until the host has queued
            # the call. Otherwise the host's time before the first launch, and between forward and backward, would count.
            for _ in range(FLUSHES):
                _flush_buffer(device).zero_()
            start.record()
            function()
            stop.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) for start, stop in events]


@lru_cache(maxsize=1)
def _flush_buffer(device: torch.device) -> Tensor:
    return torch.empty(8 * torch.cuda.get_device_properties(device).L2_cache_size, dtype=torch.int8, device=device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
