"""Batches and poisoned caches for tests of `draft_sample` and of what reads its cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsView
from specreg.draft_vocab import target_to_draft_table
from specreg.kernels.common.reference import draw_index_reference, point_reference
from specreg.kernels.draft_sample.reference import Blocks
from specreg.kernels.random import STREAM_DRAFT, random_words_reference
from specreg.ownership import Shard, rows_per_rank

POISON = 7.25
POISON_STATE = 77
UNSHARDED = Shard()


class Batch(NamedTuple):
    """Arguments of `draft_sample` that do not depend on the rank."""

    logits: Tensor
    idx_mapping: Tensor
    steps: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor

    def rows(self, rows: list[int]) -> Batch:
        """The batch with only these tokens, in this order."""
        return self._replace(
            logits=self.logits[rows].contiguous(),
            idx_mapping=self.idx_mapping[rows],
            steps=self.steps[rows],
            positions=self.positions[rows],
        )


def make_batch(
    slots: list[int],
    num_columns: int,
    *,
    max_num_seqs: int | None = None,
    num_steps: int = 1,
    dtype: torch.dtype = torch.float32,
    temperature: list[float] | float = 1.0,
    scale: float = 2.0,
    seed: int = 0,
) -> Batch:
    """A batch of one token a slot and step; -1 in `slots` is padding."""
    generator = torch.Generator().manual_seed(seed)
    max_num_seqs = max(slots) + 1 if max_num_seqs is None else max_num_seqs
    num_tokens = len(slots) * num_steps
    logits = torch.randn(num_tokens, num_columns, generator=generator) * scale
    steps = torch.arange(num_steps).repeat(len(slots))
    temperatures = torch.tensor(temperature, dtype=torch.float32).expand(max_num_seqs).clone()
    return Batch(
        logits=logits.to(dtype),
        idx_mapping=torch.tensor(slots).repeat_interleave(num_steps),
        steps=steps,
        positions=steps + 10 * torch.arange(len(slots)).repeat_interleave(num_steps),
        temperature=temperatures,
        seeds=torch.randint(-(2**62), 2**62, (max_num_seqs,), generator=generator),
    )


def make_cache(
    max_num_seqs: int,
    num_steps: int,
    vocab_size: int,
    shard: Shard = UNSHARDED,
    dtype: torch.dtype = torch.float32,
    *,
    padding: int = 0,
    target_ids: Tensor | None = None,
) -> DraftLogitsView:
    """A rank's cache, poisoned everywhere; `padding` more columns lie behind each cell's own.

    With `target_ids` it is one of layout draft_vocab.
    """
    rows = rows_per_rank(max_num_seqs, shard.num_shards)
    width = vocab_size if target_ids is None else len(target_ids)
    logits = torch.full((rows, num_steps, width + padding), POISON, dtype=dtype)
    return DraftLogitsView(
        logits=logits[..., :width],
        temperature=torch.full((rows, num_steps), POISON),
        logsumexp=torch.full((rows, num_steps), POISON),
        state=torch.full((rows, num_steps), POISON_STATE, dtype=torch.uint8),
        shard=shard,
        layout=DraftLogitsLayout.DENSE if target_ids is None else DraftLogitsLayout.DRAFT_VOCAB,
        vocab_size=vocab_size,
        target_to_draft=None
        if target_ids is None
        else target_to_draft_table(target_ids, vocab_size),
    )


def distance_to_boundary(batch: Batch, cache_dtype: torch.dtype | None, vocab_size: int) -> Tensor:
    """fp64 `[n]`: how far each token's draw is from going to a neighbour, as a probability.

    Two devices round `exp` differently, so draws that are closer than about 1e-6 may differ.
    """
    logits = batch.logits[:, :vocab_size]
    blocks = Blocks.cut(logits if cache_dtype is None else logits.to(cache_dtype))
    slots = batch.idx_mapping.clamp(min=0)
    temperature = batch.temperature[slots]
    inverse = 1.0 / torch.where(temperature != 0.0, temperature, 1.0)
    words = random_words_reference(batch.seeds[slots], batch.positions, batch.steps, STREAM_DRAFT)
    masses = blocks.masses(inverse)
    block = draw_index_reference(masses, words[0]).clamp(max=masses.shape[1] - 1)
    nearest = [
        _nearest(units, word)
        for units, word in ((masses, words[0]), (blocks.weights(block, inverse), words[1]))
    ]
    return torch.minimum(*nearest)


def _nearest(units: Tensor, word: Tensor) -> Tensor:
    cumulative = units.cumsum(-1)
    point = point_reference(cumulative[:, -1], word)
    gap = (cumulative - point[:, None]).abs().amin(-1)
    return gap.double() / cumulative[:, -1]
