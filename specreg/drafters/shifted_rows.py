"""The rows that pair each state of the target with the token that followed it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.speculator import KVRows, ProposeInputs

__all__ = ["ShiftedRows", "shift_rows"]


class ShiftedRows(NamedTuple):
    """The target's rows of this step, tokens shifted left by one.

    Attributes:
        token_ids: int64 `[num_tokens]`: on the row of position p the token of position p + 1, on a
            request's last valid row its newest token; 0 where there is none.
        kv_rows: addresses of the same rows; slot -1 on rows that verification rejected, on padding
            and at or beyond `max_model_len`.
        last_rows: int64 `[num_reqs]`, each request's last valid row.
        last_positions: int64 `[num_reqs]`, its position P: the newest token is at P + 1.
    """

    token_ids: Tensor
    kv_rows: KVRows
    last_rows: Tensor
    last_positions: Tensor


def shift_rows(inputs: ProposeInputs, max_model_len: int) -> ShiftedRows:
    """Rows for a drafter whose row p holds (state of p, token of p + 1), without a host sync.

    In the middle of a prompt the last token is the next one of the prompt, so the drafter needs a
    look-ahead of 1.
    """
    device = inputs.input_ids.device
    starts = inputs.query_start_loc_on_device()
    num_reqs, num_rows = inputs.num_reqs, inputs.num_tokens
    request = torch.repeat_interleave(
        torch.arange(num_reqs, device=device), starts.diff(), output_size=num_rows
    )
    row = torch.arange(num_rows, device=device)
    last_rows = starts[1:] - 1 - inputs.num_rejected
    newest = torch.where(inputs.num_sampled > 0, inputs.last_sampled, inputs.next_prefill_tokens[0])
    following = inputs.input_ids[(row + 1).clamp(max=num_rows - 1)]
    token_ids = torch.where(row == last_rows[request], newest[request], following)
    is_live = (row <= last_rows[request]) & (inputs.positions < max_model_len)
    return ShiftedRows(
        token_ids=torch.where(is_live, token_ids, 0).clamp(min=0),
        kv_rows=KVRows.causal(
            torch.where(is_live, inputs.idx_mapping[request], -1),
            inputs.positions,
            inputs.query_start_loc,
        ),
        last_rows=last_rows,
        last_positions=inputs.positions[last_rows],
    )
