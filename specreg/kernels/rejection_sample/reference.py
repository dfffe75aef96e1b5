"""`rejection_sample` in torch: the specification, and what CPU users run.

Works through the steps of all requests side by side and leaves a request at its first rejection, so
rows behind it are looked at only for NaN. Maxima and integer sums are exact in any order, and the
rest is elementwise: tokens do not depend on the batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.draws.reference import draw_reference
from specreg.kernels.rejection_sample.rows.reference import (
    DraftProbs,
    Rows,
    accept_uniforms,
    chunks,
    largest,
    num_unusable_rows,
    passes,
    row_counts,
)

__all__ = ["rejection_sample_reference"]


def rejection_sample_reference(batch: RejectionBatch) -> RejectionOutput:
    """The torch twin of method `standard`. Any device; asks the host which requests go on."""
    counts = row_counts(batch)
    output = RejectionOutput.empty(batch.draft_tokens)
    output.sampled.fill_(-1)
    output.num_sampled.zero_()
    output.num_nans.copy_(num_unusable_rows(batch, counts))
    goes_on = counts > 0
    for step in range(batch.num_rows):
        reqs = (goes_on & (counts > step)).nonzero().squeeze(1)
        for chunk in chunks(reqs, batch.vocab_size):
            rows = Rows.read(batch, chunk, counts[chunk], torch.full_like(chunk, step))
            tokens, is_accepted = _verify(rows)
            output.sampled[chunk, step] = tokens
            output.num_sampled[chunk] = step + 1
            goes_on[chunk] = is_accepted
    return output


def _verify(rows: Rows) -> tuple[Tensor, Tensor]:
    """The token that each request emits at this step, and whether that is its draft."""
    tokens = largest(rows)
    is_accepted = tokens == rows.draft
    if bool(rows.is_greedy.all()):
        return tokens, is_accepted

    masses = rows.target.masses(rows.inverse)
    probs = DraftProbs.read(rows)
    log_ratio = rows.log_prob(masses) - probs.log_q
    is_kept = probs.is_usable & passes(accept_uniforms(rows).log(), log_ratio)
    is_accepted = torch.where(rows.is_greedy, is_accepted, is_kept)
    tokens = torch.where(rows.is_greedy, tokens, rows.draft)

    rest = (~is_accepted & ~rows.is_greedy).nonzero().squeeze(1)
    if rest.numel():
        weight = torch.ones_like(rows.inverse[rest])
        tokens[rest] = draw_reference(rows.only(rest), masses[rest], probs.only(rest), weight)
    return tokens, is_accepted
