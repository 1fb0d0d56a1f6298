"""Recall: multi-query associative recall in the setting of Arora et al. 2023 ("Zoology", arXiv:2312.04927).

A sequence states pairs of a key and a value, then asks for the values of all keys, at positions drawn from the paper's power
law; the other tokens are random. The vocabulary has 8192 tokens, half of which are keys. The model has two layers of one head,
no MLP, and no positions except those from the layer's convolution. The learning rate is swept on a log scale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastmax
from benchmarks.learn.examples import training
from benchmarks.learn.rows import Row
from benchmarks.learn.runner import Experiment, Place, Run
from benchmarks.learn.variants import parameters

POWER = 0.01  # of the power law of positions
EAGER_ROUNDS = 2  # rounds of all sizes before graphs are captured: libraries select kernels, AdamW creates its moments
TEST_SEED = 0


@dataclass(frozen=True)
class Setting:
    width: int
    vocab: int = 8192
    layers: int = 2
    train: tuple[tuple[int, int], ...] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))  # tokens, pairs
    test: tuple[tuple[int, int], ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1024, 256))
    batch_tokens: int = 16384
    steps: int = 4000
    warmup: int = 400
    weight_decay: float = 0.1
    test_sequences: int = 1024


SETTINGS = {
    "width 64": Setting(64),
    "width 128": Setting(128),
    # For trials without a GPU
    "width 32": Setting(
        32,
        vocab=64,
        layers=1,
        train=((32, 4), (64, 8)),
        test=((32, 4), (64, 8)),
        batch_tokens=1024,
        steps=300,
        warmup=30,
        test_sequences=128,
    ),
}
LEARNING_RATES = (10**-3.0, 10**-2.5, 10**-2.0)

# Keywords of FastmaxSelfAttention. An exact window of 32 covers an eighth of the longest training sequences.
NEITHER = {"decay": False, "output_norm": False}
VARIANTS = {
    "softmax": {"attention": "softmax"} | NEITHER,
    "p2": {"exact_window": 0} | NEITHER,
    "p2_norm": {"exact_window": 0, "decay": False},
    "p1_norm": {"p": 1, "exact_window": 0, "decay": False},
    "p2_norm_window": {"exact_window": 32, "decay": False},
    "p2_norm_decay": {"exact_window": 0},
    "p2_all": {"exact_window": 32},
    "p1_all": {"p": 1, "exact_window": 32},
    "p1": {"p": 1, "exact_window": 0} | NEITHER,
    "p2_window": {"exact_window": 32} | NEITHER,
    "p2_decay": {"exact_window": 0, "output_norm": False},
    "softmax_decay_norm": {"attention": "softmax"},
}
TITLES = {
    "softmax": "softmax",
    "softmax_decay_norm": "softmax, decay, norm",
    "p2": "p = 2",
    "p2_window": "p = 2, exact window",
    "p2_decay": "p = 2, decay",
    "p2_norm": "p = 2, norm",
    "p2_norm_window": "p = 2, norm, exact window",
    "p2_norm_decay": "p = 2, norm, decay",
    "p2_all": "p = 2, norm, exact window, decay",
    "p1": "p = 1",
    "p1_norm": "p = 1, norm",
    "p1_all": "p = 1, norm, exact window, decay",
}


class Batch(NamedTuple):
    tokens: Tensor  # (B, T) int64
    places: Tensor  # (B, pairs) int64, positions of the keys that are asked for
    answers: Tensor  # (B, pairs) int64, their values; the tokens after these positions are random


def make_batch(sequences: int, tokens: int, pairs: int, vocab: int, device: torch.device) -> Batch:
    """Draws a batch from the device's default generator, which works in CUDA graphs.

    The keys of a sequence are distinct, and so are the values.
    """
    stated = 2 * pairs
    slots = (tokens - stated) // 2
    if slots < pairs or pairs >= vocab // 2:
        raise ValueError(f"{pairs} pairs do not fit into {tokens} tokens of a vocabulary of {vocab}")

    def distinct(choices: int) -> Tensor:
        return torch.rand(sequences, choices, device=device).topk(pairs).indices

    keys = 1 + distinct(vocab // 2 - 1)
    values = vocab // 2 + distinct(vocab // 2)
    # The indices of the largest log-probabilities with Gumbel noise are a sample without replacement
    log_odds = (POWER - 1) * torch.arange(1, slots + 1, device=device).log()
    noise = -torch.empty(sequences, slots, device=device).exponential_().log()
    places = stated + 2 * (log_odds + noise).topk(pairs).indices
    sequence = torch.randint(vocab, (sequences, tokens), device=device)
    sequence[:, :stated:2], sequence[:, 1:stated:2] = keys, values
    return Batch(sequence.scatter(1, places, keys), places, values)


class Recall(nn.Module):
    def __init__(self, setting: Setting, options: dict, layer: Callable = fastmax.FastmaxSelfAttention):
        super().__init__()
        self.embedding = nn.Embedding(setting.vocab, setting.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        longest = max(tokens for tokens, _ in setting.train)
        self.norms = nn.ModuleList(nn.RMSNorm(setting.width, 1e-6) for _ in range(setting.layers + 1))
        self.layers = nn.ModuleList(
            layer(setting.width, 1, rope=False, output_gate=False, longest_half_life=longest, **options)
            for _ in range(setting.layers)
        )

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Returns the logits (B, pairs, vocab) at the positions `places`."""
        x = self.embedding(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        x = x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return self.norms[-1](x) @ self.embedding.weight.T


class Trainer:
    """Trains a `Recall` on batches of each size in turn. A step is one CUDA graph, without copies to or from the host."""

    def __init__(self, model: Recall, setting: Setting, lr: float, steps: int, graphs: bool):
        self.model, self.setting, self.steps, self.graphs = model, setting, steps, graphs
        self.device = next(model.parameters()).device
        self.recipe = training.Recipe(steps, lr=lr, warmup=min(setting.warmup, steps // 10), weight_decay=setting.weight_decay)
        self.lr = torch.zeros((), device=self.device)
        groups = training.make_optimizer(model, self.recipe).param_groups
        groups = [{"params": group["params"], "weight_decay": group["weight_decay"], "lr": self.lr} for group in groups]
        on_gpu = self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, betas=self.recipe.betas, fused=on_gpu, capturable=on_gpu)
        self.losses = torch.zeros(steps, device=self.device)
        self.done = torch.zeros((), dtype=torch.int64, device=self.device)  # steps done

    def run(self) -> float:
        """Trains; returns the mean loss of the last tenth of the steps."""
        sizes = [self._step_of(*size) for size in self.setting.train]
        with side_stream(self.device) if self.graphs else nullcontext():
            for step in range(self.steps):
                self.lr.fill_(training.learning_rate(self.recipe, step, step / self.steps))
                if self.graphs and step == EAGER_ROUNDS * len(sizes):
                    sizes = [captured(function) for function in sizes]
                sizes[step % len(sizes)]()
        return self.losses[-max(1, self.steps // 10) :].mean().item()

    def _step_of(self, tokens: int, pairs: int) -> Callable[[], None]:
        def step() -> None:
            batch = make_batch(self.setting.batch_tokens // tokens, tokens, pairs, self.setting.vocab, self.device)
            logits = self.model(batch.tokens, batch.places)
            loss = F.cross_entropy(logits.flatten(0, 1), batch.answers.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
            self.optimizer.step()
            self.losses.index_copy_(0, self.done.view(1), loss.detach().view(1))
            self.done += 1

        return step


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Runs the block on another stream: work to be captured must not have run on the default stream."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream(device).wait_stream(side)


def captured(function: Callable[[], None]) -> Callable[[], None]:
    """Returns a function, which must have been called before, as a CUDA graph. Capturing does not run it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


@torch.no_grad()
def accuracy(model: Recall, setting: Setting, tokens: int, pairs: int, device: torch.device) -> float:
    """Returns the percentage of correct answers, on sequences that are the same in every run."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(TEST_SEED)
        right, chunk = [], max(1, setting.batch_tokens // tokens)
        for begin in range(0, setting.test_sequences, chunk):
            batch = make_batch(min(chunk, setting.test_sequences - begin), tokens, pairs, setting.vocab, device)
            right.append((model(batch.tokens, batch.places).argmax(-1) == batch.answers).flatten())
    return 100 * torch.cat(right).double().mean().item()


def runs(device: torch.device) -> list[Run]:
    names = ("width 64", "width 128") if device.type == "cuda" else ("width 32",)
    rates = LEARNING_RATES if device.type == "cuda" else LEARNING_RATES[-1:]
    return [Run(variant, name, lr, 1, 15.0) for variant in VARIANTS for name in names for lr in rates]


def execute(run: Run, place: Place) -> Iterator[Row]:
    return train_and_test(run, SETTINGS[run.setting], place, VARIANTS[run.variant])


def train_and_test(
    run: Run, setting: Setting, place: Place, options: dict, layer: Callable = fastmax.FastmaxSelfAttention
) -> Iterator[Row]:
    """Yields rows of "accuracy" in the tests, `at` a number of pairs, and of the final "train" loss, `at` the last step."""
    torch.manual_seed(run.seed)
    model = Recall(setting, options, layer).to(place.device)
    torch.manual_seed(run.seed)  # the same sequences for every variant, however many numbers its weights drew
    steps = place.steps or setting.steps
    began = time.perf_counter()
    loss = Trainer(model, setting, run.lr, steps, place.graphs).run()
    rounds, rest = divmod(steps, len(setting.train))
    each = [setting.batch_tokens // tokens * tokens for tokens, _ in setting.train]
    constant = {
        "step": steps,
        "tokens": rounds * sum(each) + sum(each[:rest]),
        "seconds": time.perf_counter() - began,
        "parameters": parameters(model),
    }
    yield {"measure": "train", "at": steps, "value": loss} | constant
    for tokens, pairs in setting.test:
        yield {"measure": "accuracy", "at": pairs, "value": accuracy(model, setting, tokens, pairs, place.device)} | constant


EXPERIMENT = Experiment(__doc__.partition("\n")[0], runs, execute)
