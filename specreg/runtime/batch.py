"""A step plan as packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specreg.runtime.step import ScheduledRow
from specreg.speculator import KVRows

__all__ = ["Batch"]


@dataclass
class Batch:
    """One step's rows, packed request by request.

    Attributes:
        slots: the rows' slots, on the host.
        input_ids: int64 `[num_tokens]`.
        kv_rows: addresses of the tokens.
        query_start_loc: `num_reqs + 1` host offsets into the tokens.
        idx_mapping: int64 `[num_reqs]`, on the host and (`_device`) on the device.
        cu_num_logits: int64 `[num_reqs + 1]`, on the host.
        logits_indices: int64 `[num_logits]`, packed index of each logits row's token.
        draft_tokens: int64 `[num_reqs, num_speculative_tokens]`, -1 padded, on the device.
        positions: int64 `[num_reqs]`, position of the first token that is decided.
        num_logits: int64 `[num_reqs]`.
        num_draft_tokens: int64 `[num_reqs]`, wanted from the next proposal.
        next_prefill_tokens: int64 `[lookahead, num_reqs]`.
        max_num_tokens: tokens of the longest request, drafts included.
    """

    slots: list[int]
    input_ids: Tensor
    kv_rows: KVRows
    query_start_loc: tuple[int, ...]
    idx_mapping: Tensor
    idx_mapping_device: Tensor
    cu_num_logits: Tensor
    logits_indices: Tensor
    draft_tokens: Tensor
    positions: Tensor
    num_logits: Tensor
    num_draft_tokens: Tensor
    next_prefill_tokens: Tensor
    max_num_tokens: int

    @classmethod
    def pack(
        cls, rows: Sequence[ScheduledRow], num_speculative_tokens: int, device: torch.device
    ) -> Batch:
        """Build the tensors of a non-empty list of rows."""
        ids: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        starts, cu_num_logits = [0], [0]
        logits_indices: list[int] = []
        drafts: list[list[int]] = []
        for row in rows:
            num_tokens = len(row.token_ids)
            ids += row.token_ids
            positions += range(row.start, row.start + num_tokens)
            token_slots += [row.slot] * num_tokens
            starts.append(len(ids))
            logits_indices += range(len(ids) - row.num_logits, len(ids))
            cu_num_logits.append(len(logits_indices))
            verified = row.token_ids[num_tokens - row.num_drafts :]
            drafts.append(verified + [-1] * (num_speculative_tokens - row.num_drafts))

        def on_device(values: Sequence[object]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)

        slots = [row.slot for row in rows]
        idx_mapping = torch.tensor(slots)
        return cls(
            slots=slots,
            input_ids=on_device(ids),
            kv_rows=KVRows.causal(on_device(token_slots), on_device(positions), tuple(starts)),
            query_start_loc=tuple(starts),
            idx_mapping=idx_mapping,
            idx_mapping_device=idx_mapping.to(device, non_blocking=True),
            cu_num_logits=torch.tensor(cu_num_logits),
            logits_indices=on_device(logits_indices),
            draft_tokens=on_device(drafts).view(len(rows), num_speculative_tokens),
            positions=on_device([r.start + len(r.token_ids) - r.num_logits + 1 for r in rows]),
            num_logits=on_device([row.num_logits for row in rows]),
            num_draft_tokens=on_device([row.num_draft_tokens for row in rows]),
            next_prefill_tokens=on_device([row.next_prefill_tokens for row in rows]).T,
            max_num_tokens=max(row.start + len(row.token_ids) for row in rows),
        )
