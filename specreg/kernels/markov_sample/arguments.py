"""Arguments of the `markov_sample` kernels, grouped, and the shape of their programs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["BaseArgs", "HeadArgs", "ReqArgs", "SizeArgs", "StepArgs", "Tile", "tile_of"]

# One H200, `python benchmarks/markov_sample.py --sweep`: 5 steps of 129,280 columns in bf16, rank
# 256, 4 shards, us of a call by rows x columns. 8 requests: 16 x 64 109, 32 x 64 121, 16 x 128 123,
# 64 x 64 137. 64 requests: 64 x 64 178, 64 x 128 207, 32 x 64 213, 16 x 64 296. What counts is that
# two programs fit on a multiprocessor; with 128 rows W1 alone takes 64 KiB of shared memory.
ROWS = (16, 32, 64)
COLUMNS = 64
NUM_WARPS = 8


class StepArgs(NamedTuple):
    """What steps write, and hand to the step after them.

    Attributes:
        tokens: int64 `[num_reqs, num_steps]`.
        num_nans: int32 by slot, or None.
        blocks: int64 `[num_reqs, num_blocks]`: largest logit of each block, and its mass; of
            greedy drafts the lane of that logit, complemented where the block holds a NaN.
        scratch: logits of the rows that are in no cell of this rank, or None.
        scratch_stride: elements between its rows.
        counters: int64 `[num_steps]`: draws claimed, and above 32 bits draws done.
    """

    tokens: Tensor
    num_nans: Tensor | None
    blocks: Tensor
    scratch: Tensor | None
    scratch_stride: int
    counters: Tensor


class BaseArgs(NamedTuple):
    """Base logits; strides in elements."""

    logits: Tensor
    req_stride: int
    step_stride: int


class ReqArgs(NamedTuple):
    """Three values a request and two a slot; `temperature` is None when every draft is greedy."""

    idx_mapping: Tensor
    anchors: Tensor
    positions: Tensor
    seeds: Tensor
    temperature: Tensor | None


class HeadArgs(NamedTuple):
    """The Markov head; `scale` and `soft_cap` are None where they change nothing."""

    w1: Tensor
    w1_stride: int
    w2: Tensor
    num_ids: int
    scale: float | None
    soft_cap: float | None


class SizeArgs(NamedTuple):
    """Sizes; those of columns and blocks as of `specreg.kernels.drafting.args.Store`."""

    num_reqs: int
    num_steps: int
    num_columns: int
    width: int
    num_blocks: int


class Tile(NamedTuple):
    """How a program takes a block of columns for some requests.

    Attributes:
        rows: requests.
        columns: of the block at a time.
        chunk: of the rank, multiplied at a time.
        num_warps, num_stages: of a launch.
        maxnreg: registers of a thread that leave room for two programs; None for no such limit.
    """

    rows: int
    columns: int
    chunk: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None


def tile_of(num_reqs: int, rank: int, dtype: torch.dtype, *, is_hip: bool) -> Tile:
    """Shape of the programs; it shows in no bit, for sums run over the rank in the same order.

    Args:
        num_reqs: of the batch.
        rank, dtype: of the tables.
        is_hip: whether there are 64 KiB of shared memory instead of 227.
    """
    chunk = max(16, 1 << (rank - 1).bit_length())
    if dtype is torch.float32:  # no tensor cores, so operands wait in registers
        return Tile(16, COLUMNS, min(chunk, 32), NUM_WARPS, 1)
    if is_hip:  # other numbers of rows may mean other matrix instructions
        return Tile(16, COLUMNS, min(chunk, 128), NUM_WARPS, 1)
    rows = next((most for most in ROWS if num_reqs <= most), ROWS[-1])
    if chunk > 256:
        return Tile(min(rows, 32), COLUMNS, 128, NUM_WARPS, 1)
    num_stages = 3 if rows == 16 else 2
    return Tile(rows, COLUMNS, chunk, NUM_WARPS, num_stages, min(255, 1024 // NUM_WARPS))
