"""What `torch.utils.flop_counter.FlopCounterMode` counts for the registered operators; `fastmax.ops` registers it.

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

from fastmax.core.call import EXACT_TILES, EXACT_WINDOW, FAR, FASTMAX, FLASH, Call, Signature
from fastmax.core.score import Softmax
from fastmax.eager import algorithm_of, state_rows
from fastmax.ops.exact_window import Forward, far_keys, near_call

CHUNK = 256  # queries; what runs has 64 to 2048, which changes the count by a few percent


def visible_pairs(q: Tensor, k: Tensor, call: Call) -> int:
    """Pairs of a query head and a key, in all heads together."""
    (b, h, n, _), (_, hk, m, _) = q.shape, k.shape
    position = np.arange(n) + (m - n)
    first = np.zeros(n, dtype=np.int64) if call.left < 0 else position - call.left
    last = np.full(n, m - 1) if call.right < 0 else position + call.right
    first, last = np.maximum(first, 0), np.minimum(last, position if call.causal else m - 1)
    if (bound := _values(call.first_key)) is not None:
        first = np.maximum(first, bound)
    if (bound := _values(call.end_key)) is not None:
        last = np.minimum(last, bound - 1)
    pairs = np.broadcast_to(np.maximum(last - first + 1, 0), (b, hk, n))
    return int(pairs.sum()) * (h // hk) if hk else 0


def _values(bound: Tensor | None) -> np.ndarray | None:
    """Of (b, hk, n); None where there are none to look at."""
    return None if bound is None or is_fake(bound) or bound.device.type == "meta" else bound.detach().cpu().numpy()


def _attention(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    (b, h, n, d), (_, hk, m, dv) = q.shape, v.shape
    of_score = d if call.rpe_matrix is None else 2 * d
    products = 3 * of_score + 2 * dv if backward else of_score + dv
    if isinstance(call.score, Softmax) or algorithm_of(q, k, v, call) == "quadratic":
        return 2 * products * visible_pairs(q, k, call)
    readers, keys, pairs = n, m, 0
    if call.causal:  # what is in no other chunk than a token's own
        readers, keys = n if m > n else n - min(n, CHUNK), m - _last_chunk(n)
        pairs = b * h * _pairs_within_chunks(n)
    features = d + (d * (d + 1) // 2 if call.score.order == 2 else 0)
    of_queries, of_keys = b * h * readers, b * hk * keys
    passes = 2 * of_queries + 3 * of_keys if backward else of_queries + of_keys
    return 2 * (features * dv * passes + products * pairs)


def _last_chunk(n: int) -> int:
    """Its queries."""
    return (n - 1) % CHUNK + 1 if n else 0


def _pairs_within_chunks(n: int) -> int:
    last = _last_chunk(n)
    return sum(size * (size + 1) // 2 for size in (*(CHUNK,) * ((n - last) // CHUNK), last))


def _forward(q, k, v, *arguments, signature: Signature = FASTMAX, out_val=None) -> int:
    return _attention(q, k, v, signature.call(arguments), backward=False)


def _backward(grad_o, grad_z, q, k, v, o, z, *arguments, signature: Signature = FASTMAX, out_val=None) -> int:
    return _attention(q, k, v, signature.call(arguments), backward=True)


def _far_forward(o, lse, q, k, v, *arguments, out_val=None) -> int:
    return _attention(q, k, v, FAR.call(arguments)._replace(causal=True), backward=False)


def _far_backward(grad_q, grad_k, grad_v, grad_o, grad_z, q, k, v, o, z, *arguments, out_val=None) -> int:
    return _attention(q, k, v, FAR.call(arguments)._replace(causal=True), backward=True)


def _flash_forward(*arguments, out_val=None) -> int:
    return _forward(*arguments, signature=FLASH)


def _flash_backward(*arguments, out_val=None) -> int:
    return _backward(*arguments, signature=FLASH)


def _exact_window(q: Tensor, k: Tensor, v: Tensor, call: Call, backward: bool) -> int:
    """Attention of the near keys, and of queries and their far keys."""
    total = _attention(q, k, v, near_call(call), backward)
    for far in far_keys(q, k, call):
        total += _attention(far.queries_of(q), far.keys_of(k), far.keys_of(v), far.call, backward)
    return total


def _exact_window_forward(q, k, v, *arguments, out_val=None) -> int:
    return _exact_window(q, k, v, EXACT_WINDOW.call(arguments), backward=False)


def _exact_window_backward(grad_o, grad_lse, q, k, v, *arguments, out_val=None) -> int:
    return _exact_window(q, k, v, EXACT_WINDOW.call(arguments[len(Forward._fields) :]), backward=True)


def _exact_tiles_forward(*arguments, out_val=None) -> int:
    return _forward(*arguments, signature=EXACT_TILES)


def _exact_tiles_backward(*arguments, out_val=None) -> int:
    return _backward(*arguments, signature=EXACT_TILES)


def _decode_step(q, k, v, values, *arguments, out_val=None) -> int:
    b, hk, features, dv = values.shape
    return 2 * b * (hk + q.shape[1]) * (features - 1) * dv  # the first feature is 1


def _buffered_step(q, k, v, values, weights, near_keys, *arguments, out_val=None) -> int:
    """Every token joins the sums in the end; those beside them are looked at one by one."""
    (b, h, _, d), places = q.shape, near_keys.shape[2]
    return _decode_step(q, k, v, values) + 2 * b * h * places * (d + v.shape[3])


def _prefill(q, k, v, mask, log_decay, first_key, values, *arguments, out_val=None) -> int:
    """Every token is added to a state and reads one."""
    (b, hk, features, dv), (_, h, n, d) = values.shape, q.shape
    return 2 * b * ((hk + h) * n * (features - 1) * dv + h * (d + dv) * _pairs_within_chunks(n))


def _prefill_backward(*arguments, out_val=None) -> int:
    """Five passes through states, of keys, then of queries: every token is added, and reads."""
    (b, hk, features, dv), (_, h, n, d) = arguments[14].shape, arguments[4].shape
    passes = (2 * h + 3 * hk) * n
    return 2 * b * (passes * (features - 1) * dv + h * (3 * d + 2 * dv) * _pairs_within_chunks(n))


def _prefill_kept(q, k, v, mask, log_decay, first_key, values, weights, kept, *options, out_val=None) -> int:
    """`_prefill`; what was kept was added to states before."""
    (b, h, n, d), (_, hk, _, dv) = q.shape, v.shape
    passes = (h if kept.numel() > 0 else hk + h) * n
    return 2 * b * (passes * (state_rows(d, options[4]) - 1) * dv + h * (d + dv) * _pairs_within_chunks(n))


def _prefill_backward_of_queries(g, e, q, k, v, mask, log_decay, first_key, values, weights, *options, out_val=None) -> int:
    """Of `_prefill_backward` keys are added, and queries read; of five products a pair, three."""
    (b, h, n, d), (_, hk, _, dv) = q.shape, v.shape
    return 2 * b * ((hk + h) * n * (state_rows(d, options[4]) - 1) * dv + h * (2 * d + dv) * _pairs_within_chunks(n))


def _prefill_backward_of_keys(g, e, grad_values, grad_weights, q, k, v, *arguments, out_val=None) -> int:
    """The rest; what was kept was added to states before."""
    kept, options = arguments[5], arguments[6:]
    (b, h, n, d), (_, hk, _, dv) = q.shape, v.shape
    passes = (2 * hk if kept.numel() > 0 else 2 * hk + h) * n
    return 2 * b * (passes * (state_rows(d, options[4]) - 1) * dv + h * (d + dv) * _pairs_within_chunks(n))


def _state_of_keys(k, v, mask, log_decay, first_key, scale, a0, a1, a2, p, allow_tf32, keep, out_val=None) -> int:
    """Every token is added to a state."""
    (b, hk, n, d), dv = k.shape, v.shape[3]
    return 2 * b * hk * n * (state_rows(d, p) - 1) * dv


def _state_of_queries(g, e, q, k, v, *arguments, out_val=None) -> int:
    """As of keys, for every query head."""
    return _state_of_keys(q, v, None, *arguments)


# By operator. A softmax of rows, a merge and a normalisation have no products.
FORMULAS = {
    "forward": _forward,
    "backward": _backward,
    "far_forward_": _far_forward,
    "far_backward_": _far_backward,
    "flash_forward": _flash_forward,
    "flash_backward": _flash_backward,
    "exact_window_forward": _exact_window_forward,
    "exact_window_backward": _exact_window_backward,
    "exact_tiles_forward": _exact_tiles_forward,
    "exact_tiles_backward": _exact_tiles_backward,
    "decode_step": _decode_step,
    "decode_step_": _decode_step,
    "buffered_step_": _buffered_step,
    "prefill": _prefill,
    "prefill_backward": _prefill_backward,
    "state_of_keys": _state_of_keys,
    "prefill_kept_": _prefill_kept,
    "state_of_queries": _state_of_queries,
    "prefill_backward_of_queries": _prefill_backward_of_queries,
    "prefill_backward_of_keys_": _prefill_backward_of_keys,
}
