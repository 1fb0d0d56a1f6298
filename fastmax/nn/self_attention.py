"""`FastmaxSelfAttention`: a causal self-attention layer with fastmax or softmax attention."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fastmax import decoding, eager, ops
from fastmax.core import validation
from fastmax.decoding import DecodeState
from fastmax.decoding.parallel_prefill import prefill_with_lse
from fastmax.decoding.recurrent_step import step_with_lse, step_with_lse_
from fastmax.functional import fastmax_attention, flash_attention
from fastmax.nn import kept_keys, key_value_cache
from fastmax.nn.gates import biases_of_half_lives, log_gates_of, zero_gate
from fastmax.nn.kept_keys import KeptKeys, KeptOptions, LayerTokens
from fastmax.nn.key_value_cache import KeyValueCache
from fastmax.nn.plain import call_part, is_plain
from fastmax.nn.rotary import Rotation
from fastmax.nn.self_attention_options import (
    MADE_BY,
    PARTS,
    SIZES,
    Option,
    check_attribute,
    check_half_life,
    check_kept_keys,
    check_kind,
    check_resettable,
    check_steady_heads,
    options_of_fastmax,
    refuse_input_gate,
    refuse_options_of_fastmax,
    refuse_window,
    rotary_channels,
)
from fastmax.nn.self_attention_state import SelfAttentionState
from fastmax.nn.short_convolution import ShortConvolution
from fastmax.prepare import sharded_dispatch
from fastmax.prepare.bounds import sequence_at
from fastmax.prepare.padding import PackedPlaces, RealFirst
from fastmax.prepare.sharded_dispatch import ParallelContext


class _SplitBy(NamedTuple):
    """How a layer computes the heads of q, k and v."""

    calls_norms: bool  # since one is no plain `nn.RMSNorm`; the other fields are then None and False
    norms: tuple[Tensor | None, Tensor | None]  # weights of the RMS norms of q and k
    fuses: bool  # whether one kernel computes the heads, with norms and rotations
    convolves: bool  # whether this kernel applies the convolution too


class FastmaxSelfAttention(nn.Module):
    """Causal multi-head self-attention layer. Maps x (b, n, embed_dim) to y of the same shape.

    It takes the place of the attention layer of a transformer block. A layer with the default options computes

        q, k, v = split(conv(x @ W_qkv))
        q, k = rope(rms_norm(q)), rope(rms_norm(k))
        log_decay = logsigmoid(x @ W_decay + b_decay)
        o = fastmax_attention(q, k, v, causal=True, log_decay=log_decay, exact_window=128, temperature=sqrt(head_dim))
        y = (rms_norm(o) * silu(x @ W_gate)) @ W_out

    With `input_gate=True`, `fastmax_attention` also takes

        log_input_gate = 8 tanh((x @ W_input + b_input) / 8)

    With `kept_keys=K`, some keys beyond the window also have the weight exp(s + log_input_gate): the nearest ones, up to 256,
    and K of those before them. `fastmax.nn.kept_keys` has the definition.

    For a new model, set `longest_half_life` to the context length and keep the other defaults. Every other option switches a
    part off or tunes it; docs/parameters.md has measurements.

    Args:
        embed_dim: number of channels of x and y.
        num_heads: number of heads of q.
        num_kv_heads: number of heads of k and v, a divisor of `num_heads`. None: `num_heads`. Fewer heads (grouped-query
            attention) make the weights and the decoding state smaller.
        head_dim: number of channels of each head of q and k. None: `embed_dim / num_heads`. Wider heads distinguish more keys
            and cost more.
        value_dim: number of channels of each head of v and of the output. None: `head_dim`.
        attention: "fastmax", or "softmax" to replace `fastmax_attention` by `flash_attention` with scale
            `1 / sqrt(head_dim)`. The weights have the same names, shapes and initial values. Use it as a baseline or for
            hybrid models.
        qk_norm: apply RMS norm to each head of q and k, with a learned scale per channel (Zhang and Sennrich, 2019,
            arXiv:1910.07467). It keeps scores where the polynomial resembles exp.
        rope: apply rotary position embedding to q and k (Su et al., 2021, arXiv:2104.09864).
        rope_dim: number of channels of each head that are rotated, even; they are the first ones. None: half of them. The
            other channels match keys at any distance.
        rope_base: base of the rotary wavelengths, which reach up to `2 pi rope_base` tokens.
        decay: learn a decay gate for each key/value head (Lin et al., 2025, arXiv:2503.02130). The weight of a key is
            multiplied by the gate values of all later tokens up to the query.
        longest_half_life: half-life of the slowest head at initialisation, in tokens: the weight of a key halves after so many
            tokens. At least 4. The half-lives of the heads are spaced geometrically from 4 to this value. Set it to the
            context length.
        steady_heads: number of key/value heads, the last ones, that hardly decay at initialisation: their half-life is 2^24
            tokens, and `longest_half_life` is that of the slowest of the others. With `kept_keys`, such heads keep keys that
            are far away. Needs `decay`.
        input_gate: learn an input gate for each key/value head, an addition of this library. The weight of a key beyond the
            exact window is multiplied by `exp(log_input_gate)` of its token, between exp(-8) and exp(8), and 1 at first. Only
            with `attention="fastmax"`. None: only with `kept_keys`.
        kept_keys: number of keys beyond the exact window, in each key/value head, that are kept to be weighted by exp(s) too.
            Input gates and decays choose them, so it needs input gates and an exact window. The state for generation has slots
            for them and the last `exact_window + 256` keys. 0: no key beyond the window is weighted by exp(s).
        exact_window: number of most recent keys, the token's own included, that are weighted by exp(s) as in softmax; the
            polynomial weights the keys before them. None: 128. 0: the polynomial weights all keys. A wider window learns more
            and costs more. With softmax attention only None and 0 are accepted.
        window: number of most recent keys, the token's own included, that softmax attention sees (sliding-window attention).
            None: all. Only with `attention="softmax"`.
        output_norm: apply RMS norm to each head of the output, with a learned scale per channel. It restores the scale that
            an average over many keys loses.
        conv: width of the causal depthwise convolution of q, k and v. 0 or 1: none.
        output_gate: multiply the output by `silu(x @ W_gate)`. The gate has as many weights as the output projection.
        p: degree of the polynomial, 1 or 2. Degree 1 is faster and learns less.
        temperature: divides the scores. None: for p = 2, `sqrt(head_dim)` with an exact window (then local keys have the
            weights of softmax) and 1 without one (a polynomial singles out a key only if its score is large); for p = 1, 1.1.
        normalize: False, or "token" to scale rows of q and k down to length 1. None: False for p = 2, "token" for p = 1, where
            it keeps `1 + s` positive.
        algorithm: "linear", "quadratic", or "auto", which chooses the faster one by a cost model.
        a0, a1, a2: coefficients of the polynomial `a0 + a1 s + a2 s^2`. The default is the Taylor expansion of exp.
        use_custom_gradient: True for the analytic backward of attention and of the parts around it, False for autograd of
            PyTorch operations. Both give the same gradients; autograd also supports second derivatives and forward mode.
        bias: add biases to the projections of q, k and v, of the output gate and of the output. Decay and input gates always
            have one.
        norm_eps: added to the mean squares in RMS norms.
        device, dtype: of the weights.

    Raises:
        TypeError, ValueError: an argument is invalid, or has no effect with the other arguments. The message names the
            argument, its value and the accepted values.

    The modules `q_norm`, `k_norm`, `decay_proj`, `input_gate_proj`, `output_norm`, `conv` and `gate_proj` are None if switched
    off. Other modules may take their places, such as a wrapper of `decay_proj` (LoRA), a subclass of `nn.RMSNorm` or an
    `nn.LayerNorm`. They are called, as are modules with hooks (pruning), where the kernels use the weights of the original
    ones: gates with x, norms of q and k with (b, n, heads, head_dim), and `output_norm` with (b, n, heads, value_dim).

    These options are also attributes: `exact_window`, `p`, `temperature`, `normalize`, `algorithm`, `a0`, `a1`, `a2`, `window`,
    `rope_dim`, `rope_base`, `kept_keys` and `use_custom_gradient`. A new value is checked as in the constructor, takes effect
    in the next call and does not change other options. `temperature = None` and `normalize = None` restore the default for the
    current values of the other options.
    """

    exact_window, p, temperature, normalize, algorithm = Option(), Option(), Option(), Option(), Option()
    a0, a1, a2 = Option(), Option(), Option()

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        attention: str = "fastmax",
        qk_norm: bool = True,
        rope: bool = True,
        rope_dim: int | None = None,
        rope_base: float = 10000.0,
        decay: bool = True,
        longest_half_life: float = 1024.0,
        steady_heads: int = 0,
        input_gate: bool | None = None,
        kept_keys: int = 0,
        exact_window: int | None = None,
        window: int | None = None,
        output_norm: bool = True,
        conv: int = 4,
        output_gate: bool = True,
        p: int = 2,
        temperature: float | None = None,
        normalize: bool | str | None = None,
        algorithm: str = "auto",
        a0: float = 1.0,
        a1: float = 1.0,
        a2: float = 0.5,
        use_custom_gradient: bool = True,
        bias: bool = False,
        norm_eps: float = 1e-6,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        sizes = (embed_dim, num_heads, num_kv_heads, head_dim, value_dim)
        for name, size in zip(SIZES, sizes, strict=True):
            if size is not None or name in ("embed_dim", "num_heads"):
                validation.check_count(name, size)
        if head_dim is None:
            if embed_dim % num_heads != 0:
                raise ValueError(
                    f"embed_dim must be a multiple of num_heads unless head_dim is given, got {embed_dim} and {num_heads}"
                )
            head_dim = embed_dim // num_heads
        value_dim = head_dim if value_dim is None else value_dim
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads != 0:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        check_kind(attention)
        validation.check_count("kept_keys", kept_keys, least=0)
        if input_gate is None:
            input_gate = kept_keys > 0 and attention == "fastmax"  # with softmax, kept_keys is what is refused
        switches = {"qk_norm": qk_norm, "rope": rope, "decay": decay, "output_norm": output_norm, "output_gate": output_gate}
        switches |= {"input_gate": input_gate, "use_custom_gradient": use_custom_gradient, "bias": bias}
        for name, switch in switches.items():
            validation.check_bool(name, switch)
        validation.check_positive("rope_base", rope_base)
        check_half_life(longest_half_life)
        check_steady_heads(steady_heads, num_kv_heads, decay)
        validation.check_positive("norm_eps", norm_eps)
        rope_dim = rotary_channels(head_dim, rope, rope_dim)
        validation.check_count("conv", conv, least=0)

        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, num_kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.attention, self.use_custom_gradient = attention, use_custom_gradient
        self.rope_dim, self.rope_base = rope_dim, float(rope_base)
        self.longest_half_life, self.steady_heads = float(longest_half_life), steady_heads
        self.window, self.kept_keys = window, kept_keys
        self.context = None  # set by `fastmax.distributed.ContextParallel`
        of_fastmax: dict[str, Any] = {
            "exact_window": exact_window,
            "p": p,
            "temperature": temperature,
            "normalize": normalize,
            "algorithm": algorithm,
            "coefficients": (a0, a1, a2),
        }
        if attention == "softmax":
            refuse_options_of_fastmax(**of_fastmax)
            if input_gate:
                refuse_input_gate("input_gate", input_gate)
            if window is not None:
                validation.check_count("window", window)
            self.options = {}
        else:
            if window is not None:
                refuse_window(window)
            self.options = options_of_fastmax(head_dim, **of_fastmax)
        check_kept_keys(kept_keys, attention, input_gate, self.options)

        if dtype is not None:
            validation.check_dtype("dtype", dtype)
        validation.check_device(device)
        made = {"device": device, "dtype": dtype}
        channels, output_channels = sum(self.widths), num_heads * value_dim
        self.qkv_proj = nn.Linear(embed_dim, channels, bias, **made)
        self.out_proj = nn.Linear(output_channels, embed_dim, bias, **made)
        self.gate_proj = nn.Linear(embed_dim, output_channels, bias, **made) if output_gate else None
        self.decay_proj = nn.Linear(embed_dim, num_kv_heads, **made) if decay else None
        self.input_gate_proj = zero_gate(embed_dim, num_kv_heads, self.qkv_proj.weight) if input_gate else None
        self.conv = ShortConvolution(channels, conv, **made) if conv > 1 else None
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, norm_eps, **made) if qk_norm else None for _ in range(2))
        self.output_norm = nn.RMSNorm(value_dim, norm_eps, **made) if output_norm else None
        self.reset_parameters()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in MADE_BY:
            got = validation.describe(value)
            raise AttributeError(f"{name} is an argument of the constructor only, got {got}: set {MADE_BY[name]}")
        if name in vars(self) or name in PARTS:
            check_attribute(self, name, value)
        if name in ("rope_base", "longest_half_life"):
            value = float(value)
        if isinstance(getattr(type(self), name, None), Option):
            object.__setattr__(self, name, value)  # nn.Module would register a parameter before the option is checked
        else:
            super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Initialises the weights.

        Projections are drawn from a normal distribution of standard deviation 0.02, as in GPT-2, and their biases are 0. The
        convolution is the identity. The scales of norms are 1. The weights of the decay gate are 0, so decays do not depend on
        x at first. Its biases give half-lives spaced geometrically from 4 tokens to `longest_half_life`, one per key/value
        head; a single head has `longest_half_life`. The last `steady_heads` heads have a half-life of 2^24 tokens instead. The
        weights and biases of the input gate are 0: it multiplies by 1.

        Raises:
            TypeError: a module in the place of a part has no weights of these names, or no `reset_parameters`.
        """
        check_resettable(self)
        for proj in (self.qkv_proj, self.out_proj, self.gate_proj):
            if proj is not None:
                nn.init.normal_(proj.weight, std=0.02)
                if proj.bias is not None:
                    nn.init.zeros_(proj.bias)
        for part in (self.conv, self.q_norm, self.k_norm, self.output_norm):
            if part is not None:
                part.reset_parameters()
        if self.decay_proj is not None:
            nn.init.zeros_(self.decay_proj.weight)
            with torch.no_grad():
                bias = self.decay_proj.bias
                biases = biases_of_half_lives(len(bias), self.longest_half_life, steady=self.steady_heads)
                bias.copy_(sharded_dispatch.like_sharded(biases, bias))
        if self.input_gate_proj is not None:
            nn.init.zeros_(self.input_gate_proj.weight)
            nn.init.zeros_(self.input_gate_proj.bias)

    def init_state(
        self,
        batch: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        flush_interval: int = 1,
    ) -> SelfAttentionState:
        """Returns an empty state for generation: no tokens seen.

        Args:
            batch: number of sequences.
            dtype: dtype of q, k and v. None: that of the weights. Under autocast they are cast to it.
            device: None: that of the weights.
            flush_interval: number of tokens that `step_` buffers before it updates the sums of the state, as in
                `fastmax.decoding.init_state`. 1: no buffer.

        Raises:
            TypeError, ValueError: an argument is invalid; `flush_interval` is above 1 in a softmax layer.
        """
        weight = self.qkv_proj.weight
        dtype, device = weight.dtype if dtype is None else dtype, weight.device if device is None else device
        validation.check_dtype("dtype", dtype)
        validation.check_device(device)
        validation.check_count("batch", batch, least=0)
        sizes = batch, self.num_kv_heads, self.head_dim, self.value_dim
        state: DecodeState | KeyValueCache
        if self.attention == "softmax":
            validation.check_count("flush_interval", flush_interval)
            if flush_interval != 1:
                raise ValueError(f'flush_interval must be 1 with attention="softmax", got {flush_interval}')
            state = KeyValueCache.empty(*sizes, dtype, device, self.window)
        else:
            options = {name: x for name, x in self.options.items() if name != "algorithm"} | {"flush_interval": flush_interval}
            state = decoding.init_state(*sizes, dtype=dtype, device=device, **options)
            if self.input_gate_proj is not None:
                state = state.with_gates()  # a CUDA graph of `step_` cannot add them
        recent = None
        if self.conv is not None:
            recent = torch.zeros(batch, self.conv.width - 1, sum(self.widths), dtype=dtype, device=device)
        kept = None
        if self.kept_keys > 0:
            kept = KeptKeys.empty(*sizes, dtype, device, self.kept_keys, self.options["exact_window"])
        positions = torch.zeros(batch, dtype=torch.int64, device=device)
        return SelfAttentionState(state, recent, positions, kept, self._rotary)

    def forward(
        self,
        x: Tensor,
        state: SelfAttentionState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, SelfAttentionState]:
        """Computes the output of a sequence, or of its next tokens if a state is given.

        Args:
            x: (b, n, embed_dim), in the dtype of the weights; any floating dtype under autocast.
            state: state after the previous tokens, from `init_state` or an earlier call. None: x is the whole sequence. A
                sequence may be split into calls of any length; the outputs are those of one call. The state is not modified.
            cu_seqlens: int32 (s + 1,), for packed sequences: x has batch 1, and its s sequences are separated at these
                offsets, from 0 to n. Sequences do not see each other, and positions start at 0 in each. A state must have s
                batch entries, one per sequence; a softmax layer and one with `kept_keys` then synchronise with the
                device.
            attention_mask: bool (b, n), True = real token, False = padding at any place. Each sequence gives the outputs that
                it gives without padding: positions, windows, decays and the convolution count real tokens only. Outputs at
                padding are meaningless.

        Returns:
            y (b, n, embed_dim). With a state: (y, state after x). Differentiable.

        Raises:
            TypeError, ValueError: an argument is invalid. The message names it, its value and the accepted values.
        """
        context = self._context()
        check = self._check if context is None else context.telling(self._check)
        check(x, state, cu_seqlens, attention_mask, context)
        if attention_mask is None:
            return self._attend(x, state, cu_seqlens, None, context)
        x = _without_padding(x, attention_mask)
        if context is not None:
            context.refuse_gaps(attention_mask, cu_seqlens)
            return self._attend(x, None, cu_seqlens, attention_mask, context)
        order = RealFirst.of(attention_mask, cu_seqlens)
        out = self._attend(order.first(x), state, cu_seqlens, order.mask, None, order)
        return order.back(out) if state is None else (order.back(out[0]), out[1])

    def _attend(
        self,
        x: Tensor,
        state: SelfAttentionState | None,
        cu_seqlens: Tensor | None,
        mask: Tensor | None,
        context: ParallelContext | None,
        order: RealFirst | None = None,
    ) -> Tensor | tuple[Tensor, SelfAttentionState]:
        """Runs `forward` on checked arguments. With an `order`, x and the mask have their real tokens first."""
        packed = None
        if cu_seqlens is not None and state is not None:
            packed = PackedPlaces.of(cu_seqlens, x.shape[1], None if order is None else order.count)
        count = None if order is None else order.count
        q, k, v, recent = self._heads(x, state, cu_seqlens, mask, context, packed, count)
        log_decay, gate = self._log_gates(x, mask)
        options: dict[str, Any] = {"log_decay": log_decay, "cu_seqlens": cu_seqlens}
        if state is None:
            fastmax, flash = (fastmax_attention, flash_attention) if context is None else context.attentions
            options |= {"causal": True, "use_custom_gradient": self.use_custom_gradient, "attention_mask": mask}
            if self.attention == "softmax":
                o = flash(q, k, v, window=self.window, **options)
            elif self.kept_keys == 0:
                o = fastmax(q, k, v, log_input_gate=gate, **self.options, **options)
            else:
                o, lse = fastmax(q, k, v, log_input_gate=gate, return_lse=True, **self.options, **options)
                attend = partial(kept_keys.attend, cu_seqlens=cu_seqlens) if context is None else context.attend_to_kept
                o = kept_keys.included(o, lse, LayerTokens(q, k, v, gate, log_decay), self._kept_options(), attend)
            return self._output(o, x)
        attention: DecodeState | KeyValueCache
        kept = None
        if isinstance(state.attention, KeyValueCache):  # softmax
            options = {"log_decay": log_decay, "use_custom_gradient": self.use_custom_gradient}
            if packed is None:
                o, attention = key_value_cache.attend(q, k, v, state.attention, count=count, **options)
            else:
                o, attention = key_value_cache.attend_packed(q, k, v, state.attention, packed, **options)
        else:
            if x.shape[1] == 1 and cu_seqlens is None:
                token = {"log_decay": log_decay, "log_input_gate": gate, "attention_mask": mask}
                o, lse, attention = step_with_lse(q, k, v, state.attention, **token)
            else:
                o, lse, attention = prefill_with_lse(q, k, v, state.attention, order, log_input_gate=gate, **options)
            if state.kept is not None:
                assert lse is not None  # checked in `_check`
                after = state.kept, state.positions, count, self._kept_options(), packed
                o, kept = kept_keys.included_after(o, lse, LayerTokens(q, k, v, gate, log_decay), *after)
        if packed is not None:
            count = packed.count
        positions = state.positions + (x.shape[1] if count is None else count)
        return self._output(o, x, state), SelfAttentionState(attention, recent, positions, kept, state.rotary)

    def step_(self, x: Tensor, state: SelfAttentionState, *, attention_mask: Tensor | None = None) -> Tensor:
        """Computes the output of one token and updates the state in place. The method for CUDA graphs: addresses stay the same.

        Args:
            x: (b, 1, embed_dim).
            state: from `init_state`. Its tensors must be contiguous and must not overlap, as in `fastmax.decoding.step_`.
            attention_mask: bool (b, 1), as in `forward`.

        Returns:
            y (b, 1, embed_dim).

        Raises:
            TypeError, ValueError: an argument is invalid, or the layer has softmax attention, whose state grows.
            RuntimeError: autograd records x, the weights or the state. Use `torch.no_grad()`, or `forward`.
        """
        context = self._context()
        if context is not None:
            context.telling(_refuse_state)()
        if self.attention == "softmax":
            raise ValueError('step_ needs attention="fastmax", got "softmax", whose state grows: use forward')
        if state is None:
            raise TypeError("state must come from this layer's init_state, got None")
        sharded_dispatch.refuse(
            "a tensor parallel layer has local weights only inside forward: use forward", weight=self.qkv_proj.weight
        )
        self._check(x, state, None, attention_mask)
        if x.shape[1] != 1:
            raise ValueError(f"x must hold one token, (b, 1, embed_dim), got {x.shape[1]}; use forward for more")
        state.refuse_outside_inference_mode()
        count = None
        if attention_mask is not None:
            x, count = _without_padding(x, attention_mask), attention_mask.sum(1)
        q, k, v, recent = self._heads(x, state, None, attention_mask, count=count)
        log_decay, gate = self._log_gates(x, attention_mask)
        assert isinstance(state.attention, DecodeState)  # checked above
        token = {"log_decay": log_decay, "log_input_gate": gate, "attention_mask": attention_mask}
        o, lse = step_with_lse_(q, k, v, state.attention, **token)
        if state.kept is not None:
            assert lse is not None  # checked in `_check`
            after = state.kept, state.positions, count, self._kept_options()
            o, _ = kept_keys.included_after(o, lse, LayerTokens(q, k, v, gate, log_decay), *after, in_place=True)
        if state.recent is not None:
            state.recent.copy_(recent)
        state.positions.add_(1 if count is None else count)
        return self._output(o, x, state)

    def _kept_options(self) -> KeptOptions:
        scale = 1.0 / self.options["temperature"]
        window, normalize = self.options["exact_window"], self.options["normalize"] or None
        return KeptOptions(self.kept_keys, window, scale, self.use_custom_gradient, normalize)

    @property
    def widths(self) -> tuple[int, int, int]:
        """Numbers of channels of q, k and v, all heads together, in the order of the rows of `qkv_proj`."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim, self.num_kv_heads * self.value_dim

    def _context(self) -> ParallelContext | None:
        context = sharded_dispatch.current() if self.context is None else self.context
        if context is None:
            return None
        # Attention and convolution compare their own arguments across ranks; these options are not among them.
        options = {name: getattr(self, name) for name in ("attention", "window", "rope_dim", "rope_base", "kept_keys")}
        return context.of_one_forward(options)

    def _heads(
        self,
        x: Tensor,
        state: SelfAttentionState | None,
        cu_seqlens: Tensor | None,
        mask: Tensor | None,
        context: ParallelContext | None = None,
        packed: PackedPlaces | None = None,
        count: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Returns q (b, h, n, d), k and v (b, hk, n, d), and the last inputs of the convolution.

        Args:
            packed: the packed sequences of `cu_seqlens`; only with a state.
            count: (b,), number of real tokens of each row, which come first. None: all.
        """
        qkv = self.qkv_proj(x)
        check = self._check_projected if context is None else context.telling(self._check_projected)
        check(x, qkv)
        if mask is not None:
            qkv = torch.where(mask.unsqueeze(-1), qkv, 0)
        if context is not None:
            return *self._heads_of_parts(qkv, cu_seqlens, context), None
        recent = places = None
        if state is None:
            positions = torch.arange(x.shape[1], device=x.device)
        else:
            qkv, recent = qkv.to(state.dtype), state.recent
            if packed is not None:
                positions = state.positions[packed.sequence] + packed.place
            else:
                positions = state.positions.unsqueeze(-1)
                if x.shape[1] != 1:
                    positions = positions + torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None and packed is None:
            positions = places = positions - cu_seqlens[sequence_at(cu_seqlens, positions)]
        by = self._split_by(qkv, state)
        if packed is not None:
            by = by._replace(convolves=False)
        recent_of_operator = None
        if self.conv is not None:
            if packed is not None and x.shape[1] == 0 and recent is not None:
                recent = recent.clone()
            elif packed is not None:
                qkv, recent = self.conv.continue_packed(qkv, recent, packed)
            elif by.convolves:
                recent_of_operator = recent
                recent = None if state is None else self.conv.last_tokens(qkv, recent, count)
            else:
                qkv, recent = self.conv(qkv, recent, places, None if state is None else count)
        return *self._split(qkv, positions, places, recent_of_operator, by), recent

    def _heads_of_parts(
        self, qkv: Tensor, cu_seqlens: Tensor | None, context: ParallelContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v of the local tokens of a context parallel layer, given qkv (b, n, channels)."""
        before = 0 if self.conv is None else self.conv.width - 1
        by = self._split_by(qkv, None)
        of_parts = []
        for tokens, positions in context.with_tokens_before(qkv, before):
            places = None
            if cu_seqlens is not None:
                positions = places = positions - cu_seqlens[sequence_at(cu_seqlens, positions)]
            if self.conv is not None and not by.convolves:
                tokens = self.conv(tokens, None, places)[0]
            heads = self._split(tokens, positions, places, None, by)
            of_parts.append([rows[:, :, before:] for rows in heads])
        q, k, v = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=2) for rows in zip(*of_parts, strict=True))
        return q, k, v

    def _split_by(self, qkv: Tensor, state: SelfAttentionState | None) -> _SplitBy:
        if not all(norm is None or is_plain(norm, nn.RMSNorm) for norm in (self.q_norm, self.k_norm)):
            return _SplitBy(True, (None, None), False, False)
        norms = _weight_of(self.q_norm, qkv), _weight_of(self.k_norm, qkv)
        fuses = self._may_fuse(state) and self._fuses_heads(qkv, *norms)
        return _SplitBy(False, norms, fuses, fuses and self._fusible_convolution is not None)

    def _split(
        self, qkv: Tensor, positions: Tensor, places: Tensor | None, recent: Tensor | None, by: _SplitBy
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k and v with their norms and rotations, each (b, heads, n, channels).

        Args:
            qkv: (b, n, channels); the convolution has been applied unless `by.convolves`.
            recent, places: of the convolution.
        """
        conv_weight = self.conv.weight if by.convolves and self.conv is not None else None
        rotation = (None, None)
        if self.rope_dim:
            rotation = Rotation.at(positions, self.rope_dim, self.rope_base, qkv.dtype)
        if by.calls_norms:
            return self._split_and_call_norms(qkv, *rotation)
        split = ops.split_heads if by.fuses else eager.heads.split_heads
        q, k, v = split(
            qkv,
            recent,
            conv_weight,
            *by.norms,
            *rotation,
            None if conv_weight is None else places,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            *(0.0 if norm is None else norm.eps for norm in (self.q_norm, self.k_norm)),
        )
        q, k, v = (rows.transpose(1, 2) for rows in (q, k, v))
        return q, k, v

    def _split_and_call_norms(self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = eager.heads.heads_of(qkv, self.num_heads, self.num_kv_heads, self.head_dim)
        q, k = _normed("q_norm", self.q_norm, q), _normed("k_norm", self.k_norm, k)
        if cos is not None and sin is not None:
            q, k = eager.heads.rotate(q, cos, sin), eager.heads.rotate(k, cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def _may_fuse(self, state: SelfAttentionState | None) -> bool:
        """Returns whether kernels may compute what is around attention. They have no derivatives but the first.

        Single tokens with a state have derivatives of any order where autograd records.
        """
        recorded = state is not None and torch.is_grad_enabled()
        return self.use_custom_gradient and not recorded and not eager.is_transformed()

    @property
    def _fusible_convolution(self) -> ShortConvolution | None:
        """The convolution, if `ops.split_heads` may compute it in place of a call of the module."""
        conv = self.conv
        return conv if conv is not None and is_plain(conv, ShortConvolution) and conv.width <= ops.MAX_CONVOLUTION else None

    def _fuses_heads(self, qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None) -> bool:
        """Returns whether a kernel computes the heads of q, k and v."""
        conv = self._fusible_convolution
        weights = q_weight, k_weight, None if conv is None else conv.weight
        if any(norm is not None and norm.eps is None for norm in (self.q_norm, self.k_norm)):
            return False
        has_parts = self.rope_dim > 0 or any(x is not None for x in weights)  # else the heads are views of qkv
        return has_parts and ops.fuses_split_heads(qkv, self.head_dim, self.value_dim, *weights)

    def _log_gates(self, x: Tensor, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Returns log_decay and log_input_gate, each (b, hk, n), None for a gate that the layer does not have.

        Masked tokens do not decay. They need no input gate, since no query weighs their keys.
        """
        log_decay, log_input_gate = log_gates_of(x, self.decay_proj, self.input_gate_proj, self.num_kv_heads)
        if log_decay is not None and mask is not None:
            log_decay = torch.where(mask.unsqueeze(-1), log_decay, 0)
        return (
            None if log_decay is None else log_decay.transpose(1, 2),
            None if log_input_gate is None else log_input_gate.transpose(1, 2),
        )

    def _output(self, o: Tensor, x: Tensor, state: SelfAttentionState | None = None) -> Tensor:
        gate = None if self.gate_proj is None else self.gate_proj(x)
        norm = self.output_norm
        if norm is not None and not is_plain(norm, nn.RMSNorm):
            o, norm = _normed("output_norm", norm, o.transpose(1, 2)).transpose(1, 2), None
        weight = _weight_of(norm, o)
        fuses = self._may_fuse(state) and (norm is None or norm.eps is not None) and (norm is not None or gate is not None)
        join = ops.join_heads if fuses and ops.fuses_join_heads(o, weight, gate) else eager.heads.join_heads
        return self.out_proj(join(o, weight, gate, 0.0 if norm is None else norm.eps))

    def _check_projected(self, x: Tensor, qkv: Tensor) -> None:
        sharded_dispatch.refuse("to shard the heads of a layer, use fastmax.distributed.TensorParallel", x=x, qkv_proj=qkv)
        if qkv.shape[-1] != sum(self.widths):
            raise ValueError(
                f"qkv_proj must return {sum(self.widths)} channels, those of the layer's heads, got {qkv.shape[-1]}: "
                "to shard the heads of a layer, use fastmax.distributed.TensorParallel"
            )

    def _check(
        self,
        x: Tensor,
        state: SelfAttentionState | None,
        cu_seqlens: Tensor | None,
        mask: Tensor | None,
        context: ParallelContext | None = None,
    ) -> None:
        if context is not None and state is not None:
            _refuse_state()
        if context is not None and self.kept_keys > 0:
            for name, given in (("cu_seqlens", cu_seqlens), ("attention_mask", mask)):
                if given is not None:
                    got = f"got {validation.describe(given)} with {self.kept_keys}"
                    raise ValueError(f"{name} must be None in a context parallel layer with kept_keys, {got}")
        accepted = f"a tensor of shape (batch, tokens, {self.embed_dim})"
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be {accepted}, got {validation.describe(x)}")
        validation.check_dense("x", x)
        if x.dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(f"x must be {accepted}, got shape {tuple(x.shape)}")
        weight = self.qkv_proj.weight
        validation.check_dtype("x", x.dtype)
        if x.dtype != weight.dtype and not ops.in_autocast(x):
            raise TypeError(f"x must have the dtype of the weights {weight.dtype}, got {x.dtype}")
        if x.device != weight.device:
            raise ValueError(f"x must be on the device of the weights {weight.device}, got {x.device}")
        one_head = x.unsqueeze(1)
        validation.check_attention_mask(mask, one_head, one_head)
        tokens = None if context is None or cu_seqlens is None else context.layout_of(x.shape[1]).tokens
        validation.check_cu_seqlens(cu_seqlens, one_head, one_head, tokens)
        if state is not None:
            self._check_state(state, x, cu_seqlens)
            if cu_seqlens is not None and self.conv is not None and not is_plain(self.conv, ShortConvolution):
                raise ValueError(
                    "conv must be a ShortConvolution without hooks or a forward of its own where packed sequences continue a "
                    f"state, got {type(self.conv).__name__} with cu_seqlens: pass one sequence at a time"
                )

    @property
    def _rotary(self) -> tuple[int, float] | None:
        return (self.rope_dim, self.rope_base) if self.rope_dim > 0 else None

    def _check_state(self, state: SelfAttentionState, x: Tensor, cu_seqlens: Tensor | None) -> None:
        if not isinstance(state, SelfAttentionState):
            raise TypeError(f"state must come from this layer's init_state, got {validation.describe(state)}")
        expected = DecodeState if self.attention == "fastmax" else KeyValueCache
        if not isinstance(state.attention, expected):
            raise TypeError(
                f'state must come from a layer of attention="{self.attention}", got one of {type(state.attention).__name__}'
            )
        batch, wanted = x.shape[0], "x's batch {}"
        if cu_seqlens is not None:
            batch, wanted = cu_seqlens.shape[0] - 1, "a batch entry for each of the {} sequences of cu_seqlens"
        if state.positions.shape != (batch,):
            raise ValueError(f"state must have {wanted.format(batch)}, got {state.positions.shape[0]}")
        if state.device != x.device:
            raise ValueError(f"state must be on x's device {x.device}, got {state.device}")
        if state.dtype != x.dtype and not ops.in_autocast(x):
            raise TypeError(f"state must be for x's dtype {x.dtype}, got {state.dtype}")
        recent = None if self.conv is None else (batch, self.conv.width - 1, sum(self.widths))
        got = None if state.recent is None else tuple(state.recent.shape)
        if got != recent:
            raise ValueError(f"state must have a recent of shape {recent}, for this layer's convolution, got {got}")
        if state.rotary != self._rotary:
            raise ValueError(
                f"state must have this layer's (rope_dim, rope_base) {self._rotary}, got {state.rotary}: they rotated its keys"
            )
        if isinstance(state.attention, KeyValueCache):
            keys, values = state.attention.keys, state.attention.values
            heads = self.num_kv_heads, self.head_dim, self.value_dim
            of_state = keys.shape[1], keys.shape[3], values.shape[3]
            if heads != of_state:
                raise ValueError(f"state must have this layer's (num_kv_heads, head_dim, value_dim) {heads}, got {of_state}")
            if state.attention.window != self.window:
                raise ValueError(f"state must have this layer's window {self.window!r}, got {state.attention.window!r}")
            return
        self._check_kept_keys_of(state)
        made = {name: getattr(state.attention, name) for name in ("score", "normalize", "exact_window")}
        score = validation.check_score(*(self.options[name] for name in ("temperature", "a0", "a1", "a2", "p")))
        normalize = self.options["normalize"] or None
        for name, option in zip(made, (score, normalize, self.options["exact_window"]), strict=True):
            if made[name] != option:
                raise ValueError(f"state must have this layer's {name} {option!r}, got {made[name]!r}")

    def _check_kept_keys_of(self, state: SelfAttentionState) -> None:
        slots = kept_keys.slots_of(self.kept_keys, self.options["exact_window"]) if self.kept_keys > 0 else 0
        got = 0 if state.kept is None else state.kept.positions.shape[2]
        if got != slots:
            raise ValueError(
                f"state must have {slots} slots of kept keys, for this layer's kept_keys {self.kept_keys} and exact_window "
                f"{self.options['exact_window']}, got {got}"
            )

    def extra_repr(self) -> str:
        options: dict[str, object] = {name: getattr(self, name) for name in SIZES[1:]}
        options |= {"attention": self.attention, "rope_dim": self.rope_dim, "rope_base": self.rope_base}
        options |= {"window": self.window} if self.attention == "softmax" else self.options | {"kept_keys": self.kept_keys}
        return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _without_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Returns x with zeros at padding. A NaN there, times a gradient of 0, would make the gradients of the weights NaN."""
    return torch.where(mask.unsqueeze(-1), x, 0)


def _normed(name: str, norm: nn.Module | None, rows: Tensor) -> Tensor:
    """Returns the result of a norm that is called, in the dtype of the rows."""
    return rows if norm is None else call_part(name, norm, rows, rows.shape).to(rows.dtype)


def _refuse_state() -> NoReturn:
    raise ValueError("state must be None in a context parallel layer, which does not support generation")


def _weight_of(norm: nn.RMSNorm | None, x: Tensor) -> Tensor | None:
    """Returns the scales of an RMS norm: ones, like x, if it has none; None without a norm."""
    if norm is None:
        return None
    return x.new_ones(norm.normalized_shape) if norm.weight is None else norm.weight
