"""The rows of one drafting pass: of each request its newest token and mask tokens behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.nn.rotary import Rotary
from specreg.speculator import KVRows

__all__ = ["Block"]


class Block:
    """`num_rows` rows a request, packed request after request; row 0 is the anchor.

    Everything is computed from tensors of fixed address without a host synchronisation, and so may
    be captured in a CUDA graph.

    Args:
        slots: int64 `[num_reqs]`, request state index; -1 makes all rows of the request inert.
        anchor_positions: int64 `[num_reqs]`, position of each row 0.
        num_rows: of a request.
        max_model_len: rows at or beyond it are inert.
        rotary: of the layers.

    Attributes:
        num_rows: of a request.
        positions: int64 `[num_reqs * num_rows]`.
        slots: int64 of the same shape; -1 on inert rows.
        angles: rotary angles of the rows.
    """

    def __init__(
        self,
        slots: Tensor,
        anchor_positions: Tensor,
        num_rows: int,
        max_model_len: int,
        rotary: Rotary,
    ) -> None:
        offsets = torch.arange(num_rows, device=slots.device)
        positions = anchor_positions[:, None] + offsets
        self.num_rows = num_rows
        self.positions = positions.flatten()
        self.slots = torch.where(positions < max_model_len, slots[:, None], -1).flatten()
        self.angles = rotary(self.positions)
        ends = (anchor_positions + num_rows).clamp(max=max_model_len)
        self._ends = ends[:, None].expand_as(positions).flatten()
        self._query_start_loc = tuple(range(0, len(self.positions) + 1, num_rows))
        self._rows: dict[tuple[bool, int | None], KVRows] = {}

    def rows(self, *, is_causal: bool, window: int | None) -> KVRows:
        """Addresses of the rows, and what a layer lets each see.

        Args:
            is_causal: nothing behind the row; else the whole block.
            window: `KVView.attend` hides keys that lie this far or further before the row; unless
                the layer is causal, those that lie as far behind it are hidden here.
        """
        key = is_causal, None if is_causal else window
        if key not in self._rows:
            kv_lens = self.positions + 1
            if not is_causal:
                kv_lens = self._ends
                if window is not None:
                    kv_lens = torch.minimum(kv_lens, self.positions + window)
            self._rows[key] = KVRows(self.slots, self.positions, kv_lens, self._query_start_loc)
        return self._rows[key]
