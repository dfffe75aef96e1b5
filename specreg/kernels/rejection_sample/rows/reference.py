"""Torch twins of the Triton helpers in `rejection_sample.rows`: rows and their drafts, p and q."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specreg.kernels.common.cells.reference import cell_elements_reference
from specreg.kernels.common.reference import owned_row_reference
from specreg.kernels.common.view import CELL_STORED, DraftLogitsView
from specreg.kernels.draft_sample.reference import BLOCK_SIZE, MASS_BITS, Blocks
from specreg.kernels.random import (
    STREAM_ACCEPT,
    random_words_reference,
    uniform_reference,
)
from specreg.kernels.rejection_sample.batch import RejectionBatch

__all__ = [
    "DraftProbs",
    "Rows",
    "accept_uniforms",
    "chunks",
    "largest",
    "log_total",
    "num_unusable_rows",
    "passes",
    "row_counts",
]

# Logits worked on at a time: bounds the scratch and stays in the CPU's cache.
CHUNK_ELEMENTS = 2**20

_LARGEST = torch.finfo(torch.float32).max


def row_counts(batch: RejectionBatch) -> Tensor:
    """int64 `[num_reqs]`, logits rows of each request that count; 0 for a padding row."""
    counts = batch.cu_num_logits.diff().long().clamp(max=batch.num_rows)
    return torch.where(batch.idx_mapping < 0, 0, counts)


def num_unusable_rows(batch: RejectionBatch, counts: Tensor) -> Tensor:
    """Logits rows of each request with a NaN or nothing above -inf; one pass, as amax keeps NaN."""
    peaks = batch.target_logits[:, : batch.vocab_size].amax(1)
    is_unusable = torch.nn.functional.pad(peaks.isnan() | (peaks == -torch.inf), (0, 1))
    steps = torch.arange(batch.num_rows, device=counts.device)
    rows = torch.where(
        steps < counts[:, None], batch.cu_num_logits[:-1, None] + steps, len(is_unusable) - 1
    )
    return is_unusable[rows].sum(1)


def chunks(reqs: Tensor, vocab_size: int) -> tuple[Tensor, ...]:
    """`reqs` in parts of which a row each is at most `CHUNK_ELEMENTS` logits, or one row."""
    return torch.split(reqs, max(1, CHUNK_ELEMENTS // max(vocab_size, BLOCK_SIZE)))


@dataclass(frozen=True)
class Rows:
    """One target row a request, and the draft token that it judges.

    Attributes:
        vocab_size: columns that are tokens.
        cache: as of the batch.
        target: cleaned target logits.
        steps: int64 `[n]`, index of each row in its round.
        inverse: fp32 `[n]`, one over the temperature; 1 where that is 0.
        is_greedy: bool `[n]`.
        draft: int64 `[n]`; -1 where there is none, or it is no token of the vocabulary.
        num_drafts: int64 `[n]`, drafts of the request.
        slots, seeds, positions: int64 `[n]`; the position is that of the token decided here.
    """

    vocab_size: int
    cache: DraftLogitsView | None
    target: Blocks
    steps: Tensor
    inverse: Tensor
    is_greedy: Tensor
    draft: Tensor
    num_drafts: Tensor
    slots: Tensor
    seeds: Tensor
    positions: Tensor

    @classmethod
    def read(cls, batch: RejectionBatch, reqs: Tensor, counts: Tensor, steps: Tensor) -> Rows:
        """Row `steps[i]` of request `reqs[i]`, which has `counts[i]` rows; copies the logits."""
        slots = batch.idx_mapping[reqs]
        temperature = batch.temperature[slots]
        draft = torch.full_like(slots, -1)
        if batch.num_rows > 1:
            draft = batch.draft_tokens[reqs, steps.clamp(max=batch.num_rows - 2)]
            draft = torch.where((steps < counts - 1) & (draft < batch.vocab_size), draft, -1)
        rows = batch.cu_num_logits[reqs] + steps
        return cls(
            vocab_size=batch.vocab_size,
            cache=batch.cache,
            target=Blocks.cut(batch.target_logits[rows, : batch.vocab_size]),
            steps=steps,
            inverse=_inverse(temperature),
            is_greedy=temperature == 0,
            draft=draft.clamp(min=-1),
            num_drafts=counts - 1,
            slots=slots,
            seeds=batch.seeds[slots],
            positions=batch.positions[reqs] + steps,
        )

    def only(self, rows: Tensor) -> Rows:
        """Some of the rows; the logits are copied."""
        kept: dict[str, Any] = {
            name: value[rows] for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        target = Blocks(*(field[rows] for field in vars(self.target).values()))
        return replace(self, target=target, **kept)

    def words(self, stream: Tensor | int, back: int = 0) -> Tensor:
        """int64 `[4, n]`, random words of a stream, for the tokens `back` rows earlier."""
        return random_words_reference(self.seeds, self.positions - back, self.steps - back, stream)

    def log_prob(self, masses: Tensor) -> Tensor:
        """fp32 `[n]`, log p of the drafts; -inf where there is none."""
        logits = self.target.logits.flatten(1).gather(1, self.draft.clamp(min=0)[:, None])
        log_p = (logits.squeeze(1) - self.target.peak.amax(1)) * self.inverse - log_total(masses)
        return torch.where(self.draft >= 0, log_p, -torch.inf)


@dataclass(frozen=True)
class DraftProbs:
    """What the cache says of the draft tokens of rows.

    Attributes:
        is_usable: bool `[n]`; False where there is no draft, or its distribution is unknown or
            gives it probability 0: whatever was drafted there was not drawn from what is stored.
        is_one_hot: bool `[n]`, the draft was an argmax.
        log_q: fp32 `[n]`, log-probability of the draft.
        row, step: int64 `[n]`, the cell; row -1 where this rank has none.
        inverse, logsumexp: fp32 `[n]`, of the cell.
    """

    is_usable: Tensor
    is_one_hot: Tensor
    log_q: Tensor
    row: Tensor
    step: Tensor
    inverse: Tensor
    logsumexp: Tensor

    @classmethod
    def read(cls, rows: Rows) -> DraftProbs:
        """One element a draft."""
        cache = rows.cache
        has_draft = rows.draft >= 0
        if cache is None or cache.num_speculative_tokens == 0:
            zero = torch.zeros_like(rows.inverse)
            one_hot = torch.ones_like(has_draft)
            return cls(has_draft, one_hot, zero, rows.slots, rows.steps, zero, zero)
        row = owned_row_reference(rows.slots, cache.shard.num_shards, cache.shard.shard_idx)
        step = rows.steps.clamp(max=cache.num_speculative_tokens - 1)
        cell = (row.clamp(min=0), step)
        temperature, logsumexp = cache.temperature[cell], cache.logsumexp[cell]
        inverse, is_one_hot = _inverse(temperature), temperature == 0
        logits = cell_elements_reference(cache, *cell, rows.draft.clamp(min=0))
        log_q = torch.where(is_one_hot, 0.0, logits * inverse - logsumexp)
        is_usable = has_draft & (row >= 0) & (cache.state[cell] == CELL_STORED)
        return cls(
            is_usable & (log_q > -torch.inf), is_one_hot, log_q, row, step, inverse, logsumexp
        )

    def only(self, rows: Tensor) -> DraftProbs:
        """Some of the rows."""
        return DraftProbs(*(field[rows] for field in vars(self).values()))


def largest(rows: Rows) -> Tensor:
    """int64 `[n]`, column of the largest logit, the lowest on ties."""
    block = rows.target.peak.argmax(1)
    return block * BLOCK_SIZE + rows.target.of(block).argmax(1)


def passes(log_u: Tensor, log_chance: Tensor) -> Tensor:
    """Whether a uniform lies below a chance; always where that is 1."""
    return (log_chance >= 0) | (log_u < log_chance)


def accept_uniforms(rows: Rows, back: int = 0) -> Tensor:
    """fp32 `[n]`, the uniforms that accept or reject the drafts `back` rows earlier."""
    return uniform_reference(rows.words(STREAM_ACCEPT, back)[0])


def log_total(masses: Tensor) -> Tensor:
    """Log of the softmax denominator over exp(top / temperature)."""
    return (masses.sum(1).clamp(min=1).float() * 2.0**-MASS_BITS).log()


def _inverse(temperature: Tensor) -> Tensor:
    return (1.0 / torch.where(temperature == 0, 1.0, temperature)).clamp(max=_LARGEST)
