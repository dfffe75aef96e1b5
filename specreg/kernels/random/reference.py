"""Philox4x32-10 in torch: uint32 words in int64 tensors, bit for bit what `tl.philox` computes."""

from __future__ import annotations

from torch import Tensor

__all__ = [
    "STREAM_ACCEPT",
    "STREAM_BONUS",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "STREAM_TARGET",
    "Words",
    "philox4x32_reference",
    "random_words_reference",
    "uniform_reference",
]

STREAM_DRAFT = 0  # a draft token
STREAM_ACCEPT = 1  # the uniform that accepts or rejects a draft token
STREAM_RESIDUAL = 2  # the token in place of a rejected draft
STREAM_BONUS = 3  # the token after K accepted drafts
STREAM_TARGET = 4  # a plain draw from the target

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10


def philox4x32_reference(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor | int, Tensor | int, Tensor | int, int]
) -> Words:
    """Ten rounds of Philox4x32 for words that broadcast against each other.

    Args:
        key: two int64 tensors of uint32 values, low word first.
        counter: four words, tensors of uint32 values in int64 or plain integers.

    Returns:
        Four int64 tensors of uint32 values.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(_NUM_ROUNDS):
        # The product needs 64 unsigned bits; int64 wraps to the same pattern.
        product0 = (k0 * 0 + c0) * _MULTIPLIERS[0]
        product1 = (k0 * 0 + c2) * _MULTIPLIERS[1]
        c0 = ((product1 >> 32) & _MASK) ^ c1 ^ k0
        c2 = ((product0 >> 32) & _MASK) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_words_reference(
    seeds: Tensor, positions: Tensor, steps: Tensor | int, stream: int, tokens: Tensor | int = 0
) -> Words:
    """Four random words for each (seed, position, step, token) of one stream.

    Args:
        seeds: int64, any value.
        positions: int64, position of the token being decided, below 2^31.
        steps: int64, index of the token in its round, below 2^16.
        stream: one of the `STREAM_*` constants.
        tokens: int64 token ids where each token has a draw of its own; 0 otherwise.

    Returns:
        Four int64 tensors of uint32 values, of the arguments' broadcast shape.
    """
    key = (seeds & _MASK, (seeds >> 32) & _MASK)
    return philox4x32_reference(key, (positions, steps | (stream << 16), tokens, 0))


def uniform_reference(words: Tensor) -> Tensor:
    """fp32 uniforms strictly inside (0, 1) from random words: `((word >> 9) + 0.5) * 2^-23`."""
    return ((words >> 9).float() + 0.5) * 2.0**-23
