"""Code that `torch.compile` keeps on disk is not used by another version of the operators."""

import os
import subprocess
import sys

import pytest
import torch

import fastmax
from fastmax.ops import extension

TAG = f"fastmax-ops-{extension.SCHEMA_VERSION}"
# Prints the code found in the cache and not found, of a compiled call in a process whose operators have a version.
COMPILED_CALL = """
import sys
from fastmax.ops import compile_cache, extension
from torch.compiler import config
assert config.cache_key_tag == f"mine,fastmax-ops-{extension.SCHEMA_VERSION}", config.cache_key_tag
config.cache_key_tag = "mine"
compile_cache.SCHEMA_VERSION = int(sys.argv[1])
compile_cache.add_tag()
import torch, fastmax
from torch._dynamo.utils import counters
x = torch.randn(1, 1, 8, 4)
torch.compile(fastmax.flash_attention)(x, x, x)
print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


def test_the_tag_is_added_once():
    config = torch.compiler.config
    assert config.cache_key_tag.split(",").count(TAG) == 1
    before = config.cache_key_tag
    fastmax.ops.compile_cache.add_tag()
    assert config.cache_key_tag == before


@pytest.mark.parametrize("second, found", [(1, True), (2, False)])
def test_only_the_same_version_finds_compiled_code(second, found, tmp_path):
    environment = os.environ | {"TORCH_COMPILE_CACHE_KEY_TAG": "mine", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    counts = []
    for version in (1, second):
        command = [sys.executable, "-c", COMPILED_CALL, str(version)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        counts.append(tuple(map(int, result.stdout.split())))
    assert counts == [(0, 1), (1, 0) if found else (0, 1)]
