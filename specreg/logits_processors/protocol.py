"""The contract of a logits processor, and how the rows of a request are found."""

from __future__ import annotations

from collections.abc import Container, Iterator, Set
from itertools import groupby
from typing import Protocol

from torch import Tensor

__all__ = ["LogitsProcessor", "rows_of_slots"]


class LogitsProcessor(Protocol):
    """Changes target logits of the requests that ask for it. Keeps its parameters by slot."""

    @property
    def slots(self) -> Set[int]:
        """Request state indices that it works for; a host fact, and a live view."""
        ...

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        """Change `logits` in place; rows of other slots keep every bit.

        Does not synchronise with the host: what says which rows need work lies there already.

        Args:
            logits: fp32 `[num_logits, vocab_size]`, the rows of whole requests: row i of a request
                judges its draft i, and its last row judges none.
            expanded_idx_mapping: int64 `[num_logits]` on the host, request state index of each row;
                the rows of a request lie together.
            expanded_local_pos: int64 `[num_logits]` on the host, index of the row in its request:
                the number of drafts that it takes as emitted.
            draft_tokens: int64 `[num_logits]`, the draft that each row judges; -1 where none. So
                row r sees the drafts of the `expanded_local_pos[r]` rows before it.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget the slot; nothing happens when it has no parameters."""
        ...


def rows_of_slots(
    expanded_idx_mapping: Tensor, slots: Container[int]
) -> Iterator[tuple[int, slice]]:
    """Each request among `slots` and the slice of its rows, in order."""
    start = 0
    for slot, rows in groupby(expanded_idx_mapping.tolist()):
        stop = start + sum(1 for _ in rows)
        if slot in slots:
            yield slot, slice(start, stop)
        start = stop
