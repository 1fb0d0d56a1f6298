"""One training step (forward, backward, AdamW) of the examples' GPT, with the attention of a provider.

Where the case asks for bf16, it is bf16 by autocast: weights, gradients, moments and the residual stream are fp32, but for the
weights of the norms of q and k, which PyTorch's fused RMS norm takes in its input's dtype only. Activations are kept, not
recomputed: about 60 GiB at 131072 tokens. The cross entropy goes through the tokens in chunks and recomputes the logits of each
in its backward: 131072 x 50304 of them in fp32 would be 25 GiB, and their gradient as much.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.check import WrongResult
from benchmarks.registry import Case, Provider

LAYERS = 12
VOCAB = 50304  # GPT-2's 50257, padded to a multiple of 64
CHUNK = 8192  # tokens whose logits are in memory together
LOSS_MARGIN = 0.5  # nats of the first loss around ln(VOCAB), which a model that knows nothing has

ATTENTION = {
    "fastmax_p2": {"attention": "fastmax", "p": 2},
    "fastmax_p1": {"attention": "fastmax", "p": 1},
    **{name: {"attention": "softmax"} for name in ("sdpa", "sdpa_cudnn", "sdpa_flash")},
}


class Step:
    """Callable: a step on always the same batch of random tokens; returns the loss before it."""

    def __init__(self, case: Case, name: str, device: torch.device):
        sys.path.append(str(Path(__file__).parents[1] / "examples"))
        try:
            from model import GPT, GPTConfig
        finally:
            sys.path.pop()
        sizes = {"vocab_size": VOCAB, "block_size": case.tokens, "n_layer": LAYERS, "n_head": case.heads}
        config = GPTConfig(**sizes, n_embd=case.heads * case.head_dim, **ATTENTION[name])
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
            torch.manual_seed(0)  # every provider starts from the same weights
            self.model = GPT(config)
            if case.dtype == "bf16":
                for block in self.model.blocks:
                    block.attn.q_norm.bfloat16(), block.attn.k_norm.bfloat16()
            self.tokens, self.targets = torch.randint(VOCAB, (2, case.batch, case.tokens))
        self.head, self.model.head = self.model.head, nn.Identity()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=device.type == "cuda")
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=case.dtype == "bf16")

    def __call__(self) -> Tensor:
        loss = self.gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self) -> Tensor:
        with self.autocast:
            hidden = self.model(self.tokens).flatten(0, 1)
            parts = zip(hidden.split(CHUNK), self.targets.flatten().split(CHUNK), strict=True)
            sums = [checkpoint(self._sum_of_losses, x, target, use_reentrant=False) for x, target in parts]
            loss = torch.stack(sums).sum() / self.targets.numel()
        loss.backward()
        return loss.detach()

    def _sum_of_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), targets, reduction="sum")

    @property
    def resident_bytes(self) -> int:
        """Of the weights and AdamW's two moments, which are there before a step and after it."""
        return 3 * sum(x.nbytes for x in self.model.parameters())


def checked(case: Case, provider: Provider, device: torch.device) -> Step:
    """A step whose gradients were looked at once.

    Raises:
        WrongResult: the first loss is not near that of a model that knows nothing, or a gradient is not finite.
    """
    step = Step(case, provider.name, device)
    check(step, case, provider)
    step.optimizer.step()  # makes its state, so that the memory of a later step does not contain it
    step.optimizer.zero_grad()
    return step


def check(step: Step, case: Case, provider: Provider) -> float:
    """The loss, whose gradients stay in the model."""
    with provider.context():
        loss = step.gradients().item()
    if not abs(loss - math.log(VOCAB)) < LOSS_MARGIN:
        raise WrongResult(f"{provider.name} on {case.label()}: first loss {loss:.3f}, ln(vocabulary) is {math.log(VOCAB):.3f}")
    for name, parameter in step.model.named_parameters():
        if not parameter.grad.sum(dtype=torch.float64).isfinite():
            raise WrongResult(f"{provider.name} on {case.label()}: the gradient of {name} is not finite")
    return loss
