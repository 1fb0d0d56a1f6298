"""The CUDA library: the message that says why it does not run, libraries of another version, and which calls its kernels
compute."""

import re
import shutil
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode

from fastmax import eager
from fastmax.ops import extension, kept, normalization, row_softmax, steps
from fastmax.ops.registration import OPERATORS, Operator


@pytest.fixture(autouse=True)
def as_it_was():
    """Restores the module variable that `load` sets and clears cached answers."""
    problem, checked = extension._problem, set(extension._checked)

    def forget():
        # Until a test replaces it, each is the cached function.
        for function in (extension._symbol, extension._device_problem):
            getattr(function, "cache_clear", lambda: None)()

    extension._checked.clear()
    forget()
    yield
    forget()
    extension._problem = problem
    extension._checked.clear()
    extension._checked.update(checked)


@pytest.fixture
def cuda_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def library(path, version):
    """Returns a shared library that answers as libfastmax.so does and registers nothing. Without a version it has no version
    function."""
    symbol = "" if version is None else f"int fastmax_schema_version() {{ return {version}; }}"
    source = f"""
    {symbol}
    const char* fastmax_build_info() {{ return "architectures 80 90"; }}
    const char* fastmax_device_problem(int index) {{ return index == 0 ? 0 : "it is too old"; }}
    """
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, text=True, check=True)
    return path


needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def assert_one_sentence(text, *words):
    assert text and "\n" not in text and not text.endswith(".")
    for word in words:
        assert word in text


def test_pytorch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    extension.load()
    assert_one_sentence(extension.problem(), torch.__version__, "built without CUDA")
    assert extension.problem(torch.device("cuda", 0)) == extension.problem(), "no device is asked"


def test_not_built(cuda_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PATH", tmp_path / "libfastmax.so")
    extension.load()
    assert_one_sentence(extension.problem(), "was not built", "nvcc", "pip install", "FASTMAX_BUILD_CUDA=1")


@pytest.mark.parametrize("content", [b"", b"not a library\n" * 1000], ids=["empty", "garbage"])
def test_a_file_that_does_not_load(content, cuda_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PATH", tmp_path / "libfastmax.so")
    extension.PATH.write_bytes(content)
    extension.load()
    assert_one_sentence(extension.problem(), str(extension.PATH), "does not load", "rebuild it", "pip install")


def test_another_version_is_an_error(cuda_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PATH", tmp_path / "libfastmax.so")
    extension.PATH.touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    monkeypatch.setattr(extension, "_symbol", lambda name: {"fastmax_schema_version": lambda: 99}[name])
    with pytest.raises(ImportError, match="another version of fastmax") as error:
        extension.load()
    assert_one_sentence(str(error.value), "99", str(extension.SCHEMA_VERSION), str(extension.PATH), "rebuild it")


@needs_cc
@pytest.mark.parametrize("version", [extension.SCHEMA_VERSION - 1, None], ids=["older", "from before there were versions"])
def test_another_version_of_a_real_library_is_an_error(version, cuda_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PATH", library(tmp_path / "old.so", version))
    with pytest.raises(ImportError, match=f"operator schemas {version}, "):
        extension.load()


@needs_cc
def test_a_library_that_loads(cuda_torch, monkeypatch, tmp_path):
    monkeypatch.setattr(extension, "PATH", library(tmp_path / "new.so", extension.SCHEMA_VERSION))
    extension.load()
    assert extension.problem() is None
    assert extension.build_info() == "architectures 80 90"
    assert extension.problem(torch.device("cuda", 0)) is None
    assert extension.problem(torch.device("cuda", 1)) == "it is too old"
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert extension.problem(torch.device("cuda")) == "it is too old", "no index: the current device"


# ---- the warning


def test_warns_once_for_each_device(monkeypatch):
    monkeypatch.setattr(extension, "problem", lambda device=None: f"there is no nvcc ({device.index})")
    for index in (0, 1):
        device = torch.device("cuda", index)
        with pytest.warns(RuntimeWarning, match="PyTorch implementation") as caught:
            extension.warn_if_unused(device)
        (warning,) = caught
        assert warning.filename == __file__
        assert f"on {device}, " in str(warning.message) and f"there is no nvcc ({index})." in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in (0, 1, 0):
            extension.warn_if_unused(torch.device("cuda", index))


def test_does_not_warn_where_kernels_run(monkeypatch):
    monkeypatch.setattr(extension, "problem", lambda device=None: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extension.warn_if_unused(torch.device("cuda", 0))


def test_the_device_is_asked_once(monkeypatch):
    asked = []
    monkeypatch.setattr(extension, "problem", asked.append)
    for _ in range(3):
        extension.warn_if_unused(torch.device("cuda", 0))
    assert asked == [torch.device("cuda", 0)]


# ---- kernels


def kernel_that(monkeypatch, function, name="merge_"):
    """Returns the kernel of an operator, computed by `function`."""
    kernel = OPERATORS[name].kernel
    monkeypatch.setattr(kernel, "_kernel", function)
    return kernel


def fails(error):
    def operator(*arguments):
        raise error

    return operator


def test_out_of_memory_has_its_type(monkeypatch):
    """The library's interface knows RuntimeErrors alone."""
    told = RuntimeError("fastmax: allocation on cuda:0 failed: CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB") as error:
        kernel_that(monkeypatch, fails(told))(())
    assert error.value.__cause__ is told


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("fastmax: q is on cpu"),
        torch.OutOfMemoryError("out of memory"),
        NotImplementedError("out of memory"),
        ValueError(),
    ],
    ids=repr,
)
def test_other_errors_stay(error, monkeypatch):
    with pytest.raises(type(error)) as raised:
        kernel_that(monkeypatch, fails(error))(())
    assert raised.value is error


def test_kernels_do_not_see_tensors_that_they_do_not_read(monkeypatch):
    """Their gradients are None, and in a dispatched call tensors without elements."""
    monkeypatch.setattr(extension, "kernels_run_on", lambda x: True)
    backward, x, z = OPERATORS["backward"], torch.randn(1, 2, 3, 4), torch.ones(1, 2, 3)
    names = [argument.name for argument in backward.overload._schema.arguments]
    given = dict.fromkeys(names) | {"grad_o": x, "q": x, "k": x, "v": x, "o": x, "z": z, "rpe_matrix": None}
    seen = []

    def run(*arguments):
        seen.append(arguments)
        return x, x, x, x.new_empty(0), x.new_empty(0)

    kernel_that(monkeypatch, run, "backward")
    assert names.index("rpe_matrix") == 9
    results = backward(*given.values())
    assert len(seen[-1]) == len(names) - 1 and results[3] is None and results[4].shape == results[5].shape == (0,)
    dispatched = backward.run(*given.values())
    assert len(dispatched) == 6 and all(of_tensor.shape == (0,) for of_tensor in dispatched[3:])
    assert not backward.kernel.covers(tuple((given | {"rpe_matrix": x}).values()))


# ---- who runs a call


class SmallRows:
    """Stands for a kernel of the row softmax that computes tensors of at most 8 columns."""

    def __init__(self, function):
        self.function = function

    def covers(self, arguments):
        return arguments[0].shape[-1] <= 8

    def __call__(self, arguments):
        return self.function(*arguments)


@pytest.fixture
def operator():
    """The operator of the row softmax with such a kernel. `operator.ran` lists who ran."""
    original, ran = OPERATORS["softmax"], []

    def runs(name, function):
        def run(*arguments):
            ran.append(name)
            return function(*arguments)

        return run

    kernel = SmallRows(runs("kernel", original.implementation))
    operator = Operator(runs("dispatcher", original.overload), runs("implementation", original.implementation), kernel)
    operator.ran = ran
    return operator


class Subclass(torch.Tensor):
    pass


def test_the_kernel_runs_what_it_covers(operator):
    for columns, who in ((8, "kernel"), (9, "implementation")):
        x = torch.randn(3, columns)
        assert_close(operator(x, "safe"), x.softmax(-1))
        assert operator.ran == [who]
        operator.ran.clear()
        operator.run(x, "safe")
        assert operator.ran == [who], "a dispatched call"
        operator.ran.clear()


@pytest.mark.parametrize("what", ["autograd", "mode", "vmap", "forward mode", "trace", "subclass", "fake"])
def test_a_call_that_others_must_see_is_dispatched(what, operator):
    x = torch.randn(3, 8, requires_grad=what == "autograd")
    if what == "mode":
        with FlopCounterMode(display=False):
            operator(x, "safe")
    elif what == "vmap":
        torch.vmap(lambda x: operator(x, "safe"))(x)
    elif what == "forward mode":
        with torch.autograd.forward_ad.dual_level():
            operator(x, "safe")
    elif what == "trace":
        torch.jit.trace(lambda x: operator(x, "safe"), (x,), check_trace=False)
    elif what == "subclass":
        operator(x.as_subclass(Subclass), "safe")
    elif what == "fake":
        with FakeTensorMode() as mode:
            x = mode.from_tensor(x)
        operator(x, "safe")
    else:
        operator(x, "safe")
    assert operator.ran[0] == "dispatcher"


def test_without_gradients_nothing_is_dispatched(operator):
    x = torch.randn(3, 8, requires_grad=True)
    with torch.no_grad():
        operator(x, "safe")
    operator(x.detach(), "safe")
    assert operator.ran == ["kernel", "kernel"]


def test_no_kernel_takes_tensors_of_a_cpu():
    x = torch.randn(1, 2, 3, 4)
    assert not extension.kernels_run_on(x)
    assert not OPERATORS["forward"].kernel.covers((x, x, x, *[None] * 7, 1.0, 1.0, 1.0, 0.5, 2, True, 0.0, "auto", False))


# The kernels of these take tensors of any rank and check it.
ANY_RANK = {"softmax", "finite_decay"}


@pytest.mark.parametrize("name", [name for name, x in OPERATORS.items() if x.kernel is not None and name not in ANY_RANK])
def test_no_kernel_takes_tensors_of_another_rank(name, monkeypatch):
    """They go to the implementation, which names the argument; looking at their sizes must not fail."""
    monkeypatch.setattr(extension, "kernels_run_on", lambda x: True)
    operator = OPERATORS[name]
    for rank in range(4):
        x = torch.randn([2] * rank)
        given = [x if "Tensor" in str(argument.type) else 1.0 for argument in operator.overload._schema.arguments]
        assert not operator.kernel.covers(tuple(given))


def test_limits_are_those_of_the_kernels():
    """Python decides who runs a call; the bindings refuse what no kernel computes."""
    csrc = Path(__file__).parents[1] / "csrc"

    def number(header, pattern):
        (found,) = re.findall(pattern, (csrc / header).read_text())
        return eval(found, {"INT_MAX": 2**31 - 1})

    head_dims = re.search(r"using NativeHeadDims = HeadDims<([\d, ]+)>", (csrc / "core/dispatch.h").read_text())[1]
    assert max(map(int, head_dims.split(","))) == extension.MAX_HEAD_DIM
    assert number("decode/decode.h", r"kMaxDecodeHeadDim = (\d+)") == extension.MAX_HEAD_DIM
    assert number("normalize/normalize.h", r"kMaxNormalizedDim = (\d+)") == extension.MAX_HEAD_DIM
    assert number("normalize/normalize.h", r"kMaxNormalizedRows = ([\w /]+);").__floor__() == normalization._MAX_ROWS
    assert (
        float.fromhex(re.search(r"kMaxNormalizedLim = (\w+)", (csrc / "normalize/normalize.h").read_text())[1])
        == normalization._MAX_LIM
    )
    assert number("decode/buffered.h", r"kMaxBufferedPlaces = (\d+)") == steps._MAX_PLACES
    assert number("kept/kept.h", r"kMaxKept = (\d+)") == kept._MAX_KEPT
    assert number("kept/kept.h", r"kMaxSlots = (\d+)") == kept._MAX_SLOTS
    assert number("kept/step.cu", r"kLeastDecay = (.+?);") == eager.LEAST_DECAY
    assert number("kept/kept.h", r"kMaxCandidates = (\d+)") == kept._MAX_CANDIDATES
    assert (
        "kMaxSoftmaxWidth = int64_t{1} << 30;" in (csrc / "softmax/softmax.h").read_text() and row_softmax._MAX_WIDTH == 1 << 30
    )
