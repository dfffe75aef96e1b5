"""One lab at a time, and rank processes for all of them."""

from __future__ import annotations

from collections.abc import Callable

from specreg.testing.lab import Lab
from specreg.testing.rank_pool import RankPool
from specreg.testing.subject import Subject

__all__ = ["LabStore"]

MAX_RANKS = 8


class LabStore:
    """Keeps the lab that is in use; asking for another one closes it."""

    def __init__(self) -> None:
        self._pool = RankPool(MAX_RANKS)
        self._owner: object = None
        self._lab: Lab | None = None

    def lab(self, owner: object, subject: Callable[[], Subject], tps: tuple[int, ...]) -> Lab:
        """The lab of an owner, made when its subject is first needed."""
        if self._lab is None or self._owner != owner:
            self._close_lab()
            self._lab, self._owner = Lab(subject(), tps, self._pool), owner
        return self._lab

    def close(self) -> None:
        """End engines and processes. Safe to call twice."""
        self._close_lab()
        self._pool.close()

    def _close_lab(self) -> None:
        if self._lab is not None:
            self._lab.close()
        self._lab = self._owner = None
