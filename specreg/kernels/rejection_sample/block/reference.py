"""Method `block` in torch: the specification, and what CPU users run.

Works through the steps of all requests side by side with the chance of each prefix, remembers the
last one that passes, and draws at the end. Rows behind a block's end are looked at only for NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.reference import clean_logits_reference
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.draws.reference import (
    draw_reference,
    excess_reference,
    fraction_reference,
    residual_sums_reference,
)
from specreg.kernels.rejection_sample.rows.reference import (
    DraftProbs,
    Rows,
    accept_uniforms,
    chunks,
    largest,
    log_total,
    num_unusable_rows,
    passes,
    row_counts,
)

__all__ = ["block_sample_reference"]


@dataclass
class _Rounds:
    """Where each request of a batch stands, `[num_reqs]` each.

    Attributes:
        goes_on: bool, the block has not ended.
        log_chance: fp32, log of the chance P of the prefix so far.
        stop: int64, length of the longest prefix that passed.
        weight: fp32, P of that prefix.
    """

    goes_on: Tensor
    log_chance: Tensor
    stop: Tensor
    weight: Tensor


def block_sample_reference(batch: RejectionBatch) -> RejectionOutput:
    """The torch twin of method `block`. Any device; asks the host which requests go on."""
    counts = row_counts(batch)
    output = RejectionOutput.empty(batch.draft_tokens)
    output.sampled.fill_(-1)
    output.num_nans.copy_(num_unusable_rows(batch, counts))
    zero = torch.zeros_like(counts)
    rounds = _Rounds(counts > 0, zero.float(), zero, torch.ones_like(counts).float())
    for step in range(batch.num_rows):
        reqs = (rounds.goes_on & (counts > step)).nonzero().squeeze(1)
        for chunk in chunks(reqs, batch.vocab_size):
            rows = Rows.read(batch, chunk, counts[chunk], torch.full_like(chunk, step))
            _advance(rounds, chunk, rows, step)
    for chunk in chunks((counts > 0).nonzero().squeeze(1), batch.vocab_size):
        stop = rounds.stop[chunk]
        rows = Rows.read(batch, chunk, counts[chunk], stop)
        output.sampled[chunk, stop] = _token(rows, rounds.weight[chunk])
    steps = torch.arange(batch.num_rows - 1, device=counts.device)
    is_kept = steps < rounds.stop[:, None]
    output.sampled[:, :-1] = torch.where(is_kept, batch.draft_tokens, output.sampled[:, :-1])
    output.num_sampled.copy_(torch.where(counts > 0, rounds.stop + 1, 0))
    return output


def _advance(rounds: _Rounds, reqs: Tensor, rows: Rows, step: int) -> None:
    """Decide on the prefix before `step`, then lengthen it by the draft of `step`."""
    log_chance, probs = rounds.log_chance[reqs], DraftProbs.read(rows)
    masses = rows.target.masses(rows.inverse)
    is_end = ~probs.is_usable
    if step > 0:
        uniforms, chance = accept_uniforms(rows, back=1), log_chance.exp()
        mass = _mass_left(rows, probs, masses, chance)
        whole = mass + (1 - chance)
        is_passed = (uniforms * whole < mass) | (whole <= 0)
        is_passed = torch.where(is_end, passes(uniforms.log(), log_chance), is_passed)
        is_passed |= rows.is_greedy  # a greedy request gets here by its argmaxes
        rounds.stop[reqs] = torch.where(is_passed, step, rounds.stop[reqs])
        rounds.weight[reqs] = torch.where(is_passed, chance, rounds.weight[reqs])
    log_ratio = rows.log_prob(masses) - probs.log_q
    rounds.log_chance[reqs] = (log_chance + log_ratio).clamp(max=0)
    is_argmax = rows.draft == largest(rows)
    rounds.goes_on[reqs] = torch.where(rows.is_greedy, is_argmax, probs.is_usable)


def _mass_left(rows: Rows, probs: DraftProbs, masses: Tensor, chance: Tensor) -> Tensor:
    """S: fp32 `[n]`, what the draft distribution of the row leaves of p times the chance."""
    log_p = rows.log_prob(masses)
    left = chance * (1 - log_p.exp()).clamp(min=0)
    chosen = (probs.is_usable & ~probs.is_one_hot & ~rows.is_greedy).nonzero().squeeze(1)
    if not chosen.numel():
        return left
    assert rows.cache is not None
    only, top, totals = rows.only(chosen), rows.target.peak.amax(1), log_total(masses)
    args = (only, probs.only(chosen), top[chosen], totals[chosen], chance[chosen])
    if rows.cache.layout is DraftLogitsLayout.TOP_K:
        left[chosen] = _mass_left_by_candidates(*args)
    else:
        left[chosen] = fraction_reference(residual_sums_reference(excess_reference(*args)))
    return left


def _mass_left_by_candidates(
    rows: Rows, probs: DraftProbs, top: Tensor, log_totals: Tensor, chance: Tensor
) -> Tensor:
    """S from the candidates of the cells: outside of them all of p is left."""
    assert rows.cache is not None
    assert rows.cache.ids is not None
    ids = rows.cache.ids[probs.row, probs.step].long()
    q_logits = clean_logits_reference(rows.cache.logits[probs.row, probs.step])
    q = (q_logits * probs.inverse[:, None] - probs.logsumexp[:, None]).exp()
    logits = rows.target.logits.flatten(1).gather(1, ids.clamp(min=0))
    p = ((logits - top[:, None]) * rows.inverse[:, None] - log_totals[:, None]).exp()
    p, q = torch.where(ids >= 0, p, 0.0), torch.where(ids >= 0, q, 0.0)
    outside = (chance * (1 - fraction_reference(p))).clamp(min=0)
    return outside + fraction_reference((chance[:, None] * p - q).clamp(min=0))


def _token(rows: Rows, weight: Tensor) -> Tensor:
    """int64 `[n]`, the token behind the kept drafts."""
    tokens = largest(rows)
    drawn = (~rows.is_greedy).nonzero().squeeze(1)
    if drawn.numel():
        only = rows.only(drawn)
        masses, probs = only.target.masses(only.inverse), DraftProbs.read(only)
        tokens[drawn] = draw_reference(only, masses, probs, weight[drawn])
    return tokens
