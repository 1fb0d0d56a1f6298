"""The README and the docs: tables agree with the CSVs, code blocks run, and the API page lists the public names."""

import ast
import inspect
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
# Pages whose Python blocks are a script. distributed.md takes two ranks (test_distributed_page.py), profiling.md is a fragment.
EXECUTED = sorted(
    path.name
    for path in (ROOT / "docs").glob("*.md")
    if "```python" in path.read_text() and path.name not in ("distributed.md", "profiling.md")
)
CSVS = ("docs/figures/*.csv", "benchmarks/results/*.csv", "benchmarks/results/learn/*.csv")


@pytest.fixture
def tree(tmp_path) -> Path:
    """Returns copies of the pages and the CSVs, which tests may change."""
    for pattern in (*tables.PAGES, *CSVS):
        for path in ROOT.glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    return tmp_path


@pytest.fixture(scope="module")
def checked():
    """Returns the status of a check of all pages, and the files that it opened."""
    opened, open_path = set(), Path.open

    def record(path, *arguments, **options):
        opened.add(path)
        return open_path(path, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", record)
        return tables.main(["--check"]), opened


def test_tables_are_those_of_the_results(checked):
    assert checked[0] == 0, "run python -m benchmarks.tables"


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


def test_every_csv_is_in_a_page(checked):
    """Every CSV is shown by a table of some page. olmo2.csv is shown by a figure alone."""
    csvs = {path for pattern in CSVS for path in ROOT.glob(pattern)}
    assert {path.name for path in csvs - checked[1]} == {"olmo2.csv"}


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
    """Each block runs after those before it. Blocks that compare results contain the comparison."""
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


@pytest.mark.parametrize("page", EXECUTED)
def test_code_of_the_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page run in order in one namespace. Blocks that compare results contain the comparison."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text, names = (ROOT / "docs" / page).read_text(), {}
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if "transformers" in block[1]:
            pytest.importorskip("transformers")
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(ROOT / "docs" / page), "exec"), names)


def messages() -> str:
    """Returns the string literals of the package, with ... in place of values, and the sources whose messages are not in
    Python."""

    def joined(node: ast.JoinedStr) -> str:
        return "".join(x.value if isinstance(x, ast.Constant) else "..." for x in node.values)

    texts = [(ROOT / name).read_text() for name in ("setup.py", "csrc/core/device.cu")]
    for path in (ROOT / "fastmax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(joined(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def test_messages_of_troubleshooting_are_those_of_the_sources():
    """Messages are the texts in double quotes outside code; ... stands for a value."""
    prose = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / "docs/troubleshooting.md").read_text(), flags=re.DOTALL)
    quotes, known = re.findall(r'"([^"]+)"', prose), messages()
    assert len(quotes) > 30
    pieces = (piece.strip(" ,:()") for quote in quotes for piece in " ".join(quote.split()).split("..."))
    missing = [piece for piece in pieces if piece not in known]
    assert not missing


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


def public_names() -> set[str]:
    """Returns the public names as `fastmax.name` and `fastmax.module.name`."""
    modules = {"convert", "decoding", "distributed", "softmax"}
    names = {f"fastmax.{name}" for name in fastmax.__all__ if name not in {*modules, "integrations"}}
    return names | {f"fastmax.{module}.{x}" for module in modules for x in getattr(fastmax, module).__all__}


def test_reference_lists_what_the_library_has():
    listed = set(re.findall(r"^\.\. auto\w+:: (\S+)", (ROOT / "docs/reference.rst").read_text(), re.MULTILINE))
    assert public_names() <= listed, public_names() - listed


@pytest.mark.parametrize(
    "function, heading",
    [
        (fastmax.fastmax_attention, "Attention"),
        (fastmax.flash_attention, "Attention"),
        (fastmax.FASTMultiHeadAttention, "Attention"),
        (fastmax.FastmaxSelfAttention, "The layer"),
    ],
)
def test_parameters_has_a_row_for_each_option(function, heading):
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", (ROOT / "docs/parameters.md").read_text(), re.MULTILINE | re.DOTALL)
    rows = "".join(re.findall(r"^\|([^|]*)\|", section, re.MULTILINE))
    listed = set(re.findall(r"\w+", rows)) | {"embed_dim", "num_heads", "dimensions", "others"}
    assert set(inspect.signature(function).parameters) <= listed


def test_api_has_an_example_for_each_name():
    """Every public name has a section with code that uses it. Pages have no directives, because a code host shows those as
    text."""
    page = (ROOT / "docs/api.md").read_text()
    sections = dict(re.findall(r"^### `([\w.]+)`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    for name in {name.rpartition(".")[2] for name in public_names()}:
        code = "".join(re.findall(r"^```python\n(.*?)^```", sections[name], re.MULTILINE | re.DOTALL))
        assert re.search(rf"\b{name}\b", code), name
    assert not any("eval-rst" in path.read_text() for path in (ROOT / "docs").glob("*.md"))
