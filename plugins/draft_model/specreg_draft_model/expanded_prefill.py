"""The rows that bring a standalone drafter's KV up to date with what verification decided."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.speculator import KVRows, ProposeInputs

__all__ = ["ExpandedPrefill", "expand_prefill"]


class ExpandedPrefill(NamedTuple):
    """One more row a request than the target read.

    Attributes:
        input_ids: int64 `[num_tokens + num_reqs]`: a request's accepted tokens, its newest token,
            then one inert row a rejected token.
        kv_rows: addresses of the same rows; slot -1 where a row is inert.
        last_rows: int64 `[num_reqs]`, row of each request's newest token.
        last_positions: int64 `[num_reqs]`, its position.
    """

    input_ids: Tensor
    kv_rows: KVRows
    last_rows: Tensor
    last_positions: Tensor


def expand_prefill(inputs: ProposeInputs, max_model_len: int) -> ExpandedPrefill:
    """Rows `[accepted][newest][inert x rejected]` for each request, without host synchronisation.

    Row i holds the token at position i: a standalone drafter has no token shift. A request in the
    middle of its prompt has no newest token, so its extra row is inert as well.
    """
    device = inputs.input_ids.device
    starts = inputs.query_start_loc_on_device()
    num_reqs = inputs.num_reqs
    requests = torch.arange(num_reqs, device=device)
    out_starts = starts + torch.arange(num_reqs + 1, device=device)
    num_rows = inputs.num_tokens + num_reqs
    request = torch.repeat_interleave(requests, out_starts.diff(), output_size=num_rows)
    offset = torch.arange(num_rows, device=device) - out_starts[request]

    num_kept = starts.diff() - inputs.num_rejected
    is_newest = (offset == num_kept[request]) & (inputs.num_sampled[request] > 0)
    source = (starts[request] + offset).clamp(max=inputs.num_tokens - 1)
    tokens = torch.where(is_newest, inputs.last_sampled[request], inputs.input_ids[source])
    positions = inputs.positions[starts[:-1]][request] + offset
    is_live = ((offset < num_kept[request]) | is_newest) & (positions < max_model_len)
    last_rows = out_starts[:-1] + num_kept
    return ExpandedPrefill(
        input_ids=torch.where(is_live, tokens, 0),
        kv_rows=KVRows.causal(
            torch.where(is_live, inputs.idx_mapping[request], -1),
            positions,
            tuple(start + row for row, start in enumerate(inputs.query_start_loc)),
        ),
        last_rows=last_rows,
        last_positions=positions[last_rows],
    )
