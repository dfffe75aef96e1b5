"""Method `block` in Triton: four launches, three without a cache.

Rows are reduced and judged (`rejection_sample.rows`); then blocks of residuals are summed, those of
every draft in the block, or where cells hold candidates of the one that is drawn from; a program a
request keeps the longest prefix that passes and draws.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specreg.capabilities import DraftLogitsLayout
from specreg.kernels.common.cells.kernel import candidates_of, statistics_of
from specreg.kernels.common.kernel import clean_logits, owned_row
from specreg.kernels.random.kernel import uniform
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput
from specreg.kernels.rejection_sample.blocks.kernel import (
    LOG2E,
    float_record,
    load_target,
    request,
    scale_of,
    target_blocks_kernel,
)
from specreg.kernels.rejection_sample.draws.kernel import (
    emit,
    fraction,
    fraction_units,
    residual_sums,
)
from specreg.kernels.rejection_sample.prepare import Part, in_parts
from specreg.kernels.rejection_sample.rows.kernel import (
    GREEDY,
    RESIDUAL,
    TARGET,
    WITHOUT_DRAFT,
    accept_word,
    judge_kernel,
    passes,
    verdicts,
)

__all__ = [
    "block_draw_kernel",
    "block_residuals_kernel",
    "block_sample_triton",
    "candidates_draw_kernel",
    "candidates_residual_kernel",
]


@triton.jit
def _log2_chances(rows, req, step, NUM_ROWS: tl.constexpr):
    """log2 of the chance P of each prefix, for a vector of steps up to the block's end."""
    chances = step.to(tl.float32) * 0.0
    chance = tl.sum(chances, 0)
    for i in tl.static_range(1, NUM_ROWS):
        log2_ratio = tl.load(float_record(rows, req, i - 1, NUM_ROWS) + 2)
        chance = tl.minimum(chance + log2_ratio, 0.0)
        chances = tl.where(step == i, chance, chances)
    return chances


@triton.jit
def _end(step, kinds, NUM_STEPS: tl.constexpr):
    """Drafts of the block: those before the first that has no distribution."""
    return tl.min(tl.where(kinds == TARGET, step, NUM_STEPS), 0)


@triton.jit
def _at(step, stop, values):
    """One of a vector of values."""
    return tl.sum(tl.where(step == stop, values, 0), 0)


@triton.jit
def _one_hot_mass(rows, req, step, chances, is_one_hot, NUM_ROWS: tl.constexpr):
    """S of the steps whose draft distribution is one-hot; 0 of the others."""
    at = float_record(rows, req, step, NUM_ROWS) + 2
    log2_p = tl.load(at, mask=is_one_hot, other=0.0)
    left = tl.exp2(chances) * tl.maximum(1.0 - tl.exp2(log2_p), 0.0)
    return tl.where(is_one_hot, left, 0.0)


@triton.jit
def _stop(batch, req, slot, step, end, is_accepted, kinds, chances, mass, NUM_STEPS: tl.constexpr):
    """Length of the longest prefix that passes; of a greedy request, of that of argmaxes.

    `mass` is S.
    """
    is_inside = (step >= 1) & (step < end)
    word = accept_word(batch, req, slot, tl.maximum(step - 1, 0))
    whole = mass + (1.0 - tl.exp2(chances))
    is_passed = is_inside & ((uniform(word) * whole < mass) | (whole <= 0.0))
    is_passed = is_passed | ((step >= 1) & (step == end) & passes(word, chances))
    longest = tl.max(tl.where(is_passed, step, 0), 0)
    is_greedy = _at(step, 0, kinds) == GREEDY
    return tl.where(is_greedy, tl.min(tl.where(is_accepted, NUM_STEPS, step), 0), longest)


@triton.jit
def block_residuals_kernel(
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
    """Program (i, step, req): sum max(P p - q, 0) over NUM_BLOCKS blocks of a draft's row."""
    at_step = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    if at_step >= num_rows - 1:
        return
    step = tl.arange(0, NUM_STEPS)
    _, kinds, _ = verdicts(rows, req, step, num_rows, NUM_ROWS)
    if (at_step >= _end(step, kinds, NUM_STEPS)) | (_at(step, at_step, kinds) != RESIDUAL):
        return
    chance = _at(step, at_step, tl.exp2(_log2_chances(rows, req, step, NUM_ROWS)))
    at = sums + (req * (NUM_ROWS - 1) + at_step) * rows.num_blocks
    residual_sums(
        at, rows, target, batch, cache, req, slot, first_row + at_step, at_step, chance, NUM_ROWS,
        NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE, VECTOR,
    )  # fmt: skip


@triton.jit
def block_draw_kernel(
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
    """Program (req): keep the longest prefix that passes and draw one more token."""
    req = tl.program_id(0).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    step = tl.arange(0, NUM_STEPS)
    is_accepted, kinds, num_unusable = verdicts(rows, req, step, num_rows, NUM_ROWS)
    end = _end(step, kinds, NUM_STEPS)
    is_inside = (step >= 1) & (step < end)
    chances = _log2_chances(rows, req, step, NUM_ROWS)
    mass = _one_hot_mass(rows, req, step, chances, is_inside & (kinds == WITHOUT_DRAFT), NUM_ROWS)
    if cache.state is not None:
        block = tl.arange(0, NUM_BLOCKS)[None, :]
        is_read = (is_inside & (kinds == RESIDUAL))[:, None] & (block < rows.num_blocks)
        at = sums + (req * (NUM_ROWS - 1) + step)[:, None] * rows.num_blocks + block
        mass += fraction(tl.sum(fraction_units(tl.load(at, mask=is_read, other=0.0)), 1))
    stop = _stop(batch, req, slot, step, end, is_accepted, kinds, chances, mass, NUM_STEPS)
    emit(
        output, sums + (req * (NUM_ROWS - 1) + stop) * rows.num_blocks, rows, target, batch, cache,
        req, slot, first_row, num_rows, stop, _at(step, stop, kinds),
        _at(step, stop, tl.exp2(chances)), num_unusable, NUM_ROWS, NUM_STEPS, NUM_SHARDS,
        NUM_BLOCKS, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def _candidates_mass(
    rows, target, batch, cache, req, slot, first_row, step, chances, is_read,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """S of the steps `is_read` from the candidates of their cells; 0 of the others."""
    cell_row = owned_row(slot, NUM_SHARDS, cache.shard_idx)
    ids, y = candidates_of(cache, cell_row, step, is_read, NUM_CANDIDATES)
    x = load_target(target, (first_row + step)[:, None], ids, ids >= 0)
    floats = float_record(rows, req, step, NUM_ROWS)
    top = tl.load(floats, mask=is_read, other=0.0)
    log2_total = tl.load(floats + 1, mask=is_read, other=0.0)
    scale = scale_of(tl.load(batch.temperature + slot, mask=slot >= 0, other=1.0))
    p = tl.exp2((clean_logits(x) - top[:, None]) * scale - log2_total[:, None])
    at = statistics_of(cache, cell_row, step)
    scale_q = scale_of(tl.load(cache.temperature + at, mask=is_read, other=1.0))
    log2_total_q = tl.load(cache.logsumexp + at, mask=is_read, other=0.0) * LOG2E
    q = tl.exp2(y * scale_q[:, None] - log2_total_q[:, None])
    weight = tl.exp2(chances)
    outside = 1.0 - fraction(tl.sum(fraction_units(p), 1))
    left = fraction_units(tl.maximum(weight[:, None] * p - q, 0.0))
    mass = tl.maximum(weight * outside, 0.0) + fraction(tl.sum(left, 1))
    return tl.where(is_read, mass, 0.0)


@triton.jit
def _candidates_stop(
    rows, target, batch, cache, req, slot, first_row, num_rows,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Drafts kept, kind and P of the row behind them, and how many rows are unusable."""
    step = tl.arange(0, NUM_STEPS)
    is_accepted, kinds, num_unusable = verdicts(rows, req, step, num_rows, NUM_ROWS)
    end = _end(step, kinds, NUM_STEPS)
    is_inside = (step >= 1) & (step < end)
    chances = _log2_chances(rows, req, step, NUM_ROWS)
    mass = _one_hot_mass(rows, req, step, chances, is_inside & (kinds == WITHOUT_DRAFT), NUM_ROWS)
    mass += _candidates_mass(
        rows, target, batch, cache, req, slot, first_row, step, chances,
        is_inside & (kinds == RESIDUAL), NUM_ROWS, NUM_SHARDS, NUM_CANDIDATES,
    )  # fmt: skip
    stop = _stop(batch, req, slot, step, end, is_accepted, kinds, chances, mass, NUM_STEPS)
    return stop, _at(step, stop, kinds), _at(step, stop, tl.exp2(chances)), num_unusable


@triton.jit
def candidates_residual_kernel(
    sums,
    rows,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program (i, req): sum max(P p - q, 0) over NUM_BLOCKS blocks, if that is drawn from."""
    req = tl.program_id(1).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    stop, kind, chance, _ = _candidates_stop(
        rows, target, batch, cache, req, slot, first_row, num_rows, NUM_ROWS, NUM_STEPS,
        NUM_SHARDS, NUM_CANDIDATES,
    )  # fmt: skip
    if kind != RESIDUAL:
        return
    residual_sums(
        sums + req * rows.num_blocks, rows, target, batch, cache, req, slot, first_row + stop, stop,
        chance, NUM_ROWS, NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE, VECTOR,
    )  # fmt: skip


@triton.jit
def candidates_draw_kernel(
    output,
    sums,
    rows,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_CANDIDATES: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req): keep the longest prefix that passes and draw one more token."""
    req = tl.program_id(0).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    stop, kind, chance, num_unusable = _candidates_stop(
        rows, target, batch, cache, req, slot, first_row, num_rows, NUM_ROWS, NUM_STEPS,
        NUM_SHARDS, NUM_CANDIDATES,
    )  # fmt: skip
    emit(
        output, sums + req * rows.num_blocks, rows, target, batch, cache, req, slot, first_row,
        num_rows, stop, kind, chance, num_unusable, NUM_ROWS, NUM_STEPS, NUM_SHARDS, NUM_BLOCKS,
        BLOCK_SIZE,
    )  # fmt: skip


def block_sample_triton(batch: RejectionBatch) -> RejectionOutput:
    """Launch method `block` on the current stream. No host synchronisation."""
    has_candidates = batch.cache is not None and batch.cache.layout is DraftLogitsLayout.TOP_K
    if has_candidates:
        return in_parts(batch, _verify_candidates, num_residuals=1)
    return in_parts(batch, _verify, num_residuals=batch.num_rows - 1)


def _verify(part: Part) -> None:
    part.launch_blocks(target_blocks_kernel)
    part.launch_rows(judge_kernel)
    if part.has_cache and part.num_rows > 1:
        part.launch_residuals(block_residuals_kernel, part.num_rows - 1)
    part.launch_draw(block_draw_kernel)


def _verify_candidates(part: Part) -> None:
    part.launch_blocks(target_blocks_kernel)
    part.launch_rows(judge_kernel)
    part.launch_residuals(candidates_residual_kernel)
    part.launch_draw(candidates_draw_kernel)
