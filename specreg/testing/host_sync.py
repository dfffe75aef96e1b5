"""Operations that a CUDA graph cannot hold, found on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostSyncDetector"]

_Result = TypeVar("_Result")

# Outputs whose shape depends on values.
FORBIDDEN = frozenset(
    {
        "aten.nonzero.default",
        "aten.masked_select.default",
        "aten._unique2.default",
        "aten.unique_dim.default",
        "aten.unique_consecutive.default",
        "aten.repeat_interleave.Tensor",
    }
)
# Ways to read a value on the host; some of them never reach a dispatch mode.
READING = ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist")


class HostSyncDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the forbidden operations of a function, save for those of the core inside it.

    Attributes:
        is_on: off, functions run as if they were not watched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_on = False
        self._found: list[str] = []
        self._is_paused = False

    def watching(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """`function`, watched whenever it is called."""

        def watched(*args: Any, **kwargs: Any) -> _Result:
            if not self.is_on:
                return function(*args, **kwargs)
            with self, self._reading_noted():
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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._is_paused:
            name = str(func)
            if name in FORBIDDEN:
                self._found.append(str(func.overloadpacket))
            elif name == "aten.index.Tensor" and _has_mask(args):
                self._found.append("indexing with a boolean mask")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def _reading_noted(self) -> Iterator[None]:
        """Methods of tensors that read values are replaced; other ranks wait for their turn."""
        own = {name: vars(Tensor).get(name) for name in READING}
        for name in READING:
            setattr(Tensor, name, self._noting(name, getattr(Tensor, name)))
        try:
            yield
        finally:
            for name, method in own.items():
                if method is None:
                    delattr(Tensor, name)
                else:
                    setattr(Tensor, name, method)

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            if not self._is_paused:
                self._found.append(f"Tensor.{name}")
            return self.paused(lambda: method(*args, **kwargs))

        return read


def _has_mask(args: Any) -> bool:
    indices = args[1] if len(args) > 1 else ()
    return any(isinstance(i, torch.Tensor) and i.dtype is torch.bool for i in indices)
