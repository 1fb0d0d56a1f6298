"""The host code of `csrc/linear/order2/launch.cpp` that saves states and continues from saved ones.

saved_passes.cpp runs it with kernels whose states are single numbers."""

import subprocess
from pathlib import Path

from common import compile_probe


def test_one_call_and_one_with_saved_states():
    """One call and a call that continues from the saved states give equal results."""
    probe = compile_probe(Path(__file__).with_name("saved_passes.cpp").read_text())
    result = subprocess.run([probe], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == "0 differences\n"
