"""`cell_statistics` in Triton: a launch that reads bare cells, one that combines their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common import view
from specreg.kernels.common.args import cache_args
from specreg.kernels.common.cells.kernel import cell_columns, statistics_of
from specreg.kernels.common.kernel import SUM_BITS, clean_logits, owned_row, sum_weights
from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample import reference
from specreg.kernels.draft_sample.reference import BLOCK_SIZE

__all__ = ["cell_statistics_triton"]

REQUESTS_AT_ONCE = 64  # whose scratch exists at a time
BLOCKS_PER_PROGRAM = 8
NUM_WARPS = 4

CELL_BARE = tl.constexpr(view.CELL_BARE)
CELL_EMPTY = tl.constexpr(view.CELL_EMPTY)
CELL_STORED = tl.constexpr(view.CELL_STORED)
LOG2E = tl.constexpr(1.4426950408889634)
MASS_SCALE = tl.constexpr(2.0 ** (reference.MASS_BITS - SUM_BITS.value))
MASS_UNIT = tl.constexpr(2.0**-reference.MASS_BITS)
TEMPERATURE_MIN = tl.constexpr(reference.TEMPERATURE_MIN)


@triton.jit
def _bare_cell(cache, idx_mapping, req, step, NUM_SHARDS: tl.constexpr):
    """Cache row of a request, offset of the cell's statistics, and whether the cell is bare."""
    row = owned_row(tl.load(idx_mapping + req), NUM_SHARDS, cache.shard_idx)
    at = statistics_of(cache, row, step)
    return row, at, tl.load(cache.state + at, mask=row >= 0, other=CELL_EMPTY) == CELL_BARE


@triton.jit
def _divisor(cache, at):
    """What to divide logits by, whether the token was drawn at all, the factor before exp2."""
    temperature = tl.load(cache.temperature + at)
    is_drawn = temperature != 0.0
    divisor = tl.where(is_drawn, tl.maximum(temperature, TEMPERATURE_MIN), 1.0)
    return divisor, is_drawn, tl.div_rn(LOG2E, divisor)


@triton.jit
def cell_blocks_kernel(
    peaks,
    masses,
    cache,
    idx_mapping,
    num_blocks,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (i, step, req): reduce NUM_BLOCKS blocks of a bare cell."""
    step = tl.program_id(1)
    req = tl.program_id(2).to(tl.int64)
    row, at, is_bare = _bare_cell(cache, idx_mapping, req, step, NUM_SHARDS)
    if not is_bare:
        return
    block = tl.program_id(0) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    columns = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    x = clean_logits(cell_columns(cache, row, step, columns))
    peak = tl.max(x, 1)
    _, _, scale = _divisor(cache, at)
    mass = sum_weights(tl.exp2((x - peak[:, None]) * scale), 1)
    to = (req * NUM_STEPS + step) * num_blocks + block
    live = block < num_blocks
    tl.store(peaks + to, peak, mask=live)
    tl.store(masses + to, tl.where(peak == float("-inf"), 0, mass), mask=live)


@triton.jit
def cell_totals_kernel(
    peaks,
    masses,
    cache,
    idx_mapping,
    num_blocks,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """Program (step, req): write the statistics of a bare cell, which it is no longer."""
    step = tl.program_id(0)
    req = tl.program_id(1).to(tl.int64)
    _, at, is_bare = _bare_cell(cache, idx_mapping, req, step, NUM_SHARDS)
    if not is_bare:
        return
    block = tl.arange(0, NUM_BLOCKS)
    live = block < num_blocks
    of = (req * NUM_STEPS + step) * num_blocks + block
    peak = tl.load(peaks + of, mask=live, other=float("-inf"))
    mass = tl.load(masses + of, mask=live, other=0)
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")
    divisor, is_drawn, scale = _divisor(cache, at)
    shares = mass.to(tl.float32) * MASS_SCALE * tl.exp2((peak - top) * scale)
    units = tl.where(peak == float("-inf"), 0.0, shares).to(tl.int64)
    total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
    logsumexp = tl.div_rn(top, divisor) + tl.log(total)
    tl.store(cache.temperature + at, tl.where(is_drawn, divisor, 0.0))
    tl.store(cache.logsumexp + at, tl.where(is_drawn & (top > float("-inf")), logsumexp, 0.0))
    tl.store(cache.state + at, tl.where(is_empty, CELL_EMPTY, CELL_STORED).to(tl.uint8))


def cell_statistics_triton(cache: DraftLogitsView, idx_mapping: Tensor) -> None:
    """Launch two kernels on the current stream for each 64 requests. No host synchronisation."""
    stored, num_shards = cache_args(cache), cache.shard.num_shards
    num_steps, width = cache.logits.shape[1:]
    if num_steps == 0:
        return
    num_blocks = triton.cdiv(width, BLOCK_SIZE)
    all_blocks = triton.next_power_of_2(num_blocks)
    some = min(BLOCKS_PER_PROGRAM, all_blocks)
    for slots in idx_mapping.split(REQUESTS_AT_ONCE) if len(idx_mapping) else ():
        num_reqs = len(slots)
        peaks = torch.empty(num_reqs * num_steps * num_blocks, device=slots.device)
        masses = torch.empty_like(peaks, dtype=torch.int32)
        inputs = (peaks, masses, stored, slots, num_blocks)
        key = (specialisation(*inputs), num_shards)
        launch(
            cell_blocks_kernel,
            (triton.cdiv(num_blocks, some), num_steps, num_reqs),
            (*inputs, num_steps, num_shards, some, BLOCK_SIZE),
            key,
            NUM_WARPS,
        )
        launch(
            cell_totals_kernel,
            (num_steps, num_reqs),
            (*inputs, num_steps, num_shards, all_blocks),
            key,
            NUM_WARPS,
        )
