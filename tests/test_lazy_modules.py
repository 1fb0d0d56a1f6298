"""Modules that `import fastmax` leaves out are there when they are first used."""

import subprocess
import sys

import pytest

import fastmax

LAZY = ("convert", "distributed", "info", "testing")


def run(code, **options):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, **options)


@pytest.mark.parametrize("name", LAZY)
def test_a_module_is_imported_by_its_attribute(name):
    before, after = f"'fastmax.{name}' not in sys.modules", f"fastmax.{name} is sys.modules['fastmax.{name}']"
    done = run(f"import sys, fastmax; print({before}, {after})")
    assert done.stdout.strip() == "True True", done.stderr


def test_the_import_brings_nothing_that_takes_seconds():
    slow = [
        *(f"fastmax.{name}" for name in LAZY),
        "fastmax.integrations.transformers",
        "transformers",
        "torch.distributed.tensor",
    ]
    done = run(f"import sys, fastmax; dir(fastmax); print([x for x in {slow} if x in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_they_are_listed():
    assert set(LAZY) <= set(dir(fastmax)) and "fastmax_attention" in dir(fastmax)
    assert "transformers" in dir(fastmax.integrations)


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'fastmax' has no attribute 'nonsense'"):
        getattr(fastmax, "nonsense")  # noqa: B009
    with pytest.raises(AttributeError, match=r"module 'fastmax\.integrations' has no attribute 'nonsense'"):
        getattr(fastmax.integrations, "nonsense")  # noqa: B009
    assert not hasattr(fastmax, "nonsense")


def test_the_integration_by_its_attribute():
    pytest.importorskip("transformers")
    done = run("import fastmax; print(fastmax.integrations.transformers.configure.__module__)")
    assert done.stdout.strip() == "fastmax.integrations.transformers.models", done.stderr


def test_the_integration_without_transformers():
    done = run("import sys; sys.modules['transformers'] = None; import fastmax; fastmax.integrations.transformers")
    assert "ImportError: fastmax.integrations.transformers needs transformers >= 5.4: pip install" in done.stderr
