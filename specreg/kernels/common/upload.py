"""Host tensors to a device without waiting for it."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["upload"]


def upload(host: Tensor, device: torch.device) -> Tensor:
    """`host` on the device, without host synchronisation; itself where it is there already."""
    if device.type == "cuda" and host.device.type == "cpu":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
