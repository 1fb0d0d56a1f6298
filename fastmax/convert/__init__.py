"""Conversion of trained softmax models: `swap` the attention, `transfer` the teacher's attention, `finetune` the model.

    teacher = copy.deepcopy(model)
    new = convert.swap(model, exact_window=128, decay=True)
    convert.fit_polynomial(model, teacher, batches)
    convert.transfer(model, teacher, batches, new, steps=200)
    convert.finetune(model, batches, steps=1000)

The functions take models with layers `FastmaxSelfAttention(attention="softmax")`, and Hugging Face models that use the
attention interface of transformers. A batch is a tensor of tokens (b, n), a mapping of keyword arguments of the model, or a
sequence of positional arguments. Swap, transfer and fine-tuning are the steps of LoLCATs (Zhang et al., 2024,
arXiv:2410.10254).
"""

from fastmax.convert.finetune import finetune
from fastmax.convert.polynomial import fit_polynomial
from fastmax.convert.swap import swap
from fastmax.convert.transfer import attention_errors, transfer

__all__ = ["attention_errors", "finetune", "fit_polynomial", "swap", "transfer"]
