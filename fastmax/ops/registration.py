"""The library of operators `torch.ops.fastmax`."""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("fastmax", "DEF")
NAMES: list[str] = []  # of the operators that are declared


def define(schema: str) -> None:
    LIBRARY.define(schema)
    NAMES.append(schema[: schema.index("(")])
