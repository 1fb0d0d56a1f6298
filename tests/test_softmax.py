"""`fastmax.softmax`: naive, safe and online softmax of arrays and tensors, the running states, the operator and its kernel."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from common import DTYPES, assert_within_contract, check_operator, dtype_id
from hypothesis import given
from hypothesis import strategies as st

import fastmax
from fastmax import eager, ops
from fastmax.eager import row_softmax
from fastmax.ops import extension
from fastmax.softmax import RunningStates, naive_softmax, online_softmax, safe_softmax
from fastmax.testing.poison import poison_free_memory

INF = math.inf
FUNCTIONS = {
    "naive": naive_softmax,
    "safe": safe_softmax,
    "online": online_softmax,
    "online, blocks of 3": partial(online_softmax, block_size=3),
}
SAFE_FUNCTIONS = {name: function for name, function in FUNCTIONS.items() if name != "naive"}
by_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
by_safe_function = pytest.mark.parametrize("function", SAFE_FUNCTIONS.values(), ids=SAFE_FUNCTIONS)
by_algorithm = pytest.mark.parametrize("algorithm", ["safe", "online"])
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
# Importing the compiler runs deprecated parts of torch.
torch_warns = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SHAPES = [(1,), (7,), (3, 1), (4, 5), (2, 3, 10), (2, 1, 3, 4), (3, 1023), (2, 1024), (2, 2500), (0, 5), (3, 0), (0,)]


def reference(x):
    """Returns softmax in float64. Rows that are not finite follow from IEEE arithmetic."""
    x = x.double()
    if x.shape[-1] == 0:
        return x
    e = (x - x.max(dim=-1, keepdim=True).values).exp()
    return e / e.sum(dim=-1, keepdim=True)


def check(y, x):
    """Checks that the result y for the tensor x is as accurate as PyTorch's own."""
    assert_within_contract("softmax", y, torch.softmax(x, -1), reference(x))


# ---- values


@by_function
@by_dtype
def test_tensors(dtype, function, device):
    for shape in SHAPES:
        x = (2 * torch.randn(shape, dtype=torch.float64)).to(device, dtype)
        before = x.clone()
        y = function(x)
        check(y, x)
        assert y.device == x.device and torch.equal(x, before)
        assert y is not x and (y.numel() == 0 or y.data_ptr() != x.data_ptr())


@by_function
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_arrays(dtype, function):
    for shape in SHAPES:
        x = (2 * torch.randn(shape, dtype=torch.float64)).numpy().astype(dtype)
        before = x.copy()
        y = function(x)
        assert isinstance(y, np.ndarray) and y.dtype == dtype and not np.shares_memory(x, y)
        assert np.array_equal(x, before)
        check(torch.from_numpy(y), torch.from_numpy(x))


@by_function
def test_strides(function, device):
    """The input is transposed, every other column, or expanded rows, as a tensor and as an array."""
    x = torch.randn(6, 5, 8, device=device)
    for view in (x.transpose(0, 2), x[:, ::2, ::2], x[:1, :1].expand(4, 3, 8), x.permute(2, 0, 1)[1:, :, 1:]):
        check(function(view), view)
        view = view.cpu()
        check(torch.from_numpy(function(view.numpy())), view)


def test_long_double():
    x = np.array([0.0, 1.0, -3.0], dtype=np.longdouble)
    for function in FUNCTIONS.values():
        y = function(x)
        assert y.dtype == np.longdouble
        assert np.allclose(y.astype(np.float64), reference(torch.tensor([0.0, 1.0, -3.0])).numpy(), rtol=1e-15)


def test_block_sizes(device):
    x = torch.randn(4, 10, device=device, dtype=torch.float64)
    for block_size in (1, 2, 3, 7, 9, 10, 11, 5000):
        y, (maxima, sums) = online_softmax(x, block_size, return_states=True)
        check(y, x)
        assert torch.equal(y, online_softmax(x, block_size))
        assert maxima.shape == sums.shape == (4, -(-10 // block_size))


# ---- what overflows, and what is infinite


def test_naive_overflows_as_the_formula_does(device):
    """It overflows from 89 on in float32 and 710 in float64, and below -104 and -746. Half types are computed in float32."""
    for dtype, high, low in ((torch.float32, 89.0, -104.0), (torch.bfloat16, 89.0, -104.0), (torch.float64, 710.0, -746.0)):
        x = torch.tensor([[high, 0.0], [0.0, 0.0], [low, low], [high - 2, low + 2]], dtype=dtype, device=device)
        y = naive_softmax(x)
        assert y.isnan().tolist() == [[True, False], [False, False], [True, True], [False, False]]
        assert not safe_softmax(x).isnan().any()
    assert not naive_softmax(torch.tensor([11.5, 0.0], dtype=torch.float16, device=device)).isnan().any()


def test_numpy_warns_where_naive_overflows():
    with pytest.warns(RuntimeWarning, match="overflow"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "invalid value")
        assert np.isnan(naive_softmax(np.array([1000.0, 0.0]))[0])


ROWS = {
    "large": [1e4, 1e4 - 1.0, -1e4, 0.0, 9999.5],
    "large and negative": [-1e4, -1e4 + 2.0, -1e4, -1e4 - 3.0, -2e4],
    "-inf at the start": [-INF, -INF, -INF, -INF, 1.0],
    "-inf at the end": [2.0, -INF, -INF, -INF, -INF],
    "-inf in between": [-INF, 2.0, -INF, 1.0, -INF],
    "-inf throughout": [-INF] * 5,
    "inf": [0.0, 1.0, INF, 2.0, -INF],
    "inf at the start": [INF, 1.0, 2.0, 3.0, 4.0],
    "nan": [0.0, math.nan, 1.0, 2.0, 3.0],
    "nan after -inf": [-INF, -INF, -INF, math.nan, 1.0],
}


@by_safe_function
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=dtype_id)
def test_extreme_rows(dtype, function, device):
    """Results are those of torch.softmax, NaN where it has NaN. Ordinary rows beside them stay ordinary."""
    x = torch.cat([torch.randn(2, 5), torch.tensor(list(ROWS.values())), torch.randn(2, 5)]).to(device, dtype)
    expected = torch.softmax(x.double(), -1)
    not_finite = [row.startswith(("inf", "nan")) or "throughout" in row for row in ROWS]
    assert expected.isnan().all(-1).tolist() == [False, False, *not_finite, False, False]
    results = [function(x)]
    if dtype != torch.bfloat16:
        results.append(torch.from_numpy(function(x.cpu().numpy())).to(device))
    for y in results:
        tolerance = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=1e-37, equal_nan=True)


def test_largest_finite_numbers(device):
    """x - max overflows to -inf, whose exponential is 0."""
    big = torch.finfo(torch.float32).max
    x = torch.tensor([[big, -big, big], [-big, -big, 0.0]], device=device)
    for function in SAFE_FUNCTIONS.values():
        assert function(x).tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 1.0]]


# ---- the running states


numbers = st.one_of(st.floats(-60.0, 60.0), st.just(-INF))


@given(st.integers(1, 12).flatmap(lambda width: st.lists(st.lists(numbers, min_size=width, max_size=width), min_size=1)),
       st.integers(1, 14))  # fmt: skip
def test_states_are_those_of_the_columns_so_far(rows, block_size):
    for x in (torch.tensor(rows, dtype=torch.float64), np.array(rows)):
        y, states = online_softmax(x, block_size, return_states=True)
        assert isinstance(states, RunningStates) and type(states.max) is type(states.sum) is type(x)
        width = len(rows[0])
        ends = [min(start + block_size, width) for start in range(0, width, block_size)]
        assert states.max.shape == states.sum.shape == (len(rows), len(ends))
        for i, row in enumerate(rows):
            for j, end in enumerate(ends):
                top = max(row[:end])
                assert states.max[i, j] == top
                total = math.fsum(math.exp(v - top) for v in row[:end]) if top > -INF else 0.0
                assert math.isclose(states.sum[i, j], total, rel_tol=1e-13)
        last = states.max[:, -1:], states.sum[:, -1:]
        with np.errstate(invalid="ignore"):
            again = np.exp(np.asarray(x) - np.asarray(last[0])) / np.asarray(last[1])
        np.testing.assert_allclose(np.asarray(y), again, rtol=1e-13, atol=0)


@by_dtype
def test_states_of_half_types_are_float32(dtype, device):
    x = torch.randn(2, 3, 50, device=device).to(dtype)
    y, (maxima, sums) = online_softmax(x, 16, return_states=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert y.dtype == dtype and maxima.dtype == sums.dtype == wide
    assert torch.equal(maxima, x.to(wide).cummax(-1).values[..., [15, 31, 47, 49]])
    exact = (x.double() - maxima[..., -1:].double()).exp().sum(-1)
    torch.testing.assert_close(sums[..., -1].double(), exact, rtol=1e-6 if wide == torch.float32 else 1e-14, atol=0)


def test_states_without_columns_and_of_one_row():
    for make in (torch.zeros, np.zeros):
        y, states = online_softmax(make((3, 0)), return_states=True)
        assert y.shape == states.max.shape == states.sum.shape == (3, 0)
        y, states = online_softmax(make(4), 3, return_states=True)
        assert states.max.tolist() == [0.0, 0.0] and states.sum.tolist() == [3.0, 4.0] and y.tolist() == [0.25] * 4


# ---- gradients


@by_function
def test_gradcheck(function, device):
    x = torch.randn(2, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


def test_gradcheck_of_the_states(device):
    x = torch.randn(2, 7, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: tuple(online_softmax(x, 3, return_states=True)[1]), x)


@by_function
@by_dtype
def test_gradients_are_those_of_torch(dtype, function, device):
    """Gradients obey the contract. Elements of -inf get gradient 0."""
    x = torch.randn(8, 37, device=device).to(dtype)
    x[2, 5:] = -INF
    x[3, :30] = -INF
    grad = torch.randn(8, 37, device=device).to(dtype)

    def gradient(function, x, grad):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(function(x), x, grad)[0]

    plain = gradient(partial(torch.softmax, dim=-1), x, grad)
    exact = gradient(partial(torch.softmax, dim=-1), x.double(), grad.double())
    actual = gradient(function, x, grad)
    assert_within_contract("gradient", actual, plain, exact)
    assert (actual[x == -INF] == 0).all()


@by_safe_function
def test_torch_func_and_forward_mode(function, device):
    x, tangent = torch.randn(2, 3, 7, dtype=torch.float64, device=device)
    softmax = partial(torch.softmax, dim=-1)
    torch.testing.assert_close(torch.func.vmap(function)(x), softmax(x))
    for actual, expected in zip(*(torch.func.jvp(f, (x,), (tangent,)) for f in (function, softmax)), strict=True):
        torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(torch.func.jacrev(function)(x), torch.func.jacrev(softmax)(x))


# ---- the operator


@by_algorithm
@pytest.mark.parametrize(
    "layout, dtype", [("contiguous", torch.float32), ("transposed", torch.bfloat16), ("empty", torch.float32)]
)
def test_opcheck(dtype, layout, algorithm, device):
    x = torch.randn((0, 5) if layout == "empty" else (4, 6), device=device).to(dtype)
    x = (x.T if layout == "transposed" else x).requires_grad_()
    check_operator(torch.ops.fastmax.softmax.default, (x, algorithm), traced=layout == "transposed")
    assert torch.ops.fastmax.softmax(x, algorithm).is_contiguous()


@by_algorithm
@by_dtype
def test_operator(dtype, algorithm, device):
    """Values and the analytic gradient are right and the same when repeated."""
    x = torch.randn(5, 1500, device=device).to(dtype)
    x[1] += 1000.0
    operator = partial(torch.ops.fastmax.softmax, algorithm=algorithm)
    check(operator(x), x)
    wide = torch.randn(3, 6, dtype=torch.float64, device=device, requires_grad=True)
    assert torch.autograd.gradcheck(operator, wide)
    assert torch.autograd.gradgradcheck(operator, wide)


@by_algorithm
def test_operator_with_and_without_a_gradient(algorithm, device):
    """`safe_softmax` and `online_softmax` call it for CUDA tensors. The bits are the same, and it is recorded only if a
    gradient is needed."""
    x = torch.randn(3, 40, device=device)
    expected = torch.ops.fastmax.softmax(x, algorithm)
    recorded = ops.softmax(x.detach().requires_grad_(), algorithm)
    with torch.no_grad():
        quiet = ops.softmax(x.detach().requires_grad_(), algorithm)
    with torch.inference_mode():
        inference = ops.softmax(x, algorithm)
    assert recorded.requires_grad and not quiet.requires_grad and inference.is_inference()
    for y in (recorded, quiet, inference, ops.softmax(x, algorithm)):
        assert torch.equal(y, expected)


def test_operator_rejects_other_algorithms(device):
    with pytest.raises((ValueError, RuntimeError), match="algorithm must be .*safe.* or .*online.*, got .*quick"):
        torch.ops.fastmax.softmax(torch.zeros(3, device=device), "quick")


@torch_warns
@pytest.mark.parametrize("function", [safe_softmax, online_softmax])
def test_compile(function, device):
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for shape in ((3, 40), (2, 2, 1100)):
        x = torch.randn(shape, device=device, requires_grad=True)
        y = compiled(x)
        torch.testing.assert_close(y, function(x))
        grad = torch.randn_like(y)
        torch.testing.assert_close(torch.autograd.grad(y, x, grad), torch.autograd.grad(function(x), x, grad))
    torch._dynamo.reset()


# ---- errors


@by_function
@pytest.mark.parametrize(
    "x, error, message",
    [
        ([1.0, 2.0], TypeError, "x must be a numpy array or a torch.Tensor, got list"),
        (np.float64(1.0), TypeError, "x must be a numpy array or a torch.Tensor, got float64"),
        (np.arange(3), TypeError, "x must be a floating-point array, got dtype int64"),
        (np.zeros(3, dtype=complex), TypeError, "x must be a floating-point array, got dtype complex128"),
        (torch.arange(3), TypeError, "x must be float64, float32, float16 or bfloat16, got torch.int64"),
        (torch.zeros(3, dtype=torch.bool), TypeError, "x must be float64, .* got torch.bool"),
        (torch.tensor(1.0), ValueError, r"x must have at least one dimension, \(..., width\), got none"),
        (np.array(1.0), ValueError, "x must have at least one dimension"),
    ],
    ids=str,
)
def test_bad_x(x, error, message, function):
    with pytest.raises(error, match=message):
        function(x)


@pytest.mark.parametrize("x", [torch.zeros(2, 3), np.zeros((2, 3)), torch.zeros(2, 0)], ids=["tensor", "array", "no columns"])
def test_bad_options(x):
    for block_size in (0, -1):
        with pytest.raises(ValueError, match=f"block_size must be at least 1, got {block_size}"):
            online_softmax(x, block_size)
    for block_size in (2.0, True, "3"):
        with pytest.raises(TypeError, match=r"block_size must be an int, got .*\((float|bool|str)\)"):
            online_softmax(x, block_size)
    with pytest.raises(TypeError, match=r"return_states must be a bool, got 1 \(int\)"):
        online_softmax(x, return_states=1)


# ---- the kernel


WHY_NOT = extension.problem(torch.device("cuda")) if torch.cuda.is_available() else "there is no CUDA device"
CUDA = torch.device("cuda")
HALF_AND_SINGLE = (torch.bfloat16, torch.float16, torch.float32)
by_kernel_dtype = pytest.mark.parametrize("dtype", HALF_AND_SINGLE, ids=dtype_id)


def kernel_test(test):
    return pytest.mark.cuda(pytest.mark.skipif(WHY_NOT is not None, reason=f"the kernels do not run: {WHY_NOT}")(test))


# Around a 16-byte word, a chunk of 8 words for each lane of half a warp, of a warp and of 1024 lanes, beyond which a row is
# read in several chunks.
WIDTHS = (1, 2, 3, 4, 7, 8, 9, 31, 33, 127, 128, 129, 511, 513, 1023, 1024, 1025, 4095, 4096, 4097, 32767, 32768, 32769, 65535,
          65536, 65537, 131073, 2**20)  # fmt: skip


def misaligned(rows, width, dtype, first, gap):
    """Returns (rows, width) that starts at element `first` of its own buffer, with `gap` elements between rows."""
    buffer = torch.randn(first + rows * (width + gap), device=CUDA).to(dtype)
    return buffer[first:].view(rows, width + gap)[:, :width]


def run_kernel(x, algorithm):
    """Runs the kernel on poisoned memory and checks that it leaves its argument unchanged."""
    before = x.clone()
    poison_free_memory(CUDA)
    y = torch.ops.fastmax.softmax(x, algorithm)
    torch.testing.assert_close(x, before, rtol=0, atol=0, equal_nan=True)
    return y


@kernel_test
@by_algorithm
@by_kernel_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel_widths(width, dtype, algorithm):
    """Results agree with float64 and repeat bit by bit, for few rows and, if these are short, for as many as fill the
    device."""
    for rows in (1, 3) if width > 4097 else (1, 5, 3001):
        x = torch.randn(rows, width, device=CUDA).to(dtype)
        y = run_kernel(x, algorithm)
        check(y, x)
        assert y.is_contiguous() and torch.equal(y, run_kernel(x, algorithm))


@kernel_test
@by_algorithm
@by_kernel_dtype
@pytest.mark.parametrize("width", [1, 5, 8, 31, 64, 1000, 1023, 32769, 70001])
def test_kernel_alignments(width, dtype, algorithm):
    """Rows of the input and of the output begin anywhere within 16 bytes, alike or not."""
    for first in (0, 1, 3, 8):
        for gap in (0, 1, 5, 8):
            x = misaligned(4, width, dtype, first, gap)
            check(run_kernel(x, algorithm), x)


@kernel_test
@by_algorithm
@by_kernel_dtype
def test_kernel_strides(dtype, algorithm):
    x = torch.randn(6, 10, 40, device=CUDA).to(dtype)
    views = (x.transpose(0, 1), x.transpose(1, 2), x[::2], x[:, ::3], x[:, 3:4, 5:], x[..., ::2], x[:1].expand(7, -1, -1),
             x[:, :, :1], x[:, :, 7], x[3, 4], x[:0], x[:, :, :0], x.unsqueeze(1).transpose(0, 2))  # fmt: skip
    for view in views:
        y = run_kernel(view, algorithm)
        check(y, view)
        assert y.is_contiguous() and y.shape == view.shape


@kernel_test
@by_algorithm
@by_kernel_dtype
@pytest.mark.parametrize("width", [20, 1024, 5000, 40000, 70000])
def test_kernel_on_extreme_rows(width, dtype, algorithm):
    """Whole lanes, warps and chunks hold only -inf, and infinity and NaN are in the first, a middle and the last one."""
    x = torch.randn(16, width, device=CUDA)
    x[0] *= 1e4
    x[1] -= 1e4
    x[2, : width // 2] = -INF
    x[3, width // 2 :] = -INF
    x[4, :-1] = -INF
    x[5, 1:] = -INF
    x[6] = -INF
    for row, column in ((7, 0), (8, width // 2), (9, width - 1)):
        x[row, column] = INF
        x[row + 3, column] = math.nan
    x[13] = 3.0
    x[14, ::2] = -INF
    x = x.to(dtype)
    expected = torch.softmax(x.double(), -1)
    nan = expected.isnan().any(-1)
    assert nan[6:13].all() and not nan[1:6].any() and not nan[13:].any()  # row 0 may overflow in float16
    y = run_kernel(x, algorithm)
    assert torch.equal(y.isnan(), expected.isnan())
    check(y[~nan], x[~nan])


@kernel_test
@by_algorithm
def test_many_rows(algorithm):
    """There are more rows than a 16-bit grid dimension holds, and more elements than a 32-bit index."""
    x = torch.randn(100_003, 3, device=CUDA)
    check(run_kernel(x, algorithm), x)
    if torch.cuda.get_device_properties(CUDA).total_memory < 2**34:
        pytest.skip("needs 16 GB of device memory")
    x = torch.zeros(2**16 + 1, 2**15, device=CUDA, dtype=torch.bfloat16)
    x[-1] = torch.randn(2**15, device=CUDA)
    y = torch.ops.fastmax.softmax(x, algorithm)
    check(y[-2:], x[-2:])


@kernel_test
@pytest.mark.parametrize("function", [safe_softmax, online_softmax])
def test_which_calls_run_the_kernel(function, monkeypatch):
    """The kernel computes half types and float32, with and without gradients. It does not compute float64, forward mode,
    torch.func, blocks or states."""
    seen = []
    right = row_softmax.forward
    monkeypatch.setattr(row_softmax, "forward", lambda *args: seen.append("operator") or right(*args))
    for name in ("safe", "online"):
        implementation = getattr(eager.row_softmax, name)
        monkeypatch.setattr(eager.row_softmax, name, lambda *args, f=implementation: seen.append("operations") or f(*args))
    for dtype in HALF_AND_SINGLE:
        x = torch.randn(3, 50, device=CUDA, dtype=dtype, requires_grad=True)
        function(x).sum().backward()
        function(x.detach())
    assert not seen
    function(x.double())
    assert seen == ["operator", "operations"]
    torch.func.vmap(function)(x)
    assert seen[2:] == ["operations"]
    online_softmax(x, 16)
    online_softmax(x, return_states=True)
    assert seen[3:] == ["operations"] * 2


@kernel_test
@by_algorithm
def test_kernel_on_a_side_stream_and_in_a_graph(algorithm):
    x = torch.randn(300, 5000, device=CUDA)
    expected = torch.ops.fastmax.softmax(x, algorithm)
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)  # cycles: some 50 ms
        late.copy_(x)
        y = torch.ops.fastmax.softmax(late, algorithm)
    side.synchronize()
    assert torch.equal(y, expected)
    graph = torch.cuda.CUDAGraph()
    late.zero_()
    with torch.cuda.graph(graph):
        y = torch.ops.fastmax.softmax(late, algorithm)
    late.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@torch_warns
@kernel_test
@pytest.mark.parametrize("function", [safe_softmax, online_softmax])
def test_compiled_code_runs_the_kernel(function):
    torch._dynamo.reset()
    x = torch.randn(30, 500, device=CUDA, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(function, fullgraph=True)(x), function(x))
    torch._dynamo.reset()


def test_exported():
    assert fastmax.softmax.safe_softmax is safe_softmax and "softmax" in fastmax.__all__
