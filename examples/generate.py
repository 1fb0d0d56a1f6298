"""Stream text from a checkpoint of train_lm.py, train_char_lm.py or convert_lm.py in constant memory.

    python examples/generate.py out/lm/checkpoint.pt --prompt "def main(" --tokens 2000
    python examples/generate.py out/lm/checkpoint.pt --compare --contexts 1024 16384 131072

A Fastmax layer keeps a state of constant size, and on a GPU a token is one CUDA graph. Softmax layers of a hybrid have a
key/value cache, which grows, so a hybrid runs without a graph.

--compare measures memory and time per token at several context lengths, for this model and for the same model with softmax in
all layers. The softmax model writes keys and values into preallocated memory and calls PyTorch's scaled_dot_product_attention,
without decays. Both use CUDA graphs, or neither does for a hybrid. --compare writes OUT/generate.csv and .png.
"""

import argparse
import codecs
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from model import GPT, OF_FASTMAX, GPTConfig, make_layer, sample
from options import count, default_device, fill_in, not_negative
from text import load_bpe
from torch import Tensor
from tqdm import tqdm
from training import write_csv

from fastmax import FastmaxSelfAttention
from fastmax.decoding.state import DecodeState
from fastmax.nn.key_value_cache import KeyValueCache
from fastmax.nn.rotary import Rotation, rotate
from fastmax.nn.self_attention_state import SelfAttentionState

CHUNK = 2048  # tokens of a prompt per forward pass


@dataclass(eq=False)
class CacheInPlace:
    """Preallocated keys and values (b, hk, capacity, d) of which `length` tokens are in use."""

    keys: Tensor
    values: Tensor
    length: int

    @classmethod
    def of(cls, cache: KeyValueCache, more: int) -> "CacheInPlace":
        """Copies a cache, with room for `more` tokens."""
        keys, values = F.pad(cache.keys, (0, 0, 0, more)), F.pad(cache.values, (0, 0, 0, more))
        return cls(keys, values, cache.keys.shape[2])

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    def tensors(self) -> dict[str, Tensor]:
        return {"keys": self.keys, "values": self.values}

    def map(self, function: Callable[[Tensor], Tensor]) -> "CacheInPlace":
        return replace(self, **{name: function(x) for name, x in self.tensors().items()})


class CachedLayer(FastmaxSelfAttention):
    """A softmax layer without decay and window whose `step_` updates a CacheInPlace."""

    def step_(self, x: Tensor, state: SelfAttentionState) -> Tensor:
        qkv, cache = self.qkv_proj(x), state.attention
        if self.conv is not None:
            qkv, recent = self.conv(qkv, state.recent)
            state.recent.copy_(recent)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.split(self.widths, dim=-1))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_dim:
            rotation = Rotation.at(state.positions.unsqueeze(-1), self.rope_dim, self.rope_base, q.dtype)
            q, k = rotate(q, rotation), rotate(k, rotation)
        state.positions.add_(1)
        here, cache.length = cache.length, cache.length + 1
        cache.keys[:, :, here], cache.values[:, :, here] = k[:, 0], v[:, 0]
        keys, values = cache.keys[:, :, : cache.length], cache.values[:, :, : cache.length]
        grouped = self.num_heads != self.num_kv_heads
        o = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, enable_gqa=grouped).transpose(1, 2)
        o = (o if self.output_norm is None else self.output_norm(o)).flatten(2)
        if self.gate_proj is not None:
            o = o * F.silu(self.gate_proj(x))
        return self.out_proj(o)


def load_model(checkpoint: dict, device: str, dtype: torch.dtype) -> GPT:
    model = GPT(GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return prepared(model, device, dtype)


def prepared(model: GPT, device: str, dtype: torch.dtype) -> GPT:
    """Casts the model to `dtype` for inference, except the biases of decay gates.

    bfloat16 represents no half-life between 977 and 1007 tokens.
    """
    biases = {name: x.clone() for name, x in model.named_parameters() if name.endswith("decay_proj.bias")}
    model = model.to(device, dtype).eval().requires_grad_(False)
    for name, bias in biases.items():
        model.get_parameter(name).data = bias.detach().to(device)
    return model


def with_softmax(model: GPT) -> GPT:
    """Returns the model with a CachedLayer in all blocks and the same weights, without decay and input gates."""
    without = OF_FASTMAX | {"window", "steady_heads"}
    parts, softmax_parts = (
        {name: x for name, x in of_layers.items() if name not in without} | {"decay": False}
        for of_layers in (model.config.parts, model.config.softmax_parts)
    )
    config = replace(model.config, attention="softmax", parts=parts, softmax_parts=softmax_parts)
    softmax = GPT(config, partial(make_layer, layer=CachedLayer))
    weights = model.state_dict()
    softmax.load_state_dict({name: weights[name] for name in softmax.state_dict()})
    weight = model.embedding.weight
    return prepared(softmax, weight.device, weight.dtype)


@torch.no_grad()
def read(model: GPT, tokens: Tensor, states: list[SelfAttentionState]) -> tuple[Tensor, list[SelfAttentionState]]:
    """Reads tokens (B, T), T >= 1, in chunks; returns the logits (B, vocab) of the last token and the new states."""
    for chunk in tokens.split(CHUNK, dim=1):
        logits, states = model.prefill(chunk, states)
    return logits[:, -1], states


def in_place(states: list[SelfAttentionState], more: int) -> list[SelfAttentionState]:
    """Returns copies of the states for `CachedLayer`, with room for `more` tokens."""
    return [replace(state.clone(), attention=CacheInPlace.of(state.attention, more)) for state in states]


def make_step(model: GPT, states: list[SelfAttentionState], graph: bool) -> Callable[[Tensor], Tensor]:
    """Returns a function that updates the states with tokens (B, 1) and returns logits (B, vocab).

    With `graph=True` it replays a CUDA graph of one step. A CacheInPlace then does not grow: use it for timing only.
    A KeyValueCache, which every step replaces, cannot be captured.
    """
    if not graph:
        return lambda tokens: model.step_(tokens, states)[:, -1]
    tokens = torch.zeros(len(states[0].positions), 1, dtype=torch.int64, device=states[0].device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries select kernels before the capture, on copies of the states
        for _ in range(2):
            model.step_(tokens, [state.clone() for state in states])
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        logits = model.step_(tokens, states)[:, -1]

    def replay(new: Tensor) -> Tensor:
        tokens.copy_(new)
        recorded.replay()
        return logits

    return replay


def generate(
    step: Callable[[Tensor], Tensor], logits: Tensor, count: int, temperature: float, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yields `count` sampled tokens (B, 1): the first from `logits` (B, vocab), the others from `step(previous)`."""
    for made in range(count):
        token = sample(logits, temperature, generator)
        yield token
        if made + 1 < count:
            logits = step(token)


def decoder(tokenizer: Path | None) -> Callable[[int], str]:
    """Returns a function from the next token to the text it completes, empty within a multi-byte character."""
    if tokenizer is None:
        utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda token: utf8.decode(bytes([token]))
    from tokenizers.decoders import DecodeStream

    bpe, stream = load_bpe(tokenizer), DecodeStream()
    return lambda token: stream.step(bpe, token) or ""


def mib(states: list[SelfAttentionState]) -> float:
    return sum(state.nbytes for state in states) / 2**20


def time_per_token(model: GPT, states: list[SelfAttentionState], steps: int, graph: bool) -> float:
    """Returns the median time of a step in milliseconds."""
    step = make_step(model, states, graph)
    device, batch = states[0].device, len(states[0].positions)
    tokens, times = torch.zeros(batch, 1, dtype=torch.int64, device=device), []
    step(tokens)
    for _ in range(steps):
        synchronize(device)
        began = time.perf_counter()
        step(tokens)
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def init_states(model: GPT, batch: int) -> list[SelfAttentionState]:
    """Returns empty states. On a GPU they buffer 32 tokens, so most steps read the state without writing it."""
    return model.init_states(batch, flush_interval=32 if next(model.parameters()).is_cuda else 1)


def compare(model: GPT, contexts: list[int], batch: int, steps: int, graph: bool) -> list[dict]:
    """Returns rows of context length, MiB of the state and of the key/value cache, and ms of the next token with each."""
    softmax, rows = with_softmax(model), []
    states = init_states(model, batch)
    device, generator = states[0].device, torch.Generator().manual_seed(0)
    for before, context in tqdm(list(itertools.pairwise([0, *sorted(set(contexts))])), desc="compare", unit="context"):
        tokens = torch.randint(model.config.vocab_size, (batch, context - before), generator=generator).to(device)
        _, states = read(model, tokens, states)
        caches = [cache_of_noise(state, context) for state in softmax.init_states(batch)]
        row = {"context": context, "batch": batch}
        row |= {"state_mib": mib(states), "state_ms": time_per_token(model, [x.clone() for x in states], steps, graph)}
        row |= {"cache_mib": mib(in_place(caches, 0))}
        row |= {"cache_ms": time_per_token(softmax, in_place(caches, steps + 1), steps, graph)}
        rows.append(row)
    return rows


def cache_of_noise(state: SelfAttentionState, tokens: int) -> SelfAttentionState:
    """Returns the state with a cache of `tokens` random keys and values, which serves to measure memory and time."""
    keys, decays = state.attention.keys, state.attention.decays
    b, hk, _, d = keys.shape
    made = (keys.new_empty(b, hk, tokens, d).normal_() for _ in range(2))
    cache = KeyValueCache(
        *made, keys.new_ones(b, tokens, dtype=torch.bool), decays.new_zeros(b, hk, tokens), state.attention.window
    )
    return replace(state, attention=cache, positions=state.positions + tokens)


def save_comparison(rows: list[dict], stem: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    stem.parent.mkdir(parents=True, exist_ok=True)
    write_csv(rows, stem.with_suffix(".csv"))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    for axis, quantity, label in zip(axes, ("mib", "ms"), ("memory (MiB)", "time per token (ms)"), strict=True):
        for name, title in (("state", "this model"), ("cache", "softmax with a key/value cache")):
            axis.plot([row["context"] for row in rows], [row[f"{name}_{quantity}"] for row in rows], marker="o", label=title)
        axis.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=label)
    axes[0].legend()
    figure.savefig(f"{stem}.png", dpi=150)
    plt.close(figure)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="def ")
    parser.add_argument("--tokens", type=count, default=500, help="tokens to generate")
    parser.add_argument("--temperature", type=not_negative, default=0.8, help="0: the most likely token")
    parser.add_argument("--compare", action="store_true", help="measure memory and time per token")
    parser.add_argument("--contexts", type=count, nargs="+", help="context lengths of --compare")
    parser.add_argument("--batch", type=count, default=1, help="batch size of --compare")
    parser.add_argument("--steps", type=count, default=50, help="timed tokens of --compare per context length")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--graph", action=argparse.BooleanOptionalAction, default=True, help="CUDA graphs on a GPU")
    parser.add_argument("--device", default=default_device())
    parser.add_argument("--seed", type=int, default=1337)
    parser.add_argument("--out", type=Path, default=Path("out"))
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = arguments()
    args = parser.parse_args(argv)
    fill_in(args, dtype=("bfloat16", "float32"), contexts=([1024, 4096, 16384, 65536], [256, 1024, 4096]))
    if not args.prompt:
        parser.error("--prompt must not be empty")
    checkpoint = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
    model = load_model(checkpoint, args.device, getattr(torch, args.dtype))
    constant = all(isinstance(state.attention, DecodeState) for state in model.init_states(1))
    graph = args.graph and torch.device(args.device).type == "cuda"

    if args.compare:
        rows = compare(model, args.contexts, args.batch, args.steps, graph and constant)
        print(f"\n{'':>10}{'this model':>20}{'softmax with a cache':>24}")
        print(f"{'context':>10}{'MiB':>10}{'ms':>10}{'MiB':>12}{'ms':>12}")
        for row in rows:
            print(
                f"{row['context']:>10}{row['state_mib']:>10.2f}{row['state_ms']:>10.3f}"
                f"{row['cache_mib']:>12.2f}{row['cache_ms']:>12.3f}"
            )
        save_comparison(rows, args.out / "generate")
        print(f"wrote {args.out / 'generate'}.csv and .png")
        return

    tokenizer = checkpoint.get("tokenizer")
    tokenizer = None if tokenizer is None else args.checkpoint.with_name(tokenizer)
    ids = list(args.prompt.encode()) if tokenizer is None else load_bpe(tokenizer).encode(args.prompt).ids
    prompt, to_text = torch.tensor([ids], device=args.device), decoder(tokenizer)
    generator = torch.Generator(args.device).manual_seed(args.seed)
    print(args.prompt, end="", flush=True)
    began = time.perf_counter()
    logits, states = read(model, prompt, init_states(model, 1))
    step = make_step(model, states, graph and constant)
    for token in generate(step, logits, args.tokens, args.temperature, generator):
        print(to_text(token.item()), end="", flush=True)
    seconds, layer = time.perf_counter() - began, model.blocks[0].attn
    key_values = 2 * len(states) * layer.num_kv_heads * layer.head_dim * logits.element_size() * (len(ids) + args.tokens)
    grows = "" if constant else " (softmax layers have caches, which grow)"
    print(f"\n\n{args.tokens} tokens, {1e3 * seconds / args.tokens:.2f} ms each, with the prompt of {len(ids)}")
    print(f"state {mib(states):.2f} MiB{grows}; keys and values of all layers would be {key_values / 2**20:.2f} MiB")


if __name__ == "__main__":
    main()
