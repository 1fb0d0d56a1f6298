"""benchmarks.learn.trees: the order of modules in the text of source trees."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.learn import trees


def tree(tmp_path: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return tmp_path


PACKAGE = {
    "p/__init__.py": "from .a import f\n",
    "p/a.py": "import os\nfrom p.sub import c as name\nfrom . import b, missing\n",
    "p/b.py": "def g():\n    from ..other import x\n    from .sub.d import y\n",
    "p/sub/__init__.py": "",
    "p/sub/c.py": "import p.b, p.sub.d as d\nfrom .. import a\n",
    "p/sub/d.py": "d = 1\n",
    "q.py": "import p\n",
    ".hidden/h.py": "hidden\n",
}


def test_modules_are_found_by_their_names(tmp_path):
    root = tree(tmp_path, PACKAGE)
    names = {"p", "p.a", "p.b", "p.sub", "p.sub.c", "p.sub.d", "q"}
    assert set(trees.find_modules([root])) == names
    found = trees.find_modules([root, root / "p" / "sub"])
    assert found["c"] == root / "p/sub/c.py" and "p.sub.c" not in found, "a module belongs to the innermost directory"


@pytest.mark.parametrize("module, expected", [
    ("p", ["p.a"]), ("p.a", ["p.sub.c", "p.sub", "p.b", "p"]), ("p.b", ["p.sub.d"]), ("p.sub.d", []),
    ("p.sub.c", ["p.b", "p.sub.d", "p.a", "p"]),
])  # fmt: skip
def test_imports(tmp_path, module, expected):
    sources = {name: path.read_bytes() for name, path in trees.find_modules([tree(tmp_path, PACKAGE)]).items()}
    assert list(trees.imported(module, sources)) == expected


def test_modules_come_after_those_that_they_import(tmp_path):
    sources = {name: path.read_bytes() for name, path in trees.find_modules([tree(tmp_path, PACKAGE)]).items()}
    package = {name: source for name, source in sources.items() if name != "q"}
    order = trees.imports_first(package)
    assert sorted(order) == sorted(package)
    assert order.index("p.sub.d") < order.index("p.b") < order.index("p.sub.c") < order.index("p.a") < order.index("p")


def test_text(tmp_path):
    """Packages stay together, and nothing is lost or repeated."""
    root = tree(tmp_path, PACKAGE)
    found = bytes(trees.load_bytes([root]).tolist()).decode()
    assert sorted(found) == sorted(
        "".join(source + "\n" for name, source in PACKAGE.items() if source and ".hidden" not in name)
    )
    assert found.endswith("import p\n\n") or found.startswith("import p\n\n")
    assert found == bytes(trees.load_bytes([root]).tolist()).decode()


def test_no_modules(tmp_path):
    with pytest.raises(SystemExit, match="no Python modules"):
        trees.load_bytes([tmp_path])
