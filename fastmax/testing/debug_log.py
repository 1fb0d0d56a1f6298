"""`kernels_taken`: the names of the CUDA kernels that ran, from the lines that the library prints to stderr in debug mode."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from fastmax.ops import extension

# Matches the calls of attention operators in the output of FASTMAX_DEBUG, and not those that prepare their inputs.
ATTENTION_CALL = re.compile(r"^fastmax::(\w+): [\w ]+, (\w+): b \d.*, head_dim_qk ", re.MULTILINE)


@contextmanager
def kernels_taken() -> Iterator[set[str]]:
    """Yields a set that at the end holds the kernels of the calls inside, such as "backward: quadratic_sm90".

    The library prints them to stderr, which is redirected to a file meanwhile. All other output to stderr follows at the end.
    """
    taken: set[str] = set()
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(file.fileno(), 2)
        extension.set_debugging(True)
        try:
            yield taken
        finally:
            extension.set_debugging(False)
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            printed = file.read()
            taken |= {": ".join(call) for call in ATTENTION_CALL.findall(printed)}
            sys.stderr.writelines(line for line in printed.splitlines(keepends=True) if not line.startswith("fastmax:"))
