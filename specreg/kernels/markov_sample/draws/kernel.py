"""Triton device helpers that draw a step's tokens from the blocks that its launch has left."""

import triton
import triton.language as tl

from specreg.kernels.common.kernel import (
    LOGIT_MAX,
    UNIT_BITS,
    clean_logits,
    draw_index,
    sum_weights,
)
from specreg.kernels.drafting.kernel import (
    MASS_SCALE,
    MASS_UNIT,
    SHIFT_MAX,
    load_temperature,
    logits_cell,
    peak_of,
    store_statistics,
    weight_of,
)
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["draw", "draw_together", "load_drawn", "stored_rows"]

WEIGHT_SCALE = tl.constexpr(2.0**UNIT_BITS.value)


@triton.jit
def stored_rows(outs, cells, request, req, step, NUM_SHARDS: tl.constexpr):
    """Where a step's logits of some requests lie: in their cells, or in the scratch if not owned.

    `request` and `req` are scalars, or tensors of one shape. Without cells all are in the scratch,
    and without a scratch all are in cells.
    """
    if cells is not None:
        is_owned, row = logits_cell(cells, req, step + request * 0, NUM_SHARDS)
        if outs.scratch is not None:
            row = tl.where(is_owned, row, outs.scratch + request * outs.scratch_stride)
    else:
        row = outs.scratch + request * outs.scratch_stride
    return row


@triton.jit
def load_drawn(outs, cells, sizes, request, req, step, columns, NUM_SHARDS: tl.constexpr):
    """Logits that a step has left at `columns`; -inf behind the last column and for padding.

    `request` and `req` are scalars, or broadcast with `columns`.
    """
    row = stored_rows(outs, cells, request, req, step, NUM_SHARDS)
    num_columns = tl.where(req >= 0, sizes.num_columns, 0)
    return tl.load(row + columns, mask=columns < num_columns, other=float("-inf"))


@triton.jit
def _draw_greedily(peak, low, live, BLOCK_SIZE: tl.constexpr):
    """The first column of the largest logit; whether a block holds a NaN."""
    block = tl.argmax(peak, 0)
    lane = tl.sum(tl.where(tl.arange(0, peak.shape[0]) == block, low, 0), 0)
    return block * BLOCK_SIZE + tl.where(lane < 0, ~lane, lane), tl.sum(live & (low < 0), 0) > 0


@triton.jit
def draw(
    outs,
    cells,
    statistics,
    reqs,
    target_ids,
    sizes,
    request,
    step,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """One request's token of `step`, whose launch has ended, and the statistics if owned."""
    at = outs.tokens + request * sizes.num_steps + step
    req = tl.load(reqs.idx_mapping + request)
    block = tl.arange(0, NUM_BLOCKS)
    live = block < sizes.num_blocks
    packed = tl.load(outs.blocks + request * sizes.num_blocks + block, mask=live, other=0)
    if req < 0:
        tl.store(at, -1)
    else:
        peak = tl.where(live, peak_of(packed), float("-inf"))
        mass = packed.to(tl.int32)
        if reqs.temperature is None:
            column, is_bad = _draw_greedily(peak, mass, live, BLOCK_SIZE)
            is_empty = tl.max(peak, 0) == float("-inf")
        else:
            is_drawn, divisor, scale = load_temperature(reqs.temperature, req)
            lanes = tl.arange(0, BLOCK_SIZE)
            # Rare: blocks with a NaN, or too large for the launch that has reduced them.
            is_odd = (peak != float("-inf")) & ~(
                (tl.abs(peak) <= LOGIT_MAX) & (tl.abs(peak * scale) < SHIFT_MAX)
            )
            num_odd = tl.sum(is_odd.to(tl.int32), 0)
            was_odd = is_odd
            is_bad = num_odd < 0
            while num_odd > 0:
                odd = tl.argmax(is_odd.to(tl.int32), 0)
                columns = odd * BLOCK_SIZE + lanes
                x = load_drawn(outs, cells, sizes, request, req, step, columns, NUM_SHARDS)
                x = x.to(tl.float32)
                is_bad = is_bad | (tl.sum((x != x).to(tl.int32), 0) > 0)
                x = clean_logits(x)
                largest = tl.max(x, 0)
                weights = tl.where(x == float("-inf"), 0.0, tl.exp2((x - largest) * scale))
                mass = tl.where(block == odd, sum_weights(weights, 0), mass)
                peak = tl.where(block == odd, largest, peak)
                is_odd = is_odd & (block != odd)
                num_odd -= 1

            top = tl.max(peak, 0)
            is_empty = top == float("-inf")
            is_drawn = is_drawn & ~is_empty
            word0, word1, _, _ = random_words(
                tl.load(reqs.seeds + req),
                tl.load(reqs.positions + request) + step,
                step,
                STREAM_DRAFT,
            )
            factor = tl.where(was_odd, tl.exp2((peak - top) * scale), weight_of(peak, top, scale))
            shares = mass.to(tl.float32) * MASS_SCALE * factor
            units = tl.where(peak == float("-inf"), 0.0, shares).to(tl.int64)
            total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
            chosen = tl.where(is_drawn, draw_index(units, word0), tl.argmax(peak, 0))

            columns = chosen * BLOCK_SIZE + lanes
            x = load_drawn(outs, cells, sizes, request, req, step, columns, NUM_SHARDS)
            x = clean_logits(x)
            weights = tl.exp2((x - tl.max(x, 0)) * scale)
            units = tl.where(x == float("-inf"), 0.0, weights * WEIGHT_SCALE).to(tl.int64)
            lane = tl.where(is_drawn, draw_index(units, word1), tl.argmax(x, 0))
            column = chosen * BLOCK_SIZE + lane
            if statistics is not None:
                logsumexp = tl.where(is_drawn, tl.div_rn(top, divisor) + tl.log(total), 0.0)
                drawn_at = tl.where(tl.load(reqs.temperature + req) == 0.0, 0.0, divisor)
                store_statistics(statistics, req, step, drawn_at, logsumexp, is_empty, NUM_SHARDS)

        token = column.to(tl.int64)
        if target_ids is not None:
            token = tl.load(target_ids + token).to(tl.int64)
        tl.store(at, token)
        if outs.num_nans is not None:
            tl.atomic_add(outs.num_nans + req, 1, mask=is_bad | is_empty)


@triton.jit
def draw_together(
    outs,
    cells,
    statistics,
    reqs,
    target_ids,
    sizes,
    step,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Draw the tokens of `step` together with all other programs, and wait for the last one.

    A counter holds the draws that are claimed, and above 32 bits those that are done. It is read by
    atomics alone: what each thread loads for itself may differ between the threads of a program.
    """
    counter = outs.counters + step
    one_done = tl.full((), 1 << 32, tl.int64)
    state = tl.atomic_add(counter, 1, sem="acquire")
    while (state & 0x7FFFFFFF) < sizes.num_reqs:
        draw(
            outs,
            cells,
            statistics,
            reqs,
            target_ids,
            sizes,
            state & 0x7FFFFFFF,
            step,
            NUM_SHARDS,
            NUM_BLOCKS,
            BLOCK_SIZE,
        )
        tl.debug_barrier()  # the token is written before any thread says so
        state = tl.atomic_add(counter, one_done + 1, sem="acq_rel") + one_done
    while (state >> 32) < sizes.num_reqs:
        state = tl.atomic_add(counter, 0, sem="acquire")
