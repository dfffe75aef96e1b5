"""Ranks of one process that run in turn: threads, of which one at a time is awake."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specreg.errors import InternalError, RankFailedError
from specreg.runtime.tensor_parallel import TensorParallel

__all__ = ["TurnGroup", "TurnRank"]

TIMEOUT_SECONDS = 120.0


class TurnGroup:
    """`size` ranks that trade values; a rank that waits for the others lets them run.

    Attributes:
        failure: what ended the first rank that failed; the others then fail at their next exchange.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.failure: BaseException | None = None
        self._turn = threading.Condition()
        self._deposits: dict[int, tuple[str, Any]] = {}
        self._gathered: list[Any] = []
        self._generation = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn: only one rank runs inside at a time."""
        with self._turn:
            yield

    def start(self, rank: int, body: Callable[[], None]) -> threading.Thread:
        """Run a rank's work in a thread, in its turns."""

        def run() -> None:
            with self.turn():
                try:
                    body()
                except BaseException as error:
                    self.fail(error)

        thread = threading.Thread(target=run, name=f"rank {rank}", daemon=True)
        thread.start()
        return thread

    def fail(self, error: BaseException) -> None:
        """End the group; the first error is kept. The turn is held."""
        if self.failure is None:
            self.failure = error
        self._turn.notify_all()

    def exchange(self, rank: int, kind: str, value: Any) -> list[Any]:
        """Every rank's value of the same exchange, by rank. The turn is held, and lent meanwhile.

        Raises:
            RankFailedError: another rank has failed, or does not come.
            InternalError: the ranks are in different collectives.
        """
        self._check()
        self._deposits[rank] = (kind, value)
        generation = self._generation
        if len(self._deposits) == self.size:
            kinds = {deposit[0] for deposit in self._deposits.values()}
            self._gathered = [self._deposits[index][1] for index in range(self.size)]
            self._deposits = {}
            self._generation += 1
            self._turn.notify_all()
            if len(kinds) > 1:
                self.fail(_different(kinds))
            self._check()
            return self._gathered
        while self._generation == generation:
            self._check()
            if not self._turn.wait(TIMEOUT_SECONDS):
                self.fail(_absent(kind, rank))
        self._check()
        return self._gathered

    def _check(self) -> None:
        if self.failure is not None:
            raise RankFailedError(
                "another rank failed",
                where="a collective of ranks in turn",
                got=f"{type(self.failure).__name__}: {self.failure}",
                fix="mend what the error of that rank names",
            ) from self.failure


class TurnRank(TensorParallel):
    """The tensor-parallel group as one rank of a `TurnGroup` sees it."""

    def __init__(self, rank: int, group: TurnGroup) -> None:
        super().__init__()
        self.rank, self.size = rank, group.size
        self._group = group
        self.counts = Counter()

    def close(self) -> None:
        """Nothing to leave."""

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        self.counts["broadcast"] += 2 if payload else 1
        sent: bytes = self._group.exchange(self.rank, "broadcast", payload)[0]
        return sent

    def all_gather(self, local: Tensor) -> Tensor:
        return torch.stack(self._exchange("all_gather", local))

    def all_to_all_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        parts = self._exchange("all_to_all", torch.split(rows, list(send)))
        received = [part[self.rank] for part in parts]
        assert [len(part) for part in received] == list(receive)
        return torch.cat(received)

    def smallest(self, value: int) -> int:
        return int(min(self._exchange("all_reduce", value)))

    def _exchange(self, kind: str, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        self.counts[kind] += 1
        return self._group.exchange(self.rank, kind, value)


def _different(kinds: set[str]) -> InternalError:
    return InternalError(
        "the ranks are in different collectives",
        where="a collective of ranks in turn",
        got=f"{sorted(kinds)}; allowed: one kind",
        fix="a speculator calls the same collectives in the same order on every rank",
    )


def _absent(kind: str, rank: int) -> InternalError:
    return InternalError(
        "a collective was not joined by all ranks",
        where=f"{kind}, as rank {rank} waits for it",
        got=f"no answer in {TIMEOUT_SECONDS:g} s",
        fix="a speculator calls the same collectives in the same order on every rank",
    )
