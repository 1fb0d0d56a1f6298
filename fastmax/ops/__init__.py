"""The registered operators of `torch.ops.fastmax`; `registration.OPERATORS` lists them.

Each file registers a family of operators: `sequences`, `merge`, `states`, `steps`, `decays`, `kept`, `normalization`,
`normalized_attention`, `heads` and `row_softmax`. Schema, implementation, fake implementation and flop formula of an operator
stand side by side. `registration` registers them, and `autograd` records calls.

The implementation uses PyTorch operations and runs on every device. The compiled library (`fastmax.ops.extension`) adds CUDA
kernels. `registration.Operator` decides which of the two runs a call: no kernel covers float64, rpe matrices, head dims above
256 and old devices.

`fastmax.core.validation` has checked the arguments, and `fastmax.core.call` flattens them into a schema. `exact_window_*`
choose between one pass over tiles (`fastmax.eager.exact`) and calls for the local and the global keys
(`fastmax.ops.exact_window`).

The backward of attention needs q, k, v, o, the denominators z (b, h, n) and the tensors of the call. Softmax and
exact windows save the log-sum-exp in place of z.
"""

from __future__ import annotations

from fastmax.ops import compile_cache, extension
from fastmax.ops.autocast import autocast_to as autocast_to
from fastmax.ops.autocast import in_autocast as in_autocast
from fastmax.ops.autocast import without_autocast as without_autocast
from fastmax.ops.autograd import refuse_second_derivative as refuse_second_derivative
from fastmax.ops.decays import decay_sums as decay_sums
from fastmax.ops.decays import finite_decay as finite_decay
from fastmax.ops.heads import MAX_CONVOLUTION as MAX_CONVOLUTION
from fastmax.ops.heads import fuses_join_heads as fuses_join_heads
from fastmax.ops.heads import fuses_split_heads as fuses_split_heads
from fastmax.ops.heads import join_heads as join_heads
from fastmax.ops.heads import rotary_factors as rotary_factors
from fastmax.ops.heads import split_heads as split_heads
from fastmax.ops.kept import gather_kept as gather_kept
from fastmax.ops.kept import kept_step_ as kept_step_
from fastmax.ops.kept import largest_so_far as largest_so_far
from fastmax.ops.normalization import normalize_tokens as normalize_tokens
from fastmax.ops.normalized_attention import normalized_attention as normalized_attention
from fastmax.ops.normalized_attention import normalizes_during_attention as normalizes_during_attention
from fastmax.ops.row_softmax import softmax as softmax
from fastmax.ops.sequences import attention as attention
from fastmax.ops.sequences import attention_backward as attention_backward
from fastmax.ops.states import gradients_of_sums as gradients_of_sums
from fastmax.ops.states import prefill as prefill
from fastmax.ops.states import prefill_backward as prefill_backward
from fastmax.ops.states import prefill_backward_of_keys_ as prefill_backward_of_keys_
from fastmax.ops.states import prefill_backward_of_queries as prefill_backward_of_queries
from fastmax.ops.states import prefill_saved_ as prefill_saved_
from fastmax.ops.states import state_of_keys as state_of_keys
from fastmax.ops.states import state_of_queries as state_of_queries
from fastmax.ops.steps import buffered_step_ as buffered_step_
from fastmax.ops.steps import decode_step as decode_step
from fastmax.ops.steps import decode_step_ as decode_step_
from fastmax.ops.steps import refuse_to_record as refuse_to_record

extension.load()
compile_cache.add_tag()
