"""Method `synthetic` in Triton: three launches."""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl

from specreg.kernels.random.kernel import uniform
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.blocks.kernel import (
    blocks_of,
    request,
    scale_of,
    target_blocks_kernel,
)
from specreg.kernels.rejection_sample.kernel import draw_kernel
from specreg.kernels.rejection_sample.prepare import Part, in_parts
from specreg.kernels.rejection_sample.rows.kernel import (
    GREEDY,
    TARGET,
    accept_word,
    draft_of,
    greedy_token,
    row_total,
    store_judgement,
)

__all__ = ["synthetic_judge_kernel", "synthetic_sample_triton"]


@triton.jit
def synthetic_judge_kernel(
    rows,
    rates,
    target,
    batch,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (step, req): accept a row's draft at its rate, given those before it."""
    step = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    block, peak, mass = blocks_of(rows, req, step, NUM_ROWS, NUM_BLOCKS)  # on its way meanwhile
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    if step >= num_rows:
        return
    draft, has_draft = draft_of(batch, req, step, num_rows, target.vocab_size)
    temperature = tl.load(batch.temperature + slot)
    scale = scale_of(temperature)
    row = first_row + step
    top, log2_total, peak, is_unusable = row_total(
        rows, target, req, step, row, scale, block, peak, mass, NUM_ROWS, BLOCK_SIZE
    )
    rate = tl.load(rates + step, mask=has_draft, other=0.0)
    before = tl.load(rates + step - 1, mask=has_draft & (step > 0), other=1.0)
    word = accept_word(batch, req, slot, step)
    is_accepted = has_draft & (uniform(word) * before < rate)
    token = draft
    kind = tl.where(temperature == 0.0, GREEDY, TARGET)
    if temperature == 0.0:
        token = greedy_token(target, row, peak, BLOCK_SIZE)
    store_judgement(
        rows, req, step, top, log2_total, 0.0, is_accepted, kind, is_unusable, token, NUM_ROWS
    )


def synthetic_sample_triton(batch: RejectionBatch) -> RejectionOutput:
    """Launch method `synthetic` on the current stream. No host synchronisation."""
    rates = batch.acceptance_rates
    assert rates is not None

    def verify(part: Part) -> None:
        part.launch_blocks(target_blocks_kernel)
        part.launch_rows(synthetic_judge_kernel, rates=rates)
        part.launch_draw(draw_kernel)

    return in_parts(replace(batch, cache=None), verify, num_residuals=0)
