"""How `paged_attention` is laid out on a device: sizes and number of its programs."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from specreg.ownership import cdiv

__all__ = ["KEYS_PER_SPLIT", "ProgramShape", "lanes_of", "num_splits", "program_shape"]

MAX_SPLITS = 32
KEYS_PER_SPLIT = 256  # at least: fewer are read faster than partial results are combined
# `python benchmarks/paged_attention.py --sweep`, one H200, bf16: 64 requests of 8 queries and 4,096
# keys take 367 us with 2 and 404 with 4; with more programs of 128 keys than fit at once, the rest
# waits.
PROGRAMS_PER_PROCESSOR = 2
MIN_LANES = 16  # of each side of a matrix product in Triton
IS_HIP = torch.version.hip is not None


class ProgramShape(NamedTuple):
    """Sizes of one program.

    Attributes:
        rows: of its matrix products, tokens times heads.
        heads: query heads of one key/value head.
        keys: read at a time.
        num_warps, num_stages: as in a Triton launch.
        precision: of products of fp32, as in `tl.dot`.
    """

    rows: int
    heads: int
    keys: int
    num_warps: int
    num_stages: int
    precision: str = "ieee"


def lanes_of(size: int) -> int:
    """Lanes that hold a head: a power of two, enough for a matrix product."""
    return max(MIN_LANES, 1 << (size - 1).bit_length())


def program_shape(group: int, lanes: int, itemsize: int, is_hip: bool = IS_HIP) -> ProgramShape:
    """Sizes for `group` query heads a key/value head whose heads take at most `lanes` lanes.

    `rows` is the most; fewer tokens than fit need fewer. What differs on ROCm is smaller there:
    its shared memory is 64 KiB.

    `python benchmarks/paged_attention.py --sweep`, one H200, 64 requests, us:

    - bf16, head 128, 4,096 keys: 128 keys at a time take 284 for 1 query and 376 for 8, 64 keys
      332 and 401.
    - bf16, 16 heads of 512 on one key/value head, 4 queries, 4,096 keys: 64 rows take 341 with 32
      keys at a time, 32 rows 515, 16 rows 777, and 1,217 with 16 keys.
    - fp32, head 128, 4 queries, 1,024 keys: three products of tf32, whose errors together are those
      of fp32, take 232, full precision 780, without tensor cores. Larger heads spill registers.
    """
    precision = "ieee"
    if itemsize == 4:
        rows, keys, stages = 16, 32 if lanes <= 128 else 16, 2
        if lanes <= 128 and not is_hip:
            stages, precision = 3, "tf32x3"
    elif lanes <= 128:
        rows, keys, stages = 64, 64 if is_hip else 128, 3
    elif lanes <= 256:
        rows, keys, stages = 32, 32, 3
    else:
        rows, keys, stages = (16, 16, 3) if is_hip else (64, 32, 2)
    num_warps = 4 if lanes <= 256 else 8
    return ProgramShape(rows, min(group, rows), keys, num_warps, stages, precision)


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
