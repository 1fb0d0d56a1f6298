"""`ShortConvolution`: a causal depthwise convolution over the last few tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastmax import eager
from fastmax.prepare.padding import PackedPlaces, taken


class ShortConvolution(nn.Module):
    """Causal depthwise convolution: each channel of y_i is a weighted sum of that channel of the last `width` tokens.

    `weight` (channels, 1, width) has the layout of `nn.Conv1d(channels, channels, width, groups=channels)`. It is initialised
    to the identity, y = x.
    """

    def __init__(self, channels: int, width: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def width(self) -> int:
        return self.weight.shape[-1]

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.ones_(self.weight[..., -1])

    def forward(
        self, x: Tensor, recent: Tensor | None = None, places: Tensor | None = None, count: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Applies the convolution.

        Args:
            x: (b, n, channels).
            recent: (b, width - 1, channels), the tokens before x. None: zeros.
            places: int (n,), index of each token in its packed sequence. None: x is one sequence.
            count: int (b,), number of real tokens of each row, which come first. None: all.

        Returns:
            y like x, and a copy of the last `width - 1` real tokens.
        """
        return eager.heads.convolve(x, self.weight, recent, places), self.last_tokens(x, recent, count)

    def last_tokens(self, x: Tensor, recent: Tensor | None = None, count: Tensor | None = None) -> Tensor:
        """Returns a copy of the last `width - 1` real tokens, (b, width - 1, channels). The arguments are as in `forward`."""
        n, before = x.shape[1], self.width - 1
        if count is None and n >= before:
            return x.narrow(1, n - before, before).clone(memory_format=torch.contiguous_format)
        if recent is None:
            recent = x.new_zeros(x.shape[0], before, x.shape[2])
        tokens = torch.cat([recent, x], dim=1)
        if count is not None:
            return taken(tokens, count, before, 1)
        return tokens.narrow(1, n, before).clone(memory_format=torch.contiguous_format)

    def continue_packed(self, x: Tensor, recent: Tensor, packed: PackedPlaces) -> tuple[Tensor, Tensor]:
        """Applies the convolution to packed sequences that continue earlier ones.

        Args:
            x: (1, n, channels), n >= 1.
            recent: (s, width - 1, channels), the tokens before each sequence.
            packed: the s sequences of x.

        Returns:
            y like x, and the last `width - 1` tokens of each sequence.
        """
        n, before = x.shape[1], self.width - 1
        tokens, weight = nn.functional.pad(x, (0, 0, before, 0)), self.weight[:, 0].to(x.dtype)
        y = x * weight[:, before]
        for t in range(1, self.width):
            place = packed.place - t
            earlier = recent[packed.sequence, (place + before).clamp(0, before - 1)]
            earlier = torch.where((place >= 0).unsqueeze(-1), tokens.narrow(1, before - t, n), earlier)
            y = torch.addcmul(y, earlier, weight[:, before - t])
        place = packed.count.unsqueeze(-1) + torch.arange(-before, 0, device=x.device)  # (s, width - 1)
        new = x[0, (packed.begin.unsqueeze(-1) + place).clamp(0, n - 1)]
        old = recent.gather(1, (place + before).clamp(0, before - 1).unsqueeze(-1).expand_as(recent))
        return y, torch.where((place >= 0).unsqueeze(-1), new, old)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, width={self.width}"
