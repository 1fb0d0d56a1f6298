"""The random tensors of a configuration, in its memory layout."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastmax.testing.configurations import Case


def random_tensors(case: Case, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
    """Returns the tensors of a case, for `errors.measure`. They are the same on all devices of one kind."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64, device=device)

    def rows(*shape: int) -> Tensor:
        x = normal(*shape).abs() if case.positive else normal(*shape)
        if case.magnitude is not None:
            return case.magnitude * x
        length = 0.9 * torch.rand(*shape[:-1], 1, generator=generator, dtype=torch.float64, device=device)
        return x * length / x.norm(dim=-1, keepdim=True)

    tensors = {
        "q": rows(case.batch, case.heads, case.queries, case.head_dim),
        "k": rows(case.batch, case.kv_heads, case.keys, case.head_dim),
        "v": normal(case.batch, case.kv_heads, case.keys, case.value_dim),
    }
    if case.noise:
        tensors["drop_noise"] = normal(case.batch, case.heads, case.queries, case.value_dim)
    tensors = {name: x.to(case.dtype) for name, x in tensors.items()}
    if case.layout == "packed":
        tensors |= dict(zip("qkv", packed(*(tensors[name] for name in "qkv")), strict=True))
    elif case.layout != "contiguous":
        change = {"token-major": token_major, "unaligned": unaligned}[case.layout]
        tensors = {name: change(x) for name, x in tensors.items()}
    if case.rpe:
        tensors["rpe_matrix"] = normal(case.queries + case.keys - 1, case.head_dim).to(case.dtype)
    if case.padding:
        mask = torch.rand(case.batch, case.keys, generator=generator, device=device) < 0.7
        mask[-1, : case.keys // 3] = False  # causal: the first queries see no key
        if case.batch > 1:
            mask[0] = False
        tensors["attention_mask"] = mask
    if case.decay:
        tensors["log_decay"] = _random_decay(case, generator)
    if case.sequences:
        cuts = torch.randint(0, case.keys + 1, (case.sequences - 1,), generator=generator, device=device).sort().values
        cuts = torch.nn.functional.pad(cuts, (1, 1))
        cuts[-1] = case.keys
        tensors["cu_seqlens"] = cuts.int()
    if case.gate:
        tensors["log_input_gate"] = _random_gate(case, generator)
    return tensors


def token_major(x: Tensor) -> Tensor:
    """Returns x (b, h, n, d) in the memory layout (b, n, h, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def unaligned(x: Tensor) -> Tensor:
    """Returns x as columns of a wider tensor, whose rows do not start at multiples of 16 bytes."""
    return torch.nn.functional.pad(x, (1, 2))[..., 1:-2]


def packed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Returns q, k and v as slices of one tensor (b, n, h + 2 hk, d), or of two if n != m, as in a model's projections.

    Needs d == dv.
    """
    together = [(q, k, v)] if q.shape[2] == k.shape[2] else [(q,), (k, v)]
    slices = []
    for part in together:
        joint = torch.cat([x.transpose(1, 2) for x in part], dim=2)
        slices += [x.transpose(1, 2) for x in joint.split([x.shape[1] for x in part], dim=2)]
    return tuple(slices)


def _random_gate(case: Case, generator: torch.Generator) -> Tensor:
    """Returns gates (batch, kv heads, keys) of which most are within a factor of a hundred. Some are larger or very small."""
    shape, device = (case.batch, case.kv_heads, case.keys), generator.device
    gate = 2.0 * torch.randn(shape, generator=generator, dtype=torch.float64, device=device)
    kind = torch.rand(shape, generator=generator, dtype=torch.float64, device=device)
    gate = torch.where(kind < 0.05, -20.0, torch.where(kind > 0.98, 6.0, gate))
    return gate.to(torch.promote_types(case.dtype, torch.float32))


def _random_decay(case: Case, generator: torch.Generator) -> Tensor:
    """Returns decays (batch, kv heads, keys) with half-lives from one to 10,000 tokens. Some tokens have no decay or a reset.

    With padding the strongest decay is exp(-5): otherwise the keys that remain visible could all have weight 0 in float32.
    """
    shape, device = (case.batch, case.kv_heads, case.keys), generator.device
    rate = math.log(2.0) * 10.0 ** (-4.0 * torch.rand(*shape[:2], 1, generator=generator, dtype=torch.float64, device=device))
    gate, kind = (torch.rand(shape, generator=generator, dtype=torch.float64, device=device) for _ in range(2))
    log_decay = -rate * 2.0 * gate
    for begin, end, value in ((0.0, 0.1, 0.0), (0.1, 0.11, -5.0 if case.padding else -50.0), (0.11, 0.12, -math.inf)):
        if not (case.padding and value == -math.inf):
            log_decay = torch.where((kind >= begin) & (kind < end), value, log_decay)
    return log_decay.to(torch.promote_types(case.dtype, torch.float32))
