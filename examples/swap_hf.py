"""Run a Hugging Face model with Fastmax: train a small Llama with softmax, swap its attention, train on, and generate.

    python examples/swap_hf.py          # needs transformers: pip install 'transformers>=5.4'

The Llama is made from a configuration, so nothing is downloaded; a model of `from_pretrained` is swapped in the same way. Its
tokens are the bytes of Python's `argparse.py`; 64 windows of 128 bytes are held out. Llama applies rotary positions to queries
and keys before it calls attention, so they work with Fastmax unchanged.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import fastmax.integrations.transformers as integration

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=200, help="training steps before the swap, and again after it")
args = parser.parse_args()

text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
windows = text.unfold(0, 128, 128)  # (windows, 128)
train, held_out = windows[:-64], windows[-64:]
torch.manual_seed(1337)
sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes, bos_token_id=None, eos_token_id=None))
# With Fastmax the last 16 keys are still weighed by exp, and generate makes a state of constant size, not a growing cache.
integration.configure(model, exact_window=16, constant_memory=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

print("loss on the held-out windows, nats per byte")
for attention in ("sdpa", "fastmax"):  # PyTorch's softmax attention, then Fastmax with the same weights
    model.set_attn_implementation(attention)
    with torch.no_grad():
        before = model(input_ids=held_out, labels=held_out).loss
    for _ in range(args.steps):
        batch = train[torch.randint(len(train), (8,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = model(input_ids=held_out, labels=held_out).loss
    print(f"{attention:<8} {before:.4f}, after {args.steps} steps {after:.4f}", flush=True)

tokens = model.eval().generate(torch.tensor([list(b"    def ")]), max_new_tokens=100, do_sample=True)
print(bytes(tokens[0].tolist()).decode(errors="replace"))
