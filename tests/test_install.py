"""After `pip install -e .`, as `make` runs it, the package is found from every folder, even from the parent of the clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
# -S leaves out what the environment of the tests has installed.
LOOK = "import site, sys; site.addsitedir(sys.argv[1]); import fastmax, {0}; print({0}.__file__, fastmax.fastmax_attention)"


@pytest.fixture
def clone(tmp_path):
    """Makes a folder, named as git names it, with the files that an install reads and a package that imports fast."""
    clone = tmp_path / "fastmax"
    (clone / "fastmax").mkdir(parents=True)
    (clone / "fastmax/__init__.py").write_text("fastmax_attention = 'the function'\n")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    (clone / "csrc").mkdir()
    shutil.copy(ROOT / "csrc/build.py", clone / "csrc")
    return clone


def test_an_editable_install_is_found_beside_the_clone(clone, tmp_path):
    """From its parent, the folder of the clone looks like a namespace package `fastmax`, which takes precedence over finders
    that come after sys.path."""
    site = tmp_path / "site"
    site.mkdir()
    environment = os.environ | {"FASTMAX_BUILD_CUDA": "0"}
    subprocess.run([sys.executable, "-c", BUILD, str(site)], cwd=clone, env=environment, capture_output=True, check=True)
    (wheel,) = site.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    (clone / "fastmax/written_later.py").touch()

    for folder in (clone.parent, clone, site):
        command = [sys.executable, "-E", "-S", "-c", LOOK.format("fastmax.written_later"), str(site)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.stdout.split() == [str(clone / "fastmax/written_later.py"), "the", "function"], done.stderr
