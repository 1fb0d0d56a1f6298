"""Convert a trained softmax GPT to Fastmax: swap, fit the polynomial, attention transfer, fine-tune.

    python examples/train_lm.py --attention softmax --out out/softmax
    python examples/convert_lm.py --checkpoint out/softmax/checkpoint.pt --out out/converted
    python examples/convert_lm.py --checkpoint out/softmax/checkpoint.pt --every 4      # softmax stays in every fourth layer

The table shows the validation loss of the softmax model, of the converted model after each stage, and of the softmax model
after the same fine-tuning. OUT receives stages.csv, transfer.csv and finetuning.csv (losses by step), convert.png, and
checkpoint.pt for `generate.py`. Checkpoints of train_char_lm.py can be converted too.
"""

import argparse
import copy
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from model import GPT, GPTConfig
from options import count, count_or_none, default_device, fill_in, positive
from text import Batch, bpe_tokens, byte_tokens, load_bpe, load_documents, random_windows
from torch import Tensor
from training import autocast, evaluate_by_position, write_csv

from fastmax import convert


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--checkpoint", type=Path, required=True, help="softmax model saved by train_lm.py or train_char_lm.py")
    parser.add_argument("--every", type=int, default=0, help="keep softmax in every EVERY-th layer; 0: in none")
    parser.add_argument("--exact-window", type=count, default=128, help="last keys that are weighed by exp")
    parser.add_argument("--decay", action=switch, default=True, help="add decay gates to converted layers without them")
    parser.add_argument("--longest-half-life", type=positive, help="of new gates, in tokens (default: 8 * BLOCK_SIZE)")
    parser.add_argument("--fit-batches", type=count_or_none, default=4, help="to fit the polynomial; 0: keep 1 + s + s^2 / 2")
    parser.add_argument("--transfer-steps", type=count_or_none, default=100, help="attention transfer; 0: none")
    parser.add_argument("--transfer-lr", type=positive, default=0.01)
    parser.add_argument("--steps", type=count, default=200, help="fine-tuning")
    parser.add_argument("--lr", type=positive, default=3e-4, help="learning rate of fine-tuning")
    parser.add_argument("--data", type=Path, nargs="+", help="files and directories (default: this Python's sources)")
    parser.add_argument("--batch-size", type=count, default=32)
    parser.add_argument("--block-size", type=count, help="tokens of a window (default: the checkpoint's)")
    parser.add_argument("--val-batches", type=count, default=8)
    parser.add_argument("--bf16", action=switch, help="default: on a GPU")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--seed", type=int, default=1338)
    parser.add_argument("--out", type=Path, default=Path("out/convert"))
    return parser


def load_text(args: argparse.Namespace, tokenizer: str | None) -> tuple[Tensor, Tensor]:
    """Returns training and validation tokens. `tokenizer` is a file name beside the checkpoint; None: tokens are bytes."""
    documents = load_documents(args.data)
    text = bpe_tokens(documents, load_bpe(args.checkpoint.parent / tokenizer)) if tokenizer else byte_tokens(documents)
    return tuple(part.tokens.to(args.device) for part in text.split())


def draw(data: Tensor, args: argparse.Namespace, seed: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield random_windows(data, args.block_size, args.batch_size, generator)


def keywords(batches: Iterator[Batch]) -> Iterator[dict]:
    return (batch._asdict() for batch in batches)


def config_of(model: GPT, every: int) -> GPTConfig:
    """Returns the config from which the converted model can be built."""
    layers = [block.attn for block in model.blocks]
    layer = next(layer for layer in layers if layer.attention == "fastmax")
    gates = {"decay": layer.decay_proj is not None, "input_gate": layer.input_gate_proj is not None}
    of_layer = layer.options | gates | {"longest_half_life": layer.longest_half_life, "kept_keys": layer.kept_keys}
    unchanged = {"decay": True} | {name: x for name, x in model.config.parts.items() if name in of_layer}
    parts = model.config.parts | of_layer
    return replace(model.config, attention="fastmax", every=every, parts=parts, softmax_parts=unchanged)


class Table:
    """Rows of stage, validation loss, its mean over the last quarter of positions, and seconds since the previous row."""

    def __init__(self, held_out: list[Batch], bf16: bool):
        self.held_out, self.bf16, self.rows, self.since = held_out, bf16, [], time.perf_counter()

    def add(self, stage: str, model: GPT) -> None:
        losses = evaluate_by_position(model, self.held_out, self.bf16)[0]
        now = time.perf_counter()
        last = losses[-math.ceil(len(losses) / 4) :]
        row = {"stage": stage, "loss": losses.mean().item(), "last_quarter": last.mean().item(), "seconds": now - self.since}
        self.rows.append(row)
        print(f"{stage:<40}{row['loss']:>10.4f}{row['last_quarter']:>14.4f}{row['seconds']:>10.1f}", flush=True)
        self.since = time.perf_counter()


def plot(stages: list[dict], curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    names, losses = [row["stage"] for row in stages], [row["loss"] for row in stages]
    left.barh(names, losses)
    left.set(xlabel="validation loss (nats per token)", xlim=(0.95 * min(losses), 1.01 * max(losses)))
    left.invert_yaxis()
    gap = torch.tensor(curves["converted"]) - torch.tensor(curves["softmax"])  # on the same batches
    means = gap.unfold(0, min(len(gap), 10), 1).mean(-1)
    steps = range(1, len(gap) + 1)
    right.plot(steps, gap, alpha=0.4, label="each step")
    right.plot(steps[-len(means) :], means, label="mean of the last 10")
    right.axhline(0.0, color="black", linewidth=0.8)
    right.set(xlabel="step of fine-tuning", ylabel="train loss: converted minus softmax")
    right.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = arguments()
    args = parser.parse_args()
    fill_in(args, bf16=(True, False))
    checkpoint = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
    config = GPTConfig(**checkpoint["config"])
    if config.attention != "softmax":
        parser.error(f"{args.checkpoint} was trained with {config.attention}, not softmax")
    if config.every:
        parser.error(f"the layers of {args.checkpoint} must be alike, but it was trained with --every {config.every}")
    if args.every == 1 or not 0 <= args.every <= config.n_layer:
        accepted = f"0 or from 2 to the {config.n_layer} layers of {args.checkpoint}"
        parser.error(f"--every must be {accepted}, got {args.every}")
    args.out.mkdir(parents=True, exist_ok=True)
    args.block_size = args.block_size or config.block_size
    softmax = GPT(config).to(args.device)
    softmax.load_state_dict(checkpoint["model"])
    train, validation = load_text(args, checkpoint.get("tokenizer"))
    held_out = draw(validation, args, 0)
    table = Table([next(held_out) for _ in range(args.val_batches)], args.bf16)

    print(f"{'stage':<40}{'loss':>10}{'last quarter':>14}{'seconds':>10}")
    table.add("softmax", softmax)
    model = copy.deepcopy(softmax)
    new = convert.swap(
        model,
        exact_window=args.exact_window,
        layers=[i for i in range(config.n_layer) if args.every == 0 or (i + 1) % args.every],
        decay=args.decay,
        longest_half_life=args.longest_half_life or 8.0 * args.block_size,
    )
    table.add("swapped", model)
    curves = {}
    with autocast(torch.device(args.device), args.bf16):
        if args.fit_batches:
            batches = keywords(draw(train, args, args.seed))
            rows = convert.fit_polynomial(model, softmax, [next(batches) for _ in range(args.fit_batches)])
            table.add("+ polynomial fitted", model)
            print("  a0, a1, a2 = {a0:.3f}, {a1:.3f}, {a2:.3f}; error of attention {error:.4f}".format(**rows[-1]))
        swapped = {name for name, block in model.named_modules() if getattr(block, "attention", None) == "fastmax"}
        scales = [f"{name}.{norm}.weight" for name in swapped for norm in ("q_norm", "k_norm")]
        trained = new + sorted(set(scales) & dict(model.named_parameters()).keys())
        if args.transfer_steps and trained:
            batches = keywords(draw(train, args, args.seed + 1))
            options = {"steps": args.transfer_steps, "learning_rate": args.transfer_lr}
            rows = convert.transfer(model, softmax, batches, trained, **options)
            table.add(f"+ {args.transfer_steps} steps of transfer", model)
            write_csv(rows, args.out / "transfer.csv")
        for name, each in (("converted", model), ("softmax", softmax)):
            batches = keywords(draw(train, args, args.seed + 2))
            rows = convert.finetune(each, batches, steps=args.steps, learning_rate=args.lr)
            curves[name] = [row["loss"] for row in rows]
            table.add(f"{name}, {args.steps} steps of fine-tuning", each)

    write_csv(table.rows, args.out / "stages.csv")
    steps = [{"step": i + 1} | {name: losses[i] for name, losses in curves.items()} for i in range(args.steps)]
    write_csv(steps, args.out / "finetuning.csv")
    plot(table.rows, curves, args.out / "convert.png")
    tokenizer = checkpoint.get("tokenizer")
    if tokenizer is not None:
        shutil.copyfile(args.checkpoint.parent / tokenizer, args.out / tokenizer)
    saved = {"config": asdict(config_of(model, args.every)), "model": model.state_dict(), "tokenizer": tokenizer}
    torch.save(saved, args.out / "checkpoint.pt")
    print(f"wrote stages.csv, finetuning.csv, convert.png and checkpoint.pt to {args.out}")


if __name__ == "__main__":
    main()
