"""Modules of examples/, which is a folder of scripts and no package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
try:
    import model
    import text
    import training
finally:
    sys.path.pop()

__all__ = ["model", "text", "training"]
