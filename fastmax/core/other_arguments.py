"""Argument names of other attention libraries, and what to pass instead of each of them here.

docs/parameters.md has a table of them, under "Called elsewhere".
"""

from __future__ import annotations

from typing import NoReturn

from fastmax.core.validation import describe

_MASK = (
    "for a causal mask pass {causal}=True; to hide keys pass attention_mask, a bool tensor of shape (batch, keys), True = the "
    "key is attended; other masks are not supported"
)
_BIAS = "a bias on the scores is not supported; with {causal}=True log_decay lets weights decay with distance"
_NO_WEIGHTS = "attention weights are never formed in memory"
_PACKED = "pass cu_seqlens, which is for both queries and keys, with all tokens in a batch of one"
_LENGTH = "leave it out: the shapes and cu_seqlens give the lengths"
_LSE = "pass return_lse=True, which also returns the log of the sum of weights of each query"
_STATE = "fastmax.decoding.init_state returns a state, which fastmax.decoding.prefill and fastmax.decoding.step continue"
_NOT_HERE = "it is not supported"

INSTEAD = {
    "is_causal": "pass {causal}=True: query i sees keys j <= i + (m - n), aligned at the end (PyTorch's is_causal aligns at "
    "the start, which is the same for n = m)",
    "causal": "pass {causal}=True",
    "attn_mask": _MASK,
    "key_padding_mask": "pass attention_mask, True = the key is attended, the opposite of torch.nn.MultiheadAttention's "
    "key_padding_mask",
    "mask": _MASK,
    "block_mask": _MASK,
    "attn_bias": _BIAS,
    "bias": _BIAS,
    "score_mod": "a function of the scores is not supported",
    "alibi_slopes": "with {causal}=True pass log_decay = -slope for all keys, one slope for each key/value head",
    "softmax_scale": "pass temperature, its inverse",
    "scale": "pass temperature, its inverse",
    "scaling": "pass temperature, its inverse",
    "enable_gqa": "leave it out: k and v may have fewer heads than q",
    "dropout_p": "dropout of weights is not supported; dropout is the strength of multiplicative noise on the output",
    "window_size": "no window hides keys here; exact_window=w gives local keys the weight exp(s)",
    "window": "no window hides keys here; exact_window=w gives local keys the weight exp(s)",
    "softcap": _NOT_HERE,
    "sinks": _NOT_HERE,
    "s_aux": _NOT_HERE,
    "deterministic": "leave it out: results are bitwise reproducible from run to run",
    "return_attn_probs": _LSE,
    "return_softmax_lse": _LSE,
    "need_weights": _NO_WEIGHTS,
    "average_attn_weights": _NO_WEIGHTS,
    "return_attention_weights": _NO_WEIGHTS,
    "output_attentions": _NO_WEIGHTS,
    "cu_seqlens_q": _PACKED,
    "cu_seqlens_k": _PACKED,
    "max_seqlen": _LENGTH,
    "max_seqlen_q": _LENGTH,
    "max_seqlen_k": _LENGTH,
    "g": "pass log_decay of shape (batch, key/value heads, keys)",
    "head_first": "leave it out: q is (batch, heads, tokens, head_dim)",
    "initial_state": _STATE,
    "output_final_state": _STATE,
    "past_key_values": _STATE,
}

_OF_SOFTMAX = "it is an argument of fastmax_attention; this function is softmax attention"
_OF_FORWARD = "it is an argument of forward"
_OF_CONSTRUCTOR = "it is an argument of the constructor and an attribute of the module"

# Function -> entries that differ from INSTEAD.
_OF = {
    "flash_attention": {
        "softmax_scale": "pass scale",
        "scaling": "pass scale",
        "dropout_p": _NOT_HERE,
        "dropout": _OF_SOFTMAX,
        "drop_noise": _OF_SOFTMAX,
        "window_size": "pass window=(left, right)",
        "exact_window": "it is an argument of fastmax_attention; here all weights are exp(s), and window=w hides other keys",
        "temperature": "pass scale, its inverse",
        "rpe_matrix": _OF_SOFTMAX,
        "normalize": _OF_SOFTMAX,
        "lim": _OF_SOFTMAX,
        "p": _OF_SOFTMAX,
        "a0": _OF_SOFTMAX,
        "a1": _OF_SOFTMAX,
        "a2": _OF_SOFTMAX,
        "algorithm": _OF_SOFTMAX,
    },
    "FASTMultiHeadAttention": {
        "attention_mask": _OF_FORWARD,
        "drop_noise": _OF_FORWARD,
        "log_decay": _OF_FORWARD,
        "cu_seqlens": _OF_FORWARD,
        "return_lse": _OF_FORWARD,
        "log_input_gate": _OF_FORWARD,
    },
    "FASTMultiHeadAttention.forward": {"use_custom_gradient": _OF_CONSTRUCTOR},
}


def refuse(function: str, others: dict[str, object], causal: str = "causal") -> NoReturn:
    """Raises an error for an argument that `function` does not have.

    Args:
        function: name of the function.
        others: arguments that the function does not have, by name.
        causal: the function's name for a causal mask.

    Raises:
        TypeError: names the first argument, its value, and what to pass instead.
    """
    name, value = next(iter(others.items()))
    instead = _OF.get(function, {}).get(name) or INSTEAD.get(name)
    explained = f": {instead.format(causal=causal)}" if instead else ""
    raise TypeError(f"{name} is not an argument of {function}, got {describe(value)}{explained}")
