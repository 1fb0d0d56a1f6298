"""From softmax to Fastmax in a trained model: `swap` the attention, `transfer` what it did, `finetune` the whole.

    teacher = copy.deepcopy(model)
    new = convert.swap(model, exact_window=128, decay=True)
    convert.fit_polynomial(model, teacher, batches)
    convert.transfer(model, teacher, batches, new, steps=200)
    convert.finetune(model, batches, steps=1000)

Each works on models with layers `FastmaxSelfAttention(attention="softmax")`, and on Hugging Face models whose attention goes
through transformers' interface. A batch is a tensor of tokens (b, n), a mapping of the model's keywords, or a sequence of its
positional arguments. Swap, transfer and fine-tuning are the steps of LoLCATs (Zhang et al., 2024, arXiv:2410.10254).
"""

from fastmax.convert.finetune import finetune
from fastmax.convert.polynomial import fit_polynomial
from fastmax.convert.swap import swap
from fastmax.convert.transfer import attention_errors, transfer

__all__ = ["attention_errors", "finetune", "fit_polynomial", "swap", "transfer"]
