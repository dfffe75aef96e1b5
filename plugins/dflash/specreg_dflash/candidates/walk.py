"""Draws a proposal step by step, each draft among the candidates of its step."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.draft_sampler import DraftSampler

__all__ = ["walk"]


def walk(sampler: DraftSampler, ids: Tensor, edges: Tensor, positions: Tensor) -> Tensor:
    """Draw the drafts: the one that is drawn selects the row of scores of the next step.

    So the scores that a draft is drawn from, and is verified with, are those behind the drafts
    before it.

    Args:
        sampler: draws and stores.
        ids: int64 `[num_reqs, num_steps, num_candidates]`.
        edges: fp32 `[num_reqs, num_steps, num_candidates, num_candidates]`: score of each candidate
            behind each one of the step before; at the first step all rows are equal.
        positions: int64 `[num_reqs, num_steps]`, where the drafts stand.

    Returns:
        int64 `[num_reqs, num_steps]`; -1 where the request samples nothing.
    """
    num_reqs, num_steps, num_candidates = ids.shape
    drafts = []
    chosen = ids.new_zeros(num_reqs)
    for step in range(num_steps):
        row = chosen[:, None, None].expand(-1, 1, num_candidates)
        scores = edges[:, step].gather(1, row).squeeze(1)
        candidates = ids[:, step]
        draft = sampler.sample_candidates(candidates, scores, step, positions[:, step].contiguous())
        chosen = (candidates == draft[:, None]).int().argmax(-1)
        drafts.append(draft)
    return torch.stack(drafts, dim=1)
