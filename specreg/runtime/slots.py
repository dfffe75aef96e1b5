"""Request state indices: which are free, and whose turn it is."""

from __future__ import annotations

import heapq

from specreg.ownership import owner_of

__all__ = ["SlotPool"]


class SlotPool:
    """Hands out slots so that the owners' live requests stay level.

    Args:
        max_num_seqs: slots in all.
        num_owners: ranks that verify by ownership; 1 when every rank verifies everything.
    """

    def __init__(self, max_num_seqs: int, num_owners: int) -> None:
        self.num_owners = num_owners
        self._free: list[list[int]] = [
            list(range(owner, max_num_seqs, num_owners)) for owner in range(num_owners)
        ]
        self._live = [0] * num_owners

    def __len__(self) -> int:
        return sum(map(len, self._free))

    def take(self) -> int | None:
        """The lowest free slot of the owner with the fewest live requests; None if none is free."""
        owners = [owner for owner in range(self.num_owners) if self._free[owner]]
        if not owners:
            return None
        owner = min(owners, key=lambda candidate: (self._live[candidate], candidate))
        self._live[owner] += 1
        return heapq.heappop(self._free[owner])

    def give_back(self, slot: int) -> None:
        """Free a slot that `take` handed out."""
        owner = owner_of(slot, self.num_owners)
        self._live[owner] -= 1
        heapq.heappush(self._free[owner], slot)
