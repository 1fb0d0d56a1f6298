"""Floating-point operations of attention, as `torch.utils.flop_counter.FlopCounterMode` counts them.

Each operator's formula stands beside it and is made of these functions.

The convention is PyTorch's for its own attention: matrix products only, a multiply-add as two operations, and in the backward
the five products of the definition, whatever a kernel computes again. Other than there, pairs of a query and a key that it does
not see are not counted: by `causal`, windows and, where their values are at hand (not those of fake tensors), packed sequences
and decays of -inf. Keys that `attention_mask` hides are.

    pairs        d + dv multiply-adds a pair of a query head and a key, backward 3 d + 2 dv; with an rpe matrix 2 d and 6 d
    states       F dv to add a token to a state, or to read it, F = d (p = 1) or d + d (d + 1) / 2 (p = 2)

The quadratic algorithm and softmax consist of pairs. The linear one adds keys to states once for each key/value head and reads
them once for each query head, and the backward takes five such passes: adds k, reads for grad_q, adds q, reads for grad_k and
grad_v. Causal, its pairs are those within chunks, which are counted as CHUNK queries long, and tokens that nothing reads from a
state are not in one; those of a prefill are all in states that something reads. Sums without a product (denominators, the
gradient of log_decay) are not counted, as a softmax's are not.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from fastmax.core.call import Call
from fastmax.core.score import Softmax
from fastmax.eager import algorithm_of

CHUNK = 256  # queries; what runs has 64 to 2048, which changes the count by a few percent


def visible_pairs(q: Tensor, k: Tensor, call: Call) -> int:
    """Pairs of a query head and a key, in all heads together."""
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
    """Of (b, hk, n); None where there are none to look at."""
    return None if bound is None or is_fake(bound) or bound.device.type == "meta" else bound.detach().cpu().numpy()


def count_attention(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    """Counts the products of a forward or a backward of 4-d q, k and v."""
    (b, h, n, d), (_, hk, m, dv) = q.shape, v.shape
    of_score = d if call.rpe_matrix is None else 2 * d
    products = 3 * of_score + 2 * dv if backward else of_score + dv
    if isinstance(call.score, Softmax) or algorithm_of(q, k, v, call) == "quadratic":
        return 2 * products * visible_pairs(q, k, call)
    readers, keys, pairs = n, m, 0
    if call.causal:  # what is in no other chunk than a token's own
        readers, keys = n if m > n else n - min(n, CHUNK), m - _last_chunk(n)
        pairs = b * h * pairs_within_chunks(n)
    features = d + (d * (d + 1) // 2 if call.score.order == 2 else 0)
    of_queries, of_keys = b * h * readers, b * hk * keys
    passes = 2 * of_queries + 3 * of_keys if backward else of_queries + of_keys
    return 2 * (features * dv * passes + products * pairs)


def _last_chunk(n: int) -> int:
    """Its queries."""
    return (n - 1) % CHUNK + 1 if n else 0


def pairs_within_chunks(n: int) -> int:
    """Counts the causal pairs of n queries and keys that are in the same chunk."""
    last = _last_chunk(n)
    return sum(size * (size + 1) // 2 for size in (*(CHUNK,) * ((n - last) // CHUNK), last))


def count_step(q: Tensor, kv_state: Tensor) -> int:
    """Counts the products of a step: one token is added to each state and each query head reads one. The first feature is 1."""
    b, hk, features, dv = kv_state.shape
    return 2 * b * (hk + q.shape[1]) * (features - 1) * dv


def count_states(b: int, tokens: int, features: int, dv: int) -> int:
    """Counts the products of adding so many tokens, in all heads together, to states of so many features, or reading them."""
    return 2 * b * tokens * (features - 1) * dv
