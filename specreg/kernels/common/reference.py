"""Torch twins of the Triton device helpers in `specreg.kernels.common.kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "LOGIT_MAX",
    "SUM_BITS",
    "UNIT_BITS",
    "clean_logits_reference",
    "draw_index_reference",
    "owned_row_reference",
    "owner_reference",
    "point_reference",
    "sum_weights_reference",
    "to_units_reference",
]

LOGIT_MAX = 2.0**100  # larger logits count as this: +inf has a softmax, at any temperature
UNIT_BITS = 30  # the largest weight of a draw is 2^30 units
SUM_BITS = 21  # sums over blocks count multiples of 2^-21


def owner_reference(req_state_idx: Tensor, num_shards: int) -> Tensor:
    """Rank that owns each request of int64 `req_state_idx`; -1 for padding rows."""
    return torch.where(req_state_idx >= 0, req_state_idx % num_shards, -1)


def owned_row_reference(req_state_idx: Tensor, num_shards: int, shard_idx: int | Tensor) -> Tensor:
    """Cache row of each request on the shard at `shard_idx`; -1 where it owns none, or for padding.

    Args:
        req_state_idx: int64, any shape.
        num_shards: shards of the cache.
        shard_idx: this shard's index.
    """
    if num_shards == 1:
        return req_state_idx
    owned = (req_state_idx >= 0) & (req_state_idx % num_shards == shard_idx)
    return torch.where(owned, req_state_idx // num_shards, -1)


def clean_logits_reference(logits: Tensor) -> Tensor:
    """fp32 logits as every draw reads them: NaN is -inf, and nothing exceeds `LOGIT_MAX`."""
    logits = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=LOGIT_MAX, neginf=-torch.inf)
    return logits.clamp_(max=LOGIT_MAX)


def sum_weights_reference(weights: Tensor) -> Tensor:
    """int32 sum over the last axis of at most 512 fp32 `weights` in [0, 1], in multiples of 2^-21.

    Each weight is rounded to the nearest multiple first (ties to even), so the sum is exact and
    does not depend on the order of the reduction. Overwrites `weights`.
    """
    return weights.mul_(2.0**SUM_BITS).round_().int().sum(-1, dtype=torch.int32)


def to_units_reference(weights: Tensor, peak: Tensor) -> Tensor:
    """int64 units of fp32 `weights` in [0, peak]: 2^30 for `peak`, all 0 where that is 0."""
    share = torch.where(peak > 0, weights / torch.where(peak > 0, peak, 1.0), 0.0)
    return (share * 2.0**UNIT_BITS).long()


def point_reference(total: Tensor, words: Tensor) -> Tensor:
    """`floor(total * u)` exactly, in [0, total), for int64 `total` below 2^62 and u in (0, 1)."""
    odd = ((words >> 9) << 1) | 1
    high, low = total >> 31, total & 0x7FFFFFFF
    return ((high * odd) << 7) + ((low * odd) >> 24)


def draw_index_reference(units: Tensor, words: Tensor) -> Tensor:
    """Index into the last axis drawn in proportion to `units`, by inverse CDF.

    Args:
        units: int64 `[..., n]`, non-negative, their sum below 2^62.
        words: random words `[...]`.

    Returns:
        int64 `[...]`, never a lane of 0 units; n where all are 0.
    """
    cumulative = units.cumsum(-1)
    point = point_reference(cumulative[..., -1], words)
    return (cumulative <= point.unsqueeze(-1)).sum(-1)
