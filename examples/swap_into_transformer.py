"""Swap Fastmax into a trained `nn.TransformerEncoder`, then fine-tune it.

    python examples/swap_into_transformer.py

`fastmax.swap_attention` replaces every `nn.MultiheadAttention` of a model and keeps its weights. What changes is the function
of the scores: exp(s) becomes 1 + s + s^2 / 2. The table shows test loss and accuracy on scikit-learn's handwritten digits
before and after the swap, after fine-tuning, and after the same fine-tuning with softmax.
"""

import argparse
import copy

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import fastmax

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=600, help="training steps with softmax")
parser.add_argument("--finetune-steps", type=int, default=100)
args = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)  # (1797, 8, 8), (1797,)
torch.manual_seed(1337)
test, train = torch.randperm(len(images)).split((450, 1347))


def fit(model: nn.Module, steps: int, lr: float) -> None:
    torch.manual_seed(1338)  # the same batches for both models
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=lr)
    for _ in range(steps):
        batch = train[torch.randint(len(train), (64,))]
        F.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def report(name: str, model: nn.Module) -> None:
    logits = model.eval()(images[test])
    loss, correct = F.cross_entropy(logits, labels[test]), logits.argmax(-1) == labels[test]
    print(f"{name:<24}{loss:>8.4f}{correct.float().mean():>10.1%}", flush=True)


# An image is 8 tokens, its rows of 8 pixels.
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 2)
model = nn.Sequential(nn.Linear(8, 64), encoder, nn.Flatten(), nn.Linear(8 * 64, 10))

print(f"{'model':<24}{'loss':>8}{'accuracy':>10}")
fit(model, args.steps, lr=1e-3)
report("softmax", model)
softmax = copy.deepcopy(model)

fastmax.swap_attention(model, dropout=0.0)  # Fastmax has no attention weights to drop, so the layer's 0.1 must be given up
report("swapped", model)
for name, each in (("swapped", model), ("softmax", softmax)):
    fit(each, args.finetune_steps, lr=3e-4)
    report(f"{name}, fine-tuned", each)
