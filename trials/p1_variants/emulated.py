"""The variants of order 1 (build.py) in the emulator, against float64: `python trials/p1_variants/emulated.py NAME...`; with
groups of one and of two blocks.
"""

import ctypes
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "tests")]
import build  # -DTRIAL_EMULATED: the emulator counts registers as of a block alone on its multiprocessor
import emulator
import p1_emulated

base = p1_emulated.lib
CASES = [
    dict(n=64, m=64, d=64),
    dict(n=300, m=333, d=64),
    dict(n=900, m=900, d=64),
    dict(n=129, m=700, d=64, h=4, hk=2),
    dict(n=300, m=300, d=40, dv=24, expanded=True),
    dict(n=64, m=64, d=128),
    dict(n=300, m=333, d=128, noise=True),
    dict(n=700, m=700, d=128),
    dict(n=257, m=400, d=128, h=4, hk=2),
    dict(n=200, m=200, d=72, dv=104, expanded=True),
    dict(n=520, m=520, d=128, h=2, hk=2),
]
for name in sys.argv[1:]:
    folder = Path(tempfile.gettempdir()) / f"p1_variants_{name}"
    folder.mkdir(exist_ok=True)
    made = dict(base.made)
    for trial, target in build.TARGETS.items():
        out = folder / f"{Path(target).stem}.o"
        made[base.csrc / "linear/order1" / target] = emulator.compile_source(
            HERE / trial, out, base.csrc, "-O1", "-DTRIAL_EMULATED", *build.defines(name)
        )
    p1_emulated.lib = emulator.Library(folder, base.csrc, made, base.own)
    group = ctypes.c_int.in_dll(p1_emulated.lib._library, "trial_group")
    for schedule in (0, 1, 2, 3):
        for i, args in enumerate(CASES):
            # Blocks of a group; two and more segments where sm is above heads times that.
            for group.value, sm in ((1, 1), (2, 8), (1, 8)):
                if (i + schedule) % 3 and sm == 1:
                    continue
                print(name, group.value, end=" ")
                try:
                    p1_emulated.case(**dict(b=1, h=1, hk=1, schedule=schedule, gz=True, sm=sm, resident=sm) | args)
                except emulator.EmulatorError as error:
                    print("ERROR", args, str(error)[:800], flush=True)
