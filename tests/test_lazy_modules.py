"""Modules that `import fastmax` does not import are imported when they are first used."""

import importlib.util
import subprocess
import sys

import pytest

import fastmax

LAZY = ("convert", "distributed", "info", "testing")


SLOW = [*(f"fastmax.{name}" for name in LAZY), "fastmax.integrations.transformers", "transformers", "torch.distributed.tensor"]
CODE = f"""
import sys, fastmax
dir(fastmax)
assert not set({SLOW}) & set(sys.modules), set({SLOW}) & set(sys.modules)
sys.modules["transformers"] = None
try:
    fastmax.integrations.transformers
except ImportError as error:
    assert "fastmax.integrations.transformers needs transformers >= 5.4: pip install" in str(error)
else:
    raise AssertionError("transformers is not there")
del sys.modules["transformers"]
for name in {LAZY}:
    assert getattr(fastmax, name) is sys.modules[f"fastmax.{{name}}"]
"""
INTEGRATION = "assert fastmax.integrations.transformers.configure.__module__ == 'fastmax.integrations.transformers.models'"


def test_a_module_is_imported_by_its_attribute():
    """Importing them earlier would take seconds. The Hugging Face integration says which package it needs."""
    code = CODE + (INTEGRATION if importlib.util.find_spec("transformers") else "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_they_are_listed():
    assert set(LAZY) <= set(dir(fastmax)) and "fastmax_attention" in dir(fastmax)
    assert "transformers" in dir(fastmax.integrations)


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fastmax' has no attribute 'nonsense'"):
        getattr(fastmax, "nonsense")  # noqa: B009
    with pytest.raises(AttributeError, match=r"module 'fastmax\.integrations' has no attribute 'nonsense'"):
        getattr(fastmax.integrations, "nonsense")  # noqa: B009
    assert not hasattr(fastmax, "nonsense")
