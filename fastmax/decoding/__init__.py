"""Generation with a state of constant size: `init_state`, `prefill`, `step` and `step_`."""

from fastmax.decoding.initial_state import init_state
from fastmax.decoding.parallel_prefill import prefill
from fastmax.decoding.recurrent_step import step, step_
from fastmax.decoding.state import DecodeState

__all__ = ["DecodeState", "init_state", "prefill", "step", "step_"]
