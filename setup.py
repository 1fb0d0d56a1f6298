"""Build entry point; all metadata is in pyproject.toml.

Builds the CUDA kernels of csrc/ into fastmax/libfastmax.so. This needs nvcc, ninja and PyTorch's headers, so install with
--no-build-isolation. If something is missing, a message says so, and the pure-Python library is installed.

    FASTMAX_BUILD_CUDA=0|1   0: never build the kernels; 1: fail if they cannot be built
    FASTMAX_CUDA_ARCHS=90    architectures to build for (default: all in csrc/build.py)
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def load_build():
    """Returns csrc/build.py as a module. It is not part of the package."""
    spec = importlib.util.spec_from_file_location("fastmax_csrc_build", ROOT / "csrc" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildKernels(build_ext):
    """Builds one library without Python symbols, whose name has no tag of an interpreter."""

    def get_ext_filename(self, fullname):
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def build_extension(self, ext):
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        library = kernels.build(Path(self.build_temp).resolve(), kernels.requested_archs())
        shutil.copyfile(library, target)


class TagWheel(bdist_wheel):
    """Tags the wheel for every version of Python."""

    def get_tag(self):
        _, _, platform = super().get_tag()
        return "py3", "none", platform


kernels = load_build()
wanted = os.environ.get("FASTMAX_BUILD_CUDA", "")
if wanted not in ("", "0", "1"):
    sys.exit(f"FASTMAX_BUILD_CUDA must be 0 or 1 or unset, got {wanted!r}")
missing = None if wanted == "0" else kernels.missing()
if missing is not None:
    if wanted == "1":
        sys.exit(f"fastmax: FASTMAX_BUILD_CUDA=1, but {missing}")
    print(f"fastmax: installing without CUDA kernels: {missing}", file=sys.stderr)

if wanted == "0" or missing is not None:
    setup()
else:
    setup(
        ext_modules=[Extension("fastmax.libfastmax", sources=[])],
        cmdclass={"build_ext": BuildKernels, "bdist_wheel": TagWheel},
    )
