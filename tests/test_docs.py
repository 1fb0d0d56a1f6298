"""README and docs: their tables are those of the CSVs, and the API page lists what the library has."""

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))

import fastmax
from benchmarks import tables
from fastmax.integrations.mha import SwappedMultiheadAttention

ROOT = Path(__file__).resolve().parents[1]
CSVS = ("docs/figures/*.csv", "benchmarks/results/*.csv", "benchmarks/results/learn/*.csv")


@pytest.fixture
def tree(tmp_path) -> Path:
    """The pages and the CSVs, to be changed."""
    for pattern in (*tables.PAGES, *CSVS):
        for path in ROOT.glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return tmp_path


def test_tables_are_those_of_the_results():
    assert tables.main(["--check"]) == 0, "run python -m benchmarks.tables"


def test_number_that_changes_makes_every_page_that_shows_it_stale(tree, capsys):
    path = tree / "benchmarks/results/cuda.csv"
    old = str(tables.Results().median("cuda", heads=32, tokens=65536, provider="fastmax", mode="sustained fwd+bwd"))
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, "123.4"))
    pages = [page.read_text() for page in sorted(tree.glob("docs/*.md"))]
    assert tables.main(["--check"], tree) == 1
    assert "README.md is out of date" in capsys.readouterr().err
    assert [page.read_text() for page in sorted(tree.glob("docs/*.md"))] == pages, "--check writes nothing"
    assert tables.main([], tree) == 0 and "-->123 ms against " in (tree / "README.md").read_text()
    assert tables.main(["--check"], tree) == 0


def test_every_csv_is_in_a_page(monkeypatch):
    """olmo2.csv has a figure alone."""
    opened, open_path = set(), Path.open

    def record(path, *arguments, **options):
        opened.add(path)
        return open_path(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", record)
    tables.main(["--check"])
    csvs = {path for pattern in CSVS for path in ROOT.glob(pattern)}
    assert {path.name for path in csvs - opened} == {"olmo2.csv"}


def test_every_block_is_in_a_page():
    text = "".join(path.read_text() for pattern in tables.PAGES for path in ROOT.glob(pattern))
    assert set(re.findall(r"<!-- (?:table|value): ([\w-]+) -->", text)) == set(tables.BLOCKS)


@pytest.mark.parametrize(
    "text, message",
    [
        ("a <!-- value: nothing -->1<!-- end -->", "no block is named 'nothing'"),
        ("a\n<!-- value: copy-rate -->1<!-- end -->", "begins a line"),
        ("a <!-- value: copy-rate -->1", "a mark is not of the form"),
        ("<!-- table: train --> text", "a mark is not of the form"),
        ("<!-- table: copy-rate --> <!-- value: copy-rate -->1<!-- end -->", "a mark is not of the form"),
    ],
)
def test_wrong_marks_are_errors(text, message):
    with pytest.raises(ValueError, match=message):
        tables.rewritten(text, tables.Results())


def test_numbers():
    assert [tables.number(x) for x in (0.2559, 1.0, 9.996, 99.96, 1166.4)] == ["0.256", "1.00", "10.0", "100", "1166"]
    assert [tables.rounded(n) for n in (2633.4, 995.0, 10625.0)] == ["2600", "1000", "11000"]
    assert [tables.gain(x) for x in (0.656, 0.999, 2.02, 9.96, 24.3)] == ["0.66", "1.0", "2.0", "10", "24"]
    with pytest.raises(LookupError, match="no measured row"):
        tables.Results().row("cuda", provider="nobody")
    with pytest.raises(LookupError, match="one is meant"):
        tables.Results().row("cuda", provider="fastmax", mode="fwd")


def test_states_weigh_what_their_formula_says():
    for d in (32, 64, 128):
        assert tables._state_bytes(d, 2) == (d * (d + 1) // 2 + d + 1) * (d + 1) * 4
        assert tables._state_bytes(d, 1) == (d + 1) * (d + 1) * 4


def test_code_of_the_readme_runs():
    """Every block after those before it; those that compare results do so themselves."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    operator, swap, transformers, layer, verify = blocks
    names: dict = {}
    exec(operator.replace("1024", "64"), names)
    exec(swap, names)
    assert any(isinstance(module, SwappedMultiheadAttention) for module in names["model"].modules())
    exec(layer, names)
    whole = names["attention"](names["x"][:, :1001])
    torch.testing.assert_close(names["y"], whole[:, 1000:])
    exec(verify, names)

    config = pytest.importorskip("transformers").LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
    )
    loaded = "from_pretrained(name,"
    assert loaded in transformers
    exec(transformers.replace(loaded, "from_config(config,"), names | {"config": config})


def test_commands_of_the_readme_are_targets_of_make():
    commands = set(re.findall(r"^    make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"demo", "test"} == commands
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands <= set(targets)


def test_docstrings_keep_their_formulas_on_the_site():
    """docs/conf.py puts `::` before what is indented after an empty line, and before nothing else."""
    conf = runpy.run_path(str(ROOT / "docs/conf.py"))
    text = "First.\n\n    o = sum\n\n    o = z\n\nArgs:\n    q: (b, h,\n        d).\n\n- item\n\n    of it\n"
    lines = text.split("\n")
    conf["indented_is_code"](None, "function", "f", None, None, lines)
    assert "\n".join(lines) == text.replace("First.\n\n", "First.\n\n::\n\n")


def test_api_page_lists_what_the_library_has():
    page = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: (\S+)", page, re.MULTILINE))
    modules = {"decoding", "integrations", "softmax"}
    public = {f"fastmax.{name}" for name in fastmax.__all__ if name not in modules}
    public |= {f"fastmax.{name}.{x}" for name in ("decoding", "softmax") for x in getattr(fastmax, name).__all__}
    assert public <= listed, public - listed
