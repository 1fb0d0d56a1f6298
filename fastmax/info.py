"""`python -m fastmax.info` prints versions, devices, and which implementation of the operators runs on each device."""

from __future__ import annotations

import platform

import torch

import fastmax
from fastmax.core import validation
from fastmax.ops import extension


def implementation(device: torch.device) -> str:
    """Returns a sentence that says which implementation of `use_custom_gradient=True` runs on the device."""
    if device.type != "cuda":
        return f"On {device} fastmax runs its PyTorch implementation (tiled matrix products with an analytic backward)."
    reason = extension.problem(device)
    if reason is None:
        return f"On {device} fastmax runs its CUDA kernels."
    return f"On {device} fastmax runs its PyTorch implementation, not its CUDA kernels: {reason}."


def report() -> list[tuple[str, str]]:
    """Returns (name, value) pairs."""
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
    built = extension.PATH.exists()
    rows.append(
        ("CUDA extension", f"{extension.PATH}, {extension.PATH.stat().st_size / 2**20:.0f} MiB" if built else "not built")
    )
    problem = extension.problem()
    rows.append(("loaded", extension.build_info() if problem is None else f"no: {problem}"))
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in validation.DTYPES)
    rows.append(("supported", f"{dtypes}; any head_dim; p = 1 and 2"))
    return rows


def main() -> None:
    rows = report()
    width = max(len(name) for name, _ in rows) + 2
    for name, value in rows:
        print(f"{name:<{width}}{value}")
    devices = [torch.device("cpu")] + [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for device in devices:
        print(implementation(device))


if __name__ == "__main__":
    main()
