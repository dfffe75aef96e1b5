"""`gumbel_sample` in torch: the specification, and what CPU users run."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import (
    BLOCK_SIZE,
    CHUNK_ELEMENTS,
    MASS_BITS,
    TEMPERATURE_MIN,
    Blocks,
    store_rows,
)
from specreg.kernels.random import STREAM_DRAFT, random_words_reference

__all__ = ["gumbel_reference", "gumbel_sample_reference", "noise_uniform_reference"]

SERIES_BELOW = 2.0**-6  # of u: there 1 - u would lose what the series keeps
UNIFORM_MAX = 1.0 - 2.0**-24


def noise_uniform_reference(words: Tensor) -> Tensor:
    """fp32 uniforms in (0, 1) from all 32 bits of random words; small ones to a relative 2^-24."""
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=UNIFORM_MAX)


def gumbel_reference(words: Tensor) -> Tensor:
    """fp32 standard Gumbel noise of random words; finite."""
    u = noise_uniform_reference(words)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    exponential = torch.where(u < SERIES_BELOW, series, -torch.log(1.0 - u))
    return -torch.log(exponential)


def gumbel_sample_reference(
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
    noise_steps: Tensor,
) -> Tensor:
    """The torch twin; arguments as of `gumbel_sample`, where `temperature` None means greedy.

    Runs on any device; asks the host for sizes that depend on `idx_mapping`.
    """
    num_columns = min(logits.shape[1], vocab_size) if target_ids is None else len(target_ids)
    columns = torch.arange(num_columns, device=logits.device)
    column_ids = columns if target_ids is None else target_ids
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

        scores = blocks.logits.flatten(1)[:, :num_columns]
        logsumexp = torch.zeros_like(top)
        drawn_at = logsumexp
        if temperature is not None:
            value = temperature[slots]
            drawn_at = torch.where(value != 0.0, value.clamp(min=TEMPERATURE_MIN), 0.0)
            is_drawn = (drawn_at != 0.0) & ~is_empty
            inverse = 1.0 / torch.where(drawn_at != 0.0, drawn_at, 1.0)
            words = random_words_reference(
                seeds[slots, None],
                positions[tokens, None],
                noise_steps[tokens, None],
                STREAM_DRAFT,
                column_ids[None],
            )
            below = scores - torch.where(is_empty, 0.0, top)[:, None]
            noisy = below * inverse[:, None] + gumbel_reference(words[0])
            scores = torch.where(is_drawn[:, None], noisy, scores)
            total = blocks.masses(inverse).sum(-1).float() * 2.0**-MASS_BITS
            drawn_sum = top / torch.where(drawn_at != 0.0, drawn_at, 1.0) + total.log()
            logsumexp = torch.where(is_drawn, drawn_sum, 0.0)
        ids[tokens] = column_ids[torch.where(is_empty, 0, scores.argmax(-1))]

        if num_nans is not None:
            num_nans.index_add_(0, slots, (blocks.has_nan | is_empty).int())
        if cache is not None:
            store_rows(cache, slots, token_steps, rows, target_ids, drawn_at, logsumexp, is_empty)
    return ids
