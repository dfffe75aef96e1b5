"""`draft_sample` in torch: the specification, and what CPU users run.

Its tokens do not depend on the batch either: maxima and integer sums are exact in any order, and
the rest is elementwise (`exp`, not `exp2`, whose last bit differs between torch's vector and scalar
code).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.reference import (
    SUM_BITS,
    UNIT_BITS,
    clean_logits_reference,
    draw_index_reference,
    owned_row_reference,
    sum_weights_reference,
)
from specreg.kernels.common.view import CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.kernels.random import STREAM_DRAFT, random_words_reference

__all__ = ["BLOCK_SIZE", "Blocks", "draft_sample_reference", "store_rows"]

BLOCK_SIZE = 512  # one word resolves 512 columns, another their 485 blocks at 248,320 columns
MASS_BITS = 33  # block masses are drawn in multiples of 2^-33
CHUNK_ELEMENTS = 2**20  # logits worked on at a time: bounds scratch and stays in the CPU's cache

TEMPERATURE_MIN = 2.0**-26  # a temperature above 0 counts as at least this


@dataclass(frozen=True)
class Blocks:
    """Cleaned logits of tokens, cut into blocks.

    Attributes:
        logits: fp32 `[num_tokens, num_blocks, BLOCK_SIZE]`, -inf beyond the columns.
        peak: fp32 `[num_tokens, num_blocks]`, largest logit of each block.
        has_nan: bool `[num_tokens]`.
    """

    logits: Tensor
    peak: Tensor
    has_nan: Tensor

    @classmethod
    def cut(cls, logits: Tensor) -> Blocks:
        """Blocks of `logits [num_tokens, num_columns]`, any float dtype; copies."""
        num_tokens, num_columns = logits.shape
        num_blocks = -(-num_columns // BLOCK_SIZE)
        padded = logits.new_full(
            (num_tokens, num_blocks * BLOCK_SIZE), -torch.inf, dtype=torch.float32
        )
        padded[:, :num_columns] = logits
        has_nan = padded.amax(-1).isnan()
        cleaned = clean_logits_reference(padded).view(num_tokens, num_blocks, BLOCK_SIZE)
        return cls(cleaned, cleaned.amax(-1), has_nan)

    def masses(self, inverse_temperature: Tensor) -> Tensor:
        """int64 `[num_tokens, num_blocks]`, sums of exp((x - top) / temperature) in 2^-33."""
        scale = inverse_temperature[:, None]
        weights = (self.logits - self.peak[..., None]).mul_(scale[..., None]).exp_()
        sums = sum_weights_reference(weights)
        top = self.peak.amax(-1, keepdim=True)
        share = torch.exp((self.peak - top) * scale)
        mass = sums.float() * share * 2.0 ** (MASS_BITS - SUM_BITS)
        return torch.where(self.peak == -torch.inf, 0.0, mass).long()

    def weights(self, block: Tensor, inverse_temperature: Tensor) -> Tensor:
        """int64 `[num_tokens, BLOCK_SIZE]`, exp((x - peak) / temperature) in 2^-30."""
        logits, peak = self.of(block), self.peak.gather(1, block[:, None])
        return ((logits - peak) * inverse_temperature[:, None]).exp().mul_(2.0**UNIT_BITS).long()

    def of(self, block: Tensor) -> Tensor:
        """fp32 `[num_tokens, BLOCK_SIZE]`, the logits of one block a token."""
        return self.logits[torch.arange(len(block), device=block.device), block]


def draft_sample_reference(
    logits: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    num_nans: Tensor | None,
) -> Tensor:
    """The torch twin; arguments as of `draft_sample`, where `temperature` None means greedy.

    Runs on any device; asks the host for sizes that depend on `idx_mapping`.
    """
    num_columns = min(logits.shape[1], vocab_size) if target_ids is None else len(target_ids)
    ids = torch.full_like(idx_mapping, -1)
    live = (idx_mapping >= 0).nonzero().squeeze(1)
    chunk = max(1, CHUNK_ELEMENTS // max(num_columns, BLOCK_SIZE))
    for start in range(0, len(live), chunk):
        tokens = live[start : start + chunk]
        slots, token_steps = idx_mapping[tokens], steps[tokens]
        rows = logits[tokens, :num_columns]
        if cache is not None:
            rows = rows.to(cache.logits.dtype)
        blocks = Blocks.cut(rows)
        top = blocks.peak.amax(-1)
        is_empty = top == -torch.inf

        block, lane = _largest(blocks)
        logsumexp = torch.zeros_like(top)
        drawn_at = logsumexp if temperature is None else temperature[slots]
        drawn_at = torch.where(drawn_at != 0.0, drawn_at.clamp(min=TEMPERATURE_MIN), 0.0)
        is_drawn = (drawn_at != 0.0) & ~is_empty
        if bool(is_drawn.any()):
            words = random_words_reference(
                seeds[slots], positions[tokens], token_steps, STREAM_DRAFT
            )
            drawn_block, drawn_lane, logsumexp = _drawn(blocks, drawn_at, words)
            block = torch.where(is_drawn, drawn_block, block)
            lane = torch.where(is_drawn, drawn_lane, lane)
        column = block * BLOCK_SIZE + lane
        ids[tokens] = column if target_ids is None else target_ids[column]

        if num_nans is not None:
            num_nans.index_add_(0, slots, (blocks.has_nan | is_empty).int())
        if cache is not None:
            logsumexp = torch.where(is_drawn, logsumexp, 0.0)
            store_rows(cache, slots, token_steps, rows, target_ids, drawn_at, logsumexp, is_empty)
    return ids


def _largest(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Block and lane of the largest logit, the lowest on ties; (0, 0) for an empty row."""
    block = blocks.peak.argmax(-1)
    return block, blocks.of(block).argmax(-1)


def _drawn(blocks: Blocks, temperature: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Block and lane drawn at `temperature`, and the logsumexp; undefined where it is 0."""
    temperature = torch.where(temperature != 0.0, temperature, 1.0)
    inverse = 1.0 / temperature
    masses = blocks.masses(inverse)
    block = draw_index_reference(masses, words[0]).clamp(max=masses.shape[1] - 1)
    lane = draw_index_reference(blocks.weights(block, inverse), words[1])
    total = masses.sum(-1).float() * 2.0**-MASS_BITS
    return block, lane, blocks.peak.amax(-1) / temperature + total.log()


def store_rows(
    cache: DraftLogitsView,
    slots: Tensor,
    steps: Tensor,
    rows: Tensor,
    target_ids: Tensor | None,
    drawn_at: Tensor,
    logsumexp: Tensor,
    is_empty: Tensor,
) -> None:
    """Write the cells of owned requests whole; -inf where the drafter has no column.

    Args:
        cache: dense or of a reduced vocabulary.
        slots, steps: int64, one a row.
        rows: in the cache's dtype, a row of draft columns each.
        target_ids: target id of each draft column; None where they are the same.
        drawn_at, logsumexp, is_empty: statistics and whether there is nothing to draw, one a row.
    """
    row = owned_row_reference(slots, cache.shard.num_shards, cache.shard.shard_idx)
    owned = row >= 0
    cell = (row[owned], steps[owned])
    rows = rows[owned]
    if target_ids is not None and cache.layout is DraftLogitsLayout.DENSE:
        cache.logits[cell] = -torch.inf
        cache.logits[cell[0][:, None], cell[1][:, None], target_ids] = rows
    else:
        num_columns = rows.shape[1]
        cache.logits[(*cell, slice(num_columns))] = rows
        cache.logits[(*cell, slice(num_columns, None))] = -torch.inf
    cache.temperature[cell] = drawn_at[owned]
    cache.logsumexp[cell] = logsumexp[owned]
    cache.state[cell] = torch.where(is_empty, CELL_EMPTY, CELL_STORED)[owned].to(torch.uint8)
