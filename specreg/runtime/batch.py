"""A step plan as packed tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specreg.runtime.step import ScheduledRow
from specreg.runtime.transfer import to_device
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
        idx_mapping: int64 `[num_reqs]`, on the host and (`_device`) on the device; -1 is padding.
        cu_num_logits: int64 `[num_reqs + 1]`, on the host and (`_device`) on the device.
        expanded_idx_mapping: int64 `[num_logits]`, request state index of each logits row.
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
    cu_num_logits_device: Tensor
    expanded_idx_mapping: Tensor
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
        """Build the tensors of a non-empty list of rows: one copy, no host synchronisation."""
        ids: list[int] = []
        positions: list[int] = []
        token_slots: list[int] = []
        starts, cu_num_logits = [0], [0]
        logits_indices: list[int] = []
        expanded: list[int] = []
        drafts: list[int] = []
        lookahead: list[int] = []
        for row in rows:
            num_tokens = len(row.token_ids)
            ids += row.token_ids
            positions += range(row.start, row.start + num_tokens)
            token_slots += [row.slot] * num_tokens
            starts.append(len(ids))
            logits_indices += range(len(ids) - row.num_logits, len(ids))
            cu_num_logits.append(len(logits_indices))
            verified = row.token_ids[num_tokens - row.num_drafts :]
            drafts += verified + [-1] * (num_speculative_tokens - row.num_drafts)
            expanded += [row.slot] * row.num_logits
            lookahead += row.next_prefill_tokens
        slots = [row.slot for row in rows]
        lists = {
            "input_ids": ids,
            "token_slots": token_slots,
            "token_positions": positions,
            "slots": slots,
            "cu_num_logits": cu_num_logits,
            "expanded": expanded,
            "logits_indices": logits_indices,
            "drafts": drafts,
            "positions": [r.start + len(r.token_ids) - r.num_logits + 1 for r in rows],
            "num_logits": [row.num_logits for row in rows],
            "num_draft_tokens": [row.num_draft_tokens for row in rows],
            "lookahead": lookahead,
        }
        on_device = dict(zip(lists, to_device(list(lists.values()), device), strict=True))
        return cls(
            slots=slots,
            input_ids=on_device["input_ids"],
            kv_rows=KVRows.causal(
                on_device["token_slots"], on_device["token_positions"], tuple(starts)
            ),
            query_start_loc=tuple(starts),
            idx_mapping=torch.tensor(slots),
            idx_mapping_device=on_device["slots"],
            cu_num_logits=torch.tensor(cu_num_logits),
            cu_num_logits_device=on_device["cu_num_logits"],
            expanded_idx_mapping=on_device["expanded"],
            logits_indices=on_device["logits_indices"],
            draft_tokens=on_device["drafts"].view(len(rows), num_speculative_tokens),
            positions=on_device["positions"],
            num_logits=on_device["num_logits"],
            num_draft_tokens=on_device["num_draft_tokens"],
            next_prefill_tokens=on_device["lookahead"]
            .view(len(rows), len(rows[0].next_prefill_tokens))
            .T,
            max_num_tokens=max(row.start + len(row.token_ids) for row in rows),
        )
