"""`import fastmax.integrations.transformers` gives Hugging Face models `attn_implementation="fastmax"`.

    import fastmax.integrations.transformers
    model = AutoModelForCausalLM.from_config(config, attn_implementation="fastmax")

Options of `fastmax_attention` come from the model's configuration: `config.fastmax = {"p": 1}`, or `configure(model, p=1)`.
The options and the choice of fastmax are saved with it. `temperature` defaults to the inverse of the scale of the softmax
attention that is replaced.

Whatever is not fastmax over all (earlier) keys raises an error: attention of a model's own in the first forward (`observation`)
or when the model is made (`models`), and a mask or an argument that asks for another function in the layer that receives it
(`masks`, `forward`).
"""

from fastmax.integrations.transformers._installed import MINIMUM_VERSION
from fastmax.integrations.transformers.cache import FastmaxCache
from fastmax.integrations.transformers.forward import fastmax_attention_forward, register
from fastmax.integrations.transformers.gates import add_decay, add_input_gate
from fastmax.integrations.transformers.generation import watch_generation
from fastmax.integrations.transformers.masks import FastmaxMask, fastmax_mask
from fastmax.integrations.transformers.models import check, configure, watch
from fastmax.integrations.transformers.options import NAME, OPTIONS

__all__ = [
    "MINIMUM_VERSION",
    "NAME",
    "OPTIONS",
    "FastmaxCache",
    "FastmaxMask",
    "add_decay",
    "add_input_gate",
    "check",
    "configure",
    "fastmax_attention_forward",
    "fastmax_mask",
]

register()
watch()
watch_generation()
