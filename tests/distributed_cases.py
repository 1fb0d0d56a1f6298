"""Functions that ranks run in tests of `fastmax.distributed`, and their counterparts in one process.

Every rank imports this module, which therefore imports little.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.messages import Received
from fastmax import ops
from fastmax.core.call import Call
from fastmax.distributed import (
    Layout,
    context_parallel_attention,
    context_parallel_flash_attention,
    exchanged_bytes,
    states,
    tokens_before,
)


def inputs(case: dict) -> dict[str, torch.Tensor]:
    """Returns the tensors of a call for all tokens, and gradients of its results."""
    made = torch.Generator().manual_seed(case.get("seed", 0))
    b, h, hk, n, d, dv = case["shape"]
    dtype = case.get("dtype", torch.float64)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    tensors = {"q": normal(b, h, n, d), "k": normal(b, hk, n, d), "v": normal(b, hk, n, dv)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    if case.get("decay"):
        decay = -normal(b, hk, n).abs() * case["decay"]
        resets = torch.rand(b, hk, n, generator=made) < case.get("resets", 0.0)
        decay = decay.masked_fill(resets, -torch.inf)
        if case.get("odd"):  # above 0 and NaN
            kind = torch.rand(b, hk, n, generator=made)
            decay = torch.where(kind < 0.2, 0.5, torch.where(kind < 0.2 + 3 / n, torch.nan, decay))
        tensors["log_decay"] = decay.to(dtype)
    if case.get("padding"):
        tensors["attention_mask"] = torch.rand(b, n, generator=made) > 0.3
    if "dropout" in case["options"]:
        tensors["drop_noise"] = normal(b, h, n, dv).to(dtype)
    tensors |= {
        "grad_o": normal(b, h, n, dv).to(dtype),
        "grad_lse": normal(b, h, n).to(torch.promote_types(dtype, torch.float32)),
    }
    if case.get("gate"):
        gate, kind = 2.0 * normal(b, hk, n), torch.rand(b, hk, n, generator=made)
        if case["gate"] == "beyond":  # the range; a key of a large gate outweighs the others
            gate = torch.where(kind < 0.1, -torch.inf, torch.where(kind > 1.0 - 2.0 / n, 31.0, gate))
        if case["gate"] == "odd":  # some are NaN
            gate = gate.masked_fill(kind < 3 / n, torch.nan)
        tensors["log_input_gate"] = gate.to(dtype)
    return tensors


def differentiated(function, case: dict, tensors: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """Returns the output, lse and all gradients of these tokens."""
    names = ("q", "k", "v", "log_decay", "log_input_gate")
    leaves = {name: tensors[name].detach().clone().requires_grad_() for name in names if name in tensors}
    q, k, v = (leaves[name] for name in "qkv")
    accompanying = {name: leaves.get(name, tensors.get(name)) for name in (*names[3:], "attention_mask", "drop_noise")}
    accompanying = {name: x for name, x in accompanying.items() if x is not None}
    cu_seqlens = case.get("cu_seqlens")
    if cu_seqlens is not None:
        accompanying["cu_seqlens"] = torch.tensor(cu_seqlens, dtype=torch.int32, device=q.device)
    o, lse = function(q, k, v, **accompanying, **case["options"], **options, return_lse=True)
    # An lse of no key is infinite.
    seen = lse.detach().isfinite()
    loss = (o * tensors["grad_o"]).sum() + torch.where(seen, lse, 0.0).mul(tensors["grad_lse"]).sum()
    loss.backward()
    return {"o": o.detach(), "lse": lse.detach()} | {f"grad_{name}": x.grad for name, x in leaves.items()}


def tokens_of(tensors: dict, layout: Layout, rank: int) -> dict:
    """Returns the tokens of a rank."""

    def take(name: str, x: torch.Tensor) -> torch.Tensor:
        dim = 1 if name == "attention_mask" else 2
        pieces = [x.narrow(dim, part.start, part.tokens) for part in layout.of(rank)]
        return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0)

    return {name: take(name, x) for name, x in tensors.items()}


def on_rank(group, case: dict) -> dict[str, torch.Tensor]:
    layout = case["layout"]
    function = context_parallel_flash_attention if case.get("flash") else context_parallel_attention
    passed = layout if case.get("passes_layout", True) else None
    return differentiated(function, case, tokens_of(inputs(case), layout, group.rank()), group=group, layout=passed)


def previous(group, x: torch.Tensor, count: int, layout: Layout) -> list[torch.Tensor]:
    own = tokens_of({"q": x.unsqueeze(1)}, layout, group.rank())["q"].squeeze(1).requires_grad_()
    before = tokens_before(own, count, group=group, layout=layout)
    sum((i + 1.0) * y.square().sum() for i, y in enumerate(before)).backward()
    return [own.grad, *(y.detach() for y in before)]


def with_a_message_of(group, bytes_of_a_message: int, case: dict):
    states._BYTES_OF_ONE_LATENCY, before = bytes_of_a_message, states._BYTES_OF_ONE_LATENCY
    try:
        return on_rank(group, case)
    finally:
        states._BYTES_OF_ONE_LATENCY = before


def counted(group, case: dict, bytes_of_a_message: int) -> list[int]:
    states._BYTES_OF_ONE_LATENCY, before = bytes_of_a_message, states._BYTES_OF_ONE_LATENCY
    layout, rank = case["layout"], group.rank()
    try:
        with Received(group) as received:
            on_rank(group, case)
        d, dv = case["shape"][4:]
        given = {"cu_seqlens": "cu_seqlens" in case, "log_decay": bool(case.get("decay"))}
        given |= {"attention_mask": bool(case.get("padding")), "log_input_gate": bool(case.get("gate"))}
        options = {name: x for name, x in case["options"].items() if name in ("causal", "algorithm", "p", "exact_window")}
        options = {"algorithm": "softmax"} | options if case.get("flash") else options
        sizes = {
            "kv_heads": case["shape"][2],
            "head_dim": d,
            "value_dim": dv,
            "batch": case["shape"][0],
            "dtype": case["dtype"],
        }
        return [received.bytes, sum(exchanged_bytes(layout, rank, **sizes, **given, **options))]
    finally:
        states._BYTES_OF_ONE_LATENCY = before


def compiled(group, case: dict) -> list[torch.Tensor]:
    tensors = tokens_of(inputs(case), case["layout"], group.rank())

    def attend(q, k, v):
        return context_parallel_attention(2.0 * q, k, v, group=group, **case["options"]) + 1.0

    results = []
    for function in (attend, torch.compile(attend, backend="eager")):
        q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
        o = function(q, k, v)
        results.append([o.detach(), *torch.autograd.grad(o.square().sum(), (q, k, v))])
    return results


class _Copies(TorchDispatchMode):
    """Records operations that make a tensor of all tokens of a rank: copies, new tensors, and gradients of views."""

    def __init__(self, tokens: int):
        super().__init__()
        self.tokens, self.seen = tokens, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        moves = ("aten::cat", "aten::stack", "aten::slice_backward", "aten::clone", "aten::new_empty", "aten::zeros_like")
        if function.name() in moves and result.ndim == 4 and result.shape[2] >= self.tokens:
            self.seen.append(function.name())
        return result


def copied(group, case: dict) -> list[str]:
    layout = case["layout"]
    tensors = tokens_of(inputs(case), layout, group.rank())
    leaves = [tensors[name].clone().requires_grad_() for name in "qkv"]
    given = {"log_decay": tensors["log_decay"]} if case.get("decay") else {}
    with _Copies(leaves[0].shape[2]) as copies:
        o = context_parallel_attention(*leaves, **given, **case["options"], group=group, layout=layout)
        torch.autograd.grad(o, leaves, tensors["grad_o"])
    return copies.seen


def order_of_events(group, case: dict) -> list[str]:
    """Returns the order in which exchanges begin, are waited for, and attention to local keys runs."""
    events, originals = [], (states.Exchange.__init__, states.Exchange.wait, ops.attention)

    def noting(name: str, function):
        def noted(*arguments, **options):
            events.append(name)
            return function(*arguments, **options)

        return noted

    states.Exchange.__init__ = noting("begins", originals[0])
    states.Exchange.wait = noting("waits", originals[1])
    ops.attention = noting("local", originals[2])
    try:
        on_rank(group, case)
    finally:
        states.Exchange.__init__, states.Exchange.wait, ops.attention = originals
    return events


def masks_of_kernels(group, case: dict) -> list[bool]:
    """Returns for each call of an attention operator in the forward whether it has a mask."""
    masks, names = [], ("attention", "state_of_keys", "prefill_saved_")
    originals = {name: getattr(ops, name) for name in names}

    def noting(function):
        def noted(*arguments, **options):
            masks.extend(x.attention_mask is not None for x in arguments if isinstance(x, Call))
            return function(*arguments, **options)

        return noted

    for name, function in originals.items():
        setattr(ops, name, noting(function))
    try:
        on_rank(group, case)
    finally:
        for name, function in originals.items():
            setattr(ops, name, function)
    return masks


def measured(group, name: str, sizes: dict) -> list[dict]:
    """Returns the rows of `benchmarks.distributed`, on all ranks."""
    from benchmarks import distributed
    from benchmarks.timing import Protocol

    case = distributed.Case(64, 8, heads=2, dtype="fp32", algorithm=name, **sizes)
    return distributed.measure(case, torch.device("cpu"), Protocol(dropped=0, rounds=1, seconds=0.0))
