"""Put Fastmax into a transformer that was trained with softmax, and fine-tune it briefly.

    python examples/train_char_lm.py --attention softmax
    python examples/swap_into_transformer.py --checkpoint out/char_lm_softmax.pt
    python examples/swap_into_transformer.py                 # trains a short softmax model first

Fastmax and softmax layers have the same weights, so the swap keeps every parameter; what changes is the function between
them, from exp(s) to 1 + s + s^2 / 2. The table shows the validation loss before and after, and what the same fine-tune does for
the softmax model itself. (For models built on `nn.MultiheadAttention`, `fastmax.swap_attention(model)` does this in one call.)

Writes OUT/swap.csv, OUT/swap.png and the fine-tuned checkpoint OUT/swap.pt.
"""

import argparse
import math
from dataclasses import asdict, replace
from pathlib import Path

import torch
from model import GPT, PLAIN, GPTConfig
from train_char_lm import load_data, save_history, train, validation_windows
from training import evaluate


def swap_attention(model: GPT, p: int) -> GPT:
    """A copy of the model with Fastmax in every block, at softmax's scale, where the polynomial is closest to exp."""
    parts = model.config.parts | {"p": p}
    if p == 2:
        parts["temperature"] = math.sqrt(model.config.n_embd / model.config.n_head)
    else:
        parts.pop("temperature", None)
    swapped = GPT(replace(model.config, attention="fastmax", parts=parts)).to(model.embedding.weight.device)
    swapped.load_state_dict(model.state_dict())
    return swapped


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, help="softmax model saved by train_char_lm.py (default: train one)")
    parser.add_argument("--p", type=int, choices=(1, 2), default=2, help="degree of Fastmax's polynomial")
    parser.add_argument("--data", type=Path, help="text (default: the standard library's sources)")
    parser.add_argument("--train-steps", type=int, default=400, help="softmax training when there is no checkpoint")
    parser.add_argument("--steps", type=int, default=100, help="fine-tuning")
    parser.add_argument("--train-lr", type=float, default=2e-3)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the fine-tune")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    train_data, val_data = load_data(args.data, args.device)
    torch.manual_seed(args.seed)
    if args.checkpoint is None:
        config = GPTConfig(block_size=args.block_size, n_layer=args.n_layer, attention="softmax", parts=dict(PLAIN))
        softmax = GPT(config).to(args.device)
        options = argparse.Namespace(**vars(args) | {"steps": args.train_steps, "lr": args.train_lr})
        train(softmax, train_data, val_data, options, "softmax")
    else:
        checkpoint = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        config = GPTConfig(**checkpoint["config"])
        if config.attention != "softmax":
            parser.error(f"{args.checkpoint} was trained with {config.attention}, not softmax")
        softmax = GPT(config).to(args.device)
        softmax.load_state_dict(checkpoint["model"])

    fastmax = swap_attention(softmax, args.p)
    windows = validation_windows(val_data, softmax.config.block_size)
    as_trained, swapped = evaluate(softmax, windows), evaluate(fastmax, windows)
    table = [("softmax, as trained", as_trained), ("swapped, no training", swapped)]
    history = []
    # Other windows than the first training saw, the same for both models.
    options = argparse.Namespace(**vars(args) | {"seed": args.seed + 1})
    for label, model, before in ((f"fastmax_p{args.p}", fastmax, swapped), ("softmax", softmax, as_trained)):
        start = {"run": label, "seed": options.seed, "step": 0, "train": math.nan, "val": before, "tokens_per_second": 0}
        history += [start, *train(model, train_data, val_data, options, label)]
        table.append((f"{label}, {args.steps} steps of fine-tuning", history[-1]["val"]))

    print(f"\n{'model':<40}{'validation loss':>16}")
    for row, loss in table:
        print(f"{row:<40}{loss:>16.4f}")
    stem = args.out / "swap"
    save_history(history, stem)
    torch.save({"config": asdict(fastmax.config), "model": fastmax.state_dict()}, f"{stem}.pt")
    print(f"wrote {stem}.csv, {stem}.png and {stem}.pt")


if __name__ == "__main__":
    main()
