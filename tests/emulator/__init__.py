"""The Hopper kernels on the CPU: their sources as they are, compiled as C++ over a multiprocessor made of fibers (machine.h).

    library = build(folder)                       # every `sm90/*.cu` of csrc/, and the host code that launches them
    kernels = library.run("quadratic", "forward", {"q": q, "k": k, "v": v, "o": o, "z": z}, causal=1, schedule=3)
    library.run("split_heads", "forward", {"x": x, "out_q": q, "out_k": k, "out_v": v}, heads=4, kv_heads=2, head_dim=64)

headers/ stands in for those headers of csrc/ that have PTX in them, a function for a function, and prefix.h for CUDA's C++.
Nothing else is replaced: tables of kernels, workspaces, tensor maps, launches and what a kernel is made of are the library's.

Tensors are those of AttentionParams, FwdParams and BwdParams (csrc/core/params.h), of SplitHeadsParams and JoinHeadsParams
(csrc/layer/layer.h), of RotaryParams (csrc/layer/rotary.h), of ChoiceParams, GatherParams, GatherBackwardParams and
KeptStepParams (csrc/kept/kept.h), of MergeParams, MergePartsParams and MergePartsBackwardParams (csrc/merge/merge.h), and
of BufferedParams (csrc/decode/buffered.h) by name, on the CPU; results are written into those given. Numbers: scale, a0,
a1, a2, order, causal, left, right, dropout, math (MathMode), kernels_head_dim (by default one that holds all columns),
sm_count (blocks of a persistent grid), resident (blocks that run side by side; the others follow) and schedule: 0
everything in order and at once; 1 and 2 the first or the last warp that can run, and all copies and products late; from 3
on at random.
Of the layer: heads, kv_heads, head_dim, q_eps, k_eps, eps, half, base, and float_convolution, float_norm and
wide_positions, which say that weights are float32 and positions int64. Of kept keys: kept, window, block and tokens. Of
kept keys and merged parts: aligned.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from common import CSRC, is_current, load_build

HERE = Path(__file__).resolve().parent
# Portable kernels that the Hopper ones are launched with, and those of the layer.
PORTABLE = (
    "core/rows.cu",
    "decay/decay.cu",
    "decay/nan_rows.cu",
    "decode/buffered.cu",
    "kept/choice.cu",
    "kept/gather.cu",
    "kept/step.cu",
    "merge/merge.cu",
    "quadratic/bounds.cu",
    "linear/prepare.cu",
    "linear/tile_inputs.cu",
    "linear/order1/portable/sums.cu",
    "linear/order2/portable/add_state.cu",
    "linear/order2/portable/part_state.cu",
    "linear/order2/portable/part_state_io.cu",
    "linear/order2/portable/segments.cu",
    "layer/split_heads.cu",
    "layer/join_heads.cu",
    "layer/column_sums.cu",
    "layer/rotary.cu",
)
HOST = (
    "core/value_blocks.cpp",
    "core/sm90/tensor_map.cpp",
    "quadratic/algorithm.cpp",
    "linear/algorithm.cpp",
    "linear/order*/**/launch.cpp",
    "layer/*.cpp",
)
# Compiler options for the emulator's own sources, which take most of the time of a run. The second option lets the compiler
# inline functions of a shared library.
OWN = ("-O3", "-fno-semantic-interposition")
MATH_MODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 3}


class EmulatorError(RuntimeError):
    """What is wrong with a kernel: a deadlock, say, and who waits for what."""


def build(folder: Path, pattern: str = "", csrc: Path = CSRC, jobs: int = 2) -> Library:
    """Compiles the kernels into folder, and again what changed since.

    pattern: a regular expression that the object name of a Hopper kernel must match (`object_name` in csrc/build.py, such as
    quadratic/sm90/fwd.softmax.dense.o); other kernels are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [unit for path in sorted(csrc.rglob("sm90/*.cu")) for unit in units(path, csrc) if re.search(pattern, unit.name)]
    others = [csrc / name for name in PORTABLE] + [path for name in HOST for path in sorted(csrc.glob(name))]
    made_of = kernels + [unit for path in others if path.exists() for unit in units(path, csrc)]
    prefix = precompile_prefix(folder)
    with ThreadPoolExecutor(jobs) as pool:
        own = pool.map(
            lambda source: compile_source(source, folder / f"{source.stem}.o", csrc, HERE / "prefix.h", *OWN),
            sorted(HERE.glob("*.cpp")),
        )
        objects = pool.map(lambda unit: compile_source(unit.source, folder / unit.file, csrc, prefix, *unit.defines), made_of)
        made = dict(zip(made_of, objects, strict=True))
        return Library(folder, csrc, made, [*own], prefix)


def edited(library: Library, folder: Path, pattern: str, path: str, edits: dict[str, str]) -> Library:
    """The library with another text of a file in csrc/, for kernels whose object name matches: to see that faults are found."""
    text = (library.csrc / path).read_text()
    for old, new in edits.items():
        assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
        text = text.replace(old, new)
    changed = folder / "csrc" / path
    changed.parent.mkdir(parents=True)
    changed.write_text(text)
    made = {}
    for unit in library.made:
        if re.search(pattern, unit.name):
            source = changed if unit.source == library.csrc / path else unit.source
            options = ("-I", library.csrc, *unit.defines)
            made[unit] = compile_source(source, folder / unit.file, folder / "csrc", library.prefix, *options)
    # These first: of an inline function that several objects have, the linker takes the first.
    made |= {unit: out for unit, out in library.made.items() if unit not in made}
    return Library(folder, library.csrc, made, library.own, library.prefix)


class Unit(NamedTuple):
    """A source, or one of its shards, and the name of its object in csrc/build.py."""

    source: Path
    name: str
    defines: tuple[str, ...]

    @property
    def file(self) -> str:
        return self.name.replace("/", "_")


def units(source: Path, csrc: Path) -> list[Unit]:
    """The shards of a source, those of bf16 alone."""
    build = load_build()
    build.SOURCE_DIR = csrc
    shards = [shard for shard in build.shards(source) if shard.get("FASTMAX_MATH", "Bf16") == "Bf16"]
    return [
        Unit(source, build.object_name(source, shard), tuple(f"-D{macro}={value}" for macro, value in shard.items()))
        for shard in shards
    ]


def precompile_prefix(folder: Path) -> Path:
    """Returns a header that is prefix.h, which the compiler parses once for all sources with the same options."""
    header = folder / "prefix.h"
    out = header.with_suffix(".h.gch")
    if not is_current(out, Path(__file__)):
        header.write_text(f'#include "{HERE / "prefix.h"}"\n')
        command = [*compiler(), "-x", "c++-header", header, "-MF", out.with_suffix(".d"), "-o", out]
        subprocess.run(list(map(str, command)), check=True)
    return header


def compile_source(source: Path, out: Path, csrc: Path, prefix: Path, *more: str | Path) -> Path:
    precompiled = prefix.with_suffix(".h.gch")  # has a dependency file of its own
    if not is_current(out, Path(__file__), *([precompiled] if precompiled.exists() else [])):
        command = [*compiler(), "-include", prefix, "-c", "-x", "c++", source, "-o", out, "-I", csrc, *more]
        subprocess.run(list(map(str, command)), check=True)
    return out


def compiler() -> list[str]:
    return [
        *("c++", "-std=c++20", "-O1", "-fPIC", "-w", "-Wno-psabi", "-MD", "-DFASTMAX_HAS_SM90"),
        # Shared memory is thread-local here, and extern in the kernels: without constructors.
        *("-fno-extern-tls-init", "-fno-gnu-unique"),
        *("-I", str(HERE / "headers"), "-I", str(HERE), "-isystem", str(load_build().cuda_home() / "include")),
    ]


def link(folder: Path, objects: list[Path]) -> Path:
    """What is not compiled, such as the portable kernels that the tables name, says so when it is called."""
    listing = subprocess.run(["nm", *objects], capture_output=True, text=True, check=True).stdout
    symbols = set(re.findall(r" ([A-Za-z]) (_ZNK?7fastmax\S+)$", listing, re.MULTILINE))
    missing = {name for kind, name in symbols if kind == "U"} - {name for kind, name in symbols if kind != "U"}
    functions = [
        f'extern "C" void missing_{i}() asm("{name}"); void missing_{i}() {{ emulator_not_compiled("{name}"); }}'
        for i, name in enumerate(sorted(name for name in missing if "shared" not in name))
    ]
    stubs, out = folder / "stubs.cpp", folder / "libemulator.so"
    stubs.write_text("\n".join(['extern "C" void emulator_not_compiled(const char* symbol);', *functions, ""]))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", out, *objects, stubs, "-lpthread", "-Wl,-z,defs,-Bsymbolic"], check=True)
    return out


class Library:
    def __init__(self, folder: Path, csrc: Path, made: dict[Unit, Path], own: list[Path], prefix: Path):
        self.csrc, self.made, self.own, self.prefix = csrc, made, own, prefix
        self._library = ctypes.CDLL(str(link(folder, [*made.values(), *own])))
        for name in ("run", "kernels"):
            getattr(self._library, f"emulator_{name}").restype = ctypes.c_char_p
        self._library.emulator_saved_bytes.restype = ctypes.c_int64

    def run(self, algorithm: str, direction: str, tensors: dict[str, torch.Tensor | None], **numbers: float) -> str:
        """Runs the kernels that cover the call, and returns their name."""
        self._give(tensors, numbers)
        error = self._library.emulator_run(algorithm.encode(), int(direction == "backward")).decode()
        if error:
            raise EmulatorError(error)
        return self._library.emulator_kernels().decode()

    def saved_bytes(self, algorithm: str, direction: str, tensors: dict[str, torch.Tensor | None], **numbers: float) -> int:
        """Returns the bytes of the argument `saved` of a call (csrc/core/algorithm.h)."""
        self._give(tensors, numbers)
        return self._library.emulator_saved_bytes(algorithm.encode(), int(direction == "backward"))

    def _give(self, tensors: dict[str, torch.Tensor | None], numbers: dict[str, float]) -> None:
        self._library.emulator_begin()
        for name, x in tensors.items():
            if x is None:
                continue
            assert x.device.type == "cpu", name
            sizes, strides = ((ctypes.c_int64 * x.dim())(*values) for values in (x.shape, x.stride()))
            self._library.emulator_tensor(name.encode(), ctypes.c_void_p(x.data_ptr()), x.dim(), sizes, strides)
        names = "q", "x", "o", "k", "grad_keys", "first"
        dtype = next((tensors[name].dtype for name in names if name in tensors), torch.bfloat16)
        for name, x in {"math": MATH_MODES[dtype], **numbers}.items():
            self._library.emulator_number(name.encode(), ctypes.c_double(x))
