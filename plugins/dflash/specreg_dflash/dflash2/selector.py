"""Scores of a draft behind another: a product of two tables, gated by the block's row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg_dflash.candidates.best_columns import Candidates

__all__ = ["CandidateSelector"]


class CandidateSelector(nn.Module):
    """`logit(c) + (predecessor[p] * gate(row)) @ successor[c]` for each pair of candidates.

    Args:
        vocab_size: rows of the tables; they are indexed by target ids.
        rank: their width.
        hidden_size: of the block's rows.
    """

    def __init__(self, vocab_size: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        for name in ("predecessor_codebook", "successor_codebook"):
            table = torch.empty(vocab_size, rank, device="meta")
            self.register_parameter(name, nn.Parameter(table))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False, device="meta")

    predecessor_codebook: Tensor
    successor_codebook: Tensor

    def forward(self, hidden: Tensor, candidates: Candidates, anchors: Tensor) -> Tensor:
        """Score every candidate of a step behind every one of the step before.

        Products are in the tables' dtype, the sum with the logits in fp32.

        Args:
            hidden: `[num_reqs, num_steps, hidden_size]`, the rows that predict the drafts.
            candidates: of those rows.
            anchors: int64 `[num_reqs]`, the token before the first draft.

        Returns:
            fp32 `[num_reqs, num_steps, num_candidates, num_candidates]`, predecessor first.
        """
        ids = candidates.ids
        first = anchors[:, None, None].expand(-1, 1, ids.shape[-1])
        before = torch.cat((first, ids[:, :-1]), dim=1)
        gate = self.hidden_projection(hidden)[:, :, None]
        gated = F.embedding(before, self.predecessor_codebook) * gate
        pairs = gated @ F.embedding(ids, self.successor_codebook).mT
        edges: Tensor = candidates.logits[:, :, None] + pairs.float()
        return edges
