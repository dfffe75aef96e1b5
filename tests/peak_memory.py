"""How much memory operations on the CPU hold at once."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

__all__ = ["Peak"]


class Peak(TorchDispatchMode):
    """The most bytes of CPU storage that operations have held at once.

    Args:
        others: tensors that are somebody else's.

    Attributes:
        num_bytes: the peak.
    """

    def __init__(self, *others: Tensor) -> None:
        super().__init__()
        self._seen: dict[int, Any] = {}
        self.num_bytes = self._live = 0
        for tensor in others:
            self._note(tensor.untyped_storage())
        self.num_bytes = self._live = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for value in tree_iter((args, kwargs, result)):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return

        def free(_reference: Any) -> None:
            self._live -= size
            del self._seen[key]

        self._seen[key] = weakref.ref(storage, free)
        self._live += size
        self.num_bytes = max(self.num_bytes, self._live)
