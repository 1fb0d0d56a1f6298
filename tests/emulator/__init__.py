"""The Hopper kernels on the CPU: their sources as they are, compiled as C++ over a multiprocessor made of fibers (machine.h).

    library = build(folder)                       # every `*_sm90.cu` of csrc/, and the host code that launches them
    kernels = library.run("quadratic", "forward", {"q": q, "k": k, "v": v, "o": o, "z": z}, causal=1, schedule=3)

Tensors are those of AttentionParams, FwdParams and BwdParams (csrc/core/params.h) by name, on the CPU; results are written into those
given. Numbers: scale, a0, a1, a2, order, causal, left, right, dropout, math (MathMode), sm_count (blocks of a persistent grid),
resident (blocks that run side by side) and schedule: 0 everything in order and at once, 1 and 2 the first or the last warp that can run
and all copies and products late, from 3 on at random.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
CSRC = HERE.parent.parent / "csrc"
# Portable kernels that the Hopper ones are launched with.
PORTABLE = (
    "decay/decay_sm80.cu",
    "quadratic/bounds_sm80.cu",
    "linear/prepare_sm80.cu",
    "linear/tile_inputs_sm80.cu",
    "linear/order2/add_state_sm80.cu",
    "linear/order2/part_state_sm80.cu",
    "linear/order2/part_state_io_sm80.cu",
    "linear/order2/segments_sm80.cu",
)
HOST = ("core/sm90/tensor_map.cpp", "quadratic/algorithm.cpp", "linear/algorithm.cpp", "linear/order*/launch*.cpp")
MATH = "Bf16"
DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}  # MathMode


class EmulatorError(RuntimeError):
    """What the emulator found wrong: a deadlock, a barrier that is overrun, accumulators that are read in flight."""


def cuda_home() -> Path:
    spec = importlib.util.spec_from_file_location("csrc_build", CSRC / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.cuda_home()


def build(folder: Path, pattern: str = "", edits: dict[str, tuple[str, str]] | None = None, jobs: int = 2, csrc: Path = CSRC) -> Library:
    """Compiles the kernels into folder.

    pattern: a regular expression that the path of a `*_sm90.cu` must have a match of; other kernels are not there then. edits: by
    path, a text and what replaces it, to see that what breaks a kernel is found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / "csrc", ignore_errors=True)
    include = []
    for path, (old, new) in (edits or {}).items():
        text = (csrc / path).read_text()
        if text.count(old) == 0:
            raise ValueError(f"{path} has no {old!r}")
        changed = folder / "csrc" / path
        changed.parent.mkdir(parents=True, exist_ok=True)
        changed.write_text(text.replace(old, new))
        include = ["-I", folder / "csrc"]
    kernels = [p for p in sorted(csrc.rglob("*_sm90.cu")) if re.search(pattern, str(p.relative_to(csrc)))]
    portable = [csrc / name for name in PORTABLE if (csrc / name).exists()]
    host = [p for name in HOST for p in sorted(csrc.glob(name))]
    flags = [
        *("-std=c++20", "-fPIC", "-fno-extern-tls-init", "-w", "-Wno-psabi", "-DFASTMAX_HAS_SM90", f"-DFASTMAX_MATH={MATH}"),
        *("-I", HERE / "headers", "-I", HERE, *include, "-I", csrc, "-isystem", cuda_home() / "include"),
    ]

    def compile(source: Path) -> Path:
        path = folder / "csrc" / source.relative_to(csrc) if source.is_relative_to(csrc) else source
        source = path if path.exists() else source
        out = folder / ("_".join(source.parts[-3:]) + ".o")
        own = source.is_relative_to(HERE)
        if is_current(out):
            return out
        command = ["c++", "-O2" if own else "-O1", *flags, "-MD", "-include", HERE / "prefix.h", "-x", "c++", "-c", source, "-o", out]
        subprocess.run(list(map(str, command)), check=True)
        return out

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(compile, [*kernels, *portable, *host, *sorted(HERE.glob("*.cpp"))]))
    return Library(link(folder, objects))


def is_current(out: Path) -> bool:
    """Whether an object is newer than all that it was made of."""
    made_of = out.with_suffix(".d")
    if not out.exists() or not made_of.exists():
        return False
    paths = re.sub(r"\\\n", " ", made_of.read_text()).split()[1:]
    return all(Path(p).exists() and Path(p).stat().st_mtime < out.stat().st_mtime for p in paths)


def link(folder: Path, objects: list[Path]) -> Path:
    """What is not compiled, such as the portable kernels that the tables name, says so when it is called."""
    symbols: dict[str, set[str]] = {"U": set(), "T": set()}
    for line in subprocess.run(["nm", *objects], capture_output=True, text=True, check=True).stdout.splitlines():
        if found := re.search(r" ([A-Za-z]) (_Z\S+)$", line):
            symbols["U" if found[1] == "U" else "T"].add(found[2])
    missing = sorted(name for name in symbols["U"] - symbols["T"] if re.match(r"_ZNK?7fastmax", name) and "shared" not in name)
    stubs = folder / "stubs.s"
    lines = [f".globl {name}\n{name}: jmp emulator_not_compiled@PLT" for name in missing]
    stubs.write_text("\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""]))
    out = folder / "libemulator.so"
    subprocess.run(["c++", "-shared", "-o", out, *objects, stubs, "-lpthread", "-Wl,-z,defs", "-Wl,-Bsymbolic"], check=True)
    return out


class Library:
    def __init__(self, path: Path):
        self._library = ctypes.CDLL(str(path))
        self._library.emulator_run.restype = ctypes.c_char_p
        self._library.emulator_kernels.restype = ctypes.c_char_p
        self._library.emulator_kept_bytes.restype = ctypes.c_int64

    def _give(self, tensors: dict[str, torch.Tensor | None], numbers: dict[str, float]) -> None:
        self._library.emulator_begin()
        for name, x in tensors.items():
            if x is None:
                continue
            assert x.device.type == "cpu", name
            sizes, strides = ((ctypes.c_int64 * x.dim())(*values) for values in (x.shape, x.stride()))
            self._library.emulator_tensor(name.encode(), ctypes.c_void_p(x.data_ptr()), x.dim(), sizes, strides)
        numbers = {"math": DTYPES[tensors["q"].dtype]} | numbers
        for name, x in numbers.items():
            self._library.emulator_number(name.encode(), ctypes.c_double(x))

    def run(self, algorithm: str, direction: str, tensors: dict[str, torch.Tensor | None], **numbers: float) -> str:
        """Runs the kernels that cover the call, and returns their name."""
        self._give(tensors, numbers)
        error = self._library.emulator_run(algorithm.encode(), int(direction == "backward")).decode()
        if error:
            raise EmulatorError(error)
        return self._library.emulator_kernels().decode()

    def kept_bytes(self, algorithm: str, direction: str, tensors: dict[str, torch.Tensor | None], **numbers: float) -> int:
        self._give(tensors, numbers)
        return self._library.emulator_kept_bytes(algorithm.encode(), int(direction == "backward"))
