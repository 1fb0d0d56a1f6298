"""Multi-query associative recall: how accurately does attention look up values by key?

A sequence states key-value pairs and then asks for all values in another order:

    (k3 v7) (k1 v2) (k8 v4) | k8 ? k3 ? k1 ?

The task is from Arora et al. 2023 ("Zoology"), but a pair is one token, the sum of two embeddings. Joining a key to its value
is the work of an earlier layer or a short convolution; this example measures the lookup alone. Every sequence is new, so the
model cannot memorise answers. The same small transformer is trained with Fastmax p = 1, p = 2 and softmax on a mix of sizes.
The table shows the accuracy for each number of pairs.

    python examples/associative_recall.py

writes OUT/associative_recall.csv and .png. `--scales` compares scales of the scores for p = 2 instead: queries and keys
RMS-normalised or not, temperature 1 or sqrt(head_dim), `normalize="token"`. It writes OUT/recall_scales.csv and .png.
"""

import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from model import PLAIN, Block, GPTConfig, make_layer
from torch import Tensor, nn
from tqdm import tqdm

# Keywords of FastmaxSelfAttention.
ATTENTIONS = {"fastmax p=1": {"p": 1}, "fastmax p=2": {}, "softmax": {"attention": "softmax"}}


def scales(head_dim: int) -> dict[str, dict]:
    root = math.sqrt(head_dim)
    return {
        "RMS-normalised, temperature 1": {},
        "RMS-normalised, temperature sqrt(d)": {"temperature": root},
        "as projected, temperature 1": {"qk_norm": False},
        "as projected, temperature sqrt(d)": {"qk_norm": False, "temperature": root},
        'as projected, normalize="token", temperature 1': {"qk_norm": False, "normalize": "token"},
    }


class Recall(nn.Module):
    """A transformer without positions: the answer depends on the pairs, not on their order."""

    def __init__(self, vocab: int, config: GPTConfig):
        super().__init__()
        blocks = (Block(config, make_layer(config, index)) for index in range(config.n_layer))
        self.key = nn.Embedding(vocab, config.n_embd)
        self.value = nn.Embedding(vocab, config.n_embd)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, vocab, bias=False)

    def forward(self, keys: Tensor, values: Tensor, asked: Tensor) -> Tensor:
        """Returns logits (B, pairs, vocab) of the values of the asked keys, from keys, values and asked (B, pairs)."""
        stated = self.key(keys) + self.value(values)
        x = self.blocks(torch.cat([stated, self.key(asked)], dim=1))
        return self.head(self.norm(x[:, keys.shape[1] :]))


def make_batch(batch_size: int, pairs: int, vocab: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Returns keys, values, asked keys and their values, each (B, pairs). The keys of a sequence are distinct."""
    keys = torch.rand(batch_size, vocab, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(vocab, (batch_size, pairs), generator=generator)
    order = torch.rand(batch_size, pairs, generator=generator).argsort(1)
    return keys, values, keys.gather(1, order), values.gather(1, order)


@torch.no_grad()
def accuracy(model: Recall, pairs: int, args: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(args.seed + 1)
    *given, answers = (x.to(args.device) for x in make_batch(128, pairs, args.vocab, generator))
    return (model(*given).argmax(-1) == answers).float().mean().item()


def train(name: str, options: dict, args: argparse.Namespace) -> tuple[Recall, list[tuple[int, float]]]:
    """Returns the trained model, and pairs of a step and the accuracy at the largest number of pairs."""
    torch.manual_seed(args.seed)
    options = PLAIN | {"rope": False} | options
    attention = options.pop("attention", "fastmax")
    config = GPTConfig(n_layer=args.n_layer, n_head=args.n_head, n_embd=args.n_embd, attention=attention, parts=options)
    model = Recall(args.vocab, config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps + 1, pct_start=0.1)
    generator = torch.Generator().manual_seed(args.seed)
    curve = []
    progress = tqdm(range(1, args.steps + 1), desc=name, unit="step")
    for step in progress:
        pairs = args.pairs[step % len(args.pairs)]
        *given, answers = (x.to(args.device) for x in make_batch(args.batch_size, pairs, args.vocab, generator))
        loss = F.cross_entropy(model(*given).flatten(0, 1), answers.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, args.steps // 20) == 0:
            curve.append((step, accuracy(model, max(args.pairs), args)))
            progress.set_postfix(loss=f"{loss.item():.3f}", accuracy=f"{curve[-1][1]:.1%}")
    return model, curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 16, 32, 64], help="sizes to train on and to report")
    parser.add_argument("--vocab", type=int, default=64, help="number of keys, and of values")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--n-layer", type=int, default=1)
    parser.add_argument("--n-head", type=int, default=1)
    parser.add_argument("--n-embd", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--scales", action="store_true", help="compare temperatures and normalisations of p = 2")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()
    if max(args.pairs) > args.vocab:
        parser.error(f"--vocab must be at least the largest number of pairs {max(args.pairs)}, got {args.vocab}")

    table, curves = {}, {}
    for name, options in (scales(args.n_embd // args.n_head) if args.scales else ATTENTIONS).items():
        model, curves[name] = train(name, options, args)
        table[name] = [accuracy(model, pairs, args) for pairs in args.pairs]

    print(f"\naccuracy after {args.steps} steps, by number of pairs (guessing: {1 / args.vocab:.1%})")
    width = max(map(len, table)) + 2
    print(f"{'attention':<{width}}" + "".join(f"{pairs:>8}" for pairs in args.pairs))
    for name, row in table.items():
        print(f"{name:<{width}}" + "".join(f"{value:>8.1%}" for value in row))

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / ("recall_scales" if args.scales else "associative_recall")
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["attention", *(f"pairs_{pairs}" for pairs in args.pairs)])
        writer.writerows([name, *row] for name, row in table.items())
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in curves.items():
        axis.plot(*zip(*curve, strict=True), label=name)
    axis.set(xlabel="step", ylabel=f"accuracy, {max(args.pairs)} pairs", ylim=(0, 1.02))
    axis.legend()
    figure.savefig(f"{stem}.png", dpi=150)
    print(f"wrote {stem}.csv and {stem}.png")


if __name__ == "__main__":
    main()
