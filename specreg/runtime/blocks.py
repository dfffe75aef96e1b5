"""KV blocks on the host: who holds which, and what changed since the last plan."""

from __future__ import annotations

from specreg.ownership import cdiv

__all__ = ["BlockAllocator"]


class BlockAllocator:
    """A free list of fixed-size KV blocks and each slot's table of them.

    Args:
        num_blocks: blocks in the pool.
        block_size: positions a block holds.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._tables: dict[int, list[int]] = {}
        self._updates: list[tuple[int, int, list[int]]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ensure(self, slot: int, num_positions: int) -> bool:
        """Grow the slot's table to hold `num_positions`; False, unchanged, if the pool is full."""
        table = self._tables.setdefault(slot, [])
        missing = cdiv(num_positions, self.block_size) - len(table)
        if missing > len(self._free):
            return False
        if missing > 0:
            taken = [self._free.pop() for _ in range(missing)]
            self._updates.append((slot, len(table), taken))
            table.extend(taken)
        return True

    def free(self, slot: int) -> None:
        """Return every block of the slot."""
        self._free.extend(reversed(self._tables.pop(slot, [])))
        self._updates = [update for update in self._updates if update[0] != slot]

    def take_updates(self) -> list[tuple[int, int, list[int]]]:
        """(slot, first table index, block ids) of every growth since the last call."""
        updates, self._updates = self._updates, []
        return updates
