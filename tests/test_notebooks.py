"""Every notebook runs from top to bottom and prints its stored outputs again. Stored outputs contain nothing of the machine
that printed them."""

import importlib.util
import json
import os
import re

import pytest
from test_examples import ROOT, run

DIRECTORY = ROOT / "examples" / "notebooks"
NAMES = sorted(path.name for path in DIRECTORY.glob("*.ipynb"))
NUMBER = re.compile(r"[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")

missing = [name for name in ("nbclient", "ipykernel", "matplotlib") if importlib.util.find_spec(name) is None]
needs_jupyter = pytest.mark.skipif(bool(missing), reason=f'{", ".join(missing)} missing: pip install ".[examples]"')


@pytest.fixture(autouse=True)
def kernels_import_this_tree(monkeypatch):
    """Kernels run in a temporary directory, from which an installed package would be found first."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))


def code_cells(path) -> list[dict]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def figures(cell: dict) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def same_text(left: str, right: str) -> bool:
    """Returns whether two texts have the same words, and the same numbers up to rounding of a digit."""
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (left, right)]
    return NUMBER.split(left) == NUMBER.split(right) and numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=2e-4)


def test_there_are_notebooks():
    assert len(NAMES) >= 3


@needs_jupyter
@pytest.mark.parametrize("name", NAMES)
def test_executes_and_prints_what_is_stored(tmp_path, name):
    output = run("examples/notebooks/execute.py", name, "--out", tmp_path)
    if "stopped:" in output:
        pytest.skip(output.strip())
    stored, fresh = code_cells(DIRECTORY / name), code_cells(tmp_path / name)
    assert [cell["source"] for cell in stored] == [cell["source"] for cell in fresh]
    for old, new in zip(stored, fresh, strict=True):
        assert figures(old) == figures(new)
        if "varies" not in old["metadata"].get("tags", []):
            assert same_text(printed(old), printed(new)), f"cell {old['id']}: make notebooks"


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs(name):
    path = DIRECTORY / name
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))  # one run, top to bottom
    for cell in cells:
        source = "".join(cell["source"])
        assert bool(printed(cell)) == bool(re.search(r"^ *print\(", source, re.MULTILINE)), cell["id"]
        assert figures(cell) == source.count("plt.show()"), cell["id"]
        assert set(cell["metadata"]) <= {"tags"}
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr", output
        assert not re.search(r"/(tmp|home|root|Users|usr|opt|var|work)/|site-packages|[A-Z]:\\", printed(cell)), cell["id"]
    assert path.stat().st_size < 300_000


def test_same_text_tells_numbers_apart():
    assert same_text("sum 1.5781, max 5", "sum 1.5782, max 5")
    assert not same_text("sum 1.5781, max 5", "sum 1.6781, max 5")
    assert not same_text("sum 1.5781, max 5", "sum 1.5781, most 5")


@needs_jupyter
def test_a_wrong_notebook_fails(tmp_path):
    wrong = tmp_path / "wrong.ipynb"
    text = (DIRECTORY / "01_online_softmax.ipynb").read_text(encoding="utf-8")
    right_line = "z = z * rescale + p.sum()"
    assert text.count(right_line) == 1
    wrong.write_text(text.replace(right_line, "z = z + p.sum()"), encoding="utf-8")
    from nbclient.exceptions import CellExecutionError

    with pytest.raises(CellExecutionError, match="AssertionError"):
        run("examples/notebooks/execute.py", wrong, "--out", tmp_path / "out")
    assert not (tmp_path / "out" / "wrong.ipynb").exists()


@needs_jupyter
def test_cpp_notebook_stops_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    name = "02_cpp_from_a_notebook.ipynb"
    assert f"{name} stopped: There is no C++ compiler" in run("examples/notebooks/execute.py", name, "--out", tmp_path)
    assert not (tmp_path / name).exists()
