"""How `paged_attention` is laid out on a device: arguments in groups, sizes of its programs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.ownership import cdiv

__all__ = [
    "KEYS_PER_SPLIT",
    "LOG2E",
    "PartialArgs",
    "PoolArgs",
    "ProgramShape",
    "QueryArgs",
    "RuleArgs",
    "TableArgs",
    "lanes_of",
    "num_splits",
    "pool_args",
    "program_shape",
    "rule_args",
]

LOG2E = 1.4426950408889634
MAX_SPLITS = 32
KEYS_PER_SPLIT = 256  # at least: fewer are read faster than partial results are combined
PROGRAMS_PER_PROCESSOR = 4
MIN_LANES = 16  # of each side of a matrix product in Triton


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


class ProgramShape(NamedTuple):
    """Sizes of one program.

    Attributes:
        rows: of its matrix products, tokens times heads.
        heads: query heads of one key/value head.
        keys: read at a time.
        num_warps, num_stages: as in a Triton launch.
    """

    rows: int
    heads: int
    keys: int
    num_warps: int
    num_stages: int


def lanes_of(size: int) -> int:
    """Lanes that hold a head: a power of two, enough for a matrix product."""
    return max(MIN_LANES, 1 << (size - 1).bit_length())


def program_shape(group: int, lanes: int, itemsize: int) -> ProgramShape:
    """Sizes for `group` query heads a key/value head whose heads take at most `lanes` lanes.

    `rows` is the most; fewer tokens than fit need fewer.
    """
    if itemsize == 4:  # fp32 products are not for tensor cores: keep operands in registers
        rows, keys, stages = 16, 32 if lanes <= 128 else 16, 2
    elif lanes <= 128:
        rows, keys, stages = 64, 64, 3
    else:
        rows, keys, stages = (32, 32, 3) if lanes <= 256 else (16, 16, 3)
    return ProgramShape(rows, min(group, rows), keys, 4 if lanes <= 256 else 8, stages)


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(num_programs: int, max_keys: int, device: torch.device) -> int:
    """Programs that share the keys of one tile: a power of two, for static sizes alone.

    Enough that `num_programs` tiles fill the device, at most `MAX_SPLITS`, and none that a request
    of `max_keys` would leave without work.
    """
    most = min(MAX_SPLITS, cdiv(max_keys, KEYS_PER_SPLIT))
    wanted = cdiv(PROGRAMS_PER_PROCESSOR * _num_processors(device), max(num_programs, 1))
    return 1 << (min(most, wanted).bit_length() - 1)


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
