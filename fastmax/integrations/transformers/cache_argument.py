"""The name of the argument by which transformers' models, `generate` and mask functions take a cache."""

from __future__ import annotations

import inspect

from transformers.masking_utils import create_causal_mask

# "past_key_values" up to transformers 5.23, "cache" from 5.24 on.
CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
