"""The two heads of Gemma 4 assistants: every token, or those of the best centroids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.errors import CheckpointError
from specreg_mtp.gemma4_config import Centroids

__all__ = ["OrderedTokens", "dense_logits"]

# Rows whose head rows are gathered at a time: 64 MiB at 4096 tokens of 256 elements in bf16.
CHUNK_ROWS = 32


def dense_logits(hidden: Tensor, head: Tensor, soft_cap: float | None) -> Tensor:
    """Logits `[n, vocab_size]` of `hidden [n, hidden_size]`."""
    return _capped(F.linear(hidden, head), soft_cap)


class OrderedTokens(nn.Module):
    """Scores the tokens of the `top_k` centroids that are nearest to a state, and no others.

    Args:
        centroids: how the vocabulary is divided.
        vocab_size, hidden_size: of the head.
        where: of the checkpoint, for errors.
    """

    token_ordering: Tensor

    def __init__(self, centroids: Centroids, vocab_size: int, hidden_size: int, where: str) -> None:
        super().__init__()
        self.sizes, self.where = centroids, where
        self.centroids = nn.Linear(hidden_size, centroids.num, bias=False, device="meta")
        ordering = torch.empty(vocab_size, dtype=torch.int64, device="meta")
        self.register_buffer("token_ordering", ordering)

    def check(self) -> None:
        """Check the loaded ordering: every token once. Raises `CheckpointError`."""
        ordering = self.token_ordering
        expected = torch.arange(len(ordering))
        if not torch.equal(ordering.cpu().long().sort().values, expected):
            raise CheckpointError(
                "an ordered head does not name every token once",
                where=f"{self.where}, tensor 'masked_embedding.token_ordering'",
                got=f"{len(set(ordering.tolist()))} different ids; allowed: each of 0 .. "
                f"{len(ordering) - 1} once",
                fix="use a complete checkpoint",
            )
        self.token_ordering = ordering.long()

    def forward(self, hidden: Tensor, head: Tensor, soft_cap: float | None) -> Tensor:
        """Logits `[n, vocab_size]` of `hidden [n, hidden_size]`; -inf where nothing is scored.

        A token that is left out has probability 0 in the drafter's distribution: any other fill
        would spread some of it over the whole vocabulary.
        """
        nearest = self.centroids(hidden).topk(self.sizes.top_k, dim=-1).indices
        ids = self.token_ordering.view(self.sizes.num, -1)[nearest].flatten(1)
        scores = [
            torch.einsum("nth,nh->nt", head[some_ids], some)
            for some_ids, some in zip(
                torch.split(ids, CHUNK_ROWS), torch.split(hidden, CHUNK_ROWS), strict=True
            )
        ]
        logits = hidden.new_full((len(hidden), head.shape[0]), -torch.inf)
        return logits.scatter_(1, ids, _capped(torch.cat(scores), soft_cap))


def _capped(logits: Tensor, soft_cap: float | None) -> Tensor:
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
