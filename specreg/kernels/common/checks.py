"""Checks that entry points share. None reads a tensor's values, so none synchronises."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specreg.errors import TensorError

__all__ = ["FLOATS", "INDICES", "check_tensor"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INDICES = (torch.int32, torch.int64)


def check_tensor(
    where: str,
    tensor: Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    fix: str,
) -> None:
    """Refuse a tensor whose shape, dtype or device does not fit.

    Args:
        where: op and argument, such as `"draft_sample(logits)"`.
        tensor: the argument.
        shape: its extents; None allows any.
        dtypes: those allowed.
        device: where it must be.
        fix: what to pass instead.

    Raises:
        TensorError: naming what was got and what is allowed.
    """
    extents_of = tensor.shape
    if len(extents_of) == len(shape) and tensor.dtype in dtypes and tensor.device == device:
        for extent, allowed in zip(extents_of, shape, strict=True):
            if allowed is not None and extent != allowed:
                break
        else:
            return
    extents = ", ".join("any" if extent is None else str(extent) for extent in shape)
    names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    raise TensorError(
        "a tensor does not fit the op",
        where=where,
        got=f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}; "
        f"allowed: {names} [{extents}] on {device}",
        fix=fix,
    )
