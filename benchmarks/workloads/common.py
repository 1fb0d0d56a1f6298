"""Code that all workloads share: preparing providers, rows of the table, precision and bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch

from benchmarks import roofline, timing
from benchmarks.providers import PROVIDERS
from benchmarks.registry import SUSTAINED, UNITS, Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol, Spread

# Largest relative Frobenius error of the output: about three times that of the kernels (bf16: 2.6e-3) and of PyTorch's
# operators (bf16: 4e-3). The limit for gradients is twice this. For the gradient of log_decay, a difference of two sums over
# all tokens, it is four times this.
LIMITS = {"fp32": 2e-5, "tf32": 3e-3, "fp16": 3e-3, "bf16": 1e-2}

T = TypeVar("T")


class WrongResult(RuntimeError):
    pass


def prepare(case: Case, skip: Mapping[str, str], make: Callable[[str], T]) -> tuple[dict[str, T], dict[str, str]]:
    """Returns the result of `make` for each provider that can be timed, and a note for each provider.

    The note of a provider that can be timed is "". `skip`: provider that is left out -> the reason.
    """
    made: dict[str, T] = {}
    notes = {name: skip.get(name) or (PROVIDERS[name].missing() if name in PROVIDERS else "") for name in case.providers}
    for name in (name for name in case.providers if not notes[name]):
        try:
            made[name] = make(name)
        except WrongResult as wrong:
            notes[name] = f"refused: {wrong}"
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            notes[name] = "out of memory"
        except Exception as error:
            # A backend raises RuntimeError for unsupported cases. Other libraries raise any exception.
            if not isinstance(error, RuntimeError) and not (name in PROVIDERS and PROVIDERS[name].foreign):
                raise
            notes[name] = failure(error)
    return made, notes


def failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def times(mode: str, calls: list[Call], device: torch.device, protocol: Protocol) -> list[Spread]:
    """Returns the times of the calls, measured by the method of the mode."""
    if not calls:
        return []
    if mode == "host":
        return timing.host_us(calls, device, protocol)
    return (timing.sustained_ms if mode.startswith(SUSTAINED) else timing.device_ms)(calls, device, protocol)


def peak_mib(call: Call, device: torch.device, resident_bytes: int) -> Spread:
    """Returns the peak memory of a call, including the resident bytes that are allocated before and after it."""
    peak = (timing.peak_bytes(call, device) + resident_bytes) / 2**20
    return Spread(peak, peak, peak, 1)


def make_row(case: Case, mode: str, name: str, results: Mapping[str, Spread], note: str, device: torch.device) -> Row:
    """Returns the row of a provider. Without a result it has no numbers, only the note."""
    row: Row = {
        **{"case": case.label(), "batch": case.batch, "heads": case.heads, "tokens": case.tokens, "head_dim": case.head_dim},
        **{"p": case.p, "algorithm": case.algorithm, "dtype": case.dtype, "causal": case.causal, "mode": mode},
        **{"provider": name, "unit": UNITS[mode], "published": case.published.get(name, ""), "note": note},
        "sm_mhz": _sm_mhz(device),
    }
    if name not in results:
        return row
    row |= dict(zip(("median", "p20", "p80", "samples"), results[name], strict=True))
    if case.peer in results:
        row |= {"peer": case.peer, "of_peer": results[name].median / results[case.peer].median}
    target = case.targets.get(mode)
    if target is not None and name in case.providers[: case.judged]:
        reached = row.get("of_peer") if target.of_peer else row["median"]
        row |= {"target": target.value, "target_of": "peer" if target.of_peer else row["unit"]}
        row["met"] = "" if reached is None else "yes" if reached <= target.value else "no"
    return row


def bandwidth(bytes_moved: float, ms: float, device: torch.device) -> Row:
    """Returns the cells of a memory-bound call: rate and floor."""
    return {"gb_per_s": bytes_moved / ms / 1e6} | above_floor(ms, lambda: roofline.copy_ms(bytes_moved), device)


def above_floor(ms: float, floor_ms: Callable[[], float], device: torch.device) -> Row:
    if not has_floor(device):
        return {}
    floor = floor_ms()
    return {"floor_ms": floor, "of_floor": ms / floor}


def has_floor(device: torch.device) -> bool:
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)


@contextmanager
def precision(dtype: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _sm_mhz(device: torch.device) -> object:
    """Returns the clock right after a measurement, "" if it is unknown. Needs nvidia-ml-py."""
    if device.type != "cuda":
        return ""
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # NVML has its own exceptions, and a missing clock must not end a run
        return ""
