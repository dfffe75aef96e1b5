"""`gumbel_sample` in Triton: a launch that scores and stores blocks, one that takes the best."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common.kernel import clean_logits
from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample.kernel import BLOCK_SIZE, fill_scattered
from specreg.kernels.drafting.args import RowArgs, store_of
from specreg.kernels.drafting.kernel import (
    MASS_SCALE,
    MASS_UNIT,
    block_columns,
    block_peaks,
    by_block,
    load_columns,
    load_temperature,
    logits_cell,
    ordered,
    pack,
    peak_of,
    store_columns,
    store_statistics,
    token_of_program,
)
from specreg.kernels.gumbel_sample import reference
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["gumbel_sample_triton"]

BLOCKS_PER_PROGRAM = 4
NUM_WARPS = 4

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
SERIES_BELOW = tl.constexpr(reference.SERIES_BELOW)
UNIFORM_MAX = tl.constexpr(reference.UNIFORM_MAX)


class NoiseArgs(NamedTuple):
    """What random words are made of beside the token's id: two values a token, one a slot."""

    positions: Tensor
    steps: Tensor
    seeds: Tensor


@triton.jit
def gumbel(word):
    """fp32 standard Gumbel noise of a random word; finite."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, UNIFORM_MAX)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return -tl.log(tl.where(u < SERIES_BELOW, series, -tl.log(1.0 - u)))


@triton.jit
def gumbel_sample_blocks_kernel(
    blocks,
    best,
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
    num_chunks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
):
    """Program (i, token): read NUM_BLOCKS blocks once, store, reduce and score them.

    `best` packs the best score, as an integer in the same order, over the complement of its column,
    so that the largest of several has the lowest column among equal scores. The sign of a block's
    mass says that it holds a NaN.
    """
    token = token_of_program()
    if token >= num_tokens:
        return
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        return
    step = tl.load(rows.steps + token)
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = load_columns(logits + token * logits_stride, columns, num_columns, False)
    ids = columns
    if target_ids is not None:
        ids = tl.load(target_ids + columns, mask=columns < num_columns, other=0)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
        is_owned, row = logits_cell(cells, req, step, NUM_SHARDS)
        if is_owned:
            if IS_SCATTERED:
                tl.store(row + ids, x, mask=columns < num_columns)
            else:
                store_columns(row, columns, x, width, False)

    values = clean_logits(x)
    scores = values
    by_blocks = by_block(values, NUM_BLOCKS, VECTOR)
    peak = block_peaks(by_blocks)
    mass = tl.zeros_like(peak).to(tl.int32)
    if rows.temperature is not None:
        is_drawn, divisor, scale = load_temperature(rows.temperature, req)
        zero = ids * 0
        word, _, _, _ = random_words(
            tl.load(words.seeds + req),
            zero + tl.load(words.positions + token),
            zero + tl.load(words.steps + token),
            STREAM_DRAFT,
            ids,
        )
        noisy = tl.maximum(values * tl.div_rn(1.0, divisor) + gumbel(word), LOWEST)
        noisy = tl.where(values == float("-inf"), float("-inf"), noisy)
        scores = tl.where(is_drawn, noisy, values)
        weights = tl.exp2((by_blocks - peak[None, :, None, None]) * scale)
        weights = tl.where(by_blocks == float("-inf"), 0.0, weights)
        fixed = (weights + 4.0).to(tl.int32, bitcast=True) - 0x40800000
        mass = tl.sum(tl.sum(tl.sum(fixed, 3), 0), 1)

    wide = x.to(tl.float32)
    is_nan = by_block((wide != wide).to(tl.float32), NUM_BLOCKS, VECTOR)
    has_nan = tl.max(tl.max(tl.max(is_nan, 3), 0), 1) > 0.0
    block = first + tl.arange(0, NUM_BLOCKS)
    tl.store(
        blocks + token * num_blocks + block,
        pack(peak.to(tl.int32, bitcast=True), tl.where(has_nan, ~mass, mass)),
        mask=block < num_blocks,
    )
    packed = pack(ordered(scores.to(tl.int32, bitcast=True)), ~columns)
    tl.store(best + token * num_chunks + tl.program_id(0), tl.max(tl.max(packed, 1), 0))


@triton.jit
def gumbel_sample_tokens_kernel(
    token_ids,
    num_nans,
    statistics,
    blocks,
    best,
    rows,
    target_ids,
    num_blocks,
    num_chunks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
):
    """Program (token): the best column of all chunks; store the statistics if owned."""
    token = tl.program_id(0).to(tl.int64)
    req = tl.load(rows.idx_mapping + token)
    if req < 0:
        tl.store(token_ids + token, -1)
        return
    block = tl.arange(0, NUM_BLOCKS)
    live = block < num_blocks
    packed = tl.load(blocks + token * num_blocks + block, mask=live, other=0)
    peak = tl.where(live, peak_of(packed), float("-inf"))
    mass = packed.to(tl.int32)
    is_bad = tl.min(mass, 0) < 0
    top = tl.max(peak, 0)
    is_empty = top == float("-inf")

    chunk = tl.arange(0, NUM_CHUNKS)
    scores = tl.load(
        best + token * num_chunks + chunk, mask=chunk < num_chunks, other=-0x7FFFFFFFFFFFFFFF
    )
    column = tl.where(is_empty, 0, (~tl.max(scores, 0).to(tl.int32)).to(tl.int64))
    if target_ids is not None:
        column = tl.load(target_ids + column).to(tl.int64)
    tl.store(token_ids + token, column)
    if num_nans is not None:
        tl.atomic_add(num_nans + req, 1, mask=is_bad | is_empty)
    if statistics is not None:
        is_drawn, divisor, scale = load_temperature(rows.temperature, req)
        mass = tl.where(mass < 0, ~mass, mass)
        shares = mass.to(tl.float32) * MASS_SCALE * tl.exp2((peak - top) * scale)
        units = tl.where(peak == float("-inf"), 0.0, shares).to(tl.int64)
        total = tl.sum(units, 0).to(tl.float32) * MASS_UNIT
        logsumexp = tl.div_rn(top, divisor) + tl.log(total)
        store_statistics(
            statistics,
            req,
            tl.load(rows.steps + token),
            tl.where(is_drawn, divisor, 0.0),
            tl.where(is_drawn & ~is_empty, logsumexp, 0.0),
            is_empty,
            NUM_SHARDS,
        )


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
    num_tokens = len(idx_mapping)
    ids = torch.empty_like(idx_mapping)
    if num_tokens == 0:
        return ids
    store = store_of(logits, cache, vocab_size, target_ids)
    num_blocks, logits_stride = store.num_blocks, logits.stride(0)
    padded = 1 << (num_blocks - 1).bit_length()
    per_program = min(BLOCKS_PER_PROGRAM, padded)
    num_chunks = -(-num_blocks // per_program)
    blocks = torch.empty(num_tokens * num_blocks, dtype=torch.int64, device=logits.device)
    best = torch.empty(num_tokens * num_chunks, dtype=torch.int64, device=logits.device)
    rows = RowArgs(idx_mapping, steps, temperature)
    words = NoiseArgs(positions, noise_steps, seeds)
    key = (
        store.key,
        logits_stride,
        per_program,
        specialisation(logits, rows, words, target_ids, num_nans, blocks, best, ids),
    )
    if store.scattered is not None:
        fill_scattered(store, rows, num_tokens, vocab_size, key)
    launch(
        gumbel_sample_blocks_kernel,
        (num_chunks, *store.grid_rows),
        (
            blocks,
            best,
            store.cells,
            logits,
            logits_stride,
            rows,
            words,
            target_ids,
            num_tokens,
            store.num_columns,
            store.width,
            num_blocks,
            num_chunks,
            store.num_shards,
            per_program,
            BLOCK_SIZE,
            16 // logits.element_size(),
            store.scattered is not None,
        ),
        key,
        NUM_WARPS,
    )
    launch(
        gumbel_sample_tokens_kernel,
        (num_tokens,),
        (
            ids,
            num_nans,
            store.statistics,
            blocks,
            best,
            rows,
            target_ids,
            num_blocks,
            num_chunks,
            store.num_shards,
            padded,
            1 << (num_chunks - 1).bit_length(),
        ),
        key,
        num_warps=4,
    )
    return ids
