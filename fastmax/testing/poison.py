"""Poison for free GPU memory: NaN in place of what it holds, so that a result that is not written shows."""

from __future__ import annotations

import torch


def poison_free_memory(device: torch.device | str) -> None:
    """Fills all free blocks of torch's CUDA allocator for the current stream with bytes that are NaN in every float dtype.

    torch's `fill_uninitialized_memory` fills tensors that PyTorch creates. This function fills the memory itself, whichever
    code allocates it next. A request of exactly the size of a block makes the allocator return that block.
    """
    device = torch.device(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    stream = torch.cuda.current_stream(index).cuda_stream
    small = 2**20  # larger requests come from segments of their own
    blocks = []
    for segment in torch.cuda.memory_snapshot():
        if segment["device"] != index or segment["stream"] != stream or tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            if segment["segment_type"] == "large":
                blocks.append(block["size"])
            else:
                blocks += [small] * (block["size"] // small) + [block["size"] % small]
    # Largest first: otherwise the allocator could split a larger block for a smaller request.
    held = [torch.empty(size, dtype=torch.uint8, device=device).fill_(255) for size in sorted(blocks, reverse=True) if size > 0]
    del held
