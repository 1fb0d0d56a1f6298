"""Are the kernels that trials/l32_time.py times right? Against float64, on memory full of NaN, twice for the same bits. On an
H200, from the repository's root, under 60 s:

    python trials/l32_check.py

Every row of head dim 32 of tests/test_sm90_linear.py: odd sizes, GQA, n != m, masks, noise, decays, packed sequences, carried
and kept states, segments, phases. They ran on the CPU alone so far, in the emulator (trials/hlin_emulated.py, NARROW); what
that cannot show is a hang of waits, so this has a time limit: a build with --trap-deadlocks says where. Joined windows:
trials/window_check.py; more: tests/test_sm90_linear.py as a whole, and `python -m fastmax.verify --hopper --random 300`.
"""

import subprocess
import sys

# "-32" and "32-": a parameter among others
NAMES = ["at_head_dim_32", "d32", "-32", "32-", "(phases and 32)", "(carried and 32)"]
ROWS = " or ".join([*NAMES, "narrower", "what_is_not_covered", "bitwise", "every_kernel"])
pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "6", "-p", "no:cacheprovider", "tests/test_sm90_linear.py"]
sys.exit(subprocess.run([*pytest, "-k", ROWS], timeout=120).returncode)
