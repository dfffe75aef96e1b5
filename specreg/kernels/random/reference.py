"""Philox4x32-10 in torch: uint32 words in int64 tensors, bit for bit what `tl.philox` computes."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = [
    "STREAM_ACCEPT",
    "STREAM_BONUS",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "STREAM_TARGET",
    "philox4x32_reference",
    "random_words_reference",
    "uniform_reference",
]

STREAM_DRAFT = 0  # a draft token
STREAM_ACCEPT = 1  # the uniform that accepts or rejects a draft token
STREAM_RESIDUAL = 2  # the token in place of a rejected draft
STREAM_BONUS = 3  # the token after K accepted drafts
STREAM_TARGET = 4  # a plain draw from the target

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32_reference(key: Tensor, counter: Tensor) -> Tensor:
    """Ten rounds of Philox4x32.

    Args:
        key: int64 `[2, ...]` of uint32 values, low word first.
        counter: int64 `[4, ...]` of uint32 values.

    Returns:
        int64 `[4, ...]` of uint32 values.
    """
    ones = (1,) * (counter.ndim - 1)
    multipliers = counter.new_tensor(_MULTIPLIERS).view(2, *ones)
    weyl = counter.new_tensor(_WEYL).view(2, *ones)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_NUM_ROUNDS):
        # The product needs 64 unsigned bits; int64 wraps to the same pattern.
        product = (even * multipliers).flip(0)
        even, odd = ((product >> 32) ^ odd ^ key) & _MASK, product & _MASK
        key = (key + weyl) & _MASK
    return torch.stack((even, odd), 1).flatten(0, 1)


def random_words_reference(
    seeds: Tensor,
    positions: Tensor,
    steps: Tensor | int,
    stream: Tensor | int,
    tokens: Tensor | int = 0,
) -> Tensor:
    """Four random words for each (seed, position, step, token) of one stream.

    Args:
        seeds: int64, any value.
        positions: int64, position of the token being decided, below 2^31.
        steps: int64, index of the token in its round, below 2^16.
        stream: one of the `STREAM_*` constants, or a tensor of them.
        tokens: int64 token ids where each token has a draw of its own; 0 otherwise.

    Returns:
        int64 `[4, ...]` of uint32 values, over the broadcast shape of the arguments.
    """
    zero = (seeds + positions + steps + stream + tokens) * 0
    seeds = seeds + zero
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK))
    counter = (zero + positions, zero + (steps | (stream << 16)), zero + tokens, zero)
    return philox4x32_reference(key, torch.stack(counter))


def uniform_reference(words: Tensor) -> Tensor:
    """fp32 uniforms strictly inside (0, 1) from random words: `((word >> 9) + 0.5) * 2^-23`."""
    return ((words >> 9).float() + 0.5) * 2.0**-23
