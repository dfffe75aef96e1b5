"""All tokens of every live request on the device, for speculators that look them up."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.runtime.batch import Batch

__all__ = ["TokenHistory"]


class TokenHistory:
    """Tokens by slot and position. A step writes what it reads, then what it has emitted.

    Nothing is ever cleared: a request reads only the positions that it has written, and a rejected
    draft's place is taken by the token that was emitted instead.

    Args:
        max_num_seqs: slots.
        max_model_len: positions a request may have.
        device: of the tokens.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self._max_model_len = max_model_len
        # The last column takes what lies behind a request's end.
        self._tokens = torch.zeros(
            max_num_seqs, max_model_len + 1, dtype=torch.int32, device=device
        )

    @staticmethod
    def num_bytes(max_num_seqs: int, max_model_len: int) -> int:
        """Bytes of a history, known before it is allocated."""
        return max_num_seqs * (max_model_len + 1) * torch.int32.itemsize

    def update(self, batch: Batch, sampled: Tensor, num_sampled: Tensor) -> Tensor:
        """Write a step, and return what is known of its requests. Waits for nothing.

        Args:
            batch: of the step.
            sampled: int64 `[num_reqs, n]`, emitted tokens, -1 padded.
            num_sampled: int64 `[num_reqs]`.

        Returns:
            int64 `[num_reqs, max_len]`, -1 padded: prompt so far and output, what was just emitted
            included.
        """
        slots = batch.idx_mapping_device
        self._write(batch.kv_rows.slots, batch.kv_rows.positions, batch.input_ids)
        steps = torch.arange(sampled.shape[1], device=sampled.device)
        is_token = steps < num_sampled.unsqueeze(1)
        places = torch.where(is_token, batch.positions.unsqueeze(1) + steps, self._max_model_len)
        self._write(slots.unsqueeze(1).expand_as(places), places, sampled)
        lengths = torch.where(batch.num_logits > 0, batch.positions, batch.positions - 1)
        lengths = torch.where(slots >= 0, lengths + num_sampled, 0)
        max_len = min(batch.max_num_tokens + 1, self._max_model_len)
        tokens = self._tokens[slots, :max_len].to(torch.int64)
        columns = torch.arange(max_len, device=tokens.device)
        return tokens.masked_fill(columns >= lengths.unsqueeze(1), -1)

    def _write(self, slots: Tensor, positions: Tensor, tokens: Tensor) -> None:
        places = positions.clamp(max=self._max_model_len)
        places = torch.where(slots < 0, self._max_model_len, places)  # padding
        self._tokens[slots, places] = tokens.to(torch.int32)
