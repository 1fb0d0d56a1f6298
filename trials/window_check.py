"""What has to pass on a Hopper GPU before the joined exact window and flash_window_sm90 count as right: runs the tests of both.

    python trials/window_check.py

They compare, in float64 or bit by bit, far_forward_ and far_backward_ with the calls and sums that they replace
(tests/test_far_in_place.py: odd sizes, masks, decays, packed sequences, views, head dims 64 and 128; gradients must have the
same bits, since the copy engine's sum of two bf16 numbers is rounded once, as PyTorch's is), windows of softmax
(tests/test_flash_window_kernels.py, test_sm90.py), and the exact window as a whole. If only the bits of gradients differ, the
reduction of the copy engine rounds otherwise than assumed: compare with a tolerance of one rounding, and say so in
docs/cuda.md.
"""

import subprocess
import sys

TESTS = (
    ("tests/test_far_in_place.py", "tests/test_merge_in_place.py"),
    ("tests/test_exact_window.py", "tests/test_flash_window_kernels.py", "-m", "cuda"),
    ("tests/test_sm90.py", "-k", "window or covered or warpgroups"),
    ("tests/test_bindings.py", "tests/test_extension.py", "tests/test_decode_window.py"),
)

if __name__ == "__main__":
    failed = [
        tests
        for tests in TESTS
        if subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]).returncode
    ]
    print("failed:" if failed else "all passed", *failed)
    sys.exit(bool(failed))
