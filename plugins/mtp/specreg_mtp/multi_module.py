"""Several MTP modules, one a step, each over all rows of the window."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specreg.drafters.shifted_rows import shift_rows
from specreg.speculator import (
    DraftOutput,
    KVRows,
    ProposeInputs,
    SpeculatorBase,
    SpeculatorContext,
    TargetView,
)
from specreg.weights import module_bytes
from specreg_mtp.checkpoint import MTPCheckpoint
from specreg_mtp.window import DraftWindow

__all__ = ["MultiModuleSpeculator"]


class MultiModuleSpeculator(SpeculatorBase):
    """Drafts K tokens with K modules; positions do not advance from one to the next.

    On the row of position p module s reads the token of p + 1 + s and what module s - 1 gave for
    the same row; on the last row, P, it predicts the token of P + 2 + s. On rows behind P - s it
    has read drafts, so its keys and values there may be wrong after verification: every round runs
    the last K - 1 rows of the round before again.

    Args:
        context: of the run.
        checkpoint: where the modules are.
    """

    def __init__(self, context: SpeculatorContext, checkpoint: MTPCheckpoint) -> None:
        super().__init__(context)
        self.checkpoint = checkpoint
        self.tensors_of_target = checkpoint.tensors_of_target

    def load_model(self, target: TargetView) -> None:
        """Load the modules. Raises `CheckpointError`."""
        context = self.context
        self.drafter = self.checkpoint.load(target)
        self.window = DraftWindow(
            context.config.max_num_seqs,
            self.num_speculative_tokens,
            target.hidden_size,
            context.dtype,
            context.device,
        )

    def weight_bytes(self) -> int:
        return module_bytes(self.drafter)

    def prepare(self, inputs: ProposeInputs) -> None:
        """Fill the window; run all modules over the rows of a prompt that lie before it."""
        shifted = shift_rows(inputs, self.context.max_model_len)
        self._run_before_window(inputs, shifted.kv_rows.slots)
        self.window.fill(inputs, shifted, self.context.max_model_len)

    def _run_before_window(self, inputs: ProposeInputs, slots: Tensor) -> None:
        """Rows whose tokens are known to every module: the prompt goes on for long enough."""
        assert self.kv is not None
        assert inputs.hidden_states is not None
        offsets = _offsets_before(inputs.query_start_loc, self.window.width)
        if offsets[-1] == 0:
            return
        rows = _rows_before(inputs, self.window.width, offsets[-1])
        addresses = KVRows.causal(slots[rows], inputs.positions[rows], offsets)
        states = inputs.hidden_states[rows]
        for step in range(self.num_speculative_tokens):
            ids = inputs.input_ids[rows + 1 + step]
            states = self.drafter.run(step, ids, states, addresses, self.kv).to_feed

    def draft(self, num_reqs_padded: int) -> DraftOutput:
        """Run the window through one module after the other; sample at its last row."""
        assert self.kv is not None
        assert self.sampler is not None
        window, n = self.window, num_reqs_padded
        rows, last = window.rows(n), window.last_positions[:n]
        ids, states = window.token_ids[:n], window.states[:n].flatten(0, 1)
        drafts: list[Tensor] = []
        for step in range(self.num_speculative_tokens):
            if step > 0:
                known = window.known_ids[:n, step - 1]
                newest = torch.where(known >= 0, known, drafts[-1].clamp(min=0))
                ids = torch.cat((ids[:, 1:], newest[:, None]), dim=1)
            given = self.drafter.run(step, ids.flatten(), states, rows, self.kv)
            to_score = given.to_score[window.width - 1 :: window.width]
            logits = self.drafter.score(step, to_score)
            drafts.append(self.sampler.sample(logits, step, last + step + 2))
            states = given.to_feed
        tokens = torch.stack(drafts, dim=1)
        is_beyond = last >= self.context.max_model_len
        return DraftOutput(tokens.masked_fill(is_beyond[:, None], -1))

    def release(self, req_state_idx: int) -> None:
        """Forget the rows that are kept for the slot."""
        self.window.release(req_state_idx)


def _offsets_before(query_start_loc: tuple[int, ...], width: int) -> tuple[int, ...]:
    """Offsets of the requests in rows of which each has lost its last `width`."""
    counts = (max(0, end - start - width) for start, end in pairwise(query_start_loc))
    return tuple(accumulate(counts, initial=0))


def _rows_before(inputs: ProposeInputs, width: int, num_rows: int) -> Tensor:
    """Packed rows of the batch, the last `width` of each request left out."""
    starts = inputs.query_start_loc_on_device()
    counts = (starts.diff() - width).clamp(min=0)
    requests = torch.arange(inputs.num_reqs, device=starts.device)
    request = torch.repeat_interleave(requests, counts, output_size=num_rows)
    before = counts.cumsum(0) - counts
    return starts[request] + torch.arange(num_rows, device=starts.device) - before[request]
