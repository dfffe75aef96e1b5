"""Triton device helpers that bias a block of logits and reduce it."""

import triton
import triton.language as tl

from specreg.kernels.drafting.kernel import (
    LANES,
    LOG2E,
    block_peaks,
    by_block,
    load_temperature,
    pack,
    sum_by_block,
)
from specreg.kernels.markov_sample.draws.kernel import load_drawn

__all__ = ["load_base", "load_table", "part_columns", "reduce_rows", "rounded_bias"]


@triton.jit
def _tanh(x):
    """Accurate near 0 too, where the quotient of exponentials is not."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = tl.div_rn(1.0 - decay, 1.0 + decay)
    square = x * x
    series = 1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0)))
    return tl.where(tl.abs(x) < 0.1, x * series, tl.where(x < 0.0, -size, size))


@triton.jit
def rounded_bias(head, acc, dtype: tl.constexpr):
    """Sums as a bias: rounded to `dtype`, capped, scaled and rounded again."""
    bias = acc.to(dtype)
    if head.soft_cap is not None or head.scale is not None:
        exact = bias.to(tl.float32)
        if head.soft_cap is not None:
            cap = tl.zeros_like(exact) + head.soft_cap
            exact = _tanh(tl.div_rn(exact, cap)) * head.soft_cap
        if head.scale is not None:
            exact = exact * head.scale
        bias = exact.to(dtype)
    return bias


@triton.jit
def load_table(
    table, stride, rows, mask, first, RANK: tl.constexpr, SIZE: tl.constexpr, axis: tl.constexpr
):
    """Elements `first ..` of some rows of a table, SIZE of them, along `axis`; 0 where masked."""
    at = tl.expand_dims(first + tl.arange(0, SIZE), 1 - axis)
    mask = tl.expand_dims(mask, axis)
    if RANK % SIZE != 0:
        mask = mask & (at < RANK)
    row = tl.expand_dims(table + rows.to(tl.int64) * stride, axis)
    return tl.load(row + at, mask=mask, other=0.0)


@triton.jit
def reduce_rows(
    outs,
    cells,
    reqs,
    sizes,
    first,
    step,
    block,
    NUM_SHARDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Largest logit and mass of a block of ROWS requests, which this program has stored.

    Cut as `specreg.kernels.drafting.kernel.block_columns` cuts blocks, a request in place of a
    block: a row of the tile is what a warp reads at once, and the rows of a request fall to one.
    """
    SPAN: tl.constexpr = LANES * VECTOR
    row = tl.arange(0, ROWS * (BLOCK_SIZE // SPAN))
    request = first + (row & (ROWS - 1))
    start = block * BLOCK_SIZE + (row & -ROWS) * (SPAN // ROWS)
    req = tl.load(reqs.idx_mapping + request, mask=request < sizes.num_reqs, other=-1)
    columns = start[:, None] + tl.arange(0, SPAN)[None, :]
    x = load_drawn(outs, cells, sizes, request[:, None], req[:, None], step, columns, NUM_SHARDS)
    x = by_block(x, ROWS, VECTOR)
    peak = block_peaks(x)
    request = first + tl.arange(0, ROWS)
    req = tl.load(reqs.idx_mapping + request, mask=request < sizes.num_reqs, other=-1)
    _, _, scale = load_temperature(reqs.temperature, tl.where(req >= 0, req, 0))
    factor = tl.zeros_like(x) + scale[None, :, None, None]
    shift = tl.zeros_like(x) - (peak * scale)[None, :, None, None]
    packed = pack(peak.to(tl.int32, bitcast=True), sum_by_block(tl.exp2(tl.fma(x, factor, shift))))
    tl.store(outs.blocks + request * sizes.num_blocks + block, packed, mask=req >= 0)


@triton.jit
def part_columns(block, i, is_odd, NUM_PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of the part of a block that comes as the `i`-th; the last ones first if `is_odd`."""
    part = block * NUM_PARTS + tl.where(is_odd, NUM_PARTS - 1 - i, i)
    return part * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def load_base(logits, columns, req, sizes, is_part):
    """`[rows, columns]` of the base logits, -inf where there are none."""
    num_columns = tl.where((req >= 0) & is_part, sizes.num_columns, 0)
    mask = (columns[None, :] >= 0) & (columns[None, :] < num_columns[:, None])
    return tl.load(logits[:, None] + columns[None, :], mask=mask, other=float("-inf"))
