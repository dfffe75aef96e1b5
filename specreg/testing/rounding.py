"""What forward passes of other shapes may change, by the dtype of weights and states."""

from __future__ import annotations

from typing import NamedTuple

from specreg.errors import ConfigError
from specreg.spelling import known_names

__all__ = ["Rounding", "rounding_of"]


class Rounding(NamedTuple):
    """How far results may be apart whose last bits differ. A fault moves far more.

    Attributes:
        smallest_gap: between the two best logits, below which a greedy token is a tie.
        num_requests: requests of a call that may go another way.
        share_drafts: share of the common proposals that may differ.
    """

    smallest_gap: float
    num_requests: int
    share_drafts: float


# The kit's logits are below 8 in magnitude: their last bit is 2^-5 in bf16, 2^-8 in fp16.
_ROUNDING = {
    "float32": Rounding(1e-4, 1, 0.02),
    "float16": Rounding(2e-2, 2, 0.1),
    "bfloat16": Rounding(1.5e-1, 4, 0.4),
}


def rounding_of(dtype: str) -> Rounding:
    """For a dtype by name; `"auto"` is fp32. Raises `ConfigError`."""
    name = "float32" if dtype == "auto" else dtype
    if name not in _ROUNDING:
        raise ConfigError(
            "the kit proves nothing in this dtype",
            where="Subject.dtype",
            got=f"{dtype!r}; {known_names(dtype, _ROUNDING)}",
            fix="name one of these",
        )
    return _ROUNDING[name]
