# ruff: noqa: E501
"""Which pass of the backward of order 1 differs between repeats: `python p1_where.py [seconds] [processes] [deterministic]`, on a GPU,
with a library whose linear1_sm90_covers says yes to gradients. `processes` of these share the device; each checks one row at both head
dims, as the suite did, and after every call reads e, 1 / z and the prefixes out of the workspace, which is free but not yet written.

A line says, for a call whose gradients have other bits than the first call's:
  o z q k v           which tensors differ, and whether the first call's copy still is what it was (`kept changed`: someone wrote to it)
  e, 1/z, e pads      the walk of grad_q, or the memset
  state, sum w, sum y by segment: sums and scan (their vector sum y is sum e y)
  none of these       the pair walk, or a write to its result
  again               how many of three further calls agree with the first one, and how many with the odd one
"""

import os
import sys
import time
from collections import Counter

import torch
import torch.multiprocessing as mp

import fastmax  # noqa: F401
from fastmax import verify

B, H, HK, N = 3, 12, 3, 1025
SCORE = (0.02, 1.0, 1.0, 0.5, 1, True, 0.0, "linear", False)
NAMES = ("o", "z", "q", "k", "v")


def workspace(d):
    """Bytes of the backward's workspace, of e and 1 / z in it, and parts (132 multiprocessors): launch.cpp."""
    floats = B * H * ((N + 127) // 128 * 128)
    state = d * d + 2 * d + 4
    parts = 4  # segments of 256 rows, but the last
    return 8 * floats + 4 * B * HK * parts * state, floats, parts, state


class Calls:
    def __init__(self, d, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        self.d = d
        self.q, self.k, self.v, self.g = (
            torch.randn(B, x, N, d, device="cuda", generator=generator).bfloat16() for x in (H, HK, HK, H)
        )
        self.read = Counter()

    def __call__(self, poison=True):
        x = self.q, self.k, self.v
        if poison:
            verify.poison_free_memory(self.q.device)
        o, z = torch.ops.fastmax.forward(*x, None, *(None,) * 5, *SCORE)
        if poison:
            verify.poison_free_memory(self.q.device)
        grads = torch.ops.fastmax.backward(self.g, None, *x, o, z, None, *(None,) * 5, *SCORE)[:3]
        inner = self.inside(z, o)
        tensors = dict(zip(NAMES, (o, z, *grads), strict=True))
        return tensors, {name: y.clone() for name, y in tensors.items()}, inner

    def inside(self, z, o):
        count, floats, parts, state = workspace(self.d)
        filled, torch.utils.deterministic.fill_uninitialized_memory = torch.utils.deterministic.fill_uninitialized_memory, False
        # The block that was freed last is often, not always, the one of just this size that comes first.
        held = []
        try:
            for _ in range(8):
                w = torch.empty(count, dtype=torch.uint8, device="cuda")
                held.append(w)
                both = w[: 8 * floats].view(torch.float32).view(2, B, H, floats // (B * H))
                inverse = both[1, ..., -N:]
                if torch.equal(inverse, 1.0 / z) or (inverse - 1.0 / z).abs().max() < 1e-3 * (1.0 / z).abs().max():
                    break
            else:
                self.read["not found"] += 1
                return {}
            self.read["found"] += 1
            prefixes = w[8 * floats :].view(torch.float32).view(B * HK, parts, state)
            dd = self.d * self.d
            parts_of = {
                "e": both[0, ..., -N:], "1/z": inverse, "e pads": both[..., :-N], "state": prefixes[..., :dd],
                "sum w": prefixes[..., dd : dd + self.d], "sum y": prefixes[..., dd + self.d : dd + 2 * self.d],
            }  # fmt: skip
            return {name: y.clone() for name, y in parts_of.items()}
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled


def same(x, y):
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def where(x, y):
    bits = torch.int16 if x.element_size() == 2 else torch.int32
    at = (x.view(bits) != y.view(bits)).nonzero()
    spans = ", ".join(f"{c.unique().numel()} in [{c.min().item()}, {c.max().item()}]" for c in at.T)
    change = (x.double() - y.double()).abs().max().item()
    return f"{len(at)} numbers ({spans}), at most {change:.2e} of {y.double().abs().max().item():.2e}"


def work(index, seconds, deterministic):
    if deterministic:  # as tests/conftest.py
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = True
    end, count = time.time() + seconds, Counter()
    ballast = None
    while time.time() < end:
        for d in (64, 128):
            calls = Calls(d, 1234)
            # What the definition in float64 leaves behind: gigabytes to poison, so that calls wait behind long fills.
            ballast = [torch.empty(B, H, N, N, dtype=torch.float64, device="cuda") for _ in range(6)]
            del ballast
            kept, copies, inner = calls()
            for i in range(6):
                again, again_copies, again_inner = calls(poison=i % 3 != 2)
                count[d] += 1
                changed = [name for name in NAMES if not same(kept[name], copies[name])]
                wrong = [name for name in NAMES if not same(again_copies[name], copies[name])]
                late = [name for name in NAMES if not same(again[name], again_copies[name])]
                if not (changed or wrong or late):
                    continue
                count[f"{d} differs"] += 1
                lines = [f"process {index}, head dim {d}, call {i}: {wrong}; kept changed: {changed}; changed since: {late}"]
                lines += [f"    {name}: {where(again_copies[name], copies[name])}" for name in wrong]
                if inner and again_inner:
                    odd = [name for name in inner if not same(inner[name], again_inner[name])]
                    lines.append(f"    inside: {odd or 'the same'}")
                    lines += [f"    {name}: {where(again_inner[name], inner[name])}" for name in odd]
                votes = Counter()
                for _ in range(3):
                    third = calls()[1]
                    votes["first"] += all(same(third[name], copies[name]) for name in NAMES)
                    votes["odd"] += all(same(third[name], again_copies[name]) for name in NAMES)
                lines.append(f"    again: {dict(votes)}")
                print("\n".join(lines), flush=True)
            torch.cuda.empty_cache()
    read = calls.read
    print(f"process {index}: {dict(count)}, workspace {dict(read)}", flush=True)


if __name__ == "__main__":
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10.0
    processes = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    deterministic = len(sys.argv) <= 3 or sys.argv[3] != "0"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    context = mp.get_context("spawn")
    all_of_them = [context.Process(target=work, args=(i, seconds, deterministic)) for i in range(processes)]
    for process in all_of_them:
        process.start()
    for process in all_of_them:
        process.join()
