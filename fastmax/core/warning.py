"""Warnings that point at a line of the user's program, however deep in the library they arise."""

from __future__ import annotations

import sys
import warnings

_LIBRARIES = ("fastmax", "torch", "transformers")


def warn(message: str) -> None:
    """Issues a RuntimeWarning at the innermost line outside _LIBRARIES.

    `warnings.warn(skip_file_prefixes=...)` would do the same, but needs Python 3.12.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)
