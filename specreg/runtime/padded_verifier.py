"""Verification with static shapes, which a CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsCache
from specreg.rejection_sampler import VerifyInputs
from specreg.runtime.cuda_graphs import CapturedFunction, GraphPool, GraphSizes
from specreg.runtime.slot_state import SlotState
from specreg.runtime.target import Target
from specreg.runtime.verifier import Verified, Verifier

__all__ = ["PaddedHead", "PaddedVerifier"]


class PaddedHead:
    """The target's head over hidden states of fixed address.

    Rows behind a batch's last logits row hold what an earlier batch left there; no op reads them.

    Args:
        target: scores the hidden states.
        num_rows: the most.
    """

    def __init__(self, target: Target, num_rows: int) -> None:
        self._target = target
        self._hidden = torch.zeros(
            num_rows, target.hidden_size, dtype=target.dtype, device=target.device
        )

    def fill(self, hidden: Tensor, logits_indices: Tensor) -> None:
        """Take over the rows `logits_indices [num_logits]` of `hidden`."""
        torch.index_select(hidden, 0, logits_indices, out=self._hidden[: len(logits_indices)])

    def logits(self, num_rows: int) -> Tensor:
        """`[num_rows, vocab_size]`; one collective when there is more than one shard."""
        return self._target.compute_logits(self._hidden[:num_rows])


class PaddedVerifier:
    """The rejection sampler over `num_speculative_tokens + 1` logits rows a request.

    Args:
        logits: of a number of rows: `[num_rows, >= vocab_size]`, from tensors of fixed address.
        verifier: decides.
        state: sampling parameters by slot.
        draft_logits: what this rank keeps of the draft distributions.
        num_speculative_tokens: K.
        sizes: what batches are padded to; not empty.
        pool: of the graphs.

    Attributes:
        sizes: as given.
        decide: what is captured, `logits` included.
    """

    def __init__(
        self,
        logits: Callable[[int], Tensor],
        verifier: Verifier,
        state: SlotState,
        draft_logits: DraftLogitsCache | None,
        num_speculative_tokens: int,
        sizes: GraphSizes,
        pool: GraphPool,
    ) -> None:
        self._logits, self._verifier, self._state = logits, verifier, state
        self._draft_logits = draft_logits
        self._rows_per_req = num_speculative_tokens + 1
        num_reqs = sizes.sizes[-1]
        num_rows = num_reqs * self._rows_per_req

        def full(value: int, *shape: int) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=state.seeds.device)

        self._draft_tokens = full(-1, num_reqs, num_speculative_tokens)
        self._idx_mapping, self._positions = full(-1, num_reqs), full(0, num_reqs)
        self._cu_num_logits = full(0, num_reqs + 1)
        self._expanded_idx_mapping = full(-1, num_rows)
        self.sizes = sizes
        self.decide = CapturedFunction("verification", self._decide, sizes, pool)

    def warm_up(self) -> None:
        """Record every size, from the largest down; nothing may have been verified before."""
        for size in reversed(self.sizes.sizes):
            self.decide(size)

    def __call__(
        self,
        draft_tokens: Tensor,
        idx_mapping: Tensor,
        cu_num_logits: Tensor,
        positions: Tensor,
        expanded_idx_mapping: Tensor,
    ) -> Verified:
        """Decide a batch in which no request has cut-offs, processors or log probabilities to tell.

        Does not synchronise with the host.

        Args:
            draft_tokens: int64 `[num_reqs, num_speculative_tokens]`, of no more requests than the
                largest size.
            idx_mapping, positions: int64 `[num_reqs]`.
            cu_num_logits: int64 `[num_reqs + 1]`.
            expanded_idx_mapping: int64 `[num_logits]`.
        """
        num_reqs, num_logits = len(idx_mapping), len(expanded_idx_mapping)
        size = self.sizes.padded(num_reqs)
        self._draft_tokens[:num_reqs] = draft_tokens
        self._idx_mapping[num_reqs:size] = -1
        self._idx_mapping[:num_reqs] = idx_mapping
        self._positions[:num_reqs] = positions
        self._cu_num_logits[num_reqs:size] = cu_num_logits[-1]
        self._cu_num_logits[size] = cu_num_logits[-1]
        self._cu_num_logits[: num_reqs + 1] = cu_num_logits
        self._expanded_idx_mapping.fill_(-1)
        self._expanded_idx_mapping[:num_logits] = expanded_idx_mapping
        decided = [output[:num_reqs] for output in self.decide(size)]
        sampled, num_sampled, num_nans, num_usable = decided
        nothing = sampled.new_zeros(num_reqs, 0)
        return Verified(sampled, num_sampled, num_nans, num_usable, nothing)

    def _decide(self, num_reqs: int) -> list[Tensor]:
        num_rows = num_reqs * self._rows_per_req
        state = self._state
        return self._verifier.decide(
            VerifyInputs(
                target_logits=self._logits(num_rows),
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
