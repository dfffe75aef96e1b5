"""The launches of `rejection_sample` at a real size, as tensors that only have a dtype."""

from __future__ import annotations

from typing import Any

import torch

from specreg.kernels.common.args import CacheArgs
from specreg.kernels.draft_sample.reference import BLOCK_SIZE
from specreg.kernels.rejection_sample import kernel as k
from specreg.kernels.rejection_sample.batch import RejectionOutput

VOCAB_SIZE = 248_320
NUM_BLOCKS = 485

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32 target": {"target": torch.float32},
    "fp16": {"target": torch.float16, "draft": torch.float16},
    "fp32 cache": {"draft": torch.float32},
    "four shards": {"num_shards": 4},
    "no cache": {"draft": None},
    "one draft": {"num_drafts": 1},
    "no drafts": {"draft": None, "num_drafts": 0},
}


def kernels(
    *,
    target: torch.dtype = torch.bfloat16,
    draft: torch.dtype | None = torch.bfloat16,
    num_shards: int = 1,
    num_drafts: int = 7,
) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each kernel and the arguments of its launch."""

    def tensor(dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype)

    fp32, i32, i64 = (tensor(d) for d in (torch.float32, torch.int32, torch.int64))
    num_rows = num_drafts + 1
    output = RejectionOutput(i64, i32, i32)
    pending = k.PendingArgs(i32, fp32, fp32, fp32)
    blocks = k.BlockArgs(fp32, i32, i32, NUM_BLOCKS)
    inputs = {
        "target": k.TargetArgs(tensor(target), VOCAB_SIZE, VOCAB_SIZE),
        "batch": k.BatchArgs(i64, num_drafts, i64, i32, i64, fp32, i64),
        "NUM_ROWS": num_rows,
        "BLOCK_SIZE": BLOCK_SIZE,
    }
    cached: dict[str, Any] = {"cache": None, "NUM_SHARDS": num_shards}
    if draft is not None:
        strides = (num_drafts * VOCAB_SIZE, VOCAB_SIZE)
        cell = (tensor(draft), fp32, fp32, tensor(torch.uint8))
        cached["cache"] = CacheArgs(*cell, *strides, num_drafts, num_shards - 1)
    launches = {
        "blocks": (k.target_blocks_kernel, {**inputs, "blocks": blocks, "NUM_BLOCKS": 8}),
        "accept": (
            k.accept_kernel,
            {
                **inputs,
                **cached,
                "output": output,
                "pending": pending,
                "blocks": blocks,
                "NUM_STEPS": 1 << num_drafts.bit_length(),
                "NUM_BLOCKS": 512,
            },
        ),
        "draw": (
            k.draw_kernel,
            {
                **inputs,
                **cached,
                "output": output,
                "pending": pending,
                "blocks": blocks,
                "NUM_BLOCKS": 512,
            },
        ),
    }
    if draft is not None:
        launches["residual"] = (
            k.residual_blocks_kernel,
            {
                **inputs,
                **cached,
                "output": output,
                "pending": pending,
                "num_blocks": NUM_BLOCKS,
                "NUM_BLOCKS": 8,
            },
        )
    return launches
