"""Launching Triton kernels at little cost to the host."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["launch", "specialisation"]

_compiled: dict[Hashable, tuple[Any, Any]] = {}


@cache
def _has_devices() -> bool:
    return torch.cuda.is_available()


def specialisation(*arguments: Any) -> Hashable:
    """What Triton may compile a kernel differently for: dtypes, alignments, sizes and values.

    Args:
        arguments: tensors, integers, None, and tuples of these.
    """
    key: list[Hashable] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            key.append((argument.dtype, argument.data_ptr() % 16))
            if torch.version.hip is not None:  # addresses of 32 bits where they suffice
                key.append(argument.untyped_storage().nbytes() < 2**31)
        elif isinstance(argument, tuple):
            key.append(specialisation(*argument))
        else:
            key.append(argument)
    return tuple(key)


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    arguments: tuple[Any, ...],
    key: Hashable,
    num_warps: int,
    **options: int,
) -> None:
    """Launch `kernel` on the current stream.

    Triton works out how to specialise a kernel anew at each launch, which costs more than 50 us
    where its arguments are tuples. Here that happens once for each key.

    Args:
        kernel: a `triton.jit` function.
        grid: programs in each dimension.
        arguments: all of the kernel's, in order, constants too.
        key: distinguishes whatever the kernel may be specialised for; see `specialisation`.
        num_warps: warps of a program.
        options: others of a Triton launch, such as `num_stages`.
    """
    device = torch.cuda.current_device() if _has_devices() else -1
    full_key = (id(kernel), device, num_warps, *options.items(), key)
    known = _compiled.get(full_key)
    if known is not None:
        known[1][(*grid, 1, 1)[:3]](*arguments)
        return
    compiled = kernel[grid](*arguments, num_warps=num_warps, **options)
    if compiled is not None:  # the interpreter compiles nothing
        _compiled[full_key] = (kernel, compiled)  # holding the kernel keeps its id its own
