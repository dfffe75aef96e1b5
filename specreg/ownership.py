"""Which rank owns a request, and at which row of its cache.

Owner `req_state_idx % num_shards`, row `req_state_idx // num_shards`. A negative index marks a
padding row and belongs to nobody: it is tested before owner and row are computed, because Python
and C divide negative numbers differently.
"""

from __future__ import annotations

from dataclasses import dataclass

from specreg.errors import ConfigError

__all__ = ["Shard", "cdiv", "owner_of", "rows_per_rank", "shard_row"]

NOBODY = -1


def cdiv(numerator: int, denominator: int) -> int:
    """`numerator / denominator` rounded up; `denominator` is positive."""
    return -(-numerator // denominator)


def owner_of(req_state_idx: int, num_shards: int) -> int:
    """Rank that owns the request at slot `req_state_idx`; -1 for a padding row."""
    return NOBODY if req_state_idx < 0 else req_state_idx % num_shards


def shard_row(req_state_idx: int, num_shards: int) -> int:
    """Row of the request in its owner's cache; -1 for a padding row."""
    return NOBODY if req_state_idx < 0 else req_state_idx // num_shards


def rows_per_rank(max_num_seqs: int, num_shards: int) -> int:
    """Cache rows that every rank allocates: `cdiv(max_num_seqs, num_shards)`."""
    return cdiv(max_num_seqs, num_shards)


@dataclass(frozen=True)
class Shard:
    """A rank as a value: one of `num_shards` shards, at index `shard_idx`.

    Ops, cache, plan and sampler take a `Shard` and never ask torch.distributed, so one process can
    play every rank in turn.
    """

    num_shards: int = 1
    shard_idx: int = 0

    def __post_init__(self) -> None:
        if self.num_shards < 1 or not 0 <= self.shard_idx < self.num_shards:
            raise ConfigError(
                "a shard cannot be formed",
                where="Shard(num_shards, shard_idx)",
                got=f"num_shards={self.num_shards}, shard_idx={self.shard_idx}; allowed: "
                "num_shards >= 1 and 0 <= shard_idx < num_shards",
                fix="pass the size of the group and this rank's index in it",
            )

    def owns(self, req_state_idx: int) -> bool:
        """Whether this shard stores and verifies the request; never true for a padding row."""
        return owner_of(req_state_idx, self.num_shards) == self.shard_idx

    def row(self, req_state_idx: int) -> int:
        """Row of the request in its owner's cache; -1 for a padding row."""
        return shard_row(req_state_idx, self.num_shards)
