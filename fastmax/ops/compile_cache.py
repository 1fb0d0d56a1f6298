"""Tells versions of the operators apart in PyTorch's caches of compiled code."""

from __future__ import annotations

from torch.compiler import config

from fastmax.ops.extension import SCHEMA_VERSION


def add_tag() -> None:
    """Adds the version of the operators' schemas to the key of all code that this process compiles.

    PyTorch finds cached code by the operators of a graph. The code calls operators that these consist of, and their arguments
    may have changed since.
    """
    tag = f"fastmax-ops-{SCHEMA_VERSION}"
    if tag not in config.cache_key_tag.split(","):
        config.cache_key_tag = f"{config.cache_key_tag},{tag}".lstrip(",")
