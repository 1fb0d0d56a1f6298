"""Every model family of the installed transformers either runs fastmax by its definition or raises an error that names
fastmax."""

import contextlib
import functools
import inspect
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from tiny_transformers import BATCH, LENGTH, families, inputs, model_classes, tiny_config, tiny_model  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.masking_utils import sdpa_mask  # noqa: E402

import fastmax.integrations.transformers as integration  # noqa: E402

REFERENCE = "fastmax_reference"
SOFTMAX = [
    (torch, "softmax"), (torch.Tensor, "softmax"), (torch.nn.functional, "softmax"),
    (torch.nn.functional, "scaled_dot_product_attention"), (torch.nn.functional, "multi_head_attention_forward"),
]  # fmt: skip
NOT_ATTENTION = {  # a softmax of what is no scores of queries and keys
    "RfDetrMultiscaleDeformableAttention", "Ovis2VisionModel", "SuperPointInterestPointDecoder", "PatchTSMixerGatedAttention",
}  # fmt: skip
HARMLESS = {  # what reaches an attention function and does not ask for another one
    "scaling", "dropout", "is_causal", "use_cache", "position_ids", "output_attentions", "output_hidden_states",
    "return_dict", "deterministic", "grid_thw", "output_router_logits",
}  # fmt: skip


def reference_forward(module, query, key, value, attention_mask, scaling=None, is_causal=None, **kwargs):
    """Computes the definition with any mask, bool (True = visible) or 0 where visible. Without a mask it follows transformers'
    sdpa."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    s = query.double() @ key.double().mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    w = 1 + s + s * s / 2
    if attention_mask is None and query.shape[2] > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = torch.ones(s.shape[-2:], dtype=torch.bool).tril() if causal else None
    if attention_mask is not None:
        w = torch.where(attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0, w, 0.0)
    z = w.sum(-1, keepdim=True)
    o = torch.where(z == 0, 0.0, w / z) @ value.double()
    return o.to(value.dtype).transpose(1, 2).contiguous(), None


def reference_mask(**kwargs) -> Tensor:
    return sdpa_mask(**kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


transformers.AttentionInterface.register(REFERENCE, reference_forward)
transformers.AttentionMaskInterface.register(REFERENCE, reference_mask)


class Recorder:
    """Records the calls of fastmax's attention function, their arguments, and modules that take a softmax."""

    def __init__(self):
        self.calls, self.arguments, self.softmax = 0, set(), set()

    def __enter__(self):
        transformers.AttentionInterface.register(integration.NAME, self.attention)
        self.patches = [mock.patch.object(place, name, self.recorded(getattr(place, name))) for place, name in SOFTMAX]
        for patch in self.patches:
            patch.start()
        return self

    def __exit__(self, *error):
        transformers.AttentionInterface.register(integration.NAME, integration.fastmax_attention_forward)
        for patch in self.patches:
            patch.stop()

    def attention(self, module, query, key, value, attention_mask, **kwargs):
        self.calls += 1
        self.arguments |= {name for name, value in kwargs.items() if value is not None}
        return integration.fastmax_attention_forward(module, query, key, value, attention_mask, **kwargs)

    def recorded(self, function):
        def softmax(*args, **kwargs):
            frame = sys._getframe(1)
            while frame is not None:
                module = frame.f_locals.get("self")
                if isinstance(module, torch.nn.Module) and not isinstance(module, torch.nn.Softmax):
                    self.softmax.add(type(module).__name__)
                    break
                frame = frame.f_back
            return function(*args, **kwargs)

        return softmax


def named(error: Exception) -> bool:
    return isinstance(error, (ValueError, TypeError)) and integration.NAME in str(error)


def floats(output) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in floats(value)]


def run(model: PreTrainedModel, implementation: str, arguments: dict) -> list[Tensor]:
    for config in integration.options.configurations(model):
        config._attn_implementation_internal = implementation
    torch.manual_seed(0)
    with torch.no_grad():
        return floats(model(**{name: value.clone() for name, value in arguments.items()}))


def quietly(function: Callable) -> Callable:
    @functools.wraps(function)
    def wrapped(*args):
        level = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return function(*args)
            finally:
                transformers.logging.set_verbosity(level)

    return wrapped


@quietly
def outcome(kind: type[PreTrainedModel]) -> str:
    """Returns "equal", "refused", "no attention" or "not tried: ...". Anything else is an AssertionError."""
    try:
        config = tiny_config(kind.config_class)
    except Exception as error:
        return f"not tried: {error!r}"
    config._attn_implementation = integration.NAME
    try:
        model = tiny_model(kind, config)
    except MemoryError as error:
        return f"not tried: {error!r}"
    except Exception as error:
        if named(error):
            return "refused"
        config._attn_implementation = "eager"
        try:
            tiny_model(kind, config)
        except Exception:
            return f"not tried: {error!r}"
        raise AssertionError(f"{kind.__name__} cannot be made with fastmax, and the error does not say so") from error
    failure = "no arguments are known for it"
    for arguments in inputs(model):
        try:
            expected = run(model, REFERENCE, arguments)
            break
        except Exception as error:
            failure = error
    else:
        return f"not tried: {failure!r}"
    if not expected or not all(tensor.isfinite().all() for tensor in expected):
        return "not tried: nothing finite to compare"
    padded = arguments | {"attention_mask": torch.tensor([[1] * (LENGTH - 1) + [0], [0, 0] + [1] * (LENGTH - 2)])}
    expected_padded = None
    if "attention_mask" in inspect.signature(model.forward).parameters and "input_ids" in arguments:
        with contextlib.suppress(Exception):  # the model's own, without fastmax
            expected_padded = run(model, REFERENCE, padded)
    try:
        with Recorder() as recorder:
            compare(kind, expected, run(model, integration.NAME, arguments))
            if expected_padded is not None:
                compare(kind, expected_padded, run(model, integration.NAME, padded))
    except (ValueError, TypeError) as error:
        if named(error):
            return "refused"
        raise
    assert recorder.arguments <= HARMLESS, f"{kind.__name__} asks for {recorder.arguments - HARMLESS}"
    softmax = {name for name in recorder.softmax - NOT_ATTENTION if not re.search("Router|Gat(e|ing)$|MoE", name)}
    assert not softmax, f"{kind.__name__} runs softmax in {softmax}"
    return "equal" if recorder.calls else "no attention"


def compare(kind: type[PreTrainedModel], expected: list[Tensor], actual: list[Tensor]) -> None:
    for x, y in zip(expected, actual, strict=True):
        assert (x - y).norm() <= 1e-5 * x.norm(), f"{kind.__name__} differs from the definition"
        if x.dim() == 3 and x.shape[:2] == (BATCH, LENGTH):  # the rows differ in the last token, or in padding
            same = (x[0] - x[1]).norm(dim=-1) < 1e-12 * x[0].norm(dim=-1)
            torch.testing.assert_close(y[0][same], y[1][same], msg=f"{kind.__name__}: a later token is seen")


@pytest.fixture(scope="session")
def outcome_of(tmp_path_factory):
    """Returns `outcome`, with results that the processes of a test run share through files."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "outcomes"
    folder.mkdir(exist_ok=True)

    def find(kind: type[PreTrainedModel]) -> str:
        path = folder / f"{kind.__module__}.{kind.__qualname__}"
        if not path.exists():
            new = folder / str(os.getpid())  # another process may find it too
            new.write_text(outcome(kind), encoding="utf-8")
            new.replace(path)
        return path.read_text(encoding="utf-8")

    return find


@pytest.mark.parametrize("family", families())
def test_family(family, outcome_of):
    for kind in model_classes(family):
        outcome_of(kind)


def test_outcomes_are_plausible(outcome_of):
    """A recipe for tiny models that no longer fits would turn every outcome into "not tried"."""
    outcomes = {kind.__name__: outcome_of(kind) for family in families() for kind in model_classes(family)}
    counts = Counter(text.partition(":")[0] for text in outcomes.values())
    print(dict(counts))
    assert counts["equal"] > 200 and counts["refused"] > 150 and counts["no attention"] < 40, counts
    assert counts["not tried"] < 0.4 * len(outcomes), counts
    for name in (
        "LlamaModel",
        "Qwen3Model",
        "GPT2Model",
        "BertModel",
        "BartModel",
        "ViTModel",
        "CLIPVisionModel",
        "MixtralModel",
    ):
        assert outcomes[name] == "equal"
    for name in ("BloomModel", "FalconModel", "DebertaModel", "XLNetModel", "MistralModel", "T5Model", "SamModel", "DogeModel"):
        assert outcomes[name] == "refused"
