"""The `cache_candidates` kernel compiles for absent GPUs, and addresses with 64 bits."""

import re

import pytest
import torch

pytest.importorskip("triton")

from offline import TARGETS, compile_offline, narrow_products

from specreg.kernels.cache_candidates.kernel import (
    CandidateArgs,
    KeptIds,
    cache_candidates_kernel,
)
from specreg.kernels.drafting.args import LogitsCells, RowArgs, StatisticsCells, WordArgs

VOCAB_SIZE, NUM_STEPS = 248_320, 7
FP32, I32, I64, U8 = (
    torch.empty(1, dtype=dtype) for dtype in (torch.float32, torch.int32, torch.int64, torch.uint8)
)
DIVISION = re.compile(r"arith\.(rem|div|ceildiv|floordiv)\w*i\b")


def arguments(
    k=16, *, num_shards=1, is_dense=True, has_cache=True, is_greedy=False, ids=I64, stored=FP32
):
    width = VOCAB_SIZE if is_dense else k
    cells = kept = statistics = None
    if has_cache:
        cells = LogitsCells(stored, NUM_STEPS * width, width, num_shards - 1)
        kept = KeptIds(I32, NUM_STEPS * k, k, num_shards - 1)
        statistics = StatisticsCells(FP32, FP32, U8, NUM_STEPS, num_shards - 1)
    return {
        "tokens": I64,
        "num_nans": I32,
        "statistics": statistics,
        "cells": cells,
        "kept": kept,
        "candidates": CandidateArgs(ids, k, FP32, k),
        "rows": RowArgs(I64, I64, None if is_greedy else FP32),
        "words": WordArgs(I64, I64),
        "vocab_size": VOCAB_SIZE,
        "num_candidates": k,
        "NUM_SHARDS": num_shards,
        "NUM_LANES": 1 << (k - 1).bit_length(),
        "IS_DENSE": is_dense,
    }


VARIANTS = {
    "dense": {},
    "dense, bf16 cache": {"stored": torch.empty(1, dtype=torch.bfloat16)},
    "top_k, tp 4": {"num_shards": 4, "is_dense": False},
    "one candidate": {"k": 1},
    "128 candidates": {"k": 128, "num_shards": 2},
    "no cache": {"has_cache": False},
    "greedy, int32 ids": {"has_cache": False, "is_greedy": True, "ids": I32},
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernel_compiles_for(variant, target):
    stages = compile_offline(cache_candidates_kernel, target, **arguments(**VARIANTS[variant]))
    assert stages["cubin" if target == "sm_90" else "hsaco"]


def test_i3_with_one_shard_owner_and_row_arithmetic_compile_away():
    for num_shards in (1, 2):
        stages = compile_offline(
            cache_candidates_kernel, "sm_90", **arguments(num_shards=num_shards)
        )
        assert bool(DIVISION.search(stages["ttir"])) == (num_shards > 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_i5_every_product_is_64_bit(variant):
    stages = compile_offline(cache_candidates_kernel, "sm_90", **arguments(**VARIANTS[variant]))
    assert narrow_products(stages["ttir"]) == []
