"""The launches of `rejection_sample` at a real size, as tensors that only have a dtype."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.rejection_sample import kernel, prepare
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.block import kernel as block
from specreg.kernels.rejection_sample.blocks.kernel import target_blocks_kernel
from specreg.kernels.rejection_sample.rows.kernel import judge_kernel
from specreg.kernels.rejection_sample.synthetic.kernel import synthetic_judge_kernel
from specreg.ownership import Shard

VOCAB_SIZE = 248_320
NUM_CANDIDATES = 20
DRAFT_VOCAB_SIZE = 32_000

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32 target": {"target": torch.float32},
    "fp16": {"target": torch.float16, "draft": torch.float16},
    "fp32 cache": {"draft": torch.float32},
    "four shards": {"num_shards": 4},
    "no cache": {"draft": None},
    "one draft": {"num_drafts": 1},
    "no drafts": {"draft": None, "num_drafts": 0},
    "reduced vocabulary": {"layout": DraftLogitsLayout.DRAFT_VOCAB},
    "candidates": {"layout": DraftLogitsLayout.TOP_K, "draft": torch.float32},
}

BLOCK_VARIANTS = ["bf16", "four shards", "no cache", "reduced vocabulary", "candidates"]

# Launches of each method, by the name of what they launch.
ROWS = {
    "blocks": lambda part: part.launch_blocks(target_blocks_kernel),
    "judge": lambda part: part.launch_rows(judge_kernel),
}
METHODS = {
    "standard": {
        **ROWS,
        "residual": lambda part: part.launch_residuals(kernel.residual_blocks_kernel),
        "draw": lambda part: part.launch_draw(kernel.draw_kernel),
    },
    "block": {
        "residual": lambda part: part.launch_residuals(block.block_residuals_kernel, 7),
        "draw": lambda part: part.launch_draw(block.block_draw_kernel),
    },
    "block, candidates": {
        "residual": lambda part: part.launch_residuals(block.candidates_residual_kernel),
        "draw": lambda part: part.launch_draw(block.candidates_draw_kernel),
    },
    "synthetic": {
        "judge": lambda part: part.launch_rows(synthetic_judge_kernel, rates=part.sums),
    },
}


def kernels(
    method: str = "standard",
    *,
    target: torch.dtype = torch.bfloat16,
    draft: torch.dtype | None = torch.bfloat16,
    num_shards: int = 1,
    num_drafts: int = 7,
    layout: DraftLogitsLayout = DraftLogitsLayout.DENSE,
) -> dict[str, tuple[Any, dict[str, Any], int]]:
    """Each kernel, the arguments of its launch, and its warps."""
    part = _part(target, draft, num_shards, num_drafts, layout)
    if method == "block" and layout is DraftLogitsLayout.TOP_K:
        method = "block, candidates"
    launched: list[tuple[Any, dict[str, Any], int]] = []

    def note(kernel, grid, arguments, key, num_warps):
        launched.append((kernel, dict(zip(kernel.arg_names, arguments, strict=True)), num_warps))

    names = [name for name in METHODS[method] if name != "residual" or draft is not None]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "launch", note)
        for name in names:
            METHODS[method][name](part)
    return dict(zip(names, launched, strict=True))


def _part(target, draft, num_shards, num_drafts, layout) -> prepare.Part:
    max_num_seqs = num_shards
    batch = RejectionBatch(
        target_logits=torch.empty(num_drafts + 1, VOCAB_SIZE, dtype=target, device="meta"),
        draft_tokens=torch.empty(1, num_drafts, dtype=torch.int64, device="meta"),
        idx_mapping=torch.empty(1, dtype=torch.int64, device="meta"),
        cu_num_logits=torch.empty(2, dtype=torch.int32, device="meta"),
        positions=torch.empty(1, dtype=torch.int64, device="meta"),
        temperature=torch.empty(max_num_seqs, device="meta"),
        seeds=torch.empty(max_num_seqs, dtype=torch.int64, device="meta"),
        cache=None if draft is None else _cache(draft, num_shards, num_drafts, layout),
        vocab_size=VOCAB_SIZE,
    )
    return prepare.prepare(batch, RejectionOutput.empty(batch.draft_tokens), 1)


def _cache(draft, num_shards, num_drafts, layout) -> DraftLogitsView:
    width = {
        DraftLogitsLayout.DENSE: VOCAB_SIZE,
        DraftLogitsLayout.DRAFT_VOCAB: DRAFT_VOCAB_SIZE,
        DraftLogitsLayout.TOP_K: NUM_CANDIDATES,
    }[layout]
    cells = (1, num_drafts)
    view = DraftLogitsView(
        logits=torch.empty(*cells, width, dtype=draft, device="meta"),
        temperature=torch.empty(cells, device="meta"),
        logsumexp=torch.empty(cells, device="meta"),
        state=torch.empty(cells, dtype=torch.uint8, device="meta"),
        shard=Shard(num_shards, num_shards - 1),
        layout=layout,
        vocab_size=VOCAB_SIZE,
    )
    if layout is DraftLogitsLayout.TOP_K:
        view = replace(view, ids=torch.empty(*cells, width, dtype=torch.int32, device="meta"))
    if layout is DraftLogitsLayout.DRAFT_VOCAB:
        table = torch.empty(VOCAB_SIZE, dtype=torch.int32, device="meta")
        view = replace(view, target_to_draft=table)
    return view
