"""Imports inside the package point to lower layers, form no circle, and do not hide in functions."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import fastmax

ROOT = Path(fastmax.__file__).parent

# A module may import modules of its own layer and of lower ones. The longest prefix of its name decides.
LAYERS = {
    "fastmax.core": 0,
    "fastmax.traffic": 1,
    "fastmax.eager": 1,
    "fastmax.ops": 2,
    "fastmax.softmax": 3,
    "fastmax.prepare": 3,
    "fastmax.functional": 4,
    "fastmax.decoding": 4,
    "fastmax.nn": 5,
    "fastmax.distributed": 6,
    "fastmax.integrations": 6,
    "fastmax.testing": 6,
    "fastmax.convert": 7,
    "fastmax": 8,  # the public names, and fastmax.info
}

# Imports that stand inside a function: (module, imported): reason.
INSIDE_FUNCTIONS = {
    ("fastmax", "fastmax.distributed.dtensors"): "`import fastmax` must not load torch.distributed.tensor, which takes seconds",
}


class Import(NamedTuple):
    """One imported module; `kind` is "module", "function", or "typing" (under `if TYPE_CHECKING`)."""

    importer: str
    imported: str
    kind: str


def modules_of(root: Path) -> dict[str, Path]:
    """Returns the path of each module of the package by its dotted name."""
    files = sorted(root.rglob("*.py"))
    return {
        ".".join(("fastmax", *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__"): path for path in files
    }


def imports_of(importer: str, source: str, modules: dict[str, Path]) -> Iterator[Import]:
    """Yields the imports of a module; those of other packages only where they stand in a function."""

    def visit(node: ast.AST, kind: str) -> Iterator[Import]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            kind = "function"
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            kind = "typing"
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} has a relative import"
            of_names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module for name in of_names]
        for name in names:
            if name.partition(".")[0] == "fastmax" or kind == "function":
                yield Import(importer, name, kind)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, kind)

    yield from visit(ast.parse(source), "module")


def layer_of(module: str) -> int:
    """Returns the rank of the layer of a module."""
    while module not in LAYERS:
        module = module.rpartition(".")[0]
    return LAYERS[module]


def upward(imports: list[Import]) -> list[str]:
    """Returns the imports that point to a higher layer. Imports for annotations alone are not executed."""
    there = [x for x in imports if x.imported.partition(".")[0] == "fastmax" and x.kind == "module"]
    return [f"{x.importer} -> {x.imported}" for x in there if layer_of(x.imported) > layer_of(x.importer)]


def circle(imports: list[Import]) -> list[str]:
    """Returns the modules of one circle of imports, empty where there is none."""
    following: dict[str, list[str]] = {}
    for x in imports:
        # A package that imports its own modules is entered before them.
        if x.kind == "module" and x.imported != x.importer and not x.importer.startswith(f"{x.imported}."):
            following.setdefault(x.importer, []).append(x.imported)
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in following.get(module, []):
            found = walk(imported, [*path, module])
            if found:
                return found
        done.add(module)
        return []

    return next((found for module in list(following) if (found := walk(module, []))), [])


def all_imports() -> list[Import]:
    modules = modules_of(ROOT)
    return [x for name, path in modules.items() for x in imports_of(name, path.read_text(), modules)]


def test_arrows_point_down():
    assert upward(all_imports()) == []


def test_no_circle():
    assert circle(all_imports()) == []


def test_no_import_inside_a_function():
    found = {(x.importer, x.imported) for x in all_imports() if x.kind == "function"}
    assert found == set(INSIDE_FUNCTIONS)


@pytest.mark.parametrize(
    ("importer", "source"),
    [
        ("fastmax.prepare.bounds", "from fastmax.distributed import sharding"),
        ("fastmax.core.call", "import fastmax.eager.linear"),
        ("fastmax.nn.rotary", "from fastmax import convert"),
        ("fastmax.eager.linear", "if True:\n    from fastmax.ops import exact_window"),
    ],
)
def test_reversed_arrow_is_found(importer, source):
    found = list(imports_of(importer, source, modules_of(ROOT)))
    assert len(upward(found)) == 1


def test_circle_is_found():
    modules = modules_of(ROOT)
    sources = {"fastmax.eager.tiles": "from fastmax.eager import exact", "fastmax.eager.exact": "import fastmax.eager.tiles"}
    found = [x for name, source in sources.items() for x in imports_of(name, source, modules)]
    assert circle(found) == ["fastmax.eager.tiles", "fastmax.eager.exact", "fastmax.eager.tiles"]


def test_hidden_import_is_found():
    found = list(imports_of("fastmax.functional", "def f():\n    from fastmax.distributed import sharding", modules_of(ROOT)))
    assert found == [Import("fastmax.functional", "fastmax.distributed.sharding", "function")]
