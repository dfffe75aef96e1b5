"""Triton kernel that reads the target, and what it leaves: peak and mass of each block of a row.

They lie in a record a row, `RowArgs`, behind what is known of the row.
"""

import torch
import triton
import triton.language as tl

from specreg.kernels.common.kernel import SUM_BITS
from specreg.kernels.draft_sample.reference import MASS_BITS
from specreg.kernels.drafting.kernel import (
    block_columns,
    block_peaks,
    by_block,
    load_columns,
    sum_by_block,
)
from specreg.kernels.rejection_sample import prepare

__all__ = [
    "LOG2E",
    "NUM_FLOATS",
    "NUM_INTS",
    "blocks_of",
    "finite",
    "float_record",
    "int_record",
    "load_target",
    "mass_units",
    "request",
    "scale_of",
    "target_blocks_kernel",
]

LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
MASS_SCALE = tl.constexpr(2.0 ** (MASS_BITS - SUM_BITS.value))
NUM_FLOATS = tl.constexpr(prepare.NUM_FLOATS)
NUM_INTS = tl.constexpr(prepare.NUM_INTS)


@triton.jit
def request(batch, req, NUM_ROWS: tl.constexpr):
    """Slot, first logits row and number of logits rows; no rows for a padding row."""
    slot = tl.load(batch.idx_mapping + req)
    start = tl.load(batch.cu_num_logits + req).to(tl.int64)
    end = tl.load(batch.cu_num_logits + req + 1).to(tl.int64)
    return slot, start, tl.where(slot < 0, 0, tl.minimum(end - start, NUM_ROWS)).to(tl.int32)


@triton.jit
def scale_of(temperature):
    """The factor on `logit - peak` that makes exp2 of it a weight."""
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.minimum(tl.div_rn(LOG2E, divisor), LARGEST)


@triton.jit
def finite(peak):
    """A number to subtract where `peak` may be -inf: all that lies below it is -inf as well."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def load_target(target, row, columns, mask):
    return tl.load(
        target.logits + row * target.stride + columns,
        mask=mask & (columns < target.vocab_size),
        other=float("-inf"),
    )


@triton.jit
def float_record(rows, req, step, NUM_ROWS: tl.constexpr):
    """Where the fp32 record of a request's row lies; `req` is int64."""
    return rows.floats + (req * NUM_ROWS + step) * (rows.num_blocks + NUM_FLOATS)


@triton.jit
def int_record(rows, req, step, NUM_ROWS: tl.constexpr):
    return rows.ints + (req * NUM_ROWS + step) * (rows.num_blocks + NUM_INTS)


@triton.jit
def _reduce_blocks(
    floats, ints, row, num_columns, num_blocks, scale,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """Peaks and masses of one program's blocks, whose columns are all there if IS_FULL."""
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = by_block(load_columns(row, columns, num_columns, IS_FULL), NUM_BLOCKS, VECTOR)
    peak = block_peaks(x)
    mass = sum_by_block(tl.exp2((x - peak[None, :, None, None]) * scale))
    block = first + tl.arange(0, NUM_BLOCKS)
    tl.store(floats + block, peak, mask=block < num_blocks)
    tl.store(ints + block, tl.where(peak == float("-inf"), 0, mass), mask=block < num_blocks)


@triton.jit
def target_blocks_kernel(
    rows,
    target,
    batch,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program (i, step, req): read NUM_BLOCKS blocks once, reduce each to its peak and its mass.

    Blocks with a NaN or a logit above `LOGIT_MAX` come out wrong; their peaks say so.
    """
    step = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    slot, first_row, num_rows = request(batch, req, NUM_ROWS)
    if step >= num_rows:
        return
    scale = scale_of(tl.load(batch.temperature + slot))
    row = target.logits + (first_row + step) * target.stride
    floats = float_record(rows, req, step, NUM_ROWS) + NUM_FLOATS
    ints = int_record(rows, req, step, NUM_ROWS) + NUM_INTS
    if (tl.program_id(0) + 1) * NUM_BLOCKS * BLOCK_SIZE <= target.vocab_size:
        _reduce_blocks(
            floats, ints, row, target.vocab_size, rows.num_blocks, scale, NUM_BLOCKS, BLOCK_SIZE,
            VECTOR, True,
        )  # fmt: skip
    else:
        _reduce_blocks(
            floats, ints, row, target.vocab_size, rows.num_blocks, scale, NUM_BLOCKS, BLOCK_SIZE,
            VECTOR, False,
        )  # fmt: skip


@triton.jit
def blocks_of(rows, req, step, NUM_ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """Numbers, peaks and masses of a row's blocks."""
    block = tl.arange(0, NUM_BLOCKS)
    live = block < rows.num_blocks
    at = float_record(rows, req, step, NUM_ROWS) + NUM_FLOATS + block
    peak = tl.load(at, mask=live, other=float("-inf"))
    at = int_record(rows, req, step, NUM_ROWS) + NUM_INTS + block
    return block, peak, tl.load(at, mask=live, other=0)


@triton.jit
def mass_units(peak, mass, top, scale):
    """int64 masses of blocks relative to `top`, the largest logit of their row."""
    return (mass.to(tl.float32) * MASS_SCALE * tl.exp2((peak - top) * scale)).to(tl.int64)
