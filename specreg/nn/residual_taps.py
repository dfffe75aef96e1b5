"""Copies of the residual stream at the points that a speculator asks for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

__all__ = ["ResidualTaps"]


class ResidualTaps:
    """Notes the input of chosen modules while a model runs; entry `e` is the input of `points[e]`.

    Args:
        points: the decoder layers, then the final norm.
    """

    def __init__(self, points: Sequence[nn.Module]) -> None:
        self._points = points
        self._handles: dict[int, RemovableHandle] = {}
        self._states: dict[int, Tensor] = {}

    def arm(self, entries: Iterable[int]) -> None:
        """Watch exactly `entries` from now on; hooks that are in place stay."""
        wanted = set(entries)
        for entry in self._handles.keys() - wanted:
            self._handles.pop(entry).remove()
        for entry in wanted - self._handles.keys():
            self._handles[entry] = self._points[entry].register_forward_pre_hook(
                partial(self._note, entry), with_kwargs=True
            )

    def take(self) -> dict[int, Tensor]:
        """What the last forward left by ascending entry, in the model's own shape and memory."""
        states, self._states = self._states, {}
        return states

    def _note(
        self, entry: int, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._states[entry] = args[0] if args else kwargs["hidden_states"]
