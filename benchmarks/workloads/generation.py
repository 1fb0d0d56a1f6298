"""Measures a token of generation with a whole model: the GPT of docs/quality.md with 25M parameters, in bf16.

The softmax model has a preallocated cache that holds the context, and attends to all of it. On CUDA a token is one replay of a
graph for all models. Choosing the token from the logits is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import timing
from benchmarks.learn.equal_steps import SETTINGS
from benchmarks.learn.examples import generate
from benchmarks.learn.variants import VARIANTS, make_gpt
from benchmarks.registry import DTYPES, Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol, Spread
from benchmarks.workloads.common import WrongResult, make_row, prepare
from benchmarks.workloads.train import sizes_of

TOKENS = 32  # tokens of a timed call: a buffered state is updated once in as many
LONGEST_READ = 4096  # tokens that a state of fixed size reads before it is timed: more change neither its size nor its work
LIMIT = 0.05  # largest relative error of the logits: 8 layers in bf16

# Variant of the model and backend of its softmax, by name of the provider
MODELS: dict[str, tuple[str, SDPBackend | None]] = {
    "p2_all": ("p2_all", None),
    "kept_keys": ("kept_keys", None),
    "softmax_flash": ("softmax", SDPBackend.FLASH_ATTENTION),
    "softmax_cudnn": ("softmax", SDPBackend.CUDNN_ATTENTION),
    "softmax_math": ("softmax", SDPBackend.MATH),
}


@torch.no_grad()
def measure_generation(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Measures tokens after a context of `case.tokens` random ones."""

    def measure(name: str) -> tuple[Spread, float]:
        """Returns the time of a token, and the MiB of the states. They are freed before the next model's are made."""
        check(name, case, device)
        model, states = generating(*after_context(name, case, device), TOKENS)
        with backend_of(name):
            step = generate.make_step(model, states, graph=device.type == "cuda")
            (spread,) = timing.sustained_ms([Call(partial(_generate, step, states, case.tokens))], device, protocol)
        return spread.times(1e3 / TOKENS), generate.mib(states)

    measured, notes = prepare(case, skip, measure)
    notes |= {name: f"state or cache: {mib:.0f} MiB" for name, (_, mib) in measured.items()}
    results = {name: spread for name, (spread, _) in measured.items()}
    return [make_row(case, case.modes[0], name, results, notes[name], device) for name in case.providers]


def _generate(step: Callable[[Tensor], Tensor], states: list, context: int) -> None:
    for state in states:
        if isinstance(state.attention, generate.CacheInPlace):
            state.attention.length = context
    tokens = torch.zeros(len(states[0].positions), 1, dtype=torch.int64, device=states[0].device)
    for _ in range(TOKENS):
        step(tokens)


def backend_of(name: str) -> AbstractContextManager:
    backend = MODELS[name][1]
    return nullcontext() if backend is None else sdpa_kernel(backend)


def after_context(name: str, case: Case, device: torch.device) -> tuple[nn.Module, list]:
    """Returns an untrained model and its states after the context. A cache holds random keys and values."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        gpt = make_gpt(VARIANTS[MODELS[name][0]], SETTINGS["25M"].window, **sizes_of(case))
    gpt = generate.prepared(gpt, device, DTYPES[case.dtype])
    if gpt.config.attention == "softmax":
        return gpt, [generate.cache_of_noise(state, case.tokens) for state in gpt.init_states(case.batch)]
    prompt = torch.randint(gpt.config.vocab_size, (case.batch, min(case.tokens, LONGEST_READ)), device=device)
    return gpt, generate.read(gpt, prompt, generate.init_states(gpt, case.batch))[1]


def generating(gpt: nn.Module, states: list, tokens: int) -> tuple[nn.Module, list]:
    """Returns the model that generates, and copies of the states, with room for more tokens, that it updates in place."""
    if gpt.config.attention == "softmax":
        return generate.with_softmax(gpt), generate.in_place(states, tokens)
    return gpt, [state.clone() for state in states]


def check(name: str, case: Case, device: torch.device) -> float:
    """Returns the relative error of the logits of a step against the model's forward with a state.

    Raises:
        WrongResult: the error is above the limit.
    """
    case = replace(case, batch=1, tokens=min(case.tokens, 1024))
    token = torch.ones(1, 1, dtype=torch.int64, device=device)
    gpt, before = after_context(name, case, device)
    model, states = generating(gpt, before, 1)
    with backend_of(name):
        got = generate.make_step(model, states, graph=device.type == "cuda")(token)
    expected = gpt.prefill(token, before)[0][:, -1]
    error = ((got.double() - expected.double()).norm() / expected.double().norm()).item()
    if not error < LIMIT:
        raise WrongResult(f"{name} is wrong on {case.label()}: relative error of the logits {error:.1e}, limit {LIMIT}")
    return error
