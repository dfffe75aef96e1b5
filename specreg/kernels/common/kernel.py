"""Triton device helpers that several ops share.

Their torch twins are in `specreg.kernels.common.reference`.
"""

import triton
import triton.language as tl

from specreg.kernels.common import reference

__all__ = [
    "LOGIT_MAX",
    "SUM_BITS",
    "UNIT_BITS",
    "clean_logits",
    "draw_index",
    "owned_row",
    "point",
    "sum_weights",
    "to_units",
]

LOGIT_MAX = tl.constexpr(reference.LOGIT_MAX)
UNIT_BITS = tl.constexpr(reference.UNIT_BITS)
UNITS = tl.constexpr(2.0**reference.UNIT_BITS)
SUM_BITS = tl.constexpr(reference.SUM_BITS)


@triton.jit
def owned_row(req_state_idx, NUM_SHARDS: tl.constexpr, shard_idx):
    """int64 cache row of the request on this shard; -1 where it owns none, or for a padding row.

    With one shard nothing is left of it: no remainder and no division.
    """
    row = req_state_idx.to(tl.int64)
    if NUM_SHARDS > 1:
        is_owned = (row >= 0) & (row % NUM_SHARDS == shard_idx)
        row = tl.where(is_owned, row // NUM_SHARDS, -1)
    return row


@triton.jit
def clean_logits(logits):
    """fp32 logits as every draw reads them: NaN is -inf, and nothing exceeds `LOGIT_MAX`."""
    return tl.minimum(tl.maximum(logits.to(tl.float32), float("-inf")), LOGIT_MAX)


@triton.jit
def sum_weights(weights, axis: tl.constexpr):
    """int32 sum of at most 512 fp32 `weights` in [0, 1], each rounded to a multiple of 2^-21.

    Adding 4 aligns the mantissa of a weight so that its last bit is worth 2^-21: one addition
    rounds to nearest, and the bits above those of 4 are the weight in fixed point. Integer sums are
    exact, so no reduction order can show in a token. The bits of 4 are taken off the sum at once:
    modulo 2^32 that is the same, and nothing for 512 weights.
    """
    bits_of_4: tl.constexpr = (weights.shape[axis] * 0x40800000 + 2**31) % 2**32 - 2**31
    return tl.sum((weights + 4.0).to(tl.int32, bitcast=True), axis) - bits_of_4


@triton.jit
def to_units(weights, peak):
    """int64 units of fp32 `weights` in [0, peak]: 2^30 for `peak`, all 0 where that is 0."""
    share = tl.where(peak > 0.0, tl.div_rn(weights, tl.where(peak > 0.0, peak, 1.0)), 0.0)
    return (share * UNITS).to(tl.int64)


@triton.jit
def point(total, word):
    """`floor(total * u)` exactly, in [0, total), for int64 `total` below 2^62 and u in (0, 1)."""
    odd = ((word >> 9) << 1 | 1).to(tl.int64)
    high, low = total >> 31, total & 0x7FFFFFFF
    return ((high * odd) << 7) + ((low * odd) >> 24)


@triton.jit
def draw_index(units, word):
    """Lane of the int64 vector `units` drawn in proportion to them, by inverse CDF.

    Never a lane of 0 units; the length of the vector where all are 0. The sum must stay below 2^62.
    """
    cumulative = tl.cumsum(units, 0)
    drawn = point(tl.sum(units, 0), word)
    return tl.sum((cumulative <= drawn).to(tl.int32), 0)
