"""The logits processors of a run, and what each owned slot asks of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specreg.kernels.common.upload import upload
from specreg.logits_processors import (
    AllowedTokenBitmask,
    AllowedTokenIds,
    LogitBias,
    LogitsProcessor,
    Penalties,
)
from specreg.ownership import Shard
from specreg.runtime.step import Admission, ScheduledRow, decode_masks

__all__ = ["SlotProcessors"]


class SlotProcessors:
    """Grammar masks, allowed ids, bias and penalties, applied in this order.

    Keeps state for the slots that this rank verifies, and only where a request asks for something.

    Args:
        vocab_size: columns of the logits.
        device: of the logits.
        shard: this rank among the owners of requests.
    """

    def __init__(self, vocab_size: int, device: torch.device, shard: Shard) -> None:
        self._device = device
        self._shard = shard
        self._bitmask = AllowedTokenBitmask()
        self._allowed_ids = AllowedTokenIds(device)
        self._bias = LogitBias(device)
        self._penalties = Penalties(vocab_size, device)
        self._processors: tuple[LogitsProcessor, ...] = (
            self._bitmask,
            self._allowed_ids,
            self._bias,
            self._penalties,
        )

    def admit(self, admission: Admission) -> None:
        """Take over what the request that got the slot asks for."""
        slot = admission.slot
        if not self._shard.owns(slot):
            return
        if admission.allowed_token_ids is not None:
            self._allowed_ids.set(slot, admission.allowed_token_ids)
        if admission.logit_bias:
            self._bias.set(slot, dict(admission.logit_bias))
        if admission.penalties is not None:
            repetition, presence, frequency = admission.penalties
            self._penalties.set(
                slot,
                prompt=admission.prompt_token_ids,
                output=admission.output_token_ids,
                repetition=repetition,
                presence=presence,
                frequency=frequency,
            )

    def release(self, slot: int) -> None:
        """Forget the slot."""
        for processor in self._processors:
            processor.release(slot)

    def begin(self, rows: Sequence[ScheduledRow]) -> None:
        """Take over the masks of a step."""
        for row in rows:
            if row.bitmasks and self._shard.owns(row.slot):
                words = torch.frombuffer(decode_masks(row.bitmasks), dtype=torch.int32)
                self._bitmask.set(row.slot, upload(words.view(row.num_logits, -1), self._device))

    def works_for(self, slot: int) -> bool:
        """Whether the slot's rows are changed. Host state only."""
        return any(slot in processor.slots for processor in self._processors)

    def apply(
        self,
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        draft_tokens: Tensor,
    ) -> None:
        """Change `logits` in place; see `LogitsProcessor.apply`."""
        for processor in self._processors:
            processor.apply(logits, expanded_idx_mapping, expanded_local_pos, draft_tokens)

    def count(self, slots: Sequence[int], sampled: Tensor) -> None:
        """Tell penalties what a step has emitted: int64 `[num_reqs, n]`, -1 padded."""
        self._penalties.count(slots, sampled)
