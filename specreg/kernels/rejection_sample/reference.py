"""`rejection_sample` in torch: the specification, and what CPU users run.

Works through the steps of all requests side by side and leaves a request at its first rejection, so
rows behind it are looked at only for NaN. Maxima and integer sums are exact in any order, sums of
fp32 run over one block of fixed size, and the rest is elementwise: tokens do not depend on the
batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specreg.kernels.common.reference import (
    clean_logits_reference,
    draw_index_reference,
    owned_row_reference,
    to_units_reference,
)
from specreg.kernels.common.view import CELL_STORED, DraftLogitsView
from specreg.kernels.draft_sample.reference import BLOCK_SIZE, MASS_BITS, Blocks
from specreg.kernels.random import (
    STREAM_ACCEPT,
    STREAM_BONUS,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    random_words_reference,
    uniform_reference,
)
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput

__all__ = ["rejection_sample_reference"]

# Logits worked on at a time: bounds the scratch and stays in the CPU's cache.
CHUNK_ELEMENTS = 2**20

# A residual of less mass than this is rounding: p and q are equal. It is asked for no more often
# than its mass says, so a draw from p in its place moves the law by less than this.
RESIDUAL_FLOOR = 2.0**-17

_LARGEST = torch.finfo(torch.float32).max


def rejection_sample_reference(batch: RejectionBatch) -> RejectionOutput:
    """The torch twin of method `standard`. Any device; asks the host which requests go on."""
    counts = batch.cu_num_logits.diff().clamp(max=batch.num_rows)
    counts = torch.where(batch.idx_mapping < 0, 0, counts)
    output = RejectionOutput.empty(batch.draft_tokens)
    output.sampled.fill_(-1)
    output.num_sampled.zero_()
    output.num_nans.copy_(_num_unusable_rows(batch, counts))
    goes_on = counts > 0
    for step in range(batch.num_rows):
        reqs = (goes_on & (counts > step)).nonzero().squeeze(1)
        for chunk in torch.split(reqs, max(1, CHUNK_ELEMENTS // max(batch.vocab_size, BLOCK_SIZE))):
            tokens, is_accepted = _verify(_Step.read(batch, chunk, counts[chunk], step))
            output.sampled[chunk, step] = tokens
            output.num_sampled[chunk] = step + 1
            goes_on[chunk] = is_accepted
    return output


def _num_unusable_rows(batch: RejectionBatch, counts: Tensor) -> Tensor:
    """Logits rows of each request with a NaN or nothing above -inf; one pass, as amax keeps NaN."""
    peaks = batch.target_logits[:, : batch.vocab_size].amax(1)
    is_unusable = torch.nn.functional.pad(peaks.isnan() | (peaks == -torch.inf), (0, 1))
    steps = torch.arange(batch.num_rows, device=counts.device)
    rows = torch.where(
        steps < counts[:, None], batch.cu_num_logits[:-1, None] + steps, len(is_unusable) - 1
    )
    return is_unusable[rows].sum(1)


@dataclass(frozen=True)
class _Step:
    """One target row a request, and the draft token that it judges.

    Attributes:
        index: of the step in its round.
        vocab_size: columns that are tokens.
        target: cleaned target logits.
        inverse: fp32 `[n]`, one over the temperature; 1 where that is 0.
        is_greedy: bool `[n]`.
        draft: int64 `[n]`; -1 where there is none, or it is no token of the vocabulary.
        num_drafts: int64 `[n]`, drafts of the request.
        slots, seeds, positions: int64 `[n]`; the position is that of the token decided here.
        cache: as of the batch.
    """

    index: int
    vocab_size: int
    target: Blocks
    inverse: Tensor
    is_greedy: Tensor
    draft: Tensor
    num_drafts: Tensor
    slots: Tensor
    seeds: Tensor
    positions: Tensor
    cache: DraftLogitsView | None

    @classmethod
    def read(cls, batch: RejectionBatch, reqs: Tensor, counts: Tensor, index: int) -> _Step:
        """Step `index` of the requests `reqs`, which have `counts` logits rows."""
        slots = batch.idx_mapping[reqs]
        temperature = batch.temperature[slots]
        draft = torch.full_like(slots, -1)
        if index < batch.draft_tokens.shape[1]:
            draft = torch.where(index < counts - 1, batch.draft_tokens[reqs, index], -1)
            draft = torch.where(draft < batch.vocab_size, draft, -1).clamp(min=-1)
        rows = batch.cu_num_logits[reqs] + index
        return cls(
            index=index,
            vocab_size=batch.vocab_size,
            target=Blocks.cut(batch.target_logits[rows, : batch.vocab_size]),
            inverse=_inverse(temperature),
            is_greedy=temperature == 0,
            draft=draft,
            num_drafts=counts - 1,
            slots=slots,
            seeds=batch.seeds[slots],
            positions=batch.positions[reqs] + index,
            cache=batch.cache,
        )

    def only(self, rows: Tensor) -> _Step:
        """Some of the requests; the logits are copied."""
        kept = {
            name: getattr(self, name)[rows]
            for name in (
                "inverse",
                "is_greedy",
                "draft",
                "num_drafts",
                "slots",
                "seeds",
                "positions",
            )
        }
        target = Blocks(*(field[rows] for field in vars(self.target).values()))
        return replace(self, target=target, **kept)

    def words(self, stream: Tensor | int) -> Tensor:
        """int64 `[4, n]`, random words of a stream."""
        return random_words_reference(self.seeds, self.positions, self.index, stream)


def _verify(step: _Step) -> tuple[Tensor, Tensor]:
    """The token that each request emits at this step, and whether that is its draft."""
    block = step.target.peak.argmax(1)
    tokens = block * BLOCK_SIZE + step.target.of(block).argmax(1)
    is_accepted = tokens == step.draft
    if bool(step.is_greedy.all()):
        return tokens, is_accepted

    masses = step.target.masses(step.inverse)
    draft_probs = _DraftProbs.read(step)
    log_p = _log_prob(step, masses)
    log_u = uniform_reference(step.words(STREAM_ACCEPT)[0]).log()
    passes = draft_probs.is_usable & (log_p > log_u + draft_probs.log_q)
    is_accepted = torch.where(step.is_greedy, is_accepted, passes)
    tokens = torch.where(step.is_greedy, tokens, step.draft)

    rest = (~is_accepted & ~step.is_greedy).nonzero().squeeze(1)
    if rest.numel():
        tokens[rest] = _draw(step.only(rest), masses[rest], draft_probs.only(rest))
    return tokens, is_accepted


@dataclass(frozen=True)
class _DraftProbs:
    """What the cache says of the draft tokens of a step.

    Attributes:
        is_usable: bool `[n]`; False where there is no draft, or its distribution is unknown or
            gives it probability 0: whatever was drafted there was not drawn from what is stored.
        is_one_hot: bool `[n]`, the draft was an argmax.
        log_q: fp32 `[n]`, log-probability of the draft.
        row: int64 `[n]`, cache row; -1 where this rank has none.
        inverse, logsumexp: fp32 `[n]`, of the cell.
    """

    is_usable: Tensor
    is_one_hot: Tensor
    log_q: Tensor
    row: Tensor
    inverse: Tensor
    logsumexp: Tensor

    @classmethod
    def read(cls, step: _Step) -> _DraftProbs:
        """One element a draft."""
        cache = step.cache
        has_draft = step.draft >= 0
        if cache is None or step.index >= cache.num_speculative_tokens:
            zero = torch.zeros_like(step.inverse)
            return cls(has_draft, torch.ones_like(has_draft), zero, step.slots, zero, zero)
        row = owned_row_reference(step.slots, cache.shard.num_shards, cache.shard.shard_idx)
        has_draft &= row >= 0
        cell = (row.clamp(min=0), step.index)
        temperature, logsumexp = cache.temperature[cell], cache.logsumexp[cell]
        inverse, is_one_hot = _inverse(temperature), temperature == 0
        logits = clean_logits_reference(cache.logits[(*cell, step.draft.clamp(min=0))])
        log_q = torch.where(is_one_hot, 0.0, logits * inverse - logsumexp)
        is_usable = has_draft & (cache.state[cell] == CELL_STORED) & (log_q > -torch.inf)
        return cls(is_usable, is_one_hot, log_q, row, inverse, logsumexp)

    def only(self, rows: Tensor) -> _DraftProbs:
        """Some of the requests."""
        return _DraftProbs(*(field[rows] for field in vars(self).values()))


def _draw(step: _Step, masses: Tensor, draft_probs: _DraftProbs) -> Tensor:
    """The token in place of a rejected draft or behind the last one. Overwrites its arguments."""
    target, top = step.target, step.target.peak.amax(1)
    log_total, nothing_left = _log_total(masses), torch.zeros_like(step.draft)

    without = (draft_probs.is_usable & draft_probs.is_one_hot).nonzero().squeeze(1)
    if without.numel():
        target.logits.flatten(1)[without, step.draft[without]] = -torch.inf
        target.peak[without] = target.logits[without].amax(-1)
        nothing_left[without] = step.draft[without]
        masses[without] = step.only(without).target.masses(step.inverse[without])

    rows = (draft_probs.is_usable & ~draft_probs.is_one_hot).nonzero().squeeze(1)
    if rows.numel():
        residual = _residual(step, draft_probs, top, log_total, rows)
        sums = residual.sum(-1)
        has_mass = sums.sum(1, dtype=torch.float64) > RESIDUAL_FLOOR
        rows, residual, sums = rows[has_mass], residual[has_mass], sums[has_mass]
        masses[rows] = to_units_reference(sums, sums.amax(1, keepdim=True))

    first, second, _, _ = step.words(_stream(step))
    block = draw_index_reference(masses, first).clamp(max=masses.shape[1] - 1)
    logits, block_peak = target.of(block), target.peak.gather(1, block[:, None])
    weights = torch.exp((logits - block_peak) * step.inverse[:, None])
    if rows.numel():
        weights[rows] = residual[torch.arange(len(rows)), block[rows]]
    lane = draw_index_reference(to_units_reference(weights, weights.amax(1, keepdim=True)), second)
    is_empty = target.peak.amax(1) == -torch.inf
    tokens = torch.where(is_empty, nothing_left, block * BLOCK_SIZE + lane)
    return tokens.clamp(max=step.vocab_size - 1)  # only a temperature of NaN gets this far


def _residual(
    step: _Step, draft_probs: _DraftProbs, top: Tensor, log_total: Tensor, rows: Tensor
) -> Tensor:
    """fp32 `[len(rows), num_blocks, BLOCK_SIZE]`: max(p - q, 0). The only full read of a cell."""

    def normalised(blocks: Tensor, inverse: Tensor, log_normaliser: Tensor) -> Tensor:
        return blocks.mul_(inverse[:, None, None]).sub_(log_normaliser[:, None, None]).exp_()

    p_logits = step.target.logits[rows] - top[rows, None, None]
    p = normalised(p_logits, step.inverse[rows], log_total[rows])
    if step.cache is None:
        return p
    draft, cache = draft_probs.only(rows), step.cache
    q_logits = Blocks.cut(cache.logits[draft.row, step.index]).logits
    return p.sub_(normalised(q_logits, draft.inverse, draft.logsumexp)).clamp_(min=0)


def _stream(step: _Step) -> Tensor:
    """What the token that is drawn stands for."""
    behind = torch.where(step.num_drafts > 0, STREAM_BONUS, STREAM_TARGET)
    return torch.where(step.index < step.num_drafts, STREAM_RESIDUAL, behind)


def _inverse(temperature: Tensor) -> Tensor:
    return (1.0 / torch.where(temperature == 0, 1.0, temperature)).clamp(max=_LARGEST)


def _log_total(masses: Tensor) -> Tensor:
    """Log of the softmax denominator over exp(top / temperature)."""
    return (masses.sum(1).float() * 2.0**-MASS_BITS).log()


def _log_prob(step: _Step, masses: Tensor) -> Tensor:
    """log p of the drafts; -inf where there is none."""
    target = step.target
    logits = target.logits.flatten(1).gather(1, step.draft.clamp(min=0)[:, None]).squeeze(1)
    log_p = (logits - target.peak.amax(1)) * step.inverse - _log_total(masses)
    return torch.where(step.draft >= 0, log_p, -torch.inf)
