"""What one call of `rejection_sample` works on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.view import DraftLogitsView

__all__ = ["RejectionBatch", "RejectionOutput"]


class RejectionOutput(NamedTuple):
    """What verification emits.

    Attributes:
        sampled: int64 `[num_reqs, num_speculative_tokens + 1]`: accepted drafts, then one token of
            the target; -1 behind it.
        num_sampled: int32 `[num_reqs]`; 0 for a request without logits rows and for a padding row.
        num_nans: int32 `[num_reqs]`, target logits rows of the request that held a NaN, or nothing
            above -inf.
    """

    sampled: Tensor
    num_sampled: Tensor
    num_nans: Tensor

    @classmethod
    def empty(cls, draft_tokens: Tensor) -> RejectionOutput:
        """Uninitialised outputs for `draft_tokens [num_reqs, num_speculative_tokens]`."""
        num_reqs, num_drafts = draft_tokens.shape
        device = draft_tokens.device
        return cls(
            torch.empty(num_reqs, num_drafts + 1, dtype=torch.int64, device=device),
            torch.empty(num_reqs, dtype=torch.int32, device=device),
            torch.empty(num_reqs, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class RejectionBatch:
    """The arguments of `rejection_sample`, checked."""

    target_logits: Tensor
    draft_tokens: Tensor
    idx_mapping: Tensor
    cu_num_logits: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor
    cache: DraftLogitsView | None
    vocab_size: int
    acceptance_rates: Tensor | None = None

    @property
    def num_reqs(self) -> int:
        """Batch rows, padding rows included."""
        return self.idx_mapping.shape[0]

    @property
    def num_rows(self) -> int:
        """Logits rows that a request has at most: a row a draft and one for the bonus token."""
        return self.draft_tokens.shape[1] + 1

    def requests(self, start: int, stop: int) -> RejectionBatch:
        """The batch rows `start .. stop - 1`, as views; logits rows keep their numbers."""
        return replace(
            self,
            draft_tokens=self.draft_tokens[start:stop],
            idx_mapping=self.idx_mapping[start:stop],
            cu_num_logits=self.cu_num_logits[start : stop + 1],
            positions=self.positions[start:stop],
        )
