"""`draft_sample` in Triton: a launch that reduces and stores blocks, one that draws from them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common.kernel import (
    LOGIT_MAX,
    UNIT_BITS,
    clean_logits,
    draw_index,
    sum_weights,
)
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample import reference
from specreg.kernels.drafting.args import RowArgs, WordArgs
from specreg.kernels.drafting.kernel import (
    MASS_SCALE,
    MASS_UNIT,
    SHIFT_MAX,
    block_columns,
    block_masses,
    block_peaks,
    by_block,
    load_block,
    load_columns,
    load_temperature,
    logits_cell,
    peak_of,
    store_blocks,
    store_columns,
    store_statistics,
    token_of_program,
    weight_of,
)
from specreg.kernels.drafting.launch import BlocksKernel, TokensKernel, draw_drafts
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["draft_sample_triton"]

# `python benchmarks/draft_sample.py --sweep`, one H200, K 7, 248,320 columns, bf16, us: blocks of
# 256 requests on a TP4 shard 268 with 8 x 2 and 272 with 8 x 4, of 8 requests 16.1 and 15.7; tokens
# 9.0 with two warps and 10.5 with four, of 8 requests 4.0 and 3.8.
BLOCKS_PER_PROGRAM = 8
NUM_WARPS = 2
TOKEN_WARPS = 2
BLOCK_SIZE = reference.BLOCK_SIZE

WEIGHT_SCALE = tl.constexpr(2.0**UNIT_BITS.value)


@triton.jit
def _reduce_blocks(
    blocks, cells, logits, rows, target_ids, token, req, num_columns, width, num_blocks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """One program's part of a row, whose columns are all there if IS_FULL."""
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = load_columns(logits, columns, num_columns, IS_FULL)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
        is_owned, row = logits_cell(cells, req, tl.load(rows.steps + token), NUM_SHARDS)
        if is_owned:
            if IS_SCATTERED:
                mask = columns < num_columns
                ids = tl.load(target_ids + columns, mask=mask, other=0)
                tl.store(row + ids, x, mask=mask)
            else:
                store_columns(row, columns, x, width, IS_FULL)

    values = by_block(x, NUM_BLOCKS, VECTOR)
    peak = block_peaks(values)
    mass = tl.zeros_like(peak).to(tl.int32)
    if rows.temperature is not None:
        _, _, scale = load_temperature(rows.temperature, req)
        mass = block_masses(values, peak, scale)
    store_blocks(blocks, token, first, num_blocks, peak, mass)


@triton.jit
def draft_sample_blocks_kernel(
    blocks,
    cells,
    logits,
    logits_stride,
    rows,
    target_ids,
    num_tokens,
    num_columns,
    width,
    num_blocks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
):
    """Program (i, token): read NUM_BLOCKS blocks once, store them if owned, reduce each of them.

    Only the last programs of a row work with masks.
    """
    token = token_of_program()
    if token >= num_tokens:
        return
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        return
    row = logits + token * logits_stride
    if (tl.program_id(0) + 1) * NUM_BLOCKS * BLOCK_SIZE <= num_columns:
        _reduce_blocks(
            blocks, cells, row, rows, target_ids, token, req, num_columns, width, num_blocks,
            NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE, VECTOR, IS_SCATTERED, True,
        )  # fmt: skip
    else:
        _reduce_blocks(
            blocks, cells, row, rows, target_ids, token, req, num_columns, width, num_blocks,
            NUM_SHARDS, NUM_BLOCKS, BLOCK_SIZE, VECTOR, IS_SCATTERED, False,
        )  # fmt: skip


@triton.jit
def draft_sample_tokens_kernel(
    ids,
    num_nans,
    statistics,
    blocks,
    cells,
    logits,
    logits_stride,
    rows,
    words,
    target_ids,
    num_columns,
    num_blocks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token): draw a block, then a column of it; store the statistics if owned."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(rows.idx_mapping + token)
    step = tl.load(rows.steps + token)
    block = tl.arange(0, NUM_BLOCKS)
    live = block < num_blocks
    packed = tl.load(blocks + token * num_blocks + block, mask=live, other=0)
    if req < 0:
        tl.store(ids + token, -1)
        return
    peak = tl.where(live, peak_of(packed), float("-inf"))
    if rows.temperature is not None:
        is_drawn, divisor, scale = load_temperature(rows.temperature, req)
        mass = packed.to(tl.int32)

    # Rare: blocks with a NaN, or whose peak passes 2^100 in magnitude, are reduced here; so are
    # those whose shift is too large for `block_masses`.
    is_odd = (peak != float("-inf")) & ~(tl.abs(peak) <= LOGIT_MAX)
    if rows.temperature is not None:
        is_odd = is_odd | ((peak != float("-inf")) & ~(tl.abs(peak * scale) < SHIFT_MAX))
    num_odd = tl.sum(is_odd.to(tl.int32), 0)
    was_odd = is_odd
    is_bad = num_odd < 0
    while num_odd > 0:
        odd = tl.argmax(is_odd.to(tl.int32), 0)
        _, x = load_block(logits, logits_stride, cells, token, odd, num_columns, BLOCK_SIZE)
        is_bad = is_bad | (tl.sum((x != x).to(tl.int32), 0) > 0)
        x = clean_logits(x)
        largest = tl.max(x, 0)
        if rows.temperature is not None:
            weights = tl.where(x == float("-inf"), 0.0, tl.exp2((x - largest) * scale))
            mass = tl.where(block == odd, sum_weights(weights, 0), mass)
        peak = tl.where(block == odd, largest, peak)
        is_odd = is_odd & (block != odd)
        num_odd -= 1

    top = tl.max(peak, 0)
    is_empty = top == float("-inf")
    chosen = tl.argmax(peak, 0)
    if rows.temperature is not None:
        is_drawn = is_drawn & ~is_empty
        word0, word1, _, _ = random_words(
            tl.load(words.seeds + req), tl.load(words.positions + token), step, STREAM_DRAFT
        )
        factor = tl.where(was_odd, tl.exp2((peak - top) * scale), weight_of(peak, top, scale))
        shares = mass.to(tl.float32) * MASS_SCALE * factor
        units = tl.where(peak == float("-inf"), 0.0, shares).to(tl.int64)
        total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
        chosen = tl.where(is_drawn, draw_index(units, word0), chosen)

    _, x = load_block(logits, logits_stride, cells, token, chosen, num_columns, BLOCK_SIZE)
    x = clean_logits(x)
    lane = tl.argmax(x, 0)
    if rows.temperature is not None:
        weights = tl.exp2((x - tl.max(x, 0)) * scale)
        units = tl.where(x == float("-inf"), 0.0, weights * WEIGHT_SCALE).to(tl.int64)
        lane = tl.where(is_drawn, draw_index(units, word1), lane)

    column = (chosen * BLOCK_SIZE + lane).to(tl.int64)
    if target_ids is not None:
        column = tl.load(target_ids + column).to(tl.int64)
    tl.store(ids + token, column)
    if num_nans is not None:
        tl.atomic_add(num_nans + req, 1, mask=is_bad | is_empty)
    if statistics is not None:
        logsumexp = tl.where(is_drawn, tl.div_rn(top, divisor) + tl.log(total), 0.0)
        drawn_at = tl.where(tl.load(rows.temperature + req) == 0.0, 0.0, divisor)
        store_statistics(statistics, req, step, drawn_at, logsumexp, is_empty, NUM_SHARDS)


def draft_sample_triton(
    logits: Tensor,
    idx_mapping: Tensor,
    steps: Tensor,
    positions: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    num_nans: Tensor | None,
) -> Tensor:
    """Launch on the current stream: two kernels, three to scatter into a dense cache. No sync."""
    return draw_drafts(
        BlocksKernel(draft_sample_blocks_kernel, BLOCKS_PER_PROGRAM, NUM_WARPS),
        TokensKernel(draft_sample_tokens_kernel, TOKEN_WARPS),
        logits,
        RowArgs(idx_mapping, steps, temperature),
        WordArgs(positions, seeds),
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
