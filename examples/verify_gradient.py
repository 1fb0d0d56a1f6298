"""Is the custom gradient right for my configuration? Compare it, and autograd, with the definition in float64.

    python examples/verify_gradient.py --tokens 1000 --head-dim 64 --heads 8 --kv-heads 2 --dtype bfloat16
    python examples/verify_gradient.py --p 1 --normalize token --temperature 2 --no-causal

Prints one row per tensor, writes it to OUT/verify_gradient.csv, and exits with status 1 when an error is larger than
allowed: twice the error of the plain PyTorch formula in the same dtype, plus a rounding floor. The definition builds the whole
matrix of weights, so memory grows with tokens * keys. `python -m fastmax.testing.verify` runs a table of configurations.
"""

import argparse
import csv
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from fastmax.testing import verify


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--keys", type=int, help="default: as many as tokens")
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--value-dim", type=int, help="default: head-dim")
    parser.add_argument("--dtype", choices=("float64", "float32", "float16", "bfloat16"), default="float32")
    parser.add_argument("--p", type=int, choices=(1, 2), default=2)
    parser.add_argument("--a0", type=float, default=1.0)
    parser.add_argument("--a1", type=float, default=1.0)
    parser.add_argument("--a2", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, help="default: the square root of head-dim")
    parser.add_argument("--causal", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--normalize", choices=("none", "token", "sequence"), default="none")
    parser.add_argument("--lim", type=float, default=1.0)
    parser.add_argument("--algorithm", choices=("auto", "quadratic", "linear"), default="auto")
    parser.add_argument("--dropout", type=float, default=0.0, help="with a fixed noise tensor")
    parser.add_argument("--padding", action="store_true", help="hide some keys, and in the first sequence all of them")
    parser.add_argument("--rpe", action="store_true", help="with a random rpe_matrix")
    parser.add_argument("--draws", type=int, default=3, help="how many random inputs; the worst error of each tensor is shown")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    options = {name: getattr(args, name) for name in ("p", "a0", "a1", "a2", "causal", "lim", "algorithm", "dropout")}
    options["temperature"] = args.temperature or args.head_dim**0.5
    options["normalize"] = False if args.normalize == "none" else args.normalize
    case = verify.Case(
        "yours",
        options,
        batch=args.batch,
        heads=args.heads,
        kv_heads=args.kv_heads or args.heads,
        queries=args.tokens,
        keys=args.keys or args.tokens,
        head_dim=args.head_dim,
        value_dim=args.value_dim or args.head_dim,
        dtype=getattr(torch, args.dtype),
        padding=args.padding,
        noise=args.dropout > 0.0,
        rpe=args.rpe,
    )

    draws = []
    for seed in tqdm(range(args.seed, args.seed + args.draws), desc="verify", unit="draw"):
        draws.append(verify.measure(verify.random_tensors(case, args.device, seed), options))
    worst = [
        max(rows, key=lambda row: (not row.passed, max(row.custom, row.autograd) / row.allowed))
        for rows in zip(*draws, strict=True)
    ]

    print(f"{'tensor':<18}{'custom':>12}{'autograd':>12}{'allowed':>12}")
    for row in worst:
        name = "o" if row.tensor == "o" else f"grad of {row.tensor}"
        print(f"{name:<18}{row.custom:>12.2e}{row.autograd:>12.2e}{row.allowed:>12.2e}{'' if row.passed else '  FAILED'}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "verify_gradient.csv"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*worst[0]._fields, "passed"])
        writer.writerows([*row, row.passed] for row in worst)
    print(f"wrote {path}")
    return 0 if all(row.passed for rows in draws for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
