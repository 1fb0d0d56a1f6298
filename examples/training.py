"""The training loop of the language-model examples: AdamW, a warm-up and cosine schedule, and rows of losses."""

import csv
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from text import Batch
from torch import Tensor, nn

COMPILED = 32  # versions of a block: shapes of windows, Fastmax and softmax, training and validation


@dataclass
class Recipe:
    steps: int
    rows: int = 10  # of losses: one every steps // rows steps, and one at the end
    lr: float = 1e-3
    final_lr: float = 0.1  # fraction of lr at the end of the cosine
    warmup: int = 100  # steps
    warmup_share: float | None = None  # fraction of the training, replaces `warmup`
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # largest norm of the gradient
    accumulate: int = 1  # batches per step
    bf16: bool = False  # autocast; the weights stay fp32
    compile: bool = False
    dynamic: bool | None = None  # of torch.compile. False: compiles each shape of a batch on its own
    seconds: float | None = None  # time limit of the training; the cosine ends with whichever limit is reached first


def compile_blocks(model: nn.Module, dynamic: bool | None = None) -> None:
    """Compiles each module of `model.blocks`. Of blocks that are alike the compiler compiles one: deep models start sooner."""
    torch._dynamo.config.recompile_limit = max(COMPILED, torch._dynamo.config.recompile_limit)
    for block in model.blocks:
        block.compile(dynamic=dynamic)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.AdamW:
    """Returns AdamW with weight decay on all matrices but those of the decay gates, whose initial value is 0."""
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        (decayed if parameter.dim() == 2 and "decay_proj" not in name else rest).append(parameter)
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=recipe.betas, fused=fused)


def length_at(schedule: Sequence[tuple[float, int]], progress: float) -> int:
    """Returns the length of training windows.

    Args:
        schedule: (the part of the training from which on windows have a length, the length), ascending. The first part is 0.
        progress: the part of the training that is done, from 0 to 1.
    """
    return next(length for begin, length in reversed(schedule) if progress >= begin)


def learning_rate(recipe: Recipe, step: int, progress: float) -> float:
    """Returns the learning rate of step `step`, counted from 0. `progress`, from 0 to 1, is the part of the training done."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    warm = (step + 1) / max(1, recipe.warmup) if recipe.warmup_share is None else progress / recipe.warmup_share
    return recipe.lr * min(1.0, warm) * (recipe.final_lr + (1 - recipe.final_lr) * cosine)


class Trainer:
    """Trains `model`, whose `forward(tokens, targets, cu_seqlens=..., reduction=...)` is that of `model.GPT`.

    Args:
        model: on its device.
        recipe: hyperparameters.
        batch: draws a batch, on the device of the model, with the generator it is given.
        validation: batches of which each row has the mean loss.
        seed: seed of the training batches.
        later: batches of the shapes that the first one does not have. They run once before timing starts, like the first one.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        batch: Callable[[torch.Generator], Batch],
        validation: Iterable[Batch],
        seed: int = 1337,
        later: Iterable[Batch] = (),
    ):
        self.model, self.recipe, self.batch = model, recipe, batch
        self.validation, self.later = list(validation), list(later)
        self.device = next(model.parameters()).device
        self.optimizer = make_optimizer(model, recipe)
        self.generator = torch.Generator().manual_seed(seed)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.stop = False  # set it to end `run` after the current step; `run` can then be called again
        self._losses: list[Tensor] = []  # training losses since the last row
        if recipe.compile:
            compile_blocks(model, recipe.dynamic)

    def run(self, after_step: Callable[[], object] = lambda: None) -> Iterator[dict]:
        """Trains, and yields rows of `step`, `tokens`, `seconds`, `train`, `val` and `peak_bytes`.

        `seconds` excludes validation and compilation. `train` is the mean loss since the last row, `val` that of the validation
        batches, both in nats per token. `peak_bytes` is the peak GPU memory of training, None on a CPU.
        """
        self.model.train()
        self._warm_up()
        every, cuda = max(1, self.recipe.steps // self.recipe.rows), self.device.type == "cuda"
        began = self._now() - self.seconds
        while not self.stop and self.progress() < 1:
            self._train_step()
            after_step()
            self.seconds = time.perf_counter() - began
            ended = self.progress() >= 1
            if self.step % every == 0 or ended or self.stop:
                self.seconds = self._now() - began  # includes work still queued on the device
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
        return self.progress() >= 1

    def state_dict(self) -> dict:
        """Returns all that `run` needs to resume, except the model."""
        losses = [loss.item() for loss in self._losses]
        counts = {"step": self.step, "tokens": self.tokens, "seconds": self.seconds, "losses": losses}
        return counts | {"optimizer": self.optimizer.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self._losses = [torch.tensor(loss, device=self.device) for loss in state["losses"]]
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"].cpu())

    def progress(self) -> float:
        """Returns the part of the training that is done, by steps or by seconds, whichever is further."""
        by_steps = self.step / self.recipe.steps
        return by_steps if self.recipe.seconds is None else max(by_steps, self.seconds / self.recipe.seconds)

    def _train_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, self.progress())
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
        """Adds the gradients of a batch to the model's; returns its loss divided by the batches per step."""
        with autocast(self.device, self.recipe.bf16):
            loss = self.model(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens) / self.recipe.accumulate
        loss.backward()
        return loss.detach()

    def _warm_up(self) -> None:
        """Runs a batch of each shape before timing starts, for compilation and for libraries that select their kernels."""
        if self.recipe.compile or self.device.type == "cuda":
            for batch in (self.batch(torch.Generator().manual_seed(0)), *self.later):
                self._gradients(batch)
                self.optimizer.zero_grad()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def autocast(device: torch.device, bf16: bool) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=bf16)


def evaluate(model: nn.Module, batches: Iterable[Batch], bf16: bool = False) -> float:
    """Returns the mean loss over tokens with a target, in nats."""
    total, count = _sums_by_position(model, batches, bf16)
    return (total.sum() / count.sum()).item()


def evaluate_by_position(model: nn.Module, batches: Iterable[Batch], bf16: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the mean loss at each position of a sequence, in nats, and the number of tokens it averages.

    Both are (T,), float64 on the CPU. The loss at position i is for predicting a token from i + 1 earlier ones, and NaN where
    no sequence has such a token.
    """
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


def write_csv(rows: list[dict], path: Path) -> None:
    """Writes rows with the same keys, which become the header."""
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def _extended(x: Tensor, size: int) -> Tensor:
    return torch.cat([x, x.new_zeros(size - len(x))])
