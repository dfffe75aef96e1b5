"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["RMSNorm"]


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` over the last dimension, with the root mean square in fp32.

    Args:
        size: of the last dimension.
        eps: added to the mean square.
        is_zero_centred: the scale is `1 + weight`, multiplied in fp32 (Qwen3-Next, Step).
    """

    weight: Tensor

    def __init__(self, size: int, eps: float, *, is_zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        self.eps, self.is_zero_centred = eps, is_zero_centred

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x [..., size]`; same shape and dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.is_zero_centred:
            return (wide * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * wide.to(x.dtype)
