"""Arguments of the kernels of paged attention, in groups, and their launch by keyword."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from specreg.kernels.common.launch import launch, specialisation

__all__ = [
    "LOG2E",
    "PartialArgs",
    "PoolArgs",
    "QueryArgs",
    "RuleArgs",
    "TableArgs",
    "launch_by_name",
    "packed",
    "pool_args",
    "rule_args",
    "table_args",
]

LOG2E = 1.4426950408889634


class QueryArgs(NamedTuple):
    """Packed queries and, a token, their addresses."""

    data: Tensor
    token_stride: int
    head_stride: int
    slots: Tensor
    positions: Tensor
    kv_lens: Tensor
    num_heads: int


class PoolArgs(NamedTuple):
    """A pool of keys or of values."""

    data: Tensor
    block_stride: int
    cell_stride: int
    head_stride: int


class TableArgs(NamedTuple):
    """Blocks of each slot."""

    blocks: Tensor
    slot_stride: int
    num_columns: int


class RuleArgs(NamedTuple):
    """How keys are weighed. Weights are powers of 2: what multiplies a score last holds log2(e)."""

    scale: float
    soft_cap: float | None
    sliding_window: int | None
    sinks: Tensor | None


class PartialArgs(NamedTuple):
    """What splits leave: peak and denominator of the softmax `[tokens, heads, splits]`, weighted
    values `[tokens, heads, splits, value_head_dim]`; all fp32."""

    peak: Tensor
    total: Tensor
    attended: Tensor


def pool_args(pool: Tensor) -> PoolArgs:
    """The kernel argument for a pool whose last dimension is contiguous."""
    return PoolArgs(pool, pool.stride(0), pool.stride(1), pool.stride(2))


def rule_args(
    scale: float, sliding_window: int | None, soft_cap: float | None, sinks: Tensor | None
) -> RuleArgs:
    """The kernel argument for the options of `paged_attention`."""
    if soft_cap is None:
        return RuleArgs(scale * LOG2E, None, sliding_window, sinks)
    return RuleArgs(scale / soft_cap, soft_cap * LOG2E, sliding_window, sinks)


def packed(rows: Tensor) -> Tensor:
    """`rows` with stride 1 between the elements of a head."""
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def table_args(block_table: Tensor) -> TableArgs:
    """The kernel argument for a block table."""
    block_table = packed(block_table)
    return TableArgs(block_table, block_table.stride(0), block_table.shape[1])


def launch_by_name(
    kernel: Any,
    grid: tuple[int, ...],
    *,
    num_warps: int = 4,
    num_stages: int = 3,
    tile_tokens: int = 0,
    num_tokens: int = 0,
    **arguments: Any,
) -> None:
    """Launch by keyword; nothing is compiled anew for `tile_tokens` and `num_tokens`."""
    key = specialisation(*arguments.values())
    arguments |= {"tile_tokens": tile_tokens, "num_tokens": num_tokens}
    ordered = tuple(arguments[name] for name in kernel.arg_names)
    launch(kernel, grid, ordered, key, num_warps, num_stages=num_stages)
