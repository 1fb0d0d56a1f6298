"""Small libraries of order 1's Hopper kernels, for trials/p1_variants.py: which of these make the walks faster.

    python trials/p1_variants/build.py FOLDER [names]      # needs nvcc; about 20 s each; writes FOLDER/NAME.bin
    python trials/p1_variants/build.py --apply NAME        # that variant into csrc/linear/order1: walk_sm90.cu, launch_sm90.cpp

walk.cu and launch.cpp are those two files with what a variant has in `#if TRIAL_...`:

    columns        sums of y and w, and denominators, by FMA in place of mma.sync, which shares the tensor core with wgmma
    scores_first   also: scores and weights before the state is waited for: a copy of it is held for its products alone
    x_thread       also: a thread of its own loads x, so that a full ring of x does not hold up y and w
    sums2          also: two blocks of sums a multiprocessor, of half the stages each

Of these results are wrong; they say where the time goes (all without the column sums):

    no_columns     base, without the sums of columns
    no_state       also without the state's products
    loads          also without those of results: what the rings, the copy engine and the stores take
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "csrc"
SWITCHES = ("COLUMNS", "SCORES_FIRST", "X_THREAD", "SUMS2", "NO_COLUMNS", "NO_STATE", "NO_RESULTS")
VARIANTS = {
    "base": (),
    "columns": SWITCHES[:1],
    "scores_first": SWITCHES[:2],
    "x_thread": SWITCHES[:3],
    "sums2": SWITCHES[:4],
    "no_columns": SWITCHES[4:5],
    "no_state": SWITCHES[4:6],
    "loads": SWITCHES[4:7],
}
TARGETS = {"walk.cu": "walk_sm90.cu", "launch.cpp": "launch_sm90.cpp"}


def defines(name):
    return [f"-DTRIAL_{switch}={int(switch in VARIANTS[name])}" for switch in SWITCHES]


def resolved(text, on):
    """Without `#if`s on switches and without trial_group."""
    out, kept = [], []  # kept: per open #if, whether this branch is, whether one was, and whether it is a switch's
    for line in text.splitlines(keepends=True):
        word = line.split()[0] if line.split() else ""
        if word in ("#if", "#ifdef", "#ifndef", "#elif"):
            found = re.search(r"(!?)TRIAL_(\w+)", line)
            value = found is not None and (found[2] in on) != (found[1] == "!")
            if word != "#elif":
                kept.append([value, value, True] if found else [True, True, False])
                if found:
                    continue
            elif kept[-1][2]:
                kept[-1][:2] = [value and not kept[-1][1], value or kept[-1][1]]
                continue
        elif word == "#else" and kept[-1][2]:
            kept[-1][0] = not kept[-1][1]
            continue
        elif word == "#endif" and kept.pop()[2]:
            continue
        if all(branch for branch, _, _ in kept):
            out.append(line)
    text = "".join(out)
    for switch in SWITCHES[4:]:
        text = text.replace(f"!TRIAL_{switch} && (!of_y || kWalk != Walk::kGradQ)", "!of_y || kWalk != Walk::kGradQ")
        text = text.replace(f"if (!TRIAL_{switch}) ", "")
    text = text.replace("(TRIAL_SUMS2 ? 2 : 1) * p.sm_count", "2 * p.sm_count" if "SUMS2" in on else "p.sm_count")
    text = text.replace("trial_group != 0 ? trial_group : ", "")
    return re.sub(r"\n// Of the trial.*?int trial_group = 0;\n", "", text, flags=re.DOTALL)


def run(command):
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stderr}")
    return result.stderr + result.stdout


def nvcc(source, out, *options):
    flags = ["-std=c++17", "-O1", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v", f"-I{SOURCE}"]
    archs = ["-DFASTMAX_HAS_SM90", '-DFASTMAX_ARCHS="90"', "-gencode=arch=compute_90a,code=sm_90a"]
    return run(["nvcc", *flags, *archs, *options, "-c", source, "-o", out])


def stubs(objects, out):
    """What the portable kernels have, which no call here comes to."""
    listing = run(["nm", *objects])
    symbols = set(re.findall(r" ([A-Za-z]) (_ZNK?7fastmax\S+)$", listing, re.MULTILINE))
    missing = {name for kind, name in symbols if kind == "U"} - {name for kind, name in symbols if kind != "U"}
    lines = [
        f'extern "C" void missing_{i}() asm("{name}"); void missing_{i}() {{ __builtin_trap(); }}'
        for i, name in enumerate(sorted(missing))
    ]
    out.with_suffix(".cpp").write_text("\n".join([*lines, ""]))
    run(["c++", "-fPIC", "-c", out.with_suffix(".cpp"), "-o", out])
    return out


def build(folder, names):
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        common = []
        for file in (
            *("core/launch.cu", "core/device.cu", "core/driver.cpp", "core/sm90/tensor_map.cpp"),
            *("linear/order1/launch.cpp", "linear/order1/sums_sm80.cu"),
        ):
            common.append(work / f"common_{file.replace('/', '_')}.o")
            nvcc(SOURCE / file, common[-1], "-DFASTMAX_MATH=Bf16")
        common.append(work / "variant.o")
        nvcc(HERE / "variant.cu", common[-1])
        for name in names:
            own = [work / f"{name}_walk.o", work / f"{name}_launch.o"]
            log = nvcc(HERE / "walk.cu", own[0], *defines(name))
            nvcc(HERE / "launch.cpp", own[1], *defines(name))
            objects = [*own, *common]
            objects.append(stubs(objects, work / f"{name}_stubs.o"))
            run(["c++", "-shared", "-o", folder / f"{name}.bin", *objects, *LIBRARIES])
            spills = re.findall(r"entry function '\S*?linear1_(\w+)'.*?(\d+) bytes spill stores", log, re.DOTALL)
            spills = [f"{kernel[:48]} {spilled}" for kernel, spilled in spills if spilled != "0"]
            print(name, "bytes spilled:", spills, "SERIALISED" if re.search(r"\(C75\d\d\)", log) else "", flush=True)


LIBRARIES = ["-L/usr/local/cuda/lib64", "-lcudart", "-s"]

if __name__ == "__main__":
    if sys.argv[1] == "--apply":
        for trial, target in TARGETS.items():
            text = resolved((HERE / trial).read_text(), VARIANTS[sys.argv[2]])
            (SOURCE / "linear/order1" / target).write_text(text)
    else:
        build(Path(sys.argv[1]), sys.argv[2:] or list(VARIANTS))
