"""Random numbers of every draw: Philox4x32-10, counter-based, one word stream a purpose.

Key: the whole int64 seed as two words (low, high). Counter:
`(position, step | stream << 16, token, 0)`, where `position` (below 2^31) is that of the token
being decided, `step` (below 2^16) its index in the round and `token` a token id where each token
has a draw of its own, else 0. A word becomes `((word >> 9) + 0.5) * 2^-23`, which is exact in fp32
and lies strictly inside (0, 1).

Streams differ in the second counter word, so draws for different purposes never share a Philox
call. This package imports only torch; the Triton helpers are in `specreg.kernels.random.kernel`.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from specreg.kernels.random.reference import (
    STREAM_ACCEPT,
    STREAM_BONUS,
    STREAM_DRAFT,
    STREAM_RESIDUAL,
    STREAM_TARGET,
    philox4x32_reference,
    random_words_reference,
    uniform_reference,
)

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
