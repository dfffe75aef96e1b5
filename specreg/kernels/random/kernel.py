"""Philox4x32-10 for Triton kernels: device helpers around `tl.philox`."""

import triton
import triton.language as tl

from specreg.kernels.random import reference

__all__ = [
    "STREAM_ACCEPT",
    "STREAM_BONUS",
    "STREAM_DRAFT",
    "STREAM_RESIDUAL",
    "STREAM_TARGET",
    "random_words",
    "uniform",
]

STREAM_DRAFT = tl.constexpr(reference.STREAM_DRAFT)
STREAM_ACCEPT = tl.constexpr(reference.STREAM_ACCEPT)
STREAM_RESIDUAL = tl.constexpr(reference.STREAM_RESIDUAL)
STREAM_BONUS = tl.constexpr(reference.STREAM_BONUS)
STREAM_TARGET = tl.constexpr(reference.STREAM_TARGET)


@triton.jit
def random_words(seed, position, step, stream, token=0):
    """Four uint32 words for one or more draws.

    `seed` is int64; the other values are integers of any type that fit their counter word.
    `position` and `step` are tensors (a scalar loaded from memory is one).
    """
    word = position.to(tl.uint32)
    zero = word * 0
    return tl.philox(
        seed, word, (step | (stream << 16)).to(tl.uint32), (zero + token).to(tl.uint32), zero
    )


@triton.jit
def uniform(word):
    """fp32 strictly inside (0, 1) from a random word."""
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07
