"""Torch twins of the Triton device helpers in `specreg.kernels.rejection_sample.draws.kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.common.cells.reference import cell_logits_reference
from specreg.kernels.common.reference import (
    SUM_BITS,
    draw_index_reference,
    sum_weights_reference,
    to_units_reference,
)
from specreg.kernels.draft_sample.reference import BLOCK_SIZE, Blocks
from specreg.kernels.random import STREAM_BONUS, STREAM_RESIDUAL, STREAM_TARGET
from specreg.kernels.rejection_sample.rows.reference import DraftProbs, Rows, log_total

__all__ = [
    "FRACTION_BITS",
    "RESIDUAL_FLOOR",
    "TINY",
    "draw_reference",
    "excess_reference",
    "fraction_reference",
    "residual_sums_reference",
]

# A residual of less mass than this is rounding: p and q are equal. It is asked for no more often
# than its mass says, so a draw from p in its place moves the law by less than this.
RESIDUAL_FLOOR = 2.0**-17

FRACTION_BITS = 40  # shares of probability are added in multiples of 2^-40
TINY = 2.0**-100  # a block whose largest residual is not above this has none


def draw_reference(rows: Rows, masses: Tensor, probs: DraftProbs, weight: Tensor) -> Tensor:
    """The token in place of a draft that is not kept, or behind the last one.

    Args:
        rows: `[n]`; overwritten.
        masses: int64 `[n, num_blocks]` of the target blocks; overwritten.
        probs: of the rows' drafts.
        weight: fp32 `[n]`, what p is multiplied by in the residual.

    Returns:
        int64 `[n]`.
    """
    target, top = rows.target, rows.target.peak.amax(1)
    log_totals, nothing_left = log_total(masses), torch.zeros_like(rows.draft)

    without = (probs.is_usable & probs.is_one_hot).nonzero().squeeze(1)
    if without.numel():
        target.logits.flatten(1)[without, rows.draft[without]] = -torch.inf
        target.peak[without] = target.logits[without].amax(-1)
        nothing_left[without] = rows.draft[without]
        masses[without] = rows.only(without).target.masses(rows.inverse[without])

    chosen = (probs.is_usable & ~probs.is_one_hot).nonzero().squeeze(1)
    if chosen.numel():
        residual = excess_reference(
            rows.only(chosen), probs.only(chosen), top[chosen], log_totals[chosen], weight[chosen]
        )
        sums = residual_sums_reference(residual)
        has_mass = fraction_reference(sums) > RESIDUAL_FLOOR
        chosen, residual, sums = chosen[has_mass], residual[has_mass], sums[has_mass]
        masses[chosen] = to_units_reference(sums, sums.amax(1, keepdim=True))

    first, second, _, _ = rows.words(_stream(rows))
    block = draw_index_reference(masses, first).clamp(max=masses.shape[1] - 1)
    logits, block_peak = target.of(block), target.peak.gather(1, block[:, None])
    weights = torch.exp((logits - block_peak) * rows.inverse[:, None])
    if chosen.numel():
        weights[chosen] = residual[torch.arange(len(chosen)), block[chosen]]
    lane = draw_index_reference(to_units_reference(weights, weights.amax(1, keepdim=True)), second)
    is_empty = target.peak.amax(1) == -torch.inf
    tokens = torch.where(is_empty, nothing_left, block * BLOCK_SIZE + lane)
    return tokens.clamp(max=rows.vocab_size - 1)  # only a temperature of NaN gets this far


def excess_reference(
    rows: Rows, probs: DraftProbs, top: Tensor, log_totals: Tensor, weight: Tensor
) -> Tensor:
    """fp32 `[n, num_blocks, BLOCK_SIZE]`: max(weight p - q, 0). The only full read of a cell.

    Args:
        rows, probs: `[n]`; the drafts' distributions are known and not one-hot.
        top, log_totals: fp32 `[n]`, largest target logit and log of the denominator over it.
        weight: fp32 `[n]`.
    """
    assert rows.cache is not None

    def normalised(blocks: Tensor, inverse: Tensor, log_normaliser: Tensor) -> Tensor:
        return blocks.mul_(inverse[:, None, None]).sub_(log_normaliser[:, None, None]).exp_()

    p = normalised(rows.target.logits - top[:, None, None], rows.inverse, log_totals)
    q_logits = Blocks.cut(cell_logits_reference(rows.cache, probs.row, probs.step)).logits
    q = normalised(q_logits, probs.inverse, probs.logsumexp)
    return p.mul_(weight[:, None, None]).sub_(q).clamp_(min=0)


def residual_sums_reference(residual: Tensor) -> Tensor:
    """fp32 `[n, num_blocks]`, sums of blocks: peak times a sum of integers, so exact in any order.

    Args:
        residual: fp32 `[n, num_blocks, BLOCK_SIZE]`, at least 0.
    """
    peak = residual.amax(-1)
    inverse = torch.where(peak > TINY, 1.0 / peak, 0.0)
    sums = sum_weights_reference(residual * inverse[..., None])
    return peak * (sums.float() * 2.0**-SUM_BITS)


def fraction_reference(shares: Tensor) -> Tensor:
    """fp32 `[n]`, sum of `shares [n, m]` of probability, exact in any order."""
    return (shares * 2.0**FRACTION_BITS).long().sum(-1).float() * 2.0**-FRACTION_BITS


def _stream(rows: Rows) -> Tensor:
    """What the token that is drawn stands for."""
    behind = torch.where(rows.num_drafts > 0, STREAM_BONUS, STREAM_TARGET)
    return torch.where(rows.steps < rows.num_drafts, STREAM_RESIDUAL, behind)
