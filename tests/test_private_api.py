"""The table in CONTRIBUTING.md lists exactly the private PyTorch API that the package uses."""

import ast
import re
from pathlib import Path

import fastmax

ROOT = Path(fastmax.__file__).parent
PAGE = ROOT.parent / "CONTRIBUTING.md"


def private_names(source: str) -> set[str]:
    """Returns the dotted names of torch with a part that begins with an underscore, however the source imports them."""
    tree = ast.parse(source)
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torch":
                    bound[name.asname or "torch"] = name.name if name.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            bound |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}

    def dotted(node: ast.AST) -> str | None:
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        return ".".join([bound[node.id], *reversed(parts)]) if isinstance(node, ast.Name) and node.id in bound else None

    for node in ast.walk(tree):  # x = torch._C._functorch
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and dotted(node.value) is not None:
            bound.setdefault(node.targets[0].id, dotted(node.value))
    names = {*bound.values(), *filter(None, map(dotted, ast.walk(tree)))}
    private = {name for name in names if re.search(r"\._(?!_)", name)}
    return {name for name in private if not any(other.startswith(f"{name}.") for other in private)}


def test_the_table_lists_all_private_names():
    used = set()
    for path in sorted(ROOT.rglob("*.py")):
        module = ".".join(("fastmax", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        used |= {(module, name) for name in private_names(path.read_text(encoding="utf-8"))}
    section = PAGE.read_text(encoding="utf-8").split("## Private PyTorch API\n")[1].split("\n## ")[0]
    listed = set()
    for row in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", section, re.MULTILINE):
        modules, names = (re.findall(r"`([\w.]+)`", cell) for cell in row)
        listed |= {(module, name) for module in modules for name in names}
    assert used == listed


def test_private_names_are_found_however_they_are_imported():
    source = """
import torch
import torch._dynamo as dynamo
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch._subclasses.fake_tensor import is_fake as fake
functorch = torch._C._functorch
functorch.get_unwrapped(x), pytree.tree_map(f, x), dynamo.reset(), fake(x), F.pad(x), torch.__version__, self._own
"""
    assert private_names(source) == {
        "torch._C._functorch.get_unwrapped",
        "torch._dynamo.reset",
        "torch._subclasses.fake_tensor.is_fake",
        "torch.utils._pytree.tree_map",
    }
