"""The few best columns of each row of logits, the same ones on every machine."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Candidates", "log_normaliser", "top_candidates"]

# Columns whose maximum stands for all of them until the best such blocks are looked into: for 16 of
# 250,000 columns about as many maxima as columns of the best blocks, and so the fewest of both.
BLOCK_COLUMNS = 128
# fp32 elements that may be held at a time to normalise rows: 64 MiB.
CHUNK_ELEMENTS = 1 << 24


class Candidates(NamedTuple):
    """The best columns of each row, best first; equal ones by column.

    Attributes:
        ids: int64 `[..., num_candidates]`; no column twice.
        logits: fp32 of the same shape.
    """

    ids: Tensor
    logits: Tensor


def top_candidates(logits: Tensor, num_candidates: int, vocab_size: int) -> Candidates:
    """Find the largest logits of each row; of equal ones those with the smallest ids.

    Reads the logits once, for the maxima of blocks: an element among the best lies in one of the
    best blocks, for each block before its own has an element that comes before it. A NaN comes
    first, so that whoever draws from the candidates sees it. No host synchronisation.

    Args:
        logits: floating point `[..., width]`.
        num_candidates: at most `vocab_size`.
        vocab_size: columns from here on are padding.
    """
    rows = logits[..., :vocab_size].flatten(0, -2)
    columns = torch.arange(vocab_size, device=rows.device).expand(len(rows), -1)
    num_whole = vocab_size // BLOCK_COLUMNS
    if num_whole > num_candidates:
        whole, rest = rows.tensor_split([num_whole * BLOCK_COLUMNS], dim=1)
        maxima = whole.view(len(rows), num_whole, BLOCK_COLUMNS).amax(-1)
        if rest.shape[1]:
            maxima = torch.cat((maxima, rest.amax(-1, keepdim=True)), dim=1)
        blocks = torch.arange(maxima.shape[1], device=rows.device).expand_as(maxima)
        best = _best(maxima, blocks, num_candidates)
        inside = torch.arange(BLOCK_COLUMNS, device=rows.device)
        columns = (best[:, :, None] * BLOCK_COLUMNS + inside).flatten(1)
        rows = rows.gather(1, columns.clamp(max=vocab_size - 1))
        rows = rows.masked_fill(columns >= vocab_size, -torch.inf)
    ids = _best(rows, columns, num_candidates).view(*logits.shape[:-1], num_candidates)
    return Candidates(ids, logits.gather(-1, ids).float())


def log_normaliser(logits: Tensor) -> Tensor:
    """fp32 logsumexp `[...]` of logits `[..., width]`, with little held beside them."""
    rows = logits.flatten(0, -2)
    parts = torch.split(rows, max(1, CHUNK_ELEMENTS // rows.shape[1]))
    return torch.cat([part.float().logsumexp(-1) for part in parts]).view(logits.shape[:-1])


def _best(values: Tensor, ids: Tensor, num_best: int) -> Tensor:
    """Of each row the ids `[n, num_best]` of its largest values, equal ones by id."""
    # An order of fp32 bits as integers, above the ids: no two keys are equal.
    wide = values.float() + 0.0
    bits = torch.where(wide.isnan(), torch.inf, wide).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = bits.long() * 2**32 - ids
    return ids.gather(1, keys.topk(num_best, dim=1).indices)
