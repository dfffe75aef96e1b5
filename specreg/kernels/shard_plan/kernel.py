"""The Triton kernel of `shard_plan`: one launch, a program a request."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.shard_plan.plan import ShardPlan
from specreg.ownership import Shard

__all__ = ["shard_plan_triton"]


@triton.jit
def _load_batch(idx_mapping, cu_num_logits, num_reqs, NUM_SHARDS: tl.constexpr, REQS: tl.constexpr):
    """Owner and number of logits rows of every request; padding lanes have owner NUM_SHARDS + 1."""
    reqs = tl.arange(0, REQS)
    live = reqs < num_reqs
    idx = tl.load(idx_mapping + reqs, mask=live, other=-1).to(tl.int64)
    owners = tl.where(idx < 0, NUM_SHARDS, idx % NUM_SHARDS)
    start = tl.load(cu_num_logits + reqs, mask=live, other=0).to(tl.int64)
    end = tl.load(cu_num_logits + reqs + 1, mask=live, other=0).to(tl.int64)
    return reqs, tl.where(live, owners, NUM_SHARDS + 1), end - start


@triton.jit(do_not_specialize=["num_reqs", "num_logits"])
def shard_plan_kernel(
    order,
    restore,
    logits_per_rank,
    reqs_per_rank,
    local_reqs,
    local_idx_mapping,
    local_cu_num_logits,
    idx_mapping,
    cu_num_logits,
    num_reqs,
    num_logits,
    NUM_SHARDS: tl.constexpr,
    SHARD_IDX: tl.constexpr,
    REQS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program b < num_reqs places request b and its rows; the last counts and places the rest."""
    req = tl.program_id(0)
    reqs, owners, counts = _load_batch(idx_mapping, cu_num_logits, num_reqs, NUM_SHARDS, REQS)
    first_row = tl.load(cu_num_logits + req).to(tl.int64)

    if req == num_reqs:
        tl.store(local_cu_num_logits, 0)
        for rank in tl.static_range(NUM_SHARDS):
            tl.store(logits_per_rank + rank, tl.sum(tl.where(owners == rank, counts, 0), 0))
            tl.store(reqs_per_rank + rank, tl.sum((owners == rank).to(tl.int64), 0))
        for start in range(first_row, num_logits, ROWS):
            rows = start + tl.arange(0, ROWS)
            tl.store(order + rows, rows, mask=rows < num_logits)
        return

    idx = tl.load(idx_mapping + req).to(tl.int64)
    owner = tl.where(idx < 0, NUM_SHARDS, idx % NUM_SHARDS)
    is_earlier = (owners == owner) & (reqs < req)
    is_before = (owners < owner) | is_earlier
    place = tl.sum(is_before.to(tl.int64), 0)
    tl.store(restore + req, tl.where(idx < 0, -1, place))

    first_place = tl.sum(tl.where(is_before, counts, 0), 0)
    count = tl.load(cu_num_logits + req + 1).to(tl.int64) - first_row
    for start in range(0, count, ROWS):
        rows = start + tl.arange(0, ROWS)
        tl.store(order + first_place + rows, first_row + rows, mask=rows < count)

    if owner == SHARD_IDX:
        local = tl.sum(is_earlier.to(tl.int64), 0)
        tl.store(local_reqs + local, req)
        tl.store(local_idx_mapping + local, idx)
        local_end = tl.sum(tl.where(is_earlier, counts, 0), 0) + count
        tl.store(local_cu_num_logits + local + 1, local_end)

    is_local = owners == SHARD_IDX
    if req >= tl.sum(is_local.to(tl.int64), 0):
        tl.store(local_reqs + req, -1)
        tl.store(local_idx_mapping + req, -1)
        tl.store(local_cu_num_logits + req + 1, tl.sum(tl.where(is_local, counts, 0), 0))


def shard_plan_triton(
    idx_mapping: Tensor, cu_num_logits: Tensor, shard: Shard, num_logits: int
) -> ShardPlan:
    """As `shard_plan`, with padded local tensors. One launch, no host synchronisation."""
    num_reqs, device = idx_mapping.shape[0], idx_mapping.device

    def empty(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int64, device=device)

    plan = ShardPlan(
        order=empty(num_logits),
        logits_per_rank=empty(shard.num_shards),
        reqs_per_rank=empty(shard.num_shards),
        restore=empty(num_reqs),
        local_reqs=empty(num_reqs),
        local_idx_mapping=empty(num_reqs),
        local_cu_num_logits=torch.empty_like(cu_num_logits, memory_format=torch.contiguous_format),
        shard_idx=shard.shard_idx,
    )
    shard_plan_kernel[(num_reqs + 1,)](
        order=plan.order,
        restore=plan.restore,
        logits_per_rank=plan.logits_per_rank,
        reqs_per_rank=plan.reqs_per_rank,
        local_reqs=plan.local_reqs,
        local_idx_mapping=plan.local_idx_mapping,
        local_cu_num_logits=plan.local_cu_num_logits,
        idx_mapping=idx_mapping.contiguous(),
        cu_num_logits=cu_num_logits.contiguous(),
        num_reqs=num_reqs,
        num_logits=num_logits,
        NUM_SHARDS=shard.num_shards,
        SHARD_IDX=shard.shard_idx,
        REQS=triton.next_power_of_2(max(num_reqs, 1)),
        ROWS=64,
        num_warps=1,
    )
    return plan
