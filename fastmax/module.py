"""`FASTMultiHeadAttention`: fastmax attention as a module with defaults."""

from __future__ import annotations

from torch import Tensor, nn

from fastmax import validation
from fastmax.functional import fastmax_attention


class FASTMultiHeadAttention(nn.Module):
    """Fastmax attention on ready-made heads, in place of the softmax attention inside a transformer block.

    It has no weights: q, k and v come projected and split into heads. The constructor's keywords set defaults that `forward`
    may override; an argument of `forward` left out, or None, takes the module's. All are explained in
    `fastmax.fastmax_attention` (`mask` is its `causal`).
    """

    def __init__(
        self,
        use_custom_gradient: bool = True,
        *,
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
    ):
        super().__init__()
        if rpe_matrix not in (None, "sinusoidal"):
            raise TypeError(
                f'rpe_matrix must be "sinusoidal" or None here, got {type(rpe_matrix).__name__}; '
                "a matrix depends on the sequence length: pass it to forward"
            )
        validation.check_flag("mask", mask)
        validation.check_dropout(dropout)
        validation.check_normalize(normalize, lim)
        validation.check_score(temperature, a0, a1, a2, p)
        validation.check_algorithm(algorithm, rpe_matrix)
        self.use_custom_gradient = use_custom_gradient
        self.defaults = {
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
        }

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
        key_padding_mask: Tensor | None = None,
        algorithm: str | None = None,
    ) -> Tensor:
        """q (b, h, n, d), k (b, hk, m, d), v (b, hk, m, dv), or 3-d -> (b, h, n, dv), or 3-d. No noise in eval mode."""
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
        }
        options = {name: self.defaults[name] if value is None else value for name, value in given.items()}
        causal = options.pop("mask")
        validation.check_flag("mask", causal)
        if not self.training:
            options["dropout"], drop_noise = 0.0, None
        return fastmax_attention(
            q,
            k,
            v,
            causal=causal,
            drop_noise=drop_noise,
            key_padding_mask=key_padding_mask,
            use_custom_gradient=self.use_custom_gradient,
            **options,
        )

    def extra_repr(self) -> str:
        options = {"use_custom_gradient": self.use_custom_gradient, **self.defaults}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())
