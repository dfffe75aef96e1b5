"""`cell_statistics` in torch: the specification, and what CPU users run."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.reference import owned_row_reference
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.kernels.draft_sample.reference import BLOCK_SIZE, MASS_BITS, TEMPERATURE_MIN, Blocks

__all__ = ["cell_statistics_reference"]

CHUNK_ELEMENTS = 2**20  # logits worked on at a time


def cell_statistics_reference(cache: DraftLogitsView, idx_mapping: Tensor) -> None:
    """The torch twin; arguments as of `cell_statistics`. Asks the host which cells are bare."""
    owned = owned_row_reference(idx_mapping, cache.shard.num_shards, cache.shard.shard_idx)
    rows = owned[owned >= 0]
    at, steps = (cache.state[rows] == CELL_BARE).nonzero(as_tuple=True)
    rows = rows[at]
    size = max(1, CHUNK_ELEMENTS // max(cache.logits.shape[2], BLOCK_SIZE))
    for cell in zip(torch.split(rows, size), torch.split(steps, size), strict=True):
        logits = cache.logits[cell]
        if cache.layout is DraftLogitsLayout.TOP_K:
            assert cache.ids is not None
            logits = torch.where(cache.ids[cell] >= 0, logits, -torch.inf)
        blocks, temperature = Blocks.cut(logits), cache.temperature[cell]
        is_drawn = temperature != 0
        divisor = torch.where(is_drawn, temperature.clamp(min=TEMPERATURE_MIN), 1.0)
        total = blocks.masses(1.0 / divisor).sum(-1).float() * 2.0**-MASS_BITS
        top = blocks.peak.amax(-1)
        is_empty = top == -torch.inf
        logsumexp = torch.where(is_drawn & ~is_empty, top / divisor + total.log(), 0.0)
        cache.temperature[cell] = torch.where(is_drawn, divisor, 0.0)
        cache.logsumexp[cell] = logsumexp
        cache.state[cell] = torch.where(is_empty, CELL_EMPTY, CELL_STORED).to(torch.uint8)
