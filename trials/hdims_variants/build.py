"""Small libraries of the quadratic Hopper kernels with other tiles, for trials/hdims_time.py: which tiles win at head dims 32,
64, 96, 128.

    python trials/hdims_variants/build.py [names]    # needs nvcc; seconds each; writes trials/hdims_variants/*.bin

Each variant is a copy of csrc/ in which lines of a Tile struct are others (replaced as text: a line that has changed
meanwhile is named in
an assertion), and variant.cu compiled against it. None of them has run on a GPU yet. Decisions that hang on them:

    base           as the library: forward 3 consumers x 160 registers, 128 keys; grad_k/grad_v 2 x 240, 64 queries; grad_q 3
                   x 160, 64 keys
    fk64, f4k64    forward over 64 keys, three or four consumers (predicted: no gain, a tile's fixed 45 instructions count
                   twice)
    fturns         forward whose consumers take turns as softmax's do (predicted: within 3% of base)
    bq128, bq128r  grad_q 2 x 240 over 128 keys, operands in shared memory or in registers (predicted: bq128r within 5% of
                   base)
    bq3s           grad_q with X and Y in shared memory (predicted slower: all of its bandwidth)
    bkvX           grad_k/grad_v with X alone in registers (predicted slower, likewise)
    bkv3np         grad_k/grad_v with 3 x 160 and no product of the next tile in flight: the other warpgroups fill the tensor
                   core
                   (predicted: the one variant that may win, up to 10% of that kernel)
    bkv3s32        grad_k/grad_v 3 x 160 over 32 queries (predicted slower if wgmma of 32 columns runs below its rate)
    bnoslope       grad_q with the weight's two products for its derivative: 203 in place of 171 issue slots for 64 x 64
    slope64, slope128  against base64, base128: that saving at head dims 64 and 128 too; if it gains, kDerivativeAlone =
                       !kOwnsKeys
    base96, pipe96 head dim 96 natively; pipe96 keeps products of the next tile in flight in grad_k/grad_v, at 72 bytes of
    spills;
                   base128 runs at d = 96 beside them: if native gains less than 10%, instances for 96 are not worth their
                   compilation
"""

import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "csrc"
FORWARD, BACKWARD = "quadratic/fwd_sm90.h", "quadratic/bwd_sm90.h"

FORWARD_CONSUMERS = """\
  static constexpr int kConsumers = kHeadDim <= 64 && !kFades<Visibility> ? 3 : 2;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
"""
BACKWARD_CONSUMERS = """\
  static constexpr int kConsumers = kNarrow && !kOwnsKeys ? 3 : 2;
  static constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : 240;
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : 24;
"""
KEYS = "static constexpr int kKeys = KeptWords::kKeysPerBlock;"
TURNS = "static constexpr bool kTakesTurns = Score::kFollowsRowMax;"
STREAM = "static constexpr int kStream = !kOwnsKeys && kHeadDim <= 64 && !kNarrow && !kFades<Visibility> ? 128 : 64;"
X = "static constexpr bool kXInRegisters = kStream == 64 && !(kOwnsKeys && kHeadDim > 64) && !kFades<Visibility>;"
Y = "static constexpr bool kYInRegisters = kXInRegisters && (!kOwnsKeys || kHeadDim <= 32);"
PIPELINED = "static constexpr bool kPipelined = !(kOwnsKeys && kHeadDim > 64);"
ALONE = "static constexpr bool kDerivativeAlone = kNarrow && !kOwnsKeys;"
STAGES = "static constexpr int kStages = kNarrow || (kOwnsKeys && kHeadDim <= 64) ? 6 : 4;"
TWO, THREE, FOUR = (2, 240, 24), (3, 160, 32), (4, 112, 32)
NAMES = "kConsumers", "kConsumerRegisters", "kProducerRegisters"


def of_forward(values):
    lines = (f"  static constexpr int {name} = {value};\n" for name, value in zip(NAMES, values, strict=True))
    return FORWARD, FORWARD_CONSUMERS, "".join(lines)


def of_backward(queries, keys):
    lines = (
        f"  static constexpr int {name} = kOwnsKeys ? {k} : {q};\n" for name, q, k in zip(NAMES, queries, keys, strict=True)
    )
    return BACKWARD, BACKWARD_CONSUMERS, "".join(lines)


def constant(file, line, value):
    return file, line, line.split(" = ")[0] + f" = {value};"


ALONE_EVERYWHERE = constant(BACKWARD, ALONE, "!kOwnsKeys")
VARIANTS = {
    "base": [],
    "fk64": [constant(FORWARD, KEYS, "64")],
    "f4k64": [constant(FORWARD, KEYS, "64"), of_forward(FOUR)],
    "fturns": [constant(FORWARD, TURNS, "true")],
    "bq128": [of_backward(TWO, TWO), constant(BACKWARD, STREAM, "kOwnsKeys ? 64 : 128")],
    "bq128r": [of_backward(TWO, TWO), constant(BACKWARD, STREAM, "kOwnsKeys ? 64 : 128"), constant(BACKWARD, X, "true")],
    "bq3s": [constant(BACKWARD, X, "kOwnsKeys")],
    "bkvX": [constant(BACKWARD, Y, "kXInRegisters && !kOwnsKeys")],
    "bkv3np": [of_backward(THREE, THREE), constant(BACKWARD, PIPELINED, "!kOwnsKeys")],
    "bkv3s32": [
        of_backward(THREE, THREE),
        constant(BACKWARD, STREAM, "kOwnsKeys ? 32 : 64"),
        constant(BACKWARD, X, "true"),
        constant(BACKWARD, STAGES, "kOwnsKeys ? 10 : 6"),
    ],
    "bnoslope": [constant(BACKWARD, ALONE, "false")],
    "base64": [],
    "slope64": [ALONE_EVERYWHERE],
    "base96": [],
    "pipe96": [constant(BACKWARD, PIPELINED, "true")],
    "base128": [],
    "slope128": [ALONE_EVERYWHERE],
}


def head_dim(name):
    found = re.fullmatch(r"(?:base|slope|pipe)(\d+)", name)
    return int(found[1]) if found else 32


def run(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{result.stderr}")
    return result.stderr + result.stdout


def nvcc(root, source, result, *options):
    flags = ["-std=c++17", "-O1", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas", "-v", f"-I{root}"]
    defines = ["-DFASTMAX_HAS_SM90", '-DFASTMAX_ARCHS="90"', "-gencode=arch=compute_90a,code=sm_90a"]
    return run(["nvcc", *flags, *defines, *options, "-c", source, "-o", result])


def build(name, work, common):
    root = work / name
    shutil.copytree(SOURCE, root)
    dims = root / "quadratic/quadratic_sm90.h"
    dims.write_text(
        re.sub(
            r"using QuadraticSm90HeadDims = .*", f"using QuadraticSm90HeadDims = HeadDims<{head_dim(name)}>;", dims.read_text()
        )
    )
    for file, line, other in VARIANTS[name]:
        text = (root / file).read_text()
        assert text.count(line) == 1, f"{name}: {file} has no line {line!r}"
        (root / file).write_text(text.replace(line, other))
    log = nvcc(root, HERE / "variant.cu", work / f"{name}.o", f"-DHD={head_dim(name)}")
    run(["c++", "-shared", "-o", HERE / f"{name}.bin", work / f"{name}.o", *common, "-lcudart", "-s", *LIBRARIES])
    spills = re.findall(r"(quadratic_\w+?_sm90_kernel)\S*' for.*?(\d+) bytes spill stores", log, re.DOTALL)
    return name, spills, re.findall(r"\(C75\d\d\)", log)


def main():
    names = sys.argv[1:] or list(VARIANTS)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        common = []
        for file in (
            "core/launch.cu",
            "core/device.cu",
            "quadratic/kept_keys_sm90.cu",
            "quadratic/bounds_sm80.cu",
            "decay/decay_sm80.cu",
        ):
            common.append(work / f"{Path(file).name}.o")
            nvcc(SOURCE, SOURCE / file, common[-1])
        for file in ("core/driver.cpp", "core/sm90/tensor_map.cpp"):
            common.append(work / f"{Path(file).name}.o")
            nvcc(SOURCE, SOURCE / file, common[-1])
        with ThreadPoolExecutor(2) as pool:
            for name, spills, serialised in pool.map(lambda name: build(name, work, common), names):
                print(name, "bytes spilled:", spills, "SERIALISED" if serialised else "", flush=True)


LIBRARIES = [f"-L{Path(shutil.which('nvcc') or '').resolve().parents[1] / 'lib64'}", "-L/usr/local/cuda/lib64"]

if __name__ == "__main__":
    main()
