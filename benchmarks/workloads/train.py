"""Measures a training step (forward, backward, AdamW) of the examples' GPT, with the attention of a provider.

The GPT with 124M parameters has GPT-2's vocabulary. That with 25M is the model of docs/quality.md: its tokens are bytes. The
provider is a kernel, whose layer has none of the optional parts and whose model is not compiled, or a variant of
`benchmarks.learn`, whose model is compiled block by block unless the title of the case ends in "eager".

With bf16 the step runs under autocast: weights, gradients, moments and the residual stream are fp32. Activations are saved, not
recomputed: about 60 GiB at 131072 tokens. The model computes its loss in chunks, and the backward recomputes the logits of each
chunk: 131072 x 50304 logits in fp32 would be 25 GiB, and their gradient as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn

import fastmax
from benchmarks.learn.equal_steps import SETTINGS
from benchmarks.learn.examples import model, training
from benchmarks.learn.variants import VARIANTS, SDPASelfAttention, make_gpt
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.registry import Case
from benchmarks.report import Row
from benchmarks.timing import Call, Protocol
from benchmarks.workloads.common import WrongResult, make_row, peak_mib, precision, prepare, times

# Title of a case -> sizes of its model. GPT-2's vocabulary of 50257 is padded to a multiple of 64.
SIZES = {"GPT 124M": {"vocab_size": 50304, "n_layer": 12}, "GPT 25M": {"vocab_size": 256, "n_layer": SETTINGS["25M"].n_layer}}
EAGER = " eager"
LOSS_MARGIN = 0.5  # nats between the first loss and ln(vocabulary), the loss of an untrained model

ATTENTION = {
    "fastmax_p2": {"attention": "fastmax", "p": 2},
    "fastmax_p1": {"attention": "fastmax", "p": 1},
    **{name: {"attention": "softmax"} for name in ("sdpa", "sdpa_cudnn", "sdpa_flash")},
}


def measure_train(case: Case, device: torch.device, protocol: Protocol, skip: Mapping[str, str]) -> list[Row]:
    """Measures steps on one batch of random tokens."""
    torch.compiler.reset()  # models of earlier cases count towards the compiler's limit of versions of a block
    with precision(case.dtype):
        steps, notes = prepare(case, skip, lambda name: checked(case, PROVIDERS[name], device))
        calls = [Call(step, PROVIDERS[name].context) for name, step in steps.items()]
        rows = []
        for mode in case.modes:
            if mode == "memory":
                measured = [peak_mib(call, device, call.function.resident_bytes) for call in calls]
            else:
                measured = times(mode, calls, device, protocol)
            results = dict(zip(steps, measured, strict=True))
            for name in case.providers:
                row = make_row(case, mode, name, results, notes[name], device)
                if mode.endswith("train") and name in results:
                    row["note"] = f"{case.batch * case.tokens / results[name].median * 1e3:.0f} tokens/s"
                rows.append(row)
        return rows


def sizes_of(case: Case) -> dict[str, int]:
    """Returns sizes, as keywords of GPTConfig, of a case's model."""
    of_case = {"block_size": case.tokens, "n_head": case.heads, "n_embd": case.heads * case.head_dim}
    return SIZES[case.title.removesuffix(EAGER)] | of_case


def gpt_of_kernel(case: Case, name: str, device: torch.device) -> nn.Module:
    options = dict(ATTENTION[name])
    config = model.GPTConfig(**sizes_of(case), attention=options.pop("attention"), parts=model.PLAIN | options)
    layer = fastmax.FastmaxSelfAttention if config.attention == "fastmax" else SDPASelfAttention
    return model.GPT(config, partial(model.make_layer, layer=layer))


def gpt_of_variant(case: Case, name: str, device: torch.device) -> nn.Module:
    gpt = make_gpt(VARIANTS[name], SETTINGS["25M"].window, **sizes_of(case))
    if not case.title.endswith(EAGER) and device.type == "cuda":
        training.compile_blocks(gpt)
    return gpt


class Step:
    """A training step on one fixed batch of random tokens. A call returns the loss before the step."""

    def __init__(self, case: Case, name: str, device: torch.device):
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)  # the same weights for all providers
            make_model = gpt_of_variant if name in VARIANTS else gpt_of_kernel
            self.model = make_model(case, name, device)
            self.vocab = self.model.config.vocab_size
            self.tokens, self.targets = torch.randint(self.vocab, (2, case.batch, case.tokens))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bf16")

    def __call__(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self) -> Tensor:
        with self.autocast:
            loss = self.model(self.tokens, self.targets)
        loss.backward()
        return loss.detach()

    @property
    def resident_bytes(self) -> int:
        """Size of the weights and of AdamW's two moments, which outlive a step."""
        return 3 * sum(x.nbytes for x in self.model.parameters())


def checked(case: Case, provider: Provider, device: torch.device) -> Step:
    """Returns a step after checking its gradients once.

    Raises:
        WrongResult: the first loss is not near ln(vocabulary), or a gradient is not finite.
    """
    step = Step(case, provider.name, device)
    check(step, case, provider)
    step.optimizer.step()  # creates the optimizer's state, so that the peak of a later step does not include its creation
    step.optimizer.zero_grad()
    return step


def check(step: Step, case: Case, provider: Provider) -> float:
    """Checks the first loss and its gradients, which stay in the model; returns the loss."""
    with provider.context():
        loss = step.gradients().item()
    if not abs(loss - math.log(step.vocab)) < LOSS_MARGIN:
        raise WrongResult(
            f"{provider.name} on {case.label()}: first loss {loss:.3f}, ln(vocabulary) is {math.log(step.vocab):.3f}"
        )
    for name, parameter in step.model.named_parameters():
        if not parameter.grad.sum(dtype=torch.float64).isfinite():
            raise WrongResult(f"{provider.name} on {case.label()}: the gradient of {name} is not finite")
    return loss
