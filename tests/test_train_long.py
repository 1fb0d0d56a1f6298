"""`examples/train_long.py` has the same losses on any number of ranks, and from a checkpoint of another number of ranks."""

import copy
import csv
import importlib
from pathlib import Path

import pytest
import torch
from processes import run
from test_sharding import mesh_of

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--every", "2", "--parts", "exact_window=8", "input_gate=True"]
TRAINING = ["--no-bf16", "--context", "96", "--warmup", "1", "--steps", "4", "--rows", "4"]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 50


def train_long():
    """Returns the example as a module; it imports files beside it."""
    import sys

    sys.path.insert(0, str(EXAMPLES))
    try:
        return importlib.import_module("train_long")
    finally:
        sys.path.remove(str(EXAMPLES))


def train(group, arguments, stop_after=None, device="cpu"):
    example = train_long()
    args = example.parse(example.arguments(), arguments)
    stopping = []
    if stop_after is not None:
        whole, count = example.LongTrainer.train_step, [0]

        def step(self, batch):
            count[0] += 1
            if count[0] == stop_after and group.rank() == 0:  # the others are told
                stopping.append(15)
            return whole(self, batch)

        example.LongTrainer.train_step = step
    try:
        where = torch.device(device, group.rank()) if device == "cuda" else torch.device(device)
        trainer = example.train(args, mesh_of(group, device=device), where, stopping)
    finally:
        if stop_after is not None:
            example.LongTrainer.train_step = whole
    local = next(iter(trainer.model.blocks[0].attn.parameters())).to_local()
    return trainer.step, trainer.history, local.numel()


def check_gradients(group, layout):
    """Checks the gradients of packed documents, of which ranks have different numbers of targets."""
    example = train_long()
    args = example.parse(example.arguments(), MODEL)
    args.block_size = 64
    model = example.GPT(example.make_config(args, vocab_size=256))
    text = example.byte_tokens([TEXT[:first].encode() for first in (3, 9, 5, 40, 2, 80)])
    batch = example.packed_windows(text, 64, 1, torch.Generator().manual_seed(0))
    expected = copy.deepcopy(model)
    loss = expected(batch.tokens, batch.targets, cu_seqlens=batch.cu_seqlens)
    loss.backward()
    trainer = example.LongTrainer(model, example.Recipe(1), mesh_of(group), layout, recompute=True, bf16=False)
    assert trainer.sum(trainer.gradients(batch)) == pytest.approx(loss.item(), rel=1e-5)
    for (name, parameter), got in zip(expected.named_parameters(), trainer.model.parameters(), strict=True):
        grad = parameter.grad
        assert (got.grad.full_tensor() - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


def test_gradients_are_those_of_the_mean_over_all_tokens():
    run(check_gradients, 3, "zigzag")


def losses(history: list[dict]) -> list[float]:
    return [row[name] for row in history for name in ("train", "val")]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> tuple[Path, list[dict], int]:
    out = tmp_path_factory.mktemp("long")
    (out / "text.txt").write_text(TEXT)
    ((step, history, elements),) = run(train, 1, [*MODEL, *TRAINING, "--data", str(out / "text.txt"), "--out", str(out)])
    assert step == 4 and [row["step"] for row in history] == [1, 2, 3, 4]
    assert history[-1]["train"] < history[0]["train"] - 0.02
    return out, history, elements


def test_any_number_of_ranks(one_rank, tmp_path):
    ranks, layout = 3, "zigzag"
    out, history, elements = one_rank
    common = [*MODEL, *TRAINING, "--data", str(out / "text.txt"), "--out", str(tmp_path), "--layout", layout]
    for step, of_ranks, local in run(train, ranks, common):
        assert step == 4 and losses(of_ranks) == pytest.approx(losses(history), rel=1e-5)
        assert local <= elements // ranks + elements // 10
    with open(tmp_path / "losses.csv", newline="") as file:
        assert [row["ranks"] for row in csv.DictReader(file)] == [str(ranks)] * 4


def test_goes_on_with_another_number_of_ranks(one_rank, tmp_path):
    out, history, _ = one_rank
    common = [*MODEL, *TRAINING, "--data", str(out / "text.txt"), "--out", str(tmp_path)]
    for step, _, _ in run(train, 2, common, 2):
        assert step == 2
    for step, of_ranks, _ in run(train, 3, common):
        assert step == 4 and [row["ranks"] for row in of_ranks] == [2, 2, 3, 3]
        assert losses(of_ranks) == pytest.approx(losses(history), rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-4"]
    (message,) = run(refused, 1, [*common, "--lr", "0.5"])
    assert "is of another run (lr was 0.002, is 0.5)" in message


def refused(group, arguments):
    with pytest.raises(SystemExit) as error:
        train(group, arguments)
    return str(error.value)


def test_packed(one_rank, tmp_path):
    out, _, _ = one_rank
    common = [*MODEL, *TRAINING, "--data", str(out / "text.txt"), "--packed", "--no-recompute"]
    results = [run(train, ranks, [*common, "--out", str(tmp_path / str(ranks))])[0][1] for ranks in (1, 2)]
    assert losses(results[0]) == pytest.approx(losses(results[1]), rel=1e-5)
