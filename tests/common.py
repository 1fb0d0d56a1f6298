"""Shared by the tests: the definition, the numerical contract, sizes and inputs."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import subprocess
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fastmax import fastmax_attention
from fastmax.eager.planner import plan_linear, plan_quadratic
from fastmax.ops.registration import OPERATORS
from fastmax.testing.reference import naive_attention as definition

CPU = torch.device("cpu")
CHUNK = plan_linear(CPU, heads=1, group=1, d=16, dv=16, order=2).chunk
CHUNK_P1 = plan_linear(CPU, heads=1, group=1, d=16, dv=16, order=1).chunk
CHUNK_D64 = plan_linear(CPU, heads=1, group=1, d=64, dv=64, order=2).chunk
ROWS, COLS, _ = plan_quadratic(CPU, heads=1, group=1, n=2**20, m=2**20)

ALGORITHMS = ("quadratic", "linear")
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Absolute part of the contract. float64 has nothing more exact to be compared with, only another order of summation.
FLOOR = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-6, torch.bfloat16: 1e-6}

by_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS)
by_gradient = pytest.mark.parametrize("custom", [True, False], ids=["custom", "autograd"])
by_causal = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
by_order = pytest.mark.parametrize("p", [1, 2], ids=["p1", "p2"])


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)


def in_turn(name: str) -> Callable:
    """Decorates a test, above its parametrisations. On a CPU the values of `name` take turns over the product of the other
    parameters. With three parameters or more every pair of values still occurs. On CUDA, where other values run other kernels,
    the whole product is tested."""

    def decorate(test: Callable) -> Callable:
        if torch.cuda.is_available():
            return test
        axes = [mark for mark in test.pytestmark if mark.name == "parametrize"]
        marks = [mark for mark in test.pytestmark if mark.name != "parametrize"]
        names = [[x.strip() for x in mark.args[0].split(",")] for mark in axes]
        turning = names.index([x.strip() for x in name.split(",")])
        counts = [len(mark.args[1]) for mark in axes]
        rows = []
        for at in product(*map(range, counts)):
            if sum(at) % counts[turning] == 0:
                values, ids = zip(*map(_member, axes, at), strict=True)
                rows.append(pytest.param(*chain(*values), id="-".join(ids)))
        test.pytestmark = [*marks, pytest.mark.parametrize(", ".join(chain(*names)), rows).mark]
        return test

    return decorate


def _member(mark: pytest.Mark, i: int) -> tuple[tuple, str]:
    """Returns the values and the id of one member of a parametrisation."""
    given, ids = list(mark.args[1])[i], mark.kwargs.get("ids")
    if isinstance(given, type(pytest.param(None))):
        return given.values, given.id or "-".join(map(str, given.values))
    values = given if "," in mark.args[0] else (given,)
    if ids is None:
        return values, "-".join(map(str, values))
    return values, "-".join(str(ids(x)) for x in values) if callable(ids) else list(ids)[i]


# Importing the compiler runs deprecated parts of torch.
torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def relative(actual: Tensor, exact: Tensor) -> float:
    """Returns the error in the Frobenius norm, relative to that of the exact tensor."""
    return ((actual.double() - exact).norm() / exact.norm()).item()


CSRC = Path(__file__).resolve().parent.parent / "csrc"


def load_build() -> ModuleType:
    """Returns csrc/build.py as a module, although it belongs to no package."""
    spec = importlib.util.spec_from_file_location("csrc_build", CSRC / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_current(out: Path, *others: Path) -> bool:
    """Returns whether a compiled file is newer than its sources: those that its dependency file (`-MD`) lists, and others."""
    made_of = out.with_suffix(".d")
    if not out.exists() or not made_of.exists():
        return False
    paths = [*others, *map(Path, made_of.read_text().replace("\\\n", " ").split()[1:])]
    return all(path.exists() and path.stat().st_mtime < out.stat().st_mtime for path in paths)


def compile_probe(text, device_code=False):
    """A program over headers and host sources of csrc/, which build/probes keeps until they change; skips the test without a
    CUDA toolkit, whose headers they take."""
    build = load_build()
    try:
        cuda = build.cuda_home()
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = CSRC.parent / "build" / "probes" / hashlib.sha256(text.encode()).hexdigest()[:16]
    source, probe = folder / ("probe.cu" if device_code else "probe.cpp"), folder / "probe"
    if is_current(probe):
        return probe
    folder.mkdir(parents=True, exist_ok=True)
    if not source.exists():
        source.write_text(text)
    compiler = [cuda / "bin/nvcc", "-std=c++17"] if device_code else ["c++", "-std=c++20", "-isystem", cuda / "include"]
    new = folder / str(os.getpid())  # another process may compile it too
    subprocess.run([*compiler, "-I", CSRC, "-MD", "-MF", f"{new}.d", "-o", new, source], check=True)
    os.replace(f"{new}.d", probe.with_suffix(".d"))
    os.replace(new, probe)
    return probe


# ---- the numerical contract


def assert_within_contract(name: str, actual: Tensor, plain: Tensor, exact: Tensor, scale: Tensor | None = None) -> None:
    """Relative Frobenius error against `exact` (float64) at most twice that of `plain` (same formula and dtype), plus a floor.

    Half precision on the CPU, where sums and weights are fp32 and plain PyTorch's are not: at most once (0.75 is reached).
    `scale` replaces `exact` in what the floor is relative to, for gradients that are zero by cancellation.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(exact.shape)}"
    assert actual.dtype == plain.dtype, f"{name}: dtype {actual.dtype}, expected {plain.dtype}"
    infinite = exact.isinf()  # a log-sum-exp of no keys
    if infinite.any():
        assert torch.equal(actual[infinite].double(), exact[infinite]), f"{name}: not infinite where it should be"
        actual, plain, exact = (x.masked_fill(infinite, 0.0) for x in (actual, plain, exact))
    error = torch.linalg.vector_norm(actual.double() - exact).item()
    plain_error = torch.linalg.vector_norm(plain.double() - exact).item()
    norm = torch.linalg.vector_norm(exact if scale is None else scale).item()
    times = 1.0 if actual.dtype.itemsize == 2 and actual.device.type == "cpu" else 2.0
    bound = times * plain_error + FLOOR[actual.dtype] * norm
    # Written so that a NaN fails.
    assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}; plain PyTorch has {plain_error:.3g}, norm {norm:.3g}"


def run(attention, inputs: dict[str, Tensor], grad_o: Tensor | tuple[Tensor, ...], **options) -> dict[str, Tensor]:
    """Returns the output ("o", and "lse" if there are two outputs) and the gradient of every tensor in `inputs`."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    outputs = attention(**leaves, **options)
    grads = torch.autograd.grad(outputs, list(leaves.values()), grad_o)
    outputs = dict(zip(("o", "lse"), outputs if isinstance(outputs, tuple) else (outputs,), strict=False))
    result = {name: x.detach() for name, x in outputs.items()}
    return result | {f"grad {name}": g for name, g in zip(leaves, grads, strict=True)}


def exactly(x):
    """Returns floating-point tensors in float64 and anything else unchanged."""
    if isinstance(x, tuple):
        return tuple(map(exactly, x))
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


class Expected:
    """Output and gradients of one call by the definition: in float64, and in the dtype of the inputs ("plain PyTorch")."""

    definition = staticmethod(definition)

    def __init__(self, inputs: dict[str, Tensor], grad_o: Tensor | tuple[Tensor, ...], **options):
        self.inputs, self.grad_o, self.options = inputs, grad_o, options
        wide = {name: exactly(x) for name, x in inputs.items()}, exactly(grad_o)
        wide_options = {name: exactly(x) for name, x in options.items()}
        self.plain = run(self.definition, inputs, grad_o, **options)
        self.exact = run(self.definition, *wide, **wide_options)
        # With one visible key, say, the gradients of q and k are differences of equal numbers; their floor is relative to
        # one of the two, the gradient at a constant denominator.
        self.scale = dict.fromkeys(self.exact)
        incoming = grad_o[0] if isinstance(grad_o, tuple) else grad_o
        if any(x.norm() < 1e-9 * incoming.double().norm() for x in self.exact.values()):
            terms = run(partial(self.definition, hold_denominator=True), *wide, **wide_options)
            for name, x in self.exact.items():
                if x.norm() < 1e-12 * terms[name].norm():
                    self.scale[name] = terms[name]

    def check(self, *, custom: bool, algorithm: str = "auto") -> dict[str, Tensor]:
        """Checks one call against the contract. Pass `Expected` if several calls share a reference."""
        return self.hold(partial(fastmax_attention, use_custom_gradient=custom, algorithm=algorithm))

    def hold(self, attention) -> dict[str, Tensor]:
        """Hold output and gradients of `attention` to the contract; returns them."""
        actual = run(attention, self.inputs, self.grad_o, **self.options)
        for name, x in actual.items():
            assert_within_contract(name, x, self.plain[name], self.exact[name], self.scale[name])
        return actual


def check(inputs: dict[str, Tensor], grad_o: Tensor, *, custom: bool, algorithm: str = "auto", **options) -> dict[str, Tensor]:
    """Checks one call against the contract. Pass `Expected` if several calls share a reference."""
    return Expected(inputs, grad_o, **options).check(custom=custom, algorithm=algorithm)


def assert_equals_definition(
    attention, definition, inputs: dict[str, Tensor], grads: Tensor | tuple[Tensor, ...], tolerance: float = 1e-9, **options
) -> dict[str, Tensor]:
    """Outputs and gradients of `attention` in float64 against those of `definition`; returns them.

    The error is relative to the tensor, or to the incoming gradient where that is larger: gradients vanish by cancellation.
    """
    exact = run(definition, inputs, grads, **options)
    actual = run(attention, inputs, grads, **options)
    incoming = (grads[0] if isinstance(grads, tuple) else grads).norm().item()
    assert actual.keys() == exact.keys()
    for name, x in exact.items():
        y = actual[name]
        assert y.shape == x.shape and y.dtype == x.dtype == torch.float64, name
        assert torch.equal(y.isinf(), x.isinf()), f"{name}: infinite elsewhere"
        error = torch.where(x.isinf(), 0.0, y - x).norm().item()
        # Written so that a NaN fails.
        bound = tolerance * max(torch.where(x.isinf(), 0.0, x).norm().item(), incoming)
        assert error <= bound, f"{name}: error {error:.3g} > {bound:.3g}"
    return actual


def compare(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, x in expected.items():
        torch.testing.assert_close(actual[name], x, msg=lambda text, name=name: f"{name}: {text}")


def assert_gradients_of(names: str, leaves: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """After a backward: the leaves in `names` have the expected "grad ...", the others none."""
    for name, x in leaves.items():
        if name in names:
            torch.testing.assert_close(x.grad, expected[f"grad {name}"])
        else:
            assert x.grad is None


def pytorch_implementation(name: str) -> Callable:
    """Returns what computes a registered operator where no kernel does."""
    return OPERATORS[name].implementation


def check_operator(operator, arguments: tuple, traced: bool) -> None:
    """`torch.library.opcheck`: schema, registration and fake tensors; with `traced` the program that compilers make of it too,
    which takes ten times as long as the others."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=tests if traced else tests[:3])


def opcheck(name: str, inputs: dict[str, Tensor], grads: tuple[Tensor, Tensor | None], *options, traced: bool = True) -> None:
    """`torch.ops.fastmax`'s forward and backward ("", "flash_", "exact_window_"); `options` are the arguments after q, k, v."""
    forward, backward = (getattr(torch.ops.fastmax, f"{name}{which}") for which in ("forward", "backward"))

    def leaf(x):
        return x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    check_operator(forward.default, tuple(map(leaf, (*inputs.values(), *options))), traced)
    outputs = forward(*inputs.values(), *options)
    arguments = (*grads, *inputs.values(), *outputs, *options)
    check_operator(backward.default, arguments, traced)
    check_operator(getattr(torch.ops.fastmax, f"{name}backward_qkv").default, arguments, traced=False)


def check_compiled(attention, inputs: dict[str, Tensor], grads, **options) -> None:
    """Checks that the compiled call is one graph, and that its outputs and gradients are those of the call itself."""
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    compare(run(compiled, inputs, grads, **options), run(attention, inputs, grads, **options))


def check_one_graph_for_all_lengths(attention, make, lengths: tuple[int, ...] = (12, 37, 300)) -> None:
    """Checks that calls of several lengths share one graph. `make(n)` returns inputs, gradients and options of a call of n
    tokens."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counter)
    graphs = []
    for n in lengths:
        inputs, grads, options = make(n)
        compare(run(compiled, inputs, grads, **options), run(attention, inputs, grads, **options))
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[0] > 0  # the first call may trace twice, to find out that the options are constants


def check_checkpointing(attention, inputs: dict[str, Tensor], grads: tuple[Tensor, ...], reentrant: bool) -> None:
    """Outputs and gradients of an `attention` that returns o and lse.

    Bit for bit but in the reentrant form, whose forward does not record and may add up in another order.
    """
    names = list(inputs)
    plain = run(attention, inputs, grads)
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    o, lse = checkpoint(lambda *x: attention(**dict(zip(names, x, strict=True))), *leaves, use_reentrant=reentrant)
    torch.autograd.backward((o, lse), grads)  # the reentrant form refuses autograd.grad
    actual = {"o": o.detach(), "lse": lse.detach()} | {f"grad {name}": x.grad for name, x in zip(names, leaves, strict=True)}
    compare(actual, plain)
    assert reentrant or all(torch.equal(x, plain[name]) for name, x in actual.items())


def check_export(block: torch.nn.Module, device: torch.device) -> None:
    """torch.export of a module on (batch, tokens, 16), the number of tokens left open."""
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(block, (torch.randn(2, 11, 16, device=device),), dynamic_shapes={"x": {1: length}})
    for n in (2, 50, 700):
        x = torch.randn(2, n, 16, device=device)
        torch.testing.assert_close(program.module()(x), block(x))


# ---- memory


def capture(call: Callable, warm_up: Callable | None = None) -> tuple[torch.cuda.CUDAGraph, object]:
    """Captures a CUDA graph of `call` and returns it with what a replay writes. Two calls on a side stream come first, of
    `warm_up` if `call` changes its arguments."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            (warm_up or call)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    return graph, captured


def assert_replayed(graph: torch.cuda.CUDAGraph, captured: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Checks that a replay writes the bits of `expected` over results that are NaN before it."""
    with torch.no_grad():
        for x in captured:
            x.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)


class Memory(TorchDispatchMode):
    """Largest tensor made, and the peak of bytes alive, inside the registered operators too."""

    def __init__(self):
        super().__init__()
        self.largest = self.alive = self.peak = 0
        self._known = weakref.WeakSet()

    def _free(self, size):
        self.alive -= size

    def _see(self, x):
        self.largest = max(self.largest, x.numel() if x.is_contiguous() else 0)
        storage = x.untyped_storage()
        if storage not in self._known:
            self._known.add(storage)
            self.alive += storage.nbytes()
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, storage.nbytes())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fastmax":
            key = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
            with self:
                out = func.redispatch(key, *args, **(kwargs or {}))
        else:
            out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self._see(x)
        return out


# ---- sizes and inputs


@dataclass(frozen=True)
class Case:
    """A size; its name says which path it takes."""

    name: str
    n: int
    m: int = 0  # n
    b: int = 1
    h: int = 2
    hk: int = 0  # h
    d: int = 16
    dv: int = 0  # d

    def __post_init__(self):
        for name, default in (("m", self.n), ("hk", self.h), ("dv", self.d)):
            object.__setattr__(self, name, getattr(self, name) or default)


CASES = (
    Case("one token", n=1),
    Case("17 tokens, less than any block", n=17),
    Case("one query after 37 keys, as in decoding", n=1, m=37),
    Case("one query past a chunk of keys", n=1, m=CHUNK + 1),
    Case("p=1 chunk - 1", n=CHUNK_P1 - 1),
    Case("p=1 chunk", n=CHUNK_P1),
    Case("p=1 chunk + 1", n=CHUNK_P1 + 1),
    Case("p=1 three chunks side by side and a ragged one", n=3 * CHUNK_P1 + 17),
    Case("p=2 chunk - 1", n=CHUNK - 1),
    Case("p=2 chunk", n=CHUNK),
    Case("p=2 chunk + 1", n=CHUNK + 1),
    Case("p=2 two chunks and a ragged one", n=2 * CHUNK + 17),
    Case("query rows of a tile - 1", n=ROWS - 1, h=1),
    Case("query rows of a tile + 1", n=ROWS + 1, h=1),
    Case("keys of a tile - 1", n=33, m=COLS - 1, h=1),
    Case("keys of a tile", n=33, m=COLS, h=1),
    Case("keys of a tile + 1", n=33, m=COLS + 1, h=1),
    Case("n < m, diagonal ends inside a tile", n=100, m=COLS + 60, h=1),
    Case("n < m, keys before the queries fill no chunk", n=70, m=73),
    Case("n < m, keys before the queries fill a chunk and more", n=70, m=70 + CHUNK + 5),
    Case("n < m, keys before the queries fill chunks that are not side by side", n=3, m=2 * CHUNK_D64 + 9, d=64),
    Case("n > m", n=70, m=33),
    Case("n > m, more queries than a chunk", n=CHUNK + 9, m=5),
    Case("GQA, 3 query heads to a kv head", n=70, m=75, b=2, h=6, hk=2),
    Case("GQA, ragged chunks", n=CHUNK + 3, h=4, hk=2),
    Case("MQA, 4 query heads to one", n=70, h=4, hk=1),
    Case("dv > d", n=40, dv=24),
    Case("dv < d", n=40, dv=7),
    Case("dv = 1", n=40, dv=1),
    Case("d = 1", n=40, d=1, dv=3),
    Case("d = 5, odd and less than a feature tile", n=40, d=5),
    Case("d = 17, a feature tile + 1", n=40, d=17),
    Case("d = 33, odd", n=40, d=33, dv=20),
    Case("d = 64, more heads than the linear algorithm takes together", n=CHUNK + 1, h=4, d=64),
    Case("more heads than the quadratic algorithm takes together", n=ROWS + 1, b=2, h=5, d=4),
    Case("d = 128", n=40, d=128),
)

by_size = pytest.mark.parametrize(
    "case, causal",
    [
        pytest.param(case, causal, id=f"{case.name}-{'causal' if causal else 'full'}")
        for case in CASES
        for causal in (False, True)
        if case.n <= case.m or not causal
    ],
)

LAYOUTS = ("contiguous", "packed qkv", "token-major", "transposed", "sliced rows", "expanded")
by_layout = pytest.mark.parametrize("layout", LAYOUTS)


def bounded(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Tensor:
    """Returns random rows of length <= 0.9. Then |q.k| < 1, so 1 + s is positive and a relative error is meaningful."""
    x = torch.randn(shape, dtype=torch.float64)
    x = 0.9 * x * torch.rand(*shape[:-1], 1, dtype=torch.float64) / x.norm(dim=-1, keepdim=True)
    return x.to(device, dtype)


def make_inputs(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    layout: str = "contiguous",
    q_and_k=bounded,
) -> tuple[dict[str, Tensor], Tensor]:
    """{"q": (b, h, n, d), "k": (b, hk, m, d), "v": (b, hk, m, dv)} with real strides, and grad_o (b, h, n, dv)."""
    b, h, hk, n, m, d, dv = case.b, case.h, case.hk, case.n, case.m, case.d, case.dv
    q, k = q_and_k(b, h, n, d, dtype=dtype, device=device), q_and_k(b, hk, m, d, dtype=dtype, device=device)
    v = torch.randn(b, hk, m, dv, dtype=torch.float64).to(device, dtype)
    grad_o = torch.randn(b, h, n, dv, dtype=torch.float64).to(device, dtype)
    inputs = {"q": q, "k": k, "v": v}
    if layout == "packed qkv":
        assert n == m and d == dv
        packed = torch.cat([x.transpose(1, 2) for x in (q, k, v)], dim=2)  # (b, n, h + 2 hk, d)
        inputs = {name: x.transpose(1, 2) for name, x in zip("qkv", packed.split((h, hk, hk), dim=2), strict=True)}
    elif layout == "token-major":
        inputs = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
        grad_o = grad_o.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "transposed":
        inputs = {name: x.mT.contiguous().mT for name, x in inputs.items()}
        grad_o = grad_o.mT.contiguous().mT
    elif layout == "sliced rows":
        inputs = {name: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]] for name, x in inputs.items()}
        grad_o = torch.cat([grad_o, grad_o], dim=2)[:, :, n:]
    elif layout == "expanded":
        inputs = {name: x[:, :1].expand_as(x) for name, x in inputs.items()}
        grad_o = grad_o[:, :, :1].expand_as(grad_o)
    else:
        assert layout == "contiguous"
    return inputs, grad_o


def make_decay(kind: str, *shape: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns log_decay (b, hk, m) of a `kind` in DECAYS."""
    log_decay = DECAYS[kind](torch.rand(shape, dtype=torch.float64))
    if kind == "-inf at the first token":
        log_decay[..., 0] = -math.inf
    return log_decay.to(device, dtype)


def make_odd_decay(
    *shape: int, dtype: torch.dtype = torch.float64, device: torch.device = CPU, underflows: bool = False
) -> Tensor:
    """Values above 0, +inf, -inf and NaN among ordinary ones, 0 among them, and with `underflows` some whose factor is 0. The
    first token of every second head is NaN."""
    kind, log_decay = torch.rand(shape, dtype=torch.float64), -0.3 * torch.rand(shape, dtype=torch.float64)
    begin = 0.0
    kinds = ((0.5, 0.15), (math.inf, 0.05), (0.0, 0.05), (-math.inf, 0.03), (math.nan, 0.02))
    for value, share in (*kinds, *(((-110.0, 0.03), (-800.0, 0.03)) if underflows else ())):
        log_decay = torch.where((kind >= begin) & (kind < begin + share), value, log_decay)
        begin += share
    log_decay[:, ::2, 0] = math.nan
    return log_decay.to(device, dtype)


# Of uniform random numbers. An ordinary gate keeps a half in 1 to 100 tokens; strong ones leave nothing of the token before.
DECAYS = {
    "none": lambda x: 0.0 * x,
    "weak": lambda x: -1e-3 * x,
    "ordinary": lambda x: -0.7 * x**3,
    "strong": lambda x: torch.full_like(x, -50.0),
    "none, ordinary or strong": lambda x: torch.where(x < 0.4, 0.0, torch.where(x < 0.8, -x, -50.0)),
    "-inf at places": lambda x: torch.where(x < 0.04, -math.inf, -0.1 * x),
    "-inf at the first token": lambda x: -0.1 * x,
    "-inf everywhere": lambda x: torch.full_like(x, -math.inf),
}
by_decay = pytest.mark.parametrize("decay", DECAYS)


def make_options(name: str, case: Case, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> dict:
    """Returns the keyword arguments of the option `name` in OPTIONS."""
    b, h, n, m, dv = case.b, case.h, case.n, case.m, case.dv
    options = dict(OPTIONS[name])
    if options.pop("padding", False):
        mask = torch.rand(b, m) > 0.3
        mask[:, 0] = True  # every query of a causal call sees a key; fully masked rows have tests of their own
        options["attention_mask"] = mask.to(device)
    if "dropout" in options:
        options["drop_noise"] = torch.randn(b, h, n, dv, dtype=torch.float64).to(device, dtype)
    return options


OPTIONS = {
    "defaults": {},
    "p=1": {"p": 1},
    "temperature": {"temperature": 2.5},
    "small temperature": {"temperature": 0.3},
    "coefficients": {"a0": 2.0, "a1": 0.7, "a2": 0.3},
    "no constant term": {"a0": 0.0, "a1": 0.0, "a2": 1.0},
    "p=1 coefficients": {"p": 1, "a0": 3.0, "a1": -1.5},
    "p=1 constant": {"p": 1, "a0": 1.0, "a1": 0.0},
    "normalize=True": {"normalize": True},
    "normalize=sequence": {"normalize": "sequence", "lim": 0.7},
    "normalize=token": {"normalize": "token", "lim": 0.5},
    "normalize=token, p=1, temperature": {"normalize": "token", "lim": 2.0, "temperature": 5.0, "p": 1},
    "key padding": {"padding": True},
    "key padding, normalize=sequence": {"padding": True, "normalize": "sequence", "lim": 0.8},
    "noise": {"dropout": 0.4},
    "sinusoidal": {"rpe_matrix": "sinusoidal", "temperature": 4.0},
    "sinusoidal, p=1": {"rpe_matrix": "sinusoidal", "temperature": 20.0, "p": 1},
    "everything": {
        "padding": True,
        "dropout": 0.2,
        "rpe_matrix": "sinusoidal",
        "normalize": "token",
        "lim": 0.8,
        "temperature": 3.0,
        "a0": 1.5,
        "a1": 0.9,
        "a2": 0.4,
    },
}
by_option = pytest.mark.parametrize("option", OPTIONS)
