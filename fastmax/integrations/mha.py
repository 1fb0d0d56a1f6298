"""`swap_attention`: fastmax in place of every `nn.MultiheadAttention` of a model."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from fastmax import ops
from fastmax.core import validation
from fastmax.integrations.tensors import is_same, queries_to_normalize
from fastmax.nn.multi_head_attention import OPTIONS, FASTMultiHeadAttention

_PARAMETERS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v")


def swap_attention(model: nn.Module, **options: Any) -> dict[str, nn.MultiheadAttention]:
    """Replaces every `nn.MultiheadAttention` in `model` by fastmax attention, in place and with the same Parameters.

    Keys of the state dict do not change. A module registered under several names stays one module. The fast path of
    `nn.TransformerEncoderLayer` and the nested tensors of `nn.TransformerEncoder` are switched off for layers with a
    replacement, because they would bypass it. An error leaves the model unchanged.

    Args:
        model: a module that contains `nn.MultiheadAttention`.
        options: options of `FASTMultiHeadAttention`, except `mask`: the masks of a call decide whether it is causal.
            `temperature` defaults to sqrt(head_dim), the scale of softmax attention. Fastmax has no attention weights to drop:
            a module whose `dropout` is not 0 is an error in training mode, now or when it is called. The option `dropout`
            replaces it by noise of this strength on the output; 0.0: none. `exact_window` and `rpe_matrix` do not apply to the
            cross-attention of an `nn.TransformerDecoderLayer`, whose queries and keys share no positions. Other modules refuse
            them in a call that is not causal and whose query and key are different tensors.

    Returns:
        The original modules by name. `model.set_submodule(name, original)` restores one.

    Raises:
        ValueError: `model` is an `nn.MultiheadAttention` itself, or contains none; a module in training mode has dropout, and
            the option `dropout` is not given.
        TypeError: a module has its own forward, a hook or a parametrization; an option is unknown.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {validation.describe(model)}")
    if isinstance(model, nn.MultiheadAttention):
        raise ValueError(
            "model is itself an nn.MultiheadAttention, which cannot be replaced in place: "
            "use fastmax.integrations.mha.SwappedMultiheadAttention(model, ...)"
        )
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.MultiheadAttention)
    }
    if not found:
        done = sum(isinstance(module, SwappedMultiheadAttention) for module in model.modules())
        raise ValueError(
            f"model ({type(model).__name__}) has no nn.MultiheadAttention left: {done} are already swapped"
            if done
            else f"model ({type(model).__name__}) holds no torch.nn.MultiheadAttention, the only class that is swapped: call "
            "fastmax.fastmax_attention in the forward of other attention classes (docs/swapping.md, also for Hugging Face "
            "transformers)"
        )
    for name, module in found.items():
        _check_swappable(name, module)
        if module.training and "dropout" not in options:
            _refuse_dropout(f"cannot swap {name!r}", module.dropout)
    unique = {id(module): module for module in found.values()}
    of_decoders = {id(x.multihead_attn) for x in model.modules() if isinstance(x, nn.TransformerDecoderLayer)}
    across = {name: value for name, value in options.items() if name not in validation.OF_POSITIONS}  # of cross-attention
    replacements = {
        key: SwappedMultiheadAttention(module, **(across if key in of_decoders else options)) for key, module in unique.items()
    }
    for name, module in found.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, replacements[id(module)])
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(
            isinstance(module, SwappedMultiheadAttention) for module in encoder.modules()
        ):
            encoder.use_nested_tensor = False
    return found


class SwappedMultiheadAttention(nn.Module):
    """Fastmax attention with the interface and the Parameters of an `nn.MultiheadAttention`.

    `swap_attention` creates it and documents the options. They are attributes of the inner module:
    `swapped.attention.temperature = 3.0`. `dropout` is that of `original`, or 0.0 with the option `dropout`; training mode
    accepts only 0. The Parameters and `out_proj` are shared with `original`.
    """

    def __init__(self, original: nn.MultiheadAttention, **options: Any):
        super().__init__()
        _check_swappable("original", original)
        for name in ("mask", "causal"):
            if name in options:
                raise TypeError(f"{name} is not an option here: attn_mask and is_causal decide whether a call is causal")
        self.embed_dim, self.kdim, self.vdim = original.embed_dim, original.kdim, original.vdim
        self.num_heads, self.head_dim = original.num_heads, original.head_dim
        self.batch_first = original.batch_first
        self.add_zero_attn = original.add_zero_attn
        self.dropout = 0.0 if "dropout" in options else original.dropout  # of attention weights; training mode accepts only 0
        # False disables the fast path of nn.TransformerEncoderLayer, a fused softmax kernel on the weights of its self_attn.
        self._qkv_same_embed_dim = False
        for name in _PARAMETERS:
            self.register_parameter(name, getattr(original, name))
        self.out_proj = original.out_proj
        self.attention = FASTMultiHeadAttention(**{"temperature": math.sqrt(self.head_dim), **options})
        self.train(original.training)

    def __setattr__(self, name: str, value: object) -> None:
        if name in OPTIONS and name != "dropout":
            raise AttributeError(f"{name} is an attribute of the module inside: set attention.{name} = {value!r}")
        super().__setattr__(name, value)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Computes attention as `nn.MultiheadAttention.forward` does, with restricted masks and without attention weights.

        Args:
            query: (b, n, embed_dim) with batch_first, else (n, b, embed_dim), or unbatched (n, embed_dim).
            key, value: (b, m, kdim) and (b, m, vdim), with the axis order of query.
            key_padding_mask: (b, m), or (m,) unbatched: bool, True = ignore the key; or float, 0 = keep and -inf = ignore.
                For a query without keys the attention returns 0 (softmax returns NaN).
            need_weights: the returned weights are always None. True: `attn_mask` is read even if `is_causal` describes it.
            average_attn_weights: without effect.
            attn_mask: (n, m) or (b * heads, n, m), bool (True = blocked) or float (0 or -inf). It must be all visible or
                causal: query i sees keys up to i (PyTorch's alignment) or up to i + m - n (aligned at the end). The check
                reads the mask; `is_causal=True` with n == m and `need_weights=False` skips it.
            is_causal: the attention is causal, aligned at the start. As in PyTorch it is a hint that `attn_mask` is the causal
                mask, trusted without `need_weights` if n == m. Unlike in PyTorch, `attn_mask` may be omitted.

        Returns:
            (output with the axis order of query, None).

        Raises:
            ValueError: a mask or a shape is not supported, a causal mask has n > m, or `exact_window` or `rpe_matrix` meets
                cross-attention.
            TypeError: a mask has another dtype, or tensors are nested.
        """
        _check_layout(query, key, value)
        self._check_inputs(query, key, value)
        if self.training:
            _refuse_dropout("attention in training mode", self.dropout)
        unbatched = query.dim() == 2
        q, k, v = self._project(query, key, value)
        if unbatched:
            q, k, v = q[None], k[None], v[None]
            if key_padding_mask is not None:
                _check_mask("key_padding_mask", key_padding_mask)
                key_padding_mask = key_padding_mask[None]
        layout = "b n (h d)" if unbatched or self.batch_first else "n b (h d)"
        q, k, v = (rearrange(x, f"{layout} -> b h n d", h=self.num_heads) for x in (q, k, v))

        b, h, n, _ = q.shape
        m = k.shape[2]
        takes_part = None if key_padding_mask is None else _keys_taking_part(key_padding_mask, b, m)
        reach = _causal_reach(attn_mask, is_causal, not need_weights, b * h, n, m)
        itself = is_same(query, key)  # self-attention
        if reach is None and not itself:
            self._refuse_options_of_positions()
        if itself:
            q = queries_to_normalize(q, takes_part, self.attention.normalize)
        if reach is not None and reach < m:
            k, v = k[:, :, :reach], v[:, :, :reach]
            takes_part = takes_part if takes_part is None else takes_part[:, :reach]
        k, v, takes_part = self._prepend_extra_keys(k, v, takes_part)

        o = self.attention(q, k, v, mask=reach is not None, attention_mask=takes_part)
        o = self.out_proj(rearrange(o, f"b h n d -> {layout}"))
        return (o[0] if unbatched else o), None

    def _refuse_options_of_positions(self) -> None:
        for name, default in validation.OF_POSITIONS.items():
            value = getattr(self.attention, name)
            if value != default:
                raise ValueError(
                    f"{name} compares positions within a sequence, but query and key are different tensors (cross-attention), "
                    f"got {name} = {value!r}: set attention.{name} = {default!r} in this module, or pass one tensor as both"
                )

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        widths = self.embed_dim, self.kdim, self.vdim
        for name, x, width in zip(("query", "key", "value"), (query, key, value), widths, strict=True):
            if x.shape[-1] != width:
                raise ValueError(f"{name} must have {width} channels, got shape {tuple(x.shape)}")
            if x.device != weight.device:
                raise ValueError(f"{name} must be on the device of the weights {weight.device}, got {x.device}")
            if x.dtype != weight.dtype and not ops.in_autocast(x):
                raise TypeError(f"{name} must have the dtype of the weights {weight.dtype}, got {x.dtype}")

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of width embed_dim. One matrix product computes all three if they share their input."""
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and query is key and key is value:
            return F.linear(query, self.in_proj_weight, bias).chunk(3, dim=-1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(F.linear(x, w, c) for x, w, c in zip((query, key, value), weights, biases, strict=True))

    def _prepend_extra_keys(self, k: Tensor, v: Tensor, takes_part: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Prepends the keys of add_bias_kv and add_zero_attn. Every query sees them: a causal mask is aligned at the end."""
        extra = []
        if self.bias_k is not None:
            extra.append(tuple(rearrange(x, "1 1 (h d) -> 1 h 1 d", h=self.num_heads) for x in (self.bias_k, self.bias_v)))
        if self.add_zero_attn:
            extra.append((k.new_zeros(1, 1, 1, 1), v.new_zeros(1, 1, 1, 1)))
        for bias_k, bias_v in extra:
            b, h, _, d = k.shape
            k = torch.cat((bias_k.to(k.dtype).expand(b, h, 1, d), k), dim=2)
            v = torch.cat((bias_v.to(v.dtype).expand(b, h, 1, d), v), dim=2)
        if takes_part is not None and extra:
            takes_part = F.pad(takes_part, (len(extra), 0), value=True)
        return k, v, takes_part

    def extra_repr(self) -> str:
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, batch_first={self.batch_first}"


def _check_swappable(name: str, module: nn.MultiheadAttention) -> None:
    """Raises a TypeError unless the module is a plain `nn.MultiheadAttention`, without hooks or a forward of its own."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} must be an nn.MultiheadAttention, got {validation.describe(module)}")
    hooks = [key for key, value in vars(module).items() if key.endswith("_hooks") and value]
    if type(module) is not nn.MultiheadAttention:
        reason = f"is a {type(module).__name__}, not an nn.MultiheadAttention itself (a subclass or a parametrized one)"
    elif "forward" in vars(module):
        reason = "has a forward of its own, set on the instance"
    elif hooks:
        reason = f"has {', '.join(hooks)}, which would be lost: remove them, and register them on the replacement"
    else:
        return
    raise TypeError(f"cannot swap {name!r}: it {reason}")


def _refuse_dropout(subject: str, dropout: float) -> None:
    if dropout:
        raise ValueError(
            f"{subject}: fastmax has no attention weights to drop, got dropout = {dropout}: set the dropout of the module to "
            "0.0, or swap with the option dropout, the strength of fastmax's noise on the output (0.0: none)"
        )


def _check_layout(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {validation.describe(x)}")
    if query.is_nested or key.is_nested or value.is_nested:
        raise TypeError(
            "query, key and value must not be nested tensors: pass padded ones with key_padding_mask "
            "(in an nn.TransformerEncoder: set its use_nested_tensor to False, as swap_attention does)"
        )
    dims = query.dim(), key.dim(), value.dim()
    if dims not in ((2, 2, 2), (3, 3, 3)):
        raise ValueError(f"query, key and value must be all 3-d, or all 2-d (unbatched), got {dims} dimensions")


def _keys_taking_part(key_padding_mask: Tensor, b: int, m: int) -> Tensor:
    """Returns the attention_mask (True = attended) for PyTorch's key_padding_mask (True or -inf = ignored)."""
    _check_mask("key_padding_mask", key_padding_mask)
    if tuple(key_padding_mask.shape) != (b, m):
        raise ValueError(
            f"key_padding_mask must have shape (batch, keys) = ({b}, {m}), or (keys,) for unbatched input, "
            f"got {tuple(key_padding_mask.shape)}"
        )
    return ~_blocked("key_padding_mask", key_padding_mask)


def _check_mask(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a tensor or None, got {validation.describe(mask)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be bool (True = blocked) or floating point (0 or -inf), got {mask.dtype}")


def _blocked(name: str, mask: Tensor) -> Tensor:
    """Returns a mask of bool (True = blocked), or of floats 0 and -inf, as a bool mask."""
    if mask.dtype == torch.bool:
        return mask
    blocked = mask == -math.inf
    message = f"{name} must hold 0 and -inf only: fastmax adds nothing to its scores"
    only_known = (blocked | (mask == 0)).all()
    if torch.compiler.is_compiling():
        validation.check_in_graph(only_known, message)  # reading the value would break the graph
    elif not only_known:
        other = mask[~blocked & (mask != 0)][0].item()
        raise ValueError(f"{message}, got {other:g}")
    return blocked


def _causal_reach(attn_mask: Tensor | None, is_causal: bool, trusts_hint: bool, batch_heads: int, n: int, m: int) -> int | None:
    """Returns the number of leading keys on which attention is causal, aligned at the end; None: not causal.

    Args:
        trusts_hint: whether `is_causal` with n == m is believed without reading the mask.
    """
    validation.check_bool("is_causal", is_causal)
    if attn_mask is not None:
        _check_mask("attn_mask", attn_mask)
    if attn_mask is not None and tuple(attn_mask.shape) not in ((n, m), (batch_heads, n, m)):
        raise ValueError(
            f"attn_mask must have shape (queries, keys) = ({n}, {m}) or (batch * heads, queries, keys) = "
            f"({batch_heads}, {n}, {m}), got {tuple(attn_mask.shape)}"
        )
    if attn_mask is None or (is_causal and n == m and trusts_hint):
        return _start_aligned(n, m) if is_causal else None
    blocked = _blocked("attn_mask", attn_mask)
    if is_causal and n == m:
        agrees = (blocked == _causally_blocked(blocked, 1)).all()
        message = "attn_mask must be the causal mask, aligned at the start, where is_causal is True"
        if torch.compiler.is_compiling():
            validation.check_in_graph(agrees, message)  # reading the value would break the graph
        elif not agrees:
            raise ValueError(f"{message}, got shape {tuple(attn_mask.shape)} with {int(blocked.sum())} blocked")
        return n
    if not blocked.any():
        return None
    if torch.equal(blocked, _causally_blocked(blocked, 1)):
        return _start_aligned(n, m)
    if n < m and torch.equal(blocked, _causally_blocked(blocked, 1 + m - n)):
        return m
    raise ValueError(
        f"attn_mask is neither all visible nor the causal mask, got shape {tuple(attn_mask.shape)} with "
        f"{int(blocked.sum())} blocked: fastmax does not support arbitrary masks. Mark keys that no query of a sequence may "
        "see in key_padding_mask"
    )


def _causally_blocked(like: Tensor, diagonal: int) -> Tensor:
    """Returns which keys a causal mask hides, of the shape of `like`: those from this diagonal on."""
    return torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).triu(diagonal).expand_as(like)


def _start_aligned(n: int, m: int) -> int:
    """Returns n: with PyTorch's alignment no query sees keys from n on, and without them both alignments agree."""
    if n > m:
        raise ValueError(f"causal attention takes at most as many queries as keys, got {n} queries and {m} keys")
    return n
