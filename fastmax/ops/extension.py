"""The CUDA extension, a compiled library of kernels: loads it, and says why it does not run.

`setup.py` builds the library from `csrc/`. When loaded, it implements the operators `torch.ops.fastmax_cuda`. It uses no
Python symbols, so one file serves every Python and every PyTorch from 2.11 on.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastmax.core.warning import warn

PATH = Path(__file__).parents[1] / "libfastmax.so"
HOW_TO_BUILD = (
    "install the CUDA toolkit (nvcc), then `pip install --no-build-isolation .` in fastmax's source tree "
    "(`FASTMAX_BUILD_CUDA=1` makes it an error when the kernels cannot be built)"
)

# The largest head dim and number of tokens, and the dtypes, that the kernels have. The bindings in csrc/ raise an error for
# other calls. An operator adds limits of its own by the argument `covers` of `fastmax.ops.registration.register`.
MAX_HEAD_DIM = 256
MAX_TOKENS = 2**30 - 1
_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})

SCHEMA_VERSION = 29  # incremented when schemas in fastmax.ops change; the library returns the version it was built for

_problem: str | None = "it was not loaded yet"


def load() -> None:
    """Loads the library if PyTorch has CUDA. If it cannot be loaded, `problem()` returns the reason.

    Raises:
        ImportError: the library belongs to another version of this package.
    """
    global _problem
    if torch.version.cuda is None:
        _problem = f"this PyTorch ({torch.__version__}) was built without CUDA"
    elif not PATH.exists():
        _problem = f"the CUDA extension was not built: {HOW_TO_BUILD}"
    else:
        try:
            torch.ops.load_library(str(PATH))
        except OSError as error:
            _problem = f"the CUDA extension {PATH} does not load ({error}): rebuild it for this PyTorch; {HOW_TO_BUILD}"
            return
        if (built := _schema_version()) != SCHEMA_VERSION:
            raise ImportError(
                f"{PATH} was built from another version of fastmax (operator schemas {built}, this package has "
                f"{SCHEMA_VERSION}): remove it or rebuild it; {HOW_TO_BUILD}"
            )
        _problem = None


def problem(device: torch.device | None = None) -> str | None:
    """Returns the reason why the kernels do not run, or None if they run.

    Args:
        device: a CUDA device to check too.
    """
    if _problem is not None or device is None:
        return _problem
    return _device_problem(torch.cuda.current_device() if device.index is None else device.index)


@lru_cache
def _symbol(name: str) -> Any:  # a function of the library
    return getattr(ctypes.CDLL(str(PATH)), name)


def _schema_version() -> int | None:
    try:
        return _symbol("fastmax_schema_version")()
    except AttributeError:  # a library older than schema versions
        return None


@lru_cache
def _device_problem(index: int) -> str | None:
    query = _symbol("fastmax_device_problem")
    query.argtypes, query.restype = [ctypes.c_int], ctypes.c_char_p
    answer = query(index)
    return None if answer is None else answer.decode()


def build_info() -> str:
    """Returns what the loaded library was built for: architectures, head dims, arithmetic."""
    query = _symbol("fastmax_build_info")
    query.argtypes, query.restype = [], ctypes.c_char_p
    return query().decode()


@lru_cache
def _shortens_rows(*sizes: int) -> int:
    query = _symbol("fastmax_shortens_rows")
    query.argtypes, query.restype = [ctypes.c_int] * len(sizes), ctypes.c_int
    return query(*sizes)


def shortens_rows(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Returns whether kernels scale rows of 4-d q and k to a length during causal attention of order 1, where kernels run on q.

    0: no. 1: yes. 2: yes, and the linear algorithm, which these kernels have, is what `algorithm="auto"` takes.
    """
    sizes = (*q.shape[:2], k.shape[1], q.shape[2], k.shape[2], q.shape[3], v.shape[3])
    is_open = any(isinstance(size, torch.SymInt) for size in sizes)  # in a compiled graph
    if q.dtype != torch.bfloat16 or is_open or 0 in sizes or max(sizes) > MAX_TOKENS:
        return 0
    return _shortens_rows(q.get_device(), *sizes)


def set_debugging(on: bool) -> None:
    """Switches a line on stderr with the kernels of each call on or off, as FASTMAX_DEBUG in the environment does."""
    change = _symbol("fastmax_set_debugging")
    change.argtypes, change.restype = [ctypes.c_int], None
    change(on)


def device_has_kernels(x: Tensor) -> bool:
    """Returns whether x is on a device that the kernels run on. Warns once for each CUDA device that they do not run on."""
    if not x.is_cuda:
        return False
    if _problem is not None or _device_problem(x.get_device()) is not None:
        warn_if_unused(x.device)
        return False
    return True


def kernels_run_on(x: Tensor) -> bool:
    """Returns whether x is on a device that the kernels run on, in a dtype that they have."""
    return device_has_kernels(x) and x.dtype in _DTYPES


def expects_kernels(x: Tensor) -> bool:
    """Returns `kernels_run_on(x)`, or in compiled code, which cannot ask the library about the device, whether they may run."""
    if torch.compiler.is_compiling():
        return _problem is None and x.is_cuda and x.dtype in _DTYPES
    return kernels_run_on(x)


_checked: set[int | None] = set()


def warn_if_unused(device: torch.device) -> None:
    """Warns once for each CUDA device on which PyTorch operations run in place of the kernels."""
    if device.index in _checked:
        return
    _checked.add(device.index)
    reason = problem(device)
    if reason is not None:
        warn(f"fastmax runs its PyTorch implementation on {device}, which is slower than its CUDA kernels: {reason}.")
