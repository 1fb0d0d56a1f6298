"""Warnings that point at the line of the user's program, through however many layers of modules they were called."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("fastmax", "torch", "transformers")


def warn(message: str) -> None:
    """A RuntimeWarning at the innermost line outside this library and those that call it.

    Not `warnings.warn(skip_file_prefixes=...)`, which Python has from 3.12 on.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
