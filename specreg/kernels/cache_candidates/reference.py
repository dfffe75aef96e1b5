"""`cache_candidates` in torch: the specification, and what CPU users run."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.reference import (
    LOGIT_MAX,
    UNIT_BITS,
    owned_row_reference,
    point_reference,
)
from specreg.kernels.common.view import CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.kernels.draft_sample.reference import TEMPERATURE_MIN
from specreg.kernels.random import STREAM_DRAFT, random_words_reference

__all__ = ["MAX_CANDIDATES", "cache_candidates_reference"]

MAX_CANDIDATES = 128  # all pairs of a row's candidates are compared at once


def cache_candidates_reference(
    ids: Tensor,
    scores: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    num_nans: Tensor | None,
) -> Tensor:
    """The torch twin; arguments as of `cache_candidates`, where `temperature` None means greedy.

    Runs on any device; asks the host for sizes that depend on `idx_mapping`.
    """
    tokens = torch.full_like(idx_mapping, -1)
    live = (idx_mapping >= 0).nonzero().squeeze(1)
    slots, steps = idx_mapping[live], steps[live]
    ids, scores = ids[live].long(), scores[live]
    if cache is not None:
        scores = scores.to(cache.logits.dtype).float()

    has_nan = scores.isnan().any(-1)
    counts = (ids >= 0) & (ids < vocab_size) & (scores > -torch.inf)
    counts &= ~((ids[:, :, None] == ids[:, None, :]) & counts[:, None, :]).tril(-1).any(-1)
    ids = torch.where(counts, ids, -1)
    scores = torch.where(counts, scores.clamp(max=LOGIT_MAX), -torch.inf)
    peak = scores.amax(-1)
    is_empty = peak == -torch.inf

    is_best = counts & (scores == peak[:, None])
    token = torch.where(is_best, ids, vocab_size).amin(-1)
    drawn_at, logsumexp = torch.zeros_like(peak), torch.zeros_like(peak)
    if temperature is not None:
        value = temperature[slots]
        drawn_at = torch.where(value != 0.0, value.clamp(min=TEMPERATURE_MIN), 0.0)
        is_drawn = (drawn_at != 0.0) & ~is_empty
        divisor = torch.where(drawn_at != 0.0, drawn_at, 1.0)
        units = ((scores - peak[:, None]) * (1.0 / divisor)[:, None]).exp() * 2.0**UNIT_BITS
        units = torch.where(counts, units, 0.0).long()
        total = units.sum(-1)
        word = random_words_reference(seeds[slots], positions[live], steps, STREAM_DRAFT)[0]
        is_before = ids[:, None, :] <= ids[:, :, None]
        cumulative = torch.where(is_before, units[:, None, :], 0).sum(-1)
        point = point_reference(total, word)[:, None]
        is_hit = (cumulative > point) & (cumulative - units <= point)
        token = torch.where(is_drawn, torch.where(is_hit, ids, 0).sum(-1), token)
        drawn_sum = peak / divisor + (total.float() * 2.0**-UNIT_BITS).log()
        logsumexp = torch.where(is_drawn, drawn_sum, 0.0)
    tokens[live] = torch.where(is_empty, 0, token)

    if num_nans is not None:
        num_nans.index_add_(0, slots, (has_nan | is_empty).int())
    if cache is not None:
        row = owned_row_reference(slots, cache.shard.num_shards, cache.shard.shard_idx)
        owned = row >= 0
        cell = (row[owned], steps[owned])
        _store(cache, cell, ids[owned], scores[owned])
        cache.temperature[cell] = drawn_at[owned]
        cache.logsumexp[cell] = logsumexp[owned]
        cache.state[cell] = torch.where(is_empty, CELL_EMPTY, CELL_STORED)[owned].to(torch.uint8)
    return tokens


def _store(
    cache: DraftLogitsView, cell: tuple[Tensor, Tensor], ids: Tensor, scores: Tensor
) -> None:
    """Replace the candidates of the cells."""
    kept = cache.ids
    assert kept is not None
    if cache.layout is DraftLogitsLayout.TOP_K:
        cache.logits[cell] = scores
    else:
        for columns, values in ((kept[cell].long(), -torch.inf), (ids, scores)):
            at, lane = (columns >= 0).nonzero(as_tuple=True)
            value = values[at, lane].to(cache.logits.dtype) if values is scores else values
            cache.logits[cell[0][at], cell[1][at], columns[at, lane]] = value
    kept[cell] = ids.int()
