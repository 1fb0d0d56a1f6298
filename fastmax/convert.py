"""From softmax to Fastmax in a trained model: `swap` the attention, `transfer` what it did to what is new, `finetune` the whole.

    teacher = copy.deepcopy(model)
    new = convert.swap(model, exact_window=128, decay=True)
    convert.transfer(model, teacher, batches, steps=200, parameters=new)
    convert.finetune(model, batches, steps=1000)

Each works on models with layers `FastmaxSelfAttention(attention="softmax")`, and on Hugging Face models whose attention goes
through transformers' interface. The three steps are those of LoLCATs (Zhang et al., 2024, arXiv:2410.10254). A batch is a tensor
of tokens (b, n), a mapping of keywords of the model, or a sequence of its positional arguments.
"""

from __future__ import annotations

import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastmax import validation
from fastmax.decay_gate import biases_of_half_lives
from fastmax.self_attention import DEFAULT_EXACT_WINDOW, FastmaxSelfAttention, options_of_fastmax

Batch = Tensor | Mapping[str, object] | Sequence[object]

SHORTEST_NEW_HALF_LIFE = 1 / 8  # of the longest


def swap(
    model: nn.Module,
    *,
    exact_window: int = DEFAULT_EXACT_WINDOW,
    layers: Iterable[int | str] | None = None,
    temperature: float | None = None,
    decay: bool = False,
    longest_half_life: float = 8192.0,
) -> list[str]:
    """Fastmax with an exact window in the place of a model's softmax attention, in place and with the same weights.

    What is exchanged are the layers `FastmaxSelfAttention(attention="softmax")`, but for those with a window of their own, and
    in a Hugging Face model its attention. Near keys weigh what they weighed: on sequences of up to `exact_window` tokens the
    model computes what it did. An error leaves it as it was.

    Args:
        model: any module that contains such layers, or is one, or a Hugging Face model. Devices, dtypes and modes stay.
        exact_window: tokens whose keys are weighed by exp(s), as in `fastmax_attention`; at least 1.
        layers: those to exchange, by name or by number: from 0, in the order of the model, among the layers that can be
            exchanged; in a Hugging Face model as `fastmax.integrations.transformers` counts them. None: all.
        temperature: of `fastmax_attention`, of near keys too; None: softmax's own, `sqrt(head_dim)`.
        decay: add gates, by which older keys fade, to the layers that have none. They do not depend on x at first.
        longest_half_life: tokens after which a key of the slowest new gate weighs half at first; the gates of a layer are spread
            geometrically over its heads from an eighth of that.

    Returns:
        Names of the parameters that are new.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is accepted; a model with nothing to exchange.
    """
    validation.check_count("exact_window", exact_window)
    validation.check_bool("decay", decay)
    validation.check_positive("longest_half_life", longest_half_life)
    if temperature is not None:
        validation.check_positive("temperature", temperature)
    if _is_of_transformers(model):
        return _swap_in_transformers(model, exact_window, layers, temperature, decay, longest_half_life)

    chosen = _chosen(_softmax_layers(model), layers)
    options = {}
    for name, layer in chosen.items():
        scale = math.sqrt(layer.head_dim) if temperature is None else temperature
        options[name] = options_of_fastmax(exact_window, 2, scale, None, "auto")
    gates = {name: _new_gate(layer, longest_half_life) for name, layer in chosen.items() if decay and layer.decay_proj is None}
    for name, layer in chosen.items():
        layer.attention, layer.options = "fastmax", options[name]
        if name in gates:
            layer.decay_proj, layer.longest_half_life = gates[name], float(longest_half_life)
    return [f"{name}.decay_proj.{part}".lstrip(".") for name in gates for part in ("weight", "bias")]


def transfer(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Batch],
    parameters: Iterable[str],
    *,
    steps: int,
    learning_rate: float = 0.01,
) -> list[dict[str, float]]:
    """Attention transfer: train a few parameters until each attention layer gives what the teacher's gives for the same input.

    Only the teacher runs as a whole. As soon as one of its layers has its output y, the model's layer of that name gets the same
    input, and the error `|y' - y|^2 / |y|^2` of its output y' goes backward: no more than one layer's activations are kept.
    Adam, with a warm-up of a twentieth of the steps and a cosine down to nothing.

    Args:
        model: after `swap`. Of its parameters only those named change.
        teacher: the model before the swap, a copy of it. Runs in eval mode; is not changed.
        batches: `steps` of them or more. Tokens that `attention_mask` (b, n), a keyword of the batch, leaves out do not count.
        parameters: names of the parameters to train, in layers that were exchanged: what `swap` returned, or for instance
            `[name for name, _ in model.named_parameters() if "q_norm" in name]`.
        steps: batches taken from `batches`.
        learning_rate: the largest.

    Returns:
        A row {"step", "error"} for each step: the error before it, mean over the layers with such parameters.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is accepted.
        FloatingPointError: an error is not finite.
    """
    validation.check_count("steps", steps)
    validation.check_positive("learning_rate", learning_rate)
    pairs = _pairs(model, teacher)
    trained = _named(model, parameters)
    for name in trained:
        if not any(name.startswith(f"{layer}." if layer else "") for layer in pairs):
            raise ValueError(f"parameters must be of attention layers that were exchanged, {', '.join(pairs)}; got {name!r}")
    pairs = {layer: pair for layer, pair in pairs.items() if any(name.startswith(f"{layer}." if layer else "") for name in trained)}

    optimizer = torch.optim.Adam(trained.values(), lr=learning_rate)
    schedule = _warmup_and_cosine(optimizer, steps, math.ceil(steps / 20), final=0.0)
    rows = []
    with _requiring_grad(model, trained):
        for step, batch in _first(batches, steps):
            optimizer.zero_grad()
            with torch.no_grad():
                errors = _errors(pairs, teacher, batch, backward=True)
            rows.append({"step": step, "error": _finite("error", torch.stack(list(errors.values())).mean(), step)})
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    return rows


@torch.no_grad()
def attention_errors(model: nn.Module, teacher: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    """The error that `transfer` makes smaller, `|y' - y|^2 / |y|^2` by the name of the layer: mean over the batches.

    Args:
        model, teacher, batches: as of `transfer`.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    pairs = _pairs(model, teacher)
    of_batches = [_errors(pairs, teacher, batch, backward=False) for batch in batches]
    if not of_batches:
        raise ValueError("batches must hold one or more, got none")
    return {name: torch.stack([errors[name] for errors in of_batches]).mean().item() for name in pairs}


def finetune(
    model: nn.Module,
    batches: Iterable[Batch],
    parameters: Iterable[str] | None = None,
    *,
    steps: int,
    learning_rate: float = 3e-4,
    warmup: int | None = None,
    weight_decay: float = 0.1,
    max_norm: float = 1.0,
) -> list[dict[str, float]]:
    """Train the model to predict the next token: AdamW with a warm-up and a cosine down to a tenth.

    Matrices are decayed towards 0, other weights and decay gates are not. Modes are left as they are: `model.train()` first,
    if it has dropout.

    Args:
        model: one that returns the loss of a batch: a number, or an object with one as `loss`; or, for a batch that is a tensor
            of tokens, the logits (b, n, vocabulary) of the tokens that follow, or an object with them as `logits`.
        batches: `steps` of them or more.
        parameters: names of those to train; None: all that require a gradient.
        steps: batches taken from `batches`.
        learning_rate: the largest.
        warmup: steps until then; None: a twentieth of all.
        weight_decay: as of `torch.optim.AdamW`.
        max_norm: to which longer gradients are clipped.

    Returns:
        A row {"step", "loss"} for each step: the loss before it.

    Raises:
        TypeError, ValueError: naming the argument, what it was and what is accepted.
        FloatingPointError: a loss is not finite.
    """
    validation.check_count("steps", steps)
    validation.check_positive("learning_rate", learning_rate)
    validation.check_positive("max_norm", max_norm)
    warmup = math.ceil(steps / 20) if warmup is None else warmup
    validation.check_count("warmup", warmup, least=0)
    if parameters is None:
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
    else:
        trained = _named(model, parameters)
    decayed = [x for name, x in trained.items() if x.dim() >= 2 and "decay_proj" not in name]
    rest = [x for name, x in trained.items() if x.dim() < 2 or "decay_proj" in name]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    schedule = _warmup_and_cosine(optimizer, steps, warmup, final=0.1)
    rows = []
    with _requiring_grad(model, trained):
        for step, batch in _first(batches, steps):
            loss = _loss(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trained.values(), max_norm)
            rows.append({"step": step, "loss": _finite("loss", loss.detach(), step)})
            optimizer.step()
            schedule.step()
        optimizer.zero_grad()
    return rows


def _softmax_layers(model: nn.Module) -> dict[str, FastmaxSelfAttention]:
    """By name, those with softmax over all earlier keys."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, FastmaxSelfAttention)}
    found = {name: layer for name, layer in layers.items() if layer.attention == "softmax" and layer.window is None}
    if not found:
        got = {layer.attention + (" with a window" if layer.window else "") for layer in layers.values()}
        raise ValueError(
            f'model ({type(model).__name__}) must have layers FastmaxSelfAttention(attention="softmax") without a window, or be a '
            f"Hugging Face model; got {'layers of ' + ' and '.join(sorted(got)) if layers else 'none of these layers'}"
        )
    return found


def _chosen(found: dict[str, nn.Module], layers: Iterable[int | str] | None) -> dict[str, nn.Module]:
    if layers is None:
        return found
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        raise TypeError(f"layers must be numbers or names of layers, or None, got {validation.describe(layers)}")
    names, chosen = list(found), {}
    for layer in layers:
        if isinstance(layer, bool) or not isinstance(layer, (int, str)):
            raise TypeError(f"layers must be numbers or names of layers, got {validation.describe(layer)}")
        if layer not in (names if isinstance(layer, str) else range(len(names))):
            raise ValueError(f"layers must be from 0 to {len(names) - 1}, or of the names {', '.join(names)}; got {layer!r}")
        name = layer if isinstance(layer, str) else names[layer]
        chosen[name] = found[name]
    if not chosen:
        raise ValueError("layers must name one or more, got none")
    return chosen


def _new_gate(layer: FastmaxSelfAttention, longest_half_life: float) -> nn.Linear:
    weight = layer.qkv_proj.weight
    gate = nn.Linear(layer.embed_dim, layer.num_kv_heads, device=weight.device, dtype=weight.dtype)
    nn.init.zeros_(gate.weight)
    with torch.no_grad():
        gate.bias.copy_(biases_of_half_lives(layer.num_kv_heads, longest_half_life, SHORTEST_NEW_HALF_LIFE * longest_half_life))
    return gate.train(layer.training)


def _is_of_transformers(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")  # whoever has such a model has imported it
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def _pairs(model: nn.Module, teacher: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    """By name, the attention layers that run Fastmax and those of the teacher that run softmax."""
    if model is teacher:
        raise ValueError("teacher must be the model before the swap, a copy of it, got the model itself")
    if _is_of_transformers(model):
        exchanged = _attention_of_transformers(model)
    else:
        modules = model.named_modules()
        exchanged = {name: x for name, x in modules if isinstance(x, FastmaxSelfAttention) and x.attention == "fastmax"}
    if not exchanged:
        raise ValueError(f"model ({type(model).__name__}) must have Fastmax in some layer, got none: convert.swap(model) first")
    of_teacher = dict(teacher.named_modules())
    for name, layer in exchanged.items():
        own = of_teacher.get(name)
        if type(own) is not type(layer) or getattr(own, "attention", None) == "fastmax":
            kind = "none of that name" if own is None else f"{type(own).__name__} of {getattr(own, 'attention', 'its own')}"
            raise ValueError(f"teacher must have softmax attention in a {type(layer).__name__} {name!r}, got {kind}")
    return {name: (layer, of_teacher[name]) for name, layer in exchanged.items()}


def _keywords_of_layer(layer: nn.Module, keywords: dict, real: Tensor | None) -> dict:
    """Those that the teacher's layer had, for the other attention."""
    if isinstance(layer, FastmaxSelfAttention):
        return keywords
    from fastmax.integrations.transformers import FastmaxMask

    mask = FastmaxMask(True, None if real is None else real.bool())
    return keywords | {"attention_mask": mask}


def _attention_of_transformers(model: nn.Module) -> dict[str, nn.Module]:
    from fastmax.integrations.transformers.models import NAME, _asks_interface
    found = {name: x for name, x in model.named_modules() if _asks_interface(type(x))}
    return {name: x for name, x in found.items() if x.config._attn_implementation == NAME}


def _swap_in_transformers(
    model: nn.Module,
    exact_window: int,
    layers: Iterable[int | str] | None,
    temperature: float | None,
    decay: bool,
    longest_half_life: float,
) -> list[str]:
    import fastmax.integrations.transformers as integration
    if layers is not None or decay: raise NotImplementedError
    model.set_attn_implementation(integration.NAME)
    integration.configure(model, exact_window=exact_window, **({} if temperature is None else {"temperature": temperature}))
    return []


def _errors(
    pairs: dict[str, tuple[nn.Module, nn.Module]], teacher: nn.Module, batch: Batch, backward: bool
) -> dict[str, Tensor]:
    """Of each layer, for the inputs that it has where the teacher runs on the batch; with their gradients, if asked for."""
    real = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    errors = {}

    def compare(name: str, layer: nn.Module) -> Callable:
        def hook(module: nn.Module, args: tuple, keywords: dict, output: Tensor | tuple) -> None:
            with torch.set_grad_enabled(backward):
                y = _output_of(layer(*args, **_keywords_of_layer(layer, keywords, real)))
                error = _relative_error(y, _output_of(output), real)
                if backward:
                    error.backward()
            errors[name] = error.detach()

        return hook

    with ExitStack() as stack:
        stack.enter_context(_in_eval_mode(teacher))
        for name, (layer, own) in pairs.items():
            stack.callback(own.register_forward_hook(compare(name, layer), with_kwargs=True).remove)
        _call(teacher, batch)
    if len(errors) < len(pairs):
        raise ValueError(f"teacher must call its layers {', '.join(pairs)}; not called: {', '.join(set(pairs) - set(errors))}")
    return errors


def _relative_error(y: Tensor, expected: Tensor, real: Tensor | None) -> Tensor:
    y, expected = y.float(), expected.float()
    if real is not None:
        y, expected = y[real.bool()], expected[real.bool()]
    return (y - expected).square().sum() / expected.square().sum()


def _output_of(output: Tensor | tuple) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


def _call(model: nn.Module, batch: Batch) -> object:
    """Of Hugging Face models without the cache of keys and values that they would make."""
    no_cache = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    if isinstance(batch, Tensor):
        return model(batch, **no_cache)
    if isinstance(batch, Mapping):
        return model(**no_cache | batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return model(*batch, **no_cache)
    raise TypeError(
        f"batches must hold tensors of tokens, mappings of keywords or sequences of arguments, got {validation.describe(batch)}"
    )


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    output = _call(model, batch)
    if isinstance(batch, Tensor):
        logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:2] != batch.shape:
            raise TypeError(f"model must return logits (b, n, vocabulary) of tokens (b, n), got {validation.describe(output)}")
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        raise TypeError(f"model must return the loss of a batch that is no tensor, a number, got {validation.describe(output)}")
    return loss


def _first(batches: Iterable[Batch], steps: int) -> Iterator[tuple[int, Batch]]:
    """So many, counted from 1."""
    step = 0
    for step, batch in enumerate(itertools.islice(batches, steps), start=1):
        yield step, batch
    if step < steps:
        raise ValueError(f"batches must hold one for each of {steps} steps, ended after {step}")


def _finite(what: str, value: Tensor, step: int) -> float:
    value = value.item()
    if not math.isfinite(value):
        raise FloatingPointError(f"the {what} is {value} at step {step}: a smaller learning_rate may help")
    return value


def _named(model: nn.Module, parameters: Iterable[str]) -> dict[str, nn.Parameter]:
    if isinstance(parameters, str) or not isinstance(parameters, Iterable):
        raise TypeError(f"parameters must be names of parameters, got {validation.describe(parameters)}")
    parameters, known = list(parameters), dict(model.named_parameters())
    for name in parameters:
        if name not in known:
            raise ValueError(f"parameters must be names of the model's parameters, got {validation.describe(name)}")
    if not parameters:
        raise ValueError("parameters must name one or more, got none: swap(..., decay=True) makes new ones")
    return {name: known[name] for name in parameters}


@contextmanager
def _requiring_grad(model: nn.Module, trained: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Those parameters alone; afterwards as before."""
    before = [(x, x.requires_grad) for x in model.parameters()]
    chosen = {id(x) for x in trained.values()}
    try:
        for x, _ in before:
            x.requires_grad_(id(x) in chosen)
        yield
    finally:
        for x, required in before:
            x.requires_grad_(required)


@contextmanager
def _in_eval_mode(model: nn.Module) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in before:
            module.training = training


def _warmup_and_cosine(
    optimizer: torch.optim.Optimizer, steps: int, warmup: int, final: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """From 1 / warmup up to the learning rate in `warmup` steps, then as a cosine down to `final` of it."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = (step - warmup) / max(1, steps - warmup)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
