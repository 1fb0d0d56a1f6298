"""Fixtures of the whole suite: devices, seeds, poisoned memory."""

import importlib
import os
import tempfile
import warnings

# cuBLAS is deterministic only with a fixed workspace, and reads this before CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# A second thread, where a test asks for one, sleeps while it waits: beside other processes spinning takes their time.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# Compile in this process: workers start more slowly than the little there is to compile.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Inductor's cache does not distinguish the instruction sets that this variable chooses.
if _capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), f"fastmax-inductor-{_capability}"))

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("fastmax", deadline=None, derandomize=True, database=None, max_examples=25)
hypothesis.settings.load_profile("fastmax")


def pytest_addoption(parser):
    parser.addoption("--unaligned", action="store_true", help="operands at any address, on a CPU: tests/unaligned.py")


def pytest_configure(config):
    # p = 1 and other polynomials that can vanish are tested on inputs where they do not; test_validation.py has the warning.
    config.addinivalue_line("filterwarnings", "ignore:fastmax. f.s. .* is not positive:RuntimeWarning")
    # Causal with normalize="sequence" is right by the definition; the warning that it leaks has a test there too.
    config.addinivalue_line("filterwarnings", "ignore:fastmax. with normalize=.sequence.*leak:RuntimeWarning")
    # In deterministic mode torch fills what `empty` returns with NaN (`fill_uninitialized_memory`, on by default), so that an
    # element nobody writes is seen. test_common.py checks that it does.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    # The sizes here are small: threads would wait for each other more than they work, all the more under pytest-xdist.
    torch.set_num_threads(1)
    # The first use of forward mode makes torch script its decompositions, which warns of its own deprecation.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    if config.getoption("--unaligned"):
        importlib.import_module("unaligned").install()


def pytest_report_header():
    return [] if torch.cuda.is_available() else "no CUDA device: tests that need one are left out"


def pytest_pycollect_makeitem(collector, name, obj):
    """Leaves out tests that need a GPU where there is none. They are more than half of all tests and slow to collect."""
    if torch.cuda.is_available() or not name.startswith("test"):
        return None
    of_module = getattr(collector.obj, "pytestmark", [])
    marks = [*(of_module if isinstance(of_module, list) else [of_module]), *getattr(obj, "pytestmark", [])]
    return [] if any(mark.name == "cuda" for mark in marks) else None


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    kept: dict[bool, list] = {True: [], False: []}
    for item in items:  # parameters that need one
        kept[item.get_closest_marker("cuda") is None].append(item)
    items[:] = kept[True]
    config.hook.pytest_deselected(items=kept[False])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def memory_for_others():
    """Returns the memory of a large test to the device, where other processes test too."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**31:
        torch.cuda.empty_cache()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def several_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def kernels_alone(monkeypatch):
    """Makes calls fail that reach the PyTorch implementation of attention."""
    from fastmax import eager

    def refuse(*_, **__):
        raise AssertionError

    for name in ("forward", "backward"):
        monkeypatch.setattr(eager, name, refuse)
