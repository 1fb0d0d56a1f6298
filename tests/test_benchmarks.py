"""The benchmark runner on tiny suites: the columns of the CSV, and that a wrong result is not timed."""

import csv
import io
import math
import re
import sys
import time
import types
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.nn.functional as F

sys.path.append(str(Path(__file__).parents[1]))

import fastmax
from benchmarks import counters, profile, report, roofline, run, timing
from benchmarks.learn import variants
from benchmarks.providers import PROVIDERS, Provider
from benchmarks.registry import SUITES, SUSTAINED, AtMost, Case, Suite
from benchmarks.workloads import WORKLOADS, common, decode, generation, softmax, train

CASE = Case(1, 2, 48, 8, algorithm="linear", peer="sdpa")
QUICK = ("--device", "cpu", "--rounds", "2", "--dropped", "1", "--seconds", "0", "--sustained", "0.01", "--commit", "abc")


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs a suite of these cases. Returns the exit status and the rows of the CSV."""

    def run_suite(*cases: Case, arguments: tuple[str, ...] = (), **options) -> tuple[int, list[dict[str, str]]]:
        monkeypatch.setitem(SUITES, "tiny", Suite("for tests", {"cpu": cases}, **options))
        out = tmp_path / "rows.csv"
        status = run.main(["tiny", *QUICK, "--out", str(out), *arguments])
        with out.open(newline="") as file:
            return status, list(csv.DictReader(file))

    return run_suite


def spoiled(monkeypatch, change) -> tuple[Case, list[int]]:
    """Returns a case whose first provider passes fastmax's inputs and output through `change`, and a list that counts its
    calls."""
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
        modes=("fwd", "fwd+bwd", "memory", "host", "sustained fwd", "sustained fwd+bwd"),
        targets={"fwd": AtMost(1e9), "host": AtMost(1e-9, of_peer=True)},
        published={"fastmax": "1 s"},
    )
    status, rows = measure(case, replace(case, p=1, algorithm="quadratic", causal=False))
    assert status == 0
    assert len(rows) == 2 * 6 * 2 and list(rows[0]) == list(report.COLUMNS)
    for row in rows:
        assert 0 < float(row["p20"]) <= float(row["median"]) <= float(row["p80"]), row
        assert row["unit"] == {"memory": "MiB", "host": "us"}.get(row["mode"], "ms")
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


def test_provider_that_fails_does_not_stop_the_others(measure, monkeypatch):
    def change(o, q, k, v):
        raise RuntimeError("no such backend")

    case, _ = spoiled(monkeypatch, change)
    status, rows = measure(case)
    assert status == 1
    assert [row["note"] for row in rows if row["provider"] == "spoiled"] == ["failed: RuntimeError: no such backend"] * 2
    assert all(row["median"] for row in rows if row["provider"] == "sdpa")


def test_left_out_on_the_command_line(measure, monkeypatch, capsys):
    case, calls = spoiled(monkeypatch, lambda o, q, k, v: o)
    status, rows = measure(case, arguments=("--without", "spoiled"))
    assert status == 0 and not calls
    for row in rows:
        assert (row["provider"] == "spoiled") == (row["note"] == "left out") == (row["median"] == "")
    with pytest.raises(SystemExit):
        measure(case, arguments=("--without", "nobody"))
    assert "has a provider 'nobody'" in capsys.readouterr().err


def test_growing_n_stops_at_the_limit(measure, monkeypatch):
    sizes = (16, 32, 64, 128)
    cases = [replace(CASE, tokens=n, modes=("fwd+bwd",)) for n in sizes]
    status, rows = measure(*cases, limit_s=0.0)
    assert status == 0
    ours = [row for row in rows if row["provider"] == "fastmax"]
    assert [bool(row["median"]) for row in ours] == [True, True, False, False]
    assert ours[2]["note"].startswith("not run: ") and "limit 0.0 s" in ours[2]["note"]


def test_softmax_attention_written_out(measure):
    """This also checks gradients of tensors that are not head-major, with more than one batch entry."""
    case = Case(2, 2, 40, 8, None, None, providers=("sdpa", "plain", "plain_numpy"), token_major=True)
    status, rows = measure(case, replace(case, causal=False, modes=("memory",)))
    assert status == 0 and len(rows) == 9
    assert all(row["median"] and float(row["error"]) < 1e-5 and float(row["grad_error"]) < 2e-5 for row in rows)
    assert {row["note"] for row in rows if row["provider"] == "plain" and row["mode"] == "fwd"} == {PROVIDERS["plain"].note}


# Of the suite "options", at sizes where windows hide keys and sequences differ in length, one of them empty.
OPTIONS = {f"{case.title} {case.algorithm or ''}".strip(): case for case in SUITES["options"].cases["cuda"]}


def tiny_option(name: str) -> Case:
    case = OPTIONS[name]
    sequences = {64: 6, 0: 0}[case.sequences]
    return replace(case, batch=1, heads=3, tokens=48, head_dim=8, dtype="fp32", window=case.window and 7, sequences=sequences)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(measure, name):
    case = tiny_option(name)
    status, rows = measure(case)
    assert status == 0
    assert len(rows) == 2 * len(case.modes)
    for mode, ours, plain in zip(case.modes, rows[::2], rows[1::2], strict=True):
        assert (ours["provider"], plain["provider"]) == case.providers and ours["peer"] == plain["provider"]
        assert ours["mode"] == plain["mode"] == mode
        assert (
            float(ours["target"]) == case.targets[mode].value and ours["target_of"] == "peer" and ours["met"] in ("yes", "no")
        )
        assert plain["target"] == "" and float(ours["of_peer"]) > 0 and float(ours["error"]) < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_option_that_is_not_taken_is_refused(measure, monkeypatch, name):
    """Each call ignores its option, and the check must notice it."""
    case = tiny_option(name)
    ours = PROVIDERS[case.providers[0]]
    plain = PROVIDERS[case.providers[1] if case.title in ("window", "normalize") else "fastmax"]

    def ignoring(q, k, v, case, cu_seqlens=None, **of_keys):
        assert set(of_keys) == {x for x in ("log_decay", "log_input_gate") if x in name}
        assert (cu_seqlens is not None) == ("packed" in name)
        return plain.call(q, k, v, case) + sum(0 * x.sum() for x in of_keys.values())

    if case.title == "prefill":
        monkeypatch.setattr(fastmax.decoding, "prefill", lambda q, k, v, state: (fastmax_attention_of_two(q, k, v), state))
    else:
        monkeypatch.setitem(PROVIDERS, ours.name, replace(ours, call=ignoring))
    status, rows = measure(case)
    assert status == 1 and rows[0]["note"].startswith("refused"), rows[0]["note"]


def fastmax_attention_of_two(q, k, v):
    """Attention that wrongly drops the state of earlier tokens."""
    halves = ([x[:, :, part] for x in (q, k, v)] for part in (slice(0, 20), slice(20, None)))
    return torch.cat([fastmax.fastmax_attention(*x, causal=True, temperature=q.shape[3] ** 0.5) for x in halves], dim=2)


def test_gradient_of_decays_is_checked(measure, monkeypatch):
    honest = PROVIDERS["fastmax_decay"]

    def call(q, k, v, case, log_decay):
        return honest.call(q, k, v, case, log_decay=torch.lerp(log_decay.detach(), log_decay, 1.001))

    monkeypatch.setitem(PROVIDERS, "fastmax_decay", replace(honest, call=call))
    status, rows = measure(tiny_option("log_decay linear"))
    assert status == 1 and "grad_log_decay" in rows[0]["note"]


def peer(of_score, normalize: bool = True, gamma: bool = False):
    """Computes the result of the peers' kernels, in their layout (b, n, h, d)."""

    def call(q, k, v, **options):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        n = q.shape[2]
        weight = of_score(q @ k.mT / q.shape[3] ** 0.5).tril()
        if gamma:
            distance = (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)
            weight = weight * (1 - 2.0 ** (-5.0 - torch.arange(q.shape[1])))[:, None, None] ** distance
        o = weight @ v
        return (o / weight.sum(-1, keepdim=True) if normalize else o).transpose(1, 2)

    return call


PEERS = ("fla_based", "fla_based_chunk", "fla_linear", "fla_retention", "power_retention")


@pytest.fixture
def peers(monkeypatch):
    """Modules of the names that the peers have."""
    taylor, linear = peer(lambda s: 1 + s + s * s / 2), peer(lambda s: s, normalize=False)
    retention = peer(lambda s: s, normalize=False, gamma=True)
    modules = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.based": {"parallel_based": taylor, "fused_chunk_based": taylor},
        "fla.ops.linear_attn": {"chunk_linear_attn": lambda *x, normalize: (linear(*x), None)},
        "fla.ops.retention": {"chunk_retention": lambda *x: (retention(*x), None)},
        "retention": {"power_retention": lambda *x, deg, chunk_size: peer(lambda s: s**deg)(*x)},
    }
    for name, functions in modules.items():
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def test_peers_are_checked_against_their_own_definitions(measure, monkeypatch, peers):
    case = replace(CASE, p=None, algorithm=None, token_major=True, batch=2, providers=("fastmax_p2", *PEERS), peer="fastmax_p2")
    status, rows = measure(case)
    assert status == 0 and all(row["median"] and float(row["grad_error"]) < 2e-5 for row in rows), rows
    notes = {row["provider"]: row["note"] for row in rows}
    assert notes == {"fastmax_p2": ""} | {name: PROVIDERS[name].note for name in PEERS}
    monkeypatch.setattr(sys.modules["fla.ops.retention"], "chunk_retention", peer(lambda s: s, normalize=False))
    monkeypatch.setattr(sys.modules["retention"], "power_retention", lambda *x, **y: peer(lambda s: s * s + 1e-2)(*x))
    status, rows = measure(case)
    assert status == 1
    assert {row["provider"] for row in rows if row["note"].startswith("refused")} == {"fla_retention", "power_retention"}


def test_peer_that_is_absent_or_fails_is_a_note(measure, monkeypatch, peers):
    def broken(*x, **y):
        raise AttributeError("moved in version 9")

    monkeypatch.setitem(sys.modules, "fla.ops.based", None)  # what an import of a missing module finds
    monkeypatch.delattr(sys.modules["fla.ops.retention"], "chunk_retention")
    monkeypatch.setattr(sys.modules["retention"], "power_retention", broken)
    case = replace(CASE, p=None, algorithm=None, providers=("fastmax_p2", *PEERS), peer="")
    status, rows = measure(case)
    assert status == 0
    notes = {row["provider"]: row["note"] for row in rows if row["mode"] == "fwd+bwd"}
    assert notes["fla_based"].startswith("not installed: import of fla.ops.based halted")
    assert notes["fla_retention"] == "not installed: fla.ops.retention has no chunk_retention"
    assert notes["power_retention"] == "failed: AttributeError: moved in version 9"
    assert all(bool(row["median"]) == (row["provider"] in ("fastmax_p2", "fla_linear")) for row in rows)

    monkeypatch.setitem(PROVIDERS, "sdpa", replace(PROVIDERS["sdpa"], call=broken, foreign=False))
    with pytest.raises(AttributeError, match="moved"):
        measure(CASE)


def test_softmax_of_rows(measure, monkeypatch):
    def naive(x):
        e = x.exp()
        return e / e.sum(-1, keepdim=True)

    def last_row_wrong(x):
        return x.softmax(-1).index_fill(0, torch.tensor([x.shape[0] - 1]), 0.0)

    def within(x):
        return x.softmax(-1)

    monkeypatch.setattr(torch.ops.fastmax, "softmax", within, raising=False)
    (case,) = run.SUITES["softmax"].cases["cpu"][:1]
    case = replace(case, batch=8, tokens=64, targets={"fwd": AtMost(1e9, of_peer=True)})
    for first, second, faults in ((within, within, 0), (naive, last_row_wrong, 2)):
        monkeypatch.setitem(softmax.ROW_SOFTMAX, "softmax_online", first)
        monkeypatch.setitem(softmax.ROW_SOFTMAX, "softmax_safe", second)
        status, rows = measure(case, replace(case, dtype="bf16"), workload="softmax")
        assert status == (faults > 0) and [row["provider"] for row in rows] == list(case.providers) * 2
        assert rows[0]["case"] == "softmax fp32 8 x 64" and all(float(row["gb_per_s"]) > 0 for row in rows if row["median"])
        assert [row["note"].startswith("refused") for row in rows] == [faults > 0, faults > 0, False] * 2
        assert [row["met"] for row in rows[:3]] == (["", "", ""] if faults else ["yes", "yes", ""])


@pytest.fixture
def tiny_gpt(monkeypatch) -> Case:
    monkeypatch.setitem(train.SIZES, "GPT 124M", {"vocab_size": 96, "n_layer": 1})
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    import model

    monkeypatch.setattr(model, "LOGITS", 20 * 96)
    (case,) = SUITES["train"].cases["cpu"]
    return replace(case, batch=2, heads=2, tokens=16, head_dim=8)


def test_training_step(measure, monkeypatch, tiny_gpt):
    cases = [replace(tiny_gpt, tokens=n, dtype=dtype) for n, dtype in ((16, "fp32"), (32, "bf16"))]
    status, rows = measure(*cases, workload="train")
    assert status == 0 and len(rows) == 12
    for row in rows:
        assert float(row["median"]) > 0
        if row["mode"] == "train":
            assert int(row["note"].removesuffix(" tokens/s")) == round(2e3 * int(row["tokens"]) / float(row["median"]))
        else:
            assert row["unit"] == "MiB"

    honest = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *x, **y: math.nan * honest(*x, **y))
    status, rows = measure(cases[0], workload="train")
    assert status == 1
    assert [row["note"][:7] for row in rows if row["median"] == ""] == ["refused"] * 2


def test_sustained_time_is_that_of_calls_back_to_back():
    """The loop is as long as requested, and a call's time is the wall time of the loop divided by its number of calls."""
    calls = []

    def call() -> None:
        calls.append(time.perf_counter())
        while time.perf_counter() - calls[-1] < 2e-3:
            pass

    protocol = timing.Protocol(sustained=0.1)
    (spread,) = timing.sustained_ms([timing.Call(call)], torch.device("cpu"), protocol)
    assert spread.median >= 2.0 and spread.samples >= timing.SEGMENTS
    assert (calls[-1] - calls[0]) >= (1 + timing.WARM_SHARE) * 0.1 * 0.9


def test_training_step_is_refused_away_from_ln_vocabulary(tiny_gpt):
    step = train.Step(tiny_gpt, "sdpa", torch.device("cpu"))
    first = train.check(step, tiny_gpt, PROVIDERS["sdpa"])
    step.optimizer.zero_grad()
    assert abs(first - math.log(96)) < 0.3 and min(step().item() for _ in range(6)) < first
    with torch.no_grad():
        step.model.head.weight.mul_(30)
    with pytest.raises(common.WrongResult, match="first loss"):
        train.check(step, tiny_gpt, PROVIDERS["sdpa"])
    with torch.no_grad():
        step.model.head.weight.div_(30)
    step.model.norm.weight.register_hook(lambda grad: grad * math.nan)
    with pytest.raises(common.WrongResult, match="gradient of norm.weight"):
        train.check(step, tiny_gpt, PROVIDERS["sdpa"])


def test_decode(measure, monkeypatch):
    case = Case(1, 2, 1, 8, algorithm=None, modes=("step", "host"), providers=("fastmax", "copy"), peer="copy")
    monkeypatch.setattr(decode, "_cache_bytes", lambda device: 2**14)
    status, rows = measure(case, workload="decode")
    assert status == 0
    assert [(row["mode"], row["provider"]) for row in rows] == [("step", "fastmax"), ("step", "copy"), ("host", "fastmax")]
    assert float(rows[0]["gb_per_s"]) > 0 and 0 < float(rows[0]["error"]) < 1e-5

    honest = fastmax.decoding.step
    monkeypatch.setattr(fastmax.decoding, "step", lambda *x: (honest(*x)[0], x[-1]))  # the state does not advance
    status, rows = measure(case, workload="decode")
    assert status == 1 and rows[0]["note"].startswith("refused") and rows[0]["median"] == "" and rows[1]["median"]


def test_decode_beside_a_cache(measure, monkeypatch):
    case = Case(1, 2, 20, 8, algorithm=None, modes=("step",), providers=("fastmax_buffered", "fastmax_in_place", "sdpa_flash"))
    case = replace(case, peer="sdpa_flash")
    monkeypatch.setattr(decode, "_cache_bytes", lambda device: 2**12)
    status, rows = measure(case, workload="decode")
    assert status == 0 and [row["provider"] for row in rows] == list(case.providers)
    assert all(float(row["of_peer"]) > 0 for row in rows) and 0 < float(rows[0]["error"]) < 1e-5


def test_generation(measure, monkeypatch):
    monkeypatch.setattr(generation, "TOKENS", 2)  # a second one finds what the first wrote; more take longer
    case = Case(2, 2, 40, 8, None, None, modes=(SUSTAINED + "step",), title="GPT 25M", providers=("p2_all", "softmax_math"))
    status, rows = measure(replace(case, peer="softmax_math"), workload="generation")
    assert status == 0 and [row["provider"] for row in rows] == ["p2_all", "softmax_math"]
    assert all(float(row["of_peer"]) > 0 and row["unit"] == "us" and row["note"].endswith(" MiB") for row in rows)

    honest = generation.generate.CachedLayer.step_
    monkeypatch.setattr(generation.generate.CachedLayer, "step_", lambda layer, x, state: honest(layer, x, state) * 1.1)
    status, rows = measure(replace(case, peer="softmax_math"), workload="generation")
    assert status == 1 and rows[1]["note"].startswith("refused") and rows[1]["median"] == "" and rows[0]["median"]


@pytest.mark.parametrize("cache_bytes", [2**12, 2**15], ids=["few states", "many states"])
def test_a_pass_of_buffered_steps_has_its_share_of_folds(cache_bytes, monkeypatch):
    folds, honest = [], fastmax.decoding.step_

    def step_(*token_and_state):
        folds.append((token_and_state[-1].buffered == 32).float().mean().item())
        return honest(*token_and_state)

    monkeypatch.setattr(fastmax.decoding, "step_", step_)
    case = Case(1, 2, 20, 8, algorithm=None, modes=("step",), providers=("fastmax_buffered",))
    made = decode.make_pass("fastmax_buffered", case, torch.device("cpu"), cache_bytes, [])
    for _ in range(2):
        made.function()
    assert len(folds) == 2 * made.steps and sum(folds[made.steps :]) * 32 == made.steps


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
    image.unlink()
    assert run.main(["scaling", "--rows", str(tmp_path / "rows.csv"), "--figure", str(image)]) == 0  # measures nothing
    assert image.stat().st_size > 10_000


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = [{"case": "x", "tokens": 16, "median": 0.5, "note": ""}, {"case": "y", "tokens": 32, "note": "out of memory"}]
    report.write_csv(rows, tmp_path / "x.csv")
    read = report.read_csv(tmp_path / "x.csv")
    assert [row.dropna().to_dict() for _, row in read.iterrows()] == [{"case": "x", "tokens": 16, "median": 0.5}, rows[1]]


def test_figures_of_times_and_of_training(measure, tmp_path, tiny_gpt):
    pytest.importorskip("matplotlib")
    image = tmp_path / "image.png"
    case = replace(CASE, p=None, algorithm=None, modes=("fwd",), providers=("fastmax_p2", "fastmax_flash", "sdpa"))
    case = replace(case, title="OLMo 2 7B")
    measure(*(replace(case, tokens=n) for n in (16, 32)), figure="times", arguments=("--figure", str(image)))
    assert image.stat().st_size > 10_000
    image.unlink()
    cases = [replace(tiny_gpt, tokens=n, providers=("sdpa",)) for n in (16, 32)]
    measure(*cases, workload="train", figure="training", arguments=("--figure", str(image)))
    assert image.stat().st_size > 10_000


def test_memory_that_does_not_differ_is_a_sentence():
    def row(name: str, n: int, mib: float) -> dict:
        return {"provider": name, "mode": "memory", "tokens": n, "median": mib}

    rows = [row("fastmax_p2", 1024, 100.0), row("sdpa", 1024, 102.0), row("sdpa", 2048, 200.0), row("fastmax_p2", 2048, 210.0)]
    assert report.memory_spread(pd.DataFrame(rows)) == pytest.approx(0.05)
    assert report.memory_spread(pd.DataFrame([*rows, row("sdpa", 4096, 1.0)])) == pytest.approx(0.05), (
        "a provider alone at a context"
    )


def test_profile(monkeypatch, tmp_path, capsys, tiny_gpt):
    monkeypatch.setitem(SUITES, "flash", Suite("for tests", {"cpu": (replace(CASE, title="small"),)}))
    monkeypatch.setitem(SUITES, "train", Suite("for tests", {"cpu": (tiny_gpt,)}, workload="train"))
    trace, quick = tmp_path / "trace.json", ("--device", "cpu", "--iterations", "2")
    assert profile.main(["flash", "--only", "small", "--provider", "sdpa", *quick, "--trace", str(trace)]) == 0
    printed = capsys.readouterr().out
    assert "sdpa, fwd+bwd, small fp32" in printed and "2 profiled" in printed and "torch: " in printed
    (line,) = re.findall(r".*flash_attention_for_cpu_backward$", printed, re.MULTILINE)
    launches, ms, share, *_ = line.split()
    assert float(launches) == 1 and float(ms) > 0 and 0 < float(share.rstrip("%")) < 100
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in trace.read_text()

    assert profile.main(["train", *quick, "--rows", "3"]) == 0
    assert "fastmax_p2, train, GPT" in capsys.readouterr().out
    assert profile.main(["train", *quick, "--bare"]) == 0 and capsys.readouterr().out == ""
    with pytest.raises(SystemExit):
        profile.main(["flash", "--provider", "nobody", *quick])
    assert "got 'nobody'" in capsys.readouterr().err


@pytest.mark.cuda
def test_profile_and_training_on_a_device(monkeypatch, capsys, tiny_gpt):
    case = Case(2, 4, 512, 64, 2, "quadratic", "bf16", providers=("fastmax",))
    monkeypatch.setitem(SUITES, "flash", Suite("for tests", {"cuda": (case,)}))
    assert profile.main(["flash", "--iterations", "2"]) == 0
    printed = capsys.readouterr().out
    products = []
    for line in re.findall(r".*quadratic_(?:fwd|bwd)\w*_kernel.*", printed):
        launches, ms, _, gflop, *_ = line.split()
        assert float(launches) == 1 and float(ms) > 0
        products.append(float(gflop) / 0.1342)
    assert sorted(products) == pytest.approx([2, 3, 4], rel=1e-3), "the forward, grad_q, grad_k with grad_v"
    assert "iteration\n" not in printed.split("launches")[1]
    assert profile.main(["flash", "--iterations", "2", "--bare"]) == 0

    case = replace(tiny_gpt, head_dim=32, dtype="bf16", providers=("fastmax_p2", "fastmax_p1"), peer="")
    rows = train.measure_train(case, torch.device("cuda"), run.Protocol(dropped=1, rounds=2, seconds=0.0), {})
    assert [row["mode"] for row in rows] == ["train", "train", "memory", "memory"]
    assert all(row["median"] > 0 for row in rows)


def test_work_of_kernels():
    """The work of a call's kernels adds up to the arithmetic of its floor, and the patterns match kernels of csrc."""
    quadratic = Case(8, 32, 4096, 64, 2, "quadratic", "bf16")
    linear = Case(1, 32, 65536, 64, 2, "linear", "bf16")

    def total(case: Case, names: str, mode: str) -> float:
        return sum(roofline.work(f"void fastmax::{name}_kernel<64>", case, 2, mode).flop for name in names.split())

    product = quadratic.batch * 32 * 4096 * 4096 * 64
    assert total(quadratic, "quadratic_fwd", "fwd") == 2 * product
    assert total(quadratic, "quadratic_fwd quadratic_bwd_kv quadratic_bwd_q", "fwd+bwd") == 9 * product
    assert total(replace(quadratic, causal=False), "flash_fwd", "train") == 4 * product
    expected = roofline.attention_ms(linear, "linear", 2, "fwd") / 1e3 * roofline.MATMUL["bf16"]
    forward = total(linear, "linear_state linear_read", "fwd")
    assert forward == pytest.approx(expected, rel=0.15)  # blocks of 8 x 8 features
    backward = total(linear, "linear_state linear_read linear_grad", "fwd+bwd") - forward
    assert backward == pytest.approx(2.5 * expected, rel=0.15)
    for name, case, mode in (
        ("elementwise_kernel", linear, "fwd+bwd"),
        ("row_score_kernel", quadratic, "fwd"),
        ("linear_state_kernel", replace(linear, dtype="fp32"), "fwd"),
    ):
        assert roofline.work(name, case, 2, mode) is None
    line = profile.Line("quadratic_fwd_kernel", 1, 1.55, 0.75, *roofline.work("quadratic_fwd_kernel", quadratic, 2, "fwd"))
    header, shown = (text.split() for text in profile.table([line], quadratic, with_shares=True))
    assert header[:3] == ["launches", "ms", "share"] and shown[5:7] == ["355", "45%"]

    sources = "".join(path.read_text() for path in (Path(__file__).parents[1] / "csrc").rglob("*.[ch]*"))
    ours = set(re.findall(r"__global__[^;{]*?(\w+_kernel)\(", sources))
    tables = roofline._QUADRATIC, roofline._LINEAR, roofline._LINEAR1, roofline._LAYER
    for pattern in (pattern for table in tables for pattern in table):
        assert any(re.fullmatch(pattern.split("<")[0], name) for name in ours) or "sdpa" in pattern, pattern
    for name in (name for name in ours if re.match("quadratic|split_heads|join_heads", name)):
        assert roofline.work(name, quadratic, 2, "fwd+bwd") is not None, name


def test_counters_of_kernels():
    """Output of ncu becomes one line per kernel, with averages weighted by time. ncu also prints lines of its own, which are
    skipped."""
    metrics = [counters.SECONDS, *counters.SHARES.values()]
    name = "void fastmax::<unnamed>::linear_state_sm90_kernel<(int)64, (bool)0>(fastmax::StateParams)"
    launches = [("0", name, "3,000,000", 20, 30, 40, 50), ("1", "other(int *)", 1e6, 1, 2, 3, 4)]
    launches += [("2", name, 1e6, 40, 10, 20, 10)]
    text = io.StringIO("==PROF== Connected\n", newline="")
    text.seek(0, io.SEEK_END)
    writer = csv.writer(text, quoting=csv.QUOTE_ALL)
    writer.writerow(["ID", "Kernel Name", *metrics])
    writer.writerow(["", "", "ns", "%", "%", "%", "%"])
    writer.writerows(launches)
    first, second = counters.by_kernel(text.getvalue())
    assert (first.launches, first.ms, second.ms) == (2, 4.0, 1.0)
    assert first.shares == pytest.approx({"tensor": 0.25, "dram": 0.25, "l2": 0.35, "issue": 0.4})
    assert counters.short(first.name) == "linear_state_sm90_kernel<64, 0>"
    linear = Case(1, 32, 65536, 64, 2, "linear", "bf16")
    work = roofline.work(first.name, linear, 2, "fwd+bwd")
    floor = max(work.flop / roofline.MATMUL["bf16"], work.bytes / roofline.COPY)
    assert counters.floor_ms(first.name, linear, 2) == 1e3 * floor
    assert counters.floor_ms(second.name, linear, 2) is None
    with pytest.raises(RuntimeError, match="counted nothing"):
        counters.by_kernel("==ERROR== no permission")
    for suite, only, provider in counters.CASES:
        assert any(only in case.label() and provider in case.providers for case in SUITES[suite].cases["cuda"]), only


def test_floors():
    quadratic = Case(8, 32, 4096, 64, 2, "quadratic", "bf16")
    forward = 8 * 32 * 4096 * 2 * 4096 * 64 / 780e9
    assert roofline.attention_ms(quadratic, "quadratic", 2, "fwd") == pytest.approx(forward)
    assert roofline.attention_ms(quadratic, "quadratic", 2, "fwd+bwd") == pytest.approx(3.5 * forward)
    memory_bound = Case(1, 16, 65536, 128, 1, "linear", "bf16")
    assert roofline.attention_ms(memory_bound, "linear", 1, "fwd") == pytest.approx(16 * 65536 * 8 * 128 / 4.25e9)
    long = replace(quadratic, tokens=65536)
    assert roofline.attention_ms(long, "auto", 2, "fwd") == roofline.attention_ms(long, "linear", 2, "fwd")
    assert roofline.attention_ms(quadratic, "auto", 2, "fwd") == roofline.attention_ms(quadratic, "quadratic", 2, "fwd")


def test_every_suite_names_what_exists():
    for suite in SUITES.values():
        assert suite.workload in WORKLOADS
        assert not suite.report or suite.report in report.REPORTS
        assert not suite.figure or suite.figure in report.FIGURES
        for case in (case for cases in suite.cases.values() for case in cases):
            assert case.peer == "" or case.peer in case.providers
            assert case.dtype in common.LIMITS
            known = {"softmax": softmax.ROW_SOFTMAX, "decode": decode.NAMES, "generation": generation.MODELS}
            known["train"] = {**train.ATTENTION, **variants.VARIANTS}
            assert all(name in known.get(suite.workload, PROVIDERS) for name in case.providers)
