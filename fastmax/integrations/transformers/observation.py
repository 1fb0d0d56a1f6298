"""Observes the first forward of every module that is to run fastmax, and refuses softmax attention computed under that name.

Each such module has a hook, which starts an `Observer` where none is at work. The observer sees the modules that run, those of
them that call fastmax's attention function, and every operator that PyTorch dispatches. After the first forward that succeeds,
in training or not, the hooks are removed from the modules that ran. A part that did not run is observed when it first runs.
Nothing is observed where tensors have no values: while a graph is traced, a CUDA graph captured or `FakeTensorMode` is active.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._guards import detect_fake_mode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig
from transformers.utils.import_utils import is_tracing

from fastmax.integrations.transformers import hooks
from fastmax.integrations.transformers.dataflow import Dataflow, is_fused_attention
from fastmax.integrations.transformers.layers import is_attention_layer
from fastmax.integrations.transformers.options import NAME
from fastmax.integrations.transformers.unobserved import reads_like_attention

INSTEAD = (
    "In a composite model choose the parts that can, as in "
    f'attn_implementation={{"text_config": "{NAME}"}}; an nn.MultiheadAttention is replaced by fastmax.swap_attention'
)
_local = threading.local()


class FirstForward:
    """A forward pre-hook that starts an observation. It is copied and pickled with its module.

    Args:
        config: the configuration whose choice of fastmax holds for the module.
        suspicion: the error to raise where the module is compiled before an observation; None = none.
    """

    def __init__(self, config: PreTrainedConfig, suspicion: str | None):
        self.config = config
        self.suspicion = suspicion

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_compiling():
            if self.suspicion is not None and self.config._attn_implementation == NAME:
                raise ValueError(self.suspicion)
        elif self.config._attn_implementation == NAME and not _has_no_values(
            (next(module.parameters(), None), *args, *kwargs.values())
        ):
            observer = observer_at_work()
            if observer is not None and observer.root is module:  # left by an interrupt
                observer.stop()
                observer = None
            if observer is None:
                Observer(module).start()


def observe_first_forward(model: nn.Module, name: str, module: nn.Module, config: PreTrainedConfig) -> None:
    """Lets a module of this name in a model be observed when it first runs.

    Args:
        config: the configuration whose choice of fastmax holds for the module.
    """
    end_observation(module)
    unreached = is_attention_layer(module) and module.config._attn_implementation != NAME
    kind: type = type(module)
    suspicious = unreached or reads_like_attention(kind)
    suspicion = refusal(model, name, module, "before a first forward outside of torch.compile") if suspicious else None
    module.register_forward_pre_hook(FirstForward(config, suspicion), with_kwargs=True)


def end_observation(module: nn.Module) -> None:
    """Removes what `observe_first_forward` has left."""
    hooks.remove(module, lambda hook: isinstance(hook, (FirstForward, _Finish)))


def is_observed_next(module: nn.Module) -> bool:
    """Returns whether the next forward of a module is observed."""
    return any(
        isinstance(hook, FirstForward) and hook.config._attn_implementation == NAME
        for hook in module._forward_pre_hooks.values()
    )


def observer_at_work() -> Observer | None:
    """Returns the observer of this thread."""
    return getattr(_local, "observer", None)


class Observer(TorchDispatchMode):
    """Observes one forward of a module.

    Args:
        root: the module, whose forward is about to run.
    """

    supports_higher_order_operators = True

    def __init__(self, root: nn.Module):
        super().__init__()
        self.root = root
        self.stack = [root]
        self._names = {module: name for name, module in root.named_modules()}
        self._covered = {module for module in root.modules() if is_observed_next(module)}
        self._ran = {root}
        self._asked: set[nn.Module] = set()
        self._dataflow = Dataflow((*root.parameters(), *root.buffers()))
        self._pauses = 0
        self._stance = ExitStack()
        self._exception = sys.exc_info()[1]  # that the caller handles

    @torch.compiler.disable
    def start(self) -> None:
        """Begins to observe this thread."""
        if not any(isinstance(hook, _Finish) for hook in self.root._forward_hooks.values()):
            self.root.register_forward_hook(_Finish(), always_call=True)
        self._handles = [
            register_module_forward_pre_hook(_enter_module),
            register_module_forward_hook(_leave_module, always_call=True),
        ]
        self._stance.enter_context(torch.compiler.set_stance("force_eager"))  # compiled parts run as they are written
        _local.observer = self
        self.__enter__()

    @torch.compiler.disable
    def stop(self) -> None:
        """Ends the observation."""
        self.__exit__(None, None, None)
        _local.observer = None
        self._stance.close()
        for handle in self._handles:
            handle.remove()

    def accept(self) -> None:
        """Ends the observation of the modules that ran."""
        for module in self._ran & self._covered:
            end_observation(module)

    @contextmanager
    def asked_by(self, module: nn.Module) -> Iterator[None]:
        """Counts a call of fastmax's attention function, whose operations are not observed."""
        self._asked.add(module)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def enter(self, module: nn.Module) -> None:
        """Records that a module begins to run."""
        self.stack.append(module)
        self._ran.add(module)

    def leave(self, module: nn.Module) -> None:
        """Records that a module has run or failed; refuses an attention layer that did not call fastmax."""
        while self.stack and self.stack.pop() is not module:
            pass
        missing = module in self._covered and is_attention_layer(module) and module not in self._asked
        if missing and not self.has_failed():
            self._refuse(module, "it did not call fastmax's attention function")

    def has_failed(self) -> bool:
        """Returns whether a hook runs because its module has raised an exception."""
        return sys.exc_info()[1] is not self._exception

    def __torch_dispatch__(self, operator: Any, types: tuple, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self._pauses:
            return operator(*args, **kwargs)
        name = str(operator)
        if is_fused_attention(name):
            self._found_attention(name)
            return operator(*args, **kwargs)
        # Inference mode dispatches compositions of operators too. "prim.device", which PyTorch asks of fake tensors, is none:
        # its `decompose` raises an error, at which PyTorch aborts.
        if hasattr(operator, "decompose") and not name.startswith("prim."):
            with self:
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = operator(*args, **kwargs)
        if self._dataflow.follow(name, args, kwargs, result):
            self._found_attention(name)
        return result

    def _found_attention(self, operator: str) -> None:
        """Refuses attention where the innermost module that is not PyTorch's own is to run fastmax."""
        for module in reversed(self.stack):
            if module in self._covered:
                self._refuse(module, f"in {operator}")
            if not is_of_pytorch(module):
                return

    def _refuse(self, module: nn.Module, reason: str) -> None:
        raise ValueError(refusal(self.root, self._names.get(module, ""), module, reason))


def refusal(root: nn.Module, name: str, module: nn.Module, reason: str) -> str:
    """Returns the message for a module with attention of its own."""
    layer = f"{name} ({type(module).__name__})".lstrip()
    return (
        f'{type(root).__name__} cannot run attn_implementation="{NAME}": {layer} computes '
        f"softmax attention of its own ({reason}). {INSTEAD}"
    )


@torch.compiler.disable  # compiled by itself, it would see the mode of its own compilation
def _has_no_values(values: tuple) -> bool:
    """Returns whether the tensors of a forward have no values. `values` are its arguments and a parameter of the module."""
    # In `FakeTensorMode` results are fake tensors, even if all parameters and arguments are real.
    return detect_fake_mode() is not None or any(map(is_tracing, (None, *values)))


def is_of_pytorch(module: nn.Module) -> bool:
    """Returns whether PyTorch defines the class of a module."""
    return type(module).__module__.partition(".")[0] == "torch"


def _enter_module(module: nn.Module, args: tuple) -> None:
    observer = observer_at_work()
    if observer is not None:
        observer.enter(module)


def _leave_module(module: nn.Module, args: tuple, output: object) -> None:
    observer = observer_at_work()
    if observer is not None:
        observer.leave(module)


class _Finish:
    """The forward hook that ends an observation, of the module at which it starts."""

    def __call__(self, module: nn.Module, args: tuple, output: object) -> None:
        if torch.compiler.is_compiling():
            return
        observer = observer_at_work()
        if observer is not None and observer.root is module:
            observer.stop()
            if not observer.has_failed():
                observer.accept()
