"""A small vision transformer on scikit-learn's handwritten digits: Fastmax against softmax attention.

The 1,797 images of 8 x 8 pixels are cut into 16 patches of 2 x 2. A quarter of the images is the test set. Attention is not
causal: every patch attends to every patch.

    python examples/train_digits.py

trains each attention with several seeds and writes OUT/digits.csv and .png.
"""

import argparse
import csv
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from tqdm import tqdm

from fastmax import FASTMultiHeadAttention


class SoftmaxAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def make_attention(name: str, head_dim: int) -> nn.Module:
    """Returns an attention function of heads q, k, v (B, nh, T, hd), whose rows of q and k the model has RMS-normalised."""
    if name == "softmax":
        return SoftmaxAttention()
    if name == "fastmax p=2":
        return FASTMultiHeadAttention(p=2, temperature=math.sqrt(head_dim))
    # 1 + s must stay positive, so rows are scaled into the unit ball and the temperature is above 1
    return FASTMultiHeadAttention(p=1, normalize="token", temperature=1.1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, attention: str):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // heads), nn.RMSNorm(dim // heads)
        self.attend = make_attention(attention, dim // heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attn_norm(x))
        q, k, v = rearrange(qkv, "b t (three h d) -> three b h t d", three=3, h=self.heads)
        o = self.attend(self.q_norm(q), self.k_norm(k), v)
        x = x + self.proj(rearrange(o, "b h t d -> b t (h d)"))
        return x + self.mlp(self.mlp_norm(x))


class ViT(nn.Module):
    def __init__(self, attention: str, dim: int, heads: int, layers: int):
        super().__init__()
        self.embed = nn.Linear(4, dim)
        self.position = nn.Parameter(0.5 * torch.randn(16, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Returns logits (B, 10) of images (B, 8, 8)."""
        patches = rearrange(images, "b (i y) (j x) -> b (i j) (y x)", y=2, x=2)
        x = self.blocks(self.embed(patches) + self.position)
        return self.head(self.norm(x).mean(1))


def train(attention: str, seed: int, data: tuple[Tensor, ...], args: argparse.Namespace) -> list[float]:
    """Trains a model; returns its test accuracy after every epoch."""
    x_train, x_test, y_train, y_test = data
    torch.manual_seed(seed)
    model = ViT(attention, args.dim, args.heads, args.layers).to(args.device)
    steps = args.epochs * math.ceil(len(x_train) / args.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps + 1)
    curve = []
    progress = tqdm(range(args.epochs), desc=f"{attention}, seed {seed}", unit="epoch")
    for _ in progress:
        for batch in torch.randperm(len(x_train)).split(args.batch_size):
            loss = F.cross_entropy(model(x_train[batch]), y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            curve.append((model(x_test).argmax(-1) == y_test).float().mean().item())
        progress.set_postfix(accuracy=f"{curve[-1]:.1%}")
    return curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2, help="number of runs of each attention")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=1337, help="first seed, and seed of the split into training and test set")
    parser.add_argument("--out", type=Path, default=Path("out"))
    args = parser.parse_args()

    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.tensor((digits.images - digits.images.mean()) / digits.images.std(), dtype=torch.float32)
    labels = torch.tensor(digits.target)
    data = train_test_split(images, labels, test_size=0.25, random_state=args.seed, stratify=labels)
    data = tuple(x.to(args.device) for x in data)

    curves = {
        name: torch.tensor([train(name, args.seed + i, data, args) for i in range(args.seeds)])
        for name in ("fastmax p=2", "fastmax p=1", "softmax")
    }
    print(f"\ntest accuracy on {len(data[1])} images after {args.epochs} epochs, {args.seeds} seeds")
    print(f"{'attention':<14}{'mean':>8}{'lowest':>8}{'highest':>9}")
    for name, curve in curves.items():
        last = curve[:, -1]
        print(f"{name:<14}{last.mean():>8.2%}{last.min():>8.2%}{last.max():>9.2%}")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "digits"
    with open(f"{stem}.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["attention", "seed", "epoch", "accuracy"])
        for name, curve in curves.items():
            for i, row in enumerate(curve.tolist()):
                writer.writerows([name, args.seed + i, epoch, value] for epoch, value in enumerate(row, start=1))
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, curve in curves.items():
        axis.plot(range(1, args.epochs + 1), curve.mean(0), label=name)
    axis.set(xlabel="epoch", ylabel="test accuracy (mean of seeds)")
    axis.legend()
    figure.savefig(f"{stem}.png", dpi=150)
    print(f"wrote {stem}.csv and {stem}.png")


if __name__ == "__main__":
    main()
