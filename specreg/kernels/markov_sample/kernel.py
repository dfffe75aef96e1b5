"""`markov_sample` in Triton: a launch a step, and one that draws the last tokens.

One more goes in front where a reduced vocabulary is scattered into a dense cache.

The block masses of a step are complete when its launch ends, so the next launch draws its tokens
before it needs them: programs claim requests until none is left, draw one token for each, and wait
until all are done. Whoever has claimed a draw is running and waits for nobody, so there is always
progress, in whatever order programs start.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.common.launch import launch, specialisation
from specreg.kernels.common.view import DraftLogitsView
from specreg.kernels.draft_sample import reference
from specreg.kernels.drafting.args import store_of
from specreg.kernels.drafting.kernel import logits_cell, pack
from specreg.kernels.markov_sample.arguments import (
    BaseArgs,
    HeadArgs,
    ReqArgs,
    SizeArgs,
    StepArgs,
    tile_of,
)
from specreg.kernels.markov_sample.blocks.kernel import (
    end_part,
    load_base,
    load_table,
    nothing_yet,
    part_columns,
    reduce_rows,
    rounded_bias,
)
from specreg.kernels.markov_sample.draws.kernel import draw, draw_together, stored_rows

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton that knows ROCm alone, where `can_overlap` is False
    gdc_launch_dependents = gdc_wait = None

__all__ = ["can_overlap", "markov_sample_triton"]

DRAW_WARPS = 4
FILL_SIZE = 4096
GROUP = 32  # requests whose blocks a program reduces at once
BLOCK_SIZE = reference.BLOCK_SIZE


@triton.jit(do_not_specialize=["step"])
def markov_sample_step_kernel(
    outs,
    cells,
    statistics,
    base,
    reqs,
    head,
    target_ids,
    sizes,
    step,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_SCATTERED: tl.constexpr,
    IS_PADDED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    W2_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Program (tile, block): draw the step before; bias, store and reduce a block of ROWS requests.

    W2 is read once for all of them. `cells` hold no block of a row where IS_SCATTERED, and more
    columns than there are where IS_PADDED.
    """
    NUM_PARTS: tl.constexpr = BLOCK_SIZE // COLUMNS
    # Every other step goes backwards: it begins with what the L2 still holds of W2.
    is_odd = (step & 1) == 1
    block = tl.program_id(1)
    block = tl.where(is_odd, tl.num_programs(1) - 1 - block, block)
    if OVERLAPS:  # programs start while those of the launch in front end, and wait for them
        gdc_launch_dependents()
        gdc_wait()

    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = rows < sizes.num_reqs
    req = tl.load(reqs.idx_mapping + rows, mask=is_row, other=-1)
    if IS_FIRST:
        if tl.program_id(0) + tl.program_id(1) == 0:
            for i in range(sizes.num_steps):
                tl.store(outs.counters + i, 0)
        previous = tl.load(reqs.anchors + rows, mask=is_row, other=-1)
    else:
        draw_together(
            outs,
            None if IS_SCATTERED else cells,
            statistics,
            reqs,
            target_ids,
            sizes,
            step - 1,
            NUM_SHARDS,
            NUM_BLOCKS,
            BLOCK_SIZE,
        )
        drawn = outs.tokens + rows * sizes.num_steps + (step - 1)
        previous = tl.load(drawn, mask=is_row, other=-1, cache_modifier=".cg")
    is_known = (req >= 0) & (previous >= 0) & (previous < head.num_ids)
    previous = tl.where(is_known, previous, 0)
    w1 = load_table(head.w1, head.w1_stride, previous, is_known, 0, RANK, CHUNK, 0)

    dtype: tl.constexpr = base.logits.dtype.element_ty
    logits = base.logits + (rows * base.req_stride + step.to(tl.int64) * base.step_stride)
    kept = None  # where rows of logits go
    if reqs.temperature is not None:
        own = None if IS_SCATTERED else cells
        kept = stored_rows(outs, own, rows, req, step.to(tl.int64), NUM_SHARDS)
    goes = cells if IS_SCATTERED else None, target_ids, sizes, step, block
    best = nothing_yet(ROWS)
    x = tl.full((ROWS, COLUMNS), float("-inf"), dtype)
    bias = tl.zeros((COLUMNS, ROWS), dtype)
    begun = part_columns(block, 0, is_odd, NUM_PARTS, COLUMNS), x, bias
    # A turn begins a part, and ends that of the turn before while the rows of W2 are on their way.
    # Triton loads ahead only where a loop has no barrier, no other loop and no value of two turns
    # ago: the draws and the reduction cannot move into it.
    for i in range(NUM_PARTS):
        live = tl.where(i > 0, req, -1)  # nothing has begun before the first turn
        best = end_part(kept, goes, begun, live, best, NUM_SHARDS, BLOCK_SIZE, IS_PADDED)
        columns = part_columns(block, i, is_odd, NUM_PARTS, COLUMNS)
        is_column = columns < sizes.num_columns
        w2 = load_table(head.w2, W2_STRIDE, columns, is_column, 0, RANK, CHUNK, 1)
        x = load_base(logits, columns, req, sizes)
        acc = tl.dot(w2, w1, input_precision="ieee")
        for first in tl.static_range(CHUNK, RANK, CHUNK):
            w2 = load_table(head.w2, W2_STRIDE, columns, is_column, first, RANK, CHUNK, 1)
            more = load_table(head.w1, head.w1_stride, previous, is_known, first, RANK, CHUNK, 0)
            acc = tl.dot(w2, more, acc, input_precision="ieee")
        begun = columns, x, rounded_bias(head, acc, dtype)
    best = end_part(kept, goes, begun, req, best, NUM_SHARDS, BLOCK_SIZE, IS_PADDED)

    if reqs.temperature is None:
        largest, lane, has_nan = best
        packed = pack(largest.to(tl.int32, bitcast=True), tl.where(has_nan, ~lane, lane))
        tl.store(outs.blocks + rows * sizes.num_blocks + block, packed, mask=req >= 0)
    else:
        tl.debug_barrier()  # rows are written before other threads read them
        reduce_rows(
            outs,
            None if IS_SCATTERED else cells,
            reqs,
            sizes,
            tl.program_id(0).to(tl.int64) * ROWS,
            step,
            block,
            NUM_SHARDS,
            BLOCK_SIZE,
            ROWS,
            GROUP,
            VECTOR,
        )


@triton.jit
def markov_sample_draw_kernel(
    outs,
    cells,
    statistics,
    reqs,
    target_ids,
    sizes,
    NUM_SHARDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (request): draw the last step."""
    if OVERLAPS:
        gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    # An integer 1 in a tuple is a constant, which has no type to convert from.
    last = tl.zeros_like(request) + (sizes.num_steps - 1)
    draw(
        outs,
        cells,
        statistics,
        reqs,
        target_ids,
        sizes,
        request,
        last,
        NUM_SHARDS,
        NUM_BLOCKS,
        BLOCK_SIZE,
    )


@triton.jit
def markov_sample_fill_kernel(
    cells, idx_mapping, vocab_size, NUM_SHARDS: tl.constexpr, FILL_SIZE: tl.constexpr
):
    """Program (request, i, step): -inf into an owned cell, which is scattered into afterwards."""
    req = tl.load(idx_mapping + tl.program_id(0).to(tl.int64))
    is_owned, cell = logits_cell(cells, req, tl.program_id(2).to(tl.int64), NUM_SHARDS)
    if is_owned:
        columns = tl.program_id(1) * FILL_SIZE + tl.arange(0, FILL_SIZE)
        tl.store(cell + columns, float("-inf"), mask=columns < vocab_size)


def markov_sample_triton(
    base_logits: Tensor,
    anchors: Tensor,
    idx_mapping: Tensor,
    positions: Tensor,
    w1: Tensor,
    w2: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    cache: DraftLogitsView | None,
    *,
    vocab_size: int,
    target_ids: Tensor | None,
    scale: float,
    soft_cap: float | None,
    num_nans: Tensor | None,
) -> Tensor:
    """Launch on the current stream: K + 1 kernels, K + 2 to scatter into a dense cache. No sync."""
    num_reqs, num_steps, _ = base_logits.shape
    device, rank = base_logits.device, w1.shape[1]
    tokens = torch.empty(num_reqs, num_steps, dtype=torch.int64, device=device)
    if num_reqs == 0 or len(seeds) == 0:
        return tokens.fill_(-1)
    store = store_of(base_logits[:, 0], cache, vocab_size, target_ids)
    is_scattered, num_shards = store.is_scattered, store.num_shards
    in_cells = cache is not None and num_shards == 1 and not is_scattered
    scratch, scratch_stride = None, -(-store.width // 16) * 16
    stored_dtype = base_logits.dtype if cache is None else cache.logits.dtype
    if temperature is not None and not in_cells:
        scratch = torch.empty(num_reqs * scratch_stride, dtype=stored_dtype, device=device)
    outs = StepArgs(
        tokens,
        num_nans,
        torch.empty(num_reqs * store.num_blocks, dtype=torch.int64, device=device),
        scratch,
        scratch_stride,
        torch.empty(num_steps, dtype=torch.int64, device=device),
    )
    base = BaseArgs(base_logits, base_logits.stride(0), base_logits.stride(1))
    reqs = ReqArgs(idx_mapping, anchors, positions, seeds, temperature)
    head = HeadArgs(
        w1,
        w1.stride(0),
        w2,
        len(w1),
        None if scale == 1.0 else float(scale),
        None if soft_cap is None else float(soft_cap),
    )
    sizes = SizeArgs(num_reqs, num_steps, store.num_columns, store.width, store.num_blocks)
    tile = tile_of(num_reqs, rank, w1.dtype, is_hip=torch.version.hip is not None)
    padded = 1 << (store.num_blocks - 1).bit_length()
    overlaps = can_overlap(device)
    options: dict[str, Any] = {"launch_pdl": True} if overlaps else {}
    step_options = options | {"num_stages": tile.num_stages}
    if tile.maxnreg is not None:
        step_options["maxnreg"] = tile.maxnreg
    arguments = specialisation(outs, base, reqs, head, target_ids, sizes)
    key = (store.key, arguments, w2.stride(0), tile, overlaps)

    if is_scattered:
        launch(
            markov_sample_fill_kernel,
            (num_reqs, -(-vocab_size // FILL_SIZE), num_steps),
            (store.cells, idx_mapping, vocab_size, num_shards, FILL_SIZE),
            (key, vocab_size),
            num_warps=4,
        )
    for step in range(num_steps):
        launch(
            markov_sample_step_kernel,
            (-(-num_reqs // tile.rows), store.num_blocks),
            (
                outs,
                store.cells,
                store.statistics,
                base,
                reqs,
                head,
                target_ids,
                sizes,
                step,
                num_shards,
                padded,
                BLOCK_SIZE,
                rank,
                tile.chunk,
                tile.rows,
                tile.columns,
                step == 0,
                is_scattered,
                store.width > store.num_columns,
                overlaps,
                w2.stride(0),
                min(GROUP, tile.rows),
                16 // stored_dtype.itemsize,
            ),
            (key, step == 0),
            tile.num_warps,
            **step_options,
        )
    launch(
        markov_sample_draw_kernel,
        (num_reqs,),
        (
            outs,
            None if is_scattered else store.cells,
            store.statistics,
            reqs,
            target_ids,
            sizes,
            num_shards,
            padded,
            BLOCK_SIZE,
            overlaps,
        ),
        key,
        DRAW_WARPS,
        **options,
    )
    return tokens


def can_overlap(device: torch.device) -> bool:
    """Whether launches there may wait for the one before inside their programs: sm_90 and later."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
