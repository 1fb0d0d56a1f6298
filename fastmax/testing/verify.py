"""`python -m fastmax.testing.verify [--device cuda]` compares the custom gradient and autograd with the definition in float64.

It prints a table of the relative errors (Frobenius norm) of the output and of every gradient. The exit status is 1 if an error
is above its limit: twice the error of the definition in plain PyTorch at the same precision, plus a rounding floor.

`--random N` checks N random configurations in place of the table, and prints the worst error of each kind. On a GPU each
configuration runs twice on memory full of NaN and must give the same bits. `--hopper` changes the configurations to ones that
the Hopper kernels cover, fails if other kernels run, and prints the kernels. `--processes P` shares the work among P processes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch

from fastmax.ops import extension
from fastmax.testing.checks import check_random
from fastmax.testing.configurations import Case, cases
from fastmax.testing.errors import measure
from fastmax.testing.evaluation import NUMBERS_PER_KEY, advice_ignored
from fastmax.testing.random_configurations import hopper_indices
from fastmax.testing.tensors import random_tensors


def run_table(chosen: Sequence[Case], seed: int, device: str) -> int:
    """Checks configurations, prints a table with a row for each; returns the number of failures."""
    print(f"relative error against float64 on {device}; 'of allowed' is the worst of the row, 100% is the limit")
    print(f"{'':<38}{'custom gradient':^36} {'autograd':^36}")
    columns = "".join(f"{name:>9}" for name in ("o", "grad_q", "grad_k", "grad_v"))
    print(f"{'configuration':<38}{columns} {columns} {'of allowed':>11}")
    failed = 0
    for case in chosen:
        with advice_ignored():
            rows = measure(random_tensors(case, device, seed), case.options, softmax=case.softmax)
        passed = all(row.passed for row in rows)
        failed += not passed
        shown = [row for row in rows if row.tensor not in ("lse", "rpe_matrix", *NUMBERS_PER_KEY)]
        numbers = " ".join("".join(f"{getattr(row, which):>9.1e}" for row in shown) for which in ("custom", "autograd"))
        share = max(max(row.custom, row.autograd) / row.allowed for row in rows)
        print(f"{case.name:<38}{numbers} {share:>11.0%}{'' if passed else '  FAILED'}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} configurations within the limit")
    return failed


def run_random(indices: Sequence[int], seed: int, device: str, hopper: bool = False, processes: int = 1) -> int:
    """Checks configurations, prints each failure and a table at the end; returns the number of failures."""
    worst: dict[tuple[str, str, str], tuple[float, int]] = {}
    kernels: Counter[str] = Counter()
    failed = 0
    one = partial(check_random, seed=seed, device=device, hopper=hopper)
    for index, (case, outcome, taken) in zip(indices, outcomes(one, indices, processes), strict=True):
        kernels.update(taken)
        if outcome.wrong:
            failed += 1
            print(f"FAILED {case}", *outcome.wrong, sep="\n    ")
            again = f"--device {device} --seed {seed} --only-index {index}{' --hopper' if hopper else ''}"
            print(f"    repeat it: python -m fastmax.testing.verify {again}", flush=True)
        key = (case.mode, *case.operator)
        if key not in worst or outcome.share > worst[key][0]:
            worst[key] = (outcome.share, index)
    print(f"{'':<22}{'worst of allowed':>18}{'index':>8}")
    for (mode, algorithm, p), (share, index) in sorted(worst.items()):
        print(f"{mode:<9}{algorithm:<10}{p:<3}{share:>18.0%}{index:>8}")
    for name, count in sorted(kernels.items()):
        print(f"{name:<40}{count:>8} configurations")
    print(f"{len(indices) - failed} of {len(indices)} random configurations within the limit (seed {seed}, {device})")
    return failed


def outcomes(check_index: Callable, indices: Sequence[int], processes: int) -> Iterator:
    """Yields `check_index` of each index, in order."""
    if processes == 1:
        yield from map(check_index, indices)
        return
    threads = max(1, torch.get_num_threads() // processes)
    context = multiprocessing.get_context("spawn")  # CUDA does not work after a fork
    with ProcessPoolExecutor(processes, context, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        yield from pool.map(check_index, indices)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command with its arguments, by default those of the process; returns its exit status.

    Raises SystemExit with status 2 if the arguments are wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fastmax.testing.verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="run only the configurations of the table whose name contains this")
    parser.add_argument("--random", type=int, metavar="N", help="check N random configurations instead of the table")
    parser.add_argument("--only-index", type=int, metavar="I", help="check only random configuration number I")
    parser.add_argument("--hopper", action="store_true", help="random configurations that the Hopper kernels must run")
    parser.add_argument(
        "--processes", type=int, default=1, metavar="P", help="processes that share the random configurations (default 1)"
    )
    args = parser.parse_args(arguments)
    if args.processes < 1:
        parser.error(f"--processes must be at least 1, got {args.processes}")
    is_random = args.random is not None or args.only_index is not None
    if not is_random and (args.hopper or args.processes > 1):
        parser.error(f"{'--hopper' if args.hopper else '--processes'} is for random configurations: --random or --only-index")
    if args.random is not None and args.random < 1:
        parser.error(f"--random must be at least 1, got {args.random}")
    if is_random:
        device = torch.device(args.device)
        reason = extension.problem(device) if device.type == "cuda" else None
        if args.hopper and (device.type != "cuda" or reason is not None):
            parser.error(f"--hopper must have the CUDA kernels: {reason or f'--device is {args.device}'}")
        if reason is not None:
            print(f"the CUDA kernels do not run, PyTorch operations are checked: {reason}")
        if args.only_index is not None:
            indices: Sequence[int] = [args.only_index]
        else:
            indices = hopper_indices(args.random, args.seed, device) if args.hopper else range(args.random)
        return 1 if run_random(indices, args.seed, args.device, args.hopper, args.processes) else 0
    chosen = [case for case in cases() if args.only in case.name]
    if not chosen:
        parser.error(f"no configuration is called {args.only!r}")
    return 1 if run_table(chosen, args.seed, args.device) else 0


if __name__ == "__main__":
    sys.exit(main())
