"""The torch twins of `paged_attention` and `write_kv`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specreg.errors import TensorError

__all__ = ["NULL_BLOCK", "paged_attention_reference", "write_kv_reference"]

NULL_BLOCK = 0


def paged_attention_reference(
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
) -> Tensor:
    """See `paged_attention`. Neighbours of one slot form one matrix; synchronises a GPU."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_pool.shape[1:3]
    group = num_heads // num_kv_heads
    queries = query.reshape(num_tokens, num_kv_heads, group, head_dim)
    output = query.new_zeros(num_tokens, num_kv_heads, group, value_pool.shape[-1])
    host_positions: list[int] = positions.tolist()
    host_lens: list[int] = kv_lens.tolist()
    for begin, end, slot in _runs(slots.tolist()):
        if slot < 0:
            continue
        num_rows = end - begin
        stop = max(host_lens[begin:end])
        start = 0
        if sliding_window is not None:
            start = max(0, min(host_positions[begin:end]) - sliding_window + 1)
        blocks = block_table[slot, start // block_size : -(-stop // block_size)]
        inside = slice(start % block_size, start % block_size + stop - start)
        # [num_kv_heads, rows, head_dim]: queries that share a key/value head are rows of a matrix.
        keys = _gather(key_pool, blocks)[inside].transpose(0, 1)
        values = _gather(value_pool, blocks)[inside].transpose(0, 1)
        rows = queries[begin:end].transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
        mask = None
        if num_rows > 1:
            index = torch.arange(start, stop, device=query.device)
            mask = index < kv_lens[begin:end, None]
            if sliding_window is not None:
                mask &= index > positions[begin:end, None] - sliding_window
            mask = mask.repeat_interleave(group, dim=0)
        if soft_cap is None and sinks is None:
            attended = F.scaled_dot_product_attention(
                rows[None], keys[None], values[None], attn_mask=mask, scale=scale
            )[0]
        else:
            sink_column = None
            if sinks is not None:
                sink_column = sinks.view(num_kv_heads, 1, group).expand(-1, num_rows, -1)
                sink_column = sink_column.reshape(num_kv_heads, -1, 1)
            attended = _attend_explicitly(rows, keys, values, mask, scale, soft_cap, sink_column)
        shape = (num_kv_heads, num_rows, group, -1)
        output[begin:end] = attended.reshape(shape).transpose(0, 1)
    return output.flatten(1, 2)


def write_kv_reference(
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """See `write_kv`."""
    block_size = key_pool.shape[1]
    is_live = slots >= 0
    # Padding rows carry any position: they look up entry [0, 0], then go to the null block.
    positions = torch.where(is_live, positions, 0)
    blocks = block_table[slots.clamp(min=0), positions // block_size].long()
    blocks = torch.where(is_live, blocks, NULL_BLOCK)
    if blocks.is_cpu and bool(((blocks == NULL_BLOCK) & is_live).any()):
        row = int(((blocks == NULL_BLOCK) & is_live).nonzero()[0])
        raise TensorError(
            "a key has no block to go to",
            where="write_kv(slots, positions)",
            got=f"slot {int(slots[row])}, position {int(positions[row])}; allowed: positions for "
            "which the host has given the slot a block",
            fix="ensure blocks for every position of the step before it runs, drafts included",
        )
    cells = blocks * block_size + positions % block_size
    key_pool.flatten(0, 1).index_put_((cells,), key)
    value_pool.flatten(0, 1).index_put_((cells,), value)


def _runs(slots: list[int]) -> Iterator[tuple[int, int, int]]:
    """(begin, end, slot) of each longest stretch of equal slots."""
    begin = 0
    for end in range(1, len(slots) + 1):
        if end == len(slots) or slots[end] != slots[begin]:
            yield begin, end, slots[begin]
            begin = end


def _gather(pool: Tensor, blocks: Tensor) -> Tensor:
    """`[len(blocks) * block_size, num_kv_heads, head_dim]`; a view when the blocks lie in a row."""
    ids: list[int] = blocks.tolist()
    first = ids[0]
    if ids == list(range(first, first + len(ids))):
        return pool[first : first + len(ids)].flatten(0, 1)
    return pool[blocks].flatten(0, 1)


def _attend_explicitly(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention `[num_kv_heads, rows, head_dim]` with scores and softmax in fp32 (or wider)."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    scores = rows.to(wide) @ keys.to(wide).transpose(1, 2) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(wide)], dim=-1)
    weights = scores.softmax(-1)[..., : keys.shape[1]]
    return (weights @ values.to(wide)).to(rows.dtype)
