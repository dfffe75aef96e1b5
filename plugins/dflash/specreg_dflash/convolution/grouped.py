"""Causal convolutions over the rows of a block, with kernels that depend on the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specreg_dflash.convolution.config import ConvolutionConfig

__all__ = ["GroupedConvolution"]


class GroupedConvolution(nn.Module):
    """Two convolutions, one before a sublayer and one behind it, whose kernels share one input.

    The kernel of a row is a learnt one plus a projection of that row's normalised input, which
    `group_size` neighbouring channels have in common.

    Args:
        hidden_size: channels.
        config: taps and groups.
    """

    def __init__(self, hidden_size: int, config: ConvolutionConfig) -> None:
        super().__init__()
        taps, self.group_size = config
        num_groups = hidden_size // self.group_size
        base = torch.empty(2, taps, hidden_size, device="meta")
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(
            hidden_size, 2 * taps * num_groups, bias=False, device="meta"
        )

    def kernels(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Kernels before and behind the sublayer, from its normalised input.

        Args:
            normed: `[num_rows, hidden_size]`.

        Returns:
            Two fp32 `[num_rows, taps, hidden_size]`.
        """
        num_sides, taps, _ = self.base_kernel.shape
        base = self.base_kernel.float().view(num_sides, taps, -1, self.group_size)
        change = self.kernel_projection(normed).view(-1, *base.shape[:-1], 1)
        before, behind = (base + change.float()).flatten(-2).unbind(1)
        return before, behind

    @staticmethod
    def convolve(x: Tensor, kernel: Tensor, num_rows: int) -> Tensor:
        """Each row is the sum of itself and the rows before it in its block, weighted by the taps.

        Sums are fp32.

        Args:
            x: `[num_blocks * num_rows, hidden_size]`.
            kernel: fp32 `[num_blocks * num_rows, taps, hidden_size]`.
            num_rows: of a block; nothing of another block is read.

        Returns:
            Like `x`.
        """
        wide = x.float().view(-1, num_rows, x.shape[1])
        kernel = kernel.view(-1, num_rows, *kernel.shape[1:])
        convolved: Tensor = kernel[:, :, 0] * wide
        for tap in range(1, min(kernel.shape[2], num_rows)):
            convolved[:, tap:] += kernel[:, tap:, tap] * wide[:, :-tap]
        return convolved.flatten(0, 1).to(x.dtype)
