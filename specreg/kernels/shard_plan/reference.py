"""The torch twin of `shard_plan`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.shard_plan.plan import ShardPlan
from specreg.ownership import Shard

__all__ = ["shard_plan_reference"]


def shard_plan_reference(
    idx_mapping: Tensor, cu_num_logits: Tensor, shard: Shard, num_logits: int
) -> ShardPlan:
    """As `shard_plan`, with padded local tensors on every device and no host synchronisation."""
    num_reqs, device = idx_mapping.shape[0], idx_mapping.device
    nobody = shard.num_shards
    owners = torch.where(idx_mapping < 0, nobody, idx_mapping.remainder(shard.num_shards))
    counts = cu_num_logits.diff()

    rows = torch.arange(num_logits, device=device)
    reqs_of_rows = torch.searchsorted(cu_num_logits[1:].long(), rows, right=True)
    row_owners = torch.cat([owners, owners.new_full((1,), nobody)])[reqs_of_rows]

    by_owner = torch.argsort(owners, stable=True)
    restore = torch.empty_like(by_owner)
    restore[by_owner] = torch.arange(num_reqs, device=device)

    is_local = owners == shard.shard_idx
    local_first = torch.argsort((~is_local).to(torch.uint8), stable=True)
    is_filled = is_local[local_first]
    local_counts = torch.where(is_filled, counts[local_first], 0)
    return ShardPlan(
        order=torch.argsort(row_owners, stable=True),
        logits_per_rank=_count_by_owner(row_owners, nobody),
        reqs_per_rank=_count_by_owner(owners, nobody),
        restore=torch.where(idx_mapping < 0, -1, restore),
        local_reqs=torch.where(is_filled, local_first, -1),
        local_idx_mapping=torch.where(is_filled, idx_mapping[local_first], -1),
        local_cu_num_logits=torch.nn.functional.pad(
            local_counts.cumsum(0, dtype=cu_num_logits.dtype), (1, 0)
        ),
        shard_idx=shard.shard_idx,
    )


def _count_by_owner(owners: Tensor, num_shards: int) -> Tensor:
    counts = owners.new_zeros(num_shards + 1)
    return counts.scatter_add_(0, owners, torch.ones_like(owners))[:num_shards]
