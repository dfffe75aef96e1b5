"""`paged_attention` in Triton.

A program of attention takes a tile: consecutive tokens of a request times the query heads of one
key/value head. Small batches also split the keys of a tile among programs; a second launch combines
what these leave.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.paged_attention import arguments, sizes
from specreg.kernels.paged_attention.arguments import (
    PartialArgs,
    QueryArgs,
    launch_by_name,
    packed,
    pool_args,
    rule_args,
    table_args,
)
from specreg.kernels.paged_attention.sizes import lanes_of, program_shape
from specreg.kernels.paged_attention.tiling import tile_tokens

__all__ = ["paged_attention_triton"]

LOG2E = tl.constexpr(arguments.LOG2E)
KEYS_PER_SPLIT = tl.constexpr(sizes.KEYS_PER_SPLIT)


@triton.jit
def _tanh(x):
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    size = tl.div_rn(1.0 - decay, 1.0 + decay)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def _finite(peak):
    """A number to subtract where nothing has been seen yet and `peak` is -inf."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _load_cells(pool, block, cell, kv_head, is_live, DIM: tl.constexpr, LANES: tl.constexpr):
    """`[keys, LANES]` of one head, 0 beyond DIM and where not live."""
    at = block * pool.block_stride + cell * pool.cell_stride + kv_head * pool.head_stride
    lane = tl.arange(0, LANES)
    mask = is_live[:, None]
    if LANES != DIM:
        mask = mask & (lane < DIM)[None, :]
    return tl.load(pool.data + at[:, None] + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _share(rule, mine, position, kv_len, most, KEYS: tl.constexpr):
    """First key that a row of `mine` sees, and the keys `[begin, end)` of this program's share."""
    stop = tl.minimum(tl.max(tl.where(mine, kv_len, 0), 0), most)
    first = stop * 0
    if rule.sliding_window is not None:
        oldest = tl.min(tl.where(mine, position, 2147483647), 0)
        first = tl.maximum(oldest - rule.sliding_window + 1, 0)
    base = first // KEYS * KEYS
    size = tl.cdiv(tl.cdiv(tl.maximum(stop - base, 0), tl.num_programs(2)), KEYS) * KEYS
    size = tl.maximum(size, KEYS_PER_SPLIT)
    begin = base + tl.program_id(2) * size
    return first, begin, tl.minimum(begin + size, stop)


@triton.jit
def _normalised(peak, total, attended, sinks, head, mask):
    """Weighted values over the denominator, which a sink joins; 0 where nothing was seen."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        decay = tl.exp2(peak - top)
        total = total * decay + tl.exp2(sink - top)
        attended = attended * decay[:, None]
    is_seen = (total > 0.0)[:, None]
    return tl.where(is_seen, tl.div_rn(attended, tl.where(is_seen, total[:, None], 1.0)), 0.0)


@triton.jit(do_not_specialize=["num_tokens", "tile_tokens"])
def paged_attention_kernel(
    out,
    partials,
    query,
    keys,
    values,
    table,
    rule,
    tile_starts,
    tile_tokens,
    num_tokens,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, i, split): the tokens of a tile and HEADS query heads, over a share of keys.

    Rows are taken slot by slot, so a tile that mixes requests is right, only slower.
    """
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = (tl.program_id(1) // chunks).to(tl.int64)
    tile = tl.program_id(0).to(tl.int64)
    if tile_starts is None:
        first_token = tile * tile_tokens
        last_token = tl.minimum(first_token + tile_tokens, num_tokens)
    else:
        first_token = tl.load(tile_starts + tile).to(tl.int64)
        last_token = tl.load(tile_starts + tile + 1)
    row = tl.arange(0, ROWS)
    token = first_token + row // HEADS
    lane = tl.program_id(1) % chunks * HEADS + row % HEADS
    is_row = (token < last_token) & (lane < GROUP)
    head = kv_head * GROUP + lane
    slot = tl.load(query.slots + token, mask=is_row, other=-1)
    position = tl.load(query.positions + token, mask=is_row, other=0).to(tl.int32)
    kv_len = tl.load(query.kv_lens + token, mask=is_row, other=0).to(tl.int32)
    d = tl.arange(0, KEY_LANES)[None, :]
    at = token * query.token_stride + head * query.head_stride
    q = tl.load(query.data + at[:, None] + d, mask=is_row[:, None] & (d < KEY_DIM), other=0.0)

    e = tl.arange(0, VALUE_LANES)[None, :]
    at = token * query.num_heads + head
    if partials is not None:
        at = at * tl.num_programs(2) + tl.program_id(2)
    run = tl.max(slot, 0)
    while run >= 0:
        mine = slot == run
        most = table.num_columns * BLOCK_SIZE
        first, begin, end = _share(rule, mine, position, kv_len, most, KEYS)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        attended = tl.zeros([ROWS, VALUE_LANES], tl.float32)
        for start in range(begin, end, KEYS):
            index = start + tl.arange(0, KEYS)
            is_live = (index >= first) & (index < end)
            column = table.blocks + run * table.slot_stride + index // BLOCK_SIZE
            block = tl.load(column, mask=is_live, other=0).to(tl.int64)
            cell = (index % BLOCK_SIZE).to(tl.int64)

            k = _load_cells(keys, block, cell, kv_head, is_live, KEY_DIM, KEY_LANES)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * rule.scale
            if rule.soft_cap is not None:
                scores = _tanh(scores) * rule.soft_cap
            is_visible = is_live[None, :] & mine[:, None] & (index[None, :] < kv_len[:, None])
            if rule.sliding_window is not None:
                oldest = position - rule.sliding_window
                is_visible = is_visible & (index[None, :] > oldest[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))

            old_peak = peak
            peak = tl.maximum(old_peak, tl.max(scores, 1))
            weights = tl.exp2(scores - _finite(peak)[:, None])
            decay = tl.exp2(old_peak - _finite(peak))
            total = total * decay + tl.sum(weights, 1)
            v = _load_cells(values, block, cell, kv_head, is_live, VALUE_DIM, VALUE_LANES)
            attended = attended * decay[:, None]
            attended = tl.dot(weights.to(v.dtype), v, attended, input_precision=PRECISION)

        mask = mine[:, None] & (e < VALUE_DIM)
        if partials is None:
            attended = _normalised(peak, total, attended, rule.sinks, head, mine)
            tl.store(out + at[:, None] * VALUE_DIM + e, attended, mask=mask)
        else:
            tl.store(partials.peak + at, peak, mask=mine)
            tl.store(partials.total + at, total, mask=mine)
            mask = mask & (peak > float("-inf"))[:, None]
            tl.store(partials.attended + at[:, None] * VALUE_DIM + e, attended, mask=mask)
        run = tl.max(tl.where(slot < run, slot, -1), 0)

    is_padding = is_row & (slot < 0)
    if partials is None:
        nothing = tl.zeros([ROWS, VALUE_LANES], tl.float32)
        mask = is_padding[:, None] & (e < VALUE_DIM)
        tl.store(out + at[:, None] * VALUE_DIM + e, nothing, mask=mask)
    else:
        tl.store(partials.peak + at, float("-inf"), mask=is_padding)


@triton.jit
def combine_kernel(
    out,
    partials,
    sinks,
    SPLITS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
):
    """Program (token, head): one softmax from what the splits have left."""
    head = tl.program_id(1) + tl.arange(0, 1)
    at = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = at * SPLITS + tl.arange(0, SPLITS)
    peak = tl.load(partials.peak + split)
    is_seen = peak > float("-inf")
    total = tl.load(partials.total + split, mask=is_seen, other=0.0)
    e = tl.arange(0, VALUE_LANES)[None, :]
    attended = tl.load(
        partials.attended + split[:, None] * VALUE_DIM + e,
        mask=is_seen[:, None] & (e < VALUE_DIM),
        other=0.0,
    )
    top = tl.max(peak, 0, keep_dims=True)
    weight = tl.exp2(peak - _finite(top))
    total = tl.sum(total * weight, 0, keep_dims=True)
    attended = tl.sum(attended * weight[:, None], 0, keep_dims=True)
    attended = _normalised(top, total, attended, sinks, head, head >= 0)
    tl.store(out + at * VALUE_DIM + e, attended, mask=e < VALUE_DIM)


def paged_attention_triton(
    query: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    kv_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    query_start_loc: tuple[int, ...] | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Launch on the current stream: one kernel, two where keys are split. No host synchronisation.

    Args:
        num_splits: programs that share the keys of a tile, a power of two; None chooses.

    Others: see `paged_attention`.
    """
    query = packed(query)
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads, value_dim = value_pool.shape[1:]
    out = query.new_empty(num_tokens, num_heads, value_dim)
    if num_tokens == 0:
        return out
    sinks = None if sinks is None else sinks.contiguous()
    lanes = lanes_of(head_dim), lanes_of(value_dim)
    group = num_heads // num_kv_heads
    shape = program_shape(group, max(lanes), query.element_size())
    tiling = tile_tokens(query_start_loc, num_tokens, shape.rows // shape.heads, query.device)
    num_programs = num_kv_heads * triton.cdiv(group, shape.heads)
    if num_splits is None:
        max_keys = block_table.shape[1] * block_size
        num_splits = sizes.num_splits(tiling.num_tiles * num_programs, max_keys, query.device)
    partials = None
    if num_splits > 1:
        shapes = num_tokens, num_heads, num_splits
        peak, total = torch.empty(2, *shapes, device=query.device).unbind()
        attended = torch.empty(*shapes, value_dim, device=query.device)
        partials = PartialArgs(peak, total, attended)
    launch_by_name(
        paged_attention_kernel,
        (tiling.num_tiles, num_programs, num_splits),
        out=out,
        partials=partials,
        query=QueryArgs(
            data=query,
            token_stride=query.stride(0),
            head_stride=query.stride(1),
            slots=slots.contiguous(),
            positions=positions.contiguous(),
            kv_lens=kv_lens.contiguous(),
            num_heads=num_heads,
        ),
        keys=pool_args(key_pool),
        values=pool_args(value_pool),
        table=table_args(block_table),
        rule=rule_args(scale, sliding_window, soft_cap, sinks),
        tile_starts=tiling.starts,
        tile_tokens=tiling.num_tokens,
        num_tokens=num_tokens,
        GROUP=group,
        HEADS=shape.heads,
        BLOCK_SIZE=block_size,
        ROWS=lanes_of(tiling.num_tokens * shape.heads),
        KEYS=shape.keys,
        KEY_DIM=head_dim,
        KEY_LANES=lanes[0],
        VALUE_DIM=value_dim,
        VALUE_LANES=lanes[1],
        PRECISION=shape.precision,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if partials is not None:
        launch_by_name(
            combine_kernel,
            (num_tokens, num_heads),
            out=out,
            partials=partials,
            sinks=sinks,
            SPLITS=num_splits,
            VALUE_DIM=value_dim,
            VALUE_LANES=lanes[1],
        )
    return out
