"""Fastmax in other libraries. The module `transformers`, which needs that library, is imported on first use."""

import importlib
from types import ModuleType

_WHEN_USED = ("transformers",)


def __getattr__(name: str) -> ModuleType:
    if name in _WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
