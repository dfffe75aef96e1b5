"""Verification with static shapes, which a CUDA graph can hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsCache
from specreg.rejection_sampler import VerifyInputs
from specreg.runtime.batch import Batch
from specreg.runtime.cuda_graphs import CapturedFunction, GraphSizes
from specreg.runtime.slot_state import SlotState
from specreg.runtime.target import Target
from specreg.runtime.verifier import Verified, Verifier

__all__ = ["PaddedVerifier"]


class PaddedVerifier:
    """Head and rejection sampler over `num_speculative_tokens + 1` rows a request.

    Rows behind a batch's last logits row hold what an earlier batch left there; no op reads them.

    Args:
        target: scores the hidden states.
        verifier: decides.
        state: sampling parameters by slot.
        draft_logits: what this rank keeps of the draft distributions.
        num_speculative_tokens: K.
        sizes: what batches are padded to; not empty.
        pool: of the graphs' memory.

    Attributes:
        decide: what is captured.
    """

    def __init__(
        self,
        target: Target,
        verifier: Verifier,
        state: SlotState,
        draft_logits: DraftLogitsCache | None,
        num_speculative_tokens: int,
        sizes: GraphSizes,
        pool: Any,
    ) -> None:
        self._target, self._verifier, self._state = target, verifier, state
        self._draft_logits = draft_logits
        self._rows_per_req = num_speculative_tokens + 1
        num_reqs = sizes.sizes[-1]
        num_rows = num_reqs * self._rows_per_req
        device = target.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._hidden = zeros(num_rows, target.hidden_size, dtype=target.dtype)
        self._draft_tokens = zeros(num_reqs, num_speculative_tokens)
        self._idx_mapping, self._positions = zeros(num_reqs), zeros(num_reqs)
        self._cu_num_logits = zeros(num_reqs + 1)
        self._expanded_idx_mapping = zeros(num_rows)
        self.decide = CapturedFunction("verification", self._decide, sizes, pool)

    def __call__(self, batch: Batch, hidden: Tensor) -> Verified:
        """Decide a batch in which no request has cut-offs, processors or log probabilities to tell.

        Does not synchronise with the host.

        Args:
            batch: of one of the sizes.
            hidden: `[num_tokens, hidden_size]` of the target's final states.
        """
        num_reqs, num_logits = len(batch.slots), len(batch.logits_indices)
        torch.index_select(hidden, 0, batch.logits_indices, out=self._hidden[:num_logits])
        self._draft_tokens[:num_reqs] = batch.draft_tokens
        self._idx_mapping[:num_reqs] = batch.idx_mapping_device
        self._positions[:num_reqs] = batch.positions
        self._cu_num_logits[: num_reqs + 1] = batch.cu_num_logits_device
        self._expanded_idx_mapping.fill_(-1)
        self._expanded_idx_mapping[:num_logits] = batch.expanded_idx_mapping
        sampled, num_sampled, num_nans, num_usable = self.decide(num_reqs)
        nothing = sampled.new_zeros(num_reqs, 0)
        return Verified(sampled, num_sampled, num_nans, num_usable, nothing)

    def _decide(self, num_reqs: int) -> list[Tensor]:
        num_rows = num_reqs * self._rows_per_req
        state = self._state
        return self._verifier.decide(
            VerifyInputs(
                target_logits=self._target.compute_logits(self._hidden[:num_rows]),
                draft_tokens=self._draft_tokens[:num_reqs],
                idx_mapping=self._idx_mapping[:num_reqs],
                expanded_idx_mapping=self._expanded_idx_mapping[:num_rows],
                cu_num_logits=self._cu_num_logits[: num_reqs + 1],
                positions=self._positions[:num_reqs],
                temperature=state.temperature,
                seeds=state.seeds,
                top_k=state.top_k,
                top_p=state.top_p,
                min_p=state.min_p,
                has_cutoffs=False,
                draft_logits=self._draft_logits,
            )
        )
