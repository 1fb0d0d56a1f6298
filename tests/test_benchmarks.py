"""The benchmark runner on tiny suites: columns of the CSV, and that nothing wrong is timed."""

import csv
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks import check, floors, report, run, workloads
from benchmarks.registry import PROVIDERS, SUITES, AtMost, Case, Provider, Suite

CASE = Case(1, 2, 48, 8, algorithm="linear", peer="sdpa")
QUICK = ("--device", "cpu", "--rounds", "2", "--dropped", "1", "--seconds", "0", "--commit", "abc")


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs a suite of these cases; returns the exit status and the rows of the CSV."""

    def run_suite(*cases: Case, arguments: tuple[str, ...] = (), **options) -> tuple[int, list[dict[str, str]]]:
        monkeypatch.setitem(SUITES, "tiny", Suite("for tests", {"cpu": cases}, **options))
        out = tmp_path / "rows.csv"
        status = run.main(["tiny", *QUICK, "--out", str(out), *arguments])
        with out.open(newline="") as file:
            return status, list(csv.DictReader(file))

    return run_suite


def spoiled(monkeypatch, change) -> tuple[Case, list[int]]:
    """A case whose first provider passes fastmax's inputs and output through `change`, and a list that counts its calls."""
    calls = []
    honest = PROVIDERS["fastmax"]

    def call(q, k, v, case):
        calls.append(1)
        return change(honest.call(q, k, v, case), q, k, v)

    monkeypatch.setitem(PROVIDERS, "spoiled", Provider("spoiled", call, honest.weight, honest.arithmetic))
    return replace(CASE, providers=("spoiled", "sdpa")), calls


def test_rows_of_every_mode(measure, capsys):
    case = replace(
        CASE,
        modes=("fwd", "fwd+bwd", "memory", "host"),
        targets={"fwd": AtMost(1e9), "host": AtMost(1e-9, of_peer=True)},
        published={"fastmax": "1 s"},
    )
    status, rows = measure(case, replace(case, p=1, algorithm="quadratic", causal=False))
    assert status == 0
    assert len(rows) == 2 * 4 * 2 and list(rows[0]) == list(report.COLUMNS)
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["median"]) <= float(row["p80"]), row
        assert row["unit"] == {"fwd": "ms", "fwd+bwd": "ms", "memory": "MiB", "host": "us"}[row["mode"]]
        assert float(row["error"]) < 1e-5 and float(row["grad_error"]) < 2e-5
        assert row["commit"] == "abc" and row["device"] and row["torch"] == torch.__version__ and "dropped" in row["protocol"]
        assert row["peer"] == "sdpa" and (row["provider"] != "sdpa" or float(row["of_peer"]) == 1.0)
        ours = row["provider"] == "fastmax"
        assert row["met"] == ({"fwd": "yes", "host": "no"}.get(row["mode"], "") if ours else "")
        assert row["published"] == ("1 s" if ours else "")
    assert "2 of 4 targets met" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda o, q, k, v: o * 1.0001, id="output"),
        pytest.param(lambda o, q, k, v: o.index_fill(2, torch.tensor([47]), 0.0), id="last row"),
        pytest.param(lambda o, q, k, v: o + 1e-4 * (q - q.detach()), id="gradient of q"),
        pytest.param(lambda o, q, k, v: o + 1e-4 * (k - k.detach()), id="gradient of k"),
        pytest.param(lambda o, q, k, v: o + 1e-4 * (v - v.detach()), id="gradient of v"),
        pytest.param(lambda o, q, k, v: o.index_put((torch.tensor([0]),) * 4, torch.tensor(math.nan)), id="not a number"),
    ],
)
def test_wrong_provider_is_refused_before_it_is_timed(measure, monkeypatch, capsys, change):
    case, calls = spoiled(monkeypatch, change)
    status, rows = measure(case)
    assert status == 1
    assert len(calls) <= 2, "it was called again after the check"
    for row in rows:
        assert (row["provider"] == "spoiled") == row["note"].startswith("refused: spoiled is wrong on fp32")
        assert (row["provider"] == "spoiled") == (row["median"] == "")
    assert "refused" in capsys.readouterr().out


def test_honest_provider_is_called_more_often_than_it_is_checked(measure, monkeypatch):
    case, calls = spoiled(monkeypatch, lambda o, q, k, v: o)
    status, _ = measure(case)
    assert status == 0 and len(calls) == 2 + 2 * 3


def test_provider_that_fails_does_not_stop_the_others(measure, monkeypatch):
    def change(o, q, k, v):
        raise RuntimeError("no such backend")

    case, _ = spoiled(monkeypatch, change)
    status, rows = measure(case)
    assert status == 1
    assert [row["note"] for row in rows if row["provider"] == "spoiled"] == ["failed: RuntimeError: no such backend"] * 2
    assert all(row["median"] for row in rows if row["provider"] == "sdpa")


def test_growing_n_stops_at_the_limit(measure, monkeypatch):
    sizes = (16, 32, 64, 128)
    cases = [replace(CASE, tokens=n, modes=("fwd+bwd",)) for n in sizes]
    status, rows = measure(*cases, limit_s=0.0)
    assert status == 0
    ours = [row for row in rows if row["provider"] == "fastmax"]
    assert [bool(row["median"]) for row in ours] == [True, True, False, False]
    assert ours[2]["note"].startswith("not run: ") and "limit 0.0 s" in ours[2]["note"]


def test_decode(measure, monkeypatch):
    case = Case(1, 2, 1, 8, algorithm=None, modes=("step", "host"), providers=("fastmax", "copy"), peer="copy")
    monkeypatch.setattr(workloads, "_cache_bytes", lambda device: 2**14)
    status, rows = measure(case, workload="decode")
    assert status == 0
    assert [(row["mode"], row["provider"]) for row in rows] == [("step", "fastmax"), ("step", "copy"), ("host", "fastmax")]
    assert float(rows[0]["gb_per_s"]) > 0 and 0 < float(rows[0]["error"]) < 1e-5

    honest = workloads.fastmax.step
    monkeypatch.setattr(workloads.fastmax, "step", lambda *x: (honest(*x)[0], x[-1]))  # the state does not advance
    status, rows = measure(case, workload="decode")
    assert status == 1 and rows[0]["note"].startswith("refused") and rows[0]["median"] == "" and rows[1]["median"]


def test_crossover_report(measure, capsys):
    case = replace(CASE, algorithm=None, providers=("quadratic", "linear"), modes=("fwd+bwd",), peer="quadratic")
    measure(*(replace(case, tokens=n) for n in (16, 32)), report="crossings")
    lines = capsys.readouterr().out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("linear is faster"))
    assert lines[start + 2].startswith("fp32 p=2 d=8")


def test_crossing():
    slow = {n: n * n for n in (1, 10, 100, 1000)}
    assert report.crossing(slow, {n: 200 * n for n in slow}) == pytest.approx(200)
    assert report.crossing(slow, {n: n / 2 for n in slow}) == 1
    assert report.crossing(slow, {n: 2 * n * n for n in slow}) is None
    assert report.crossing(slow, {}) is None


def test_chosen_crossing_is_the_planners():
    n = report.chosen_crossing(torch.device("cpu"), "fp32", 2, 4, 32, longest=16384)
    choose = report.planner.choose_algorithm
    assert choose(n + 20, n + 20, 32, 32, True, 2) == "linear" and choose(n - 20, n - 20, 32, 32, True, 2) == "quadratic"


def test_figure(measure, tmp_path):
    pytest.importorskip("matplotlib")
    case = replace(CASE, p=None, algorithm=None, modes=("fwd+bwd", "memory"), providers=("fastmax_p2", "fastmax_p1", "sdpa"))
    image = tmp_path / "scaling.png"
    measure(*(replace(case, tokens=n) for n in (16, 32)), figure="scaling", arguments=("--figure", str(image)))
    assert image.stat().st_size > 10_000


def test_floors():
    quadratic = Case(8, 32, 4096, 64, 2, "quadratic", "bf16")
    forward = 8 * 32 * 4096 * 2 * 4096 * 64 / 780e9
    assert floors.attention_ms(quadratic, "quadratic", 2, "fwd") == pytest.approx(forward)
    assert floors.attention_ms(quadratic, "quadratic", 2, "fwd+bwd") == pytest.approx(3.5 * forward)
    memory_bound = Case(1, 16, 65536, 128, 1, "linear", "bf16")
    assert floors.attention_ms(memory_bound, "linear", 1, "fwd") == pytest.approx(16 * 65536 * 8 * 128 / 4.25e9)
    long = replace(quadratic, tokens=65536)
    assert floors.attention_ms(long, "auto", 2, "fwd") == floors.attention_ms(long, "linear", 2, "fwd")
    assert floors.attention_ms(quadratic, "auto", 2, "fwd") == floors.attention_ms(quadratic, "quadratic", 2, "fwd")


def test_every_suite_names_what_exists():
    for suite in SUITES.values():
        assert suite.workload in workloads.WORKLOADS
        assert not suite.report or suite.report in report.REPORTS
        assert not suite.figure or suite.figure in report.FIGURES
        for case in (case for cases in suite.cases.values() for case in cases):
            assert case.peer == "" or case.peer in case.providers
            assert case.dtype in check.LIMITS
            assert suite.workload == "decode" or all(name in PROVIDERS for name in case.providers)
