"""Source trees: the text of Python packages, each module after those of its package that it imports.

A name that a file uses is then defined in a file that stands thousands of bytes before it, so that far context is of use. The
text is made of what any machine with Python has: the standard library and installed packages.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.learn.examples import text

# Matches an import statement. The groups are, for `from ..x import a, b`, the dots, the module and the names, and for
# `import x, y` the modules. The pattern ignores names that follow on later lines.
IMPORT = re.compile(
    rb"^[ \t]*(?:from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+\(?([\w., \t]*)|import[ \t]+([\w., \t]+))", re.MULTILINE
)
SEED = 0  # of the order of packages


def load_bytes(roots: list[Path] | None = None) -> Tensor:
    """Returns the text as bytes, uint8 (N,). Packages are in random order, the same on every machine with the same packages.

    Args:
        roots: directories of packages. None: those of this Python.

    Raises:
        SystemExit: there are no modules.
    """
    if roots is None:
        roots = [Path(path) for path in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}]
    modules = find_modules(roots)
    if not modules:
        raise SystemExit(f"there are no Python modules in {', '.join(map(str, roots))}")
    packages: dict[str, dict[str, bytes]] = {}
    for name, path in modules.items():
        source = path.read_bytes()
        if source and b"\0" not in source:
            packages.setdefault(name.partition(".")[0], {})[name] = source
    names = sorted(packages)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(SEED)).tolist()
    sources = [packages[names[i]][module] for i in order for module in imports_first(packages[names[i]])]
    return text.byte_tokens(sources).tokens


def find_modules(roots: list[Path]) -> dict[str, Path]:
    """Returns full name -> file of the modules in some directories. A directory within another one has its own modules."""
    modules: dict[str, Path] = {}
    seen: set[Path] = set()
    for root in sorted({root.resolve() for root in roots}, key=lambda root: (-len(root.parts), root)):
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if path in seen or any(part.startswith(".") for part in parts):
                continue
            seen.add(path)
            parts = parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts
            modules.setdefault(".".join(parts), path)
    return modules


def imports_first(sources: dict[str, bytes]) -> list[str]:
    """Returns the modules of a package by name, each after those that it imports; in a cycle, one of them comes first.

    Args:
        sources: full name -> source of each module.
    """
    ordered: list[str] = []
    begun: set[str] = set()
    for first in sorted(sources):
        stack = [] if first in begun else [(first, imported(first, sources))]
        begun.add(first)
        while stack:
            module, others = stack[-1]
            other = next((x for x in others if x not in begun), None)
            if other is None:
                ordered.append(module)
                stack.pop()
            else:
                begun.add(other)
                stack.append((other, imported(other, sources)))
    return ordered


def imported(module: str, sources: dict[str, bytes]) -> Iterator[str]:
    """Yields the modules among `sources` that a module's import statements name, in their order."""
    is_package = any(name.startswith(f"{module}.") for name in sources)
    for dots, base, names, modules in IMPORT.findall(sources[module]):
        if modules:
            named = [name.split()[0] for name in modules.decode().split(",") if name.split()]
        else:
            parents = module.split(".")
            parents = parents[: len(parents) - len(dots) + is_package] if dots else []
            origin = ".".join([*parents, *([base.decode()] if base else [])])
            members = [name.split()[0] for name in names.decode().split(",") if name.split()]
            named = [*(f"{origin}.{member}" for member in members), origin]
        yield from (name for name in named if name in sources and name != module)
