"""The rows that every module reads again, a fixed number a request."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.drafters.shifted_rows import ShiftedRows
from specreg.speculator import KVRows, ProposeInputs

__all__ = ["DraftWindow"]

NO_POSITION = -1


class DraftWindow:
    """The last 2K rows of each request: up to K - 1 kept ones, then those of this round.

    After a round the rows of the last K - 1 positions are kept by slot, because modules behind the
    first have read guesses there; the next round runs them again on what verification decided.
    Rows are right-aligned: column 2K - 1 is the last valid row, whatever was accepted.

    All tensors have a fixed address. What is kept lies by slot, with one slot more than there are
    for padding rows to write to.

    Args:
        max_num_seqs: slots, and batch rows.
        num_steps: K, at least 2.
        state_size: of the target's states.
        dtype, device: of the states.

    Attributes:
        width: rows of a request, 2K.
        token_ids: int64 `[max_num_seqs, width]` by batch row, as the first module reads them.
        states: `[max_num_seqs, width, state_size]`.
        slots, positions: int64 `[max_num_seqs, width]`; slot -1 on rows that do not exist.
        known_ids: int64 `[max_num_seqs, num_steps - 1]`, in the middle of a prompt the tokens that
            later modules read on the last row; -1 where drafts take their place.
        last_positions: int64 `[max_num_seqs]`, position P of the last valid row.
    """

    def __init__(
        self,
        max_num_seqs: int,
        num_steps: int,
        state_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.width = 2 * num_steps
        self.num_kept = num_steps - 1

        def integers(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int64, device=device)

        self.token_ids = integers(max_num_seqs, self.width)
        self.positions = integers(max_num_seqs, self.width)
        self.slots = integers(max_num_seqs, self.width, value=-1)
        self.known_ids = integers(max_num_seqs, self.num_kept, value=-1)
        self.last_positions = integers(max_num_seqs)
        shape = (max_num_seqs, self.width, state_size)
        self.states = torch.zeros(shape, dtype=dtype, device=device)
        kept = (max_num_seqs + 1, self.num_kept)
        self._kept_ids = integers(*kept)
        self._kept_positions = integers(*kept, value=NO_POSITION)
        self._kept_states = torch.zeros(*kept, state_size, dtype=dtype, device=device)

    def fill(self, inputs: ProposeInputs, shifted: ShiftedRows, max_model_len: int) -> None:
        """Take the batch's newest rows and what is kept before them, then keep the newest.

        No host synchronisation. Rows of rejected drafts have no part in it.
        """
        assert inputs.hidden_states is not None
        n, device = inputs.num_reqs, inputs.input_ids.device
        starts = inputs.query_start_loc_on_device()[:-1, None]
        first = inputs.positions[starts]
        columns = torch.arange(self.width, device=device)
        positions = shifted.last_positions[:, None] - (self.width - 1) + columns
        is_new = positions >= first
        rows = torch.where(is_new, starts + positions - first, 0)

        slots = inputs.idx_mapping
        homes = torch.where(slots >= 0, slots, len(self._kept_ids) - 1)
        # Kept rows lie at consecutive positions, too.
        places = positions - self._kept_positions[homes, -1:] + self.num_kept - 1
        places = places.clamp(0, self.num_kept - 1)
        by_place = (homes[:, None], places)
        is_kept = ~is_new & (positions >= 0) & (self._kept_positions[by_place] == positions)

        is_live = (is_new | is_kept) & (slots >= 0)[:, None]
        ids = torch.where(is_new, shifted.token_ids[rows], self._kept_ids[by_place])
        new_states = inputs.hidden_states[rows]
        states = torch.where(is_new[..., None], new_states, self._kept_states[by_place])
        self.token_ids[:n] = torch.where(is_live, ids, 0)
        self.states[:n] = torch.where(is_live[..., None], states, 0)
        self.positions[:n] = positions.clamp(min=0)
        is_drafted = is_live & (positions < max_model_len)
        self.slots[:n] = torch.where(is_drafted, slots[:, None], -1)
        self.last_positions[:n] = shifted.last_positions
        ahead = torch.where(inputs.num_sampled > 0, -1, inputs.next_prefill_tokens)
        ahead = ahead[1 : self.num_kept + 1].T
        self.known_ids[:n] = -1
        self.known_ids[:n, : ahead.shape[1]] = ahead

        newest = slice(self.width - self.num_kept, None)
        self._kept_ids[homes] = self.token_ids[:n, newest]
        self._kept_states[homes] = self.states[:n, newest]
        kept = torch.where(is_live, positions, NO_POSITION)
        self._kept_positions[homes] = kept[:, newest]

    def rows(self, num_reqs: int) -> KVRows:
        """Addresses of the window's rows, a request's together."""
        offsets = tuple(range(0, (num_reqs + 1) * self.width, self.width))
        return KVRows.causal(
            self.slots[:num_reqs].flatten(), self.positions[:num_reqs].flatten(), offsets
        )

    def release(self, slot: int) -> None:
        """Forget what is kept for a slot."""
        self._kept_positions[slot] = NO_POSITION
