"""`FASTMultiHeadAttention`: fastmax attention as a module without weights."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor, nn

from fastmax.core import other_arguments, validation
from fastmax.functional import fastmax_attention
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.tensors import cast_for_autocast

OPTIONS = (
    "rpe_matrix", "mask", "dropout", "normalize", "temperature", "a0", "a1", "a2", "lim", "p", "algorithm", "exact_window",
)  # fmt: skip
_DIMENSIONS = ("embed_dim", "num_heads", "d_model", "nhead", "head_dim", "kdim", "vdim")


class FASTMultiHeadAttention(nn.Module):
    """Calls `fastmax_attention` on q, k and v that are already projected and split into heads. It has no weights.

    The options are those of `fastmax.fastmax_attention`; its `causal` is `mask` here. The constructor sets defaults, which
    arguments of `forward` override unless they are None. Defaults are attributes, which each call reads and checks:
    `module.temperature = 3.0` takes effect in the next call.

    Raises:
        TypeError, ValueError: an argument is invalid, or a size is given, as in `FASTMultiHeadAttention(embed_dim, num_heads)`.
    """

    def __init__(
        self,
        use_custom_gradient: bool = True,
        *dimensions: object,
        rpe_matrix: str | None = None,
        mask: bool = False,
        dropout: float = 0.0,
        normalize: bool | str = False,
        temperature: float = 1.0,
        a0: float = 1.0,
        a1: float = 1.0,
        a2: float = 0.5,
        lim: float = 1.0,
        p: int = 2,
        algorithm: str = "auto",
        exact_window: int = 0,
        **others: object,
    ):
        super().__init__()
        if dimensions or not isinstance(use_custom_gradient, bool):
            _refuse_dimensions(", ".join(map(validation.describe, (use_custom_gradient, *dimensions))))
        if not others.keys().isdisjoint(_DIMENSIONS):
            _refuse_dimensions(", ".join(f"{name} = {validation.describe(value)}" for name, value in others.items()))
        if others:
            other_arguments.refuse("FASTMultiHeadAttention", others, causal="mask")
        validation.check_rpe_name(rpe_matrix, "a matrix depends on the number of tokens: pass it to forward")
        validation.check_flag("mask", mask)
        validation.check_not_negative("dropout", dropout)
        validation.check_normalize(normalize, validation.DEFAULT_LIM)
        validation.check_positive("lim", lim)
        validation.check_score(temperature, a0, a1, a2, p)
        validation.check_algorithm(algorithm, rpe_matrix)
        validation.check_exact_window(exact_window)
        self.use_custom_gradient = use_custom_gradient
        self.context: Any = None  # set by `fastmax.distributed.ContextParallel`
        self.rpe_matrix, self.mask, self.dropout = rpe_matrix, mask, dropout
        self.normalize, self.lim, self.temperature = normalize, lim, temperature
        self.a0, self.a1, self.a2, self.p = a0, a1, a2, p
        self.algorithm, self.exact_window = algorithm, exact_window

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        drop_noise: Tensor | None = None,
        rpe_matrix: Tensor | str | None = None,
        mask: bool | None = None,
        dropout: float | None = None,
        normalize: bool | str | None = None,
        temperature: float | None = None,
        a0: float | None = None,
        a1: float | None = None,
        a2: float | None = None,
        lim: float | None = None,
        p: int | None = None,
        *,
        attention_mask: Tensor | None = None,
        algorithm: str | None = None,
        log_decay: Tensor | None = None,
        log_input_gate: Tensor | None = None,
        exact_window: int | None = None,
        cu_seqlens: Tensor | None = None,
        return_lse: bool = False,
        **others: object,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Computes attention of q (b, h, n, d), k (b, hk, m, d) and v (b, hk, m, dv), or of 3-d tensors.

        Returns o (b, h, n, dv), or 3-d, in q's dtype; with `return_lse` also lse. Eval mode adds no noise, but checks `dropout`
        and `drop_noise` as training mode does. The module's `lim` applies to calls that normalize.
        """
        given = {
            "rpe_matrix": rpe_matrix,
            "mask": mask,
            "dropout": dropout,
            "normalize": normalize,
            "temperature": temperature,
            "a0": a0,
            "a1": a1,
            "a2": a2,
            "lim": lim,
            "p": p,
            "algorithm": algorithm,
            "exact_window": exact_window,
        }
        options: dict[str, Any] = {name: getattr(self, name) if value is None else value for name, value in given.items()}
        causal = options.pop("mask")
        if lim is None and options["normalize"] is False:
            options["lim"] = validation.DEFAULT_LIM
        context = sharded_dispatch.current() if self.context is None else self.context
        check = self._check if context is None else context.telling(self._check)
        check(others, q, k, v, causal, options["dropout"], drop_noise)
        if not self.training:
            options["dropout"], drop_noise = 0.0, None
        attention = fastmax_attention if self.context is None else self.context.attentions[0]
        return attention(
            q,
            k,
            v,
            causal=causal,
            drop_noise=drop_noise,
            attention_mask=attention_mask,
            use_custom_gradient=self.use_custom_gradient,
            log_decay=log_decay,
            log_input_gate=log_input_gate,
            cu_seqlens=cu_seqlens,
            return_lse=return_lse,
            **options,
        )

    def _check(
        self,
        others: dict[str, object],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        dropout: float,
        drop_noise: Tensor | None,
    ) -> None:
        """Checks arguments that the attention function does not see: unknown names, an unused `lim`, and noise in eval mode."""
        validation.check_positive("lim", self.lim)
        if others:
            other_arguments.refuse("FASTMultiHeadAttention.forward", others, causal="mask")
        validation.check_flag("mask", causal)
        if self.training:
            return
        strength = validation.check_not_negative("dropout", dropout)
        if drop_noise is not None:
            q, k, v = cast_for_autocast(q, k, v)
            validation.check_qkv(q, k, v, causal)
            validation.check_drop_noise(drop_noise, strength, q, v.shape[-1])

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in ("use_custom_gradient", *OPTIONS))


def _refuse_dimensions(given: str) -> NoReturn:
    raise TypeError(
        f"use_custom_gradient, a bool, is the only positional argument, got {given}: this module has no weights and takes no "
        "embed_dim or num_heads, but q, k and v of shape (batch, heads, tokens, head_dim). With projections: "
        "fastmax.integrations.mha.SwappedMultiheadAttention(nn.MultiheadAttention(embed_dim, num_heads)), or "
        "fastmax.swap_attention for a whole model"
    )
