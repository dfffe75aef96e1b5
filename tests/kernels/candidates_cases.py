"""Batches of candidates, caches of them, and the dense loop that says what they must give."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.draft_logits import DraftLogitsCache
from specreg.kernels.common.reference import point_reference
from specreg.kernels.random import STREAM_DRAFT, random_words_reference
from specreg.ownership import Shard, rows_per_rank

DENSE, TOP_K = DraftLogitsLayout.DENSE, DraftLogitsLayout.TOP_K


class Candidates(NamedTuple):
    """Arguments of `cache_candidates` that do not depend on the rank."""

    ids: Tensor
    scores: Tensor
    idx_mapping: Tensor
    steps: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor

    def rows(self, rows: list[int]) -> Candidates:
        """The batch with only these tokens, in this order."""
        by_token = {name: getattr(self, name)[rows].contiguous() for name in self._fields[:5]}
        return self._replace(**by_token)


def make_candidates(
    slots: list[int],
    num_candidates: int,
    vocab_size: int = 257,
    *,
    max_num_seqs: int | None = None,
    num_steps: int = 1,
    temperature: list[float] | float = 1.0,
    seed: int = 0,
) -> Candidates:
    """Distinct ids in no order, scores with ties; -1 in `slots` is padding."""
    generator = torch.Generator().manual_seed(seed)
    max_num_seqs = max(slots) + 1 if max_num_seqs is None else max_num_seqs
    num_tokens = len(slots) * num_steps
    order = torch.rand(num_tokens, vocab_size, generator=generator).argsort(-1)
    scores = torch.randn(num_tokens, num_candidates, generator=generator).mul(2).round_(decimals=1)
    steps = torch.arange(num_steps).repeat(len(slots))
    return Candidates(
        ids=order[:, :num_candidates].contiguous(),
        scores=scores,
        idx_mapping=torch.tensor(slots).repeat_interleave(num_steps),
        steps=steps,
        positions=steps + 10 * torch.arange(len(slots)).repeat_interleave(num_steps),
        temperature=torch.tensor(temperature, dtype=torch.float32).expand(max_num_seqs).clone(),
        seeds=torch.randint(-(2**62), 2**62, (max_num_seqs,), generator=generator),
    )


def make_cache(
    layout: DraftLogitsLayout,
    max_num_seqs: int,
    num_steps: int,
    num_candidates: int,
    vocab_size: int = 257,
    shard: Shard | None = None,
    dtype: torch.dtype = torch.float32,
) -> DraftLogitsCache:
    """A rank's cache of candidates."""
    shard = Shard() if shard is None else shard
    width = vocab_size if layout is DENSE else num_candidates
    logits = torch.empty(
        rows_per_rank(max_num_seqs, shard.num_shards), num_steps, width, dtype=dtype
    )
    return DraftLogitsCache(logits, shard, layout, vocab_size, num_candidates=num_candidates)


def by_dense_loop(batch: Candidates, vocab_size: int = 257) -> list[int]:
    """Tokens, one at a time, from a whole row of -inf with the candidates in it."""
    tokens = []
    for ids, scores, slot, step, position in zip(*batch[:5], strict=True):
        if slot < 0:
            tokens.append(-1)
            continue
        row = torch.full((vocab_size,), -torch.inf)
        for i, score in zip(ids.tolist(), scores.tolist(), strict=True):
            if 0 <= i < vocab_size and score > -torch.inf and row[i] == -torch.inf:
                row[i] = score
        temperature = float(batch.temperature[slot])
        if temperature == 0.0 or bool((row == -torch.inf).all()):
            tokens.append(int(row.argmax()))
            continue
        inverse = 1.0 / torch.tensor(temperature)
        units = (((row - row.max()) * inverse).exp() * 2.0**30).long()
        words = random_words_reference(batch.seeds[slot], position, step, STREAM_DRAFT)
        cumulative = units.cumsum(0)
        tokens.append(int((cumulative <= point_reference(cumulative[-1], words[0])).sum()))
    return tokens
