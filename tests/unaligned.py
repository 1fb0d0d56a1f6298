"""`pytest --unaligned` lets tensors of the tests start anywhere in a vector, and makes the rounding of products depend on
addresses. BLAS libraries may choose a kernel, and with it an order of summation, by address. With this option every CPU shows
it: a test fails if it expects the same bits of equal numbers at other addresses. Calls repeated on the same tensors give the
same bits."""

import functools
import random
import sys
import warnings
import zlib

import common
import torch

FACTORIES = ("empty", "full", "ones", "rand", "rand_like", "randn", "randn_like", "tensor", "zeros", "zeros_like")
PRODUCTS = [f"{name}{overload}" for name in ("addmm", "addmv", "baddbmm") for overload in ("", "_", ".out")]
PRODUCTS += [f"{name}{overload}" for name in ("bmm", "mm", "mv") for overload in ("", ".out")]

_empty, _offsets, _library = torch.empty, random.Random(0), torch.library.Library("aten", "IMPL")


def moved(x: torch.Tensor) -> torch.Tensor:
    """Returns x, up to three elements behind the start of its memory."""
    offset = _offsets.randrange(4)
    if type(x) is not torch.Tensor or x.device.type != "cpu" or not (x.is_floating_point() and x.is_contiguous()):
        return x
    y = _empty(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape)
    return y.copy_(x.detach()).requires_grad_(x.requires_grad)


def _moving(function):
    @functools.wraps(function)
    def made(*args, **kwargs):
        x = function(*args, **kwargs)
        if torch.compiler.is_compiling() or "out" in kwargs:
            return x
        caller = sys._getframe(1).f_globals["__name__"]
        return moved(x) if caller.startswith(("common", "test_")) else x

    return made


def _rounding(name: str):
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys, *args, **kwargs):
        out = kernel.call_boxed(keys, *args, **kwargs)
        operands = [x for x in args if isinstance(x, torch.Tensor)][-2:]
        at = bytes(x.data_ptr() % 64 for x in operands)
        return out.mul_(1.0 + zlib.crc32(at) % 3 * torch.finfo(out.dtype).eps) if any(at) and out.is_floating_point() else out

    _library.impl(name, product, "CPU", with_keyset=True, allow_override=True)


def install() -> None:
    for name in FACTORIES:
        setattr(torch, name, _moving(getattr(torch, name)))
    common.bounded = _moving(common.bounded)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden
        for name in PRODUCTS:
            _rounding(name)
