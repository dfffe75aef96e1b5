"""A number added to the logits of named tokens."""

from __future__ import annotations

from collections.abc import Mapping, Set

import torch
from torch import Tensor

from specreg.logits_processors.protocol import rows_of_slots

__all__ = ["LogitBias"]


class LogitBias:
    """`logits[t] += bias[t]`, in every row of the request; see `LogitsProcessor`.

    Args:
        device: of the logits.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._biases: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def slots(self) -> Set[int]:
        return self._biases.keys()

    def set(self, slot: int, bias: Mapping[int, float]) -> None:
        """Give `slot` a bias by token id, each below the vocabulary size."""
        ids = torch.tensor(list(bias.keys()), dtype=torch.int64, device=self._device)
        values = torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device)
        self._biases[slot] = ids, values

    def release(self, slot: int) -> None:
        self._biases.pop(slot, None)

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        for slot, rows in rows_of_slots(expanded_idx_mapping, self._biases):
            ids, values = self._biases[slot]
            of_request = logits[rows]
            of_request.index_add_(1, ids, values.expand(len(of_request), -1))
