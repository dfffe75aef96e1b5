"""Method `synthetic` in torch: the specification, and what CPU users run."""

from __future__ import annotations

import torch

from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.draws.reference import draw_reference
from specreg.kernels.rejection_sample.rows.reference import (
    DraftProbs,
    Rows,
    accept_uniforms,
    chunks,
    largest,
    num_unusable_rows,
    row_counts,
)

__all__ = ["synthetic_sample_reference"]


def synthetic_sample_reference(batch: RejectionBatch) -> RejectionOutput:
    """The torch twin of method `synthetic`. Any device; asks the host which requests go on."""
    rates = batch.acceptance_rates
    assert rates is not None
    counts = row_counts(batch)
    output = RejectionOutput.empty(batch.draft_tokens)
    output.sampled.fill_(-1)
    output.num_sampled.zero_()
    output.num_nans.copy_(num_unusable_rows(batch, counts))
    # A last row judges no draft.
    rates = torch.nn.functional.pad(rates, (0, 1))
    before = torch.nn.functional.pad(rates[:-1], (1, 0), value=1.0)
    goes_on = counts > 0
    for step in range(batch.num_rows):
        reqs = (goes_on & (counts > step)).nonzero().squeeze(1)
        for chunk in chunks(reqs, batch.vocab_size):
            rows = Rows.read(batch, chunk, counts[chunk], torch.full_like(chunk, step))
            is_accepted = accept_uniforms(rows) * before[step] < rates[step]
            is_accepted &= rows.draft >= 0
            tokens = torch.where(is_accepted, rows.draft, largest(rows))
            drawn = (~is_accepted & ~rows.is_greedy).nonzero().squeeze(1)
            if drawn.numel():
                tokens[drawn] = _draw(rows.only(drawn))
            output.sampled[chunk, step] = tokens
            output.num_sampled[chunk] = step + 1
            goes_on[chunk] = is_accepted
    return output


def _draw(rows: Rows) -> torch.Tensor:
    """int64 `[n]`, drawn from the target whatever was drafted."""
    masses = rows.target.masses(rows.inverse)
    probs = DraftProbs.read(rows)
    probs.is_usable.zero_()
    return draw_reference(rows, masses, probs, torch.ones_like(rows.inverse))
