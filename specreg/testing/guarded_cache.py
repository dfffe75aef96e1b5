"""A draft-logits cache in memory that shows every byte written outside the rows allowed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsCache

__all__ = ["GuardedCache"]

GUARD_ROWS = 3
GUARD_BYTE = 0xA5


class GuardedCache:
    """Moves a cache into a larger buffer: guard rows around it, NaN in every logit of its own.

    The cache stays the same object, so that whoever holds it uses the guarded memory; views that
    were taken of it before keep the old memory.

    Args:
        cache: freshly allocated.
        name: of the rank, for messages.
    """

    def __init__(self, cache: DraftLogitsCache, name: str = "the cache") -> None:
        self.cache = cache
        self.name = name
        rows, num_steps, width = cache.logits.shape
        self._buffer = cache.logits.new_empty(rows + 2 * GUARD_ROWS, num_steps, width)
        self._buffer.view(torch.uint8).fill_(GUARD_BYTE)
        own = self._buffer[GUARD_ROWS : GUARD_ROWS + rows].fill_(torch.nan)
        DraftLogitsCache.__init__(
            cache,
            own,
            cache.shard,
            cache.layout,
            cache.vocab_size,
            num_candidates=None if cache.ids is None else cache.ids.shape[-1],
            target_ids=cache.target_ids,
        )
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """Remember every byte."""
        self._before = {name: tensor.clone() for name, tensor in self._tensors().items()}

    def violations(self, slots: Iterable[int]) -> list[str]:
        """What has changed since `begin` that no store for these requests may change.

        Args:
            slots: request state indices whose drafts were sampled; -1, and those of other ranks,
                allow nothing.

        Returns:
            One line a tensor: the first byte that is wrong, its row and its step.
        """
        shard = self.cache.shard
        allowed = [shard.row(slot) for slot in slots if shard.owns(slot)]
        found = []
        for name, tensor in self._tensors().items():
            first = GUARD_ROWS if name == "logits" else 0
            differs = self._before[name] != tensor
            differs[[row + first for row in allowed]] = False
            places = differs.nonzero()
            if len(places):
                row, step, byte = (int(i) for i in places[0])
                found.append(
                    f"{self.name} wrote {len(places)} bytes of draft_logits.{name} that it must "
                    f"not touch, the first: byte {byte} of {self._row_name(row - first)}, step "
                    f"{step}; allowed: rows {sorted(allowed)}"
                )
        return found

    def _row_name(self, row: int) -> str:
        num_rows, shard = self.cache.logits.shape[0], self.cache.shard
        if row < 0:
            return f"the row {-row} before the cache"
        if row >= num_rows:
            return f"the row {row - num_rows + 1} behind the cache"
        return f"row {row} (slot {row * shard.num_shards + shard.shard_idx})"

    def _tensors(self) -> dict[str, Tensor]:
        """Bytes `[rows, steps, bytes a cell]` of all that a store writes."""
        cache = self.cache
        tensors = {
            "logits": self._buffer,
            "temperature": cache.temperature.unsqueeze(-1),
            "logsumexp": cache.logsumexp.unsqueeze(-1),
            "state": cache.state.unsqueeze(-1),
        }
        if cache.ids is not None:
            tensors["ids"] = cache.ids
        return {name: tensor.contiguous().view(torch.uint8) for name, tensor in tensors.items()}
