"""The draft-logits cache as ops take it; `specreg.draft_logits` allocates one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.ownership import Shard

__all__ = ["CELL_BARE", "CELL_EMPTY", "CELL_STORED", "DraftLogitsView"]

CELL_EMPTY = 0  # nothing stored for this proposal
CELL_STORED = 1  # logits with their statistics
CELL_BARE = 2  # logits whose statistics are still to be computed


@dataclass(frozen=True)
class DraftLogitsView:
    """A rank's cache as kernels see it: tensors that alias the cache, never copies.

    The tensors may be views of larger buffers: rows and steps have any strides, only the last
    dimension of `logits` must be contiguous.

    Attributes:
        logits: `[rows, num_speculative_tokens, width]` pre-temperature logits, any float dtype.
        temperature: fp32 `[rows, num_speculative_tokens]`; exactly 0 means that the token was
            the argmax.
        logsumexp: fp32 of the same shape, of the stored bits over the temperature; undefined where
            that is 0.
        state: uint8 of the same shape: `CELL_EMPTY`, `CELL_STORED` or `CELL_BARE`.
        shard: whose rows these are.
        layout: what a cell holds.
        vocab_size: columns of the target's vocabulary.
        ids: int32 `[rows, num_speculative_tokens, num_candidates]` of candidate writers.
        target_to_draft: int32 `[vocab_size]` of a reduced vocabulary; -1 where the draft
            probability is 0.
    """

    logits: Tensor
    temperature: Tensor
    logsumexp: Tensor
    state: Tensor
    shard: Shard
    layout: DraftLogitsLayout
    vocab_size: int
    ids: Tensor | None = None
    target_to_draft: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this rank."""
        return self.logits.shape[0]

    @property
    def num_speculative_tokens(self) -> int:
        """Steps of a row."""
        return self.logits.shape[1]
