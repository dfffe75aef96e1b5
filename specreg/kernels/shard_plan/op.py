"""The entry point `shard_plan`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.common.checks import INDICES, check_tensor
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.shard_plan.plan import ShardPlan
from specreg.kernels.shard_plan.reference import shard_plan_reference
from specreg.ownership import Shard

__all__ = ["shard_plan"]


def shard_plan(
    idx_mapping: Tensor, cu_num_logits: Tensor, shard: Shard, *, num_logits: int | None = None
) -> ShardPlan:
    """Plan batch-sharded sampling for one step: who verifies what. No communication.

    On the host the local tensors of the result are exact and `.tolist()` of the counts gives the
    split sizes of an all-to-all; on a device they are padded (see `ShardPlan`) and nothing
    synchronises.

    Args:
        idx_mapping: int64 `[num_reqs]`, request state indices; -1 marks a padding row.
        cu_num_logits: int32 or int64 `[num_reqs + 1]`, offsets of the requests' logits rows, from
            0. A request without logits rows (mid-prefill) belongs to its owner and moves no logits.
        shard: this rank among those that own requests.
        num_logits: logits rows of the batch, at least `cu_num_logits[-1]`. Needed on a device; on
            the host the default is `cu_num_logits[-1]`.

    Raises:
        TensorError: shapes, dtypes or devices that do not fit; on the host also offsets that
            decrease, do not start at 0 or exceed `num_logits`.
    """
    device = idx_mapping.device
    check_tensor(
        "shard_plan(idx_mapping)",
        idx_mapping,
        shape=(None,),
        dtypes=(torch.int64,),
        device=device,
        fix="pass one request state index a batch row, -1 for padding rows",
    )
    check_tensor(
        "shard_plan(cu_num_logits)",
        cu_num_logits,
        shape=(idx_mapping.shape[0] + 1,),
        dtypes=INDICES,
        device=device,
        fix="pass the cumulative number of logits rows, starting with 0, beside idx_mapping",
    )
    if device.type != "cpu":
        if num_logits is None:
            raise TensorError(
                "the number of logits rows is not known without a host synchronisation",
                where="shard_plan(num_logits)",
                got=f"None, with index maps on {device}",
                fix="pass num_logits=target_logits.shape[0], or plan on the host with CPU maps",
            )
        if not uses_triton(device):
            return shard_plan_reference(idx_mapping, cu_num_logits, shard, num_logits)
        from specreg.kernels.shard_plan.kernel import shard_plan_triton

        return shard_plan_triton(idx_mapping, cu_num_logits, shard, num_logits)
    end = int(cu_num_logits[-1])
    num_logits = end if num_logits is None else num_logits
    if int(cu_num_logits[0]) != 0 or end > num_logits or bool((cu_num_logits.diff() < 0).any()):
        raise TensorError(
            "the offsets of logits rows are out of order",
            where="shard_plan(cu_num_logits)",
            got=f"{cu_num_logits.tolist()} for num_logits={num_logits}; allowed: from 0, never "
            "decreasing, at most num_logits",
            fix="pass the cumulative number of logits rows, starting with 0",
        )
    return shard_plan_reference(idx_mapping, cu_num_logits, shard, num_logits).trimmed()
