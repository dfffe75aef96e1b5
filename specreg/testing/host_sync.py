"""Operations that a CUDA graph cannot hold, found on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostSyncDetector"]

_Result = TypeVar("_Result")

# Each reads values on the host, or has an output whose shape depends on values.
FORBIDDEN = frozenset(
    {
        "aten._local_scalar_dense",
        "aten.nonzero",
        "aten.masked_select",
        "aten._unique2",
        "aten.unique_dim",
        "aten.unique_consecutive",
        "aten.repeat_interleave.Tensor",
    }
)


class HostSyncDetector(TorchDispatchMode):
    """Notes the forbidden operations of a function, save for those of the core inside it.

    Attributes:
        is_on: off, functions run as if they were not watched.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False
        self._found: list[str] = []
        self._is_paused = False

    def watching(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """`function`, watched whenever it is called."""

        def watched(*args: Any, **kwargs: Any) -> _Result:
            if not self.is_on:
                return function(*args, **kwargs)
            with self:
                return function(*args, **kwargs)

        return watched

    def paused(self, function: Callable[[], _Result]) -> _Result:
        """Call `function` without watching it."""
        before, self._is_paused = self._is_paused, True
        try:
            return function()
        finally:
            self._is_paused = before

    def take(self) -> list[str]:
        """What was found since this was last called, one line an operation."""
        found, self._found = list(dict.fromkeys(self._found)), []
        return [f"draft() calls {name}: it waits for the device" for name in found]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not self._is_paused:
            name = str(func)
            if name in FORBIDDEN or name.rpartition(".")[0] in FORBIDDEN:
                self._found.append(str(func.overloadpacket))
            elif name == "aten.index.Tensor" and _has_mask(args):
                self._found.append("indexing with a boolean mask")
        return func(*args, **(kwargs or {}))


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
