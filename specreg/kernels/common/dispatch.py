"""Which implementation of an op a device gets."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch

__all__ = ["uses_triton"]


def uses_triton(device: torch.device) -> bool:
    """Whether ops on `device` run as Triton kernels: not on the CPU, nor without Triton."""
    return device.type != "cpu" and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
