"""Train a GPT of 25 M to 350 M parameters on one GPU, with Fastmax, with softmax, or with softmax in some layers.

    python examples/train_lm.py --size 25m --out out/fastmax                          # bytes of this Python's sources
    python examples/train_lm.py --size 25m --out out/hybrid --every 3                 # softmax in every third layer
    python examples/train_lm.py --size 124m --out out/books --data books/ --bpe 32768 --packed --block-size 16384
    python examples/train_lm.py --size 25m --out out/p1 --parts p=1 exact_window=64 --without conv output_gate
    python examples/train_lm.py --out out/growing --block-size 32768 --batch-size 2 --grow 1024:0.5 4096:0.75 16384:0.9

Run the same command again to resume. A checkpoint is written with every row of losses and on SIGTERM and SIGINT, and a resumed
run has the same losses as an uninterrupted one. OUT receives checkpoint.pt, tokenizer.json (with --bpe), losses.csv,
positions.csv (validation loss by position in the sequence) and losses.png. `generate.py` reads the checkpoint.
"""

import argparse
import ast
import inspect
import os
import signal
import sys
import zlib
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from model import GPT, PLAIN, WITHOUT_DECAY, GPTConfig
from options import count, count_or_none, default_device, fill_in, not_negative, positive
from text import Batch, Text, bpe_tokens, byte_tokens, load_bpe, load_documents, packed_windows, random_windows, train_bpe
from torch import Tensor
from tqdm import tqdm
from training import Recipe, Trainer, evaluate_by_position, length_at, write_csv

from fastmax import FastmaxSelfAttention

SIZES = {"25m": (8, 8, 512), "124m": (12, 12, 768), "350m": (24, 16, 1024)}  # layers, heads, width
# At 25m the better of 1e-3 and 2e-3 (docs/parameters.md). The others are those of GPT-3, not tuned.
LEARNING_RATES = {"25m": 2e-3, "124m": 6e-4, "350m": 3e-4}
PARTS = {name for name, x in inspect.signature(FastmaxSelfAttention).parameters.items() if x.kind is x.KEYWORD_ONLY}
MAY_CHANGE = {"out", "device", "compile", "fresh"}  # when a run is resumed


def part(text: str) -> tuple[str, object]:
    """Parses a NAME=VALUE of --parts."""
    name, _, value = text.partition("=")
    if name not in PARTS or not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a NAME of {', '.join(sorted(PARTS))}")
    try:
        return name, ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value.lower(), value))
    except (ValueError, SyntaxError):
        return name, value


def stage(text: str) -> tuple[int, float]:
    """Parses a LENGTH:UNTIL of --grow."""
    length, _, until = text.partition(":")
    try:
        parsed = count(length), float(until)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not LENGTH:UNTIL") from None
    if not 0 < parsed[1] < 1:
        raise argparse.ArgumentTypeError(f"UNTIL must be above 0 and below 1, got {until}")
    return parsed


def schedule_of(args: argparse.Namespace) -> list[tuple[float, int]]:
    """Returns the schedule of --grow, as `training.length_at` takes it.

    Raises:
        ValueError: lengths or parts do not ascend, or a batch is not whole windows of a length.
    """
    lengths, ends = [length for length, _ in args.grow] + [args.block_size], [0.0] + [until for _, until in args.grow]
    if any(x >= y for values in (lengths, ends) for x, y in pairwise(values)):
        raise ValueError(f"--grow must have ascending lengths, below --block-size {args.block_size}, and ascending parts")
    tokens = args.batch_size * args.block_size
    if wrong := [length for length in lengths if tokens % length != 0]:
        raise ValueError(f"the {tokens} tokens of a batch must be whole windows of each length of --grow, got {wrong[0]}")
    return list(zip(ends, lengths, strict=True))


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `make_config` reads."""
    parser.add_argument("--size", choices=SIZES, default="25m")
    parser.add_argument("--n-layer", type=int, help="overrides --size; so do --n-head and --n-embd")
    parser.add_argument("--n-head", type=int)
    parser.add_argument("--n-embd", type=int)
    parser.add_argument("--attention", choices=("fastmax", "softmax"), default="fastmax")
    parser.add_argument("--every", type=int, default=0, help="softmax without decay in every EVERY-th layer; 0: in none")
    parser.add_argument(
        "--parts", type=part, nargs="+", default=[], metavar="NAME=VALUE", help="keywords of FastmaxSelfAttention"
    )
    parser.add_argument("--without", choices=PLAIN, nargs="+", default=[], help="parts of the layer to switch off")


def add_training_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Adds options for text, steps and checkpoints. `defaults` has `steps`, `warmup`, `val_batches` and `out`."""
    parser.add_argument("--data", type=Path, nargs="+", help="files and directories (default: this Python's sources)")
    parser.add_argument("--packed", action="store_true", help="pack documents, which do not attend to each other")
    parser.add_argument("--steps", type=count)
    parser.add_argument("--lr", type=positive, help=f"default: by size, {LEARNING_RATES}")
    parser.add_argument("--warmup", type=count_or_none, help="steps")
    parser.add_argument("--weight-decay", type=not_negative, default=0.1)
    parser.add_argument("--rows", type=count, default=10, help="number of rows of losses, and of checkpoints")
    parser.add_argument("--val-batches", type=count, help="validation batches")
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--fresh", action="store_true", help="do not resume from a checkpoint in OUT")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(**defaults)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    add_training_arguments(parser, steps=1000, warmup=100, val_batches=8, out=Path("out/lm"))
    parser.add_argument("--bpe", type=int, default=0, metavar="SIZE", help="train a BPE vocabulary on the text; 0: bytes")
    parser.add_argument("--block-size", type=count, default=1024, help="tokens of a window; packed documents are cut to it")
    parser.add_argument(
        "--batch-size", type=count, default=32, help="windows; with --packed one row of BATCH_SIZE * BLOCK_SIZE tokens"
    )
    parser.add_argument(
        "--grow",
        type=stage,
        nargs="+",
        default=[],
        metavar="LENGTH:UNTIL",
        help="windows have LENGTH tokens until this part of the training, and BLOCK_SIZE after the last",
    )
    parser.add_argument("--accumulate", type=count, default=1, help="batches per step")
    parser.add_argument("--seconds", type=positive, help="time limit of the training")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU")
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses the arguments; the default learning rate depends on --size, and whether there is bf16 on --device."""
    args = parser.parse_args(argv)
    args.lr = LEARNING_RATES[args.size] if args.lr is None else args.lr
    fill_in(args, bf16=(True, False))
    return args


def make_config(args: argparse.Namespace, vocab_size: int) -> GPTConfig:
    sizes = zip(("n_layer", "n_head", "n_embd"), SIZES[args.size], strict=True)
    sizes = {name: size if getattr(args, name) is None else getattr(args, name) for name, size in sizes}
    parts = {name: PLAIN[name] for name in args.without} | dict(args.parts)
    kinds = {"attention": args.attention, "every": args.every}
    softmax_parts = dict(WITHOUT_DECAY) if args.every and args.attention == "fastmax" else {}
    return GPTConfig(vocab_size, args.block_size, **sizes, **kinds, parts=parts, softmax_parts=softmax_parts)


def load_text(args: argparse.Namespace) -> tuple[Text, int, float]:
    """Returns the text, the vocabulary size and the bytes per token. With --bpe, OUT holds the tokenizer."""
    documents = load_documents(args.data)
    if not args.bpe:
        return byte_tokens(documents), 256, 1.0
    path = args.out / "tokenizer.json"
    if (args.out / "checkpoint.pt").exists() and not args.fresh:
        tokenizer = load_bpe(path)
    else:
        tokenizer = train_bpe(documents, args.bpe)
        tokenizer.save(str(path))
    text = bpe_tokens(documents, tokenizer)
    return text, tokenizer.get_vocab_size(), sum(map(len, documents)) / len(text.tokens)


def settings(args: argparse.Namespace, text: Text) -> dict:
    """Returns settings that must not change when a run is resumed."""
    chosen = {name: str(value) for name, value in vars(args).items() if name not in MAY_CHANGE}
    return chosen | {"data": f"{len(text.tokens)} tokens, CRC {zlib.crc32(text.tokens.numpy()):08x}"}


def save(checkpoint: dict, path: Path) -> None:
    """Writes the checkpoint atomically: an interruption leaves the previous file."""
    unfinished = path.with_name(path.name + ".unfinished")
    with open(unfinished, "wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def by_position(mean: Tensor, count: Tensor) -> list[dict]:
    """Returns rows of first and last position, mean loss and number of tokens. Last positions are 1, 2, 4, 8, ..."""
    rows, seen = [], 0
    while seen < len(mean):
        last = min(max(1, 2 * seen), len(mean))
        here, tokens = slice(seen, last), int(count[seen:last].sum())
        loss = (mean[here] * count[here]).nansum().item() / tokens if tokens else float("nan")
        rows.append({"first": seen + 1, "last": last, "loss": loss, "tokens": tokens})
        seen = last
    return rows


def plot(history: list[dict], positions: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    tokens = [row["tokens"] for row in history]
    left.plot(tokens, [row["val"] for row in history], marker="o", label="validation")
    left.plot(tokens, [row["train"] for row in history], alpha=0.4, label="train")
    left.set(xlabel="tokens", ylabel="loss (nats per token)")
    left.legend()
    right.plot([row["last"] for row in positions], [row["loss"] for row in positions], marker="o")
    right.set(xscale="log", xlabel="position", ylabel="validation loss")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    args = parse(parser, argv)
    fill_in(args, compile=(True, False))
    if args.bpe and args.bpe <= 256:
        parser.error(f"--bpe must be at least 257, for 256 bytes and the end of text, got {args.bpe}")
    try:
        with torch.device("meta"):
            GPT(make_config(args, vocab_size=256))
        schedule = schedule_of(args)
    except (TypeError, ValueError) as error:  # wrong --parts and --grow are reported before the text is read
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    text, vocab_size, bytes_per_token = load_text(args)
    common = settings(args, text)
    train, validation = (Text(part.tokens.to(args.device), part.starts) for part in text.split())
    config = make_config(args, vocab_size)
    torch.manual_seed(args.seed)
    model = GPT(config).to(args.device)

    windows_of = packed_windows if args.packed else random_windows
    train, validation = (part if args.packed else part.tokens for part in (train, validation))

    def draw(data: Text | Tensor, length: int, generator: torch.Generator) -> Batch:
        return windows_of(data, length, args.batch_size * args.block_size // length, generator)

    always_the_same = torch.Generator().manual_seed(0)
    held_out = [draw(validation, args.block_size, always_the_same) for _ in range(args.val_batches)]
    chosen = {name: getattr(args, name) for name in ("rows", "lr", "warmup", "weight_decay", "accumulate", "seconds")}
    dynamic = False if args.grow and not args.packed else None
    recipe = Recipe(args.steps, **chosen, bf16=args.bf16, compile=args.compile, dynamic=dynamic)
    later = [draw(train, length, torch.Generator().manual_seed(0)) for _, length in schedule[1:]]

    def batch(generator: torch.Generator) -> Batch:
        return draw(train, length_at(schedule, trainer.progress()), generator)

    trainer = Trainer(model, recipe, batch, held_out, args.seed, later)

    path, history = args.out / "checkpoint.pt", []
    if path.exists() and not args.fresh:
        checkpoint = torch.load(path, map_location=args.device, weights_only=True)
        was = checkpoint.get("settings", {})
        changed = [f"{name} was {was.get(name)}, is {value}" for name, value in common.items() if was.get(name) != value]
        if not changed and GPTConfig(**checkpoint["config"]) != config:
            changed = ["its model has another config"]
        if changed:
            parser.error(f"{path} is of another run ({'; '.join(changed)}): pass --fresh to overwrite it, or another --out")
        model.load_state_dict(checkpoint["model"])
        trainer.load_state_dict(checkpoint["trainer"])
        history = checkpoint["history"]

    def save_checkpoint() -> None:
        tokenizer = "tokenizer.json" if args.bpe else None
        checkpoint = {"config": asdict(config), "model": model.state_dict(), "tokenizer": tokenizer}
        save(checkpoint | {"trainer": trainer.state_dict(), "history": history, "settings": common}, path)

    stopped_by = []

    def stop(number: int, frame: object) -> None:
        stopped_by.append(number)
        trainer.stop = True

    def handle() -> dict:
        return {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}

    handlers = handle()
    try:
        with tqdm(total=args.steps, initial=trainer.step, desc=args.attention, unit="step") as progress:

            def after_step() -> None:
                progress.update()
                handle()  # again: Triton, which a compiled step imports, sets handlers of its own

            for row in trainer.run(after_step):
                history.append(row)
                write_csv(history, args.out / "losses.csv")
                save_checkpoint()
                progress.set_postfix(train=f"{row['train']:.3f}", val=f"{row['val']:.3f}")
        if not trainer.finished:
            save_checkpoint()
            print(f"stopped after {trainer.step} of {args.steps} steps; run the same command to resume from {path}")
            return 128 + stopped_by[-1]
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    positions = by_position(*evaluate_by_position(model, held_out, args.bf16))
    write_csv(positions, args.out / "positions.csv")
    plot(history, positions, args.out / "losses.png")
    parameters, last = sum(x.numel() for x in model.parameters()), history[-1]
    sizes = f"{parameters / 1e6:.1f} M parameters, {len(text.tokens) / 1e6:.1f} M tokens of text"
    print(f"{sizes}, {last['step']} steps on {args.device}")
    print(f"validation loss  {last['val']:.4f} nats per token, {last['val'] / bytes_per_token:.4f} per byte")
    print(f"tokens/s         {last['tokens'] / last['seconds']:,.0f}")
    if last["peak_bytes"] is not None:
        print(f"peak memory      {max(row['peak_bytes'] for row in history) / 2**20:,.0f} MiB")
    print(f"{'positions':<17}loss")
    for row in positions:
        print(f"{row['first']:>7} {row['last']:>8} {row['loss']:.4f}")
    print(f"wrote checkpoint.pt, losses.csv, positions.csv and losses.png to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
