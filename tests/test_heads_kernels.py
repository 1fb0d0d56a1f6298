"""The CUDA kernels of `split_heads` and `join_heads` against float64, on poisoned memory, and that of `rotary_factors` against
PyTorch operations. A lane has 8 columns of a head, and
4 in most backwards. A warp walks along a strip of 8 to 256 tokens, or of the whole sequence if that is shorter, and takes 1, 2
or 4 at once. Strips overlap by the width of the convolution. Widths above 4 have a backward kernel of their own; widths 2 and
3, packed sequences, and rotated channels whose halves are not multiples of 8 share general kernels."""

import os
import subprocess
import sys

import pytest
import torch
from common import assert_replayed, capture, relative
from test_heads import (
    JOIN,
    JOIN_GRADIENT,
    POSITIONS,
    ROTARY,
    SPLIT,
    SPLIT_GRADIENT,
    gradients_like,
    join_arguments,
    join_by_definition,
    layer_of,
    outputs_and_gradients,
    split_arguments,
    split_by_definition,
)
from test_kernels import DEVICE, WHY_NOT, on_a_late_stream

from fastmax.ops import extension
from fastmax.ops.registration import OPERATORS
from fastmax.testing.poison import poison_free_memory

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"the CUDA kernels do not run: {WHY_NOT}"),
]

LIMITS = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
by_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=lambda dtype: str(dtype)[6:])
NAMES = {SPLIT: "split_heads", JOIN: "join_heads"}
GRADIENTS_OF = {SPLIT: SPLIT_GRADIENT, JOIN: JOIN_GRADIENT}
DEFINITIONS = {SPLIT: split_by_definition, JOIN: join_by_definition}


def in_float64(given):
    return {name: x.double() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in given.items()}


def check(operator, given, expect_kernel=True):
    """Checks forward and backward against float64, and that a second call gives the same bits."""
    arguments = tuple(given.values())
    assert OPERATORS[NAMES[operator]].kernel.covers(arguments) == expect_kernel
    dtype = next(iter(given.values())).dtype
    exact_outputs = DEFINITIONS[operator](*in_float64(given).values())
    grads = [x.to(dtype) for x in gradients_like(exact_outputs)]
    exact, of_exact = outputs_and_gradients(DEFINITIONS[operator], in_float64(given), [x.double() for x in grads])
    runs = []
    for _ in range(2):
        poison_free_memory(DEVICE)
        outputs = operator(*arguments)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        poison_free_memory(DEVICE)
        gradients = GRADIENTS_OF[operator](*grads, *arguments)
        runs.append((*outputs, *gradients))
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)
    # All differentiable tensors come first, in the order of the gradients; a tensor that is not given has no elements.
    names = list(given)[: len(gradients)]
    for name, x in zip(names, gradients, strict=True):
        assert x.shape == ((0,) if given[name] is None else given[name].shape)
        assert given[name] is None or x.dtype == given[name].dtype
    of_given = [x for name, x in zip(names, gradients, strict=True) if given[name] is not None]
    for name, x, y in zip((*exact_names(exact), *of_exact), (*outputs, *of_given), (*exact, *of_exact.values()), strict=True):
        assert (x.double() - y).norm() <= 1.5 * LIMITS[dtype] * y.norm(), name  # written so that a NaN fails


def exact_names(outputs):
    return [f"output {i}" for i in range(len(outputs))]


def split(**options):
    return split_arguments(**{"d": 64, "dv": 64, "rotated": 32, "n": 37} | options, device=DEVICE)


def join(**options):
    return join_arguments(**{"dv": 64, "n": 37} | options, device=DEVICE)


@by_dtype
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("d", [64, 128, 136])
def test_widths(d, width, dtype):
    check(SPLIT, split(width=width, d=d, dv=d, dtype=dtype))
    check(SPLIT, split(width=width, d=d, dv=64, recent=False, packed=width > 1, dtype=dtype))


@by_dtype
@pytest.mark.parametrize("d", [8, 16, 24, 32, 40, 96, 160, 200, 256])
def test_head_dims(d, dtype):
    for rotated in (d, d // 4 * 2, 2, 0):
        check(SPLIT, split(d=d, dv=72, h=6, hk=3, rotated=rotated, dtype=dtype))
    check(SPLIT, split(d=64, dv=d, h=6, hk=3, rotated=10, dtype=dtype))
    check(JOIN, join(dv=d, h=3, dtype=dtype))


@by_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 255, 256, 257, 258, 1023])
def test_numbers_of_tokens(n, dtype):
    check(SPLIT, split(n=n, dtype=dtype))
    check(SPLIT, split(n=n, packed=True, per_row=True, width=3, dtype=dtype))
    check(JOIN, join(n=n, dtype=dtype))


@pytest.mark.parametrize("b, n, h", [(1, 70001, 1), (300, 5, 1), (64, 700, 8), (3, 5000, 4)])
def test_more_strips_than_the_device_holds(b, n, h):
    check(SPLIT, split(b=b, n=n, h=h, hk=1, d=32, dv=32, rotated=16, dtype=torch.bfloat16))
    check(JOIN, join(b=b, n=n, h=h, dv=32, dtype=torch.bfloat16))


@by_dtype
@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["same", "float32"])
def test_parts_that_are_left_out(dtype, weight_dtype):
    made = {"dtype": dtype, "weight_dtype": weight_dtype}
    for norms in ((True, True), (True, False), (False, True), (False, False)):
        for rotated in (0, 32):
            for width in (1, 4, 6):
                check(SPLIT, split(norms=norms, rotated=rotated, width=width, **made))
    for norm in (True, False):
        for gate in (True, False):
            check(JOIN, join(norm=norm, gate=gate, **made))


@pytest.mark.parametrize("b, n", [(2, 0), (0, 5), (0, 0)])
def test_nothing_to_do(b, n):
    """The gradients of weights are zeros."""
    for dtype in LIMITS:
        check(SPLIT, split(b=b, n=n, dtype=dtype))
        check(JOIN, join(b=b, n=n, dtype=dtype))


def moved(x):
    """Returns x at an address that is not a multiple of 16 bytes."""
    y = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return y.copy_(x)


LAYOUTS = {
    "unaligned": moved,
    "of wider tokens": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "of tokens that are unaligned": lambda x: torch.cat([x, x[..., :1]], -1)[..., :-1],
    "every second column": lambda x: torch.stack([x, x], -1)[..., 0],
    "columns first": lambda x: x.permute(-1, *range(x.dim() - 1)).contiguous().permute(*range(1, x.dim()), 0),
    "batch expanded": lambda x: x[:1].expand_as(x),
    "every second token": lambda x: torch.stack([x, x], 2).flatten(1, 2)[:, ::2],
}


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout, dtype):
    given = split(dtype=dtype, b=3)
    check(SPLIT, given | {name: layout(given[name]) for name in ("qkv", "recent")})
    check(SPLIT, given | {name: moved(given[name]) for name in ("conv_weight", "q_weight", "cos")})
    given = join(dtype=dtype, b=3)
    for o in (given["o"], given["o"].contiguous()):
        check(JOIN, given | {"o": layout(o), "gate": layout(given["gate"])})


@by_dtype
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_in_any_layout(layout, dtype):
    for operator, given in ((SPLIT, split(dtype=dtype, b=3)), (JOIN, join(dtype=dtype, b=3))):
        grads = [layout(x) for x in gradients_like(operator(*given.values()))]
        expected = GRADIENTS_OF[operator](*(x.contiguous() for x in grads), *given.values())
        assert all(map(torch.equal, GRADIENTS_OF[operator](*grads, *given.values()), expected))
    grads = gradients_like(SPLIT(*split(dtype=dtype).values()))
    given = split(dtype=dtype)
    head_major = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in grads]
    assert all(map(torch.equal, *(SPLIT_GRADIENT(*x, *given.values()) for x in (grads, head_major))))


def test_absent_gradients_are_zeros():
    given = split(dtype=torch.bfloat16)
    grads = gradients_like(SPLIT(*given.values()))
    for i in range(3):
        alone = [x if i == j else None for j, x in enumerate(grads)]
        zeros = [x if i == j else torch.zeros_like(x) for j, x in enumerate(grads)]
        assert all(map(torch.equal, SPLIT_GRADIENT(*alone, *given.values()), SPLIT_GRADIENT(*zeros, *given.values())))


@by_dtype
@pytest.mark.parametrize("width", [4, 6])
def test_a_split_sequence_gives_the_same_bits(width, dtype):
    given = split(n=300, width=width, packed=True, dtype=dtype)
    whole = SPLIT(*given.values())
    tokens = torch.cat([given["recent"], given["qkv"]], 1)
    for begin, end in ((0, 1), (1, 130), (130, 132), (132, 300)):
        part = {"qkv": tokens[:, begin + width - 1 : end + width - 1], "recent": tokens[:, begin : begin + width - 1]}
        part |= {name: given[name][begin:end] for name in ("cos", "sin", "places")}
        for x, y in zip(SPLIT(*(given | part).values()), whole, strict=True):
            assert torch.equal(x, y[:, begin:end])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_packed_sequences_do_not_reach_each_other(value):
    given = split(b=1, n=40, dtype=torch.bfloat16, packed=True, recent=False)
    starts = (given["places"] == 0).nonzero().flatten().tolist()
    begin, end = starts[2], starts[3]
    given["qkv"][:, begin:end] = value
    others = torch.ones(40, dtype=torch.bool, device=DEVICE)
    others[begin:end] = False
    outputs = SPLIT(*given.values())
    of_qkv, *_ = SPLIT_GRADIENT(*map(torch.ones_like, outputs), *given.values())
    for x in (*outputs, of_qkv):
        assert x[:, others].isfinite().all() and not x[:, begin:end].isfinite().all()


def test_offsets_beyond_32_bits():
    """The last tokens of 2^31 channels are those of a call on them alone."""
    if torch.cuda.get_device_properties(DEVICE).total_memory < 2**35:
        pytest.skip("needs 32 GiB of memory")
    given = split(n=64, h=2, hk=3, b=1, recent=False, rotated=0, dtype=torch.bfloat16)
    end = given["qkv"]
    before = 2**31 // end.shape[-1]
    whole = given | {"qkv": torch.nn.functional.pad(end, (0, 0, before, 0))}
    outputs, alone = SPLIT(*whole.values()), SPLIT(*given.values())
    assert all(torch.equal(x[:, before:], y) for x, y in zip(outputs, alone, strict=True))
    grads = gradients_like(alone)
    del outputs
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, before, 0)) for x in grads]
    of_whole, *_ = SPLIT_GRADIENT(*padded, *whole.values())
    of_end, *_ = SPLIT_GRADIENT(*grads, *given.values())
    assert torch.equal(of_whole[:, before:], of_end) and (of_whole[:, : before - 3] == 0).all()


@by_dtype
def test_autograd_and_no_autograd(dtype):
    """The recorded operator runs the same kernels."""
    for operator, given in ((SPLIT, split(dtype=dtype)), (JOIN, join(dtype=dtype))):
        expected = operator(*given.values())
        grads = gradients_like(expected)
        outputs, of_inputs = outputs_and_gradients(operator, given, grads)
        assert all(map(torch.equal, outputs, expected if isinstance(expected, tuple) else (expected,)))
        gradients = [x for x in GRADIENTS_OF[operator](*grads, *given.values()) if x.shape != (0,)]
        assert all(map(torch.equal, of_inputs.values(), gradients))


def test_refused_by_the_kernels():
    """Direct calls that no kernel computes raise an error; calls of the operator go to PyTorch operations."""
    for operator, given, message in (
        (SPLIT, split(d=12, rotated=4, dtype=torch.float32), "head_dim must be a multiple of 8 up to 256, got 12"),
        (SPLIT, split(d=264, dtype=torch.float32), "head_dim must be a multiple of 8 up to 256, got 264"),
        (SPLIT, split(dv=12, dtype=torch.float32), "value_dim must be a multiple of 8 up to 256, got 12"),
        (SPLIT, split(width=9, dtype=torch.float32), "conv_weight must have a width up to 8, got 9"),
        (SPLIT, split(dtype=torch.float64), "qkv must be bfloat16, float16 or float32"),
        (JOIN, join(dv=12, dtype=torch.float32), "value_dim must be a multiple of 8 up to 256, got 12"),
        (JOIN, join(dtype=torch.float64), "o must be bfloat16, float16 or float32"),
    ):
        if next(iter(given.values())).dtype == torch.float32:
            check(operator, given, expect_kernel=False)
        with pytest.raises(RuntimeError, match=message):
            OPERATORS[NAMES[operator]].kernel(tuple(given.values()))


@pytest.mark.parametrize("operator", [SPLIT, JOIN], ids=NAMES.values())
def test_a_tensor_on_the_cpu_is_named(operator):
    given = split(dtype=torch.float32, packed=True) if operator is SPLIT else join(dtype=torch.float32)
    for name in list(given)[1:]:
        if torch.is_tensor(given[name]):
            with pytest.raises(RuntimeError, match=f"{name} is on cpu"):
                operator(*(given | {name: given[name].cpu()}).values())


# ---- rotary_factors


def check_rotary(positions, half=16, base=1e4):
    """A result differs from that of PyTorch operations by at most one unit in the last place."""
    operator, arguments = OPERATORS["rotary_factors"], (positions, half, base, False)
    assert operator.kernel.covers(arguments)
    poison_free_memory(DEVICE)
    results = operator.kernel(arguments)
    for x, y in zip(results, operator.implementation(*arguments), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype and x.is_contiguous()
        infinity = torch.full_like(y, torch.inf)
        assert ((y.nextafter(-infinity) <= x) & (x <= y.nextafter(infinity))).all()
    return results


@pytest.mark.parametrize("positions", POSITIONS.values(), ids=POSITIONS)
def test_rotary_factors(positions):
    for dtype in (torch.int32, torch.int64):
        for half, base in ((1, 1.0), (5, 5e5), (16, 1e4), (32, 1e4), (128, 100.0)):
            check_rotary(positions.to(DEVICE).to(dtype), half, base)


@pytest.mark.parametrize("n", [31, 32, 33, 70001])
def test_rotary_factors_of_many_tokens(n):
    whole = check_rotary(torch.arange(n, device=DEVICE), half=32)
    part = check_rotary(torch.arange(n, device=DEVICE)[7:], half=32)
    assert all(torch.equal(x[7:], y) for x, y in zip(whole, part, strict=True))


def test_rotary_factors_of_the_largest_positions():
    for first in (10**6, 2**31 - 2000, -(2**31)):
        check_rotary(torch.arange(first, first + 2000, device=DEVICE))


def test_rotary_factors_refused_by_the_kernel():
    positions = torch.arange(5, device=DEVICE)
    for arguments, message in (
        ((positions, 129, 1e4, False), "half must be up to 128, got 129"),
        ((positions, 16, 1e4, True), "wide must be False"),
    ):
        kernel = OPERATORS["rotary_factors"].kernel
        assert not kernel.covers(arguments)
        ROTARY(*arguments)
        with pytest.raises(RuntimeError, match=message):
            kernel(arguments)


def test_rotary_factors_on_a_side_stream_and_in_a_graph():
    positions, later = (torch.arange(n, n + 500, device=DEVICE) for n in (0, 10**5))

    def factors(positions):
        return ROTARY(positions, 16, 1e4, False)

    assert all(map(torch.equal, on_a_late_stream([later], factors), factors(later)))
    graph, captured = capture(lambda: factors(positions))
    positions.copy_(later)
    assert_replayed(graph, captured, factors(later))


# ---- the layer


LAYERS = {
    "default": {},
    "grouped": {"num_kv_heads": 2, "value_dim": 24, "head_dim": 32},
    "wide convolution": {"conv": 6},
    "no convolution": {"conv": 0, "output_gate": False},
    "softmax": {"attention": "softmax"},
}


def trained(layer, x, **options):
    x = x.detach().requires_grad_()
    y = layer(x, **options)
    return y.detach(), *torch.autograd.grad(y.float().sin().sum(), [x, *layer.parameters()])


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
def test_the_layer_trains_as_with_pytorch_operations(options, packed, monkeypatch):
    """In float32, and in bfloat16 against float64."""
    given = {"cu_seqlens": torch.tensor([0, 3, 3, 150, 333], dtype=torch.int32, device=DEVICE)} if packed else {}
    layer, x = layer_of(**options).to(DEVICE), torch.randn(1, 333, 64, device=DEVICE)
    names = ["y", "x", *dict(layer.named_parameters())]
    actual = trained(layer, x, **given)
    layer.use_custom_gradient = False
    for name, y, exact in zip(names, actual, trained(layer, x, **given), strict=True):
        assert relative(y, exact.double()) < 2e-4, name
    layer.use_custom_gradient = True
    layer.bfloat16()
    actual = trained(layer, x.bfloat16(), **given)
    layer.double()
    for name, y, exact in zip(names, actual, trained(layer, x.bfloat16().double(), **given), strict=True):
        assert relative(y, exact) < 4e-2, name


def test_the_kernels_run_in_the_layer(monkeypatch):
    """Neither an eager nor a compiled layer computes with PyTorch operations what the kernels have."""

    def refuse(*arguments, **options):
        raise AssertionError

    for name in ("split_heads", "join_heads", "rotary_factors"):
        monkeypatch.setattr(f"fastmax.eager.heads.{name}", refuse)
    layer, x = layer_of().to(DEVICE), torch.randn(2, 333, 64, device=DEVICE)
    assert extension.expects_kernels(x)
    with torch.autocast("cuda", torch.bfloat16):
        trained(layer, x)
    with torch.no_grad():
        _, state = layer(x, layer.init_state(2))
        layer.step_(x[:, :1], state)
    expected = trained(layer, x)
    compiled = torch.compile(layer, fullgraph=True)
    for y, exact in zip(trained_compiled(compiled, layer, x), expected, strict=True):
        assert relative(y, exact.double()) < 1e-4


def trained_compiled(compiled, layer, x):
    x = x.detach().requires_grad_()
    y = compiled(x)
    return y.detach(), *torch.autograd.grad(y.float().sin().sum(), [x, *layer.parameters()])


def test_generation():
    layer, x = layer_of().to(DEVICE), torch.randn(3, 40, 64, device=DEVICE)
    with torch.no_grad():
        whole = layer(x)
        state, outputs = layer.init_state(3), []
        for begin, end in ((0, 2), (2, 30), (30, 31), (31, 39)):
            y, state = layer(x[:, begin:end], state)
            outputs.append(y)
        outputs.append(layer.step_(x[:, 39:], state))
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-4)


def test_cuda_graph():
    layer, x = layer_of().to(DEVICE), torch.randn(2, 100, 64, device=DEVICE)

    def train():
        return trained(layer, x)

    graph, captured = capture(train)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    assert_replayed(graph, captured, train())


def test_debug_prints_the_kernels():
    code = """
import torch
from fastmax import FastmaxSelfAttention
layer = FastmaxSelfAttention(128, 2, num_kv_heads=1).to("cuda", torch.bfloat16)
layer(torch.rand(1, 40, 128, device="cuda", dtype=torch.bfloat16)).sum().backward()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"FASTMAX_DEBUG": "1"}, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if "_heads" in line]
    sizes = "split_heads_sm80: b 1, n 40, heads 2 and 1, d 64 and 64, width 4, rotated 32"
    assert lines == [
        f"fastmax::split_heads: {sizes}",
        "fastmax::join_heads: join_heads_sm80: b 1, n 40, heads 2, d 64, norm, gate",
        "fastmax::join_heads_backward: join_heads_sm80: b 1, n 40, heads 2, d 64, norm, gate",
        f"fastmax::split_heads_backward: {sizes}",
    ]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_second_device():
    """The tensors are on a device that is not the current one."""
    rotary = {"positions": torch.arange(50, device=DEVICE), "half": 16, "base": 1e4, "wide": False}
    for operator, given in ((SPLIT, split(dtype=torch.bfloat16)), (JOIN, join(dtype=torch.bfloat16)), (ROTARY, rotary)):
        there = {name: x.to("cuda:1") if torch.is_tensor(x) else x for name, x in given.items()}
        expected, outputs = (operator(*arguments.values()) for arguments in (given, there))
        assert torch.cuda.current_device() == 0
        for x, y in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, outputs)), strict=True):
            assert torch.equal(x, y.to(DEVICE))


def test_the_library_registers_them():
    for name in ("split_heads", "split_heads_backward", "join_heads", "join_heads_backward", "rotary_factors"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmax_cuda::{name}", "CUDA"), name
