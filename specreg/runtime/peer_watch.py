"""Notices that a peer is gone while this process waits for a device."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["PeerWatch"]

POLL_SECONDS = 0.05


class PeerWatch:
    """A thread that asks whether a peer is gone, and once one is, calls `on_lost` and ends.

    A rank whose NCCL kernel waits for a dead peer waits in the driver, where nothing else of it can
    run. Over gloo nobody needs this: a dead peer's sockets close.

    Args:
        is_lost: whether a peer is gone; asked about 20 times a second.
        on_lost: frees whoever waits for it.
    """

    def __init__(self, is_lost: Callable[[], bool], on_lost: Callable[[], None]) -> None:
        self._is_lost, self._on_lost = is_lost, on_lost
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specreg peer watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for `on_lost` if that is under way. Safe to call twice."""
        self._is_closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed.wait(POLL_SECONDS):
            if self._is_lost():
                self._on_lost()
                return
