"""`python -m fastmax.info`: versions, devices, and which implementation of the operator runs on each."""

from __future__ import annotations

import platform

import torch

import fastmax
from fastmax import validation


def has_kernels(device_type: str) -> bool:
    """Whether a compiled library has registered the operator for "cuda" or "cpu" beside the PyTorch implementation."""
    key = {"cuda": "CUDA", "cpu": "CPU"}[device_type]
    return all(torch._C._dispatch_has_kernel_for_dispatch_key(f"fastmax::{name}", key) for name in ("forward", "backward"))


def implementation(device_type: str) -> str:
    """One sentence: what computes `use_custom_gradient=True` on such a device."""
    if has_kernels(device_type):
        return f"On {device_type} fastmax runs its compiled kernels."
    return (
        f"On {device_type} fastmax runs its PyTorch implementation (tiled matrix products with an analytic backward): "
        f"no compiled {device_type} kernels are loaded."
    )


def report() -> list[tuple[str, str]]:
    """(name, value) pairs."""
    rows = [
        ("fastmax", fastmax.__version__),
        ("Python", f"{platform.python_version()} ({platform.system()} {platform.machine()})"),
        ("PyTorch", torch.__version__),
        ("CUDA of PyTorch", torch.version.cuda or "none (built without)"),
        ("CPU threads", str(torch.get_num_threads())),
    ]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{device.name}, sm_{device.major}{device.minor}, {device.total_memory / 2**30:.0f} GiB"))
    if torch.cuda.device_count() == 0:
        rows.append(("CUDA devices", "none"))
    for device_type in ("cpu", "cuda"):
        rows.append((f"compiled for {device_type}", "yes" if has_kernels(device_type) else "no"))
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in validation.DTYPES)
    rows.append(("supported", f"{dtypes}; any head_dim; p = 1 and 2"))
    return rows


def main():
    rows = report()
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:<{width}}{value}")
    for device_type in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        print(implementation(device_type))


if __name__ == "__main__":
    main()
