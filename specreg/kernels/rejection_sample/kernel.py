"""Method `standard` in Triton: four launches, three without a cache.

Rows are reduced and judged (`rejection_sample.rows`); where a draft was rejected, blocks of its
residual are summed; a program a request draws.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.blocks.kernel import request, target_blocks_kernel
from specreg.kernels.rejection_sample.draws.kernel import emit, residual_sums
from specreg.kernels.rejection_sample.prepare import Part, in_parts
from specreg.kernels.rejection_sample.rows.kernel import (
    RESIDUAL,
    first_rejection,
    judge_kernel,
)

__all__ = ["draw_kernel", "rejection_sample_triton", "residual_blocks_kernel"]


@triton.jit
def residual_blocks_kernel(
    sums,
    rows,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program (i, req): sum max(p - q, 0) over NUM_BLOCKS blocks, if that is what is drawn from."""
    req = tl.program_id(1).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    stop, kind, _ = first_rejection(rows, req, num_rows, NUM_ROWS, NUM_STEPS)
    if kind != RESIDUAL:
        return
    residual_sums(
        sums + req * rows.num_blocks, rows, target, batch, cache, req, slot, first_row + stop, stop,
        1.0, NUM_ROWS, NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE, VECTOR,
    )  # fmt: skip


@triton.jit
def draw_kernel(
    output,
    sums,
    rows,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req): keep the drafts before the first rejection and draw one more token."""
    req = tl.program_id(0).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    stop, kind, num_unusable = first_rejection(rows, req, num_rows, NUM_ROWS, NUM_STEPS)
    emit(
        output, sums + req * rows.num_blocks, rows, target, batch, cache, req, slot, first_row,
        num_rows, stop, kind, 1.0, num_unusable, NUM_ROWS, NUM_STEPS, NUM_SHARDS, NUM_BLOCKS,
        BLOCK_SIZE,
    )  # fmt: skip


def rejection_sample_triton(batch: RejectionBatch) -> RejectionOutput:
    """Launch method `standard` on the current stream. No host synchronisation."""
    return in_parts(batch, _verify, num_residuals=1)


def _verify(part: Part) -> None:
    part.launch_blocks(target_blocks_kernel)
    part.launch_rows(judge_kernel)
    if part.has_cache:
        part.launch_residuals(residual_blocks_kernel)
    part.launch_draw(draw_kernel)
