"""How a drafter's convolutions are shaped, read from its config."""

from __future__ import annotations

from typing import NamedTuple

from specreg.errors import CheckpointError
from specreg_dflash.config_form import ConfigForm

__all__ = ["ConvolutionConfig", "read_convolution"]


class ConvolutionConfig(NamedTuple):
    """Convolutions over the rows of a block.

    Attributes:
        kernel_size: rows that an output row reads: itself and those before it.
        group_size: neighbouring channels that share the part of the kernel which depends on the
            input.
    """

    kernel_size: int
    group_size: int


def read_convolution(
    form: ConfigForm, hidden_size: int, *, kernel_size: int = 0, group_size: int = 0
) -> ConvolutionConfig | None:
    """Read `conv_kernel_size` and `conv_group_size`; None where neither is above 0.

    Args:
        form: the config.
        hidden_size: channels.
        kernel_size, group_size: what is taken where they are absent.

    Raises:
        CheckpointError: one without the other, or groups that do not divide the hidden size.
    """
    sizes = ConvolutionConfig(
        form.section.integer("conv_kernel_size", kernel_size, minimum=0),
        form.section.integer("conv_group_size", group_size, minimum=0),
    )
    if not any(sizes):
        return None
    if 0 in sizes or hidden_size % sizes.group_size:
        raise CheckpointError(
            "the convolutions of a drafter are not described",
            where=f"{form.section.where}, conv_kernel_size and conv_group_size",
            got=f"{sizes.kernel_size} and {sizes.group_size}; allowed: both above 0, and groups "
            f"that divide the hidden size {hidden_size}",
            fix="use the config.json that belongs to the weights",
        )
    return sizes
