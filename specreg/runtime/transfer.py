"""Numbers between host and device, many tensors in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specreg.kernels.common.upload import upload

__all__ = ["to_device", "to_host"]

# A tensor of int64 begins at a multiple of 16 bytes, which kernels are specialised for.
ALIGNMENT = 2


def to_device(values: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Each list as an int64 tensor on the device: one copy for all, no host synchronisation."""
    flat: list[int] = []
    starts = []
    for numbers in values:
        starts.append(len(flat))
        flat += numbers
        flat += [0] * (-len(flat) % ALIGNMENT)
    packed = upload(torch.tensor(flat, dtype=torch.int64), device)
    return [
        packed[start : start + len(numbers)] for start, numbers in zip(starts, values, strict=True)
    ]


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """int64 tensors of any shapes on the host: one copy for all, one host synchronisation."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
