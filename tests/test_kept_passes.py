"""What `csrc/linear/order2/launch.cpp` does between a call and its kernels, where states are kept: on the host, by kernels of
numbers (kept_passes.cpp), a call in one go and one that continues with what was kept come to the same."""

import subprocess
from pathlib import Path

from common import compile_probe


def test_one_call_and_one_with_kept_states():
    probe = compile_probe(Path(__file__).with_name("kept_passes.cpp").read_text())
    result = subprocess.run([probe], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == "0 differences\n"
