"""Builds libfastmax.so with nvcc and ninja. It needs neither a GPU nor a CUDA build of PyTorch.

    python csrc/build.py [--archs 80,86,90] [--out DIR] [--jobs N] [--compress size|speed] [--fail-on-spills] [--trap-deadlocks]

Every source below this folder is compiled. A folder `sm90` (or any other number) is compiled for sm_90a only. Builds without 90
leave it out; builds with 90 define FASTMAX_HAS_SM90, which adds rows for its kernels to the tables of algorithms. All other
sources are compiled for every architecture. A source with a line `// shards: ...` is compiled once per combination of the
macros in that line, in smaller compiler processes that run in parallel. Includes are relative to this folder.
"""

import argparse
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

# Code for 80 also runs on 8.6, 8.7 and 8.9. The library has PTX of the first too, for newer devices that are not in the list.
DEFAULT_ARCHS = (80, 90, 100, 120)
MATH_MODES = ("Bf16", "Fp16", "Tf32", "Fp32")
# Values of a macro for which a line `// shards: ...` lists none.
SHARD_VALUES = {"FASTMAX_MATH": MATH_MODES}
# Compression of the kernels in the library, which are decompressed at their first launch. "speed" makes the library four times
# as large and saves a fourteenth of the compilation time.
COMPRESSIONS = ("size", "speed")
TORCH_TARGET_VERSION = "0x020b000000000000"  # 2.11, the oldest supported libtorch
SOURCE_DIR = Path(__file__).resolve().parent
# The compiler's front end takes a third of the time. Its result is the same for all architectures, so it runs for the oldest
# one only. The exceptions are these sources: a folder that uses __CUDA_ARCH__ (linear/tile_config.h), and the kernel that tells
# whether a device can load all others.
FRONT_ENDS = {SOURCE_DIR / "linear/order1": (80, 90), SOURCE_DIR / "core/device.cu": (80, 90)}

# Kernels that may spill registers: pattern of lines like "sm_90 void fastmax::linear_kernel<fastmax::Bf16, 64>(...)"; why.
SPILL_EXCEPTIONS = {
    r"<fastmax::.*Fp32, (64|96|128|256)(, true|, false)*>": "true fp32 holds every operand twice (hi and lo)",
    r"linear_grad_kernel<fastmax::Fp32, 32(, true, false)?>": "the same, up to 28 bytes",
    r"quadratic_bwd_kv_kernel<fastmax::.*(Bf16, 64|Fp16, (64|96))>": "two sums and two resident operands take 192 of 255 "
    "registers; up to 52 bytes (with tables and decays 164), read once per stage, and fewer rows per warp measured slower "
    "(H200: 10%)",
    r"quadratic_bwd_kv_pair_kernel<fastmax::.*(Bf16|Fp16), (128|256)>": "an accumulator and a resident operand take 192 of 255 "
    "registers; fewer rows per warp would read each streamed token twice. bf16 on sm_90: up to 36 bytes, with tables and "
    "decays 180",
    r"quadratic_fwd_kernel<fastmax::.*((Bf16|Fp16|Tf32), (128|256))>": "Q and the sums take 192 to 220 of 255 registers. bf16 "
    "on sm_90: none",
    r"sm_90 .*quadratic_fwd_kernel<fastmax::SoftmaxScore, fastmax::DenseVisibility, fastmax::Bf16, 32>": "two words per stage "
    "of 128 keys, so that four blocks share a multiprocessor; H200: 2% faster than without spills",
    r"quadratic_fwd_kernel<fastmax::.*TableVisibility, fastmax::Bf16, (32|64)>": "a few words once per tile, so that three or "
    "four blocks share a multiprocessor",
    r"quadratic_bwd_q_kernel<fastmax::.*TableVisibility, fastmax::(Bf16|Fp16), (32|64)>": "up to 104 bytes of decays; loops "
    "without decays read two words of it per slab",
    r"quadratic_bwd_kv_kernel<fastmax::.*TableVisibility, fastmax::Bf16, (32|96)>": "up to 56 bytes of decays, likewise",
    r"quadratic_bwd_q_pair_kernel<fastmax::.*TableVisibility, fastmax::(Fp16|Tf32), 256>": "a few words: bounds and decays "
    "beside what fills the registers",
    r"quadratic_bwd_kv_pair_kernel<fastmax::.*TableVisibility, fastmax::Tf32, 256>": "likewise, up to 64 bytes of them",
    r"sm_(8\d|120) .*linear_grad_kernel<fastmax::Bf16, (128|256), false, false>": "up to 20 bytes once per row block; "
    "none on sm_90",
    r"linear_grad_kernel<fastmax::(Bf16, (32|64|96|128|256)|Tf32, 96), true, false>": "decays beside what fills the "
    "registers; bf16 on sm_90: up to 28 bytes, at head_dim 256 68",
    r"sm_120 .*linear_grad_kernel<fastmax::Tf32, 64, true, false>": "likewise, 32 bytes; none elsewhere",
    r"linear_read_kernel<fastmax::Bf16, 128, true, false>|sm_8\d .*linear_read_kernel<fastmax::Tf32, 256, true, false>": "two "
    "to five words beside what fills the registers, read once per block",
    r"linear_read_sm90_kernel<128, false, .*DecayKind\)2, false, false>": "a word once per 256 rows",
    r"linear_read_sm90_kernel<128, false, .*, false, true>": "of an exact window up to four dozen words, most of them once per "
    "256 rows; with decays some hundred, in tiles with local keys, beside sums and scores, and more where these have gates",
    r"linear_read_sm90_kernel<128, true, .*, false, true>": "of an exact window up to four words",
    r"linear_grad_sm90_kernel<64, .*Grads\)0, .*DecayKind\)0, true>": "of an exact window a word once per two stars",
    r"linear_grad_sm90_kernel<32, .*Grads\)2, .*DecayKind\)3, true>": "of an exact window two words of decays",
    r"linear_grad_sm90_kernel<128, .*DecayKind\)[123], true>": "of an exact window up to 30 words, once per work tile",
    r"linear_grad_sm90_kernel<64, .*DecayKind\)[123], (true|false)>": "up to eight words of decays beside what fills the "
    "registers; most once per work tile, one or two once per two stars",
    r"linear_state_sm90_kernel<128, .*Rows\)3, false>": "three words, once per chunk",
    r"decay_gradient_kernel\(": "up to ten words of the scan over a tile, once per tile",
    r"linear_state_kernel<fastmax::Bf16, 128>": "a word: the factor of the sums at the next chunk, read once per chunk",
    r"sm_8\d .*linear_state_kernel<fastmax::Bf16, 256>": "up to 40 bytes, most of them once per stage; none on sm_90",
    r"quadratic_fwd_sm90_kernel<fastmax::SoftmaxScore, fastmax::(Dense|Window|Table)Visibility, .*, 64>": "two or three words "
    "once per tile, so that three warpgroups share a multiprocessor",
    r"quadratic_fwd_sm90_kernel<fastmax::PolynomialScore, fastmax::TableVisibility, fastmax::Bf16, 128>": "a word once per "
    "tile, likewise",
    r"quadratic_fwd_sm90_kernel<fastmax::ExactWindowScore, fastmax::TableVisibility, fastmax::Bf16, 128>": "four words, in "
    "tiles with local keys",
    r"quadratic_fwd_sm90_kernel<fastmax::ExactWindowScore, fastmax::DecayVisibility, ": "a few words once "
    "per work tile; at head_dim 128 some four dozen, most of them in tiles with local keys",
    r"quadratic_fwd_sm90_kernel<fastmax::.*DecayVisibility, fastmax::(Bf16|Fp16), \d+>": "up to eight words of decays, "
    "once per work tile",
    r"quadratic_bwd_sm90_kernel<fastmax::.*(Decay|Table)Visibility, fastmax::Bf16, \d+, false>": "a word, or up to eight "
    "of decays, likewise",
    r"quadratic_bwd_sm90_kernel<fastmax::.*, (64|128), true>": "up to five words of the thread that fills the ring, which "
    "gives its registers to the others, once per work tile; at head_dim 64 up to three dozen words of the "
    "others, with tables and for softmax: a few of them once per tile, the rest once per head; of Fastmax with decays at "
    "head_dim 128 up to four dozen, ten of them once per tile; of an exact window there two dozen",
    r"quadratic_fused_bwd_sm90_kernel<fastmax::.*Score, ": "up to 18 words of the threads that fill the "
    "ring and add parts of grad_q, which give their registers to the others",
    r"linear1_walk_sm90_kernel<128, [^,]*0, ": "a few words once per tile: what noise needs, beside sums and scores",
    r"linear1_walk_sm90_kernel<128, [^,]*[12], true, true, ": "up to nine words once per tile: addresses of rows "
    "that are shortened",
    r"linear1_walk_kernel<fastmax::Bf16, 96>": "a word once per step, so that two blocks share a multiprocessor",
    r"quadratic_bwd_sm90_kernel<fastmax::.*, (32|96), true>": "up to 18 words, once per work tile; most are of the thread that "
    "fills the ring; of Fastmax with decays at head_dim 96 seven of the others, most once per head",
    r"linear_state_kernel<fastmax::Tf32, 256>": "resident sums of 128 registers; a word on sm_90",
    r"sm_120 .*linear_part_scan_kernel<fastmax::Tf32, 96, false>": "a word once per eight parts",
    r"sm_120 .*buffered_kernel<float4, 8>": "two words once per 32 rows of a state",
    r"sm_8\d .*linear_decay_tiles_kernel\(": "a word once per row",
    r"sm_1\d\d .*split_heads_backward_kernel<__\w+, 4, false, 4,": "a word or two, at most twice per "
    "four tokens; none on sm_80 and sm_90",
    r"sm_120 .*split_heads_kernel<__\w+, 4, false>": "a word, beside tokens and weights in registers; none on sm_80 and sm_90",
}


class BuildError(RuntimeError):
    """The library cannot be built; the message is one sentence that says why."""


def cuda_home() -> Path:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            if not (Path(home) / "bin/nvcc").exists():
                raise BuildError(f"{variable} is {home}, and there is no bin/nvcc in it")
            return Path(home)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise BuildError("nvcc was not found: install the CUDA toolkit or set CUDA_HOME")
    listing = subprocess.run([nvcc, "--dryrun", "-c", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.*)$", listing, re.MULTILINE)
    return Path(top.group(1).strip()).resolve() if top else Path(nvcc).resolve().parent.parent


def torch_home() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("PyTorch was not found: the build needs its headers")
    return Path(spec.submodule_search_locations[0])


def missing() -> str | None:
    """Returns what the build lacks, as a sentence; None if it lacks nothing."""
    if sys.platform != "linux":
        return f"the kernels are built on Linux only, not on {sys.platform}"
    try:
        cuda_home()
        torch_home()
        ninja_program()
        requested_archs()
    except BuildError as error:
        return str(error)
    return None


def ninja_program() -> str:
    beside_python = Path(sys.executable).with_name("ninja")  # a virtual environment that is not on PATH
    ninja = shutil.which("ninja") or (str(beside_python) if beside_python.exists() else None)
    if ninja is None:
        raise BuildError("ninja was not found: pip install ninja")
    return ninja


def requested_archs() -> tuple[int, ...]:
    """Returns the architectures of FASTMAX_CUDA_ARCHS ("80,90", or "native": this machine's GPUs); by default, all."""
    return parse_archs(os.environ.get("FASTMAX_CUDA_ARCHS", ""))


def parse_archs(text: str) -> tuple[int, ...]:
    """Returns (80, 86, 90) for "80,86 90", this machine's architectures for "native", and the default for an empty text."""
    if text == "native":
        return native_archs()
    parts = [part for part in re.split(r"[ ,;]+", text) if part]
    for part in parts:
        if not part.isdigit() or int(part) < min(DEFAULT_ARCHS):
            raise BuildError(f"architectures must be numbers from {min(DEFAULT_ARCHS)} on, such as 80,90, got {part!r}")
    return tuple(sorted({int(part) for part in parts})) or DEFAULT_ARCHS


def native_archs() -> tuple[int, ...]:
    import torch

    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    archs = sorted(10 * major + minor for major, minor in found if major >= 8)
    if not archs:
        raise BuildError(
            "FASTMAX_CUDA_ARCHS is native, and PyTorch sees no CUDA device of compute capability 8.0 or newer here"
        )
    return tuple(archs)


def own_arch(source: Path) -> int | None:
    """Returns 90 for a source in a folder sm90, which is compiled for 9.0 only; None for a source for every architecture."""
    folder = re.fullmatch(r"sm(\d+)", source.parent.name)
    return int(folder[1]) if folder else None


def virtual_arch(source: Path, arch: int) -> int:
    """Returns the architecture for which the front end runs when code for `arch` is generated."""
    of_folders = [archs for folder, archs in FRONT_ENDS.items() if source.is_relative_to(folder)]
    return max(candidate for candidate in (min(DEFAULT_ARCHS), *sum(of_folders, ())) if candidate <= arch)


def arch_flags(source: Path, archs: tuple[int, ...]) -> list[str]:
    own = own_arch(source)
    if own is not None:
        return [f"-gencode=arch=compute_{own}a,code=sm_{own}a"]
    flags = [f"-gencode=arch=compute_{virtual_arch(source, arch)},code=sm_{arch}" for arch in archs]
    oldest = virtual_arch(source, archs[0])
    return [*flags, f"-gencode=arch=compute_{oldest},code=compute_{oldest}"]


def sources(suffix: str, archs: tuple[int, ...]) -> list[Path]:
    """Returns the sources with this suffix that a build for archs compiles."""
    return [path for path in sorted(SOURCE_DIR.rglob(f"*{suffix}")) if own_arch(path) in (None, *archs)]


def shards(source: Path) -> list[dict[str, str]]:
    """Returns the macros and their values for each compilation of a source; `[{}]` for a source without shards.

    A line `// shards: FASTMAX_SCORE=PolynomialScore,SoftmaxScore FASTMAX_MATH` gives every combination of these scores and all
    arithmetic modes. Several lines add their combinations.
    """
    found = []
    for line in re.findall(r"^// shards: (.+)$", source.read_text(), re.MULTILINE):
        macros = [macro.partition("=")[::2] for macro in line.split()]
        values = [listed.split(",") if listed else SHARD_VALUES[name] for name, listed in macros]
        found += [dict(zip((name for name, _ in macros), chosen, strict=True)) for chosen in itertools.product(*values)]
    return found or [{}]


def object_name(source: Path, shard: dict[str, str] | None = None) -> str:
    """Returns the object's name: quadratic/portable/fwd.cu -> quadratic/portable/fwd.softmax.table.bf16.o."""
    stem = source.relative_to(SOURCE_DIR).with_suffix("")
    values = [re.sub("(Score|Visibility)$", "", value).lower() for value in (shard or {}).values()]
    return ".".join([str(stem), *values, "o"])


def ninja_file(archs: tuple[int, ...], trap_deadlocks: bool = False, compress: str = COMPRESSIONS[0]) -> str:
    cuda, torch = cuda_home(), torch_home()
    cuda_lib = next(
        (d for d in (cuda / "lib64", cuda / "lib", cuda / "targets/x86_64-linux/lib") if (d / "libcudart_static.a").exists()),
        None,
    )
    if cuda_lib is None:
        raise BuildError(f"libcudart_static.a was not found under {cuda}")
    nvcc = cuda / "bin/nvcc"
    defines = f"-DFASTMAX_ARCHS='\"{' '.join(map(str, archs))}\"'"
    for arch in sorted({own_arch(source) for source in sources(".c*", archs)} - {None}):
        defines += f" -DFASTMAX_HAS_SM{arch}"
    if trap_deadlocks:
        defines += " -DFASTMAX_TRAP_DEADLOCKS"
    lines = [
        # -O1 applies to host code, which only launches. Kernels are always optimised.
        f"nvcc_flags = -std=c++17 -O1 -Xcompiler -fPIC,-fvisibility=hidden --compress-mode={compress} "
        f"-I{SOURCE_DIR} -Xptxas -v {defines}",
        f"cxx_flags = -std=c++20 -O2 -fPIC -fvisibility=hidden -DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION} "
        f"{defines} -I{SOURCE_DIR} -I{torch / 'include'} -isystem {cuda / 'include'}",
        "",
        "rule nvcc",
        f"  command = {nvcc} $nvcc_flags $extra -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || (cat $out.log; false)",
        "  description = nvcc $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "rule cxx",
        "  command = c++ $cxx_flags -MD -MF $out.d -c $in -o $out",
        "  description = c++ $out",
        "  depfile = $out.d",
        "  deps = gcc",
        # libtorch_cuda.so may be missing on this machine. Linking needs only its name and the one symbol used from it.
        "rule stub",
        "  command = echo 'int aoti_torch_get_current_cuda_stream(int i, void** s) { return 1; }' | "
        "cc -shared -fPIC -Wl,-soname,libtorch_cuda.so -x c - -o $out",
        "rule link",
        f"  command = c++ -shared -o $out $in -Wl,--no-as-needed -L{torch / 'lib'} -ltorch_cpu -Wl,--as-needed "
        f"-L{cuda_lib} -lcudart_static -ldl -lpthread -lrt -Wl,--exclude-libs,ALL -Wl,-z,defs",
        "  description = link $out",
        "",
        "build stub/libtorch_cuda.so: stub",
    ]
    objects = []
    for source in sources(".cu", archs):
        flags = arch_flags(source, archs)
        for shard in shards(source):
            name = object_name(source, shard)
            extra = flags + [f"-D{macro}={value}" for macro, value in shard.items()]
            lines += [f"build {name}: nvcc {source}", f"  extra = {' '.join(extra)}"]
            objects.append(name)
    for source in sources(".cpp", archs):
        lines.append(f"build {object_name(source)}: cxx {source}")
        objects.append(object_name(source))
    lines += [f"build libfastmax.so: link {' '.join(objects)} stub/libtorch_cuda.so", "default libfastmax.so", ""]
    return "\n".join(lines)


def build(
    out: Path,
    archs: tuple[int, ...] = DEFAULT_ARCHS,
    jobs: int | None = None,
    trap_deadlocks: bool = False,
    compress: str = COMPRESSIONS[0],
) -> Path:
    """Compiles the library for archs into out. Returns its path."""
    ninja = ninja_program()
    (out / "stub").mkdir(parents=True, exist_ok=True)
    (out / "build.ninja").write_text(ninja_file(archs, trap_deadlocks, compress))
    command = [ninja, "-C", str(out)] + (["-j", str(jobs)] if jobs else [])
    if subprocess.run(command).returncode != 0:
        raise BuildError(f"the compilation failed: see above, or run {' '.join(command)}")
    return out / "libfastmax.so"


def spills(out: Path) -> list[str]:
    """Returns a line per kernel and architecture that spills registers without an exception, from the reports in out."""
    found = []
    for log in sorted(out.rglob("*.o.log")):
        kernel = "?"
        for line in log.read_text().splitlines():
            if entry := re.search(r"Compiling entry function '(\S+)' for '(\S+)'", line):
                kernel = f"{entry[2]} {entry[1]}"
            count = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
            if count and int(count[1]) + int(count[2]) > 0:
                found.append(f"{kernel}: {count[1]} bytes stored, {count[2]} loaded")
    if found and (filt := shutil.which("c++filt")):
        found = subprocess.run([filt], input="\n".join(found), capture_output=True, text=True).stdout.splitlines()
    return [line for line in found if not any(re.search(pattern, line) for pattern in SPILL_EXCEPTIONS)]


def serialised(out: Path) -> list[str]:
    """Returns the compiler's warnings that it serialises wgmma or ignores setmaxnreg, from the reports in out."""
    complaint = re.compile(r"\(C75(?:0[6-9]|1\d)\)|setmaxnreg.*ignored")
    return [
        f"{log.relative_to(out)}: {line.strip()}"
        for log in sorted(out.rglob("*.o.log"))
        for line in log.read_text().splitlines()
        if complaint.search(line)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", default=os.environ.get("FASTMAX_CUDA_ARCHS", ""), help="80,90; default: all")
    parser.add_argument("--out", type=Path, default=SOURCE_DIR.parent / "build")
    parser.add_argument("--jobs", type=int)
    parser.add_argument(
        "--compress", choices=COMPRESSIONS, default=COMPRESSIONS[0], help="kernels, for a small library or a fast build"
    )
    parser.add_argument("--fail-on-spills", action="store_true", help="also where the compiler serialises wgmma")
    parser.add_argument("--trap-deadlocks", action="store_true", help="sm_90 kernels that would hang end in an error")
    args = parser.parse_args()
    try:
        library = build(args.out.resolve(), parse_archs(args.archs), args.jobs, args.trap_deadlocks, args.compress)
    except BuildError as error:
        print(f"fastmax: {error}", file=sys.stderr)
        return 1
    spilled = spills(args.out.resolve())
    for line in spilled:
        print(f"register spill: {line}", file=sys.stderr)
    complaints = serialised(args.out.resolve())
    for line in complaints:
        print(line, file=sys.stderr)
    print(f"{library}: {library.stat().st_size / 2**20:.1f} MiB")
    return 1 if (spilled or complaints) and args.fail_on_spills else 0


if __name__ == "__main__":
    sys.exit(main())
