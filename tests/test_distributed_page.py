"""The Python blocks of docs/distributed.md run on two ranks, and a context parallel layer matches one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

COMPARE_WITH_ONE_PROCESS = """
grads = [parameter.grad for parameter in layer.parameters()]
dist.all_reduce(loss := loss.detach())
layer.context = None
layer.zero_grad()
whole = layer(x).square().sum() / x.numel()
whole.backward()
torch.testing.assert_close([loss, *grads], [whole.detach(), *(parameter.grad for parameter in layer.parameters())])
"""


def test_code_of_the_page_runs(tmp_path):
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    functions, layers, context_manager, heads, dtensors = (block.replace('"cuda"', '"cpu"') for block in blocks)
    script = [functions, layers, COMPARE_WITH_ONE_PROCESS, context_manager, "assert x.shape[1] == 1024\n", heads, dtensors]
    script += ["assert o.placements == (Shard(1),)\n", "dist.destroy_process_group()\n"]
    path = tmp_path / "script.py"
    path.write_text("\n".join(script), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(path)], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
