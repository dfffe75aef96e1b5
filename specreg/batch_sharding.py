"""Batch-sharded sampling: each rank verifies the requests it owns.

Before verification every rank holds a slice of the vocabulary for all logits rows; after the
exchange it holds the whole vocabulary for the rows of its own requests. Afterwards the outputs are
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specreg.errors import RankDivergenceError
from specreg.kernels import ShardPlan, shard_plan
from specreg.ownership import Shard

__all__ = ["BatchSharder", "Collectives", "GatheredOutputs", "check_agreement"]


class Collectives(Protocol):
    """The two collectives that batch-sharded sampling needs of its host."""

    def all_to_all_rows(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send `send[r]` consecutive rows to rank r; returns what came, sender by sender."""
        ...

    def all_gather(self, local: Tensor) -> Tensor:
        """`[num_ranks, *local.shape]`, rank by rank."""
        ...


class GatheredOutputs(NamedTuple):
    """What verification produced, in batch order, the same on every rank.

    Attributes:
        sampled: int64 `[num_reqs, num_speculative_tokens + 1]`, -1 padded.
        num_sampled: int64 `[num_reqs]`; 0 for requests without logits rows and padding rows.
        num_nans: int64 `[num_reqs]`, target logits rows of the request that held a NaN, or nothing
            above -inf.
        extra: int64 `[num_reqs, num_extra]`, what the host sent along; 0 for padding rows.
        hashes: int64 `[num_ranks, 2]`, each rank's hash of its last proposal, and of what it has
            just sampled where every rank samples everything, else 0.
    """

    sampled: Tensor
    num_sampled: Tensor
    num_nans: Tensor
    extra: Tensor
    hashes: Tensor


class BatchSharder:
    """Moves logits to their owners and outputs back.

    Args:
        shard: this rank among the ranks that own requests.
        collectives: of the same ranks.
        vocab_size: real columns of the concatenated vocabulary shards.
    """

    def __init__(self, shard: Shard, collectives: Collectives, vocab_size: int) -> None:
        self.shard = shard
        self.collectives = collectives
        self.vocab_size = vocab_size

    def plan(self, idx_mapping: Tensor, cu_num_logits: Tensor) -> ShardPlan:
        """Who verifies what, from `idx_mapping` and `cu_num_logits` on the host."""
        return shard_plan(idx_mapping, cu_num_logits, self.shard)

    def exchange_logits(
        self, local_logits: Tensor, plan: ShardPlan, out: Tensor | None = None
    ) -> Tensor:
        """Trade vocabulary slices of all rows for whole rows of the requests owned here.

        Args:
            local_logits: `[num_logits, shard_width]`, this rank's columns, rows in `plan.order`;
                the same width on every rank, padding columns last.
            plan: of the step.
            out: `[>= num_local_logits, num_ranks * shard_width]` to write the rows to; None
                allocates them.

        Returns:
            `[num_local_logits, vocab_size]`, a view; rows in the order of the local batch.
        """
        num_ranks = self.shard.num_shards
        send = plan.logits_per_rank.tolist()
        num_rows = send[self.shard.shard_idx]
        received = self.collectives.all_to_all_rows(local_logits, send, [num_rows] * num_ranks)
        width = local_logits.shape[1]
        by_row = received.view(num_ranks, num_rows, width).transpose(0, 1)
        if out is None:
            whole = by_row.reshape(num_rows, num_ranks * width)
        else:
            whole = out[:num_rows]
            whole.view(num_rows, num_ranks, width).copy_(by_row)
        return whole[:, : self.vocab_size]

    def gather_outputs(
        self,
        sampled: Tensor,
        num_sampled: Tensor,
        num_nans: Tensor,
        plan: ShardPlan,
        proposal_hash: Tensor,
        extra: Tensor | None = None,
    ) -> GatheredOutputs:
        """Put the owners' outputs into batch order, in one collective.

        Args:
            sampled: int64 `[num_local_reqs, num_speculative_tokens + 1]`.
            num_sampled, num_nans: `[num_local_reqs]`.
            plan: of the step.
            proposal_hash: int64 scalar, this rank's hash of its last proposal.
            extra: int64 `[num_local_reqs, num_extra]`, more columns to send along; as many on every
                rank. None is no column.
        """
        reqs_per_rank = plan.reqs_per_rank.tolist()
        num_reqs, num_slots = sampled.shape
        columns = [sampled, num_sampled.unsqueeze(1), num_nans.unsqueeze(1)]
        if extra is not None:
            columns.append(extra)
        body = torch.cat([column.to(torch.int64) for column in columns], 1)
        payload = body.new_zeros(max(reqs_per_rank) + 1, body.shape[1])
        payload[0, 0] = proposal_hash
        payload[1 : 1 + num_reqs] = body
        gathered = self.collectives.all_gather(payload)
        owned = torch.cat(
            [rows[1 : 1 + count] for rows, count in zip(gathered, reqs_per_rank, strict=True)]
        )
        nothing = owned.new_zeros(1, owned.shape[1])
        nothing[:, :num_slots] = -1
        outputs = torch.cat([owned, nothing])[plan.restore.to(owned.device)]
        return GatheredOutputs(
            sampled=outputs[:, :num_slots],
            num_sampled=outputs[:, num_slots],
            num_nans=outputs[:, num_slots + 1],
            extra=outputs[:, num_slots + 2 :],
            hashes=gathered[:, 0, :2],
        )


def check_agreement(hashes: Sequence[Sequence[int]], step: int, proposal_step: int) -> None:
    """Refuse to go on when replicated ranks have proposed, or sampled, different tokens.

    Args:
        hashes: of each rank, as in `GatheredOutputs`.
        step: the present step.
        proposal_step: the step that made the last proposal.

    Raises:
        RankDivergenceError: naming the step and the ranks that differ from rank 0.
    """
    proposed, sampled = zip(*hashes, strict=True)
    for values, what, where in (
        (proposed, "proposed different draft tokens", f"the proposal of step {proposal_step}"),
        (sampled, "sampled different tokens of the target", f"step {step}"),
    ):
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            raise RankDivergenceError(
                f"replicated ranks {what}",
                where=f"{where}; ranks {differing} differ from rank 0",
                got=f"hashes {[f'{value & (2**64 - 1):#018x}' for value in values]}; "
                "allowed: one value on all ranks",
                fix="give every rank the same weights, library versions, thread count and device "
                "kind; a speculator must not draw from a source of randomness of its own",
            )
