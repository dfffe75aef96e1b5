"""Triton device helpers that bias a block of logits and reduce it."""

import triton
import triton.language as tl

from specreg.kernels.common.kernel import clean_logits, sum_weights
from specreg.kernels.drafting.kernel import (
    LANES,
    LOG2E,
    larger_or_nan,
    load_temperature,
    logits_cell,
    pack,
)
from specreg.kernels.markov_sample.draws.kernel import load_drawn

__all__ = [
    "end_part",
    "load_base",
    "load_table",
    "nothing_yet",
    "part_columns",
    "reduce_rows",
    "rounded_bias",
]


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
def part_columns(block, i, is_odd, NUM_PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of the part of a block that comes as the `i`-th; the last ones first if `is_odd`."""
    part = block * NUM_PARTS + tl.where(is_odd, NUM_PARTS - 1 - i, i)
    return part * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def load_base(logits, columns, req, sizes):
    """`[rows, columns]` of the base logits, -inf where there are none. They are read only once."""
    num_columns = tl.where(req >= 0, sizes.num_columns, 0)
    mask = columns[None, :] < num_columns[:, None]
    first = logits[:, None] + columns[None, :]
    return tl.load(first, mask=mask, other=float("-inf"), eviction_policy="evict_first")


@triton.jit
def nothing_yet(ROWS: tl.constexpr):
    """The largest logit of each row so far, its lane in the block, and whether there was a NaN."""
    lane = tl.zeros((ROWS,), tl.int32)
    return tl.full((ROWS,), float("-inf"), tl.float32), lane, lane > 0


@triton.jit
def end_part(
    rows,
    goes,
    begun,
    req,
    best,
    NUM_SHARDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_PADDED: tl.constexpr,
):
    """Add its bias to a part and store it in `rows`; without rows drafts are greedy.

    Of these the best is kept, and returned as `nothing_yet` begins it. `goes` is the same for all
    parts: the cells that they are scattered into too, or None, their ids there, sizes, step, block.
    `begun` is the part: columns, base logits, bias.
    """
    cells, target_ids, sizes, step, block = goes
    columns, x, bias = begun
    x = (x.to(tl.float32) + tl.trans(bias).to(tl.float32)).to(x.dtype)
    is_column = columns < sizes.num_columns
    if rows is None:
        largest, lane, has_nan = best
        wide = tl.where(is_column[None, :], x.to(tl.float32), float("-inf"))
        has_nan = has_nan | (tl.max((wide != wide).to(tl.int32), 1) > 0)
        wide = clean_logits(wide)
        peak = tl.max(wide, 1)
        lanes = (columns - block * BLOCK_SIZE)[None, :]
        first = tl.min(tl.where(wide == peak[:, None], lanes, BLOCK_SIZE), 1)
        is_better = (peak > largest) | ((peak == largest) & (first < lane))
        best = tl.where(is_better, peak, largest), tl.where(is_better, first, lane), has_nan
    else:
        x = x.to(rows.dtype.element_ty)
        if IS_PADDED:
            x = tl.where(is_column[None, :], x, float("-inf"))
        width = tl.where(req >= 0, sizes.width, 0)
        mask = columns[None, :] < width[:, None]
        # They are read back by this program, and by the one that draws.
        tl.store(rows[:, None] + columns[None, :], x, mask=mask, eviction_policy="evict_last")
        if cells is not None:
            is_owned, cell = logits_cell(cells, req, step.to(tl.int64), NUM_SHARDS)
            ids = tl.load(target_ids + columns, mask=is_column, other=0)
            mask = is_owned[:, None] & is_column[None, :]
            tl.store(cell[:, None] + ids[None, :], x, mask=mask)
    return best


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
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Largest logit and mass of a block of ROWS requests, which this program has stored.

    The rows are loaded before the first of them is reduced, so that they are waited for once.
    """
    SPAN: tl.constexpr = LANES * VECTOR  # columns that a warp reads at once
    groups = ()  # type: tl.tuple
    for start in tl.static_range(0, ROWS, GROUP):
        request = first + start + tl.arange(0, GROUP)
        req = tl.load(reqs.idx_mapping + request, mask=request < sizes.num_reqs, other=-1)
        _, _, scale = load_temperature(reqs.temperature, tl.where(req >= 0, req, 0))
        spans = ()  # type: tl.tuple
        for lane in tl.static_range(0, BLOCK_SIZE, SPAN):
            at = (block * BLOCK_SIZE + lane + tl.arange(0, SPAN))[None, :]
            each, its_req = request[:, None], req[:, None]
            spans += (load_drawn(outs, cells, sizes, each, its_req, step, at, NUM_SHARDS),)
        groups += ((request, req, scale, spans),)
    for i in tl.static_range(ROWS // GROUP):
        request, req, scale, spans = groups[i]
        peak, mass = _reduce_spans(spans, scale)
        packed = pack(peak.to(tl.int32, bitcast=True), mass)
        tl.store(outs.blocks + request * sizes.num_blocks + block, packed, mask=req >= 0)


@triton.jit
def _reduce_spans(spans, scale):
    """Largest logit of each row, NaN if there is one, and its mass as `block_masses` has it."""
    largest = spans[0].to(tl.float32)
    for i in tl.static_range(1, len(spans)):
        largest = larger_or_nan(largest, spans[i].to(tl.float32))
    peak = tl.reduce(largest, 1, larger_or_nan)
    factor = tl.zeros_like(largest) + scale[:, None]
    shift = tl.zeros_like(largest) - (peak * scale)[:, None]
    mass = tl.zeros_like(peak).to(tl.int32)
    for i in tl.static_range(len(spans)):
        mass += sum_weights(tl.exp2(tl.fma(spans[i].to(tl.float32), factor, shift)), 1)
    return peak, mass
