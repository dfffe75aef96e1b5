"""`draft_sample` in Triton: a launch that reduces and stores blocks, one that draws from them."""

from __future__ import annotations

from collections.abc import Hashable

import torch
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
from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample import reference
from specreg.kernels.drafting.args import RowArgs, Store, WordArgs, store_of
from specreg.kernels.drafting.kernel import (
    MASS_SCALE,
    MASS_UNIT,
    SHIFT_MAX,
    block_columns,
    block_masses,
    block_peaks,
    by_block,
    load_columns,
    load_temperature,
    logits_cell,
    pack,
    peak_of,
    store_columns,
    store_statistics,
    token_of_program,
    weight_of,
)
from specreg.kernels.random.kernel import STREAM_DRAFT, random_words

__all__ = ["draft_sample_triton", "fill_scattered"]

BLOCKS_PER_PROGRAM = 8
NUM_WARPS = 4
TOKEN_WARPS = 4
FILL_SIZE = 4096
BLOCK_SIZE = reference.BLOCK_SIZE

WEIGHT_SCALE = tl.constexpr(2.0**UNIT_BITS.value)


@triton.jit
def _reduce_blocks(
    blocks,
    cells,
    logits,
    rows,
    target_ids,
    token,
    req,
    num_columns,
    width,
    num_blocks,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """One program's part of a row, whose columns are all there if IS_FULL."""
    first = tl.program_id(0) * NUM_BLOCKS
    columns = block_columns(first, NUM_BLOCKS, BLOCK_SIZE, VECTOR)
    x = load_columns(logits, columns, num_columns, IS_FULL)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
        is_owned, row = logits_cell(cells, req, tl.load(rows.steps + token), NUM_SHARDS)
        if is_owned:
            if target_ids is None:
                store_columns(row, columns, x, width, IS_FULL)
            else:
                mask = columns < num_columns
                ids = tl.load(target_ids + columns, mask=mask, other=0)
                tl.store(row + ids, x, mask=mask)

    values = by_block(x, NUM_BLOCKS, VECTOR)
    peak = block_peaks(values)
    mass = tl.zeros_like(peak).to(tl.int32)
    if rows.temperature is not None:
        _, _, scale = load_temperature(rows.temperature, req)
        mass = block_masses(values, peak, scale)
    block = first + tl.arange(0, NUM_BLOCKS)
    tl.store(
        blocks + token * num_blocks + block,
        pack(peak.to(tl.int32, bitcast=True), mass),
        mask=block < num_blocks,
    )


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
            blocks,
            cells,
            row,
            rows,
            target_ids,
            token,
            req,
            num_columns,
            width,
            num_blocks,
            NUM_SHARDS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            VECTOR,
            True,
        )
    else:
        _reduce_blocks(
            blocks,
            cells,
            row,
            rows,
            target_ids,
            token,
            req,
            num_columns,
            width,
            num_blocks,
            NUM_SHARDS,
            NUM_BLOCKS,
            BLOCK_SIZE,
            VECTOR,
            False,
        )


@triton.jit
def _load_block(logits, logits_stride, cells, token, block, num_columns, BLOCK_SIZE: tl.constexpr):
    """fp32 logits of one block as they are stored: rounded to the cache's dtype."""
    columns = block * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = load_columns(logits + token * logits_stride, columns, num_columns, False)
    if cells is not None:
        x = x.to(cells.data.dtype.element_ty)
    return x.to(tl.float32)


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
        x = _load_block(logits, logits_stride, cells, token, odd, num_columns, BLOCK_SIZE)
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

    x = _load_block(logits, logits_stride, cells, token, chosen, num_columns, BLOCK_SIZE)
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


@triton.jit
def draft_sample_fill_kernel(
    cells, rows, num_tokens, vocab_size, NUM_SHARDS: tl.constexpr, FILL_SIZE: tl.constexpr
):
    """Program (i, token): -inf into an owned row, where a reduced vocabulary leaves columns out."""
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


def fill_scattered(
    store: Store, rows: RowArgs, num_tokens: int, vocab_size: int, key: Hashable
) -> None:
    """Launch: -inf into the owned rows that the next launch scatters into."""
    launch(
        draft_sample_fill_kernel,
        (-(-vocab_size // FILL_SIZE), *store.grid_rows),
        (store.cells, rows, num_tokens, vocab_size, store.num_shards, FILL_SIZE),
        (key, vocab_size),
        num_warps=4,
    )


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
    num_tokens = len(idx_mapping)
    ids = torch.empty_like(idx_mapping)
    if num_tokens == 0:
        return ids
    store = store_of(logits, cache, vocab_size, target_ids)
    num_blocks, num_columns = store.num_blocks, store.num_columns
    logits_stride, num_shards = logits.stride(0), store.num_shards
    blocks = torch.empty(num_tokens * num_blocks, dtype=torch.int64, device=logits.device)
    rows, words = RowArgs(idx_mapping, steps, temperature), WordArgs(positions, seeds)
    key = (
        store.key,
        logits_stride,
        specialisation(logits, rows, words, target_ids, num_nans, blocks, ids),
    )
    if store.scattered is not None:
        fill_scattered(store, rows, num_tokens, vocab_size, key)
    padded = 1 << (num_blocks - 1).bit_length()
    per_program = min(BLOCKS_PER_PROGRAM, padded)
    launch(
        draft_sample_blocks_kernel,
        (-(-num_blocks // per_program), *store.grid_rows),
        (
            blocks,
            store.cells,
            logits,
            logits_stride,
            rows,
            store.scattered,
            num_tokens,
            num_columns,
            store.width,
            num_blocks,
            num_shards,
            per_program,
            BLOCK_SIZE,
            16 // logits.element_size(),
        ),
        (key, per_program),
        NUM_WARPS,
    )
    launch(
        draft_sample_tokens_kernel,
        (num_tokens,),
        (
            ids,
            num_nans,
            store.statistics,
            blocks,
            store.cells,
            logits,
            logits_stride,
            rows,
            words,
            target_ids,
            num_columns,
            num_blocks,
            num_shards,
            padded,
            BLOCK_SIZE,
        ),
        key,
        TOKEN_WARPS,
    )
    return ids
