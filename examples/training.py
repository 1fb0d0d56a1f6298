"""The training loop of the language-model examples: AdamW, warm-up and a cosine, one row of losses now and then."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from text import Batch
from torch import Tensor, nn


@dataclass
class Recipe:
    steps: int
    rows: int = 10  # a row of losses every steps / rows steps, and one at the end
    lr: float = 1e-3
    final_lr: float = 0.1  # of lr, at the end of the cosine
    warmup: int = 100  # steps
    warmup_share: float | None = None  # of the training, in place of steps: as long for slow steps as for fast ones
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # of the gradient's norm
    accumulate: int = 1  # batches whose gradients make one step
    bf16: bool = False  # by autocast; the weights stay fp32
    compile: bool = False
    seconds: float | None = None  # of training, after which it ends early; the cosine then ends there


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Matrices are decayed, other weights are not, nor those of decay gates: they start at 0, where half-lives are right."""
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "decay_proj" not in name else rest).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Of the step `step`, from 0; `progress` of the training, from 0 to 1, is behind it."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    warm = (step + 1) / max(1, recipe.warmup) if recipe.warmup_share is None else progress / recipe.warmup_share
    return recipe.lr * min(1.0, warm) * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


class Trainer:
    """Trains `model`, whose `forward(tokens, targets, cu_seqlens=..., reduction=...)` is that of `model.GPT`.

    Args:
        model: on its device.
        recipe: how.
        batch: a batch on that device, drawn with the generator it is given.
        validation: batches whose loss is that of a row.
        seed: of the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        batch: Callable[[torch.Generator], Batch],
        validation: Iterable[Batch],
        seed: int = 1337,
    ):
        self.model, self.recipe, self.batch, self.validation = model, recipe, batch, list(validation)
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, recipe)
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.stop = False  # set from outside, it ends `run` after the step that runs; `run` goes on from there
        self._losses: list[Tensor] = []  # of the steps since the last row
        self._compiled = torch.compile(model) if recipe.compile else model

    def run(self, after_step: Callable[[], object] = lambda: None) -> Iterator[dict]:
        """Rows of step, tokens, seconds (of training alone: no validation, no compilation), train and val (mean losses since
        the last row and of the validation batches, nats per token) and peak_bytes (of a GPU's memory in training, or None)."""
        self.model.train()
        self._warm_up()
        every, cuda = max(1, self.recipe.steps // self.recipe.rows), self.device.type == "cuda"
        began = self._now() - self.seconds
        while not self.stop and self._progress() < 1:
            self._train_step()
            after_step()
            self.seconds = time.perf_counter() - began
            ended = self._progress() >= 1
            if self.step % every == 0 or ended or self.stop:
                self.seconds = self._now() - began  # with what the device has still to do
            if self.step % every == 0 or ended:
                train = torch.stack(self._losses).mean(dtype=torch.float64).item()
                self._losses = []
                peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
                row = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "train": train}
                row |= {"val": evaluate(self.model, self.validation, self.recipe.bf16), "peak_bytes": peak}
                yield row
                if cuda:
                    torch.cuda.reset_peak_memory_stats(self.device)
                began = self._now() - self.seconds

    @property
    def finished(self) -> bool:
        return self._progress() >= 1

    def state_dict(self) -> dict:
        """What `run` goes on from, but for the model."""
        losses = [loss.item() for loss in self._losses]
        counts = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "losses": losses}
        return counts | {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self._losses = [torch.tensor(loss, device=self.device) for loss in state["losses"]]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())

    def _progress(self) -> float:
        by_steps = self.step / self.recipe.steps
        return by_steps if self.recipe.seconds is None else max(by_steps, self.seconds / self.recipe.seconds)

    def _train_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, self._progress())
        losses = []
        for _ in range(self.recipe.accumulate):
            batch = self.batch(self.generator)
            losses.append(self._gradients(batch))
            self.tokens += batch.tokens.numel()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self._losses.append(torch.stack(losses).sum())

    def _gradients(self, batch: Batch) -> Tensor:
        """Added to those in the model; the loss, divided by the batches of a step."""
        with autocast(self.device, self.recipe.bf16):
            loss = self._compiled(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens) / self.recipe.accumulate
        loss.backward()
        return loss.detach()

    def _warm_up(self) -> None:
        """Compiles, and lets libraries choose their kernels, before the clock starts."""
        if self.recipe.compile or self.device.type == "cuda":
            self._gradients(self.batch(torch.Generator().manual_seed(0)))
            self.optimizer.zero_grad()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def evaluate(model: nn.Module, batches: Iterable[Batch], bf16: bool = False) -> float:
    """Mean loss of the tokens that have a target, in nats."""
    total, count = _sums_by_position(model, batches, bf16)
    return (total.sum() / count.sum()).item()


def evaluate_by_position(model: nn.Module, batches: Iterable[Batch], bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Mean loss in nats at each position of a sequence, and how many tokens it is of: (T,) each, float64 on the CPU. The loss
    at position i is that of predicting the token after i + 1 others; NaN where there is none."""
    total, count = _sums_by_position(model, batches, bf16)
    return total / count, count


@torch.no_grad()
def _sums_by_position(model: nn.Module, batches: Iterable[Batch], bf16: bool) -> tuple[Tensor, Tensor]:
    device, training = next(model.parameters()).device, model.training
    model.eval()
    total = count = torch.zeros(0, dtype=torch.float64)
    for batch in batches:
        with autocast(device, bf16):
            losses = model(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens, reduction="none")
        known = batch.targets.flatten() >= 0
        positions, weights = batch.positions().flatten()[known].cpu(), losses.flatten()[known].double().cpu()
        size = max(len(total), int(positions.max()) + 1)
        total = _extended(total, size) + torch.bincount(positions, weights, size)
        count = _extended(count, size) + torch.bincount(positions, minlength=size)
    model.train(training)
    return total, count


def _extended(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - len(x))])
