"""One set of draft distributions, stored in every layout and storage."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from verification_cases import Batch, Request, lay_out

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_vocab import target_to_draft_table
from specreg.kernels.common.view import DraftLogitsView
from specreg.ownership import Shard

NUM_CANDIDATES = 9


def batch_of_candidates(
    requests: list[Request],
    slots: list[int],
    *,
    num_drafts: int = 3,
    num_candidates: int = NUM_CANDIDATES,
    shard: Shard | None = None,
    seed: int = 0,
) -> tuple[Batch, Tensor]:
    """A batch whose drafts come from a few columns, the same ones in every cell, and these columns.

    Draft logits are -inf elsewhere, so the dense rows, a reduced vocabulary and candidates can all
    say the same.
    """
    vocab_size = requests[0].draft.shape[1]
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randperm(vocab_size, generator=generator)[:num_candidates]
    outside = torch.ones(vocab_size, dtype=torch.bool)
    outside[columns] = False
    narrowed = []
    for request in requests:
        favours = request.target.clone()  # else no draft would be accepted
        favours[:, columns] += 7
        draft = request.draft.masked_fill(outside, -torch.inf)
        narrowed.append(replace(request, target=favours, draft=draft))
    return lay_out(narrowed, slots, num_drafts=num_drafts, shard=shard), columns


def in_layout(
    dense: DraftLogitsView, columns: Tensor, layout: DraftLogitsLayout
) -> DraftLogitsView:
    """The same distributions, statistics and states in another layout."""
    columns = columns.to(dense.logits.device)
    if layout is DraftLogitsLayout.DENSE:
        return dense
    if layout is DraftLogitsLayout.DRAFT_VOCAB:
        return replace(
            dense,
            layout=layout,
            logits=dense.logits[..., columns].contiguous(),
            target_to_draft=target_to_draft_table(columns, dense.vocab_size),
        )
    rows, num_steps, _ = dense.logits.shape
    # Ids in an order of their own a cell, with an absent candidate of a tempting score among them.
    ids = torch.stack([torch.roll(columns, cell) for cell in range(rows * num_steps)]).view(
        rows, num_steps, -1
    )
    scores = dense.logits.float().gather(2, ids)
    ids = torch.nn.functional.pad(ids, (1, 0), value=-1)
    return replace(
        dense,
        layout=layout,
        logits=torch.nn.functional.pad(scores, (1, 0), value=50.0),
        ids=ids.int(),
    )


def in_larger_buffers(view: DraftLogitsView) -> DraftLogitsView:
    """The same cache as a slice of larger arrays: rows, steps and columns have others around."""

    def embedded(tensor: Tensor, poison: float) -> Tensor:
        rows, num_steps, width = tensor.shape
        wide = tensor.new_full((rows + 2, num_steps + 3, width + 5), poison)
        inner = wide[1:-1, 2 : 2 + num_steps, 3 : 3 + width]
        inner.copy_(tensor)
        return inner

    ids = None if view.ids is None else embedded(view.ids, 10**9)
    return replace(view, logits=embedded(view.logits, float("nan")), ids=ids)
