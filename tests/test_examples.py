"""Every example in a tiny setting, run as a user runs it, and `fastmax.testing.verify` and `fastmax.info`."""

import contextlib
import csv
import io
import math
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastmax
from fastmax import info
from fastmax.testing import evaluation, verify
from fastmax.testing.errors import measure
from fastmax.testing.tensors import random_tensors

ROOT = Path(__file__).parents[1]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 50
TINY = ["--steps", "3", "--n-layer", "2", "--block-size", "16", "--batch-size", "2"]


def run(script: str, *arguments: object, status: int = 0, names: dict | None = None) -> str:
    """Returns what `python script arguments...` prints.

    It runs in this process, which has imported torch already, with one thread, because these models are too small for more.
    `names` receives the script's global variables.
    """
    printed, code, threads = io.StringIO(), 0, torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        patch.chdir(ROOT)
        patch.syspath_prepend((ROOT / script).parent)
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        torch.set_num_threads(1)
        try:
            variables = runpy.run_path(str(ROOT / script), run_name="__main__")
            if names is not None:
                names.update(variables)
        except SystemExit as end:
            code = end.code or 0
        finally:
            torch.set_num_threads(threads)
    assert code == status
    return printed.getvalue()


def run_alone(*command: object) -> str:
    """Returns what `python command...` prints in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    arguments = [sys.executable, *map(str, command)]
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout


def rows(path: Path) -> list[dict]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    "script, option, value, message",
    [
        *(("train_lm", option, "0", "must be at least 1, got 0") for option in ("--steps", "--rows", "--block-size")),
        *(("train_lm", option, "0", "must be at least 1, got 0") for option in ("--accumulate", "--val-batches")),
        ("train_lm", "--warmup", "-1", "must be at least 0, got -1"),
        ("train_lm", "--seconds", "-1", "must be finite and above 0, got -1"),
        *(("train_long", option, "0", "must be at least 1, got 0") for option in ("--context", "--steps", "--rows")),
        ("train_long", "--lr", "0", "must be finite and above 0, got 0"),
        ("train_lm", "--lr", "nan", "must be finite and above 0, got nan"),
        ("train_char_lm", "--batch-size", "0", "must be at least 1, got 0"),
        ("convert_lm", "--exact-window", "0", "must be at least 1, got 0"),
        ("convert_lm", "--longest-half-life", "inf", "must be finite and above 0, got inf"),
        ("generate", "--temperature", "-1", "must be finite and at least 0, got -1"),
        ("generate", "--contexts", "0", "must be at least 1, got 0"),
    ],
)
def test_wrong_numbers_are_named(script, option, value, message, capsys):
    required = {"convert_lm": ["--checkpoint", "x"], "generate": ["x"]}.get(script, [])
    run(f"examples/{script}.py", *required, option, value, status=2)
    assert f"argument {option}: {message}" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, Path]:
    """Returns a text, and the directory of a tiny softmax and a tiny Fastmax model trained on it."""
    out = tmp_path_factory.mktemp("char_lm")
    (out / "text.txt").write_text(TEXT)
    for attention, run_ in (("softmax", run), ("fastmax", run_alone)):
        printed = run_(
            "examples/train_char_lm.py",
            "--no-parts",
            "--attention",
            attention,
            *TINY,
            "--sample",
            5,
            "--data",
            out / "text.txt",
            "--device",
            "cpu",
            "--out",
            out,
        )
        assert "tokens/s" in printed and "def " in printed
    return out / "text.txt", out


def test_char_lm_compares_with_parts_and_without(tmp_path, trained):
    text, _ = trained
    seeds = ["--seed", 7, "--seeds", 2, "--steps", 2]
    run("examples/train_char_lm.py", "--compare", *TINY, *seeds, "--data", text, "--device", "cpu", "--out", tmp_path)
    history = rows(tmp_path / "char_lm.csv")
    assert [row["run"] for row in history] == [
        name for name in ("fastmax", "softmax", "fastmax_plain", "softmax_plain") for _ in range(4)
    ]
    assert all(0.0 < float(row["val"]) < 6.0 for row in history)  # log(256) = 5.5 is a guess
    assert {row["seed"] for row in history} == {"7", "8"}
    assert (tmp_path / "char_lm.png").stat().st_size > 1000


@pytest.fixture(scope="module")
def trained_with_parts(trained, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("char_lm_parts")
    options = ["--sample", 1, "--data", trained[0], "--device", "cpu", "--out", out]
    for attention in ("softmax", "fastmax"):
        run("examples/train_char_lm.py", "--attention", attention, *TINY, *options)
    return out


@pytest.mark.parametrize("name", ["softmax", "fastmax"])
def test_char_lm_with_parts(name, trained, trained_with_parts):
    files = trained[1] / f"char_lm_{name}_plain.pt", trained_with_parts / f"char_lm_{name}.pt"
    plain, parts = (torch.load(file, weights_only=True) for file in files)
    assert "decay" not in parts["config"]["parts"] and plain["config"]["parts"]["decay"] is False
    assert len(parts["model"]) > len(plain["model"])
    assert 0.0 < float(rows(trained_with_parts / f"char_lm_{name}.csv")[-1]["val"]) < 6.0


def test_char_lm_custom_gradient_and_autograd_train_alike(tmp_path, trained):
    text, out = trained
    run(
        "examples/train_char_lm.py",
        "--no-custom-gradient",
        "--no-parts",
        *TINY,
        "--sample",
        1,
        "--data",
        text,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    custom, autograd = (
        [float(row["val"]) for row in rows(directory / "char_lm_fastmax_plain.csv")] for directory in (out, tmp_path)
    )
    assert custom == pytest.approx(autograd, rel=1e-4)
    checkpoints = [torch.load(directory / "char_lm_fastmax_plain.pt", weights_only=True) for directory in (out, tmp_path)]
    assert [checkpoint["config"]["parts"]["use_custom_gradient"] for checkpoint in checkpoints] == [True, False]


def test_swap_into_transformer():
    names = {}
    printed = run("examples/swap_into_transformer.py", "--steps", 30, "--finetune-steps", 2, names=names)
    losses = {line[:24].strip(): float(line[24:32]) for line in printed.splitlines()[1:]}
    assert list(losses) == ["softmax", "swapped", "swapped, fine-tuned", "softmax, fine-tuned"]
    assert losses["softmax"] != losses["swapped"] == pytest.approx(losses["softmax"], abs=0.5)
    assert all(0.0 < loss < math.log(10) for loss in losses.values())  # log(10) is a guess
    kinds = {name: type(layer.self_attn).__name__ for name in ("model", "softmax") for layer in names[name][1].layers}
    assert kinds == {"model": "SwappedMultiheadAttention", "softmax": "MultiheadAttention"}


def test_swap_hf():
    integration = pytest.importorskip("fastmax.integrations.transformers")
    names = {}
    printed = run("examples/swap_hf.py", "--steps", 2, names=names).splitlines()
    (before, trained), (swapped, tuned) = ([float(number) for number in re.findall(r"\d\.\d+", line)] for line in printed[1:3])
    assert 6.0 > before > trained > tuned > 0.0  # log(256) = 5.5 is a guess
    assert swapped == pytest.approx(trained, abs=0.1)
    assert set(integration.check(names["model"]).values()) == {"fastmax"}
    assert names["tokens"].shape == (1, 8 + 100)
    assert names["model"].config.fastmax == {"exact_window": 16, "constant_memory": True}


def test_associative_recall(tmp_path):
    tiny = ["--steps", 2, "--pairs", 2, 3, "--batch-size", 4, "--vocab", 8, "--n-embd", 16, "--device", "cpu"]
    run("examples/associative_recall.py", *tiny, "--out", tmp_path)
    table = rows(tmp_path / "associative_recall.csv")
    assert [row["attention"] for row in table] == ["fastmax p=1", "fastmax p=2", "softmax"]
    assert all(0.0 <= float(row[column]) <= 1.0 for row in table for column in ("pairs_2", "pairs_3"))
    run("examples/associative_recall.py", *tiny, "--scales", "--out", tmp_path)
    table = rows(tmp_path / "recall_scales.csv")
    assert len(table) == 5 and table[-1]["attention"] == 'as projected, normalize="token", temperature 1'


def test_digits(tmp_path):
    tiny = ["--epochs", 1, "--batch-size", 32, "--lr", 1e-2, "--seeds", 1, "--layers", 1, "--dim", 32, "--heads", 2]
    run("examples/train_digits.py", *tiny, "--device", "cpu", "--out", tmp_path)
    last = {row["attention"]: float(row["accuracy"]) for row in rows(tmp_path / "digits.csv") if row["epoch"] == "1"}
    assert set(last) == {"fastmax p=2", "fastmax p=1", "softmax"}
    assert min(last.values()) > 0.3  # guessing is 0.1


@pytest.mark.parametrize("wrong", [False, True], ids=["right", "wrong"])
def test_toggle_gradient(monkeypatch, wrong):
    right, customs = fastmax.fastmax_attention, []

    def attention(q, *others, use_custom_gradient, **options):
        customs.append(use_custom_gradient)
        if wrong and use_custom_gradient:
            q = torch.lerp(q.detach(), q, 1.001)  # q itself, with a gradient too large by 0.1%
        return right(q, *others, use_custom_gradient=use_custom_gradient, **options)

    monkeypatch.setattr(fastmax, "fastmax_attention", attention)
    printed = run("examples/toggle_gradient.py", "--tokens", 40, "--device", "cpu")
    errors = dict(line.rsplit(maxsplit=1) for line in printed.splitlines()[1:])
    assert customs == [True, False] and list(errors) == ["output", "grad of q", "grad of k", "grad of v"]
    assert {name for name, error in errors.items() if float(error) > 1e-5} == ({"grad of q"} if wrong else set())


def test_verify_passes_configurations(monkeypatch, capsys):
    """Every fifth configuration is run, so that each kind occurs. `.ci/run` checks all of them."""
    cases = verify.cases()[::5]
    monkeypatch.setattr(verify, "cases", lambda: cases)
    assert verify.main(["--device", "cpu"]) == 0
    printed, count = capsys.readouterr().out, len(cases)
    assert f"{count} of {count} configurations within the limit" in printed and "FAILED" not in printed


@pytest.mark.parametrize("wrong", [1.0 + 1e-4, math.nan], ids=["scaled", "nan"])
@pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
def test_verify_catches_a_wrong_operator(monkeypatch, capsys, custom, wrong):
    right = evaluation.fastmax_attention

    def perturbed(*tensors, use_custom_gradient, **options):
        o = right(*tensors, use_custom_gradient=use_custom_gradient, **options)
        return o * wrong if use_custom_gradient is custom else o

    monkeypatch.setattr(evaluation, "fastmax_attention", perturbed)
    assert verify.main(["--device", "cpu", "--only", "p=2 linear causal"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_verify_catches_a_wrong_gradient(monkeypatch):
    right = evaluation.fastmax_attention

    def perturbed(q, k, v, **options):
        k = torch.lerp(k.detach(), k, 1.001)  # k itself, with a gradient too large by 0.1%
        return right(q, k, v, **options)

    monkeypatch.setattr(evaluation, "fastmax_attention", perturbed)
    case = next(case for case in verify.cases() if case.name == "p=2 quadratic causal")
    errors = measure(random_tensors(case, "cpu"), case.options)
    assert {row.tensor for row in errors if not row.passed} == {"k"}


def test_info_names_the_implementation(capsys):
    info.main()
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    sentence = "On cpu fastmax runs its PyTorch implementation (tiled matrix products with an analytic backward)."
    assert sentence in printed.splitlines() and info.implementation(torch.device("cpu")) == sentence


def test_info_tells_kernels_from_their_absence(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(info.extension, "problem", lambda device=None: None)
    monkeypatch.setattr(info.extension, "build_info", lambda: "architectures 90")
    assert info.implementation(device) == "On cuda:0 fastmax runs its CUDA kernels."
    assert dict(info.report())["loaded"] == "architectures 90"
    monkeypatch.setattr(info.extension, "problem", lambda device=None: "there is no nvcc")
    assert info.implementation(device).endswith("not its CUDA kernels: there is no nvcc.")
    assert dict(info.report())["loaded"] == "no: there is no nvcc"


@pytest.mark.parametrize("options", [[], ["--every", 2, "--fit-batches", 0, "--transfer-steps", 0]], ids=["all", "hybrid"])
def test_convert_lm(tmp_path, monkeypatch, trained, options):
    text, out = trained
    sizes = ["--steps", 2, "--batch-size", 2, "--val-batches", 1, "--exact-window", 4, "--device", "cpu"]
    small = [] if options else ["--fit-batches", 1, "--transfer-steps", 2]
    checkpoint = out / "char_lm_softmax_plain.pt"
    run("examples/convert_lm.py", "--checkpoint", checkpoint, "--data", text, "--out", tmp_path, *sizes, *small, *options)
    stages = [row["stage"] for row in rows(tmp_path / "stages.csv")]
    assert stages[:2] == ["softmax", "swapped"] and stages[-1] == "softmax, 2 steps of fine-tuning"
    assert len(stages) == (4 if options else 6)
    assert all(0.0 < float(row["loss"]) < 6.0 for row in rows(tmp_path / "stages.csv"))
    assert len(rows(tmp_path / "finetuning.csv")) == 2 and (tmp_path / "convert.png").stat().st_size > 1000
    made = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert made["config"]["attention"] == "fastmax" and made["config"]["parts"]["exact_window"] == 4
    monkeypatch.syspath_prepend(ROOT / "examples")
    from model import GPT, GPTConfig

    model = GPT(GPTConfig(**made["config"]))
    model.load_state_dict(made["model"])
    assert [block.attn.attention for block in model.blocks] == ["fastmax", "softmax" if options else "fastmax"]
    run("examples/convert_lm.py", "--checkpoint", checkpoint, "--every", 3, "--out", tmp_path, status=2)  # of two layers


def test_convert_refuses_a_fastmax_checkpoint(tmp_path, trained, capsys):
    checkpoint = trained[1] / "char_lm_fastmax_plain.pt"
    run("examples/convert_lm.py", "--checkpoint", checkpoint, "--data", trained[0], "--out", tmp_path, status=2)
    assert f"{checkpoint} was trained with fastmax, not softmax" in capsys.readouterr().err
