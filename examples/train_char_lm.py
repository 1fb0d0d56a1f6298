"""Train a small byte-level GPT with Fastmax attention on the sources of Python's standard library, which every machine has.

    python examples/train_char_lm.py                        # FastmaxSelfAttention; 2.5 minutes on two CPU cores
    python examples/train_char_lm.py --attention softmax    # the same layer and initial weights with softmax attention
    python examples/train_char_lm.py --no-parts             # no decay, window, convolution, output norm or gate
    python examples/train_char_lm.py --data my_text.txt
    python examples/train_char_lm.py --compare              # Fastmax and softmax, with parts and without, on one figure

A run writes OUT/char_lm_NAME.csv, .png (losses by step) and .pt (checkpoint); --compare writes OUT/char_lm.csv and .png.
"""

import argparse
import csv
import sysconfig
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from model import GPT, PLAIN, GPTConfig
from options import count, count_or_none, positive
from text import Batch, load_bytes, random_windows, split
from torch import Tensor
from tqdm import tqdm
from training import Recipe, Trainer

# Options of the runs of --compare.
RUNS = {
    "fastmax": {"attention": "fastmax", "parts": True},
    "softmax": {"attention": "softmax", "parts": True},
    "fastmax_plain": {"attention": "fastmax", "parts": False},
    "softmax_plain": {"attention": "softmax", "parts": False},
}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", choices=("fastmax", "softmax"), default="fastmax")
    parser.add_argument("--p", type=int, choices=(1, 2), default=2, help="degree of Fastmax's polynomial")
    parser.add_argument(
        "--custom-gradient",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="Fastmax's analytic backward, or autograd through the same forward",
    )
    parser.add_argument(
        "--parts",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="decay, short convolution, output norm and gate, and for Fastmax an exact window",
    )
    parser.add_argument("--exact-window", type=int, default=32, help="last keys that are weighed by exp, with --parts")
    parser.add_argument("--compare", action="store_true", help="train " + ", ".join(RUNS) + ", one after another")
    parser.add_argument("--data", type=Path, help="text to train on (default: the standard library's sources)")
    parser.add_argument("--steps", type=count, default=600)
    parser.add_argument("--batch-size", type=count, default=8)
    parser.add_argument("--block-size", type=count, default=128, help="context length in bytes")
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument(
        "--qk-norm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="RMS-normalise queries and keys, which keeps scores where the polynomial is close to exp",
    )
    parser.add_argument("--temperature", type=float, help="divides Fastmax's scores (default: that of the layer)")
    parser.add_argument("--lr", type=positive, default=2e-3)
    parser.add_argument("--sample", type=count_or_none, default=300, help="bytes to generate at the end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--seeds", type=count, default=1, help="with --compare: number of seeds, from --seed on")
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser


def load_data(path: Path | None, device: str) -> tuple[Tensor, Tensor]:
    """Returns training and validation bytes, uint8 (N,): the first nine tenths and the rest."""
    paths = [path] if path is not None else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if not paths:
        raise SystemExit("this Python has no standard library sources on disk: pass --data FILE")
    return split(load_bytes(paths).to(device))


def validation_windows(data: Tensor, block_size: int) -> list[Batch]:
    """Returns eight batches of 32 windows, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return [random_windows(data, block_size, 32, generator) for _ in range(8)]


def train(model: GPT, train_data: Tensor, val_data: Tensor, args: argparse.Namespace, label: str) -> list[dict]:
    """Trains the model; returns about ten rows of step, training and validation loss, and tokens per second."""
    block_size = model.config.block_size
    recipe = Recipe(args.steps, lr=args.lr, warmup=max(1, args.steps // 20), betas=(0.9, 0.99))
    batch = partial(random_windows, train_data, block_size, args.batch_size)
    trainer = Trainer(model, recipe, batch, validation_windows(val_data, block_size), args.seed)
    history = []
    with tqdm(total=args.steps, desc=label, unit="step") as progress:
        for row in trainer.run():
            history.append({"run": label, "seed": args.seed, **row, "tokens_per_second": round(row["tokens"] / row["seconds"])})
            progress.set_postfix(train=f"{row['train']:.3f}", val=f"{row['val']:.3f}", refresh=False)
            progress.update(row["step"] - progress.n)
    return history


def mean_of_seeds(history: list[dict], label: str, step: int) -> dict[str, float]:
    """Returns losses and tokens per second of a run at a step, averaged over its seeds."""
    rows = [row for row in history if row["run"] == label and row["step"] == step]
    return {name: sum(row[name] for row in rows) / len(rows) for name in ("train", "val", "tokens_per_second")}


def save_history(history: list[dict], stem: Path) -> None:
    """Writes the rows to stem.csv, and the losses of each run, averaged over its seeds, to stem.png."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stem.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["run", "seed", "step", "train", "val"], extrasaction="ignore")
        writer.writeheader()
        writer.writerows(history)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for label in dict.fromkeys(row["run"] for row in history):
        steps = sorted({row["step"] for row in history if row["run"] == label})
        rows = [mean_of_seeds(history, label, step) for step in steps]
        (line,) = axis.plot(steps, [row["val"] for row in rows], marker="o", label=f"{label}, validation")
        axis.plot(steps, [row["train"] for row in rows], color=line.get_color(), alpha=0.4, label=f"{label}, train")
    axis.set(xlabel="step", ylabel="loss (nats per byte)")
    axis.legend()
    figure.savefig(f"{stem}.png", dpi=150)
    plt.close(figure)


def make_config(args: argparse.Namespace) -> GPTConfig:
    sizes = {name: getattr(args, name) for name in ("block_size", "n_layer", "n_head", "n_embd")}
    parts = {"exact_window": args.exact_window} if args.parts else dict(PLAIN)
    parts |= {"qk_norm": args.qk_norm, "use_custom_gradient": args.custom_gradient, "p": args.p}
    if args.temperature is not None:
        parts["temperature"] = args.temperature
    return GPTConfig(**sizes, attention=args.attention, parts=parts)


def name_of(args: argparse.Namespace) -> str:
    degree = "_p1" if args.attention == "fastmax" and args.p == 1 else ""
    return args.attention + degree + ("" if args.parts else "_plain")


def main():
    parser = arguments()
    args = parser.parse_args()
    if args.seeds != 1 and not args.compare:
        parser.error("--seeds needs --compare; a single run takes --seed")
    runs = [args]
    if args.compare:
        seeds = range(args.seed, args.seed + args.seeds)
        runs = [argparse.Namespace(**vars(args) | options | {"seed": seed}) for options in RUNS.values() for seed in seeds]
    train_data, val_data = load_data(args.data, args.device)

    history = []
    for run in runs:
        config = make_config(run)
        torch.manual_seed(run.seed)  # models with the same parts start from the same weights
        model = GPT(config).to(run.device)
        history += train(model, train_data, val_data, run, name_of(run))

    parameters = sum(x.numel() for x in model.parameters())
    print(
        f"\n{parameters / 1e6:.1f} M parameters, {len(train_data) / 1e6:.1f} MB of text, {args.steps} steps of "
        f"{args.batch_size} x {args.block_size} bytes on {args.device}"
    )
    print(f"{'attention':<14}{'train loss':>12}{'val loss':>12}{'tokens/s':>12}")
    for label in dict.fromkeys(row["run"] for row in history):
        last = mean_of_seeds(history, label, args.steps)
        print(f"{label:<14}{last['train']:>12.4f}{last['val']:>12.4f}{last['tokens_per_second']:>12,.0f}")

    if args.compare:
        stem = args.out / "char_lm"
        save_history(history, stem)
        print(f"wrote {stem}.csv and {stem}.png")
        return
    stem = args.out / f"char_lm_{name_of(args)}"
    save_history(history, stem)
    torch.save({"config": asdict(config), "model": model.state_dict()}, f"{stem}.pt")
    prompt = torch.tensor([list(b"def ")], device=args.device)
    sample = model.eval().generate(prompt, args.sample)
    print(f"wrote {stem}.csv, {stem}.png and {stem}.pt; a sample:\n")
    print(bytes(sample[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
