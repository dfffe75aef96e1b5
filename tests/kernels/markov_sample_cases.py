"""Batches for tests of `markov_sample`, and the loop that it stands for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specreg.draft_logits import DraftLogitsView
from specreg.kernels import draft_sample
from specreg.kernels.markov_sample.reference import markov_bias_reference


class Batch(NamedTuple):
    """Positional arguments of `markov_sample`, without the cache."""

    base_logits: Tensor
    anchors: Tensor
    idx_mapping: Tensor
    positions: Tensor
    w1: Tensor
    w2: Tensor
    temperature: Tensor
    seeds: Tensor

    def rows(self, rows: list[int]) -> Batch:
        """The batch with only these requests, in this order."""
        return self._replace(
            base_logits=self.base_logits[rows].contiguous(),
            anchors=self.anchors[rows],
            idx_mapping=self.idx_mapping[rows],
            positions=self.positions[rows],
        )

    def to(self, device: str) -> Batch:
        """The batch on a device."""
        return Batch(*(tensor.to(device) for tensor in self))


def make_markov_batch(
    slots: list[int],
    num_columns: int,
    *,
    num_steps: int = 3,
    rank: int = 16,
    vocab_size: int | None = None,
    max_num_seqs: int | None = None,
    dtype: torch.dtype = torch.float32,
    temperature: list[float] | float = 1.0,
    seed: int = 0,
) -> Batch:
    """One request a slot; -1 in `slots` is padding.

    The tables hold small multiples of 1/8, so that every order of summation gives the same bias.
    """
    generator = torch.Generator().manual_seed(seed)
    num_reqs, vocab_size = len(slots), num_columns if vocab_size is None else vocab_size
    max_num_seqs = max(slots) + 1 if max_num_seqs is None else max_num_seqs
    w1, w2 = (
        torch.randint(-6, 7, (rows, rank), generator=generator).to(dtype) / 8
        for rows in (vocab_size, num_columns)
    )
    base_logits = torch.randn(num_reqs, num_steps, num_columns, generator=generator)
    return Batch(
        base_logits=base_logits.to(dtype),
        anchors=torch.randint(vocab_size, (num_reqs,), generator=generator),
        idx_mapping=torch.tensor(slots),
        positions=10 * torch.arange(num_reqs),
        w1=w1,
        w2=w2,
        temperature=torch.tensor(temperature, dtype=torch.float32).expand(max_num_seqs).clone(),
        seeds=torch.randint(-(2**62), 2**62, (max_num_seqs,), generator=generator),
    )


def step_logits(
    batch: Batch,
    step: int,
    previous: Tensor,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """`[num_reqs, num_columns]` that the tokens of a step are drawn from, given those before."""
    base_logits = batch.base_logits[:, step]
    bias = markov_bias_reference(
        previous,
        batch.w1,
        batch.w2[: base_logits.shape[1]],
        dtype=base_logits.dtype,
        scale=scale,
        soft_cap=soft_cap,
    )
    return base_logits + bias


def draw_step(
    batch: Batch,
    step: int,
    logits: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None = None,
    num_nans: Tensor | None = None,
    greedy: bool = False,
) -> Tensor:
    """The step's tokens by `draft_sample`."""
    return draft_sample(
        logits,
        batch.idx_mapping,
        torch.full_like(batch.idx_mapping, step),
        batch.positions + step,
        batch.temperature,
        batch.seeds,
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
        greedy=greedy,
    )


def loop(
    batch: Batch,
    cache: DraftLogitsView | None,
    *,
    scale: float = 1.0,
    soft_cap: float | None = None,
    **drawing: object,
) -> Tensor:
    """What `markov_sample` stands for: bias, add, `draft_sample`, once a step."""
    tokens, previous = [], batch.anchors
    for step in range(batch.base_logits.shape[1]):
        logits = step_logits(batch, step, previous, scale=scale, soft_cap=soft_cap)
        previous = draw_step(batch, step, logits, cache, **drawing)
        tokens.append(previous)
    return torch.stack(tokens, 1)
