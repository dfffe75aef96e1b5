"""The loop of drafters that read the target's state once and their own states from then on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.drafters.shifted_rows import shift_rows
from specreg.speculator import (
    DraftOutput,
    KVRows,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
)

__all__ = ["DraftStates", "SelfFeedingSpeculator"]


class DraftStates(NamedTuple):
    """What one pass gives for each row.

    Attributes:
        to_score: `[n, width]`, what the head reads.
        to_feed: `[n, state_size]`, what the next pass reads in the place of the target's state.
    """

    to_score: Tensor
    to_feed: Tensor


class SelfFeedingSpeculator(SpeculatorBase):
    """Drafts K tokens with K passes: the first over the target's new rows, then one row a draft.

    On the row of position p a drafter reads the target's state of p and the token of p + 1, and
    predicts the token of p + 2. Draft s >= 1 reads draft s - 1 and the state that the pass before
    it gave, at position P + s, where P is the position of the target's last valid row. Keys and
    values of those guessed states are written again from true ones by the next round's first pass.

    A subclass loads its modules, calls `make_buffers` when it knows their widths, and writes
    `read_target`, `run` and `score`.
    """

    def __init__(self, context: SpeculatorContext) -> None:
        super().__init__(context)
        max_num_seqs, device = context.config.max_num_seqs, context.device
        self._slots = torch.full((max_num_seqs,), -1, device=device)
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._last = DraftStates(torch.empty(0), torch.empty(0))

    def make_buffers(self, score_size: int, state_size: int) -> None:
        """Allocate what passes hand to each other, `[max_num_seqs, size]` each."""
        num_rows, context = len(self._slots), self.context
        self._last = DraftStates(
            *(
                torch.zeros(num_rows, size, dtype=context.dtype, device=context.device)
                for size in (score_size, state_size)
            )
        )

    def read_target(self, inputs: ProposeInputs) -> Tensor:
        """States `[num_tokens, state_size]` of the target's rows, as the first pass reads them."""
        raise NotImplementedError

    def run(self, token_ids: Tensor, states: Tensor, rows: KVRows) -> DraftStates:
        """One pass of the drafter over rows; writes its keys and values to `self.kv`.

        Args:
            token_ids: int64 `[n]`, target ids; 0 on rows whose slot is -1.
            states: `[n, state_size]`.
            rows: addresses of the rows.
        """
        raise NotImplementedError

    def score(self, to_score: Tensor) -> Tensor:
        """Logits of `[n, width]` states: a column each id, or each of `target_ids`."""
        raise NotImplementedError

    def prepare(self, inputs: ProposeInputs) -> None:
        """Run the first pass; keep the states of each request's last valid row."""
        shifted = shift_rows(inputs, self.context.max_model_len)
        states = self.run(shifted.token_ids, self.read_target(inputs), shifted.kv_rows)
        num_reqs = inputs.num_reqs
        for kept, new in zip(self._last, states, strict=True):
            kept[:num_reqs] = new[shifted.last_rows]
        self._positions[:num_reqs] = shifted.last_positions
        self._slots[:num_reqs] = inputs.sample_idx_mapping

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Sample draft 0 from the kept states, then run one pass a further draft."""
        assert self.sampler is not None
        slots, last = self._slots[:num_reqs_padded], self._positions[:num_reqs_padded]
        to_score, to_feed = (kept[:num_reqs_padded] for kept in self._last)
        drafts: list[Tensor] = []
        for step in range(self.num_speculative_tokens):
            if step > 0:
                positions = last + step
                live = torch.where(positions < self.context.max_model_len, slots, -1)
                rows = KVRows.causal(live, positions, tuple(range(num_reqs_padded + 1)))
                to_score, to_feed = self.run(drafts[-1].clamp(min=0), to_feed, rows)
            drafts.append(self.sampler.sample(self.score(to_score), step, last + step + 2))
        tokens = torch.stack(drafts, dim=1)
        read = last[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        return DraftOutput(tokens.masked_fill(read >= self.context.max_model_len, -1))
