"""The type `ShardPlan`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["ShardPlan"]


@dataclass(frozen=True)
class ShardPlan:
    """Who verifies what in one step, seen from one rank.

    All but the `local_*` fields are the same on every rank. Shapes are static: the `local_*`
    tensors have room for a batch that one rank owns whole. Behind the owned requests they hold
    padding that every op treats as inert. `trimmed()` cuts it off.

    Attributes:
        order: int64 `[num_logits]`, logits rows sorted by owner, stable; a permutation. Rows that
            nobody owns (of padding rows, or behind the last request) come last.
        logits_per_rank: int64 `[num_shards]`, logits rows that each rank owns.
        reqs_per_rank: int64 `[num_shards]`, requests that each rank owns.
        restore: int64 `[num_reqs]`, index into outputs concatenated by rank; -1 for a padding row.
        local_reqs: int64 `[num_reqs]`, batch rows that this rank owns, ascending; then -1.
        local_idx_mapping: int64 `[num_reqs]`, their request state indices; then -1.
        local_cu_num_logits: `[num_reqs + 1]` in the dtype of `cu_num_logits`, offsets of their
            logits rows among the rows that this rank receives; then the total.
        shard_idx: this rank.
    """

    order: Tensor
    logits_per_rank: Tensor
    reqs_per_rank: Tensor
    restore: Tensor
    local_reqs: Tensor
    local_idx_mapping: Tensor
    local_cu_num_logits: Tensor
    shard_idx: int

    def trimmed(self) -> ShardPlan:
        """The same plan without padding in the `local_*` tensors, which become views.

        Synchronises with the host when the plan lies on a device.
        """
        num_local = int(self.reqs_per_rank[self.shard_idx])
        return replace(
            self,
            local_reqs=self.local_reqs[:num_local],
            local_idx_mapping=self.local_idx_mapping[:num_local],
            local_cu_num_logits=self.local_cu_num_logits[: num_local + 1],
        )
