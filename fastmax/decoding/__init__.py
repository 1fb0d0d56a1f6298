"""Generation with a state of constant size: `init_state`, `prefill`, `step` and `step_`."""

from fastmax.decoding.functional import init_state, prefill, step, step_
from fastmax.decoding.state import DecodeState

__all__ = ["DecodeState", "init_state", "prefill", "step", "step_"]
