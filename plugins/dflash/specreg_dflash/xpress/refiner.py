"""XPress's refiner: scores of a block's tokens that depend on the tokens before them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.nn.mlp import GatedMLP
from specreg_dflash.xpress.config import RefinerConfig

__all__ = ["KeptColumns", "Refiner", "refinements"]


class Refiner(nn.Module):
    """A small causal model over the rows of a block.

    Args:
        config: sizes.
        hidden_size: of the backbone.
        vocab_size: ids that it embeds and scores.
    """

    mixer: Tensor

    def __init__(self, config: RefinerConfig, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        rank, rows = config.rank, config.block_size
        self.rank = rank
        self.token_embed = nn.Embedding(vocab_size, rank, device="meta")
        self.down_h = nn.Linear(hidden_size, rank, bias=False, device="meta")
        self.down_g = nn.Linear(hidden_size, rank, bias=False, device="meta")
        # Columns in the order: row's state, block's mean state, token.
        self.in_proj = nn.Linear(3 * rank, rank, bias=False, device="meta")
        self.mix_l = nn.Parameter(torch.empty(rank, rows, rows, device="meta"))
        self.mlp = GatedMLP(rank, config.mlp_size)
        self.readout = nn.Linear(rank, vocab_size, bias=False, device="meta")

    def fold_mixer(self) -> None:
        """Once weights are loaded: mask the mixer and add the identity, once and for all."""
        rows = self.mix_l.shape[-1]
        identity = torch.eye(rows, dtype=self.mix_l.dtype, device=self.mix_l.device)
        self.mixer = self.mix_l.tril() + identity

    def rows(self, hidden: Tensor) -> Tensor:
        """What no pass changes, `[num_reqs, num_rows, rank]`, of `hidden [.., .., hidden_size]`."""
        mean = self.down_g(hidden.mean(1, keepdim=True)).expand(-1, hidden.shape[1], -1)
        both = torch.cat((self.down_h(hidden), mean), dim=-1)
        return F.linear(both, self.in_proj.weight[:, : 2 * self.rank])

    def forward(self, rows: Tensor, previous: Tensor) -> Tensor:
        """States `[num_reqs, num_rows, rank]` of rows, given the token before each.

        A block of fewer rows than trained takes the leading rows and columns of the mixer: it is
        causal, so they do not know of the others.

        Args:
            rows: of the method `rows`.
            previous: int64 `[num_reqs, num_rows]`.
        """
        num_rows = rows.shape[1]
        token = F.linear(self.token_embed(previous), self.in_proj.weight[:, 2 * self.rank :])
        mixer = self.mixer[:, :num_rows, :num_rows]
        mixed = torch.einsum("ckj,njc->nkc", mixer, rows + token)
        refined: Tensor = mixed + self.mlp(mixed)
        return refined


class KeptColumns(NamedTuple):
    """The columns of a block's logits that refinement may choose.

    Attributes:
        logits: `[num_reqs, num_drafts, num_kept]`, of the backbone.
        ids: int64 of the same shape, ascending, which column each is; None where all are kept.
    """

    logits: Tensor
    ids: Tensor | None

    @classmethod
    def of(cls, logits: Tensor, num_kept: int) -> KeptColumns:
        """The highest columns of logits `[num_reqs, num_drafts, vocab_size]`; 0 keeps all."""
        if not 0 < num_kept < logits.shape[-1]:
            return cls(logits, None)
        # By id, so that equal scores go to the smallest one here and in the whole vocabulary.
        ids = logits.topk(num_kept, dim=-1).indices.sort(dim=-1).values
        return cls(logits.gather(-1, ids), ids)

    def tokens(self, scores: Tensor) -> Tensor:
        """int64 `[num_reqs, num_drafts]`: the columns where scores, as of `logits`, are highest."""
        best = scores.argmax(-1)
        return best if self.ids is None else self.ids.gather(-1, best[..., None])[..., 0]

    def spread(self, scores: Tensor, vocab_size: int) -> Tensor:
        """Scores `[num_reqs, num_drafts, vocab_size]`, -inf in columns that are not kept."""
        if self.ids is None:
            return scores
        everything = scores.new_full((*scores.shape[:-1], vocab_size), -torch.inf)
        return everything.scatter_(-1, self.ids, scores)


def refinements(
    refiner: Refiner,
    hidden: Tensor,
    kept: KeptColumns,
    anchors: Tensor,
    before_anchors: Tensor,
    *,
    num_passes: int,
) -> Iterator[Tensor]:
    """The scores after each pass; the next pass reads their highest columns as tokens.

    All rows of a pass read the tokens of the pass before. After pass k the first k tokens are those
    that one would get one after another.

    Args:
        refiner: with its mixer folded.
        hidden: `[num_reqs, num_drafts + 1, hidden_size]`, rows of the backbone.
        kept: logits of the rows behind the anchor.
        anchors: int64 `[num_reqs]`.
        before_anchors: int64 `[num_reqs]`, what the anchor's row takes for the token before it.
        num_passes: at least 1.

    Yields:
        Scores of the kept columns, in the dtype of their logits.
    """
    rows = refiner.rows(hidden)
    readout = None if kept.ids is None else refiner.readout.weight[kept.ids]
    tokens = kept.tokens(kept.logits)
    for _ in range(num_passes):
        previous = torch.cat((before_anchors[:, None], anchors[:, None], tokens[:, :-1]), dim=1)
        states = refiner(rows, previous)[:, 1:]
        if readout is None:
            scores = kept.logits + refiner.readout(states)
        else:
            scores = kept.logits + (readout @ states[..., None])[..., 0]
        tokens = kept.tokens(scores)
        yield scores
