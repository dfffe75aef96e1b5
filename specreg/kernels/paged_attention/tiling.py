"""Which packed tokens share a program of `paged_attention`."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specreg.kernels.common.upload import upload

__all__ = ["Tiling", "tile_tokens"]


class Tiling(NamedTuple):
    """Stretches of consecutive tokens that together make up the batch.

    Attributes:
        num_tiles: stretches.
        num_tokens: tokens of the longest one.
        starts: int32 `[num_tiles + 1]` on the device, where each begins; None when all of them but
            the last hold `num_tokens`.
    """

    num_tiles: int
    num_tokens: int
    starts: Tensor | None


def tile_tokens(
    query_start_loc: tuple[int, ...] | None, num_tokens: int, most: int, device: torch.device
) -> Tiling:
    """Group tokens of one request, `most` at a time, as far as the offsets tell.

    Without offsets, or with some that do not span the batch, a token is a tile. Requests of equal
    length need no `starts`; others upload them once, without host synchronisation, and not while a
    CUDA graph is captured: there a token is a tile.
    """
    if query_start_loc is None or num_tokens == 0 or most == 1:
        return Tiling(num_tokens, 1, None)
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return _tile(query_start_loc, num_tokens, most, device, not is_capturing)


@lru_cache(maxsize=16)  # every layer of a step asks for the same
def _tile(
    offsets: tuple[int, ...], num_tokens: int, most: int, device: torch.device, may_upload: bool
) -> Tiling:
    lengths = [stop - start for start, stop in pairwise(offsets)]
    if not lengths or offsets[0] != 0 or offsets[-1] != num_tokens or min(lengths) < 0:
        return Tiling(num_tokens, 1, None)
    longest = max(lengths)
    size = min(longest, most)
    even = max(n for n in range(1, size + 1) if longest % n == 0) if min(lengths) == longest else 1
    if 2 * even > size or not may_upload:
        return Tiling(-(-num_tokens // even), even, None)
    starts = [at for start, stop in pairwise(offsets) for at in range(start, stop, size)]
    bounds = torch.tensor([*starts, num_tokens], dtype=torch.int32)
    return Tiling(len(starts), size, upload(bounds, device))
