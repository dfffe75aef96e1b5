"""`gumbel_sample` in Triton: a launch that reduces and stores blocks, one that draws.

`argmax(x / t + g)` is a race: with g = -ln(e), the column whose `e / exp(x / t)` is least, for
exponential e. A weight is a power of two below the block's largest, so that a logit costs one
logarithm. The second launch runs the winning block's race again, so that the first need not know
which of its columns won.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common.kernel import clean_logits
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.drafting.args import RowArgs
from specreg.kernels.drafting.kernel import (
    MASS_SCALE,
    MASS_UNIT,
    block_columns,
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
    sum_by_block,
    token_of_program,
)
from specreg.kernels.drafting.launch import BlocksKernel, TokensKernel, draw_drafts
from specreg.kernels.gumbel_sample import reference
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["gumbel_sample_triton"]

# `python benchmarks/gumbel_sample.py --sweep`, one H200, 256 requests, K 3, 248,320 columns, TP4
# shard, us: blocks 888 with 4 x 4, 883 with 2 x 2, 975 and more with twice or half the warps.
BLOCKS_PER_PROGRAM = 4
NUM_WARPS = 4
TOKEN_WARPS = 4

LN2 = tl.constexpr(0.6931471805599453)
SERIES_BELOW = tl.constexpr(reference.SERIES_BELOW)
UNIFORM_MAX = tl.constexpr(reference.UNIFORM_MAX)


class NoiseArgs(NamedTuple):
    """What random words are made of beside the token's id: two values a token, one a slot."""

    positions: Tensor
    steps: Tensor
    seeds: Tensor


@triton.jit
def _exponential(word):
    """fp32 standard exponential variate of a random word: positive, finite; Gumbel noise is -ln."""
    zero = word.to(tl.float32) * 0.0
    u = tl.fma(word.to(tl.float32), zero + 2.3283064365386963e-10, zero + 1.1641532182693481e-10)
    u = tl.minimum(u, UNIFORM_MAX)
    series = tl.fma(u, zero + 0.25, zero + 1.0 / 3.0)
    series = u * tl.fma(u, tl.fma(u, series, zero + 0.5), zero + 1.0)
    return tl.where(u < SERIES_BELOW, series, tl.log2(1.0 - u) * -LN2)


@triton.jit
def _arrivals(below, ids, words, token, req):
    """When each column arrives whose weight is 2^-below; the first one is drawn."""
    zero = ids * 0
    word, _, _, _ = random_words(
        tl.load(words.seeds + req),
        zero + tl.load(words.positions + token),
        zero + tl.load(words.steps + token),
        STREAM_DRAFT,
        ids,
    )
    return _exponential(word) * tl.exp2(below)


@triton.jit
def _finite(peak):
    """A number to subtract where `peak` may be -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def gumbel_sample_blocks_kernel(
    blocks,
    arrivals,
    cells,
    logits,
    logits_stride,
    rows,
    words,
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
    """Program (i, token): read NUM_BLOCKS blocks once, store, reduce and score them.

    The sign of a block's mass says that it holds a NaN.
    """
    token = token_of_program()
    if token >= num_tokens:
        return
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        return
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = load_columns(logits + token * logits_stride, columns, num_columns, False)
    ids = columns
    if target_ids is not None:
        ids = tl.load(target_ids + columns, mask=columns < num_columns, other=0)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
        is_owned, row = logits_cell(cells, req, tl.load(rows.steps + token), NUM_SHARDS)
        if is_owned:
            if IS_SCATTERED:
                tl.store(row + ids, x, mask=columns < num_columns)
            else:
                store_columns(row, columns, x, width, False)

    has_nan = block_peaks(by_block(x, NUM_BLOCKS, VECTOR))
    has_nan = has_nan != has_nan
    values = by_block(clean_logits(x), NUM_BLOCKS, VECTOR)
    peak = tl.max(tl.max(tl.max(values, 3), 0), 1)
    mass = tl.zeros_like(peak).to(tl.int32)
    if rows.temperature is not None:
        _, _, scale = load_temperature(rows.temperature, req)
        below = (_finite(peak)[None, :, None, None] - values) * scale
        mass = sum_by_block(tl.exp2(-below))
        times = _arrivals(tl.reshape(below, columns.shape), ids, words, token, req)
        first_of = tl.min(tl.min(tl.min(by_block(times, NUM_BLOCKS, VECTOR), 3), 0), 1)
        block = first + tl.arange(0, NUM_BLOCKS)
        tl.store(arrivals + token * num_blocks + block, first_of, mask=block < num_blocks)
    store_blocks(blocks, token, first, num_blocks, peak, tl.where(has_nan, ~mass, mass))


@triton.jit
def gumbel_sample_tokens_kernel(
    ids,
    num_nans,
    statistics,
    blocks,
    arrivals,
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
    """Program (token): the best column of the best block; store the statistics if owned."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        tl.store(ids + token, -1)
        return
    block = tl.arange(0, NUM_BLOCKS)
    live = block < num_blocks
    packed = tl.load(blocks + token * num_blocks + block, mask=live, other=0)
    peak = tl.where(live, peak_of(packed), float("-inf"))
    mass = packed.to(tl.int32)
    is_bad = tl.min(mass, 0) < 0
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")

    chosen = tl.argmax(peak, 0)
    if rows.temperature is not None:
        is_drawn, divisor, scale = load_temperature(rows.temperature, req)
        is_drawn = is_drawn & ~is_empty
        behind = (top - peak) * scale
        times = tl.load(arrivals + token * num_blocks + block, mask=live, other=1.0)
        best = tl.argmax(tl.where(live, -behind - tl.log2(times), float("-inf")), 0)
        chosen = tl.where(is_drawn, best, chosen)
    columns, x = load_block(logits, logits_stride, cells, token, chosen, num_columns, BLOCK_SIZE)
    x = clean_logits(x)
    lane = tl.argmax(x, 0)
    if rows.temperature is not None:
        column_ids = columns.to(tl.int64)
        if target_ids is not None:
            column_ids = tl.load(target_ids + columns, mask=columns < num_columns, other=0)
        below = (_finite(tl.max(x, 0)) - x) * scale
        first = tl.argmin(_arrivals(below, column_ids, words, token, req), 0)
        lane = tl.where(is_drawn, first, lane)
    column = (chosen * BLOCK_SIZE + lane).to(tl.int64)
    if target_ids is not None:
        column = tl.load(target_ids + column).to(tl.int64)
    tl.store(ids + token, column)
    if num_nans is not None:
        tl.atomic_add(num_nans + req, 1, mask=is_bad | is_empty)
    if statistics is not None:
        mass = tl.where(mass < 0, ~mass, mass)
        units = (mass.to(tl.float32) * MASS_SCALE * tl.exp2(-behind)).to(tl.int64)
        total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
        logsumexp = tl.where(is_drawn, tl.div_rn(top, divisor) + tl.log(total), 0.0)
        drawn_at = tl.where(tl.load(rows.temperature + req) == 0.0, 0.0, divisor)
        step = tl.load(rows.steps + token)
        store_statistics(statistics, req, step, drawn_at, logsumexp, is_empty, NUM_SHARDS)


def gumbel_sample_triton(
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
    noise_steps: Tensor,
) -> Tensor:
    """Launch on the current stream: two kernels, three to scatter into a dense cache. No sync."""
    return draw_drafts(
        BlocksKernel(gumbel_sample_blocks_kernel, BLOCKS_PER_PROGRAM, NUM_WARPS, has_arrivals=True),
        TokensKernel(gumbel_sample_tokens_kernel, TOKEN_WARPS),
        logits,
        RowArgs(idx_mapping, steps, temperature),
        NoiseArgs(positions, noise_steps, seeds),
        cache,
        vocab_size=vocab_size,
        target_ids=target_ids,
        num_nans=num_nans,
    )
