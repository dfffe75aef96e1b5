"""`draft_sample` in Triton: a launch that reduces and stores blocks, one that draws from them."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common import view
from specreg.kernels.common.args import cache_args
from specreg.kernels.common.kernel import (
    LOGIT_MAX,
    SUM_BITS,
    UNIT_BITS,
    clean_logits,
    draw_index,
    owned_row,
    sum_weights,
)
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample import reference
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["draft_sample_triton"]

BLOCKS_PER_PROGRAM = 8
NUM_WARPS = 4
FILL_SIZE = 4096
BLOCK_SIZE = reference.BLOCK_SIZE

CELL_EMPTY = tl.constexpr(view.CELL_EMPTY)
CELL_STORED = tl.constexpr(view.CELL_STORED)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
MASS_SCALE = tl.constexpr(2.0 ** (reference.MASS_BITS - SUM_BITS.value))
MASS_UNIT = tl.constexpr(2.0**-reference.MASS_BITS)
WEIGHT_SCALE = tl.constexpr(2.0**UNIT_BITS.value)


class LogitsArgs(NamedTuple):
    """Draft logits: first element, row stride, columns that count, draft -> target map or None."""

    data: Tensor
    stride: int
    num_columns: int
    target_ids: Tensor | None


class BatchArgs(NamedTuple):
    """Three values a token, then two a slot; `temperature` is None when every draft is greedy."""

    idx_mapping: Tensor
    steps: Tensor
    positions: Tensor
    temperature: Tensor | None
    seeds: Tensor


class BlockArgs(NamedTuple):
    """What the first launch leaves for the second, `[num_tokens, num_blocks]` each."""

    peak: Tensor
    mass: Tensor
    num_nans: Tensor
    num_blocks: int


@triton.jit
def _load_logits(logits, cache, token, columns):
    """Logits as they are stored: rounded to the cache's dtype, -inf beyond the columns."""
    x = tl.load(
        logits.data + token * logits.stride + columns,
        mask=columns < logits.num_columns,
        other=float("-inf"),
    )
    if cache is not None:
        x = x.to(cache.logits.dtype.element_ty)
    return x


@triton.jit
def _cell(cache, batch, req, token, NUM_SHARDS: tl.constexpr):
    """Whether this rank stores the token, where its logits go, the offset of its statistics."""
    row = owned_row(req, NUM_SHARDS, cache.shard_idx)
    step = tl.load(batch.steps + token).to(tl.int64)
    logits = row * cache.row_stride + step * cache.step_stride
    return row >= 0, cache.logits + logits, row * cache.num_steps + step


@triton.jit
def _temperature(batch, req):
    """Temperature, what to divide a logit by, and the factor before exp2."""
    temperature = tl.load(batch.temperature + req)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return temperature, divisor, tl.minimum(tl.div_rn(LOG2E, divisor), LARGEST)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def draft_sample_blocks_kernel(
    blocks,
    cache,
    logits,
    batch,
    vocab_size,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token, i): read NUM_BLOCKS blocks once, store them if owned, reduce each of them."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(batch.idx_mapping + token)
    if req < 0:
        return
    block = tl.program_id(1) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    columns = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    x = _load_logits(logits, cache, token, columns)

    if cache is not None:
        is_owned, row, _ = _cell(cache, batch, req, token, NUM_SHARDS)
        if is_owned:
            if logits.target_ids is None:
                tl.store(row + columns, x, mask=columns < vocab_size)
            else:
                mask = columns < logits.num_columns
                ids = tl.load(logits.target_ids + columns, mask=mask, other=0)
                tl.store(row + ids, x, mask=mask)

    at = token * blocks.num_blocks + block
    live = block < blocks.num_blocks
    x = x.to(tl.float32)
    peak = tl.reduce(x, 1, _larger_or_nan)
    num_nans = tl.zeros_like(block)
    if tl.min((peak <= LOGIT_MAX).to(tl.int32), 0) == 0:  # rare: a NaN or +inf is there
        num_nans = tl.sum((x != x).to(tl.int32), 1)
        x = clean_logits(x)
        peak = tl.max(x, 1)
    tl.store(blocks.num_nans + at, num_nans, mask=live)
    tl.store(blocks.peak + at, peak, mask=live)
    if batch.temperature is not None:
        _, _, scale = _temperature(batch, req)
        mass = sum_weights(tl.exp2((x - peak[:, None]) * scale), 1)
        tl.store(blocks.mass + at, tl.where(peak == float("-inf"), 0, mass), mask=live)


@triton.jit
def draft_sample_tokens_kernel(
    ids,
    num_nans,
    blocks,
    cache,
    logits,
    batch,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (token): draw a block, then a column of it; store the statistics if owned."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(batch.idx_mapping + token)
    if req < 0:
        tl.store(ids + token, -1)
        return
    block = tl.arange(0, NUM_BLOCKS)
    at = token * blocks.num_blocks + block
    live = block < blocks.num_blocks
    peak = tl.load(blocks.peak + at, mask=live, other=float("-inf"))
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")

    chosen = tl.argmax(peak, 0)
    if batch.temperature is not None:
        temperature, divisor, scale = _temperature(batch, req)
        is_drawn = (temperature != 0.0) & ~is_empty
        word0, word1, _, _ = random_words(
            tl.load(batch.seeds + req),
            tl.load(batch.positions + token),
            tl.load(batch.steps + token),
            STREAM_DRAFT,
        )
        mass = tl.load(blocks.mass + at, mask=live, other=0).to(tl.float32) * MASS_SCALE
        mass *= tl.exp2((peak - top) * scale)
        units = tl.where(peak == float("-inf"), 0.0, mass).to(tl.int64)
        total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
        chosen = tl.where(is_drawn, draw_index(units, word0), chosen)

    columns = chosen * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = clean_logits(_load_logits(logits, cache, token, columns))
    lane = tl.argmax(x, 0)
    if batch.temperature is not None:
        weights = tl.exp2((x - tl.max(x, 0)) * scale)
        units = tl.where(x == float("-inf"), 0.0, weights * WEIGHT_SCALE).to(tl.int64)
        lane = tl.where(is_drawn, draw_index(units, word1), lane)

    column = (chosen * BLOCK_SIZE + lane).to(tl.int64)
    if logits.target_ids is not None:
        column = tl.load(logits.target_ids + column).to(tl.int64)
    tl.store(ids + token, column)
    if num_nans is not None:
        is_bad = tl.sum(tl.load(blocks.num_nans + at, mask=live, other=0), 0) > 0
        tl.atomic_add(num_nans + req, 1, mask=is_bad | is_empty)
    if cache is not None:
        is_owned, _, cell = _cell(cache, batch, req, token, NUM_SHARDS)
        if is_owned:
            logsumexp = tl.div_rn(top, divisor) + tl.log(total)
            tl.store(cache.temperature + cell, temperature)
            tl.store(cache.logsumexp + cell, tl.where(is_drawn, logsumexp, 0.0))
            tl.store(cache.state + cell, tl.where(is_empty, CELL_EMPTY, CELL_STORED).to(tl.uint8))


@triton.jit
def draft_sample_fill_kernel(
    cache, batch, vocab_size, NUM_SHARDS: tl.constexpr, FILL_SIZE: tl.constexpr
):
    """Program (token, i): -inf into an owned row, where a reduced vocabulary leaves columns out."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(batch.idx_mapping + token)
    if req < 0:
        return
    is_owned, row, _ = _cell(cache, batch, req, token, NUM_SHARDS)
    if is_owned:
        columns = tl.program_id(1) * FILL_SIZE + tl.arange(0, FILL_SIZE)
        tl.store(row + columns, float("-inf"), mask=columns < vocab_size)


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
    """Launch on the current stream: two kernels, three with `target_ids` and a cache. No sync."""
    num_tokens = len(idx_mapping)
    ids = torch.empty_like(idx_mapping)
    if num_tokens == 0:
        return ids
    num_columns = min(logits.shape[1], vocab_size) if target_ids is None else len(target_ids)
    num_blocks = triton.cdiv(vocab_size if target_ids is None else num_columns, BLOCK_SIZE)
    scratch = idx_mapping.new_empty(3, num_tokens, num_blocks, dtype=torch.int32)
    blocks = BlockArgs(scratch[0].view(torch.float32), scratch[1], scratch[2], num_blocks)
    batch = BatchArgs(idx_mapping, steps, positions, temperature, seeds)
    inputs = LogitsArgs(logits, logits.stride(0), num_columns, target_ids)
    stored = None if cache is None else cache_args(cache)
    num_shards = 1 if cache is None else cache.shard.num_shards

    if cache is not None and target_ids is not None:
        draft_sample_fill_kernel[(num_tokens, triton.cdiv(vocab_size, FILL_SIZE))](
            cache=stored,
            batch=batch,
            vocab_size=vocab_size,
            NUM_SHARDS=num_shards,
            FILL_SIZE=FILL_SIZE,
        )
    blocks_per_program = min(BLOCKS_PER_PROGRAM, triton.next_power_of_2(num_blocks))
    draft_sample_blocks_kernel[(num_tokens, triton.cdiv(num_blocks, blocks_per_program))](
        blocks=blocks,
        cache=stored,
        logits=inputs,
        batch=batch,
        vocab_size=vocab_size,
        NUM_SHARDS=num_shards,
        NUM_BLOCKS=blocks_per_program,
        BLOCK_SIZE=BLOCK_SIZE,
        num_warps=NUM_WARPS,
    )
    draft_sample_tokens_kernel[(num_tokens,)](
        ids=ids,
        num_nans=num_nans,
        blocks=blocks,
        cache=stored,
        logits=inputs,
        batch=batch,
        NUM_SHARDS=num_shards,
        NUM_BLOCKS=triton.next_power_of_2(num_blocks),
        BLOCK_SIZE=BLOCK_SIZE,
    )
    return ids
