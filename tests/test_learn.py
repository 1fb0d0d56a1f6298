"""benchmarks.learn: every experiment in a tiny setting, and how interrupted runs continue."""

import math
import re
import sys
import types
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import tables
from benchmarks.learn import (
    __main__,
    capacity,
    conversion,
    data,
    equal_steps,
    equal_time,
    figures,
    free_windows,
    language,
    large,
    memory,
    needle,
    pages,
    recall,
    results,
    rows,
    runner,
    variants,
)

TINY = language.Setting(
    n_layer=4, n_head=2, n_embd=16, context=32, batch=2, steps=3, lr=1e-3, window=4, warmup=1, rows=3, validation=4, final=4
)
TINY_RECALL = recall.Setting(16, 32, 1, ((16, 2), (16, 4)), ((16, 2), (32, 8)), 64, steps=4, warmup=1, test_sequences=8)
TINY_NEEDLE = needle.Setting(
    (needle.Stage(replace(TINY, context=32), 1), needle.Stage(replace(TINY, context=64), 1)),
    replace(TINY, context=128),
    facts=2,
    lengths=(64, 128),
    texts=4,
    test_tokens=256,
)
SIZES = {"n_layer": 8, "n_head": 8, "n_embd": 512, "block_size": 1024}  # of equal_steps on a GPU
CPU = torch.device("cpu")


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.uint8"
    for written in (path, path.with_suffix(f".{data.TREES}.uint8")):
        written.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
    return path


@pytest.fixture
def place(text) -> runner.Place:
    return runner.Place(CPU, text, compile=False, graphs=False)


@pytest.fixture
def tiny(monkeypatch):
    """Replaces the settings of all experiments by tiny ones."""
    for module, setting in (
        (equal_steps, TINY),
        (conversion, TINY),
        (equal_time, replace(TINY, seconds=0.05, steps=1000, rows=1000)),
        (needle, TINY_NEEDLE),
        (capacity, capacity.Setting((256, 512), capacity.BATCH)),
        (recall, TINY_RECALL),
    ):
        monkeypatch.setattr(module, "SETTINGS", dict.fromkeys(module.SETTINGS, setting))
    of_type = {language.Setting: TINY, needle.Setting: TINY_NEEDLE, recall.Setting: TINY_RECALL}
    monkeypatch.setattr(memory, "TRIALS", {name: of_type[type(setting)] for name, setting in memory.TRIALS.items()})
    model = replace(TINY, context=256, final=2)
    trials = {name: replace(setting, model=model) for name, setting in free_windows.TRIALS.items()}
    monkeypatch.setattr(free_windows, "TRIALS", trials)
    monkeypatch.setattr(large, "SECONDS", 0.3)
    monkeypatch.setattr(conversion, "TRANSFER_STEPS", 2)
    monkeypatch.setattr(conversion, "FINETUNE_STEPS", 2)


def learn(text: Path, *arguments: object) -> int:
    command = [*map(str, arguments), "--device", "cpu", "--data", str(text), "--out", str(text.parent), "--commit", "abc"]
    return __main__.main(command)


MEASURES = {
    "equal-steps": ("p2_all", {"train", "val", "position", "last_quarter", "loss"}),
    "equal-time": ("softmax_sdpa", {"train", "val", "position", "last_quarter", "loss"}),
    "free-windows": (
        "p2_all",
        {"train", "val", "within", *(f"{way}{what}" for way in ("whole", "near") for what in ("", " position", " needle"))},
    ),
    "large": ("kept_keys_wide_steady", {"train", "val", "position", "loss"}),
    "ablation": ("p2_without_rope", {"train", "val", "position", "last_quarter", "loss"}),
    "needle": ("hybrid", {"short", "train", "val", "position", "last_quarter", "loss", "needle", "letters"}),
    "memory": ("gate", {"short", "train", "val", "position", "last_quarter", "loss", "needle", "letters", "accuracy"}),
    "capacity": ("recent", {"found"}),
    "recall": ("p1_all", {"train", "accuracy"}),
    "conversion": ("window_decay", {"before", "swapped", "fitted", "transferred", "finetuned"}),
}


@pytest.mark.parametrize("name", __main__.EXPERIMENTS)
def test_experiment(tiny, text, capsys, name):
    variant, measures = MEASURES[name]
    assert learn(text, name, "--only", variant, "--seeds", 2) == 0
    found = rows.read(text.parent / f"{name}.csv")
    assert {row["measure"] for row in found} == measures
    assert {(row["variant"], row["seed"], row["commit"]) for row in found} == {(variant, 2, "abc")}
    for row in found:
        assert math.isfinite(row["value"]) and row["torch"] == torch.__version__ and row["device"]
        assert row["parameters"] > 0 and row["wall"] >= 0 and row["tokens"] >= row["step"]
    last = found[-1]
    if name in ("equal-steps", "ablation"):
        assert (last["step"], last["tokens"]) == (3, 3 * 2 * 32) and last["seconds"] > 0
    if name == "equal-time":
        assert last["seconds"] >= 0.05
    if name == "large":
        assert last["parameters"] == 51_124, "tied weights count once"
        assert not list(text.parent.glob("*-large-*"))
    if name == "conversion":
        assert [row["at"] for row in found] == [0, 0, 0, 2, 4]

    before = (text.parent / f"{name}.csv").read_bytes()
    capsys.readouterr()
    assert learn(text, name, "--only", variant, "--seeds", 2) == 0
    assert (text.parent / f"{name}.csv").read_bytes() == before, "what is there is not done again"
    assert variant not in capsys.readouterr().out


def counting(seconds: float = 0.0, fails: str = "") -> tuple[runner.Experiment, list[str]]:
    done: list[str] = []

    def execute(run: runner.Run, place: runner.Place):
        done.append(str(run.key))
        if run.variant == fails:
            raise ArithmeticError("diverged")
        yield {"measure": "loss", "at": 1, "value": 0.5}
        yield {"measure": "loss", "at": 2, "value": 0.25}

    runs = [runner.Run(name, "s", 1e-3, 1, seconds) for name in "abc"]
    return runner.Experiment(
        "", lambda device: runs, execute, lambda run: "no such library" if run.variant == "c" else ""
    ), done


def test_runs_are_done_once(place, tmp_path, capsys):
    experiment, done = counting(fails="a")
    path = tmp_path / "new/x.csv"
    runs = experiment.runs(CPU)
    assert runner.perform(experiment, runs, place, path) == 1, "one failed"
    printed = capsys.readouterr().out
    assert "a, s, learning rate 0.001, seed 1: begun, about 0 s" in printed
    assert "ArithmeticError: diverged" in printed and "c, s, learning rate 0.001, seed 1: left out: no such library" in printed
    assert [(row["variant"], row["at"], row["value"]) for row in rows.read(path)] == [("b", 1, 0.5), ("b", 2, 0.25)]
    assert len(done) == 2
    whole, done = counting()
    assert runner.perform(whole, [*runs, replace(runs[1], seed=2)], place, path) == 0
    assert done == [str(runs[0].key), str(replace(runs[1], seed=2).key)], "what failed and what is new"
    assert len(rows.read(path)) == 6
    assert sorted(x.name for x in path.parent.iterdir()) == ["x.csv"]


def test_run_of_another_process_is_left_to_it(place, tmp_path):
    experiment, done = counting()
    path = tmp_path / "x.csv"
    first, second, _ = experiment.runs(CPU)
    with rows.locked(path, str(first.key), wait=False) as mine:
        assert mine
        assert runner.perform(experiment, [first, second], place, path) == 0
    assert done == [str(second.key)]
    assert runner.perform(experiment, [first, second], place, path) == 0
    assert done == [str(second.key), str(first.key)]


def test_budget(place, tmp_path, capsys):
    experiment, done = counting(seconds=60)
    path = tmp_path / "x.csv"
    assert runner.perform(experiment, experiment.runs(CPU)[:2], place, path, budget=30) == 0
    assert done == [] and not path.exists() and "not begun: about 60 s" in capsys.readouterr().out
    known = [{"variant": "a", "setting": "s", "wall": 3.0}, {"variant": "b", "setting": "s", "wall": 5.0}]
    a, b, _ = experiment.runs(CPU)
    assert [runner.expected_seconds(run, known) for run in (a, b)] == [3.0, 5.0]
    assert runner.expected_seconds(runner.Run("c", "s", 1e-3, 1, 300.0), known) == 300.0, "it may be slow in its own way"
    assert runner.expected_seconds(runner.Run("c", "s", 1e-3, 1, 4.0), known) == 5.0
    assert runner.expected_seconds(runner.Run("c", "other", 1e-3, 1, 7.0), known) == 7.0


def test_rows_have_known_columns(tmp_path):
    with pytest.raises(ValueError, match="got los$"):
        rows.append(tmp_path / "x.csv", [{"los": 1.0}])
    assert rows.read(tmp_path / "x.csv") == []


def test_runs_of_another_machine_are_collected(tmp_path, capsys):
    here, there = tmp_path / "here", tmp_path / "there"
    run = {"variant": "a", "setting": "s", "lr": 1e-3, "seed": 1, "measure": "loss", "at": 1, "value": 0.5}
    other = run | {"variant": "b"}
    rows.append(here / "x.csv", [run])
    rows.append(there / "x.csv", [run | {"value": 0.75}, other, other | {"at": 2}])
    rows.append(there / "y.csv", [other])
    assert __main__.main(["collect", "--from", str(there), "--out", str(here)]) == 0
    assert capsys.readouterr().out.startswith("2 runs added")
    assert rows.read(here / "x.csv") == [run, other, other | {"at": 2}] and rows.read(here / "y.csv") == [other]
    assert rows.collect(there, here) == 0
    with pytest.raises(SystemExit):
        __main__.main(["collect", "--out", str(here)])


def test_command_line(tiny, text, capsys):
    assert learn(text, "recall", "--list", "--only", "p2", "--seeds", 1, 2) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert learn(text, "equal-time", "--list", "--only", "p2_all", "--time", 300) == 0
    assert capsys.readouterr().out.endswith(": about 360 s\n")
    for wrong, message in (
        (("nothing",), "invalid choice"),
        (("recall", "--only", "p3"), "no variant p3"),
        (("recall", "--setting", "x"), "no setting 'x'"),
        (("equal-steps", "--time", "5"), "--time is of equal-time"),
    ):
        with pytest.raises(SystemExit):
            learn(text, *wrong)
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["recall", "--steps", "1", "--device", "cpu"])
    assert "another --out" in capsys.readouterr().err


OF_EXPERIMENT = {"recall": recall.VARIANTS, "conversion": conversion.VARIANTS, "capacity": capacity.VARIANTS}


def test_every_run_is_of_a_known_variant_and_setting():
    for device in (CPU, torch.device("meta", 0)):
        kind = types.SimpleNamespace(type="cuda" if device.type == "meta" else "cpu")
        for name, experiment in __main__.EXPERIMENTS.items():
            module = sys.modules[experiment.execute.__module__]
            of_experiment = OF_EXPERIMENT.get(name, variants.VARIANTS)
            settings = module.SETTINGS | getattr(module, "TRIALS", {})
            runs = experiment.runs(kind)
            assert len({run.key for run in runs}) == len(runs) > 0
            assert all(run.variant in of_experiment and run.setting in settings and run.seed == 1 for run in runs)


def test_variants_of_one_seed_see_the_same_windows(text):
    train, held_out, described = data.on_device(text, CPU)
    assert len(train) == 9 * len(held_out) == 7920 and re.fullmatch(r"0.0 MB, [0-9a-f]{8}", described)
    first, second, other = (data.training_windows(train, 16, 2, seed) for seed in (1, 1, 2))
    batches = [draw(None) for draw in (first, second, other)]
    assert torch.equal(batches[0].tokens, batches[1].tokens) and not torch.equal(batches[0].tokens, batches[2].tokens)
    assert torch.equal(batches[0].tokens[:, 1:], batches[0].targets[:, :-1])
    parts = data.validation_windows(held_out, 16, 2, 5)
    assert [len(part.tokens) for part in parts] == [2, 2, 1]
    assert not torch.equal(first(None).tokens, batches[0].tokens)


def test_warm_up_at_equal_time_is_a_share_of_it():
    """A warm-up counted in steps would take half of the training of the slowest variant."""
    recipe = equal_time.LONG.recipe(runner.Place(CPU, Path(), False, False))
    assert recipe.seconds == equal_time.SECONDS
    rates = [language.training.learning_rate(recipe, step, 0.05) for step in (3, 60)]
    assert rates[0] == rates[1] == pytest.approx(recipe.lr / 2, rel=0.01)
    assert language.training.learning_rate(recipe, 3, 0.1) == pytest.approx(recipe.lr, rel=0.03)


def test_equal_time_is_not_that_of_eager_operators(monkeypatch):
    monkeypatch.setattr(equal_time.extension, "problem", lambda device: "there is no nvcc")
    place = runner.Place(torch.device("cuda", 0), Path(), False, False)
    with pytest.raises(RuntimeError, match="seconds of p2_all are those of its kernels: there is no nvcc"):
        equal_time.execute(runner.Run("p2_all", "64k", 1e-3, 1), place)
    assert equal_time.execute(runner.Run("softmax_sdpa", "64k", 1e-3, 1), place) is not None, "which needs none of them"


def share(variant: capacity.Variant, n: int) -> float:
    drawn = torch.Generator().manual_seed(0)
    return torch.cat([capacity.found(variant, n, drawn) for _ in range(16)]).double().mean().item()


def test_capacity():
    recent = capacity.VARIANTS["recent"]
    log_decays = recent.decays().double()
    assert (4 * log_decays[0]).exp2().item() == (8192 * log_decays[-1]).exp2().item() == pytest.approx(0.5)
    assert share(recent, 200) == 1.0 and share(replace(recent, text=0.0), 8192) == 1.0
    assert share(replace(recent, weight=torch.ones_like), 16384) < 0.15, "hardly more than one letter in 26"
    assert share(replace(recent, half_lives=(4.0, 32.0)), 8192) < 0.15, "it has decayed"
    assert share(recent, 16384) < share(capacity.VARIANTS["wide_recent"], 16384) < share(capacity.VARIANTS["softmax"], 16384)


def test_softmax_layers_of_a_variant():
    for name, expected in (("hybrid", [3, 7]), ("hybrid_early", [1, 5]), ("hybrid_one", [2])):
        with torch.device("meta"):
            gpt = variants.make_gpt(variants.VARIANTS[name], 128, **SIZES)
        attention = [block.attn for block in gpt.blocks]
        assert [i for i, attn in enumerate(attention) if attn.attention == "softmax"] == expected
        assert {attn.exact_window for i, attn in enumerate(attention) if i not in expected} == {128}


def test_variants_that_are_compared_are_as_large():
    for name in ("softmax_parts", "hybrid", "p1_all", "p2"):
        assert variants.VARIANTS[name].as_large_as
        with torch.device("meta"):
            variants.make_gpt(variants.VARIANTS[name], 128, **SIZES)
    with pytest.raises(ValueError, match=r"p = 2 has \d+ weights, p2_all \d+"), torch.device("meta"):
        variants.make_gpt(replace(variants.VARIANTS["p2"], as_large_as="p2_all"), 128, **SIZES)


def test_layers_of_fla_are_as_large():
    pytest.importorskip("fla.layers", exc_type=ImportError)
    theirs = [variant for variant in variants.VARIANTS.values() if variant.fla]
    assert len(theirs) == 3 and all(variant.as_large_as for variant in theirs)
    for variant in theirs:
        variants.make_gpt(variant, 128, **SIZES)


def test_layer_of_another_library(monkeypatch):
    class Gated(nn.Module):
        def __init__(self, hidden_size: int, factor: int):
            super().__init__()
            self.q_proj, self.o_proj = nn.Linear(hidden_size, factor), nn.Linear(factor, hidden_size)

        def forward(self, x):
            return self.o_proj(self.q_proj(x).cumsum(1)), None, None

    variant = variants.Variant("theirs", fla="Gated", fla_options={"factor": 2})
    monkeypatch.setitem(sys.modules, "fla", None)
    monkeypatch.setitem(sys.modules, "fla.layers", None)
    assert variant.missing.startswith("not installed")
    fla, layers = types.ModuleType("fla"), types.ModuleType("fla.layers")
    fla.layers, layers.Gated = layers, Gated
    monkeypatch.setitem(sys.modules, "fla", fla)
    monkeypatch.setitem(sys.modules, "fla.layers", layers)
    assert variant.missing == ""
    gpt = variants.make_gpt(variant, 4, n_layer=8, n_head=1, n_embd=256, block_size=8)
    tokens = torch.randint(256, (2, 8))
    assert gpt(tokens).shape == (2, 8, 256)
    layer = gpt.blocks[0].attn.layer
    assert layer.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert layer.o_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.2), "into the residual stream of 8 layers"
    with pytest.raises(ValueError, match="whole sequences"):
        gpt(tokens[:1], cu_seqlens=torch.tensor([0, 8], dtype=torch.int32))


@pytest.mark.parametrize("name", ["softmax", "softmax_parts"])
def test_softmax_of_pytorch_is_that_of_the_layer(name):
    """Both layers have the same weights."""
    ours, theirs = variants.VARIANTS[name], variants.VARIANTS[f"{name}_sdpa"]
    ours = replace(ours, parts=theirs.parts, as_large_as="")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 16}
    ours, theirs = variants.make_gpt(ours, 4, **sizes), variants.make_gpt(theirs, 4, **sizes)
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(256, (2, 16))
    with variants.fastest_softmax():
        torch.testing.assert_close(theirs(tokens), ours(tokens))
    with pytest.raises(ValueError, match="whole sequences"):
        theirs(tokens[:1], cu_seqlens=torch.tensor([0, 16], dtype=torch.int32))
    with pytest.raises(ValueError, match="no decay"):
        variants.SDPASelfAttention(16, 2, attention="softmax")


def test_losses_of_a_trained_model_by_position(text):
    _, held_out, _ = data.on_device(text, CPU)
    gpt = language.make("p2_all", TINY, 1, runner.Place(CPU, text, False, False))
    found = list(language.trained_losses(gpt, data.validation_windows(held_out, 32, 2, 4), bf16=False))
    positions = [row for row in found if row["measure"] == "position"]
    assert [row["at"] for row in positions] == list(range(1, 33))
    values = torch.tensor([row["value"] for row in positions])
    by_measure = {row["measure"]: row for row in found}
    assert by_measure["loss"]["value"] == pytest.approx(values.mean().item())
    assert by_measure["last_quarter"]["value"] == pytest.approx(values[24:].mean().item())


# ---- recall


@pytest.mark.parametrize("tokens, pairs", [(64, 4), (64, 16), (256, 64)])
def test_recall_states_every_answer_once(tokens, pairs):
    batch = recall.make_batch(8, tokens, pairs, 8192, CPU)
    assert batch.tokens.shape == (8, tokens) and batch.places.shape == batch.answers.shape == (8, pairs)
    for sequence, places, answers in zip(batch.tokens.tolist(), batch.places.tolist(), batch.answers.tolist(), strict=True):
        stated = dict(zip(sequence[: 2 * pairs : 2], sequence[1 : 2 * pairs : 2], strict=True))
        assert len(stated) == pairs and all(0 < key < 4096 <= value < 8192 for key, value in stated.items())
        assert len(set(places)) == pairs and min(places) >= 2 * pairs and max(places) < tokens
        assert [stated[sequence[place]] for place in places] == answers
    with pytest.raises(ValueError, match="17 pairs do not fit into 64 tokens"):
        recall.make_batch(1, 64, 17, 8192, CPU)


def test_recall_asks_by_a_power_law():
    """The density falls with the distance, p(i) ~ i^-0.99, so half of the questions are within the first sqrt(n)."""
    places = torch.cat([recall.make_batch(64, 256, 1, 64, CPU).places for _ in range(20)]).flatten()
    distances = (places - 2) // 2
    expected = torch.arange(1, 128, dtype=torch.float64) ** (recall.POWER - 1)
    share = (expected[:11].sum() / expected.sum()).item()
    assert (distances < 11).double().mean().item() == pytest.approx(share, abs=0.05)


def test_recall_does_not_show_the_answer():
    """The answer is not the next token, and no logit depends on what comes after its position."""
    batch = recall.make_batch(4, 32, 4, 4096, CPU)
    after = batch.tokens.gather(1, (batch.places + 1).clamp(max=31))
    assert (after == batch.answers).float().mean() < 0.1
    model = recall.Recall(replace(TINY_RECALL, vocab=4096), {"exact_window": 4})
    before = model(batch.tokens, batch.places)
    for row in range(4):
        for column, place in enumerate(batch.places[row].tolist()):
            changed = batch.tokens.clone()
            changed[:, place + 1 :] = 7
            torch.testing.assert_close(model(changed, batch.places)[row, column], before[row, column])


def test_recall_trains():
    torch.manual_seed(0)
    setting = replace(TINY_RECALL, width=32, train=((16, 2),), batch_tokens=256)
    model = recall.Recall(setting, {"exact_window": 0})
    trainer = recall.Trainer(model, setting, 1e-2, 60, graphs=False)
    last = trainer.run()
    assert trainer.losses[:5].mean() > 3 > last and trainer.done == 60
    assert recall.accuracy(model, setting, 16, 2, CPU) == recall.accuracy(model, setting, 16, 2, CPU)


@pytest.mark.cuda
def test_recall_in_graphs_is_recall():
    losses = []
    for graphs in (False, True):
        torch.manual_seed(0)
        setting = replace(TINY_RECALL, width=32, batch_tokens=256)
        model = recall.Recall(setting, {"exact_window": 4}).cuda()
        trainer = recall.Trainer(model, setting, 3e-3, 30, graphs=graphs)
        trainer.run()
        losses.append(trainer.losses)
    assert losses[0][-1] < losses[0][0]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=1e-2)


# ---- needle


def test_answer_of_the_needle_is_in_the_text():
    drawn = data.generator(CPU, 0)
    texts = needle.with_question(torch.full((16, 129), ord(".")), drawn)[:, :-1]
    for text in (bytes(row) for row in texts.to(torch.uint8).tolist()):
        facts = re.findall(rb"\n@([a-z]{6})=([a-z]{6})\n", text)
        assert len(facts) == 2 and facts[0] == facts[1] and text.endswith(b"=" + facts[0][1] + b"\n")
        assert text[needle.VALUE] == facts[0][1]
    assert len({bytes(row) for row in texts[:, -10:].to(torch.uint8).tolist()}) == 16
    windows = needle.with_facts(torch.full((4, 257), ord(".")), drawn, facts=3)
    for text in (bytes(row) for row in windows.to(torch.uint8).tolist()):
        facts = re.findall(rb"\n@([a-z]{6})=([a-z]{6})\n", text)
        assert len(facts) == 6 and len(set(facts)) == 3, "each twice"


def test_needle_is_found_where_every_letter_is_right():
    texts = needle.with_question(torch.full((3, 65), ord(".")), data.generator(CPU, 0))[:, :-1]

    def knows(tokens: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.one_hot(tokens.roll(-1, 1), 256).float()
        logits[1, needle.VALUE.stop - 2] = 0  # of the second text, before the last letter
        logits[2, needle.VALUE.stop - 1] = 0  # of the third, after the value
        return logits

    letters = needle.found(knows, texts, bf16=False)
    assert letters.shape == (3, needle.LETTERS) and letters.all(-1).tolist() == [True, False, True]
    assert letters[1].tolist() == [True] * (needle.LETTERS - 1) + [False]


# ---- free windows


class Place(torch.nn.Module):
    """Its loss for a byte is the number of bytes of the window up to it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(self, tokens, targets, cu_seqlens=None, reduction="mean"):
        return torch.arange(1.0, tokens.shape[1] + 1).expand(tokens.shape).flatten()


def test_bytes_are_predicted_from_those_near(text):
    """With windows of 64 no byte is predicted from more than 64, and only the first ones from fewer than 33."""
    _, held_out, _ = data.on_device(text, CPU, data.TREES)
    model = replace(TINY, context=256)
    batches = data.validation_windows(held_out, 256, 1, 3)
    setting = free_windows.Setting(model, ((0.0, 32), (0.5, 64)))
    near = free_windows._within(Place(), setting, batches, setting.longest)
    expected = torch.arange(256)
    assert torch.equal(near, torch.where(expected < 64, expected + 1, expected % 32 + 33).double())
    whole = free_windows._within(Place(), setting, batches, 256)
    assert torch.equal(whole, free_windows._by_position(Place(), setting, batches)) and torch.equal(whole, expected + 1.0)


def test_windows_grow_with_the_time_that_has_passed(text, place):
    setting = free_windows.SETTINGS["growing"]
    lengths = [language.training.length_at(setting.windows, x) for x in (0.0, 0.49, 0.5, 0.76, 0.9, 1.0)]
    assert lengths == [1024, 1024, 4096, 16384, 65536, 65536] and setting.longest == 65536
    assert all(setting.bytes_of_step % length == 0 for length in lengths)
    train, held_out, _ = data.on_device(text, CPU, data.TREES)
    tiny = free_windows.Setting(replace(TINY, context=128, steps=8, batch=1), ((0.0, 32), (0.5, 64), (0.75, 128)))
    gpt, seen = language.make("p2_all", tiny.model, 1, place), []
    trainer = free_windows._trainer(gpt, tiny, 1, place, train, held_out)
    draw = trainer.batch
    trainer.batch = lambda generator: seen.append(draw(generator)) or seen[-1]
    list(trainer.run())
    assert [tuple(batch.tokens.shape) for batch in seen] == [*[(4, 32)] * 4, *[(2, 64)] * 2, *[(1, 128)] * 2]


def test_facts_in_free_windows(text):
    setting = free_windows.SETTINGS["growing, facts"]
    for length in (1024, 4096, 65536):
        window = free_windows._edit(setting, length)(torch.zeros(1, length + 1, dtype=torch.int64), data.generator(CPU, 0))
        assert (window == ord("@")).sum() == length // 64, "a quarter of the bytes are lines of 16"


# ---- what becomes of the rows


def loss_rows(experiment: str) -> list[dict]:
    """Returns the rows that the pages need, of two seeds if seeds are compared, with numbers that follow from the order of the
    names."""
    found = []
    names = {"equal-steps": ("softmax", "p2_all"), "equal-time": ("softmax_sdpa", "p2_all")}
    for index, variant in enumerate(names.get(experiment, ("p2_all", "p2_without_rope"))):
        for seed in (1, 2):
            key = {
                "variant": variant,
                "setting": "tiny",
                "lr": 1e-3,
                "seed": seed,
                "torch": "2",
                "commit": "abc",
                "device": "CPU",
                "data": "1 MB",
            }
            key |= {"parameters": 2_000_000, "tokens": 3_000_000}
            for step in (1, 2):
                loss = 1.0 - 0.1 * index - 0.2 * step + 0.01 * seed
                found.append(key | {"measure": "val", "at": step, "step": step, "seconds": 10.0 * step, "value": loss})
            for measure in ("position", "last_quarter", "loss"):
                found.append(key | {"measure": measure, "at": 32, "step": 2, "seconds": 20.0, "value": loss})
    return found


def text_of(name: str, found: list[dict], tmp_path: Path) -> str:
    rows.append(tmp_path / pages.FOLDER / f"{name}.csv", found)
    return pages.section(name, tmp_path, tables.table)


@pytest.mark.parametrize(
    "name, lines",
    [
        (
            "equal-steps",
            [
                "tiny. Seeds 1, 2; text 1 MB; CPU; PyTorch 2; measured at commit abc.",
                "| softmax | 2.0 M | 2 | 0.6150 | 0.6100 to 0.6200 | 0.6150 | +0.0000 |",
                "| p = 2, all parts | 2.0 M | 2 | 0.5150 | 0.5100 to 0.5200 | 0.5150 | -0.1000 |",
                "![validation loss by step](figures/learn_equal_steps.png)",
            ],
        ),
        (
            "equal-time",
            [
                "| softmax (SDPA) | 20 | 3.0 M | 0.6150 | 0.6150 | 20 |",
                "| p = 2, all parts | 20 | 3.0 M | 0.5150 | 0.5150 | 20 |",
            ],
        ),
        ("ablation", ["| without rotary positions | 0.5150 | 0.5150 | -0.1000 |"]),
    ],
)
def test_page(name, lines, tmp_path):
    assert pages.section(name, tmp_path, tables.table) == f"Not measured yet: `python -m benchmarks.learn {name}`."
    text = text_of(name, loss_rows(name), tmp_path)
    assert all(line in text for line in lines)


def recall_rows() -> list[dict]:
    key = {
        "variant": "p2_norm",
        "setting": "width 64",
        "seed": 1,
        "measure": "accuracy",
        "device": "CPU",
        "torch": "2",
        "commit": "abc",
    }
    values = {1e-3: (100, 50), 1e-2: (90, 80)}
    return [key | {"lr": lr, "at": at, "value": x} for lr, pair in values.items() for at, x in zip((4, 256), pair, strict=True)]


def needle_rows() -> list[dict]:
    key = {"variant": "hybrid", "setting": "25M", "lr": 1e-3, "seed": 1, "device": "CPU", "torch": "2", "commit": "abc"}
    shares = [
        key | {"measure": measure, "at": at, "value": x}
        for measure, *values in (("needle", 100.0, 62.5), ("letters", 100.0, 80.0))
        for at, x in zip((4096, 8192), values, strict=True)
    ]
    return [*shares, key | {"measure": "loss", "at": 8192, "value": 0.75}]


def test_other_pages(tmp_path):
    assert "| p = 2, norm | 1.0e-02 | 90.0 | 80.0 |" in text_of("recall", recall_rows(), tmp_path), "the best learning rate"
    text = text_of("needle", needle_rows(), tmp_path)
    assert "| attention | 4k tokens | 8k tokens | validation loss |" in text
    assert "| p = 2, all parts; softmax in every fourth layer | 100% (100%) | 62% (80%) | 0.7500 |" in text
    key = {"setting": "25M", "lr": 1e-3, "seed": 1, "device": "CPU", "torch": "2", "commit": "abc"}
    stages = {"before": 0.5, "swapped": 0.9, "finetuned": 0.6}
    found = [key | {"variant": "unprepared", "measure": name, "value": x} for name, x in stages.items()]
    title = conversion.VARIANTS["unprepared"].title
    assert f"| {title} | 1 | 0.5000 | 0.9000 |  |  | 0.6000 |" in text_of("conversion", found, tmp_path)


def test_page_of_free_windows(tmp_path):
    """Schedules of windows side by side, in a table for texts with facts and one for those without."""
    key = {"variant": "p2_all", "seed": 1, "seconds": 60.0, "tokens": 4e6, "device": "CPU", "torch": "2", "commit": "abc"}
    values = {("whole", 64): 1.5, ("whole position", 32): 1.4, ("whole position", 64): 1.2, ("near", 64): 1.6}
    limited = {("within", 1024): 1.75}
    facts = {("whole needle", 16): 100.0, ("whole needle", 64): 12.5}
    found = [
        key | {"setting": setting, "lr": lr, "measure": measure, "at": at, "value": x}
        for setting, measured in (("1k", values | limited), ("growing", values), ("1k, facts", values | facts))
        for lr in (1e-3, 2e-3)
        for (measure, at), x in measured.items()
    ]
    text = text_of("free-windows", found, tmp_path)
    without, with_facts = text.split("With facts. ")
    line = "| p = 2, all parts | 2e-03 | 1 | 60 | 4.0 M | 1.500 | 1.200 | 1.600 |"
    assert without.count(f"| 1k {line} 1.750 |") == without.count(f"| growing {line}  |") == 1
    assert "| loss within 1k |" in without
    assert f"| 1k {line} 100% | 12% |" in with_facts and "| growing" not in with_facts
    slow = [row | {"seconds": 90.0} if row["setting"] == "growing" else row for row in found]
    with pytest.raises(LookupError, match="runs of 60 and of 90 s of training are not of equal time"):
        list(pages.free_windows(pd.DataFrame(slow)))


def test_page_of_large_models(tmp_path):
    key = {"variant": "softmax_parts", "setting": "350M", "lr": 1e-3, "seed": 1, "device": "CPU", "torch": "2", "commit": "abc"}
    key |= {"step": 7, "tokens": 3e6, "seconds": 60.0, "parameters": 2e6}
    values = {("position", 512): 1.9, ("position", 1024): 1.5, ("position", 2048): 1.25, ("loss", 2048): 1.4, ("val", 7): 1.4}
    text = text_of("large", [key | {"measure": name, "at": at, "value": x} for (name, at), x in values.items()], tmp_path)
    assert "| attention | weights | seeds | steps | tokens | loss | at 0.5k to 1k | at 1k to 2k |" in text
    assert "| softmax, same parts | 2.0 M | 1 | 7 | 3.0 M | 1.400 | 1.500 | 1.250 |" in text


def test_page_of_memory(tmp_path):
    """Means with the lowest and the highest seed, in a table for each setting."""
    both = [row | {"variant": name} for row in needle_rows() for name in ("gate", "softmax_parts")]
    further = [row | {"seed": 2, "value": row["value"] / 2} for row in both if row["variant"] == "gate"]
    read = [row | {"variant": "gate"} for row in recall_rows()]
    text = text_of("memory", [*both, *further, *read], tmp_path)
    assert "| attention | seeds | 4k tokens | 8k tokens | loss | above softmax, same parts |" in text
    assert "| input gate | 2 | 75 (50 to 100) | 47 (31 to 62) | 0.562 (0.375 to 0.750) | +0.000 |" in text
    assert "| softmax, same parts | 1 | 100 | 62 | 0.750 | +0.000 |" in text
    assert "| attention | seeds | 4 pairs | 256 pairs |" in text and "| input gate | 1 | 90 | 80 |" in text


def test_pages_fail_rather_than_leave_a_blank(tmp_path):
    found = loss_rows("ablation")
    with pytest.raises(LookupError, match="one row of each seed"):
        text_of("ablation", [row for row in found if row["variant"] != "p2_all"], tmp_path)
    with pytest.raises(LookupError, match="not known: p9"):
        text_of("equal-steps", [found[0] | {"variant": "p9"}], tmp_path)


def test_pages_refuse_to_compare_what_was_not_done_alike(tmp_path):
    found = loss_rows("equal-time")
    slow = [row | {"seconds": 2 * row["seconds"]} if row["variant"] == "p2_all" else row for row in found]
    with pytest.raises(LookupError, match="runs of 20 and of 40 s of training are not of equal time"):
        text_of("equal-time", slow, tmp_path)
    found = loss_rows("equal-steps")
    with pytest.raises(LookupError, match="different texts cannot be compared: 1 MB and 2 MB"):
        text_of("equal-steps", [*found[:-1], found[-1] | {"data": "2 MB"}], tmp_path)


def test_differences_are_those_of_the_seeds_that_both_have(tmp_path):
    found = [row for row in loss_rows("equal-steps") if row["variant"] == "softmax" or row["seed"] == 2]
    text = text_of("equal-steps", found, tmp_path)
    assert "| softmax | 2.0 M | 2 | 0.6150 |" in text
    assert "| p = 2, all parts | 2.0 M | 1 | 0.5200 | 0.5200 to 0.5200 | 0.5200 | -0.1000 |" in text


def test_seconds_until_softmax_are_those_of_each_seed(tmp_path):
    """The result does not depend on the order of the seeds, and one seed may be a step slower than the other."""
    found = loss_rows("equal-time")
    found = [row for seed in (2, 1) for row in found if row["seed"] == seed]
    last = next(row for row in found if row["variant"] == "softmax_sdpa" and row["measure"] == "val" and row["at"] == 2)
    further = last | {"at": 3, "step": 3, "seconds": 21.0, "value": 0.1}
    text = text_of("equal-time", [*found, further], tmp_path)
    assert "| softmax (SDPA) | 20 | 3.0 M | 0.6150 | 0.6150 | 20 |" in text  # 21 and 20 s
    steps, losses = results.curve(pd.DataFrame([*found, further]), "step", variant="softmax_sdpa", measure="val")
    assert steps == [1, 2] and losses == pytest.approx([0.815, 0.615]), "of as many seeds everywhere"


def test_figures(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("equal-steps", "equal-time", "ablation"):
        rows.append(tmp_path / f"{name}.csv", loss_rows(name))
    rows.append(tmp_path / "recall.csv", recall_rows())
    growing = {"setting": "growing", "measure": "whole position"}
    points = [growing | {"lr": lr, "at": at, "value": 2.0 - at / 64} for at in (32, 64) for lr in free_windows.RATES]
    rows.append(tmp_path / "free-windows.csv", [loss_rows("ablation")[0] | point for point in points])
    written = figures.draw(tmp_path, tmp_path / "figures")
    assert [path.stem for path in written] == [f"learn_{name}" for name in figures.DRAWN if name != "needle"]
    assert all(path.stat().st_size > 5000 for path in written)
    linked = {figure for _, shown in pages.TABLES.values() for figure in shown}
    assert linked == set(figures.DRAWN), "every figure is in the page"
