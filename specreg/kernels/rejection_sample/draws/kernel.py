"""Triton device helpers that draw the token behind the kept drafts.

Their torch twins are in `specreg.kernels.rejection_sample.draws.reference`.
"""

import triton
import triton.language as tl

from specreg.kernels.common.cells.kernel import cell_logits, statistics_of
from specreg.kernels.common.kernel import (
    SUM_BITS,
    clean_logits,
    draw_index,
    owned_row,
    sum_weights,
    to_units,
)
from specreg.kernels.drafting.kernel import block_columns, by_block, sum_by_block
from specreg.kernels.random.kernel import (
    STREAM_BONUS,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    random_words,
)
from specreg.kernels.rejection_sample.blocks.kernel import (
    LOG2E,
    blocks_of,
    finite,
    float_record,
    int_record,
    load_target,
    mass_units,
    scale_of,
)
from specreg.kernels.rejection_sample.draws import reference
from specreg.kernels.rejection_sample.rows.kernel import (
    GREEDY,
    RESIDUAL,
    WITHOUT_DRAFT,
)

__all__ = ["emit", "excess", "fraction", "fraction_units", "residual_sums"]

FRACTION_SCALE = tl.constexpr(2.0**reference.FRACTION_BITS)
FRACTION_UNIT = tl.constexpr(2.0**-reference.FRACTION_BITS)
RESIDUAL_FLOOR = tl.constexpr(reference.RESIDUAL_FLOOR)
SUM_UNIT = tl.constexpr(2.0**-SUM_BITS.value)
TINY = tl.constexpr(reference.TINY)


@triton.jit
def fraction_units(shares):
    """int64 of fp32 `shares` of probability, so that sums are exact."""
    return (shares * FRACTION_SCALE).to(tl.int64)


@triton.jit
def fraction(units):
    """fp32 share of probability from summed units."""
    return units.to(tl.float32) * FRACTION_UNIT


@triton.jit
def excess(
    x, top, scale, log2_total, weight, columns, first, cache, cell_row, step, vocab_size,
    SIZE: tl.constexpr,
):  # fmt: skip
    """max(weight p - q, 0) for cleaned target logits `x` at `columns`, see `cell_logits`."""
    p = tl.exp2((x - top) * scale - log2_total)
    at = statistics_of(cache, cell_row, step)
    y = cell_logits(cache, cell_row, step, columns, first, vocab_size, SIZE)
    scale_q = scale_of(tl.load(cache.temperature + at))
    q = tl.exp2(y * scale_q - tl.load(cache.logsumexp + at) * LOG2E)
    return tl.maximum(weight * p - q, 0.0)


@triton.jit
def residual_sums(
    sums, rows, target, batch, cache, req, slot, row, step, weight,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Sum max(weight p - q, 0) over the NUM_BLOCKS blocks of program axis 0; store to `sums`.

    As with target blocks: peak times a sum of integers, so that no order of adding can show.
    """
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = clean_logits(load_target(target, row, columns, True))
    scale = scale_of(tl.load(batch.temperature + slot))
    floats = float_record(rows, req, step, NUM_ROWS)
    cell_row = owned_row(slot, NUM_SHARDS, cache.shard_idx)
    left = excess(
        x, tl.load(floats), scale, tl.load(floats + 1), weight, columns, first * BLOCK_SIZE, cache,
        cell_row, step, target.vocab_size, NUM_BLOCKS * BLOCK_SIZE,
    )  # fmt: skip
    left = by_block(left, NUM_BLOCKS, VECTOR)
    # Values that are not negative compare as their bits do, and a warp can compare integers.
    bits = tl.max(tl.max(left, 3), 0).to(tl.int32, bitcast=True)
    peak = tl.max(bits, 1).to(tl.float32, bitcast=True)
    inverse = tl.where(peak > TINY, tl.div_rn(1.0, peak), 0.0)
    mass = sum_by_block(left * inverse[None, :, None, None])
    block = first + tl.arange(0, NUM_BLOCKS)
    tl.store(sums + block, peak * (mass.to(tl.float32) * SUM_UNIT), mask=block < rows.num_blocks)


@triton.jit
def _draw_token(
    sums, rows, target, batch, cache, req, slot, row, num_rows, step, kind, weight,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Draw a block of a row with one word and a column of it with another."""
    scale = scale_of(tl.load(batch.temperature + slot))
    block, peak, mass = blocks_of(rows, req, step, NUM_ROWS, NUM_BLOCKS)
    at_draft = batch.draft_tokens + req * batch.draft_stride + step
    removed = tl.load(at_draft, mask=kind == WITHOUT_DRAFT, other=-1)
    if kind == WITHOUT_DRAFT:
        home = removed // BLOCK_SIZE
        columns = home * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        x = clean_logits(load_target(target, row, columns, columns != removed))
        home_peak = tl.max(x, 0)
        home_mass = sum_weights(tl.exp2((x - finite(home_peak)) * scale), 0)
        peak = tl.where(block == home, home_peak, peak)
        mass = tl.where(block == home, home_mass, mass)
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")
    top = finite(top)
    units = mass_units(peak, mass, top, scale)
    is_residual = kind < 0
    if cache.state is not None:  # noqa: SIM102 - this is known at compile time, the next is not
        if kind == RESIDUAL:
            shares = tl.load(sums + block, mask=block < rows.num_blocks, other=0.0)
            is_residual = fraction(tl.sum(fraction_units(shares), 0)) > RESIDUAL_FLOOR
            units = tl.where(is_residual, to_units(shares, tl.max(shares, 0)), units)

    stream = tl.where(num_rows > 1, STREAM_BONUS, STREAM_TARGET)
    stream = tl.where(step < num_rows - 1, STREAM_RESIDUAL, stream)
    position = tl.load(batch.positions + req) + step
    word0, word1, _, _ = random_words(tl.load(batch.seeds + slot), position, step, stream)

    chosen = tl.minimum(draw_index(units, word0), rows.num_blocks - 1)
    columns = chosen * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = clean_logits(load_target(target, row, columns, columns != removed))
    weights = tl.exp2((x - finite(tl.max(x, 0))) * scale)
    if cache.state is not None:  # noqa: SIM102 - as above
        if is_residual:
            log2_total = tl.load(float_record(rows, req, step, NUM_ROWS) + 1)
            cell_row = owned_row(slot, NUM_SHARDS, cache.shard_idx)
            weights = excess(
                x, top, scale, log2_total, weight, columns, chosen * BLOCK_SIZE, cache, cell_row,
                step, target.vocab_size, BLOCK_SIZE,
            )  # fmt: skip
    lane = draw_index(to_units(weights, tl.max(weights, 0)), word1)
    token = tl.where(is_empty, tl.maximum(removed, 0), chosen * BLOCK_SIZE + lane)
    return tl.minimum(token, target.vocab_size - 1)  # only a temperature of NaN gets this far


@triton.jit
def emit(
    output, sums, rows, target, batch, cache, req, slot, first_row, num_rows, stop, kind, weight,
    num_unusable,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write a request's outputs: `stop` drafts and the token of row `stop`, whose kind is given."""
    step = tl.arange(0, NUM_STEPS)
    at_draft = batch.draft_tokens + req * batch.draft_stride + step
    drafts = tl.load(at_draft, mask=step < stop, other=-1)
    at = output.sampled + req * NUM_ROWS
    last = tl.where(num_rows > 0, stop, -1)
    tl.store(at + step, drafts, mask=(step < NUM_ROWS) & (step != last))
    tl.store(output.num_sampled + req, tl.where(num_rows > 0, stop + 1, 0))
    tl.store(output.num_nans + req, num_unusable)
    if num_rows > 0:
        if kind == GREEDY:
            tl.store(at + stop, tl.load(int_record(rows, req, stop, NUM_ROWS) + 1).to(tl.int64))
        else:
            token = _draw_token(
                sums, rows, target, batch, cache, req, slot, first_row + stop, num_rows, stop,
                kind, weight, NUM_ROWS, NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE,
            )  # fmt: skip
            tl.store(at + stop, token)
