"""Attention, states and their gradients in PyTorch operations, on any device."""

from fastmax.core.transforms import differentiating, in_functorch, is_transformed, recording
from fastmax.eager import heads, linear, planner, quadratic, row_softmax  # noqa: F401  (submodules, read as attributes)
from fastmax.eager.attention import backward, forward
from fastmax.eager.blocks import (
    compute_dtype,
    empty_like_layout,
    in_layout_of,
    token_major,
)
from fastmax.eager.buffered import buffered_step_
from fastmax.eager.decay import finite_decay, not_above_zero, sum_of_decays, sums_in_window
from fastmax.eager.dispatch import algorithm_of
from fastmax.eager.features import state_rows
from fastmax.eager.input_gate import clamped as clamped_gate
from fastmax.eager.kept import (
    LEAST_DECAY,
    gather_kept,
    gather_kept_backward,
    kept_step,
    largest_so_far,
    must_be_chosen,
    slots_like,
)
from fastmax.eager.merge import merge_, merged, merged_backward
from fastmax.eager.normalization import empty_factors, normalize_tokens, normalize_tokens_backward, token_factors, unit_rows
from fastmax.eager.recurrent import decay_to_last, decode_step, decode_step_, softmax_step, sums_of_weights
from fastmax.eager.state import (
    States,
    backward_from_state,
    backward_of_keys,
    backward_of_queries,
    forward_from_state,
    gradients_of_sums,
    state_of_keys,
    state_of_queries,
    sums_dtype,
    zero_state,
)
from fastmax.eager.tiles import least_sum

__all__ = [
    "LEAST_DECAY",
    "States",
    "algorithm_of",
    "backward",
    "backward_from_state",
    "backward_of_keys",
    "backward_of_queries",
    "buffered_step_",
    "clamped_gate",
    "compute_dtype",
    "decay_to_last",
    "decode_step",
    "decode_step_",
    "differentiating",
    "empty_factors",
    "empty_like_layout",
    "finite_decay",
    "forward",
    "forward_from_state",
    "gather_kept",
    "gather_kept_backward",
    "gradients_of_sums",
    "in_functorch",
    "in_layout_of",
    "is_transformed",
    "kept_step",
    "largest_so_far",
    "least_sum",
    "merge_",
    "merged",
    "merged_backward",
    "must_be_chosen",
    "normalize_tokens",
    "normalize_tokens_backward",
    "not_above_zero",
    "recording",
    "slots_like",
    "softmax_step",
    "state_of_keys",
    "state_of_queries",
    "state_rows",
    "sum_of_decays",
    "sums_dtype",
    "sums_in_window",
    "sums_of_weights",
    "token_factors",
    "token_major",
    "unit_rows",
    "zero_state",
]
