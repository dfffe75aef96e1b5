"""Torch twins of the Triton device helpers in `specreg.kernels.common.cells.kernel`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.reference import clean_logits_reference
from specreg.kernels.common.view import DraftLogitsView

__all__ = ["cell_elements_reference", "cell_logits_reference"]


def cell_logits_reference(cache: DraftLogitsView, rows: Tensor, steps: Tensor) -> Tensor:
    """fp32 `[n, vocab_size]`, cleaned logits of the cells over the target's vocabulary.

    Args:
        cache: any layout.
        rows, steps: int64 `[n]`, in range.
    """
    logits = clean_logits_reference(cache.logits[rows, steps])
    if cache.layout is DraftLogitsLayout.DENSE:
        return logits
    if cache.layout is DraftLogitsLayout.DRAFT_VOCAB:
        assert cache.target_to_draft is not None
        columns = cache.target_to_draft.long()
        return torch.where(columns >= 0, logits[:, columns.clamp(min=0)], -torch.inf)
    assert cache.ids is not None
    ids = cache.ids[rows, steps].long()
    # Absent candidates go to a column behind the vocabulary, which is cut off again.
    dense = logits.new_full((len(logits), cache.vocab_size + 1), -torch.inf)
    dense.scatter_(1, torch.where(ids >= 0, ids, cache.vocab_size), logits)
    return dense[:, : cache.vocab_size]


def cell_elements_reference(
    cache: DraftLogitsView, rows: Tensor, steps: Tensor, tokens: Tensor
) -> Tensor:
    """fp32 `[n]`, cleaned logit of one token a cell.

    Args:
        cache: any layout.
        rows, steps, tokens: int64 `[n]`, in range.
    """
    if cache.layout is DraftLogitsLayout.DENSE:
        return clean_logits_reference(cache.logits[rows, steps, tokens])
    if cache.layout is DraftLogitsLayout.DRAFT_VOCAB:
        assert cache.target_to_draft is not None
        columns = cache.target_to_draft[tokens].long()
        logits = clean_logits_reference(cache.logits[rows, steps, columns.clamp(min=0)])
        return torch.where(columns >= 0, logits, -torch.inf)
    assert cache.ids is not None
    is_token = cache.ids[rows, steps] == tokens[:, None]
    logits = clean_logits_reference(cache.logits[rows, steps])
    return torch.where(is_token, logits, -torch.inf).amax(1)
