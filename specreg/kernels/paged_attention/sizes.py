"""How `paged_attention` is laid out on a device: sizes and number of its programs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from specreg.ownership import cdiv

__all__ = ["KEYS_PER_SPLIT", "ProgramShape", "lanes_of", "num_splits", "program_shape"]

MAX_SPLITS = 32
KEYS_PER_SPLIT = 256  # at least: fewer are read faster than partial results are combined
PROGRAMS_PER_PROCESSOR = 4
MIN_LANES = 16  # of each side of a matrix product in Triton
# How fp32 is multiplied: in three products of tf32, whose errors are those of fp32, where there are
# tensor cores for it.
PRECISION = "tf32x3" if torch.version.hip is None else "ieee"


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
