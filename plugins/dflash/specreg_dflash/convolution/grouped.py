"""Causal convolutions over the rows of a block, with kernels that depend on the input."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from specreg_dflash.convolution.config import ConvolutionConfig

__all__ = ["GroupedConvolution"]


class Kernel(NamedTuple):
    """The weights of a convolution; channel c of a group g has `base[:, c] + change[:, :, g]`.

    Attributes:
        base: `[taps, hidden_size]`, learnt.
        change: `[num_rows, taps, num_groups]`, projected from each row.
    """

    base: Tensor
    change: Tensor


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

    def kernels(self, normed: Tensor) -> tuple[Kernel, Kernel]:
        """Kernels before and behind the sublayer, from its normalised input.

        Args:
            normed: `[num_rows, hidden_size]`.
        """
        num_sides, taps, _ = self.base_kernel.shape
        change = self.kernel_projection(normed).view(len(normed), num_sides, taps, -1)
        before, behind = map(Kernel, self.base_kernel, change.unbind(1))
        return before, behind

    @staticmethod
    def convolve(x: Tensor, kernel: Kernel, num_rows: int) -> Tensor:
        """Each row is the sum of itself and the rows before it in its block, weighted by the taps.

        Sums are fp32.

        Args:
            x: `[num_blocks * num_rows, hidden_size]`.
            kernel: of the same rows.
            num_rows: of a block; nothing of another block is read.

        Returns:
            Like `x`.
        """
        _, taps, num_groups = kernel.change.shape
        wide = x.float().view(-1, num_rows, num_groups, x.shape[1] // num_groups)
        base = kernel.base.float().view(taps, num_groups, -1)
        change = kernel.change.float().view(-1, num_rows, taps, num_groups, 1)
        convolved = (base[0] + change[:, :, 0]) * wide
        for tap in range(1, min(taps, num_rows)):
            convolved[:, tap:] += (base[tap] + change[:, tap:, tap]) * wide[:, :-tap]
        return convolved.view_as(x).to(x.dtype)
