"""Fastmax inside other libraries; each module needs its library and is imported when it is first used."""

import importlib
from types import ModuleType

_WHEN_USED = ("transformers",)


def __getattr__(name: str) -> ModuleType:
    if name in _WHEN_USED:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHEN_USED})
