"""Measures one case: inputs, check, times. One function for each value of `Suite.workload`; they return rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from benchmarks import decoding, floors, timing, training
from benchmarks.check import LIMITS, WrongResult, check
from benchmarks.registry import DTYPES, PROVIDERS, SUSTAINED, UNITS, Case, Provider
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol, Spread


def measure_attention(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """One row a provider and mode. `skip`: providers that are not run here, and why."""
    with precision(case.dtype):
        try:
            q, k, v, grad_o = inputs(case, device)
        except torch.OutOfMemoryError:
            return [_row(case, mode, name, {}, "out of memory: its inputs") for mode in case.modes for name in case.providers]
        needs_gradients = case.modes != ("fwd",)
        notes = {name: skip.get(name) or PROVIDERS[name].missing() for name in case.providers}
        errors, checked = {}, []
        for name in case.providers:
            if notes[name]:
                continue
            errors[name], notes[name] = _checked(PROVIDERS[name], case, q, k, v, grad_o if needs_gradients else None)
            if not notes[name]:
                checked.append(PROVIDERS[name])
        forward, forward_backward = attention_calls(case, q, k, v, grad_o)
        rows = []
        for mode in case.modes:
            calls = [(forward if mode.endswith("fwd") else forward_backward)(provider) for provider in checked]
            if mode == "memory":
                arguments = sum(x.nbytes for x in (q, k, v, grad_o))
                peaks = [(timing.peak_bytes(call, device) + arguments) / 2**20 for call in calls]
                measured = [Spread(peak, peak, peak, 1) for peak in peaks]
            elif not calls:
                measured = []
            else:
                measured = _times(mode)(calls, device, protocol)
            results = dict(zip((provider.name for provider in checked), measured, strict=True))
            clock = _sm_mhz(device)
            for name in case.providers:
                row = _row(case, mode, name, results, notes[name]) | {"sm_mhz": clock}
                row["error"], row["grad_error"] = errors.get(name, ("", ""))
                if name in results:
                    row |= _attention_extras(case, mode, PROVIDERS[name], results[name].median, device)
                rows.append(row)
        return rows


def attention_calls(case: Case, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor) -> tuple[Callable[[Provider], Call], ...]:
    """The forward, and the forward with the backward, of a provider."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward(provider: Provider) -> Call:
        tensors = provider.tensors(case, q.device)
        return Call(lambda: _without_gradients(provider, case, q, k, v, tensors), provider.context)

    def forward_backward(provider: Provider) -> Call:
        tensors = provider.tensors(case, q.device)
        of = leaves + [x.requires_grad_() for x in tensors.values() if x.is_floating_point()]
        return Call(lambda: torch.autograd.grad(provider.call(*leaves, case, **tensors), of, grad_o), provider.context)

    return forward, forward_backward


# As `torch.softmax(x, -1)`.
ROW_SOFTMAX: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax_online": lambda x: torch.ops.fastmax.softmax(x, "online"),
    "softmax_safe": lambda x: torch.ops.fastmax.softmax(x, "safe"),
    "torch_softmax": lambda x: x.softmax(-1),
}


def measure_softmax(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Softmax of `case.batch` rows, `case.tokens` wide."""
    with torch.no_grad():
        generator = torch.Generator(device).manual_seed(case.tokens)
        shape = (case.batch, case.tokens)
        # Without its maximum subtracted, a row around 100 overflows.
        x = (3 * torch.randn(shape, generator=generator, device=device) + 100).to(DTYPES[case.dtype])
        expected = x.double().softmax(-1)
        notes = {name: skip.get(name, "") for name in case.providers}
        errors: dict[str, float] = {}
        for name in (name for name in case.providers if not notes[name]):
            try:
                errors[name] = _check_rows(name, case, ROW_SOFTMAX[name](x), expected)
            except WrongResult as wrong:
                notes[name] = f"refused: {wrong}"
            except RuntimeError as error:
                notes[name] = _failure(error)
        del expected
        times = timing.device_ms([Call(partial(ROW_SOFTMAX[name], x)) for name in errors], device, protocol) if errors else []
        results = dict(zip(errors, times, strict=True))
        rows = []
        for name in case.providers:
            row = _row(case, "fwd", name, results, notes[name]) | {"sm_mhz": _sm_mhz(device), "error": errors.get(name, "")}
            if name in results:
                row["gb_per_s"] = 2 * x.nbytes / results[name].median / 1e6
                if has_floor(device):
                    row["floor_ms"] = floors.copy_ms(2 * x.nbytes)
                    row["of_floor"] = results[name].median / row["floor_ms"]
            rows.append(row)
        return rows


def measure_train(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Steps of training.py on one batch of random tokens."""
    torch.compiler.reset()  # models of other cases count towards the compiler's limit of versions of a block
    with precision(case.dtype):
        notes, steps = dict.fromkeys(case.providers, "") | dict(skip), {}
        for name in (name for name in case.providers if not notes[name]):
            try:
                steps[name] = training.checked(case, PROVIDERS[name], device)
            except WrongResult as wrong:
                notes[name] = f"refused: {wrong}"
            except torch.OutOfMemoryError:
                notes[name] = "out of memory"
            except RuntimeError as error:  # a backend that does not take this case says so
                notes[name] = _failure(error)
        calls = [Call(step, PROVIDERS[name].context) for name, step in steps.items()]
        rows = []
        for mode in case.modes:
            if mode == "memory":
                peaks = [(timing.peak_bytes(call, device) + call.function.resident_bytes) / 2**20 for call in calls]
                measured = [Spread(peak, peak, peak, 1) for peak in peaks]
            else:
                measured = _times(mode)(calls, device, protocol) if calls else []
            results = dict(zip(steps, measured, strict=True))
            for name in case.providers:
                row = _row(case, mode, name, results, notes[name]) | {"sm_mhz": _sm_mhz(device)}
                if mode.endswith("train") and name in results:
                    row["note"] = f"{case.batch * case.tokens / results[name].median * 1e3:.0f} tokens/s"
                rows.append(row)
        return rows


def measure_decode(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """A step, from states or caches that together do not fit into the device's. On CUDA the steps of one pass are replayed as a
    graph, so that the host's time is not in "step"; it is what "host" measures."""
    with torch.no_grad(), precision(case.dtype):
        errors, passes, caches = {}, {}, []
        notes = dict.fromkeys(case.providers, "") | dict(skip)
        for name in (name for name in case.providers if name not in skip):
            try:
                if name in decoding.FASTMAX:
                    errors[name] = decoding.check_pass(name, case, device)
                passes[name] = decoding.make_pass(name, case, device, _cache_bytes(device), caches)
            except WrongResult as wrong:
                notes[name] = f"refused: {wrong}"
            except RuntimeError as failed:
                notes[name] = _failure(failed)
        rows = []
        for mode in case.modes:
            if mode == "host":
                timed = [name for name, x in passes.items() if x.one is not None]
                measured = timing.host_us([Call(passes[name].one, passes[name].context) for name in timed], device, protocol)
            else:
                timed, calls = [], []
                for name, x in passes.items():
                    try:
                        with x.context():
                            calls.append(Call(_replayed(x.function, device)))
                        timed.append(name)
                    except RuntimeError as failed:
                        notes[name] = _failure(failed)
                times = timing.device_ms(calls, device, protocol)
                measured = []
                for name, x in zip(timed, times, strict=True):
                    each = 1e3 / passes[name].steps
                    measured.append(Spread(x.median * each, x.p20 * each, x.p80 * each, x.samples))
            results = dict(zip(timed, measured, strict=True))
            for name in case.providers:
                if mode == "host" and name == "copy":
                    continue
                row = _row(case, mode, name, results, notes[name]) | {"sm_mhz": _sm_mhz(device)}
                row["error"] = errors.get(name, "")
                if mode == "step" and name in results:
                    moved = passes[name].bytes_of_step
                    row["gb_per_s"] = moved / results[name].median / 1e3
                    if has_floor(device):
                        row["floor_ms"] = floors.copy_ms(moved)
                        row["of_floor"] = results[name].median / 1e3 / row["floor_ms"]
                rows.append(row)
        return rows


WORKLOADS: dict[str, Callable[[Case, torch.device, Protocol, Mapping[str, str]], list[Row]]] = {
    "attention": measure_attention,
    "decode": measure_decode,
    "softmax": measure_softmax,
    "train": measure_train,
}


def _times(mode: str) -> Callable[[list[Call], torch.device, Protocol], list[Spread]]:
    """How the calls of a mode are timed."""
    if mode == "host":
        return timing.host_us
    return timing.sustained_ms if mode.startswith(SUSTAINED) else timing.device_ms


def _row(case: Case, mode: str, name: str, results: dict[str, Spread], note: str) -> Row:
    row: Row = {
        **{"case": case.label(), "batch": case.batch, "heads": case.heads, "tokens": case.tokens, "head_dim": case.head_dim},
        **{"p": case.p, "algorithm": case.algorithm, "dtype": case.dtype, "causal": case.causal, "mode": mode},
        **{"provider": name, "unit": UNITS[mode], "published": case.published.get(name, ""), "note": note},
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


def _attention_extras(case: Case, mode: str, provider: Provider, median: float, device: torch.device) -> Row:
    if mode == "memory":
        tensor = case.batch * case.heads * case.tokens * case.head_dim * DTYPES[case.dtype].itemsize / 2**20
        notes = (provider.note, f"{median / (8 * tensor):.2f} times q, k, v, o and their gradients")
        return {"note": "; ".join(filter(None, notes))}
    extras: Row = {"note": provider.note}
    arithmetic = provider.arithmetic(case)
    timed = mode.removeprefix(SUSTAINED)
    if timed in ("fwd", "fwd+bwd") and arithmetic is not None and has_floor(device):
        floor = floors.attention_ms(case, *arithmetic, timed)
        extras |= {"floor_ms": floor, "of_floor": median / floor}
    return extras


def _checked(
    provider: Provider, case: Case, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor | None
) -> tuple[tuple[object, object], str]:
    """Errors of output and gradients, and why the provider is not to be timed ("" if it is)."""
    try:
        error, grad_error = check(provider, case, q, k, v, grad_o)
        return (error, "" if grad_error is None else grad_error), ""
    except WrongResult as wrong:
        return ("", ""), f"refused: {wrong}"
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return ("", ""), "out of memory"
    except Exception as error:
        # A backend that does not take this case says so with a RuntimeError, libraries of others with whatever they like.
        if not provider.foreign and not isinstance(error, RuntimeError):
            raise
        return ("", ""), _failure(error)


def _check_rows(name: str, case: Case, got: Tensor, expected: Tensor) -> float:
    """The largest relative error of a row."""
    error = ((got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    if not error <= LIMITS[case.dtype]:
        raise WrongResult(
            f"{name} is wrong on {case.label()}: relative error of a row {error:.1e}, limit {LIMITS[case.dtype]:.0e}"
        )
    return error


def _failure(error: Exception) -> str:
    return f"failed: {type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]}"


def _without_gradients(
    provider: Provider, case: Case, q: Tensor, k: Tensor, v: Tensor, tensors: Mapping[str, Tensor]
) -> Tensor:
    with torch.no_grad():
        return provider.call(q, k, v, case, **tensors)


def inputs(case: Case, device: torch.device) -> tuple[Tensor, ...]:
    """q, k, v and the output's gradient, standard normal."""
    generator = torch.Generator(device).manual_seed(case.tokens)
    inner = (case.tokens, case.heads) if case.token_major else (case.heads, case.tokens)
    shape = (case.batch, *inner, case.head_dim)
    tensors = (torch.randn(shape, generator=generator, dtype=DTYPES[case.dtype], device=device) for _ in range(4))
    return tuple(x.transpose(1, 2) if case.token_major else x for x in tensors)


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


@contextmanager
def precision(dtype: str):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _sm_mhz(device: torch.device) -> object:
    """The clock right after a measurement; needs nvidia-ml-py."""
    if device.type != "cuda":
        return ""
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # NVML has errors of its own, and no missing clock should end a run
        return ""


def has_floor(device: torch.device) -> bool:
    return device.type == "cuda" and "H200" in torch.cuda.get_device_name(device)
