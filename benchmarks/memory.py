"""Peak extra memory of one forward + backward on the CPU: `python -m benchmarks.memory`.

The extra is the process's peak resident memory over what it held just before the call, with q, k, v and the output's gradient
in place; o and the gradients of q, k and v belong to the extra. "times" divides it by the bytes of q, k, v, o and their
gradients, eight tensors.
"""

from __future__ import annotations

import argparse
import resource

import torch

from benchmarks.run import environment
from fastmax import fastmax_attention


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--p", type=int, default=2)
    parser.add_argument("--no-custom-gradient", action="store_true")
    options = parser.parse_args()

    def attend(tokens: int) -> int:
        """Bytes held just before the call."""
        shape = (1, options.heads, tokens, options.head_dim)
        q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
        grad = torch.randn(shape)
        before = resident_bytes()
        custom = not options.no_custom_gradient
        o = fastmax_attention(q, k, v, causal=True, p=options.p, algorithm="linear", use_custom_gradient=custom)
        torch.autograd.grad(o, (q, k, v), grad)
        return before

    attend(128)  # loads the libraries' code and thread pools
    before = attend(options.tokens)
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    tensors = 8 * 4 * options.heads * options.tokens * options.head_dim
    print(", ".join(f"{key}: {value}" for key, value in environment().items()))
    print(
        f"p={options.p} fp32 (1,{options.heads},{options.tokens},{options.head_dim}), "
        f"custom gradient {not options.no_custom_gradient}: extra {extra / 2**20:.0f} MiB = {extra / tensors:.2f} times "
        f"q, k, v, o and their gradients ({tensors / 2**20:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
