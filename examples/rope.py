"""Rotary position embedding (RoPE) with Fastmax: rotate q and k, then call attention. Nothing else changes.

RoPE (Su et al. 2021) turns each pair of channels of the query at position i and of the key at position j by angles i w_f and
j w_f, so their dot product depends on i - j alone. Fastmax sees nothing but dot products, and a rotation keeps lengths: the
polynomial, `normalize="token"` and the linear algorithm all apply to rotated rows as they stand.

    python examples/rope.py

checks that on random data, prints a table of errors, and draws attention weight against distance to OUT/rope.png.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor


def rope(x: Tensor, first: int = 0, base: float = 10000.0) -> Tensor:
    """Rotate x (..., tokens, head_dim), whose rows are the positions `first, first + 1, ...`; head_dim is even."""
    tokens, half = x.shape[-2], x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angle = (first + torch.arange(tokens, dtype=torch.float64, device=x.device))[:, None] * frequency  # (T, hd / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32)
    parser.add_argument("--p", type=int, choices=(1, 2), default=2, help="degree of the polynomial")
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=Path("out"), help="directory for rope.png")
    args = parser.parse_args()

    from tqdm import tqdm

    import fastmax

    torch.manual_seed(args.seed)
    shape = (1, args.heads, args.tokens, args.head_dim)
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    options = {"causal": True, "p": args.p, "temperature": args.head_dim**0.5}
    if args.p == 1:
        # rows in the unit ball keep 1 + s positive; rotating them does not change their length
        options |= {"normalize": "token", "temperature": 1.1}

    def attend(q: Tensor, k: Tensor, v: Tensor, **more) -> Tensor:
        return fastmax.fastmax_attention(q, k, v, **(options | more))

    def error(x: Tensor, y: Tensor) -> float:
        return ((x - y).norm() / y.norm()).item()

    rotated = attend(rope(q), rope(k), v)
    shuffle = torch.randperm(args.tokens - 1)
    shuffled = torch.cat([shuffle, torch.tensor([args.tokens - 1])])  # all but the last token, whose output we look at

    def last_after_shuffle(turn) -> float:
        before = attend(turn(q), turn(k), v)[:, :, -1]
        after = attend(turn(q), turn(k[:, :, shuffled]), v[:, :, shuffled])[:, :, -1]
        return error(after, before)

    def one_token_at_a_time() -> float:
        """Generation: rotate the new q and k by their position, then one step of the constant-size state."""
        decode = {name: value for name, value in options.items() if name != "causal"}
        state = fastmax.decoding.init_state(1, args.heads, args.head_dim, dtype=torch.float64, **decode)
        rows = []
        for t in tqdm(range(args.tokens), desc="decode", unit="token", leave=False):
            q_t, k_t, v_t = (x[:, :, t : t + 1] for x in (q, k, v))
            o_t, state = fastmax.decoding.step(rope(q_t, t), rope(k_t, t), v_t, state)
            rows.append(o_t)
        return error(torch.cat(rows, dim=2), rotated)

    linear, quadratic = (attend(rope(q), rope(k), v, algorithm=name) for name in ("linear", "quadratic"))
    table = [
        ("every position moved by 100000", error(attend(rope(q, 100_000), rope(k, 100_000), v), rotated), "~0"),
        ("linear algorithm against quadratic", error(linear, quadratic), "~0"),
        ("one token at a time against all at once", one_token_at_a_time(), "~0"),
        ("earlier tokens shuffled, without RoPE", last_after_shuffle(lambda x: x), "~0"),
        ("earlier tokens shuffled, with RoPE", last_after_shuffle(rope), "> 0"),
    ]
    print(f"{'change of the output (float64)':<42}{'relative':>10}  expected")
    for name, value, expected in table:
        print(f"{name:<42}{value:>10.1e}  {expected}")

    print(f"figure: {plot(args, options)}")


def plot(args: argparse.Namespace, options: dict) -> Path:
    """Attention of the last query by distance, for a query equal to every key: with RoPE near keys weigh more."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    import fastmax

    same = torch.ones(1, 1, args.tokens, args.head_dim, dtype=torch.float64)
    # With the identity as values the output is the row of attention weights itself.
    identity = torch.eye(args.tokens, dtype=torch.float64)[None, None]
    weights = {
        "RoPE": fastmax.fastmax_attention(rope(same)[:, :, -1:], rope(same), identity, **options),
        "no positions": fastmax.fastmax_attention(same[:, :, -1:], same, identity, **options),
    }
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for name, weight in weights.items():
        axis.plot(range(args.tokens), weight.flatten().flip(0) * args.tokens, label=name)
    axis.set(xscale="symlog", xlabel="distance i - j", ylabel="weight (1 = uniform)", title=f"Fastmax p={args.p}")
    axis.legend()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "rope.png"
    figure.savefig(path, dpi=150)
    return path


if __name__ == "__main__":
    main()
