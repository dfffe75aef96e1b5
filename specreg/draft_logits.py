"""The draft-logits cache: what a rank keeps of the draft distributions until they are verified.

`DraftLogitsCache` owns the memory, allocated once at its final size; `DraftLogitsView` is what
kernels take. A cell is a (row, step): the row of a request is `req_state_idx // num_shards` on its
owner, the step is the draft token's index in the proposal. Beside its logits a cell carries the
temperature that its token was drawn at and the logsumexp of the stored bits over that temperature;
verification takes the draft distribution from these alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_vocab import check_target_ids, target_to_draft_table
from specreg.errors import TensorError
from specreg.kernels.common.reference import owned_row_reference
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.ownership import Shard

if TYPE_CHECKING:
    from specreg.policy import DraftLogitsPlan

__all__ = ["CELL_BARE", "CELL_EMPTY", "CELL_STORED", "DraftLogitsCache", "DraftLogitsView"]


class DraftLogitsCache:
    """One rank's draft logits. Made by `allocate`; never resized.

    Args:
        logits: `[rows, num_speculative_tokens, width]`; kept, not copied.
        shard, layout, vocab_size: as below.
        num_candidates: candidates a step of a drafter that scores no others; then the logits are
            set to -inf, once, and the ids of the last candidates are kept.
        target_ids: int64 `[num_draft_columns]`, a map that `check_target_ids` has passed.

    Attributes:
        shard: this rank's share; a request's row is `shard.row(req_state_idx)` where `shard.owns`
            it.
        layout: what a cell holds.
        vocab_size: columns of the target's vocabulary.
        target_ids: the target id of each draft column; None where they are the same.
        logits, temperature, logsumexp, ids, target_to_draft: as in `DraftLogitsView`.
        may_have_bare_cells: whether `mark_bare` was ever called. A host that captures verification
            in a CUDA graph before that sets it first, or the graph will not look for bare cells.
    """

    def __init__(
        self,
        logits: Tensor,
        shard: Shard,
        layout: DraftLogitsLayout,
        vocab_size: int,
        *,
        num_candidates: int | None = None,
        target_ids: Tensor | None = None,
    ) -> None:
        rows, num_steps, _ = logits.shape
        self.shard = shard
        self.layout = layout
        self.vocab_size = vocab_size
        self.target_ids = target_ids
        self.may_have_bare_cells = False
        self.logits = logits
        self.temperature = logits.new_zeros(rows, num_steps, dtype=torch.float32)
        self.logsumexp = torch.zeros_like(self.temperature)
        # The last row is nobody's: `begin` clears it in place of rows that other ranks own.
        self._states = logits.new_zeros(rows + 1, num_steps, dtype=torch.uint8)
        self.ids: Tensor | None = None
        if num_candidates is not None:
            shape = (rows, num_steps, num_candidates)
            self.ids = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
            logits.fill_(-torch.inf)
        self.target_to_draft: Tensor | None = None
        if layout is DraftLogitsLayout.DRAFT_VOCAB and target_ids is not None:
            self.target_to_draft = target_to_draft_table(target_ids, vocab_size)
        self._view = DraftLogitsView(
            logits=logits,
            temperature=self.temperature,
            logsumexp=self.logsumexp,
            state=self.state,
            shard=shard,
            layout=layout,
            vocab_size=vocab_size,
            ids=self.ids,
            target_to_draft=self.target_to_draft,
        )

    @classmethod
    def allocate(
        cls,
        plan: DraftLogitsPlan,
        device: torch.device | str,
        target_ids: Tensor | None = None,
    ) -> DraftLogitsCache | None:
        """Allocate what `plan` asks for, for the rank `plan.shard_idx`; None when it has no cache.

        Logits of whole rows are not initialised: a cell's state says whether they mean anything.
        Those of candidates start as -inf, and absent ids as -1. Synchronises with the host when it
        checks `target_ids`.

        Args:
            plan: the final one.
            device: where to.
            target_ids: integers `[draft_vocab_size]`, the target id of each column of a reduced
                draft head; a drafter that scores candidates names target ids itself and needs none.

        Raises:
            TensorError: a reduced vocabulary without a map, or a map that does not fit.
        """
        if not plan.has_cache:
            return None
        assert plan.layout is not None
        if target_ids is not None or plan.num_candidates is None:
            target_ids = check_target_ids(
                target_ids,
                vocab_size=plan.vocab_size,
                draft_vocab_size=plan.draft_vocab_size,
                device=device,
            )
        return cls(
            torch.empty(plan.shape, dtype=getattr(torch, str(plan.dtype)), device=device),
            Shard(plan.num_shards, plan.shard_idx),
            plan.layout,
            plan.vocab_size,
            num_candidates=plan.num_candidates,
            target_ids=target_ids,
        )

    @property
    def num_shards(self) -> int:
        """Ranks that share the requests; 1 when every rank keeps all of them."""
        return self.shard.num_shards

    @property
    def state(self) -> Tensor:
        """uint8 `[rows, num_speculative_tokens]`; see `DraftLogitsView`."""
        return self._states[:-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the logits array alone; equals the plan's `bytes_per_rank`."""
        return self.logits.nbytes

    @property
    def side_nbytes(self) -> int:
        """Bytes of statistics, states, ids and table; equals the plan's `side_bytes_per_rank`."""
        tensors = (self.temperature, self.logsumexp, self._states, self.ids, self.target_to_draft)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def view(self) -> DraftLogitsView:
        """The cache as kernels take it, the same object each time; its tensors alias the cache."""
        return self._view

    def begin(self, idx_mapping: Tensor) -> None:
        """Start a proposal: empty the cells of every request in `idx_mapping` that this rank owns.

        No host synchronisation; may be captured in a CUDA graph.

        Args:
            idx_mapping: int64 `[num_reqs]`, request state indices on the cache's device; -1 is
                inert.

        Raises:
            TensorError: not int64, or on another device.
        """
        self._states.index_fill_(0, self._rows_of(idx_mapping, "begin"), CELL_EMPTY)

    def mark_bare(self, idx_mapping: Tensor, steps: Tensor, temperature: Tensor) -> None:
        """Declare cells whose logits were stored bare, by another engine's kernel or a fused one.

        Verification computes their statistics with one read of the owned rows. No host
        synchronisation; may be captured in a CUDA graph.

        Args:
            idx_mapping: int64 `[n]`, request state index of each cell; -1, and requests of other
                ranks, are inert.
            steps: int64 `[n]`, index of each token in its proposal.
            temperature: fp32 `[max_num_seqs]` by slot, what the tokens were drawn at; exactly 0
                means argmax.

        Raises:
            TensorError: `idx_mapping` is not int64, or on another device.
        """
        self.may_have_bare_cells = True
        rows, num_steps = self._rows_of(idx_mapping, "mark_bare"), self._states.shape[1]
        cells = rows * num_steps + steps
        # Nobody's row has no temperature, so both are scattered beside the cache and then selected.
        is_marked = torch.zeros_like(self._states, dtype=torch.bool)
        is_marked.view(-1).index_fill_(0, cells, True)
        drawn_at = self.temperature.new_zeros(self._states.shape)
        drawn_at.view(-1).index_copy_(0, cells, temperature[idx_mapping.clamp(min=0)])
        torch.where(is_marked[:-1], drawn_at[:-1], self.temperature, out=self.temperature)
        self._states.masked_fill_(is_marked, CELL_BARE)

    def release(self, req_state_idx: int) -> None:
        """Empty the cells of a slot that is free again; nothing where another rank owns it."""
        if self.shard.owns(req_state_idx):
            self._states[self.shard.row(req_state_idx)] = CELL_EMPTY

    def _rows_of(self, idx_mapping: Tensor, method: str) -> Tensor:
        """Row of each request; nobody's for padding and for requests of other ranks."""
        if idx_mapping.dtype != torch.int64 or idx_mapping.device != self._states.device:
            raise TensorError(
                "requests cannot be found in the draft-logits cache",
                where=f"DraftLogitsCache.{method}(idx_mapping)",
                got=f"{idx_mapping.dtype} on {idx_mapping.device}; allowed: torch.int64 on "
                f"{self._states.device}",
                fix="pass idx_mapping.to(device, torch.int64)",
            )
        rows = owned_row_reference(idx_mapping, self.shard.num_shards, self.shard.shard_idx)
        return torch.where(rows < 0, self._states.shape[0] - 1, rows)
