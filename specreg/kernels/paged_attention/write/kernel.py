"""`write_kv` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specreg.kernels.paged_attention.arguments import (
    PoolArgs,
    launch_by_name,
    packed,
    pool_args,
    table_args,
)
from specreg.kernels.paged_attention.sizes import lanes_of

__all__ = ["write_kv_triton"]

CELLS_PER_PROGRAM = 4096


@triton.jit
def write_kv_kernel(
    keys,
    values,
    table,
    slots,
    positions,
    key,
    value,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    KEY_LANES: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_LANES: tl.constexpr,
):
    """Program (token, i): copy HEADS heads of a token to its cell; nothing for padding."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    column = position // BLOCK_SIZE
    if (slot < 0) | (column >= table.num_columns):
        return
    block = tl.load(table.blocks + slot * table.slot_stride + column).to(tl.int64)
    cell = position % BLOCK_SIZE
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    d = tl.arange(0, KEY_LANES)[None, :]
    mask = (head < NUM_HEADS) & (d < KEY_DIM)
    data = tl.load(key.data + token * key.cell_stride + head * key.head_stride + d, mask=mask)
    at = block * keys.block_stride + cell * keys.cell_stride + head * keys.head_stride
    tl.store(keys.data + at + d, data, mask=mask)
    e = tl.arange(0, VALUE_LANES)[None, :]
    mask = (head < NUM_HEADS) & (e < VALUE_DIM)
    data = tl.load(value.data + token * value.cell_stride + head * value.head_stride + e, mask=mask)
    at = block * values.block_stride + cell * values.cell_stride + head * values.head_stride
    tl.store(values.data + at + e, data, mask=mask)


def write_kv_triton(
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Launch on the current stream: one kernel. No host synchronisation."""
    if len(slots) == 0:
        return
    key, value = packed(key), packed(value)
    num_heads, head_dim = key.shape[1:]
    lanes = lanes_of(head_dim), lanes_of(value.shape[2])
    heads = min(triton.next_power_of_2(num_heads), max(1, CELLS_PER_PROGRAM // max(lanes)))
    launch_by_name(
        write_kv_kernel,
        (len(slots), triton.cdiv(num_heads, heads)),
        keys=pool_args(key_pool),
        values=pool_args(value_pool),
        table=table_args(block_table),
        slots=slots.contiguous(),
        positions=positions.contiguous(),
        key=PoolArgs(key, 0, key.stride(0), key.stride(1)),
        value=PoolArgs(value, 0, value.stride(0), value.stride(1)),
        NUM_HEADS=num_heads,
        BLOCK_SIZE=key_pool.shape[1],
        HEADS=heads,
        KEY_DIM=head_dim,
        KEY_LANES=lanes[0],
        VALUE_DIM=value.shape[2],
        VALUE_LANES=lanes[1],
    )
