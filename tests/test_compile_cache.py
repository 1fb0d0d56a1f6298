"""Code that `torch.compile` keeps on disk is not used by another version of the operators."""

import os
import subprocess
import sys

import torch

import fastmax
from fastmax.ops import extension

TAG = f"fastmax-ops-{extension.SCHEMA_VERSION}"
# For each version of the operators, prints the code of a compiled call that the cache has and that it lacks.
COMPILED_CALLS = """
import sys
from fastmax.ops import compile_cache, extension
from torch.compiler import config
assert config.cache_key_tag == f"mine,fastmax-ops-{extension.SCHEMA_VERSION}", config.cache_key_tag
import torch, fastmax
from torch._dynamo.utils import counters
x = torch.randn(1, 1, 8, 4)
for version in sys.argv[1:]:
    torch._dynamo.reset()
    counters.clear()
    config.cache_key_tag = "mine"
    compile_cache.SCHEMA_VERSION = int(version)
    compile_cache.add_tag()
    torch.compile(fastmax.flash_attention)(x, x, x)
    print(counters["aot_autograd"]["autograd_cache_hit"], counters["aot_autograd"]["autograd_cache_miss"])
"""


def test_the_tag_is_added_once():
    config = torch.compiler.config
    assert config.cache_key_tag.split(",").count(TAG) == 1
    before = config.cache_key_tag
    fastmax.ops.compile_cache.add_tag()
    assert config.cache_key_tag == before


def test_only_the_same_version_finds_compiled_code(tmp_path):
    environment = os.environ | {"TORCH_COMPILE_CACHE_KEY_TAG": "mine", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILED_CALLS, "1", "1", "2"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert [tuple(map(int, line.split())) for line in result.stdout.splitlines()] == [(0, 1), (1, 0), (0, 1)]
