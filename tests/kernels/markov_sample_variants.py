"""The main variants of the `markov_sample` kernels, as arguments for an offline compile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specreg.kernels.drafting.args import LogitsCells, StatisticsCells
from specreg.kernels.markov_sample import kernel as k
from specreg.kernels.markov_sample.arguments import (
    BaseArgs,
    HeadArgs,
    ReqArgs,
    SizeArgs,
    StepArgs,
    tile_of,
)

VOCAB_SIZE, NUM_STEPS = 129_280, 5
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "bf16, tp 4": {"num_shards": 4},
    "bf16, one request": {"num_reqs": 1},
    "wider cells, tp 2": {"padding": 700, "num_shards": 2},
    "bf16, 256 requests, tp 4": {"num_reqs": 256, "num_shards": 4},
    "fp16 into fp32, rank 16, 20 requests": {
        "num_reqs": 20,
        "dtype": FP16,
        "cache_dtype": FP32,
        "rank": 16,
    },
    "fp32 head, rank 100, tp 2": {"dtype": FP32, "rank": 100, "num_shards": 2},
    "reduced vocabulary, tp 4": {"num_shards": 4, "is_scattered": True},
    "greedy, capped and scaled": {"is_greedy": True, "soft_cap": 30.0, "scale": 0.5},
    "no cache": {"has_cache": False},
    "one column": {"vocab_size": 1},
    "one step": {"num_steps": 1},
    "one step, no cache": {"num_steps": 1, "has_cache": False},
    "one step, greedy": {"num_steps": 1, "is_greedy": True},
    "one of everything, tp 2": {
        "num_reqs": 1,
        "num_steps": 1,
        "vocab_size": 1,
        "rank": 1,
        "num_shards": 2,
        "is_scattered": True,
        "scale": 2.0,
        "soft_cap": 1.0,
    },
    "rank 300": {"rank": 300},
}


def kernels(
    *,
    num_reqs: int = 8,
    num_steps: int = NUM_STEPS,
    num_shards: int = 1,
    dtype: torch.dtype = BF16,
    cache_dtype: torch.dtype = BF16,
    vocab_size: int = VOCAB_SIZE,
    padding: int = 0,
    rank: int = 256,
    is_scattered: bool = False,
    is_greedy: bool = False,
    has_cache: bool = True,
    scale: float | None = None,
    soft_cap: float | None = None,
    target: str = "sm_90",
) -> Iterator[tuple[Any, dict[str, Any], dict[str, int | None]]]:
    """Each kernel of one variant with its arguments, as a launch would pass them, and options."""
    fp32, i32, i64, u8 = (
        torch.empty(1, dtype=t) for t in (FP32, torch.int32, torch.int64, torch.uint8)
    )
    weights, stored = torch.empty(1, dtype=dtype), torch.empty(1, dtype=cache_dtype)
    width = vocab_size + padding
    num_blocks = -(-width // k.BLOCK_SIZE)
    cells = statistics = None
    if has_cache and not is_greedy:
        cells = LogitsCells(stored, num_steps * width, width, num_shards - 1)
        statistics = StatisticsCells(fp32, fp32, u8, num_steps, num_shards - 1)
    has_scratch = not is_greedy and (cells is None or num_shards > 1 or is_scattered)
    scratch, scratch_stride = stored if has_scratch else None, -(-width // 16) * 16
    drawing = {
        "outs": StepArgs(i64, i32, i64, scratch, scratch_stride, i64),
        "statistics": statistics,
        "reqs": ReqArgs(i64, i64, i64, i64, None if is_greedy else fp32),
        "target_ids": i64 if is_scattered else None,
        "sizes": SizeArgs(num_reqs, num_steps, vocab_size, width, num_blocks),
        "NUM_SHARDS": num_shards,
        "NUM_BLOCKS": 1 << (num_blocks - 1).bit_length(),
        "BLOCK_SIZE": k.BLOCK_SIZE,
        "OVERLAPS": target == "sm_90",
    }
    tile = tile_of(num_reqs, rank, dtype, is_hip=target == "gfx942")
    for is_first in (True, False):
        yield (
            k.markov_sample_step_kernel,
            {
                **drawing,
                "cells": cells,
                "base": BaseArgs(weights, num_steps * vocab_size, vocab_size),
                "head": HeadArgs(weights, rank, weights, vocab_size, scale, soft_cap),
                "step": 7,
                "RANK": rank,
                "CHUNK": tile.chunk,
                "ROWS": tile.rows,
                "COLUMNS": tile.columns,
                "IS_FIRST": is_first,
                "IS_SCATTERED": is_scattered,
                "IS_PADDED": width > vocab_size,
                "W2_STRIDE": rank,
                "GROUP": min(k.GROUP, tile.rows),
                "VECTOR": 16 // (cache_dtype if cells is not None else dtype).itemsize,
            },
            {
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
                "maxnreg": tile.maxnreg,
            },
        )
    draw_cells = None if is_scattered else cells
    yield (
        k.markov_sample_draw_kernel,
        {**drawing, "cells": draw_cells},
        {"num_warps": k.DRAW_WARPS},
    )
    if is_scattered and cells is not None:
        fill = {"idx_mapping": i64, "vocab_size": vocab_size, "FILL_SIZE": k.FILL_SIZE}
        yield (
            k.markov_sample_fill_kernel,
            {"cells": cells, "NUM_SHARDS": num_shards, **fill},
            {"num_warps": 4},
        )
