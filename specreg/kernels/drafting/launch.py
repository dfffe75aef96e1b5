"""The launches of the ops that draw drafts from whole rows of logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.reference import BLOCK_SIZE
from specreg.kernels.drafting.args import RowArgs, store_of
from specreg.kernels.drafting.kernel import fill_kernel

__all__ = ["BlocksKernel", "TokensKernel", "draw_drafts"]

FILL_SIZE = 4096


class BlocksKernel(NamedTuple):
    """A kernel that reads, stores and reduces blocks; programs (blocks, tokens).

    Attributes:
        kernel: takes any of the arguments that `draw_drafts` names.
        blocks_per_program: a power of two; fewer in a small vocabulary.
        num_warps: of a program.
        has_arrivals: whether it also leaves the first arrival of each block, see `gumbel_sample`.
    """

    kernel: Any
    blocks_per_program: int
    num_warps: int
    has_arrivals: bool = False


class TokensKernel(NamedTuple):
    """A kernel that draws from blocks, a program a token."""

    kernel: Any
    num_warps: int


def draw_drafts(
    reduce: BlocksKernel,
    draw: TokensKernel,
    logits: Tensor,
    rows: RowArgs,
    words: tuple[Tensor, ...],
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    num_nans: Tensor | None,
) -> Tensor:
    """Launch on the current stream: two kernels, three to scatter into a dense cache. No sync.

    Args:
        reduce, draw: the kernels. Each takes what it names of: `ids`, `num_nans`, `statistics`,
            `blocks` (int64 `[num_tokens, num_blocks]`, see `drafting.kernel.store_blocks`),
            `arrivals` (fp32, likewise), `cells`, `logits`, `logits_stride`, `rows`, `words`,
            `target_ids`, `num_tokens`, `num_columns`, `width`, `num_blocks`, `NUM_SHARDS`,
            `NUM_BLOCKS` (of a program), `BLOCK_SIZE`, `VECTOR` (logits of 16 bytes),
            `IS_SCATTERED` (into dense rows).
        words: what random words are made of, a named tuple of the op's.

    The others are as of `draft_sample`.

    Returns:
        int64 `[num_tokens]` target ids, -1 for padding.
    """
    num_tokens = len(rows.idx_mapping)
    ids = torch.empty_like(rows.idx_mapping)
    if num_tokens == 0:
        return ids
    store = store_of(logits, cache, vocab_size, target_ids)
    num_blocks, device = store.num_blocks, logits.device
    padded = 1 << (num_blocks - 1).bit_length()
    per_program = min(reduce.blocks_per_program, padded)
    blocks = torch.empty(num_tokens * num_blocks, dtype=torch.int64, device=device)
    arrivals = None
    if reduce.has_arrivals:
        arrivals = torch.empty(blocks.shape, dtype=torch.float32, device=device)
    logits_stride = logits.stride(0)
    key = (
        store.key,
        logits_stride,
        per_program,
        specialisation(logits, rows, words, target_ids, num_nans, blocks, arrivals, ids),
    )
    if store.is_scattered:  # -inf where a reduced vocabulary leaves columns out
        launch(
            fill_kernel,
            (-(-vocab_size // FILL_SIZE), *store.grid_rows),
            (store.cells, rows, num_tokens, vocab_size, store.num_shards, FILL_SIZE),
            (key, vocab_size),
            num_warps=4,
        )
    given = {
        "ids": ids,
        "num_nans": num_nans,
        "statistics": store.statistics,
        "blocks": blocks,
        "arrivals": arrivals,
        "cells": store.cells,
        "logits": logits,
        "logits_stride": logits_stride,
        "rows": rows,
        "words": words,
        "target_ids": target_ids,
        "num_tokens": num_tokens,
        "num_columns": store.num_columns,
        "width": store.width,
        "num_blocks": num_blocks,
        "NUM_SHARDS": store.num_shards,
        "NUM_BLOCKS": per_program,
        "BLOCK_SIZE": BLOCK_SIZE,
        "VECTOR": 16 // logits.element_size(),
        "IS_SCATTERED": store.is_scattered,
    }
    grid = (-(-num_blocks // per_program), *store.grid_rows)
    _launch_by_name(reduce.kernel, grid, given, key, reduce.num_warps)
    _launch_by_name(draw.kernel, (num_tokens,), given | {"NUM_BLOCKS": padded}, key, draw.num_warps)
    return ids


def _launch_by_name(
    kernel: Any, grid: tuple[int, ...], given: dict[str, Any], key: Any, num_warps: int
) -> None:
    launch(kernel, grid, tuple(given[name] for name in kernel.arg_names), key, num_warps)
