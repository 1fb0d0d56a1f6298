"""Are the kernels that trials/hlin_time.py times right? The suite for them, with and without the trial's lag, then random
configurations, all against float64, on memory full of NaN, twice for the same bits. On an H200, from the repository's root:

    python trials/hlin_check.py

What was never run on a GPU before: products of the state kernel in two groups (every row of tests/test_sm90_linear.py), states
in eight blocks (rows named FINE, `finely`, carried states `finely shared`), gradients at head dim 128 (all rows of 128). New
waits can hang: everything has a time limit; a build with --trap-deadlocks says where.
"""

import os
import subprocess
import sys

PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "6", "-p", "no:cacheprovider"]
for lag in ("0", "1000", "4000"):
    limited = [*PYTEST, "tests/test_sm90_linear.py"] + ([] if lag == "0" else ["-k", "float64"])
    print(f"FASTMAX_TRIAL_LAG={lag}", flush=True)
    subprocess.run(limited, env=os.environ | {"FASTMAX_TRIAL_LAG": lag}, timeout=600, check=True)
verify = [sys.executable, "-m", "fastmax.verify", "--hopper", "--random", "300", "--processes", "6"]
subprocess.run(verify, timeout=900, check=True)
