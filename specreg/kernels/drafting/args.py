"""Arguments of the kernels that draw drafts, grouped so that each launch passes few of them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.launch import specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import BLOCK_SIZE

__all__ = [
    "GRID_ROWS",
    "CacheHalves",
    "LogitsCells",
    "RowArgs",
    "StatisticsCells",
    "Store",
    "WordArgs",
    "halves_of",
    "store_of",
]

GRID_ROWS = 32768  # a grid's second dimension is 16 bits wide


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


class CacheHalves(NamedTuple):
    """A cache as launches that write it take it: a kernel gets the half that it writes.

    Attributes:
        cells, statistics: the halves.
        key: what a kernel may be specialised for because of them.
    """

    cells: LogitsCells
    statistics: StatisticsCells
    key: Hashable


def halves_of(cache: DraftLogitsView) -> CacheHalves:
    """The halves of a cache; made once a view, for launching is what a small batch costs."""
    made: CacheHalves | None = cache.__dict__.get("_halves")
    if made is None:
        row_stride, step_stride, _ = cache.logits.stride()
        num_steps, shard_idx = cache.logits.shape[1], cache.shard.shard_idx
        cells = LogitsCells(cache.logits, row_stride, step_stride, shard_idx)
        statistics = StatisticsCells(
            cache.temperature, cache.logsumexp, cache.state, num_steps, shard_idx
        )
        key = specialisation(cells, statistics, cache.shard.num_shards)
        made = cache.__dict__["_halves"] = CacheHalves(cells, statistics, key)
    return made


class Store(NamedTuple):
    """What launches need to know of logits and of where they go.

    Attributes:
        num_columns: columns that are sampled from.
        width: columns of a stored row, -inf beyond `num_columns`; as many where rows are scattered.
        num_blocks: blocks of `width` columns.
        num_shards: of the cache.
        cells, statistics: the cache; None without one.
        is_scattered: whether rows are scattered into dense ones by their target ids.
        grid_rows: grid behind the chunks of a row, for `token_of_program`.
        key: what a kernel may be specialised for because of all these.
    """

    num_columns: int
    width: int
    num_blocks: int
    num_shards: int
    cells: LogitsCells | None
    statistics: StatisticsCells | None
    is_scattered: bool
    grid_rows: tuple[int, int]
    key: Hashable


def store_of(
    logits: Tensor, cache: DraftLogitsView | None, vocab_size: int, target_ids: Tensor | None
) -> Store:
    """How logits are cut into blocks and stored."""
    num_tokens, width = logits.shape
    num_columns = min(width, vocab_size) if target_ids is None else target_ids.shape[0]
    width, num_shards, is_scattered = num_columns, 1, False
    cells = statistics = cache_key = None
    if cache is not None:
        cells, statistics, cache_key = halves_of(cache)
        num_shards = cache.shard.num_shards
        is_scattered = target_ids is not None and cache.layout is DraftLogitsLayout.DENSE
        if not is_scattered:
            width = cache.logits.shape[2]
    return Store(
        num_columns=num_columns,
        width=width,
        num_blocks=-(-width // BLOCK_SIZE),
        num_shards=num_shards,
        cells=cells,
        statistics=statistics,
        is_scattered=is_scattered,
        grid_rows=(min(num_tokens, GRID_ROWS), -(-num_tokens // GRID_ROWS)),
        key=(cache_key, num_tokens, num_columns, width, is_scattered),
    )
