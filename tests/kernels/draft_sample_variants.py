"""The main variants of the `draft_sample` kernels, as arguments for an offline compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specreg.kernels.draft_sample import kernel as k
from specreg.kernels.drafting.args import LogitsCells, RowArgs, StatisticsCells, WordArgs
from specreg.kernels.drafting.kernel import fill_kernel
from specreg.kernels.drafting.launch import FILL_SIZE

VOCAB_SIZE, NUM_STEPS = 248_320, 7
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, tp 4": {"num_shards": 4},
    "fp32 into bf16, tp 2": {"dtype": FP32, "num_shards": 2},
    "fp16 into fp32": {"dtype": FP16, "cache_dtype": FP32},
    "reduced vocabulary, tp 4": {"num_shards": 4, "is_reduced": True},
    "greedy": {"is_greedy": True},
    "greedy, reduced vocabulary": {"is_greedy": True, "is_reduced": True},
    "no cache": {"has_cache": False},
    "one column": {"vocab_size": 1},
}


def kernels(
    *,
    num_shards: int = 1,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = BF16,
    vocab_size: int = VOCAB_SIZE,
    is_reduced: bool = False,
    is_greedy: bool = False,
    has_cache: bool = True,
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each kernel of one variant with its arguments, as a launch would pass them."""
    fp32, i32, i64, u8 = (
        torch.empty(1, dtype=t) for t in (FP32, torch.int32, torch.int64, torch.uint8)
    )
    num_blocks = -(-vocab_size // k.BLOCK_SIZE)
    padded = 1 << (num_blocks - 1).bit_length()
    rows = RowArgs(i64, i64, None if is_greedy else fp32)
    cells = statistics = None
    if has_cache and not is_greedy:
        stored = torch.empty(1, dtype=cache_dtype)
        cells = LogitsCells(stored, NUM_STEPS * vocab_size, vocab_size, num_shards - 1)
        statistics = StatisticsCells(fp32, fp32, u8, NUM_STEPS, num_shards - 1)
    num_tokens = 1792
    given = {
        "ids": i64,
        "num_nans": i32,
        "statistics": statistics,
        "blocks": i64,
        "cells": cells,
        "logits": torch.empty(1, dtype=dtype),
        "logits_stride": vocab_size,
        "rows": rows,
        "words": WordArgs(i64, i64),
        "target_ids": i64 if is_reduced else None,
        "num_tokens": num_tokens,
        "num_columns": vocab_size,
        "width": vocab_size,
        "num_blocks": num_blocks,
        "NUM_SHARDS": num_shards,
        "NUM_BLOCKS": min(k.BLOCKS_PER_PROGRAM, padded),
        "BLOCK_SIZE": k.BLOCK_SIZE,
        "VECTOR": 16 // dtype.itemsize,
        "IS_SCATTERED": is_reduced and cells is not None,
    }
    yield k.draft_sample_blocks_kernel, given
    yield k.draft_sample_tokens_kernel, given | {"NUM_BLOCKS": padded}
    if is_reduced and cells is not None:
        yield fill_kernel, given | {"vocab_size": vocab_size, "FILL_SIZE": FILL_SIZE}
