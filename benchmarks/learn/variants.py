"""The variants that are compared: attention layers of the examples' GPT."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastmax
from benchmarks import peers
from benchmarks.learn import memories
from benchmarks.learn.examples import model

SAME_SIZE = 0.02
SLOW = {"longest_half_life": 65536.0}
KEPT = {"kept_keys": 256}
NOPE = model.WITHOUT_DECAY | {"rope": False}
PLAIN = {"decay": False, "output_norm": False, "conv": 0, "output_gate": False}


@dataclass(frozen=True)
class Variant:
    title: str
    attention: str = "fastmax"
    parts: dict = field(default_factory=dict)  # keywords of FastmaxSelfAttention; others have their defaults
    window: bool = True  # whether fastmax has an exact window
    near: bool = False  # whether softmax sees only the keys within the window
    wide: bool = False  # whether there are half as many heads, each twice as wide
    steady: bool = False  # whether half of the heads hardly decay at first, and the others have half-lives of up to 1024 tokens
    heads: int = 0  # number of heads, of the widths in `parts`; 0: that of the setting
    every: int = 0  # as in GPTConfig
    softmax_layers: tuple[int, ...] = ()  # indices of the blocks whose attention is softmax, in place of `every`
    softmax_parts: dict = field(default_factory=dict)  # as in GPTConfig
    steady_softmax: bool = False  # whether `steady` is meant for the layers of `every` alone
    sdpa: bool = False  # whether PyTorch's kernels compute softmax; they have no decays
    layers: dict[str, Callable] = field(default_factory=dict)  # attention -> what replaces FastmaxSelfAttention
    fla: str = ""  # name of a layer of flash-linear-attention, which replaces FastmaxSelfAttention
    fla_options: dict = field(default_factory=dict)
    every_other: bool = False  # whether layers 0, 2, ... are softmax within the window, with rotary positions
    tuning: float = 0.0  # seconds of Triton's autotuning before the first step, once per machine
    as_large_as: str = ""  # a variant whose model has the same number of weights, within SAME_SIZE

    @property
    def missing(self) -> str:
        return peers.missing(f"fla.layers.{self.fla}") if self.fla else ""

    @property
    def compiles(self) -> bool:
        return not self.fla  # the code around its Triton kernels is not written for the compiler


VARIANTS = {
    "softmax": Variant("softmax", "softmax", PLAIN),
    "softmax_parts": Variant("softmax, same parts", "softmax", as_large_as="p2_all"),
    "p2": Variant("p = 2", parts=PLAIN, window=False, as_large_as="softmax"),
    "p2_decay": Variant("p = 2, decay", parts=PLAIN | {"decay": True}, window=False),
    "p2_window": Variant("p = 2, exact window", parts=PLAIN),
    "p2_all": Variant("p = 2, all parts"),
    "p1_all": Variant("p = 1, all parts", parts={"p": 1}, as_large_as="p2_all"),
    "hybrid": Variant("p = 2, all parts; softmax in every fourth layer", every=4, as_large_as="p2_all"),
    "hybrid_third": Variant(
        "p = 2, all parts; softmax (`flash_attention`) without decay in every third layer",
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
    ),
    "hybrid_early": Variant("p = 2, all parts; softmax in layers 2 and 6 of 8", softmax_layers=(1, 5), as_large_as="p2_all"),
    "hybrid_middle": Variant("p = 2, all parts; softmax in every third layer", every=3, as_large_as="p2_all"),
    "hybrid_one": Variant("p = 2, all parts; softmax in layer 3 of 8", softmax_layers=(2,), as_large_as="p2_all"),
    "p2_wide": Variant("p = 2, all parts, half as many heads", wide=True, as_large_as="p2_all"),
    "softmax_wide": Variant("softmax, same parts, half as many heads", "softmax", wide=True, as_large_as="p2_all"),
    "p2_slow": Variant("p = 2, all parts, half-lives to 64k", parts=SLOW),
    "p2_slower": Variant("p = 2, all parts, half-lives from 128 to 64k", parts=SLOW, layers={"fastmax": memories.SlowDecays}),
    "p2_wide_slower": Variant(
        "p = 2, all parts, half as many heads, half-lives from 128 to 64k",
        parts=SLOW,
        wide=True,
        layers={"fastmax": memories.SlowDecays},
    ),
    "p2_steady": Variant("p = 2, all parts, half of the heads without decay at first", steady=True),
    "p2_wide_steady": Variant(
        "p = 2, all parts, half as many heads, half of them without decay at first", wide=True, steady=True
    ),
    "softmax_without_decay": Variant("softmax, same parts except decay", "softmax", {"decay": False}, as_large_as="p2_all"),
    "softmax_steady": Variant(
        "softmax, same parts, half of the heads without decay at first", "softmax", steady=True, as_large_as="p2_all"
    ),
    "softmax_slow": Variant("softmax, same parts, half-lives to 64k", "softmax", SLOW, as_large_as="p2_slow"),
    # All parts except one. Without global keys there is no polynomial: this is softmax within the window.
    "softmax_near": Variant("without global keys: softmax within the window", "softmax", near=True, as_large_as="p2_all"),
    "p2_without_decay": Variant("without decay", parts={"decay": False}),
    "p2_without_window": Variant("without exact window", window=False),
    "p2_without_output_norm": Variant("without norm of the output", parts={"output_norm": False}),
    "p2_without_conv": Variant("without convolution", parts={"conv": 0}),
    "p2_without_gate": Variant("without output gate", parts={"output_gate": False}),
    "p2_without_qk_norm": Variant("without norm of q and k", parts={"qk_norm": False}),
    "p2_without_rope": Variant("without rotary positions", parts={"rope": False}),
    "p2_near_256": Variant("p = 2, all parts, exact window of 256", parts={"exact_window": 256}),
    "p2_near_384": Variant("p = 2, all parts, exact window of 384", parts={"exact_window": 384}),
    # Prototypes, which weigh or store the keys beyond the window in other ways
    "parts_of_p2": Variant("p = 2, all parts, as prototypes compute it", layers={"fastmax": memories.Memory}),
    "gate": Variant("input gate", layers={"fastmax": memories.InputGate}),
    "gate_without_decay": Variant("input gate, without decay", parts={"decay": False}, layers={"fastmax": memories.InputGate}),
    "gate_slow": Variant("input gate, half-lives to 64k", parts=SLOW, layers={"fastmax": memories.InputGate}),
    "hybrid_gate": Variant("input gate; softmax in every fourth layer", every=4, layers={"fastmax": memories.InputGate}),
    "softmax_gate": Variant("softmax, same parts, input gate", "softmax", layers={"softmax": memories.GatedSoftmax}),
    "gate_wide": Variant("input gate, half as many heads", wide=True, layers={"fastmax": memories.InputGate}),
    "gate_values": Variant(
        "input gate, 5 heads of keys 64, values 128",
        parts={"head_dim": 64, "value_dim": 128},
        heads=5,
        layers={"fastmax": memories.InputGate},
    ),
    "gate_bound_4": Variant("input gate, bound 4", layers={"fastmax": partial(memories.InputGate, bound=4.0)}),
    "gate_bound_16": Variant("input gate, bound 16", layers={"fastmax": partial(memories.InputGate, bound=16.0)}),
    "gate_unbounded": Variant("input gate, no bound", layers={"fastmax": partial(memories.InputGate, shape=memories.no_bound)}),
    "gate_sigmoid": Variant(
        "input gate, sigmoid, bias 4 at first",
        layers={"fastmax": partial(memories.InputGate, shape=memories.sigmoid_bound, initial=4.0)},
    ),
    "gate_low": Variant("input gate, bias -2 at first", layers={"fastmax": partial(memories.InputGate, initial=-2.0)}),
    "gate_high": Variant("input gate, bias 2 at first", layers={"fastmax": partial(memories.InputGate, initial=2.0)}),
    "gate_polynomial": Variant("input gate, learned a0, a1, a2", layers={"fastmax": memories.LearnedPolynomial}),
    "gate_unrotated": Variant("input gate, far keys without rotation", layers={"fastmax": memories.UnrotatedFarKeys}),
    "delta_values": Variant("input gate, values of the delta rule", layers={"fastmax": memories.DeltaValues}),
    "delta_values_in_chunks": Variant(
        "input gate, values of the delta rule within 128 tokens",
        layers={"fastmax": partial(memories.DeltaValues, carries=False)},
    ),
    "softmax_delta_in_chunks": Variant(
        "softmax, same parts, values of the delta rule within 128 tokens",
        "softmax",
        layers={"softmax": partial(memories.SoftmaxOfDeltaValues, carries=False)},
    ),
    "delta": Variant("window, delta rule on second-order features", layers={"fastmax": memories.DeltaMemory}),
    "delta_keys": Variant(
        "window, delta rule on keys", layers={"fastmax": partial(memories.DeltaMemory, features=memories.first_order)}
    ),
    "kept": Variant("input gate, 256 keys kept by gate", layers={"fastmax": memories.KeptKeys}),
    "kept_256": Variant(
        "input gate, 256 keys kept by gate for 256 queries", layers={"fastmax": partial(memories.KeptKeys, block=256)}
    ),
    "kept_steady": Variant(
        "input gate, 256 keys kept by gate for 256 queries, without decay",
        layers={"fastmax": partial(memories.KeptKeys, block=256, fades=False)},
    ),
    "kept_wide": Variant(
        "input gate, 256 keys kept by gate for 256 queries, half as many heads",
        wide=True,
        layers={"fastmax": partial(memories.KeptKeys, block=256)},
    ),
    "kept_steady_512": Variant(
        "input gate, 512 keys kept by gate for 256 queries, without decay",
        layers={"fastmax": partial(memories.KeptKeys, kept=512, block=256, fades=False)},
    ),
    "kept_steady_wide": Variant(
        "input gate, 256 keys kept by gate for 256 queries, without decay, half as many heads",
        wide=True,
        layers={"fastmax": partial(memories.KeptKeys, block=256, fades=False)},
    ),
    "hybrid_kept_steady": Variant(
        "input gate, 256 keys kept by gate for 256 queries, without decay; softmax in every third layer",
        every=3,
        layers={"fastmax": partial(memories.KeptKeys, block=256, fades=False)},
    ),
    "kept_keys": Variant("p = 2, all parts, 256 kept keys", parts=KEPT),
    "kept_keys_wide": Variant("p = 2, all parts, 256 kept keys, half as many heads", parts=KEPT, wide=True),
    "kept_keys_wide_128": Variant(
        "p = 2, all parts, 128 kept keys, half as many heads", parts=KEPT | {"kept_keys": 128}, wide=True
    ),
    "kept_keys_steady": Variant(
        "p = 2, all parts, 256 kept keys, half of the heads without decay at first", parts=KEPT, steady=True
    ),
    "kept_keys_wide_steady": Variant(
        "p = 2, all parts, 256 kept keys, half as many heads, half of them without decay at first",
        parts=KEPT,
        wide=True,
        steady=True,
    ),
    "kept_keys_wide_steady_1024": Variant(
        "p = 2, all parts, 1024 kept keys, half as many heads, half of them without decay at first",
        parts=KEPT | {"kept_keys": 1024},
        wide=True,
        steady=True,
    ),
    "kept_keys_wide_steady_2048": Variant(
        "p = 2, all parts, 2048 kept keys, half as many heads, half of them without decay at first",
        parts=KEPT | {"kept_keys": 2048},
        wide=True,
        steady=True,
    ),
    "kept_keys_512": Variant("p = 2, all parts, 512 kept keys", parts=KEPT | {"kept_keys": 512}),
    "kept_keys_wide_1024": Variant(
        "p = 2, all parts, 1024 kept keys, half as many heads", parts=KEPT | {"kept_keys": 1024}, wide=True
    ),
    "hybrid_kept_keys": Variant(
        "p = 2, all parts, 256 kept keys; softmax in every third layer",
        parts=KEPT,
        every=3,
        as_large_as="p2_all",
    ),
    "hybrid_kept_keys_steady": Variant(
        "p = 2, all parts, 256 kept keys, half of the heads without decay at first; softmax in every third layer",
        parts=KEPT,
        every=3,
        steady=True,
        as_large_as="p2_all",
    ),
    "hybrid_nope": Variant(
        "p = 2, all parts; softmax without decay, rotation (SDPA) in every third layer",
        every=3,
        softmax_parts=NOPE,
        sdpa=True,
    ),
    "hybrid_kept_keys_nope": Variant(
        "p = 2, all parts, 256 kept keys; softmax without decay, rotation (SDPA) in every third layer",
        parts=KEPT,
        every=3,
        softmax_parts=NOPE,
        sdpa=True,
    ),
    "hybrid_kept_keys_nope_256": Variant(
        "p = 2, all parts, 256 kept keys, exact window of 256; softmax without decay, rotation (SDPA) in every third layer",
        parts=KEPT | {"exact_window": 256},
        every=3,
        softmax_parts=NOPE,
        sdpa=True,
    ),
    "hybrid_kept_keys_nope_steady": Variant(
        "p = 2, all parts, 256 kept keys, half of the heads without decay at first; "
        "softmax without decay, rotation (SDPA) in every third layer",
        parts=KEPT,
        every=3,
        softmax_parts=NOPE,
        steady=True,
        sdpa=True,
    ),
    "hybrid_kept_keys_256": Variant(
        "p = 2, all parts, 256 kept keys, exact window of 256; softmax in every third layer",
        parts=KEPT | {"exact_window": 256},
        every=3,
    ),
    "hybrid_sdpa": Variant(
        "p = 2, all parts; softmax without decay (SDPA) in every third layer",
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_256": Variant(
        "p = 2, all parts, exact window of 256; softmax without decay (SDPA) in every third layer",
        parts={"exact_window": 256},
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_384": Variant(
        "p = 2, all parts, exact window of 384; softmax without decay (SDPA) in every third layer",
        parts={"exact_window": 384},
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_early": Variant(
        "p = 2, all parts; softmax without decay (SDPA) in layers 2 and 6 of 8",
        softmax_layers=(1, 5),
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_gate": Variant(
        "p = 2, all parts, input gate; softmax without decay (SDPA) in every third layer",
        parts={"input_gate": True},
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_wide": Variant(
        "p = 2, all parts, half as many heads; softmax without decay (SDPA) in every third layer",
        wide=True,
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_sdpa_gate_wide": Variant(
        "p = 2, all parts, input gate, half as many heads; softmax without decay (SDPA) in every third layer",
        parts={"input_gate": True},
        wide=True,
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_kept_keys_sdpa": Variant(
        "p = 2, all parts, 256 kept keys; softmax without decay (SDPA) in every third layer",
        parts=KEPT,
        every=3,
        softmax_parts=model.WITHOUT_DECAY,
        sdpa=True,
    ),
    "hybrid_steady": Variant(
        "p = 2, all parts; softmax in every third layer, half of its heads without decay at first",
        every=3,
        steady_softmax=True,
        as_large_as="p2_all",
    ),
    "hybrid_steady_gate_wide": Variant(
        "p = 2, all parts, input gate, half as many heads; "
        "softmax in every third layer, half of its heads without decay at first",
        parts={"input_gate": True},
        wide=True,
        every=3,
        steady_softmax=True,
    ),
    "hybrid_early_gate_wide": Variant(
        "p = 2, all parts, input gate, half as many heads; softmax in layers 2 and 6 of 8",
        parts={"input_gate": True},
        wide=True,
        softmax_layers=(1, 5),
    ),
    "hybrid_kept_keys_steady_softmax": Variant(
        "p = 2, all parts, 256 kept keys; softmax in every third layer, half of its heads without decay at first",
        parts=KEPT,
        every=3,
        steady_softmax=True,
        as_large_as="p2_all",
    ),
    "kept_alone": Variant(
        "window, 256 keys kept by gate, no polynomial", layers={"fastmax": partial(memories.KeptKeys, polynomial=False)}
    ),
    "kept_residual": Variant(
        "input gate, 256 keys kept by the delta rule's residual", layers={"fastmax": memories.KeptByResidual}
    ),
    "blocks": Variant("8 blocks of 64 by mass exact", layers={"fastmax": memories.ExactBlocks}),
    "hybrid_blocks": Variant(
        "hybrid, 8 blocks of 64 by mass in its softmax layers",
        every=4,
        layers={"softmax": partial(memories.ChosenBlocks, near_keys=128)},
    ),
    "hybrid_blocks_exp": Variant(
        "hybrid, 8 blocks of 64 by softmax weight in its softmax layers",
        every=4,
        layers={"softmax": partial(memories.ChosenBlocks, near_keys=128, by=memories.softmax_weight_of_blocks)},
    ),
    "hybrid_blocks_mean": Variant(
        "hybrid, 8 blocks of 64 by mean key in its softmax layers",
        every=4,
        layers={"softmax": partial(memories.ChosenBlocks, near_keys=128, by=memories.score_of_mean_key)},
    ),
    # Softmax by PyTorch's kernels
    "softmax_sdpa": Variant("softmax (SDPA)", "softmax", PLAIN, sdpa=True),
    "softmax_parts_sdpa": Variant("softmax, same parts except decay (SDPA)", "softmax", {"decay": False}, sdpa=True),
    # 5 width^2 weights per layer, as in p2_all, with the authors' proportions: values are twice as wide as keys
    "fla_gla": Variant(
        "GLA (FLA)",
        fla="GatedLinearAttention",
        fla_options={"num_heads": 5, "expand_k": 0.625, "expand_v": 1.25, "use_short_conv": True},
        tuning=225.0,
        as_large_as="p2_all",
    ),
    "fla_gdn": Variant(
        "Gated DeltaNet (FLA)",
        fla="GatedDeltaNet",
        fla_options={"num_heads": 5, "head_dim": 64, "expand_v": 2.0},
        tuning=225.0,
        as_large_as="p2_all",
    ),
    # 4 width^2 weights per layer, as in p2: it has no gate. Its polynomial is that of p = 2 with heads of 64, softmax's scale,
    # and q and k as projected. The layer has no positions, so alone it learns little more than the frequencies of bytes. Based
    # (Arora et al., 2024, arXiv:2402.18668) alternates such layers with softmax within a window, which has positions.
    "fla_based_window": Variant(
        "Based, every other layer softmax within the window (FLA)",
        fla="BasedLinearAttention",
        fla_options={"num_heads": 8, "num_key_value_heads": 8, "feature_dim": 64},
        every_other=True,
        as_large_as="p2",
    ),
}


def make_gpt(variant: Variant, window: int, **sizes) -> model.GPT:
    """Returns the GPT of a variant.

    Args:
        variant: the variant.
        window: the window of variants that have one.
        sizes: keywords of GPTConfig.

    Raises:
        ValueError: the number of weights differs from that of the variant `as_large_as`.
    """
    gpt = _make_gpt(variant, window, sizes)
    if variant.as_large_as:
        with torch.device("meta"):
            other = parameters(_make_gpt(VARIANTS[variant.as_large_as], window, sizes))
        if not abs(parameters(gpt) / other - 1) <= SAME_SIZE:
            raise ValueError(f"{variant.title} has {parameters(gpt)} weights, {variant.as_large_as} {other}")
    return gpt


def _make_gpt(variant: Variant, window: int, sizes: dict) -> model.GPT:
    parts = dict(variant.parts)
    if variant.attention == "fastmax":
        parts.setdefault("exact_window", window if variant.window else 0)
    if variant.near:
        parts["window"] = window
    if variant.wide:
        sizes = sizes | {"n_head": sizes["n_head"] // 2}
    if variant.heads:
        sizes = sizes | {"n_head": variant.heads}
    steady = {"longest_half_life": 1024.0, "steady_heads": sizes["n_head"] // 2}
    if variant.steady:
        parts |= steady
    own = {"parts": parts, "softmax_parts": variant.softmax_parts | (steady if variant.steady_softmax else {})}
    config = model.GPTConfig(**sizes, attention=variant.attention, every=variant.every, **own)
    if variant.fla:
        near = replace(config, attention="softmax", parts=PLAIN | {"window": window})

        def make_layer(config: model.GPTConfig, index: int) -> nn.Module:
            return model.make_layer(near, index) if variant.every_other and index % 2 == 0 else FLALayer(variant, config)

        return model.GPT(config, make_layer)
    return model.GPT(config, partial(_layer_at, variant))


def _layer_at(variant: Variant, config: model.GPTConfig, index: int) -> nn.Module:
    if index in variant.softmax_layers:
        config = replace(config, every=1)
    return model.make_layer(config, index, layer=partial(_layer, variant))


def _layer(variant: Variant, *sizes: int, attention: str, **parts) -> fastmax.FastmaxSelfAttention:
    layers = {"softmax": SDPASelfAttention} if variant.sdpa else variant.layers
    return layers.get(attention, fastmax.FastmaxSelfAttention)(*sizes, attention=attention, **parts)


def parameters(module: nn.Module) -> int:
    return sum(x.numel() for x in module.parameters())


class SDPASelfAttention(fastmax.FastmaxSelfAttention):
    """FastmaxSelfAttention whose softmax is computed by `scaled_dot_product_attention`, the fastest softmax available.

    It has no decays. Weights and everything around attention are those of FastmaxSelfAttention.
    """

    def __init__(self, *sizes: int, **options):
        super().__init__(*sizes, **options)
        if self.attention != "softmax" or self.decay_proj is not None or self.window is not None:
            raise ValueError("scaled_dot_product_attention is softmax over all keys: it has no decay and no window")

    def forward(self, x: Tensor, state: None = None, *, cu_seqlens: None = None, attention_mask: None = None) -> Tensor:
        if any(given is not None for given in (state, cu_seqlens, attention_mask)):
            raise ValueError("this layer takes whole sequences alone")
        q, k, v, _ = self._heads(x, None, None, None)
        return self._output(F.scaled_dot_product_attention(q, k, v, is_causal=True), x)


class FLALayer(nn.Module):
    """A layer of flash-linear-attention.

    Its matrices are initialised as those of the GPT around it, its biases with 0, as in FLA's models. Other parameters
    (convolutions, decays) keep the layer's initialisation.
    """

    def __init__(self, variant: Variant, config: model.GPTConfig):
        super().__init__()
        import fla.layers

        self.layer = getattr(fla.layers, variant.fla)(hidden_size=config.n_embd, **variant.fla_options)
        for name, module in self.layer.named_modules():
            if isinstance(module, nn.Linear):
                into_residual = 1 / math.sqrt(2 * config.n_layer) if name == "o_proj" else 1.0
                nn.init.normal_(module.weight, std=0.02 * into_residual)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError("this layer takes whole sequences alone")
        y = self.layer(x)
        return y[0] if isinstance(y, tuple) else y


def fastest_softmax() -> object:
    """Returns a context in which `scaled_dot_product_attention` prefers cuDNN's kernel, then FlashAttention."""
    backend = torch.nn.attention.SDPBackend
    order = [backend.CUDNN_ATTENTION, backend.FLASH_ATTENTION, backend.EFFICIENT_ATTENTION, backend.MATH]
    return torch.nn.attention.sdpa_kernel(order, set_priority=True)
