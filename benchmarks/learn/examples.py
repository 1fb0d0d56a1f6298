"""Imports modules of examples/, which is a folder of scripts and not a package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # before other modules named text or model
try:
    import generate
    import model
    import text
    import train_lm
    import training
finally:
    sys.path.pop(0)

__all__ = ["generate", "model", "text", "train_lm", "training"]
