"""What a request asks of sampling, checked once at admission."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specreg.errors import AdmissionError

__all__ = ["SamplingParams"]

# The one place where "greedy" is decided: below this a division by the temperature overflows in
# half precision. Admission turns such a temperature into exactly 0; kernels only compare with 0.
SMALLEST_TEMPERATURE = 1e-5
SEED_RANGE = (-(2**63), 2**63)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        max_tokens: tokens to emit at most.
        temperature: divides the logits; below 1e-5 it becomes exactly 0, which is greedy.
        top_k: keep the `top_k` most probable tokens; 0 keeps all.
        top_p: keep the smallest set of most probable tokens whose mass reaches `top_p`.
        min_p: keep tokens at least `min_p` times as probable as the most probable one.
        seed: 64-bit seed of every draw; None lets the engine choose one at admission.
        stop: strings that end the output; the output is cut before them.
        stop_token_ids: tokens that end the output, as the end-of-sequence token does.
        ignore_eos: go on after an end-of-sequence token.

    Raises:
        AdmissionError: a value out of range.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature = float(self.temperature)
        self._check(
            "temperature", math.isfinite(temperature) and temperature >= 0, "a finite number >= 0"
        )
        object.__setattr__(
            self, "temperature", 0.0 if temperature < SMALLEST_TEMPERATURE else temperature
        )
        self._check("max_tokens", self.max_tokens >= 1, "an integer >= 1")
        self._check("top_k", self.top_k >= 0, "an integer >= 0; 0 keeps all")
        self._check("top_p", 0 < self.top_p <= 1, "0 < top_p <= 1")
        self._check("min_p", 0 <= self.min_p <= 1, "0 <= min_p <= 1")
        self._check(
            "seed",
            self.seed is None or SEED_RANGE[0] <= self.seed < SEED_RANGE[1],
            "a signed 64-bit integer",
        )
        self._check("stop", all(self.stop), "non-empty strings")

    def _check(self, field: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise AdmissionError(
                f"the sampling parameter {field} is out of range",
                where=f"SamplingParams.{field}",
                got=f"{getattr(self, field)!r}; allowed: {allowed}",
                fix=f"pass {field} within its range",
            )
