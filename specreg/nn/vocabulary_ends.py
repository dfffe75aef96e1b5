"""The two ends of a drafter: token embedding and head, its own or the target's."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specreg.draft_vocab import check_target_ids
from specreg.errors import CheckpointError, TensorError
from specreg.speculator import TargetView

__all__ = ["VocabularyEnds"]

logger = logging.getLogger(__name__)

# Rows of the embedding compared at a time.
CHUNK_ROWS = 16_384


class VocabularyEnds(nn.Module):
    """Embeds target tokens and scores draft columns.

    Load it with the names `embed_tokens.weight`, `lm_head.weight` and `d2t`, all of which may be
    absent; then `attach` decides what is shared, the same way on every rank: from the file, and
    from embeddings, which are replicated.

    Args:
        vocab_size: rows of an own embedding.
        draft_vocab_size: columns of an own head; below `vocab_size` it comes with a map.
        hidden_size: of the drafter.
        where: of the checkpoint, for errors.
        logit_scale: factor on the logits.

    Attributes:
        target_ids: int64 `[draft_vocab_size]` on the CPU; None where column and id are the same.
    """

    absent: Mapping[str, str] = {
        "embed_tokens.weight": "shared with the target",
        "lm_head.weight": "shared with the target",
        "d2t": "the vocabulary is not reduced",
    }

    d2t: Tensor

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        hidden_size: int,
        where: str,
        *,
        logit_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size, device="meta")
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False, device="meta")
        self.register_buffer("d2t", torch.empty(draft_vocab_size, dtype=torch.int64, device="meta"))
        self.hidden_size, self.where, self.logit_scale = hidden_size, where, logit_scale
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size
        self.target_ids: Tensor | None = None
        self._target: TargetView | None = None

    def attach(self, target: TargetView) -> None:
        """Check what was loaded against the target, and share what is not there.

        An embedding that equals the target's is given up for it.

        Raises:
            CheckpointError: an embedding or a head that is neither there nor to be had from the
                target; a reduced vocabulary without a map; a vocabulary larger than the target's.
            TensorError: a map with ids that repeat or lie outside the target's vocabulary.
        """
        self._target = target
        if self.draft_vocab_size > target.vocab_size:
            self._refuse(
                "the drafter has a larger vocabulary than the target",
                f"draft_vocab_size {self.draft_vocab_size}; allowed: at most {target.vocab_size}",
            )
        if self.embed_tokens.weight.is_meta:
            if self.hidden_size != target.hidden_size:
                self._refuse(
                    "the drafter has no embedding and cannot share the target's",
                    f"no embed_tokens.weight, hidden size {self.hidden_size}; allowed: the tensor, "
                    f"or the target's hidden size {target.hidden_size}",
                )
        elif self.vocab_size < target.vocab_size:
            self._refuse(
                "the drafter cannot embed every token of the target",
                f"embed_tokens.weight of {self.vocab_size} rows; allowed: at least "
                f"{target.vocab_size}",
            )
        elif self._embeds_as_the_target(target):
            self.embed_tokens = nn.Embedding(self.vocab_size, self.hidden_size, device="meta")
        is_reduced = self.draft_vocab_size < target.vocab_size
        fits_head = not is_reduced and self.hidden_size == target.hidden_size
        if self.shares_head and not fits_head:
            self._refuse(
                "the drafter has no head and cannot share the target's",
                f"no lm_head.weight, {self.draft_vocab_size} columns of width "
                f"{self.hidden_size}; allowed: the tensor, or the target's "
                f"{target.vocab_size} columns of width {target.hidden_size}",
            )
        if is_reduced and self.d2t.is_meta:
            self._refuse(
                "a reduced draft vocabulary has no map into the target's",
                f"no d2t for {self.draft_vocab_size} columns; allowed: the tensor",
            )
        if not self.d2t.is_meta:
            self.target_ids = self._checked_map(target.vocab_size)

    @property
    def shares_embedding(self) -> bool:
        """Whether tokens are embedded by the target."""
        return self.embed_tokens.weight.is_meta

    @property
    def shares_head(self) -> bool:
        """Whether the target scores."""
        return self.lm_head.weight.is_meta

    def embed(self, token_ids: Tensor) -> Tensor:
        """`[n, hidden_size]` of target ids `[n]`."""
        assert self._target is not None
        if self.shares_embedding:
            return self._target.embed(token_ids)
        embedded: Tensor = self.embed_tokens(token_ids)
        return embedded

    def score(self, hidden: Tensor) -> Tensor:
        """Logits `[n, draft_vocab_size]` of `hidden [n, hidden_size]`, equal on all ranks."""
        assert self._target is not None
        if self.shares_head:
            logits = self._target.compute_logits(hidden)
        else:
            logits = F.linear(hidden, self.lm_head.weight)
        return logits if self.logit_scale == 1.0 else logits * self.logit_scale

    def _checked_map(self, vocab_size: int) -> Tensor | None:
        """The ids that the offsets stand for, on the CPU; None for those of the columns."""
        try:
            return check_target_ids(
                self.d2t.cpu() + torch.arange(self.draft_vocab_size),
                vocab_size=vocab_size,
                draft_vocab_size=self.draft_vocab_size,
                device="cpu",
            )
        except TensorError as error:
            raise TensorError(
                error.what,
                where=f"{self.where}, tensor 'd2t'",
                got=error.got,
                fix="use a drafter that was trained for this target; d2t holds offsets, the id of "
                "column j is j + d2t[j]",
            ) from error

    def _embeds_as_the_target(self, target: TargetView) -> bool:
        """Whether the own table holds what the target's embedding gives, bit for bit."""
        if self.hidden_size != target.hidden_size:
            return False
        table = self.embed_tokens.weight
        all_ids = torch.arange(target.vocab_size, device=table.device)
        for ids in torch.split(all_ids, CHUNK_ROWS):
            if not torch.equal(target.embed(ids), table[ids]):
                return False
        return True

    def _refuse(self, what: str, got: str) -> None:
        raise CheckpointError(
            what,
            where=self.where,
            got=got,
            fix="use a drafter that was trained for this target, with its config.json",
        )
