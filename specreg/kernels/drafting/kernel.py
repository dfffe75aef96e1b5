"""Triton device helpers of the ops that draw drafts."""

import triton
import triton.language as tl

from specreg.kernels.common import view
from specreg.kernels.common.kernel import SUM_BITS, owned_row
from specreg.kernels.draft_sample import reference
from specreg.kernels.drafting import args

__all__ = [
    "LANES",
    "LOG2E",
    "MASS_SCALE",
    "MASS_UNIT",
    "SHIFT_MAX",
    "block_columns",
    "block_masses",
    "block_peaks",
    "by_block",
    "fill_kernel",
    "larger_or_nan",
    "load_block",
    "load_columns",
    "load_temperature",
    "logits_cell",
    "ordered",
    "pack",
    "peak_of",
    "store_blocks",
    "store_columns",
    "store_statistics",
    "sum_by_block",
    "token_of_program",
    "weight_of",
]

CELL_EMPTY = tl.constexpr(view.CELL_EMPTY)
CELL_STORED = tl.constexpr(view.CELL_STORED)
GRID_ROWS = tl.constexpr(args.GRID_ROWS)
LANES = tl.constexpr(32)
LOG2E = tl.constexpr(1.4426950408889634)
SHIFT_MAX = tl.constexpr(2.0**22)
MASS_SCALE = tl.constexpr(2.0 ** (reference.MASS_BITS - SUM_BITS.value))
MASS_UNIT = tl.constexpr(2.0**-reference.MASS_BITS)
TEMPERATURE_MIN = tl.constexpr(reference.TEMPERATURE_MIN)


@triton.jit
def token_of_program():
    """int64 token of a program whose grid is (chunks, at most GRID_ROWS, the rest)."""
    return tl.program_id(2).to(tl.int64) * GRID_ROWS + tl.program_id(1)


@triton.jit
def block_columns(first, NUM_BLOCKS: tl.constexpr, BLOCK_SIZE: tl.constexpr, VECTOR: tl.constexpr):
    """Columns of NUM_BLOCKS blocks from block `first` on: [parts * blocks, LANES * VECTOR].

    A row is what a warp reads at once, 16 bytes a thread. With the first parts of all blocks before
    the second ones, the parts of a block fall to one warp if there are no more warps than blocks.
    """
    ROW_SIZE: tl.constexpr = LANES * VECTOR
    row = tl.arange(0, NUM_BLOCKS * (BLOCK_SIZE // ROW_SIZE))
    block, part = row & (NUM_BLOCKS - 1), row & -NUM_BLOCKS  # part is a multiple of NUM_BLOCKS
    start = (first + block) * BLOCK_SIZE + part * (ROW_SIZE // NUM_BLOCKS)
    return start[:, None] + tl.arange(0, ROW_SIZE)[None, :]


@triton.jit
def by_block(x, NUM_BLOCKS: tl.constexpr, VECTOR: tl.constexpr):
    """fp32 [parts, blocks, LANES, VECTOR] of values at `block_columns`; moves nothing."""
    return tl.reshape(x.to(tl.float32), (x.shape[0] // NUM_BLOCKS, NUM_BLOCKS, LANES, VECTOR))


@triton.jit
def load_columns(row, columns, num_columns, IS_FULL: tl.constexpr):
    """A row's values at `columns`, -inf at or beyond `num_columns`; IS_FULL where none is."""
    if IS_FULL:
        return tl.load(row + columns)
    else:
        return tl.load(row + columns, mask=columns < num_columns, other=float("-inf"))


@triton.jit
def store_columns(row, columns, x, num_columns, IS_FULL: tl.constexpr):
    """Store `x` at the `columns` below `num_columns`; IS_FULL where all are."""
    if IS_FULL:
        tl.store(row + columns, x)
    else:
        tl.store(row + columns, x, mask=columns < num_columns)


@triton.jit
def load_block(logits, logits_stride, cells, token, block, num_columns, BLOCK_SIZE: tl.constexpr):
    """Columns of one block, and its fp32 logits as stored: rounded to the cache's dtype."""
    columns = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = load_columns(logits + token * logits_stride, columns, num_columns, False)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
    return columns, x.to(tl.float32)


@triton.jit
def store_blocks(blocks, token, first, num_blocks, peak, mass):
    """Store peak and mass of each block of a program, packed."""
    block = first + tl.arange(0, peak.shape[0])
    packed = pack(peak.to(tl.int32, bitcast=True), mass)
    tl.store(blocks + token * num_blocks + block, packed, mask=block < num_blocks)


@triton.jit
def fill_kernel(
    cells, rows, num_tokens, vocab_size, NUM_SHARDS: tl.constexpr, FILL_SIZE: tl.constexpr
):
    """Program (i, token): -inf into an owned row, which is scattered into afterwards."""
    token = token_of_program()
    if token >= num_tokens:
        return
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        return
    is_owned, row = logits_cell(cells, req, tl.load(rows.steps + token), NUM_SHARDS)
    if is_owned:
        columns = tl.program_id(0) * FILL_SIZE + tl.arange(0, FILL_SIZE)
        tl.store(row + columns, float("-inf"), mask=columns < vocab_size)


@triton.jit
def logits_cell(cells, req, step, NUM_SHARDS: tl.constexpr):
    """Whether this rank owns the request, and where the step's logits go."""
    row = owned_row(req, NUM_SHARDS, cells.shard_idx)
    return row >= 0, cells.data + (row * cells.row_stride + step * cells.step_stride)


@triton.jit
def load_temperature(temperature, req):
    """Whether a draft is drawn at all, the temperature it is drawn at, the factor before exp2.

    The factor is at most 1.44 * 2^26, so its product with a logit of at most 2^100 is finite.
    """
    value = tl.load(temperature + req)
    is_drawn = value != 0.0
    divisor = tl.where(is_drawn, tl.maximum(value, TEMPERATURE_MIN), 1.0)
    return is_drawn, divisor, tl.div_rn(LOG2E, divisor)


@triton.jit
def larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ordered(bits):
    """Between the bits of fp32 values and int32 values in the same order; its own inverse."""
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def block_peaks(x):
    """fp32 largest value of each block of [parts, blocks, LANES, VECTOR]; NaN if there is one.

    Lanes are compared as integers, for which a warp has an instruction.
    """
    by_lane = tl.reduce(tl.reduce(x, 3, larger_or_nan), 0, larger_or_nan)
    bits = tl.where(by_lane != by_lane, 0x7FFFFFFF, ordered(by_lane.to(tl.int32, bitcast=True)))
    return ordered(tl.max(bits, 1)).to(tl.float32, bitcast=True)


@triton.jit
def sum_by_block(weights):
    """int32 `[blocks]`, as `sum_weights` of each block of `[parts, blocks, LANES, VECTOR]`."""
    PER_LANE: tl.constexpr = weights.shape[0] * weights.shape[3]
    bits = tl.sum(tl.sum((weights + 4.0).to(tl.int32, bitcast=True), 3), 0)
    return tl.sum(bits - (PER_LANE * 0x40800000) % (2**32), 1)


@triton.jit
def block_masses(x, peak, scale):
    """int32 sums of `exp2(x * scale - shift)` in 2^-21, where shift is `peak * scale`, rounded.

    One fused multiply-add a value; `weight_of` puts right what rounding the shift has changed, for
    a whole block. Undefined where the shift is no number or not below `SHIFT_MAX` in magnitude: its
    rounding would pass 1/4.
    """
    shift = (peak * scale)[None, :, None, None]
    return sum_by_block(tl.exp2(tl.fma(x, tl.zeros_like(x) + scale, tl.zeros_like(x) - shift)))


@triton.jit
def weight_of(peak, top, scale):
    """Factor of a block mass: `exp2((peak - top) * scale)`, times what `block_masses` left out."""
    rounding = tl.fma(peak, tl.zeros_like(peak) + scale, -(peak * scale))
    return tl.exp2((peak - top) * scale - rounding)


@triton.jit
def pack(high, low):
    """int64 of two int32 tensors; the high one keeps its sign."""
    return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def peak_of(packed):
    """fp32 high half."""
    return (packed >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def store_statistics(cells, req, step, temperature, logsumexp, is_empty, NUM_SHARDS: tl.constexpr):
    """Write a cell's statistics and state if this rank owns the request."""
    row = owned_row(req, NUM_SHARDS, cells.shard_idx)
    if row >= 0:
        cell = row * cells.num_steps + step
        tl.store(cells.temperature + cell, temperature)
        tl.store(cells.logsumexp + cell, logsumexp)
        tl.store(cells.state + cell, tl.where(is_empty, CELL_EMPTY, CELL_STORED).to(tl.uint8))
