"""`rejection_sample` in Triton: four launches, three without a cache.

Target blocks are reduced as in `draft_sample`; a program a request accepts; where a draft was
rejected blocks of the residual are summed; a program a request draws.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common import view
from specreg.kernels.common.args import cache_args
from specreg.kernels.common.kernel import (
    SUM_BITS,
    clean_logits,
    draw_index,
    owned_row,
    sum_weights,
    to_units,
)
from specreg.kernels.draft_sample.reference import BLOCK_SIZE, MASS_BITS
from specreg.kernels.random.kernel import (
    STREAM_ACCEPT,
    STREAM_BONUS,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    random_words,
    uniform,
)
from specreg.kernels.rejection_sample import reference
from specreg.kernels.rejection_sample.batch import RejectionBatch, RejectionOutput

__all__ = ["rejection_sample_triton"]

BLOCKS_PER_PROGRAM = 8
SCRATCH_BYTES = 2**26

CELL_STORED = tl.constexpr(view.CELL_STORED)
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)
LOG2E = tl.constexpr(1.4426950408889634)
MASS_SCALE = tl.constexpr(2.0 ** (MASS_BITS - SUM_BITS.value))
MASS_UNIT = tl.constexpr(2.0**-MASS_BITS)
RESIDUAL_FLOOR = tl.constexpr(reference.RESIDUAL_FLOOR)

# What is left to draw for a request, once its drafts have been judged.
NOTHING = tl.constexpr(0)  # no logits row, or greedy: the token is known
TARGET = tl.constexpr(1)  # from p
WITHOUT_DRAFT = tl.constexpr(2)  # from p without the draft, whose distribution was one-hot
RESIDUAL = tl.constexpr(3)  # from max(p - q, 0)


class TargetArgs(NamedTuple):
    """Target logits: first element, row stride, columns that count."""

    logits: Tensor
    stride: int
    vocab_size: int


class BatchArgs(NamedTuple):
    """Per request, then per slot."""

    draft_tokens: Tensor
    draft_stride: int
    idx_mapping: Tensor
    cu_num_logits: Tensor
    positions: Tensor
    temperature: Tensor
    seeds: Tensor


class BlockArgs(NamedTuple):
    """Target blocks, `[num_reqs * num_rows, num_blocks]` each."""

    peak: Tensor
    mass: Tensor
    num_nans: Tensor
    num_blocks: int


class PendingArgs(NamedTuple):
    """What is left to draw, `[num_reqs]` each: its kind and the softmax denominator of its target
    row as (top, log2_total); for a residual the sums of its blocks, `[num_reqs, num_blocks]`."""

    kind: Tensor
    top: Tensor
    log2_total: Tensor
    residual: Tensor


@triton.jit
def _request(batch, req, NUM_ROWS: tl.constexpr):
    """Slot, first logits row and number of logits rows; no rows for a padding row."""
    slot = tl.load(batch.idx_mapping + req)
    start = tl.load(batch.cu_num_logits + req).to(tl.int64)
    end = tl.load(batch.cu_num_logits + req + 1).to(tl.int64)
    return slot, start, tl.where(slot < 0, 0, tl.minimum(end - start, NUM_ROWS))


@triton.jit
def _scale(temperature):
    """The factor on `logit - peak` that makes exp2 of it a weight."""
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.minimum(tl.div_rn(LOG2E, divisor), LARGEST)


@triton.jit
def _finite(peak):
    """A number to subtract where `peak` may be -inf: all that lies below it is -inf as well."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _mass_units(peak, mass, top, scale):
    """int64 masses of blocks relative to `top`, the largest logit of their row."""
    return (mass.to(tl.float32) * MASS_SCALE * tl.exp2((peak - top) * scale)).to(tl.int64)


@triton.jit
def _load_target(target, row, columns, mask):
    return tl.load(
        target.logits + row * target.stride + columns,
        mask=mask & (columns < target.vocab_size),
        other=float("-inf"),
    )


@triton.jit
def _cell(cache, slot, step, NUM_SHARDS: tl.constexpr):
    """Cache row, -1 where this rank has none; the cell's logits; offset of its statistics."""
    row = owned_row(slot, NUM_SHARDS, cache.shard_idx)
    logits = cache.logits + row * cache.row_stride + step * cache.step_stride
    return row, logits, row * cache.num_steps + step


@triton.jit
def _excess(
    x, top, scale, log2_total, columns, cache, slot, step, vocab_size, NUM_SHARDS: tl.constexpr
):
    """max(p - q, 0) for cleaned target logits `x` at `columns`."""
    p = tl.exp2((x - top) * scale - log2_total)
    _, logits, cell = _cell(cache, slot, step, NUM_SHARDS)
    y = clean_logits(tl.load(logits + columns, mask=columns < vocab_size, other=float("-inf")))
    scale_q = _scale(tl.load(cache.temperature + cell))
    q = tl.exp2(y * scale_q - tl.load(cache.logsumexp + cell) * LOG2E)
    return tl.maximum(p - q, 0.0)


@triton.jit
def target_blocks_kernel(
    blocks,
    target,
    batch,
    NUM_ROWS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req * NUM_ROWS + step, i): read NUM_BLOCKS blocks once, reduce each of them."""
    at_row = tl.program_id(0).to(tl.int64)
    step = at_row % NUM_ROWS
    slot, first_row, num_rows = _request(batch, at_row // NUM_ROWS, NUM_ROWS)
    if step >= num_rows:
        return
    block = tl.program_id(1) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    columns = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    x = _load_target(target, first_row + step, columns, True)

    at = at_row * blocks.num_blocks + block
    live = block < blocks.num_blocks
    tl.store(blocks.num_nans + at, tl.sum((x != x).to(tl.int32), 1), mask=live)
    x = clean_logits(x)
    peak = tl.max(x, 1)
    tl.store(blocks.peak + at, peak, mask=live)
    scale = _scale(tl.load(batch.temperature + slot))
    mass = sum_weights(tl.exp2((x - _finite(peak)[:, None]) * scale), 1)
    tl.store(blocks.mass + at, mass, mask=live)


@triton.jit
def _argmax(target, row, has_row, peak, BLOCK_SIZE: tl.constexpr):
    """Column of the largest logit of each target row, the lowest on ties, from its block peaks."""
    home = tl.argmax(peak, 1)
    columns = home[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    x = clean_logits(_load_target(target, row[:, None], columns, has_row[:, None]))
    return (home * BLOCK_SIZE + tl.argmax(x, 1)).to(tl.int64)


@triton.jit
def _draft_log2_prob(cache, slot, step, draft, has_draft, NUM_SHARDS: tl.constexpr):
    """log2 of the drafts' probabilities, whether these are known, and whether they are one-hot."""
    is_known = has_draft
    is_one_hot = has_draft
    log2_q = draft.to(tl.float32) * 0.0
    if cache is not None:
        row, logits, cell = _cell(cache, slot, step, NUM_SHARDS)
        is_known = tl.where(row >= 0, has_draft, False)
        state = tl.load(cache.state + cell, mask=is_known, other=0)
        temperature = tl.load(cache.temperature + cell, mask=is_known, other=0.0)
        is_one_hot = temperature == 0.0
        is_read = is_known & (temperature != 0.0)
        x = clean_logits(tl.load(logits + draft, mask=is_read, other=float("-inf")))
        logsumexp = tl.load(cache.logsumexp + cell, mask=is_read, other=0.0)
        log2_q = tl.where(is_one_hot, 0.0, x * _scale(temperature) - logsumexp * LOG2E)
        is_known = is_known & (state == CELL_STORED) & (log2_q > float("-inf"))
    return log2_q, is_known, is_one_hot


@triton.jit
def accept_kernel(
    output,
    pending,
    blocks,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_STEPS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req): judge the drafts of a request side by side; keep those before a rejection."""
    req = tl.program_id(0).to(tl.int64)
    slot, first_row, num_rows = _request(batch, req, NUM_ROWS)
    temperature = tl.load(batch.temperature + slot, mask=num_rows > 0, other=0.0)
    scale = _scale(temperature)
    step = tl.arange(0, NUM_STEPS).to(tl.int64)
    has_row = step < num_rows

    block = tl.arange(0, NUM_BLOCKS)[None, :]
    at = (req * NUM_ROWS + step[:, None]) * blocks.num_blocks + block
    live = has_row[:, None] & (block < blocks.num_blocks)
    peak = tl.load(blocks.peak + at, mask=live, other=float("-inf"))
    top = tl.max(peak, 1)
    num_nans = tl.sum(tl.load(blocks.num_nans + at, mask=live, other=0), 1)
    is_unusable = has_row & ((num_nans > 0) | (top == float("-inf")))
    tl.store(output.num_nans + req, tl.sum(is_unusable.to(tl.int32), 0))
    top = _finite(top)
    mass = tl.load(blocks.mass + at, mask=live, other=0)
    total = tl.sum(_mass_units(peak, mass, top[:, None], scale), 1)
    log2_total = tl.log2(tl.maximum(total, 1).to(tl.float32) * MASS_UNIT)

    at_draft = batch.draft_tokens + req * batch.draft_stride + step
    draft = tl.load(at_draft, mask=step < num_rows - 1, other=-1)
    has_draft = (draft >= 0) & (draft < target.vocab_size)
    x = clean_logits(_load_target(target, first_row + step, draft, has_draft))
    log2_p = (x - top) * scale - log2_total
    log2_q, is_known, is_one_hot = _draft_log2_prob(cache, slot, step, draft, has_draft, NUM_SHARDS)
    seed = tl.load(batch.seeds + slot, mask=num_rows > 0, other=0)
    position = tl.load(batch.positions + req) + step
    word, _, _, _ = random_words(seed, position, step, STREAM_ACCEPT)
    is_accepted = is_known & (log2_p > tl.log2(uniform(word)) + log2_q)
    token = tl.full([NUM_STEPS], -1, tl.int64)
    if temperature == 0.0:
        largest = _argmax(target, first_row + step, has_row, peak, BLOCK_SIZE)
        is_accepted = has_draft & (draft == largest)
        token = tl.where(has_row, largest, -1)

    stop = tl.min(tl.where(is_accepted, NUM_STEPS, step), 0)
    emitted = tl.where(step < stop, draft, tl.where(step == stop, token, -1))
    tl.store(output.sampled + req * NUM_ROWS + step, emitted, mask=step < NUM_ROWS)
    tl.store(output.num_sampled + req, tl.where(num_rows > 0, stop + 1, 0))

    is_stop = step == stop
    kinds = tl.where(is_known, tl.where(is_one_hot, WITHOUT_DRAFT, RESIDUAL), TARGET)
    kind = tl.sum(tl.where(is_stop, kinds, 0), 0)
    tl.store(pending.kind + req, tl.where(temperature == 0.0, NOTHING, kind))
    tl.store(pending.top + req, tl.sum(tl.where(is_stop, top, 0.0), 0))
    tl.store(pending.log2_total + req, tl.sum(tl.where(is_stop, log2_total, 0.0), 0))


@triton.jit
def residual_blocks_kernel(
    pending,
    output,
    target,
    batch,
    cache,
    num_blocks,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req, i): sum max(p - q, 0) over NUM_BLOCKS blocks, if that is what is drawn from."""
    req = tl.program_id(0).to(tl.int64)
    if tl.load(pending.kind + req) != RESIDUAL:
        return
    step = tl.load(output.num_sampled + req).to(tl.int64) - 1
    slot, first_row, _ = _request(batch, req, NUM_ROWS)
    block = tl.program_id(1) * NUM_BLOCKS + tl.arange(0, NUM_BLOCKS)
    columns = block[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]
    x = clean_logits(_load_target(target, first_row + step, columns, True))
    scale = _scale(tl.load(batch.temperature + slot))
    top = tl.load(pending.top + req)
    log2_total = tl.load(pending.log2_total + req)
    excess = _excess(
        x, top, scale, log2_total, columns, cache, slot, step, target.vocab_size, NUM_SHARDS
    )
    tl.store(
        pending.residual + req * num_blocks + block, tl.sum(excess, 1), mask=block < num_blocks
    )


@triton.jit
def draw_kernel(
    output,
    pending,
    blocks,
    target,
    batch,
    cache,
    NUM_ROWS: tl.constexpr,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Program (req): draw a block, then a column of it, from what the request has pending."""
    req = tl.program_id(0).to(tl.int64)
    kind = tl.load(pending.kind + req)
    if kind == NOTHING:
        return
    step = tl.load(output.num_sampled + req).to(tl.int64) - 1
    slot, first_row, num_rows = _request(batch, req, NUM_ROWS)
    scale = _scale(tl.load(batch.temperature + slot))
    block = tl.arange(0, NUM_BLOCKS)
    live = block < blocks.num_blocks
    at = (req * NUM_ROWS + step) * blocks.num_blocks + block
    peak = tl.load(blocks.peak + at, mask=live, other=float("-inf"))
    mass = tl.load(blocks.mass + at, mask=live, other=0)
    removed = tl.load(
        batch.draft_tokens + req * batch.draft_stride + step, mask=kind == WITHOUT_DRAFT, other=-1
    )
    if kind == WITHOUT_DRAFT:
        home = removed // BLOCK_SIZE
        columns = home * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        x = clean_logits(_load_target(target, first_row + step, columns, columns != removed))
        home_peak = tl.max(x, 0)
        home_mass = sum_weights(tl.exp2((x - _finite(home_peak)) * scale), 0)
        peak = tl.where(block == home, home_peak, peak)
        mass = tl.where(block == home, home_mass, mass)
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")
    top = _finite(top)
    units = _mass_units(peak, mass, top, scale)
    residual = 0.0
    if kind == RESIDUAL:
        sums = tl.load(pending.residual + req * blocks.num_blocks + block, mask=live, other=0.0)
        residual = tl.sum(sums, 0)
        units = tl.where(residual > RESIDUAL_FLOOR, to_units(sums, tl.max(sums, 0)), units)

    stream = tl.where(num_rows > 1, STREAM_BONUS, STREAM_TARGET)
    stream = tl.where(step < num_rows - 1, STREAM_RESIDUAL, stream)
    seed = tl.load(batch.seeds + slot)
    position = tl.load(batch.positions + req) + step
    word0, word1, _, _ = random_words(seed, position, step, stream)

    chosen = tl.minimum(draw_index(units, word0), blocks.num_blocks - 1)
    columns = chosen * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = clean_logits(_load_target(target, first_row + step, columns, columns != removed))
    weights = tl.exp2((x - _finite(tl.max(x, 0))) * scale)
    if cache is not None:  # noqa: SIM102 - this is known at compile time, the next is not
        if residual > RESIDUAL_FLOOR:
            log2_total = tl.load(pending.log2_total + req)
            weights = _excess(
                x, top, scale, log2_total, columns, cache, slot, step, target.vocab_size, NUM_SHARDS
            )
    lane = draw_index(to_units(weights, tl.max(weights, 0)), word1)
    token = tl.where(is_empty, tl.maximum(removed, 0), chosen * BLOCK_SIZE + lane)
    token = tl.minimum(token, target.vocab_size - 1)  # only a temperature of NaN gets this far
    tl.store(output.sampled + req * NUM_ROWS + step, token)


def rejection_sample_triton(batch: RejectionBatch) -> RejectionOutput:
    """Launch method `standard` on the current stream. No host synchronisation.

    Scratch is 12 bytes a target block of 512 columns, `SCRATCH_BYTES` at most: larger batches go in
    parts of whole requests.
    """
    output = RejectionOutput.empty(batch.draft_tokens)
    num_blocks = triton.cdiv(batch.vocab_size, BLOCK_SIZE)
    reqs_at_once = max(1, SCRATCH_BYTES // (12 * batch.num_rows * num_blocks))
    for start in range(0, batch.num_reqs, reqs_at_once):
        stop = min(start + reqs_at_once, batch.num_reqs)
        part = RejectionOutput(*(tensor[start:stop] for tensor in output))
        _launch(batch.requests(start, stop), part, num_blocks)
    return output


def _launch(batch: RejectionBatch, output: RejectionOutput, num_blocks: int) -> None:
    num_reqs, num_rows = batch.num_reqs, batch.num_rows
    device, cache = batch.target_logits.device, batch.cache
    scratch = torch.empty(3, num_reqs * num_rows, num_blocks, dtype=torch.int32, device=device)
    blocks = BlockArgs(scratch[0].view(torch.float32), scratch[1], scratch[2], num_blocks)
    decided = torch.empty(3, num_reqs, dtype=torch.int32, device=device)
    residual = torch.empty(0 if cache is None else num_reqs * num_blocks, device=device)
    top, log2_total = decided[1].view(torch.float32), decided[2].view(torch.float32)
    pending = PendingArgs(decided[0], top, log2_total, residual)
    target = TargetArgs(batch.target_logits, batch.target_logits.stride(0), batch.vocab_size)
    requests = BatchArgs(
        draft_tokens=batch.draft_tokens,
        draft_stride=batch.draft_tokens.stride(0),
        idx_mapping=batch.idx_mapping,
        cu_num_logits=batch.cu_num_logits,
        positions=batch.positions,
        temperature=batch.temperature,
        seeds=batch.seeds,
    )
    stored = None if cache is None else cache_args(cache)
    num_shards = 1 if cache is None else cache.shard.num_shards
    all_blocks = triton.next_power_of_2(num_blocks)
    some_blocks = min(BLOCKS_PER_PROGRAM, all_blocks)
    num_programs = triton.cdiv(num_blocks, some_blocks)

    target_blocks_kernel[(num_reqs * num_rows, num_programs)](
        blocks=blocks,
        target=target,
        batch=requests,
        NUM_ROWS=num_rows,
        NUM_BLOCKS=some_blocks,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    accept_kernel[(num_reqs,)](
        output=output,
        pending=pending,
        blocks=blocks,
        target=target,
        batch=requests,
        cache=stored,
        NUM_ROWS=num_rows,
        NUM_STEPS=triton.next_power_of_2(num_rows),
        NUM_SHARDS=num_shards,
        NUM_BLOCKS=all_blocks,
        BLOCK_SIZE=BLOCK_SIZE,
    )
    if cache is not None:
        residual_blocks_kernel[(num_reqs, num_programs)](
            pending=pending,
            output=output,
            target=target,
            batch=requests,
            cache=stored,
            num_blocks=num_blocks,
            NUM_ROWS=num_rows,
            NUM_SHARDS=num_shards,
            NUM_BLOCKS=some_blocks,
            BLOCK_SIZE=BLOCK_SIZE,
        )
    draw_kernel[(num_reqs,)](
        output=output,
        pending=pending,
        blocks=blocks,
        target=target,
        batch=requests,
        cache=stored,
        NUM_ROWS=num_rows,
        NUM_SHARDS=num_shards,
        NUM_BLOCKS=all_blocks,
        BLOCK_SIZE=BLOCK_SIZE,
    )
