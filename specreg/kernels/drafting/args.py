"""Arguments of the kernels that draw drafts, grouped so that each launch passes few of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specreg.kernels.common.view import DraftLogitsView

__all__ = ["LogitsCells", "RowArgs", "StatisticsCells", "WordArgs", "cells_of"]


class RowArgs(NamedTuple):
    """Two values a token and one a slot; `temperature` is None when every draft is greedy."""

    idx_mapping: Tensor
    steps: Tensor
    temperature: Tensor | None


class WordArgs(NamedTuple):
    """What random words are made of besides the step: one value a token, one a slot."""

    positions: Tensor
    seeds: Tensor


class LogitsCells(NamedTuple):
    """Where a rank's logits go: first element, strides in elements, this rank."""

    data: Tensor
    row_stride: int
    step_stride: int
    shard_idx: int


class StatisticsCells(NamedTuple):
    """Where the statistics of a rank's cells go, at `row * num_steps + step`."""

    temperature: Tensor
    logsumexp: Tensor
    state: Tensor
    num_steps: int
    shard_idx: int


def cells_of(cache: DraftLogitsView) -> tuple[LogitsCells, StatisticsCells]:
    """The two halves of a cache as a launch that writes them takes them; made once a view.

    Launching is what a small batch costs, and each pointer counts: a kernel gets the half that it
    writes.
    """
    made: tuple[LogitsCells, StatisticsCells] | None = cache.__dict__.get("_cells")
    if made is None:
        row_stride, step_stride, _ = cache.logits.stride()
        shard_idx = cache.shard.shard_idx
        made = (
            LogitsCells(cache.logits, row_stride, step_stride, shard_idx),
            StatisticsCells(
                cache.temperature,
                cache.logsumexp,
                cache.state,
                cache.logits.shape[1],
                shard_idx,
            ),
        )
        cache.__dict__["_cells"] = made
    return made
