"""Options of the method `ngram`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["NgramOptions"]

DEFAULT_LENGTH = 5


class NgramOptions(BaseModel):
    """How many of the newest tokens must have stood together before, as in vLLM.

    Attributes:
        prompt_lookup_min: fewest tokens of a match.
        prompt_lookup_max: most tokens that are compared; a longer match is preferred. When one of
            the two is not given it is the other; when neither is, both are 5.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    prompt_lookup_min: int | None = Field(None, ge=1)
    prompt_lookup_max: int | None = Field(None, ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> NgramOptions:
        low, high = self.lengths
        if low > high:
            raise ValueError(
                f"prompt_lookup_min {low} is above prompt_lookup_max {high}; raise the one or "
                "lower the other"
            )
        return self

    @property
    def lengths(self) -> tuple[int, int]:
        """Fewest and most tokens of a match."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        return low or high or DEFAULT_LENGTH, high or low or DEFAULT_LENGTH
