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
from specreg.errors import InternalError, TensorError
from specreg.kernels.common.reference import owned_row_reference
from specreg.kernels.common.view import CELL_BARE, CELL_EMPTY, CELL_STORED, DraftLogitsView
from specreg.ownership import Shard

if TYPE_CHECKING:
    from specreg.policy import DraftLogitsPlan

__all__ = ["CELL_BARE", "CELL_EMPTY", "CELL_STORED", "DraftLogitsCache", "DraftLogitsView"]


class DraftLogitsCache:
    """One rank's draft logits. Made by `allocate`; never resized.

    Attributes:
        shard: this rank's share; a request's row is `shard.row(req_state_idx)` where `shard.owns`
            it.
        layout: what a cell holds.
        vocab_size: columns of the target's vocabulary.
        logits, temperature, logsumexp: as in `DraftLogitsView`.
    """

    def __init__(
        self, logits: Tensor, shard: Shard, layout: DraftLogitsLayout, vocab_size: int
    ) -> None:
        rows, num_steps, _ = logits.shape
        self.shard = shard
        self.layout = layout
        self.vocab_size = vocab_size
        self.logits = logits
        self.temperature = logits.new_zeros(rows, num_steps, dtype=torch.float32)
        self.logsumexp = torch.zeros_like(self.temperature)
        # The last row is nobody's: `begin` clears it in place of rows that other ranks own.
        self._states = logits.new_zeros(rows + 1, num_steps, dtype=torch.uint8)

    @classmethod
    def allocate(cls, plan: DraftLogitsPlan, device: torch.device | str) -> DraftLogitsCache | None:
        """Allocate what `plan` asks for, for the rank `plan.shard_idx`; None when it has no cache.

        The logits are not initialised: a cell's state says whether they mean anything.
        """
        if not plan.has_cache:
            return None
        if plan.layout is not DraftLogitsLayout.DENSE:
            got = plan.layout.value if plan.layout else None
            raise InternalError(
                "the draft-logits cache cannot be allocated",
                where="DraftLogitsPlan.layout",
                got=f"{got}; allowed: {DraftLogitsLayout.DENSE.value}",
                fix="set draft_logits_layout to dense",
            )
        logits = torch.empty(plan.shape, dtype=getattr(torch, str(plan.dtype)), device=device)
        return cls(logits, Shard(plan.num_shards, plan.shard_idx), plan.layout, plan.vocab_size)

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
        """Bytes of statistics and states; equals the plan's `side_bytes_per_rank`."""
        return self.temperature.nbytes + self.logsumexp.nbytes + self._states.nbytes

    def view(self) -> DraftLogitsView:
        """The cache as kernels take it. Its tensors alias the cache; views never go stale."""
        return DraftLogitsView(
            logits=self.logits,
            temperature=self.temperature,
            logsumexp=self.logsumexp,
            state=self.state,
            shard=self.shard,
            layout=self.layout,
            vocab_size=self.vocab_size,
        )

    def begin(self, idx_mapping: Tensor) -> None:
        """Start a proposal: empty the cells of every request in `idx_mapping` that this rank owns.

        No host synchronisation; may be captured in a CUDA graph.

        Args:
            idx_mapping: int64 `[num_reqs]`, request state indices on the cache's device; -1 is
                inert.

        Raises:
            TensorError: not int64, or on another device.
        """
        if idx_mapping.dtype != torch.int64 or idx_mapping.device != self._states.device:
            raise TensorError(
                "a proposal cannot begin",
                where="DraftLogitsCache.begin(idx_mapping)",
                got=f"{idx_mapping.dtype} on {idx_mapping.device}; allowed: torch.int64 on "
                f"{self._states.device}",
                fix="pass idx_mapping.to(device, torch.int64)",
            )
        rows = owned_row_reference(idx_mapping, self.shard.num_shards, self.shard.shard_idx)
        nobody = self._states.shape[0] - 1
        self._states.index_fill_(0, torch.where(rows < 0, nobody, rows), CELL_EMPTY)

    def release(self, req_state_idx: int) -> None:
        """Empty the cells of a slot that is free again; nothing where another rank owns it."""
        if self.shard.owns(req_state_idx):
            self._states[self.shard.row(req_state_idx)] = CELL_EMPTY
