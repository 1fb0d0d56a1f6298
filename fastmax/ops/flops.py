"""Counts the floating-point operations of attention for `torch.utils.flop_counter.FlopCounterMode`.

Each operator has a formula beside its implementation, which calls these functions.

The convention is that of PyTorch for its own attention. Only matrix products count, and a multiply-add is two operations. The
backward counts the five products of the definition, whatever a kernel recomputes. Unlike in PyTorch, pairs of a query and a key
that it does not see do not count. That holds for `causal` and windows, and for packed sequences and decays of -inf if their
values are known (those of fake tensors are not). Keys that `attention_mask` hides do count.

Multiply-adds:

    a pair of a query head and a key           d + dv, backward 3 d + 2 dv; with an rpe matrix 2 d and 6 d in place of d and 3 d
    adding a token to a state, or reading it   F dv with F = d (p = 1) or d + d (d + 1) / 2 (p = 2)

The quadratic algorithm and softmax consist of pairs. The linear algorithm adds each key of a key/value head to a state, and
each query of a query head reads a state. Its backward has five such passes: it adds k, reads for grad_q, adds q, and reads for
grad_k and grad_v. The causal linear algorithm also has the pairs within chunks, which count as CHUNK queries long. It adds a
token to a state only if the state is read later; a prefill adds all tokens. Sums without a product (denominators, the gradients
of log_decay and log_input_gate) do not count, as those of softmax do not, nor do products with factors of keys (decays, gates).
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from fastmax.core.call import Call
from fastmax.core.score import Softmax
from fastmax.eager import algorithm_of

CHUNK = 256  # queries; the implementations have 64 to 2048, which changes the count by a few percent


def visible_pairs(q: Tensor, k: Tensor, call: Call) -> int:
    """Counts the pairs of a query and a key that it sees, over all query heads."""
    (b, h, n, _), (_, hk, m, _) = q.shape, k.shape
    position = np.arange(n) + (m - n)
    first = np.zeros(n, dtype=np.int64) if call.left < 0 else position - call.left
    last = np.full(n, m - 1) if call.right < 0 else position + call.right
    first, last = np.maximum(first, 0), np.minimum(last, position if call.causal else m - 1)
    if (bound := _values(call.k_start)) is not None:
        first = np.maximum(first, bound)
    if (bound := _values(call.k_end)) is not None:
        last = np.minimum(last, bound - 1)
    pairs = np.broadcast_to(np.maximum(last - first + 1, 0), (b, hk, n))
    return int(pairs.sum()) * (h // hk) if hk else 0


def _values(bound: Tensor | None) -> np.ndarray | None:
    """Returns the values of a bound (b, hk, n); None if there is no bound or its values are unknown."""
    return None if bound is None or is_fake(bound) or bound.device.type == "meta" else bound.detach().cpu().numpy()


def count_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    """Counts the products of a forward or a backward of 4-d q, k and v."""
    (b, h, n, d), (_, hk, m, dv) = q.shape, v.shape
    of_score = d if call.rpe_matrix is None else 2 * d
    products = 3 * of_score + 2 * dv if backward else of_score + dv
    if isinstance(call.score, Softmax) or algorithm_of(q, k, v, call) == "quadratic":
        return 2 * products * visible_pairs(q, k, call)
    readers, keys, pairs = n, m, 0
    if call.causal:  # queries of the first chunk read no state unless keys precede them; keys of the last chunk are in none
        readers, keys = n if m > n else n - min(n, CHUNK), m - _last_chunk(n)
        pairs = b * h * pairs_within_chunks(n)
    features = d + (d * (d + 1) // 2 if call.score.order == 2 else 0)
    of_queries, of_keys = b * h * readers, b * hk * keys
    passes = 2 * of_queries + 3 * of_keys if backward else of_queries + of_keys
    return 2 * (features * dv * passes + products * pairs)


def _last_chunk(n: int) -> int:
    """Returns the number of queries in the last chunk."""
    return (n - 1) % CHUNK + 1 if n else 0


def pairs_within_chunks(n: int) -> int:
    """Counts the causal pairs of n queries and keys that are in the same chunk."""
    last = _last_chunk(n)
    return sum(size * (size + 1) // 2 for size in (*(CHUNK,) * ((n - last) // CHUNK), last))


def count_step(q: Tensor, kv_state: Tensor) -> int:
    """Counts the products of a step: a token is added to each state, and each query head reads a state. The first feature is 1
    and needs no product."""
    b, hk, features, dv = kv_state.shape
    return 2 * b * (hk + q.shape[1]) * (features - 1) * dv


def count_states(b: int, tokens: int, features: int, dv: int) -> int:
    """Counts the products of adding tokens to states, or of reading states. `tokens` counts those of all heads together, and
    `features` are those of a state."""
    return 2 * b * tokens * (features - 1) * dv
