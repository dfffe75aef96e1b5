"""The entry points `paged_attention` and `write_kv`."""

from __future__ import annotations

import torch
from torch import Tensor

from specreg.errors import TensorError
from specreg.kernels.common.checks import FLOATS
from specreg.kernels.common.dispatch import uses_triton
from specreg.kernels.paged_attention.reference import (
    paged_attention_reference,
    write_kv_reference,
)

__all__ = ["paged_attention", "write_kv"]


def paged_attention(
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
) -> Tensor:
    """Attention of packed queries over the paged keys and values of their slots.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        key_pool: `[num_blocks, block_size, num_kv_heads, head_dim]`, the query's dtype; the last
            dimension contiguous, here and in `value_pool`.
        value_pool: `[num_blocks, block_size, num_kv_heads, value_head_dim]`.
        block_table: integers `[max_num_seqs, max_blocks]`; blocks of a slot in order of position.
        slots: int64 `[num_tokens]`; -1 is a padding row.
        positions: int64 `[num_tokens]`.
        kv_lens: int64 `[num_tokens]`, keys visible, at least 1 except on padding rows; a query sees
            `[0, kv_len)`.
        scale: factor on `query @ key`.
        sliding_window: newest keys visible up to a query's own position, itself included.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`.
        sinks: `[num_heads]` logits that join each softmax without a value.
        query_start_loc: host offsets of the requests; a hint that never changes a result.

    Returns:
        `[num_tokens, num_heads, value_head_dim]` in the query's dtype; zero on padding rows.

    On a GPU nothing synchronises with the host (in double precision, which only the twin has, it
    does), and one or two kernels are launched. A row depends on its own slot's keys alone; in its
    last bits also on how many rows and requests the batch has, which decides how sums are split.

    Raises:
        TensorError: shapes, dtypes or devices that do not fit.
    """
    _check("query", query, key_pool, value_pool, block_table, slots, positions)
    beside = {"kv_lens": kv_lens} if sinks is None else {"kv_lens": kv_lens, "sinks": sinks}
    _check_devices("paged_attention", key_pool.device, **beside)
    if kv_lens.shape != slots.shape or kv_lens.dtype != torch.int64:
        raise TensorError(
            "the visible keys are not told for every query",
            where="paged_attention(kv_lens)",
            got=f"{kv_lens.dtype} {list(kv_lens.shape)}; allowed: int64 {list(slots.shape)}",
            fix="pass one number of visible keys a query: positions + 1 where it is causal",
        )
    num_heads, num_kv_heads = query.shape[1], key_pool.shape[2]
    if num_heads % num_kv_heads:
        raise TensorError(
            "query heads cannot be grouped",
            where="paged_attention(query, key_pool)",
            got=f"{num_heads} query heads over {num_kv_heads} key/value heads; allowed: a multiple",
            fix="repeat or drop heads so that each key/value head serves equally many query heads",
        )
    if sinks is not None and sinks.shape != (num_heads,):
        raise TensorError(
            "sinks do not fit the query",
            where="paged_attention(sinks)",
            got=f"shape {tuple(sinks.shape)}; allowed: ({num_heads},)",
            fix="pass one logit a query head",
        )
    if sliding_window is not None and sliding_window < 1:
        raise TensorError(
            "a sliding window hides every key",
            where="paged_attention(sliding_window)",
            got=f"{sliding_window}; allowed: at least 1, or None for no window",
            fix="pass the number of visible keys, the query's own included",
        )
    if _takes_kernel(key_pool):
        from specreg.kernels.paged_attention.kernel import paged_attention_triton

        return paged_attention_triton(
            query,
            key_pool,
            value_pool,
            block_table,
            slots,
            positions,
            kv_lens,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            query_start_loc=query_start_loc,
        )
    return paged_attention_reference(
        query,
        key_pool,
        value_pool,
        block_table,
        slots,
        positions,
        kv_lens,
        scale=scale,
        sliding_window=sliding_window,
        soft_cap=soft_cap,
        sinks=sinks,
    )


def write_kv(
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    slots: Tensor,
    positions: Tensor,
    key: Tensor,
    value: Tensor,
) -> None:
    """Store `key` and `value` of packed tokens at their (slot, position), over what was there.

    Rows with slot -1 write nothing that is ever read: they go to the null block. On a GPU there is
    no host synchronisation.

    Args:
        key_pool, value_pool: as in `paged_attention`; mutated.
        block_table: as in `paged_attention`.
        slots: int64 `[num_tokens]`; -1 is a padding row, whose position may be anything.
        positions: int64 `[num_tokens]`.
        key: `[num_tokens, num_kv_heads, head_dim]`, the pool's dtype.
        value: `[num_tokens, num_kv_heads, value_head_dim]`, likewise.

    Raises:
        TensorError: shapes, dtypes or devices that do not fit; on a CPU also a position without a
            block, before anything is written.
    """
    _check("key", key, key_pool, value_pool, block_table, slots, positions)
    if key.shape[1] != key_pool.shape[2] or value.shape[1:] != value_pool.shape[2:]:
        raise TensorError(
            "keys or values do not fit the pool",
            where="write_kv(key, value)",
            got=f"{tuple(key.shape)} and {tuple(value.shape)}; allowed: (num_tokens, "
            f"{key_pool.shape[2]}, {key_pool.shape[3]}) and (num_tokens, {value_pool.shape[2]}, "
            f"{value_pool.shape[3]})",
            fix="allocate the pool with this layer's number of key/value heads and head dim",
        )
    if _takes_kernel(key_pool):
        from specreg.kernels.paged_attention.write.kernel import write_kv_triton as implementation
    else:
        implementation = write_kv_reference
    implementation(key_pool, value_pool, block_table, slots, positions, key, value)


def _takes_kernel(pool: Tensor) -> bool:
    """Whether the Triton kernel serves this pool: it has no double precision."""
    return uses_triton(pool.device) and pool.dtype in FLOATS


def _check(
    name: str,
    tensor: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    block_table: Tensor,
    slots: Tensor,
    positions: Tensor,
) -> None:
    """Refuse what would read or write the wrong cell."""
    if (
        tensor.dim() != 3
        or key_pool.dim() != 4
        or tensor.shape[2] != key_pool.shape[3]
        or key_pool.shape[:3] != value_pool.shape[:3]
        or slots.shape != tensor.shape[:1]
        or positions.shape != tensor.shape[:1]
    ):
        raise TensorError(
            f"{name}, pools and rows do not fit each other",
            where=f"{name}, key_pool, value_pool, slots, positions",
            got=f"{tuple(tensor.shape)}, {tuple(key_pool.shape)}, {tuple(value_pool.shape)}, "
            f"{tuple(slots.shape)}, {tuple(positions.shape)}; allowed: "
            "[num_tokens, heads, head_dim], [num_blocks, block_size, num_kv_heads, head_dim] "
            "twice, [num_tokens] twice",
            fix="pass packed tokens, one slot and one position each, of the pool's head dim",
        )
    if tensor.dtype != key_pool.dtype or tensor.device != key_pool.device:
        raise TensorError(
            f"{name} and pool differ in dtype or device",
            where=name,
            got=f"{tensor.dtype} on {tensor.device}; "
            f"allowed: {key_pool.dtype} on {key_pool.device}",
            fix="cast it, or allocate the pool in the layer's dtype",
        )
    if value_pool.dtype != key_pool.dtype or key_pool.stride(3) != 1 or value_pool.stride(3) != 1:
        raise TensorError(
            "pools of keys and values do not fit the op",
            where="key_pool, value_pool",
            got=f"{key_pool.dtype} and {value_pool.dtype}, strides {key_pool.stride()} and "
            f"{value_pool.stride()}; allowed: one dtype, stride 1 in the last dimension",
            fix="allocate both pools alike, with a head's elements next to each other",
        )
    addresses = {"slots": slots, "positions": positions, "block_table": block_table}
    _check_devices(name, key_pool.device, **addresses)
    if (
        slots.dtype != torch.int64
        or positions.dtype != torch.int64
        or block_table.is_floating_point()
    ):
        raise TensorError(
            "addresses are not integers of 64 bits",
            where="slots, positions, block_table",
            got=f"{slots.dtype}, {positions.dtype}, {block_table.dtype}; "
            "allowed: int64, int64, int32 or int64",
            fix="convert them before the call",
        )


def _check_devices(where: str, device: torch.device, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise TensorError(
                "a tensor is not where the pools are",
                where=f"{where}, {name}",
                got=f"{tensor.device}; allowed: {device}",
                fix="move it before the call: nothing is copied between devices here",
            )
