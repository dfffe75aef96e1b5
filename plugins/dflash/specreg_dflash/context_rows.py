"""The rows of a step whose states become context, and the token that each request goes on from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.speculator import KVRows, ProposeInputs

__all__ = ["ContextRows", "context_rows"]


class ContextRows(NamedTuple):
    """The target's rows of this step as context: each at its own position.

    Attributes:
        kv_rows: addresses; slot -1 on rows that verification rejected, on padding and at or beyond
            `max_model_len`.
        last_rows: int64 `[num_reqs]`, each request's last valid row; another request's where it has
            none.
        has_context: bool `[num_reqs]`, whether the request has a valid row.
        anchors: int64 `[num_reqs]`, the newest token, which the target has not read yet; 0 where
            the request drafts nothing.
        anchor_positions: int64 `[num_reqs]`, its position: behind the last valid row.
    """

    kv_rows: KVRows
    last_rows: Tensor
    has_context: Tensor
    anchors: Tensor
    anchor_positions: Tensor


def context_rows(inputs: ProposeInputs, max_model_len: int) -> ContextRows:
    """Tell the rows of a batch apart, without a host synchronisation."""
    device = inputs.input_ids.device
    starts = inputs.query_start_loc_on_device()
    num_rows = inputs.num_tokens
    request = torch.repeat_interleave(
        torch.arange(inputs.num_reqs, device=device), starts.diff(), output_size=num_rows
    )
    last_rows = starts[1:] - 1 - inputs.num_rejected
    is_valid = torch.arange(num_rows, device=device) <= last_rows[request]
    is_live = is_valid & (inputs.positions < max_model_len)
    return ContextRows(
        kv_rows=KVRows.causal(
            torch.where(is_live, inputs.idx_mapping[request], -1),
            inputs.positions,
            inputs.query_start_loc,
        ),
        last_rows=last_rows,
        has_context=(inputs.idx_mapping >= 0) & (last_rows >= starts[:-1]),
        anchors=torch.where(inputs.sample_idx_mapping >= 0, inputs.last_sampled, 0),
        anchor_positions=inputs.positions[last_rows] + 1,
    )
