"""Compare the custom gradient with autograd: the same call with `use_custom_gradient=True` and `False`.

    python examples/toggle_gradient.py
    python examples/toggle_gradient.py --tokens 4096 --dtype bfloat16

Change `options` to check a configuration of your own. `python -m fastmax.testing.verify` compares both gradients with the
definition in float64.
"""

import argparse

import torch

import fastmax

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=1000)
parser.add_argument("--dtype", choices=("float64", "float32", "bfloat16"), default="float32")
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

torch.manual_seed(1337)
shape = (2, 8, args.tokens, 64)  # (batch, heads, tokens, head_dim)
like = {"dtype": getattr(torch, args.dtype), "device": args.device}
q, k, v = (torch.randn(shape, **like, requires_grad=True) for _ in range(3))
grad_o = torch.randn(shape, **like)
options = {"causal": True, "p": 2, "temperature": 8.0}  # sqrt(head_dim)

tensors = {}
for custom in (True, False):
    o = fastmax.fastmax_attention(q, k, v, **options, use_custom_gradient=custom)
    tensors[custom] = (o, *torch.autograd.grad(o, (q, k, v), grad_o))

print("tensor       relative difference")
for name, ours, autograd in zip(("output", "grad of q", "grad of k", "grad of v"), tensors[True], tensors[False], strict=True):
    print(f"{name:<12} {((ours - autograd).double().norm() / autograd.double().norm()).item():.1e}")
