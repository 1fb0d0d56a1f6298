"""Loading the CUDA library: each reason why kernels do not run is one sentence, a library of another version an error."""

import shutil
import subprocess
import warnings

import pytest
import torch

from fastmax.ops import extension


@pytest.fixture(autouse=True)
def as_it_was():
    """`load` sets a module variable, and answers are remembered."""
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
    """A shared library that answers as libfastmax.so does; it registers nothing. No version: none can be asked for."""
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


# ---- what fails inside the library


def fails(error):
    def operator(*arguments):
        raise error

    return operator


def test_a_call_that_succeeds():
    assert extension.call(max, 1, 3, 2) == 3


def test_out_of_memory_has_its_type():
    """The library's interface knows RuntimeErrors alone."""
    told = RuntimeError("fastmax: allocation on cuda:0 failed: CUDA out of memory. Tried to allocate 2.00 GiB")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB") as error:
        extension.call(fails(told))
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
def test_other_errors_stay(error):
    with pytest.raises(type(error)) as raised:
        extension.call(fails(error))
    assert raised.value is error


@pytest.mark.parametrize("error", [ValueError("k must have q's dtype"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
def test_errors_of_the_pytorch_implementation_have_their_types(error):
    """Handed on by the library, they come back through its interface as a RuntimeError without a type."""

    def library_call():
        try:
            extension.remembering(fails(error))()
        except Exception:
            raise RuntimeError("fastmax::eager_forward failed: ") from None

    with pytest.raises(type(error)) as raised:
        extension.call(library_call)
    assert raised.value is error


def test_errors_of_other_calls_are_not_remembered():
    with pytest.raises(ValueError):
        extension.remembering(fails(ValueError("before")))()
    with pytest.raises(RuntimeError, match="after"):
        extension.call(fails(RuntimeError("after")))
    with pytest.raises(ValueError):
        extension.remembering(fails(ValueError("later")))()
    assert extension._failures.raised is None, "an exception would keep the tensors of its frames"
