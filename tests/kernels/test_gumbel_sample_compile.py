"""The `gumbel_sample` kernels compile for GPUs that are not there, and address with 64 bits."""

import pytest
import torch

pytest.importorskip("triton")

from offline import TARGETS, compile_offline, narrow_products

from specreg.kernels.draft_sample.reference import BLOCK_SIZE
from specreg.kernels.drafting.args import LogitsCells, RowArgs, StatisticsCells
from specreg.kernels.gumbel_sample import kernel as k

VOCAB_SIZE, NUM_STEPS, NUM_BLOCKS = 248_320, 7, 485
FP32, BF16, I32, I64, U8 = (
    torch.empty(1, dtype=dtype)
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8)
)


def kernels(*, num_shards=1, logits=BF16, target_ids=None, is_scattered=False, has_cache=True):
    cells = statistics = None
    if has_cache:
        cells = LogitsCells(BF16, NUM_STEPS * VOCAB_SIZE, VOCAB_SIZE, num_shards - 1)
        statistics = StatisticsCells(FP32, FP32, U8, NUM_STEPS, num_shards - 1)
    given = {
        "ids": I64,
        "num_nans": I32,
        "statistics": statistics,
        "blocks": I64,
        "arrivals": FP32,
        "cells": cells,
        "logits": logits,
        "logits_stride": VOCAB_SIZE,
        "rows": RowArgs(I64, I64, FP32 if has_cache else None),
        "words": k.NoiseArgs(I64, I64, I64),
        "target_ids": target_ids,
        "num_tokens": 1792,
        "num_columns": VOCAB_SIZE,
        "width": VOCAB_SIZE,
        "num_blocks": NUM_BLOCKS,
        "NUM_SHARDS": num_shards,
        "NUM_BLOCKS": k.BLOCKS_PER_PROGRAM,
        "BLOCK_SIZE": BLOCK_SIZE,
        "VECTOR": 16 // logits.element_size(),
        "IS_SCATTERED": is_scattered,
    }
    yield k.gumbel_sample_blocks_kernel, given
    yield k.gumbel_sample_tokens_kernel, given | {"NUM_BLOCKS": 512}


VARIANTS = {
    "bf16, tp 4": {"num_shards": 4},
    "fp32, scattered": {"logits": FP32, "target_ids": I64, "is_scattered": True},
    "draft_vocab, tp 2": {"num_shards": 2, "target_ids": I64},
    "greedy": {"has_cache": False},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_kernel_compiles_for(variant, target):
    for kernel, arguments in kernels(**VARIANTS[variant]):
        stages = compile_offline(kernel, target, **arguments)
        assert stages["cubin" if target == "sm_90" else "hsaco"]
        assert narrow_products(stages["ttir"]) == []
